//! Keeps web pages out.
//!
//! taskd may require no token, so a page in a browser on the same machine must not reach it. A page
//! can reach a port of its visitor's machine in two ways. Its own name may point there (DNS
//! rebinding): then the request carries a name that is not taskd's. Or it sends a request to
//! taskd's address: then the browser tells from which site the page is. The page can change
//! neither. gRPC refuses requests without the content type of gRPC: a page may send that type only
//! if taskd agrees, which it never does.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::{
    extract::{Request, State as Extract},
    http::{HeaderMap, Method, StatusCode, Version, header, request, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::problem::Problem;
use crate::{
    api::{ECHO, shorten},
    config::Settings,
};

/// The names of this taskd.
#[derive(Clone, Debug)]
pub(super) struct Guard {
    allowed: std::sync::Arc<[String]>,
}

impl Guard {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            allowed: settings.allowed_hosts.clone().into(),
        }
    }

    pub(super) fn check(&self, head: &request::Parts) -> Result<(), Problem> {
        check_transfer_encoding(&head.headers)?;
        for name in named(head)? {
            if !self.is_ours(&name) {
                let why = format!(
                    "{:?} is no name of this taskd; use its IP address or localhost, or add the name to allowed_hosts",
                    shorten(&name, ECHO)
                );
                return Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, why));
            }
        }
        if is_of_another_site(head) {
            return Err(Problem::new(
                StatusCode::FORBIDDEN,
                "requests from pages of other sites are not taken",
            ));
        }
        Ok(())
    }

    /// True for IP addresses, localhost and allowed names. A page can only have one of them if it
    /// is served from there.
    fn is_ours(&self, name: &str) -> bool {
        let is_address = name.parse::<Ipv4Addr>().is_ok()
            || name
                .strip_prefix('[')
                .and_then(|name| name.strip_suffix(']')?.parse::<Ipv6Addr>().ok())
                .is_some();
        let is_local = name == "localhost" || name.ends_with(".localhost");
        let is_allowed = |allowed: &String| match allowed.strip_prefix('.') {
            Some(domain) => name == domain || name.ends_with(allowed.as_str()),
            None => allowed == "*" || name == allowed,
        };
        is_address || is_local || self.allowed.iter().any(is_allowed)
    }
}

/// Refuses a transfer encoding other than a single `chunked` (RFC 9112, 6.1), since hyper removes
/// only the outermost one.
fn check_transfer_encoding(headers: &HeaderMap) -> Result<(), Problem> {
    let mut chunked = false;
    for value in headers.get_all(header::TRANSFER_ENCODING) {
        let value = String::from_utf8_lossy(value.as_bytes());
        for encoding in value
            .split(',')
            .map(str::trim)
            .filter(|encoding| !encoding.is_empty())
        {
            if !encoding.eq_ignore_ascii_case("chunked") {
                let why = format!(
                    "transfer encoding {:?} is not understood; use chunked",
                    shorten(encoding, ECHO)
                );
                return Err(Problem::new(StatusCode::NOT_IMPLEMENTED, why).and_close());
            }
            if chunked {
                return Err(
                    Problem::bad_request("the transfer encoding chunked is given twice")
                        .and_close(),
                );
            }
            chunked = true;
        }
    }
    Ok(())
}

/// The hosts that the request names, in lower case and without ports.
fn named(head: &request::Parts) -> Result<Vec<String>, Problem> {
    let wrong = |why: &str| Problem::bad_request(why).and_close();
    let mut hosts = head.headers.get_all(header::HOST).iter();
    let mut authorities = Vec::from_iter(head.uri.authority().cloned());
    match (hosts.next(), hosts.next()) {
        (_, Some(_)) => return Err(wrong("the header Host is there more than once")),
        // An HTTP/1.0 request needs no Host, and no browser sends one.
        (None, None) if head.version == Version::HTTP_10 => {}
        (None, None) => return Err(wrong("the header Host is missing")),
        (Some(host), None) => {
            let authority = Authority::try_from(host.as_bytes())
                .ok()
                .filter(|host| !host.as_str().contains('@'));
            authorities.push(authority.ok_or_else(|| wrong("the header Host names no host"))?);
        }
    }
    let name = |authority: Authority| authority.host().trim_end_matches('.').to_ascii_lowercase();
    Ok(authorities.into_iter().map(name).collect())
}

/// True for a request that a browser sends on behalf of another site. A link may lead to a route
/// that only reads, since the other site does not see the answer.
fn is_of_another_site(head: &request::Parts) -> bool {
    let value = |name: &str| text(&head.headers, name);
    let reads = matches!(head.method, Method::GET | Method::HEAD);
    match value("sec-fetch-site") {
        Some("same-origin" | "none") => false,
        Some("same-site") => !reads,
        Some(_) => !(reads && value("sec-fetch-mode") == Some("navigate")),
        // Browsers from before 2023, and other clients. A read within one site has no Origin.
        None if reads => false,
        None => value("origin").is_some_and(|origin| {
            let site = origin.split_once("://").map(|(_, site)| site);
            site != text(&head.headers, header::HOST.as_str())
        }),
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

pub(super) async fn check(
    Extract(guard): Extract<Guard>,
    request: Request,
    next: Next,
) -> Response {
    let (head, body) = request.into_parts();
    match guard.check(&head) {
        Ok(()) => next.run(Request::from_parts(head, body)).await,
        Err(problem) => problem.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(method: &str, uri: &str, headers: &[(&str, &str)]) -> u16 {
        let mut request = axum::http::Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (head, ()) = request.body(()).unwrap().into_parts();
        let settings = Settings {
            allowed_hosts: vec!["taskd".into(), ".example.org".into()],
            ..Settings::default()
        };
        match Guard::new(&settings).check(&head) {
            Ok(()) => 200,
            Err(problem) => problem.into_response().status().as_u16(),
        }
    }

    #[test]
    fn only_known_names_are_served() {
        for (host, want) in [
            ("127.0.0.1:7600", 200),
            ("10.0.0.7", 200),
            ("[::1]:7600", 200),
            ("localhost:1", 200),
            ("LOCALHOST.", 200),
            ("a.localhost", 200),
            ("taskd:7600", 200),
            ("example.org", 200),
            ("a.b.example.org:80", 200),
            ("evil.example:7600", 421),
            ("badexample.org", 421),
            ("localhost.evil.example", 421),
            ("127.0.0.1.evil.example", 421),
            ("taskd.evil.example", 421),
            ("", 400),
            ("a b", 400),
            ("user@localhost", 400),
        ] {
            assert_eq!(
                verdict("GET", "/v1/queues", &[("host", host)]),
                want,
                "{host:?}"
            );
        }
        assert_eq!(verdict("GET", "/", &[]), 400, "none");
        assert_eq!(
            verdict("GET", "/", &[("host", "localhost"), ("host", "localhost")]),
            400,
            "two"
        );
        assert_eq!(
            verdict("GET", "http://evil.example/", &[("host", "localhost")]),
            421,
            "the target counts, too"
        );
    }

    #[test]
    fn a_body_is_chunked_once_or_not_at_all() {
        for (encodings, want) in [
            (&["chunked"][..], 200),
            (&["Chunked"], 200),
            (&["gzip, chunked"], 501),
            (&["chunked, chunked"], 400),
            (&["chunked", "chunked"], 400),
            (&["identity"], 501),
            (&["gzip", "chunked"], 501),
        ] {
            let mut headers = vec![("host", "localhost")];
            headers.extend(
                encodings
                    .iter()
                    .map(|encoding| ("transfer-encoding", *encoding)),
            );
            assert_eq!(
                verdict("POST", "/v1/tasks", &headers),
                want,
                "{encodings:?}"
            );
        }
    }

    #[test]
    fn pages_of_other_sites_are_not_served() {
        let from = |method, headers: &[(&str, &str)]| {
            verdict(
                method,
                "/v1/tasks",
                &[headers, &[("host", "localhost:7600")]].concat(),
            )
        };
        for (method, headers, want) in [
            ("POST", &[("sec-fetch-site", "cross-site")][..], 403),
            ("POST", &[("sec-fetch-site", "same-site")], 403),
            ("POST", &[("sec-fetch-site", "same-origin")], 200),
            ("POST", &[("sec-fetch-site", "none")], 200),
            (
                "GET",
                &[
                    ("sec-fetch-site", "cross-site"),
                    ("sec-fetch-mode", "no-cors"),
                ],
                403,
            ),
            (
                "GET",
                &[
                    ("sec-fetch-site", "cross-site"),
                    ("sec-fetch-mode", "navigate"),
                ],
                200,
            ),
            (
                "POST",
                &[
                    ("sec-fetch-site", "cross-site"),
                    ("sec-fetch-mode", "navigate"),
                ],
                403,
            ),
            ("POST", &[("origin", "https://evil.example")], 403),
            ("POST", &[("origin", "null")], 403),
            ("POST", &[("origin", "http://localhost:7600")], 200),
            ("POST", &[], 200),
        ] {
            assert_eq!(from(method, headers), want, "{method} {headers:?}");
        }
    }
}
