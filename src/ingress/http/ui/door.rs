//! Who may open a page. A token that is pasted at `/ui/login` becomes a cookie, which each request
//! checks as it would check a bearer token, so a revoked one is out at once. `/v1` never reads the
//! cookie.
//!
//! The cookie has no path: browsers then send it to the folder of the login page only, also below
//! the path of a proxy. A form must prove that it comes from a page of the same origin, because
//! browsers attach the cookie to requests of other ports of the host, too.

use std::sync::Arc;

use askama::Template;
use axum::{
    extract::{Request, State as Extract},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::{
    super::{
        super::{authenticate::admit as let_in, json, refused},
        problem::{Problem, Refusal},
        request::whole,
    },
    format,
    looks::Looks,
    scene::{Head, Scene},
    visit::{FRAME, form, html, see},
};
use crate::{
    api::{Api, Kind},
    config::{Dashboard, Settings},
    ingress::State,
    model::{Caller, Client, Role},
};

const COOKIE: &str = "taskd";

/// Only files of this taskd: no inline script, no inline style, no other origin.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
);

/// What requests for one page need.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) api: Arc<Api>,
    pub(super) settings: Arc<Settings>,
    pub(super) looks: Arc<Looks>,
    pub(super) is_tls: bool,
    /// For the log.
    pub(super) route: Arc<str>,
    /// `None` for what everybody may see.
    pub(super) role: Option<Role>,
    pub(super) parameters: &'static [&'static str],
    /// Changes nothing but the cookie, so a read-only dashboard takes its form, too.
    pub(super) is_door: bool,
}

/// Admits a request for a page, and shows every refusal and every error as a page.
pub(super) async fn admit(
    Extract(entry): Extract<Entry>,
    request: Request,
    next: Next,
) -> Response {
    let (mut head, body) = request.into_parts();
    let path = head.uri.path_and_query().map_or("", |path| path.as_str());
    let host = text(&head.headers, header::HOST.as_str()).unwrap_or_default();
    let mut scene = Scene::new(&entry.settings, path, host, entry.is_tls);
    let client: Client = *head
        .extensions
        .get()
        .expect("the connection gives each request its client");
    let is_frame = head.headers.contains_key(FRAME);
    let is_form = head.method == Method::POST;
    if is_form {
        let refused = if !is_of_same_origin(&head.headers) {
            Some("this form was not sent by a page of this taskd, so nothing was changed")
        } else if entry.settings.dashboard != Dashboard::On && !entry.is_door {
            Some("this dashboard is read-only (dashboard = \"read-only\"), so nothing was changed")
        } else {
            None
        };
        if let Some(why) = refused {
            let answer = Problem::new(StatusCode::FORBIDDEN, why).into_response();
            return shown(answer, &scene, &entry, &client, None);
        }
    }
    if let Some(role) = entry.role {
        let token = cookie(&head.headers).map(|token| format!("Bearer {token}"));
        let admitted = let_in(&entry.api, token.as_deref(), &mut head.extensions, role).await;
        if let Err(error) = admitted {
            if error.kind() == Kind::Unauthenticated && !is_form && !is_frame {
                let to = format::query(&[("to", &scene.path)]);
                return guarded(see(&format!("{}login{to}", scene.root)));
            }
            let answer = Problem::from(error).into_response();
            return shown(answer, &scene, &entry, &client, None);
        }
    }
    let caller: Option<Caller> = head.extensions.get().cloned();
    if let Some(caller) = &caller {
        scene.seen_by(&caller.access, &entry.settings);
    }
    let query = head.uri.query().unwrap_or_default();
    if let Err(why) = json::query::check(query, entry.parameters) {
        let answer = Problem::bad_request(why).into_response();
        return shown(answer, &scene, &entry, &client, caller.as_ref());
    }
    head.extensions.insert(scene.clone());
    head.extensions.insert(Arc::clone(&entry.looks));
    let answer = next.run(Request::from_parts(head, body)).await;
    shown(answer, &scene, &entry, &client, caller.as_ref())
}

/// Makes a page of an error.
fn shown(
    answer: Response,
    scene: &Scene,
    entry: &Entry,
    client: &Client,
    caller: Option<&Caller>,
) -> Response {
    let Some(Refusal(why)) = answer.extensions().get().cloned() else {
        return guarded(answer);
    };
    let status = answer.status();
    let access = caller.map(|caller| &caller.access);
    refused::log(status, client, access, &entry.route, &why);
    guarded(failure(scene, status, &why))
}

/// A page that says why a request failed, and what to do.
pub(super) fn failure(scene: &Scene, status: StatusCode, why: &str) -> Response {
    let (title, advice) = match status {
        StatusCode::BAD_REQUEST => (
            "This cannot be asked",
            "Go back, and change what is named above.",
        ),
        StatusCode::UNAUTHORIZED => ("Log in again", "Your token has expired or was revoked."),
        StatusCode::FORBIDDEN => ("This is not allowed", "Nothing was changed."),
        StatusCode::NOT_FOUND => (
            "There is nothing here",
            "It may have been removed meanwhile.",
        ),
        StatusCode::CONFLICT => (
            "It has changed meanwhile",
            "Nothing was changed. Look at it again.",
        ),
        StatusCode::TOO_MANY_REQUESTS => ("taskd is busy", "Try again in a few seconds."),
        StatusCode::SERVICE_UNAVAILABLE => (
            "A server does not answer",
            "taskd tries again by itself. Load this page again in a few seconds.",
        ),
        _ => (
            "This did not work",
            "Load the page again; the log of taskd says more.",
        ),
    };
    let page = Failed {
        head: Head::new(scene, "none", title),
        status: status.as_u16(),
        why: format::line(why),
        advice,
    };
    let text = page.render().unwrap_or_else(|_| title.to_owned());
    let mut answer = html(status, text);
    if matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    ) {
        answer
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    answer
}

#[derive(Template)]
#[template(path = "failed.html")]
struct Failed {
    head: Head,
    status: u16,
    why: String,
    advice: &'static str,
}

/// Adds the headers that keep a page from doing anything else.
///
/// The referrer policy is not `no-referrer`: browsers would send `Origin: null` with a form, and
/// without TLS that is all by which a form can prove where it comes from.
pub(super) fn guarded(mut answer: Response) -> Response {
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    headers.insert(
        header::REFERRER_POLICY,
        HeaderValue::from_static("same-origin"),
    );
    headers.insert(
        HeaderName::from_static("cross-origin-opener-policy"),
        HeaderValue::from_static("same-origin"),
    );
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    answer
}

/// True if the browser says that a page of this origin has sent the form.
fn is_of_same_origin(headers: &HeaderMap) -> bool {
    match text(headers, "sec-fetch-site") {
        Some(site) => site == "same-origin",
        None => {
            let origin = text(headers, header::ORIGIN.as_str());
            let site = origin.and_then(|origin| origin.split_once("://"));
            site.is_some_and(|(_, site)| Some(site) == text(headers, header::HOST.as_str()))
        }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// The token in the cookie.
fn cookie(headers: &HeaderMap) -> Option<&str> {
    let all = headers.get_all(header::COOKIE).iter();
    let mut pairs = all
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|pair| pair.trim().split_once('='));
    pairs
        .find(|(name, value)| *name == COOKIE && !value.is_empty())
        .map(|(_, value)| value)
}

#[derive(Template)]
#[template(path = "login.html")]
struct Login {
    head: Head,
    /// The page to go to afterwards, from `/ui/` on.
    to: String,
    why: String,
}

pub(super) async fn login(Extract(state): Extract<State>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let scene: Scene = head
        .extensions
        .get()
        .cloned()
        .expect("each page has a scene");
    if !scene.has_login {
        return see(&scene.root);
    }
    let show = |status: StatusCode, to: &str, why: String| {
        let head = Head::new(&scene, "none", "Log in");
        let to = to.to_owned();
        match (Login { head, to, why }).render() {
            Ok(text) => html(status, text),
            Err(error) => {
                Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
            }
        }
    };
    if head.method != Method::POST {
        let query = json::query::parameters(head.uri.query().unwrap_or_default());
        let query = query.unwrap_or_default();
        let to = query.into_iter().find(|(name, _)| name == "to");
        let to = to.unwrap_or_default().1;
        if let Some(token) = cookie(&head.headers) {
            let bearer = format!("Bearer {token}");
            if state
                .api
                .authenticate(Some(&bearer), Role::Read)
                .await
                .is_ok()
            {
                return see(&way_to(&to));
            }
        }
        let mut answer = show(StatusCode::OK, &to, String::new());
        // Browsers do not send the cookie with a link on another site. They do when this page loads
        // itself again.
        if text(&head.headers, "sec-fetch-site").is_some_and(|site| site.ends_with("-site")) {
            let again = HeaderValue::from_static("0");
            answer.headers_mut().insert(header::REFRESH, again);
        }
        return answer;
    }
    let fields = match whole(&head.headers, body, LONGEST_LOGIN).await {
        Ok(body) => form(&body),
        Err(problem) => Err(problem),
    };
    let fields = match fields {
        Ok(fields) => fields,
        Err(problem) => return problem.into_response(),
    };
    let field = |name: &str| {
        let found = fields.iter().find(|(known, _)| known == name);
        found.map_or("", |(_, value)| value.trim())
    };
    let token = field("token");
    let to = field("to");
    let fits = token
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'));
    if token.is_empty() || !fits {
        let why = "Paste the token that `taskd token create` printed; it begins with taskd_.";
        return show(StatusCode::BAD_REQUEST, to, why.to_owned());
    }
    let bearer = format!("Bearer {token}");
    if let Err(error) = state.api.authenticate(Some(&bearer), Role::Read).await {
        let status = match error.kind() {
            Kind::Forbidden => StatusCode::FORBIDDEN,
            Kind::Busy => StatusCode::TOO_MANY_REQUESTS,
            _ => StatusCode::UNAUTHORIZED,
        };
        return show(status, to, format::line(&error.to_string()));
    }
    let mut answer = see(&way_to(to));
    set_cookie(&mut answer, token, state.tls.is_some(), "");
    answer
}

/// The most bytes of the form.
const LONGEST_LOGIN: usize = 8 << 10;

pub(super) async fn logout(Extract(state): Extract<State>) -> Response {
    let mut answer = see("./login");
    set_cookie(&mut answer, "", state.tls.is_some(), "; Max-Age=0");
    answer
}

/// The cookie ends with the browser.
fn set_cookie(answer: &mut Response, token: &str, is_tls: bool, end: &str) {
    let secure = if is_tls { "; Secure" } else { "" };
    let cookie = format!("{COOKIE}={token}; HttpOnly; SameSite=Strict{secure}{end}");
    let cookie = HeaderValue::try_from(cookie).expect("a token has no other characters");
    answer.headers_mut().insert(header::SET_COOKIE, cookie);
}

/// The way from `/ui/login` to a page that a link has named. It stays on this taskd, whatever the
/// link says: it begins with `./`, so it can name neither a scheme nor a host.
fn way_to(path: &str) -> String {
    let mut way = String::from("./");
    for c in path.chars() {
        if c.is_ascii_graphic() && c != '\\' {
            way.push(c);
        } else {
            way.push_str(&format::encoded(&c.to_string()));
        }
    }
    way
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_proves_its_origin() {
        let of = |headers: &[(&'static str, &'static str)]| {
            let mut map = HeaderMap::new();
            for (name, value) in headers {
                map.insert(*name, HeaderValue::from_static(value));
            }
            is_of_same_origin(&map)
        };
        let host = ("host", "10.0.0.1:7600");
        assert!(of(&[host, ("sec-fetch-site", "same-origin")]));
        assert!(of(&[host, ("origin", "http://10.0.0.1:7600")]));
        for forged in [
            vec![host],
            vec![host, ("sec-fetch-site", "none")],
            vec![
                host,
                ("sec-fetch-site", "same-site"),
                ("origin", "http://10.0.0.1:7600"),
            ],
            vec![host, ("sec-fetch-site", "cross-site")],
            vec![host, ("origin", "null")],
            vec![host, ("origin", "http://10.0.0.1:7601")],
            vec![("origin", "http://10.0.0.1:7600")],
        ] {
            assert!(!of(&forged), "{forged:?}");
        }
    }

    #[test]
    fn a_login_leads_to_pages_of_this_taskd_only() {
        assert_eq!(way_to("queues/a?sort=-dead"), "./queues/a?sort=-dead");
        assert_eq!(way_to(""), "./");
        assert_eq!(way_to("//evil.example"), ".///evil.example");
        assert_eq!(way_to("https://evil.example"), "./https://evil.example");
        assert_eq!(way_to("\\\\evil\r\nx: y"), "./%5C%5Cevil%0D%0Ax:%20y");
    }

    #[test]
    fn the_cookie_is_found_among_others() {
        let mut headers = HeaderMap::new();
        headers.append(header::COOKIE, HeaderValue::from_static("a=b; taskdx=1"));
        assert_eq!(cookie(&headers), None);
        headers.append(
            header::COOKIE,
            HeaderValue::from_static("c=d;taskd=taskd_x"),
        );
        assert_eq!(cookie(&headers), Some("taskd_x"));
    }
}
