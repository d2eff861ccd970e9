//! The gRPC API: the proto's services, with reflection and health. A handler converts messages and
//! calls an operation of `api`.

mod count;
mod not_ready;
mod operator;
mod others;
mod stream;
mod tasks;
mod topics;
mod topologies;
mod trees;
mod waiting;
mod watch;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::{Request as HttpRequest, Response as HttpResponse, StatusCode, header, request};
use futures::FutureExt as _;
use taskd_proto::codec;
use tokio::net::TcpListener;
use tonic::{Code, Request, Response, Status, body::Body, codegen::Service as _, service::Routes};
use tonic_health::{ServingStatus, server::HealthReporter};
use tonic_reflection::server::Error as ReflectionError;

pub(super) use self::not_ready::refuse;
use self::{
    count::{Refused, Shape, Shapes, count},
    others::{Others, is_probe},
    watch::{Events, events},
};
use super::{
    State,
    authenticate::authenticate,
    measure,
    net::body::{Counted, Cut, Pace},
    net::budget::Share,
    net::connection::{Answering, Handlers, Stay},
    net::descriptors,
    net::listener::{self, Door, strangers_stay},
    operations, refused,
    tally::{Excess, Tally},
    traced,
};
use crate::{
    api::{self, Api, Kind},
    config::Settings,
    model::{Access, Caller, ChangeTasks, Client, NewTask, Protocol, Role, TaskPages},
    wire::{
        insert_wait,
        pb::{
            self,
            discovery_server::{Discovery, DiscoveryServer},
            operator_server::OperatorServer,
            tasks_server::TasksServer,
            topics_server::TopicsServer,
            topologies_server::TopologiesServer,
            trees_server::TreesServer,
        },
    },
};

/// How fast the message of a call must arrive.
const PACE: Pace = Pace {
    silence: Duration::from_secs(30),
    whole: Duration::from_secs(120),
};

/// The largest message to reflection or health, which need no token and take only a name or a few.
const MAX_BYTES_WITHOUT_TOKEN: usize = 4 << 10;

/// Serves until `state.stop`, then finishes the calls in flight.
pub async fn serve(listener: TcpListener, state: State) -> Result<(), ReflectionError> {
    let (services, health) = services(&state).await?;
    let answering = Answering {
        protocol: Protocol::Grpc,
        tls: state.tls.clone(),
        handlers: Arc::new(services),
        budget: state.budget.clone(),
        pace: |head| (stay(head) == Stay::No || is_probe(head.uri.path())).then_some(PACE),
        stay,
        max_message: Some(state.settings.limits.max_request_bytes),
        wrap: |cut| Box::new(Status::from(cut)),
        stop: state.stop.clone(),
    };
    let max_connections = descriptors::for_each_listener(&state.settings);
    let stopping = async {
        state.stop.cancelled().await;
        // Load balancers switch to other processes while taskd answers the last calls.
        set_health(
            &health,
            &[DISCOVERY, TASKS, TOPICS, TOPOLOGIES, TREES, OPERATOR, WHOLE],
            ServingStatus::NotServing,
        )
        .await;
    };
    let api = Arc::clone(&state.api);
    let door = Door {
        name: "gRPC",
        answering,
        max_connections,
        strangers_stay: strangers_stay(&state.settings),
        is_valid: Arc::new(move |access| api.is_valid(access)),
        without_room: None,
    };
    tokio::join!(listener::serve(listener, door), stopping);
    Ok(())
}

/// Reflection and health are streams, and so are sessions. All other calls of taskd have one
/// message.
fn stay(head: &request::Parts) -> Stay {
    match head.uri.path() {
        "/taskd.v1.Tasks/StreamTasks" => Stay::Stream,
        path if may_stay_at(path) => Stay::Small,
        _ => Stay::No,
    }
}

/// True for a call that is not one of taskd's.
fn may_stay_at(path: &str) -> bool {
    !path.starts_with("/taskd.v1.")
}

/// A method of taskd.
struct Method {
    /// Including its service.
    name: &'static str,
    role: Role,
    /// The parts of its request that are counted.
    shape: Arc<Shape>,
}

/// The methods of the operations.
fn methods() -> Vec<Method> {
    let shapes = Shapes::new();
    let mut methods = Vec::new();
    for operation in operations::all() {
        if let (Some(name), Some(role)) = (operation.grpc, operation.role) {
            let shape = shapes.of(name);
            methods.push(Method { name, role, shape });
        }
    }
    methods
}

/// The services, and what a call needs on its way to one of them.
///
/// The services are separate fields, because with a general router in front of them a call with one
/// task takes 3 % more CPU.
struct Services {
    settings: Arc<Settings>,
    api: Arc<Api>,
    methods: Vec<Method>,
    discovery: DiscoveryServer<Service>,
    tasks: TasksServer<Service>,
    topics: TopicsServer<Service>,
    topologies: TopologiesServer<Service>,
    trees: TreesServer<Service>,
    operator: OperatorServer<Service>,
    others: Others,
}

impl Handlers for Arc<Services> {
    type Body = Body;

    /// Authenticates a call, counts the parts of its message before it is decoded, and records its
    /// duration.
    async fn answer(self, request: HttpRequest<Counted>) -> HttpResponse<Body> {
        // A web page may send other types without asking, but this one only if taskd agrees, which
        // it never does.
        let kind = request.headers().get(header::CONTENT_TYPE);
        if !kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
            let mut refused = HttpResponse::new(Body::empty());
            *refused.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return refused;
        }
        let path = request.uri().path();
        let known = self
            .methods
            .iter()
            .find(|method| path.strip_prefix('/') == Some(method.name));
        let Some(method) = known else {
            if may_stay_at(path) {
                // Boxed, so that the futures of taskd's own calls do not need space for these.
                return measured(measure::OTHER, Box::pin(self.others.answer(request))).await;
            }
            return Status::unimplemented(format!("there is no method {path}")).into_http();
        };
        measured(method.name, self.call(method, request)).await
    }
}

impl Services {
    async fn call(&self, method: &Method, request: HttpRequest<Counted>) -> HttpResponse<Body> {
        let &Method { name, role, .. } = method;
        let shape = Arc::clone(&method.shape);
        let (mut head, body) = request.into_parts();
        let client: Client = *head
            .extensions
            .get()
            .expect("the connection gives each request its client");
        if let Err(error) = authenticate(&self.api, &head.headers, &mut head.extensions, role).await
        {
            let refused = Status::from(error).into_http();
            log_refusal(&refused, &client, None, name);
            return refused;
        }
        let access = head
            .extensions
            .get()
            .map(|caller: &Caller| caller.access.clone());
        let share: Share = head
            .extensions
            .get()
            .cloned()
            .expect("each request has a share");
        let settings = Arc::clone(&self.settings);
        let inspect = move |message: &[u8]| {
            let mut tally = Tally::new(&settings, &share, message.len());
            count(message, &shape, &mut tally)?;
            tally.keep();
            Ok(())
        };
        let request = HttpRequest::from_parts(head, body);
        let answer = match name.split_once('/') {
            Some((DISCOVERY, _)) => self.discovery.clone().call(request),
            Some((TASKS, _)) => self.tasks.clone().call(request),
            Some((TOPICS, _)) => self.topics.clone().call(request),
            Some((TOPOLOGIES, _)) => self.topologies.clone().call(request),
            Some((TREES, _)) => self.trees.clone().call(request),
            _ => self.operator.clone().call(request),
        };
        let Ok(response) = codec::inspected(Arc::new(inspect), answer).await;
        log_refusal(&response, &client, access.as_ref(), name);
        response
    }
}

/// Logs an answer that is a refusal. Such an answer has its status in its head.
fn log_refusal(
    answer: &HttpResponse<Body>,
    client: &Client,
    access: Option<&Access>,
    method: &str,
) {
    let Some(status) = Status::from_header_map(answer.headers()) else {
        return;
    };
    let as_http = match status.code() {
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        _ => return,
    };
    refused::log(as_http, client, access, method, status.message());
}

fn measured(
    method: &'static str,
    answer: impl Future<Output = HttpResponse<Body>>,
) -> impl Future<Output = HttpResponse<Body>> {
    let started = Instant::now();
    answer.inspect(move |response| measure::grpc(method, response, started))
}

const DISCOVERY: &str = "taskd.v1.Discovery";
const TASKS: &str = "taskd.v1.Tasks";
const TOPICS: &str = "taskd.v1.Topics";
const TOPOLOGIES: &str = "taskd.v1.Topologies";
const TREES: &str = "taskd.v1.Trees";
const OPERATOR: &str = "taskd.v1.Operator";
/// The health of the server as a whole.
const WHOLE: &str = "";

/// Makes the services. One whose pipeline this process does not run says so, and is not healthy.
async fn services(state: &State) -> Result<(Services, HealthReporter), ReflectionError> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let api = &state.api;
    let (discovery, tasks, operator) = (
        api.discovery.is_some(),
        api.tasks.is_some(),
        api.query.is_some(),
    );
    for (service, runs) in [
        (DISCOVERY, discovery),
        (TASKS, tasks),
        (TOPICS, operator),
        (TOPOLOGIES, operator),
        (TREES, operator),
        (OPERATOR, operator),
        (WHOLE, true),
    ] {
        let status = if runs {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        set_health(&reporter, &[service], status).await;
    }
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(taskd_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    // Several clients know only the older version, for example the package grpcio-reflection of
    // Python.
    let (v1, v1alpha) = (reflection().build_v1()?, reflection().build_v1alpha()?);
    let others = Routes::new(health.max_decoding_message_size(MAX_BYTES_WITHOUT_TOKEN))
        .add_service(v1.max_decoding_message_size(MAX_BYTES_WITHOUT_TOKEN))
        .add_service(v1alpha.max_decoding_message_size(MAX_BYTES_WITHOUT_TOKEN));
    let max = state.settings.limits.max_request_bytes;
    let services = Services {
        settings: Arc::clone(&state.settings),
        api: Arc::clone(api),
        methods: methods(),
        discovery: DiscoveryServer::new(Service(state.clone())).max_decoding_message_size(max),
        tasks: TasksServer::new(Service(state.clone())).max_decoding_message_size(max),
        topics: TopicsServer::new(Service(state.clone())).max_decoding_message_size(max),
        topologies: TopologiesServer::new(Service(state.clone())).max_decoding_message_size(max),
        trees: TreesServer::new(Service(state.clone())).max_decoding_message_size(max),
        operator: OperatorServer::new(Service(state.clone())).max_decoding_message_size(max),
        others: Others::new(others),
    };
    Ok((services, reporter))
}

async fn set_health(reporter: &HealthReporter, services: &[&str], status: ServingStatus) {
    for service in services {
        reporter.set_service_status(service, status).await;
    }
}

struct Service(State);

/// Splits a request into its caller and its message.
fn open<T>(request: Request<T>) -> (Caller, T) {
    let (_, mut extensions, message) = request.into_parts();
    (
        extensions.remove().expect("each call was authenticated"),
        message,
    )
}

fn results<T: From<A>, A>(answers: Vec<A>) -> Vec<T> {
    answers.into_iter().map(Into::into).collect()
}

#[tonic::async_trait]
impl Discovery for Service {
    async fn insert_tasks(
        &self,
        request: Request<pb::InsertTasksRequest>,
    ) -> Result<Response<pb::InsertTasksResponse>, Status> {
        let context = traced::caller_context(request.metadata().as_ref());
        let share: Share = request
            .extensions()
            .get()
            .cloned()
            .expect("each request has a share");
        let (caller, request) = open(request);
        let (wait, max_bytes) = (insert_wait(&request), request.max_bytes);
        let mut tasks: Vec<_> = request.tasks.into_iter().map(NewTask::try_from).collect();
        traced::adopt(&mut tasks, context.as_deref());
        self.insert(&caller, &share, wait, max_bytes, tasks).await
    }

    type WatchTaskStream = Events;

    async fn watch_task(
        &self,
        request: Request<pb::WatchTaskRequest>,
    ) -> Result<Response<Events>, Status> {
        let (caller, request) = open(request);
        let last = Some(&request.last_event_id[..]);
        Ok(Response::new(events(
            self.0.api.watch_task(&caller, &request.id, last).await?,
        )))
    }

    type WatchQueueStream = Events;

    async fn watch_queue(
        &self,
        request: Request<pb::WatchQueueRequest>,
    ) -> Result<Response<Events>, Status> {
        let (caller, request) = open(request);
        let last = Some(&request.last_event_id[..]);
        Ok(Response::new(events(
            self.0
                .api
                .watch_queue(&caller, &request.queue, last)
                .await?,
        )))
    }

    async fn get_task(
        &self,
        request: Request<pb::GetTaskRequest>,
    ) -> Result<Response<pb::Task>, Status> {
        let (caller, request) = open(request);
        let room = |bytes| {
            let room = self.0.budget.answer(&caller.access, bytes);
            room.map_err(|error| Status::resource_exhausted(error.to_string()))
        };
        let (file, _room) = self.0.api.task_file(&caller, &request.id, room).await?;
        self.within(&caller, file.into())
    }

    async fn list_tasks(
        &self,
        request: Request<pb::ListTasksRequest>,
    ) -> Result<Response<pb::ListTasksResponse>, Status> {
        let (caller, request) = open(request);
        self.within(
            &caller,
            self.0
                .api
                .list_tasks(&caller, TaskPages::try_from(request))
                .await?
                .into(),
        )
    }

    async fn explain_task(
        &self,
        request: Request<pb::ExplainTaskRequest>,
    ) -> Result<Response<pb::TaskExplanation>, Status> {
        let (caller, request) = open(request);
        Ok(Response::new(
            self.0.api.explain(&caller, &request.into()).await?.into(),
        ))
    }

    async fn cancel_tasks(
        &self,
        request: Request<pb::CancelTasksRequest>,
    ) -> Result<Response<pb::CancelTasksResponse>, Status> {
        let (caller, request) = open(request);
        let changed = self
            .0
            .api
            .cancel_chosen(&caller, ChangeTasks::try_from(request))
            .await?;
        Ok(Response::new(changed.into()))
    }
}

impl Service {
    /// Counts an answer against the budget until it is written, since it may have megabytes.
    fn within<T: prost::Message>(&self, caller: &Caller, answer: T) -> Result<Response<T>, Status> {
        let room = self.0.budget.answer(&caller.access, answer.encoded_len());
        let room = room.map_err(|error| Status::resource_exhausted(error.to_string()))?;
        let mut response = Response::new(answer);
        response.extensions_mut().insert(room);
        Ok(response)
    }
}

impl From<Cut> for Status {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::NoRoom(_) => Self::resource_exhausted(cut.to_string()),
            Cut::Stopping => Self::unavailable(cut.to_string()),
            Cut::Late(_) | Cut::LongLine(_) => Self::deadline_exceeded(cut.to_string()),
            Cut::Broken(error) => Self::from_error(error.into()),
        }
    }
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Excess(Excess::NoRoom(_)) => Self::resource_exhausted(refused.to_string()),
            Refused::Excess(_) | Refused::Malformed(_) => {
                Self::invalid_argument(refused.to_string())
            }
        }
    }
}

impl From<api::Error> for Status {
    fn from(error: api::Error) -> Self {
        let why = error.to_string();
        match error.kind() {
            Kind::Invalid => Self::invalid_argument(why),
            Kind::Final => Self::failed_precondition(why),
            Kind::NotFound => Self::not_found(why),
            Kind::Unauthenticated => Self::unauthenticated(why),
            Kind::Forbidden => Self::permission_denied(why),
            Kind::Busy => Self::resource_exhausted(why),
            Kind::Unavailable | Kind::NotRunHere => Self::unavailable(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size of the future that `call` makes, in bytes.
    fn size<A, B, C, F>(_call: impl Fn(A, B, C) -> F) -> usize {
        size_of::<F>()
    }

    /// Ten thousand calls may wait. An `async fn` stores a future that is passed to it twice, and
    /// another one around it stores it four times.
    #[test]
    fn calls_are_small() {
        let get =
            size(|api: &'static Api, caller: &'static Caller, request| api.get(caller, request));
        let complete =
            size(|api: &'static Api, caller: &'static Caller, batch| api.complete(caller, batch));
        let insert =
            size(|api: &'static Api, caller: &'static Caller, tasks| api.insert(caller, tasks));
        let answer = size(|services: Arc<Services>, request, ()| services.answer(request));
        let sizes = [get, complete, insert, answer];
        assert!(
            sizes
                .into_iter()
                .zip([2000, 1300, 1800, 3200])
                .all(|(size, most)| size <= most),
            "{sizes:?}"
        );
    }
}
