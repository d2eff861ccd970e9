//! A request for a page that was admitted, and how a page is answered.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use askama::Template;
use axum::{
    extract::{FromRequest, Request},
    http::{HeaderName, HeaderValue, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use sha2::{Digest, Sha256};

use super::{
    super::{
        super::{State, json, tally::Excess},
        problem::Problem,
        request::whole,
    },
    looks::{Looks, rest},
    scene::{Head, Scene},
};
use crate::{api::Api, model::Caller};

/// The header of a request for the frame of a page: the version that the browser has. An answer has
/// the new version in it.
pub(super) const FRAME: HeaderName = HeaderName::from_static("taskd-frame");

/// The header of an answer that says after how many milliseconds to ask for the frame again.
const FRAME_AFTER: HeaderName = HeaderName::from_static("taskd-frame-after");
/// The least of them.
const FRAME_EVERY: Duration = Duration::from_secs(2);

/// The most bytes of a form.
const FORM: usize = 64 << 10;

pub(super) type Answer = Result<Response, Problem>;

pub(super) struct Visit {
    pub(super) state: State,
    pub(super) caller: Caller,
    pub(super) scene: Scene,
    pub(super) looks: Arc<Looks>,
    pub(super) query: Vec<(String, String)>,
    pub(super) form: Vec<(String, String)>,
    /// The version of the frame that the browser has, if it asks for the frame only.
    frame: Option<String>,
    /// Since when the answer costs what viewers do not share.
    began: Instant,
}

impl FromRequest<State> for Visit {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &State) -> Result<Self, Problem> {
        let (mut head, body) = request.into_parts();
        let caller = head
            .extensions
            .remove()
            .expect("each call was authenticated");
        let scene = head.extensions.remove().expect("each page has a scene");
        let looks = head.extensions.remove().expect("each page has the looks");
        let raw_query = head.uri.query().unwrap_or_default().to_owned();
        let query = json::query::parameters(&raw_query).map_err(Problem::bad_request)?;
        let form = if head.method == Method::POST {
            let body = whole(&head.headers, body, FORM).await?;
            form(&body)?
        } else {
            Vec::new()
        };
        let frame = head.headers.get(FRAME);
        let frame = frame.map(|version| String::from_utf8_lossy(version.as_bytes()).into_owned());
        Ok(Self {
            state: state.clone(),
            caller,
            scene,
            looks,
            query,
            form,
            frame,
            began: Instant::now(),
        })
    }
}

/// Reads the fields of a form.
pub(super) fn form(body: &[u8]) -> Result<Vec<(String, String)>, Problem> {
    let text =
        std::str::from_utf8(body).map_err(|_| Problem::bad_request("the form is not UTF-8"))?;
    json::query::parameters(text).map_err(Problem::bad_request)
}

impl Visit {
    pub(super) fn api(&self) -> &Arc<Api> {
        &self.state.api
    }

    /// A queue to begin with, for a viewer who sees only some, and has named none.
    pub(super) async fn own_queue(&self) -> Result<Option<String>, Problem> {
        if self.scene.sees_all || !self.get("queue").is_empty() {
            return Ok(None);
        }
        let looks = self.looks.queues(self.api()).await?;
        let mut names = looks.value.queues.iter().map(|view| view.queue.as_str());
        let own = names.find(|name| self.caller.access.reaches(name));
        Ok(own.map(str::to_owned))
    }

    /// A parameter of the query, or an empty text.
    pub(super) fn get(&self, name: &str) -> &str {
        value(&self.query, name)
    }

    /// A field of the form, or an empty text.
    pub(super) fn field(&self, name: &str) -> &str {
        value(&self.form, name)
    }

    pub(super) fn is_frame(&self) -> bool {
        self.frame.is_some()
    }

    /// The shared looks are there. A frame rests for what the others cost only.
    pub(super) fn has_looked(&mut self) {
        self.began = Instant::now();
    }

    pub(super) fn head(&self, here: &'static str, title: impl Into<String>) -> Head {
        Head::new(&self.scene, here, title)
    }

    /// Answers a page, or only its frame if the browser asks for that.
    pub(super) fn show(&self, page: &impl Page) -> Answer {
        self.show_as(StatusCode::OK, page)
    }

    pub(super) fn show_as(&self, status: StatusCode, page: &impl Page) -> Answer {
        let Some(known) = &self.frame else {
            return self.html(status, page.render());
        };
        let frame = page.frame();
        let version = frame.as_deref().map(version).unwrap_or_default();
        let mut answer = if version == *known {
            StatusCode::NO_CONTENT.into_response()
        } else {
            self.html(status, frame)?
        };
        let version = HeaderValue::try_from(version).expect("hex digits may stand in a header");
        answer.headers_mut().insert(FRAME, version);
        let after = FRAME_EVERY.max(rest(self.began.elapsed()));
        let after = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
        answer.headers_mut().insert(FRAME_AFTER, after.into());
        Ok(answer)
    }

    fn html(&self, status: StatusCode, text: askama::Result<String>) -> Answer {
        let text = text.map_err(|error| {
            let why = format!("cannot write the page: {error}");
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, why)
        })?;
        let room = self.state.budget.answer(&self.caller.access, text.len());
        let room = room.map_err(Excess::from)?;
        let mut answer = html(status, text);
        answer.extensions_mut().insert(room);
        Ok(answer)
    }

    /// Sends the browser to another page after a form, by its way from `/ui/`.
    pub(super) fn go_to(&self, path: &str) -> Answer {
        Ok(see(&format!("{}{path}", self.scene.root)))
    }
}

fn value<'a>(list: &'a [(String, String)], name: &str) -> &'a str {
    let found = list.iter().find(|(known, _)| known == name);
    found.map_or("", |(_, value)| value)
}

pub(super) fn html(status: StatusCode, text: String) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/html; charset=utf-8")];
    (status, kind, text).into_response()
}

/// A redirect to a relative URL. The browser asks there with GET.
pub(super) fn see(location: &str) -> Response {
    let location =
        HeaderValue::try_from(location).unwrap_or_else(|_| HeaderValue::from_static("./"));
    (StatusCode::SEE_OTHER, [(header::LOCATION, location)]).into_response()
}

fn version(text: &str) -> String {
    let hash = Sha256::digest(text);
    hash.iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// A page, and the part of it that is live.
pub(super) trait Page: Template {
    fn frame(&self) -> askama::Result<String>;
}

/// Implements [`Page`] for a template with the block `frame`.
macro_rules! page {
    ($name:ty) => {
        impl crate::ingress::http::ui::visit::Page for $name {
            fn frame(&self) -> askama::Result<String> {
                askama::Template::render(&self.as_frame())
            }
        }
    };
}
pub(super) use page;
