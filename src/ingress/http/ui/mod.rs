//! The dashboard: pages for people below `/ui/`.
//!
//! The table below is to the pages what `ingress::operations` is to the API. A handler calls `api`
//! and nothing below it, and fills a template. Pages work without a script; with it, the block
//! `frame` of a live page is fetched again every two seconds.

mod assets;
mod charts;
mod door;
mod format;
mod looks;
mod pages;
mod scene;
mod visit;

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Router,
    http::{HeaderMap, Method, StatusCode, header},
    middleware,
    response::{Redirect, Response},
    routing::{MethodRouter, get, post},
};

use self::{door::Entry, looks::Looks, pages as page, scene::Scene};
use super::super::State;
use crate::{
    config::Dashboard,
    model::Role::{self, Admin, Read},
};

/// A route of the dashboard.
pub struct UiRoute {
    pub method: Method,
    pub path: &'static str,
    /// `None` for what everybody may see.
    pub role: Option<Role>,
    /// The parameters that the query may have.
    pub parameters: &'static [&'static str],
    handler: MethodRouter<State>,
}

/// The routes, page by page.
pub fn table() -> Vec<UiRoute> {
    let shows = |path, parameters, handler| UiRoute {
        method: Method::GET,
        path,
        role: Some(Read),
        parameters,
        handler,
    };
    // What only an admin sees, such as the question before an act.
    let asks = |path, parameters, handler| UiRoute {
        role: Some(Admin),
        ..shows(path, parameters, handler)
    };
    let acts = |path, handler| UiRoute {
        method: Method::POST,
        path,
        role: Some(Admin),
        parameters: &[],
        handler,
    };
    let door = |method, path, parameters, handler| UiRoute {
        method,
        path,
        role: None,
        parameters,
        handler,
    };
    vec![
        door(Method::GET, "/ui/login", &["to"], get(door::login)),
        door(Method::POST, "/ui/login", &[], post(door::login)),
        door(Method::POST, "/ui/logout", &[], post(door::logout)),
        door(Method::GET, "/ui/assets/{name}", &[], get(assets::get)),
        shows(
            "/ui/",
            page::overview::PARAMETERS,
            get(page::overview::show),
        ),
        shows("/ui/queues/{queue}", &["did"], get(page::queue::show)),
        shows("/ui/queues/{queue}/live", &[], get(page::queue::live)),
        shows("/ui/queues/{queue}/events", &[], get(page::queue::events)),
        acts("/ui/queues/{queue}/pause", post(page::queue::pause)),
        acts("/ui/queues/{queue}/resume", post(page::queue::resume)),
        shows("/ui/tasks", page::tasks::PARAMETERS, get(page::tasks::list)),
        shows("/ui/find", &["q"], get(page::tasks::find)),
        shows("/ui/tasks/{id}", &["did"], get(page::task::show)),
        shows("/ui/tasks/{id}/payload", &[], get(page::task::payload)),
        shows(
            "/ui/tasks/{id}/result",
            &["worker"],
            get(page::task::result),
        ),
        asks("/ui/tasks/{id}/{act}", &[], get(page::task_acts::ask)),
        acts("/ui/tasks/{id}/{act}", post(page::task_acts::act)),
        shows("/ui/trees", page::trees::PARAMETERS, get(page::trees::list)),
        shows("/ui/trees/{id}", &[], get(page::trees::show)),
        asks("/ui/trees/{id}/{act}", &[], get(page::trees::ask)),
        acts("/ui/trees/{id}/{act}", post(page::trees::act)),
        shows("/ui/dead", page::dead::PARAMETERS, get(page::dead::list)),
        asks(
            "/ui/dead/purge",
            page::dead::FILTER,
            get(page::dead::ask_purge),
        ),
        acts("/ui/dead/purge", post(page::dead::purge)),
        shows("/ui/dead/{id}", &[], get(page::dead::show)),
        asks("/ui/dead/{id}/{act}", &[], get(page::dead::ask)),
        acts("/ui/dead/{id}/{act}", post(page::dead::act)),
        shows("/ui/workers", &["queue"], get(page::lists::workers)),
        shows("/ui/processes", &[], get(page::lists::processes)),
        shows("/ui/books", &[], get(page::lists::books)),
        acts("/ui/books", post(page::lists::check)),
        shows("/ui/bulk", &["before"], get(page::lists::bulk_changes)),
        asks(
            "/ui/bulk/new",
            page::new_bulk::PARAMETERS,
            get(page::new_bulk::ask),
        ),
        acts("/ui/bulk/new", post(page::new_bulk::start)),
        shows("/ui/bulk/{id}", &["did"], get(page::lists::bulk_change)),
        acts("/ui/bulk/{id}/stop", post(page::lists::stop_bulk_change)),
        asks("/ui/acts", &["before"], get(page::lists::acts)),
    ]
}

pub(super) fn routes(state: &State) -> Router<State> {
    let mut router = Router::new();
    if state.settings.dashboard == Dashboard::Off {
        return router;
    }
    let looks = Arc::new(Looks::default());
    let mut by_path: BTreeMap<&str, MethodRouter<State>> = BTreeMap::new();
    for route in table() {
        let entry = Entry {
            api: Arc::clone(&state.api),
            settings: Arc::clone(&state.settings),
            looks: Arc::clone(&looks),
            is_tls: state.tls.is_some(),
            route: format!("{} {}", route.method, route.path).into(),
            role: route.role,
            parameters: route.parameters,
            is_door: route.role.is_none(),
        };
        let handler = route
            .handler
            .route_layer(middleware::from_fn_with_state(entry, door::admit));
        let merged = match by_path.remove(route.path) {
            Some(others) => others.merge(handler),
            None => handler,
        };
        by_path.insert(route.path, merged);
    }
    for (path, handler) in by_path {
        router = router.route(path, handler.fallback(wrong_method));
    }
    router
        .route("/ui", get(|| async { Redirect::permanent("ui/") }))
        .route("/ui/{*rest}", get(no_such_page).fallback(no_such_page))
}

async fn no_such_page(
    axum::extract::State(state): axum::extract::State<State>,
    uri: axum::http::Uri,
) -> Response {
    let path = uri.path();
    let scene = Scene::new(&state.settings, path, "", false);
    let why = "There is no such page.";
    door::guarded(door::failure(&scene, StatusCode::NOT_FOUND, why))
}

async fn wrong_method(
    axum::extract::State(state): axum::extract::State<State>,
    uri: axum::http::Uri,
) -> Response {
    let scene = Scene::new(&state.settings, uri.path(), "", false);
    let why = "This page does not take this kind of request.";
    door::guarded(door::failure(&scene, StatusCode::METHOD_NOT_ALLOWED, why))
}

/// Where `GET /` leads a browser, which asks for HTML. Other clients get a text.
pub(super) fn for_browser(state: &State, headers: &HeaderMap) -> Option<Response> {
    let accepted = headers.get(header::ACCEPT)?.to_str().ok()?;
    let is_browser = accepted.contains("text/html");
    let is_served = state.settings.dashboard != Dashboard::Off;
    (is_browser && is_served).then(|| {
        let mut answer = visit::see("ui/");
        let by = axum::http::HeaderValue::from_static("accept");
        answer.headers_mut().insert(header::VARY, by);
        answer
    })
}
