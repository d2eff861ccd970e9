//! The HTTP API. `super::operations` lists its routes. A handler reads JSON, calls an operation of
//! `api`, and writes JSON.

mod answer;
pub(super) mod bulk;
mod call;
pub(super) mod changes;
pub(super) mod events;
mod guard;
mod idempotency;
pub(super) mod letters;
pub(super) mod limits;
mod ndjson;
mod openapi;
mod ports;
mod probes;
mod problem;
pub(super) mod reading;
mod request;
pub(super) mod sessions;
pub(super) mod subscriptions;
pub(super) mod tasks;
pub(super) mod topics;
pub(super) mod topologies;
pub(super) mod trees;
pub(super) mod ui;
mod waiting;
pub(super) mod workflows;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State as Extract},
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing,
};
use tokio::net::TcpListener;
use tower_http::trace::TraceLayer;

pub(super) use self::probes::Readiness;
use self::{
    problem::{Problem, Refusal},
    request::pace,
};
use super::{
    State,
    authenticate::authenticate,
    json, measure,
    net::connection::{Answering, Stay},
    net::descriptors,
    net::listener::{self, Door, strangers_stay},
    net::standing::IsValid,
    operations, refused,
};
use crate::{
    api::Api,
    model::{Access, Caller, Client, Protocol, Role},
};
pub use ports::Ports;
pub use waiting::Waiting;

/// Serves until `state.stop`, then finishes the requests in flight.
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

fn router(state: State) -> Router {
    let guard = guard::Guard::new(&state.settings);
    let known_names = guard.clone();
    let auth = state.settings.auth;
    with_operations(&state.api)
        .route("/", routing::get(index))
        .merge(openapi::routes(auth))
        .merge(ui::routes(&state))
        .fallback(no_such_route)
        .method_not_allowed_fallback(wrong_method)
        // Failures are logged by the code in which they occur.
        .layer(TraceLayer::new_for_http().on_failure(()))
        .layer(middleware::from_fn_with_state(guard, guard::check))
        .layer(middleware::from_fn(measure::http))
        .merge(probes::routes(known_names))
        .layer(middleware::map_response(secure))
        .with_state(state)
}

/// The routes of the operations that require a role.
fn with_operations(api: &Arc<Api>) -> Router<State> {
    let mut router = Router::new();
    let mut before = None;
    for operation in operations::all() {
        let parameters = operation.known_parameters().into();
        let (Some(role), Some(route)) = (operation.role, operation.http) else {
            continue;
        };
        let path = route.matched_path();
        let Some(handler) = route.handler else {
            continue;
        };
        // The handler of the previous operation serves this one, too.
        if before.replace((route.method.clone(), path)) == Some((route.method.clone(), path)) {
            continue;
        }
        let entry = Entry {
            api: Arc::clone(api),
            route: format!("{} {path}", route.method).into(),
            role,
            parameters,
        };
        let handler = handler.route_layer(middleware::from_fn_with_state(entry, admit));
        router = router.route(path, handler);
    }
    router
}

/// Authenticates a call, and refuses a query with parameters that the route does not know: a
/// request must not do something else than it says.
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

/// Makes browsers respect the content type of answers and keep them out of their caches.
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

/// Says what this is and where to go. It contains nothing that requires a token. A browser is sent
/// to the dashboard.
async fn index(Extract(state): Extract<State>, headers: HeaderMap) -> Response {
    if let Some(mut answer) = ui::for_browser(&state, &headers) {
        let [(name, value)] = state.ports.header();
        answer.headers_mut().insert(name, value);
        return answer;
    }
    let mut lines: Vec<(Method, &str, String, Role)> = Vec::new();
    for operation in operations::all() {
        let (Some(role), Some(route)) = (operation.role, operation.http) else {
            continue;
        };
        let path = route.matched_path();
        match lines.last_mut() {
            Some((method, matched, shown, _)) if (&*method, *matched) == (&route.method, path) => {
                shown.push_str(", ");
                shown.push_str(&route.path[path.len()..]);
            }
            _ => lines.push((route.method, path, route.path.to_owned(), role)),
        }
    }
    let mut routes = String::new();
    for (method, _, path, role) in lines {
        routes.push_str(&format!(
            "  {:<6} {path:<34} for the role {role}\n",
            method.as_str()
        ));
    }
    let text = format!(
        "taskd: a task queue for work that grows while it is being done.\n\n{routes}  \
         GET    /healthz, /readyz                  for probes\n\n\
         /ui/ shows queues and tasks in a browser. /docs/ shows these routes; /openapi.json is the same for programs.\n\
         gRPC has the same on a port of its own, with reflection: grpcurl -plaintext HOST:PORT list\n\
         (without -plaintext if taskd has TLS).\n\
         A taskd with auth = tokens takes calls with the header Authorization: Bearer TOKEN.\n\
         taskd --help lists the commands; docs/api.md in the source describes the calls.\n"
    );
    (state.ports.header(), text).into_response()
}

/// The routes of connections beyond the limit. They answer probes and refuse everything else.
fn full(state: State, max_connections: usize) -> Router {
    let ports = state.ports;
    let refuse = move || async move {
        let why = format!(
            "{max_connections} connections are open, and there may be no more; try again later"
        );
        let refused = Problem::later(StatusCode::SERVICE_UNAVAILABLE, why).and_close();
        (ports.header(), refused)
    };
    let guard = guard::Guard::new(&state.settings);
    probes::routes(guard).with_state(state).fallback(refuse)
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
