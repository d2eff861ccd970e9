//! The gRPC API: the proto's services as they are, with reflection and health.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Extension, Router,
    extract::{Request as HttpRequest, State as Extract},
    http::request,
    middleware::{self, Next},
    response::Response as HttpResponse,
};
use prost::Message as _;
use tokio::net::TcpListener;
use tonic::{Request, Response, Status, service::Routes};
use tonic_health::{ServingStatus, server::HealthReporter};

use super::{
    ECHO, State,
    body::{Cut, Pace},
    budget::Share,
    connection::{Answering, Protocol},
    delivery::Deliveries,
    descriptors, insert_timed,
    listener::{self, Door},
    measure, not_run_here, shorten,
    tally::{Excess, Tally},
    wire::{self, Refused},
};
use crate::{
    api::query,
    config::Settings,
    model::TaskId,
    pipelines::{discovery, tasks},
    telemetry::metrics,
    wire::{
        grpc_codec,
        pb::{
            self,
            discovery_server::{Discovery, DiscoveryServer},
            tasks_server::{Tasks, TasksServer},
        },
    },
};

/// The pace at which the message of a call must come.
const PACE: Pace = Pace { silence: Duration::from_secs(30), whole: Duration::from_secs(120) };

/// The largest answer that a client takes unless it is told otherwise.
const TAKEN_BY_DEFAULT: usize = 4 << 20;

/// Serves until `state.stop`, then until the calls in hand are answered.
pub async fn serve(listener: TcpListener, state: State) -> anyhow::Result<()> {
    let (router, health) = router(&state).await?;
    let answering = Answering {
        protocol: Protocol::Http2,
        router,
        budget: state.budget.clone(),
        pace: |head| (!may_stay(head)).then_some(PACE),
        may_stay,
        wrap: |cut| Box::new(Status::from(cut)),
        stop: state.stop.clone(),
    };
    let max_connections = descriptors::for_each_listener(&state.settings);
    let stopping = async {
        state.stop.cancelled().await;
        // Load balancers look elsewhere while the last calls are answered.
        set_health(&health, &[DISCOVERY, TASKS, WHOLE], ServingStatus::NotServing).await;
    };
    let door = Door { name: "gRPC", answering, max_connections, without_room: None };
    tokio::join!(listener::serve(listener, door), stopping);
    Ok(())
}

/// The calls of reflection and health are streams. Those of taskd have one message each.
fn may_stay(head: &request::Parts) -> bool {
    !head.uri.path().starts_with("/taskd.v1.")
}

/// Counts what a call's message holds before it is decoded, and how the call ended.
async fn call(
    Extract(settings): Extract<Arc<Settings>>,
    Extension(share): Extension<Share>,
    request: HttpRequest,
    next: Next,
) -> HttpResponse {
    let (shape, method) = (wire::shape(request.uri().path()), measure::grpc_method(request.uri().path()));
    let inspect = move |message: &[u8]| {
        let mut tally = Tally::new(&settings, &share, message.len());
        wire::count(message, shape, &mut tally)?;
        tally.keep();
        Ok(())
    };
    let started = Instant::now();
    let response = grpc_codec::inspected(Box::new(inspect), next.run(request)).await;
    measure::grpc(method, &response, started);
    response
}

const DISCOVERY: &str = "taskd.v1.Discovery";
const TASKS: &str = "taskd.v1.Tasks";
/// The health of the server as a whole.
const WHOLE: &str = "";

/// The services. Those whose pipeline this process does not run are there too: they say so, and are not healthy.
async fn router(state: &State) -> anyhow::Result<(Router, HealthReporter)> {
    let (reporter, health) = tonic_health::server::health_reporter();
    for (service, runs) in [(DISCOVERY, state.discovery.is_some()), (TASKS, state.tasks.is_some()), (WHOLE, true)] {
        let status = if runs { ServingStatus::Serving } else { ServingStatus::NotServing };
        set_health(&reporter, &[service], status).await;
    }
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(pb::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let max = state.settings.limits.max_request_bytes;
    let routes = Routes::new(DiscoveryServer::new(Service(state.clone())).max_decoding_message_size(max))
        .add_service(TasksServer::new(Service(state.clone())).max_decoding_message_size(max))
        .add_service(health)
        .add_service(reflection);
    let counted = middleware::from_fn_with_state(Arc::clone(&state.settings), call);
    Ok((routes.into_axum_router().layer(counted), reporter))
}

async fn set_health(reporter: &HealthReporter, services: &[&str], status: ServingStatus) {
    for service in services {
        reporter.set_service_status(service, status).await;
    }
}

struct Service(State);

impl Service {
    fn tasks(&self) -> Result<&tasks::Handle, Status> {
        self.0.tasks.as_ref().ok_or_else(|| Status::unavailable(not_run_here("tasks")))
    }
}

#[tonic::async_trait]
impl Discovery for Service {
    async fn insert_tasks(
        &self,
        request: Request<pb::InsertTasksRequest>,
    ) -> Result<Response<pb::InsertTasksResponse>, Status> {
        let Some(discovery) = &self.0.discovery else { return Err(Status::unavailable(not_run_here("discovery"))) };
        let results = insert_timed(discovery, request.into_inner().tasks).await?;
        Ok(Response::new(pb::InsertTasksResponse { results }))
    }

    async fn get_task(&self, request: Request<pb::GetTaskRequest>) -> Result<Response<pb::Task>, Status> {
        let text = request.into_inner().id;
        let wrong = |_| {
            let text = shorten(&text, ECHO);
            Status::invalid_argument(format!("{text:?} is not a task id; ids are UUIDs, as an insert answers them"))
        };
        let id: TaskId = text.parse().map_err(wrong)?;
        let Some(reading) = &self.0.reading else {
            return Err(Status::unavailable(not_run_here("discovery or tasks")));
        };
        let task = reading.task(id).await?;
        task.map(Response::new).ok_or_else(|| {
            Status::not_found(format!("there is no task {id}, or it finished so long ago that it was removed"))
        })
    }
}

#[tonic::async_trait]
impl Tasks for Service {
    async fn get_tasks(&self, request: Request<pb::GetTasksRequest>) -> Result<Response<pb::GetTasksResponse>, Status> {
        let request = request.into_inner();
        let is_default = request.max_bytes == 0;
        // A stop ends the wait: dropping the call gives back what it got.
        let leased = self.0.stop.run_until_cancelled(self.tasks()?.get(request)).await;
        let tasks::Answer { response, deliveries } = leased.unwrap_or_else(|| Ok(tasks::Answer::default()))?;
        let bytes = response.encoded_len();
        let room = self.0.budget.answer(bytes).map_err(|error| Status::resource_exhausted(error.to_string()))?;
        if is_default && bytes > TAKEN_BY_DEFAULT {
            metrics::grpc_oversized_answer();
        }
        let mut response = Response::new(response);
        response.extensions_mut().insert(room);
        response.extensions_mut().insert(Deliveries::from(deliveries));
        Ok(response)
    }

    async fn complete_tasks(
        &self,
        request: Request<pb::CompleteTasksRequest>,
    ) -> Result<Response<pb::CompleteTasksResponse>, Status> {
        Ok(Response::new(self.tasks()?.complete(request.into_inner()).await?))
    }

    async fn reject_tasks(
        &self,
        request: Request<pb::RejectTasksRequest>,
    ) -> Result<Response<pb::RejectTasksResponse>, Status> {
        Ok(Response::new(self.tasks()?.reject(request.into_inner()).await?))
    }

    async fn extend_tasks(
        &self,
        request: Request<pb::ExtendTasksRequest>,
    ) -> Result<Response<pb::ExtendTasksResponse>, Status> {
        Ok(Response::new(self.tasks()?.extend(request.into_inner()).await?))
    }
}

impl From<Cut> for Status {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::NoRoom(_) => Self::resource_exhausted(cut.to_string()),
            Cut::Stopping => Self::unavailable(cut.to_string()),
            Cut::Late(_) => Self::deadline_exceeded(cut.to_string()),
            Cut::Broken(error) => Self::from_error(error.into()),
        }
    }
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Excess(Excess::NoRoom(_)) => Self::resource_exhausted(refused.to_string()),
            Refused::Excess(_) | Refused::Malformed(_) => Self::invalid_argument(refused.to_string()),
        }
    }
}

impl From<discovery::Error> for Status {
    fn from(error: discovery::Error) -> Self {
        match error {
            discovery::Error::Busy(_) => Self::resource_exhausted(error.to_string()),
            discovery::Error::Unavailable(_) => Self::unavailable(error.to_string()),
        }
    }
}

impl From<tasks::Error> for Status {
    fn from(error: tasks::Error) -> Self {
        match error {
            tasks::Error::Invalid(_) => Self::invalid_argument(error.to_string()),
            tasks::Error::Unavailable(_) => Self::unavailable(error.to_string()),
        }
    }
}

impl From<query::Unavailable> for Status {
    fn from(error: query::Unavailable) -> Self {
        Self::unavailable(error.to_string())
    }
}
