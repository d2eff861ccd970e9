//! The HTTP API. [`router`] has the table of routes. A handler reads JSON, calls an operation of
//! `api`, and writes JSON.

mod answer;
mod call;
mod changes;
mod events;
mod guard;
mod idempotency;
mod jobs;
mod letters;
mod ndjson;
mod openapi;
mod probes;
mod problem;
mod reading;
mod request;
mod sessions;
mod waiting;

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::{Request, State as Extract},
    handler::Handler,
    http::{HeaderValue, Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{self, MethodRouter},
};
use tokio::net::TcpListener;
use tower_http::trace::TraceLayer;
pub use waiting::Waiting;

use self::{
    answer::{Answer, item_answers, leased, list, list_within, within},
    call::Call,
    problem::{Problem, Refusal},
    request::pace,
};
use super::{
    State,
    authenticate::authenticate,
    connection::{Answering, Stay},
    descriptors, json,
    listener::{self, Door, strangers_stay},
    measure, refused,
    standing::IsValid,
    tally::Excess,
    traced,
};
use crate::{
    api::Api,
    model::{Access, Caller, Client, InsertStatus, LeasedTask, Protocol, Role},
    telemetry::{OPENMETRICS, metrics},
};

/// Serves until `state.stop`, then answers the requests in hand.
pub async fn serve(listener: TcpListener, state: State) {
    let max_connections = descriptors::for_each_listener(&state.settings);
    let without_room = full(state.clone(), max_connections);
    let (budget, stop) = (state.budget.clone(), state.stop.clone());
    let strangers_stay = strangers_stay(&state.settings);
    let api = Arc::clone(&state.api);
    let is_valid: IsValid = Arc::new(move |access| api.is_valid(access));
    let answering = Answering {
        protocol: Protocol::Http,
        tls: state.tls.clone(),
        handlers: router(state),
        budget,
        pace,
        stay: |_| Stay::No,
        max_message: None,
        wrap: |cut| Box::new(cut),
        stop,
    };
    let door = Door {
        name: "HTTP",
        answering,
        max_connections,
        strangers_stay,
        is_valid,
        without_room: Some(without_room),
    };
    listener::serve(listener, door).await;
}

/// A route, the role that its callers need, and its handler.
struct Route {
    method: Method,
    path: &'static str,
    role: Role,
    handler: MethodRouter<State>,
}

fn get<T: 'static>(path: &'static str, role: Role, handler: impl Handler<T, State>) -> Route {
    Route {
        method: Method::GET,
        path,
        role,
        handler: routing::get(handler),
    }
}

fn post<T: 'static>(path: &'static str, role: Role, handler: impl Handler<T, State>) -> Route {
    Route {
        method: Method::POST,
        path,
        role,
        handler: routing::post(handler),
    }
}

fn delete<T: 'static>(path: &'static str, role: Role, handler: impl Handler<T, State>) -> Route {
    Route {
        method: Method::DELETE,
        path,
        role,
        handler: routing::delete(handler),
    }
}

fn table() -> Vec<Route> {
    vec![
        post("/v1/tasks", Role::Insert, insert_tasks),
        get("/v1/tasks", Role::Read, reading::list_tasks),
        get("/v1/tasks/{id}", Role::Read, reading::get_task),
        delete("/v1/tasks/{id}", Role::Admin, changes::cancel_task),
        get("/v1/tasks/{id}/results", Role::Read, reading::get_results),
        get("/v1/tasks/{id}/events", Role::Read, events::watch_task),
        get("/v1/events", Role::Read, events::watch_queue),
        get("/v1/queues", Role::Read, reading::get_queues),
        get("/v1/tasks:explain", Role::Read, reading::explain_task),
        get("/v1/books", Role::Read, reading::get_books),
        get("/v1/dump", Role::Read, reading::get_dump),
        post("/v1/fsck", Role::Admin, reading::fsck),
        post("/v1/tasks:get", Role::Work, get_tasks),
        post("/v1/tasks:complete", Role::Work, complete_tasks),
        post("/v1/tasks:reject", Role::Work, reject_tasks),
        post("/v1/tasks:extend", Role::Work, extend_tasks),
        post("/v1/sessions:open", Role::Work, sessions::open_session),
        post("/v1/sessions:want", Role::Work, sessions::want_tasks),
        post(
            "/v1/sessions:surrender",
            Role::Work,
            sessions::surrender_tasks,
        ),
        post("/v1/sessions:pending", Role::Work, sessions::pending_count),
        post("/v1/sessions:report", Role::Work, sessions::report_tasks),
        post("/v1/sessions:close", Role::Work, sessions::close_session),
        post("/v1/tasks:retry", Role::Admin, changes::retry_tasks),
        get("/v1/jobs", Role::Read, jobs::get_jobs),
        get("/v1/jobs/{id}", Role::Read, jobs::get_job),
        // `/v1/jobs/{id}:stop`: the router knows no suffix of a parameter.
        post("/v1/jobs/{id}", Role::Admin, jobs::stop_job),
        post("/v1/tasks:cancel", Role::Admin, changes::cancel_tasks),
        post("/v1/tasks:change", Role::Admin, changes::update_tasks),
        post("/v1/tasks:requeue", Role::Admin, changes::requeue_tasks),
        post("/v1/queues/{queue}", Role::Admin, changes::pause_or_resume),
        get("/v1/acts", Role::Admin, reading::get_acts),
        get("/v1/dead-letters", Role::Read, letters::get_letters),
        get("/v1/dead-letters/{id}", Role::Read, letters::get_letter),
        post(
            "/v1/dead-letters:retry",
            Role::Admin,
            letters::retry_letters,
        ),
        post(
            "/v1/dead-letters:purge",
            Role::Admin,
            letters::purge_letters,
        ),
        get("/metrics", Role::Read, render_metrics),
    ]
}

/// What calls of one route need.
#[derive(Clone)]
struct Entry {
    api: Arc<Api>,
    /// Method and path, for the log.
    route: Arc<str>,
    role: Role,
    /// The parameters that the query may have.
    parameters: Arc<[&'static str]>,
}

/// The routes that ask for a role: method, path, and the role that a caller needs.
pub fn routes() -> Vec<(Method, &'static str, Role)> {
    table()
        .into_iter()
        .map(|route| (route.method, route.path, route.role))
        .collect()
}

fn router(state: State) -> Router {
    let guard = guard::Guard::new(&state.settings);
    let known_names = guard.clone();
    let auth = state.settings.auth;
    let route = |router: Router<State>,
                 Route {
                     method,
                     path,
                     role,
                     handler,
                 }: Route| {
        let parameters = openapi::known_parameters(&method, path).into();
        let entry = Entry {
            api: Arc::clone(&state.api),
            route: format!("{method} {path}").into(),
            role,
            parameters,
        };
        router.route(
            path,
            handler.route_layer(middleware::from_fn_with_state(entry, admit)),
        )
    };
    table()
        .into_iter()
        .fold(Router::new(), route)
        .route("/", routing::get(index))
        .merge(openapi::routes(&routes(), auth))
        .fallback(no_such_route)
        .method_not_allowed_fallback(wrong_method)
        // The code that meets a failure logs it.
        .layer(TraceLayer::new_for_http().on_failure(()))
        .layer(middleware::from_fn_with_state(guard, guard::check))
        .layer(middleware::from_fn(measure::http))
        .merge(probes::routes(known_names))
        .layer(middleware::map_response(secure))
        .with_state(state)
}

/// Asks for the token of a call, and refuses a query with parameters that the route does not know:
/// a request must not do something else than it says.
async fn admit(Extract(entry): Extract<Entry>, request: Request, next: Next) -> Response {
    let (mut head, body) = request.into_parts();
    let client: Client = *head
        .extensions
        .get()
        .expect("the connection gives each request its client");
    if let Err(error) =
        authenticate(&entry.api, &head.headers, &mut head.extensions, entry.role).await
    {
        let refused = Problem::from(error).into_response();
        log_refusal(&refused, &client, None, &entry.route);
        return refused;
    }
    if let Err(why) = json::query::check(head.uri.query().unwrap_or_default(), &entry.parameters) {
        return Problem::bad_request(why).into_response();
    }
    let access = head
        .extensions
        .get()
        .map(|caller: &Caller| caller.access.clone());
    let answer = next.run(Request::from_parts(head, body)).await;
    log_refusal(&answer, &client, access.as_ref(), &entry.route);
    answer
}

fn log_refusal(answer: &Response, client: &Client, access: Option<&Access>, route: &str) {
    if let Some(Refusal(why)) = answer.extensions().get() {
        refused::log(answer.status(), client, access, route, why);
    }
}

/// Browsers take an answer as what it says it is, and keep none.
async fn secure(mut answer: Response) -> Response {
    let headers = answer.headers_mut();
    headers
        .entry(header::X_CONTENT_TYPE_OPTIONS)
        .or_insert(HeaderValue::from_static("nosniff"));
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    answer
}

/// Says what this is, and where to go. It names nothing that only a token may see.
async fn index() -> String {
    let route = |Route {
                     method, path, role, ..
                 }: Route| {
        let verbs = match path {
            "/v1/jobs/{id}" if method == Method::POST => ":stop",
            "/v1/queues/{queue}" => ":pause, :resume",
            _ => "",
        };
        format!(
            "  {:<6} {:<34} for the role {role}\n",
            method.as_str(),
            [path, verbs].concat()
        )
    };
    let routes: String = table().into_iter().map(route).collect();
    format!(
        "taskd: a task queue for work that grows while it is being done.\n\n{routes}  \
         GET    /healthz, /readyz                  for probes\n\n\
         /docs/ shows these routes in a browser; /openapi.json is the same for programs.\n\
         gRPC has the same on a port of its own, with reflection: grpcurl -plaintext HOST:PORT list\n\
         (without -plaintext if taskd has TLS).\n\
         A taskd with auth = tokens takes calls with the header Authorization: Bearer TOKEN.\n\
         taskd --help lists the commands; docs/api.md in the source describes the calls.\n"
    )
}

/// The routes of connections beyond the limit. They answer probes and refuse all others.
fn full(state: State, max_connections: usize) -> Router {
    let refuse = move || async move {
        let why = format!(
            "{max_connections} connections are open, and there may be no more; try again later"
        );
        Problem::later(StatusCode::SERVICE_UNAVAILABLE, why).and_close()
    };
    let guard = guard::Guard::new(&state.settings);
    probes::routes(guard).with_state(state).fallback(refuse)
}

async fn insert_tasks(mut call: Call) -> Answer {
    let wait = json::events::wait(call.query()).map_err(Problem::bad_request)?;
    if request::is_ndjson(&call.headers)? {
        if wait.is_some() {
            return Err(Problem::bad_request(
                "wait is for tasks in JSON, not for lines of any number",
            ));
        }
        idempotency::refuse(&call.headers)?;
        return ndjson::insert(call).await;
    }
    let expected = "application/json (a task or an array of them) or application/x-ndjson";
    let mut asked = call.counted_or(expected, json::insert::new_tasks).await?;
    idempotency::adopt(&call.headers, &mut asked)?;
    traced::adopt(
        &mut asked.tasks,
        traced::caller_context(&call.headers).as_deref(),
    );
    if let Some(wait) = wait {
        return events::insert_and_wait(call, asked, wait).await;
    }
    let answers = call.state.api.insert(&call.caller, asked.tasks).await?;
    let is_rejected = asked.is_single
        && answers
            .iter()
            .all(|answer| answer.status == InsertStatus::Rejected);
    let answer = list("results", answers)?;
    Ok(if is_rejected {
        (StatusCode::UNPROCESSABLE_ENTITY, answer).into_response()
    } else {
        answer
    })
}

async fn get_tasks(mut call: Call) -> Answer {
    let request = call.json(json::work::get_tasks).await?;
    // The call may wait, and its body is gone.
    call.share.become_answer(0);
    let leases = call.state.api.get(&call.caller, Ok(request)).await?;
    let head = || json::large::Entry::new(&serde_json::json!({}));
    leased(&call, leases, head, |tasks| {
        list_within(
            &call,
            "tasks",
            tasks.iter().map(json::work::LeasedTask::from),
        )
    })
}

async fn complete_tasks(mut call: Call) -> Answer {
    let (batch, next) = call.counted(json::work::completions).await?;
    let Call {
        state: State { api, .. },
        caller,
        ..
    } = &call;
    let Some(next) = next else {
        return item_answers(api.complete(caller, batch).await?);
    };
    let (answers, leases) = api.complete_and_get(caller, batch, Ok(next)).await?;
    // Without room for the tasks their leases go back. The reports are taken.
    let head = || json::work::Completed::before_tasks(&answers);
    let answer = |tasks: &[LeasedTask]| within(&call, &json::work::Completed::new(&answers, tasks));
    leased(&call, leases, head, answer)
        .or_else(|_no_room| Ok(Json(json::work::Completed::new(&answers, &[])).into_response()))
}

async fn reject_tasks(mut call: Call) -> Answer {
    let batch = call.counted(json::work::rejections).await?;
    item_answers(call.state.api.reject(&call.caller, batch).await?)
}

async fn extend_tasks(mut call: Call) -> Answer {
    let batch = call.counted(json::work::extensions).await?;
    item_answers(call.state.api.extend(&call.caller, batch).await?)
}

async fn render_metrics(call: Call) -> Answer {
    let Call {
        state,
        caller,
        headers,
        ..
    } = &call;
    state.api.may_read_metrics(caller)?;
    metrics::requests_held(state.budget.held());
    metrics::waiting_calls(state.api.waits.held());
    metrics::process();
    let accepted = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .unwrap_or_default();
    let (kind, text) = match accepted.contains("application/openmetrics-text") {
        true => (OPENMETRICS, metrics::openmetrics(&state.metrics)),
        false => (
            "text/plain; version=0.0.4; charset=utf-8",
            state.metrics.render(),
        ),
    };
    let room = state
        .budget
        .small_answer(&caller.access, text.len())
        .map_err(Excess::from)?;
    let mut answer = ([(header::CONTENT_TYPE, kind)], text).into_response();
    answer.extensions_mut().insert(room);
    Ok(answer)
}

async fn no_such_route(method: Method, uri: Uri) -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        format!("there is no {method} {}", uri.path()),
    )
}

async fn wrong_method(request: Request) -> Problem {
    let why = format!(
        "{} does not take {}; the header Allow says what it takes",
        request.uri().path(),
        request.method()
    );
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, why)
}
