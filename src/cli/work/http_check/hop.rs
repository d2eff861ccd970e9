//! One request over a connection of its own, so that its times and its certificate belong to it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, anyhow, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    HeaderMap, Method, Request, StatusCode,
    body::Incoming,
    client::conn::http1,
    header::{self, HeaderName, HeaderValue},
};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinSet,
};
use tokio_rustls::TlsConnector;
use url::Url;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::wire::time::to_rfc_3339;

pub(super) struct Hop {
    pub(super) tls: Arc<ClientConfig>,
    pub(super) user_agent: HeaderValue,
    pub(super) most_bytes: u64,
}

/// The answer of a server.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    headers: HeaderMap,
    pub(super) first_byte: Duration,
    pub(super) bytes: u64,
    pub(super) is_truncated: bool,
    /// The address that answered.
    pub(super) server: SocketAddr,
    pub(super) tls_expires_at: Option<String>,
}

impl Answer {
    pub(super) fn redirect(&self) -> Option<&str> {
        let is_redirect = matches!(self.status.as_u16(), 301 | 302 | 303 | 307 | 308);
        self.text(header::LOCATION).filter(|_| is_redirect)
    }

    /// The wait that a busy server asks for.
    pub(super) fn asks_to_wait(&self) -> Option<Duration> {
        let is_busy = matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        wait(self.text(header::RETRY_AFTER).filter(|_| is_busy)?, SystemTime::now())
    }

    pub(super) fn content_length(&self) -> Option<u64> {
        self.text(header::CONTENT_LENGTH)?.parse().ok()
    }

    pub(super) fn content_type(&self) -> Option<&str> {
        self.text(header::CONTENT_TYPE)
    }

    fn text(&self, name: HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

impl Hop {
    /// The answer; the error says at which step there was none. The caller sets a deadline. With `is_outside` a server
    /// inside this network is asked nothing.
    pub(super) async fn ask(&self, url: &Url, method: &Method, is_outside: bool) -> Result<Answer, String> {
        // All causes: that of TLS is the last one.
        self.request(url, method, is_outside).await.map_err(|error| format!("{error:#}"))
    }

    async fn request(&self, url: &Url, method: &Method, is_outside: bool) -> anyhow::Result<Answer> {
        let began = Instant::now();
        let host = url.host_str().context("it has no host")?.trim_matches(['[', ']']);
        let port = url.port_or_known_default().context("it has no port")?;
        let socket = TcpStream::connect((host, port)).await.context("cannot connect")?;
        let server = socket.peer_addr()?;
        ensure!(!(is_outside && is_inside(server.ip())), "a site outside redirects to {server}, inside this network");
        let mut tls_expires_at = None;
        let mut driver = JoinSet::new();
        let mut sender = if url.scheme() == "https" {
            let name = ServerName::try_from(host.to_owned())?;
            let encrypted =
                TlsConnector::from(self.tls.clone()).connect(name, socket).await.context("cannot speak TLS")?;
            let certificate = encrypted.get_ref().1.peer_certificates().and_then(<[_]>::first);
            tls_expires_at = certificate.and_then(|certificate| expires_at(certificate));
            handshake(encrypted, &mut driver).await?
        } else {
            handshake(socket, &mut driver).await?
        };
        let mut authority = url.host_str().unwrap_or_default().to_owned();
        if let Some(port) = url.port() {
            authority = format!("{authority}:{port}");
        }
        let path = &url[url::Position::BeforePath..url::Position::AfterQuery];
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, authority)
            .header(header::USER_AGENT, &self.user_agent)
            .header(header::ACCEPT, "*/*")
            .header(header::CONNECTION, "close")
            .body(Empty::new())?;
        let answer = sender.send_request(request).await.context("no answer")?;
        let first_byte = began.elapsed();
        let (head, body) = answer.into_parts();
        let (bytes, is_truncated) = self.read(body).await?;
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            first_byte,
            bytes,
            is_truncated,
            server,
            tls_expires_at,
        })
    }

    /// How much of the body was read, and whether there is more.
    async fn read(&self, mut body: Incoming) -> anyhow::Result<(u64, bool)> {
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| anyhow!("the answer breaks off: {error}"))?;
            bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
            if bytes > self.most_bytes {
                return Ok((self.most_bytes, true));
            }
        }
        Ok((bytes, false))
    }
}

/// True for addresses that the internet does not route.
pub(super) fn is_inside(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.is_private() || ip.is_loopback() || ip.is_link_local() || ip.is_unspecified(),
        IpAddr::V6(ip) => ip.is_unique_local() || ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified(),
    }
}

/// A wait as `Retry-After` has it: seconds, or the time until which to wait. A time that has passed asks for no wait.
fn wait(text: &str, now: SystemTime) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let until = httpdate::parse_http_date(text).ok()?;
    Some(until.duration_since(now).unwrap_or_default())
}

async fn handshake(
    io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    driver: &mut JoinSet<hyper::Result<()>>,
) -> anyhow::Result<http1::SendRequest<Empty<Bytes>>> {
    let (sender, connection) = http1::handshake(TokioIo::new(io)).await?;
    driver.spawn(connection);
    Ok(sender)
}

/// The end of a certificate, as RFC 3339 has it.
fn expires_at(certificate: &[u8]) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(to_rfc_3339(certificate.validity().not_after.timestamp().checked_mul(1000)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_inside_are_known() {
        let is_inside = |text: &str| is_inside(text.parse().unwrap());
        let inside = ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "0.0.0.0"];
        assert!(inside.into_iter().chain(["::1", "fd00::1", "fe80::1", "::ffff:10.0.0.1"]).all(is_inside));
        assert!(!["192.0.2.7", "172.32.0.1", "2001:db8::1", "::ffff:192.0.2.7"].into_iter().any(is_inside));
    }

    #[tokio::test]
    async fn a_site_outside_leads_to_no_server_inside() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = Url::parse(&format!("http://{}/", listener.local_addr().unwrap())).unwrap();
        let tls = ClientConfig::builder().with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
        let hop = Hop { tls: tls.into(), user_agent: HeaderValue::from_static("test"), most_bytes: 1 };
        let said = hop.ask(&url, &Method::GET, true).await.err().unwrap();
        assert!(said.starts_with("a site outside redirects to 127.0.0.1:"), "{said}");
        let (mut socket, _) = listener.accept().await.unwrap();
        assert_eq!(tokio::io::AsyncReadExt::read(&mut socket, &mut [0]).await.unwrap(), 0, "it is asked nothing");
    }

    #[test]
    fn a_wait_is_seconds_or_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let seconds = |text| wait(text, now).map(|wait| wait.as_secs());
        assert_eq!(seconds("120"), Some(120));
        assert_eq!(seconds("Sun, 06 Nov 1994 08:51:37 GMT"), Some(120));
        assert_eq!(seconds("Sunday, 06-Nov-94 08:51:37 GMT"), Some(120));
        assert_eq!(seconds("Sun, 06 Nov 1994 08:49:37 GMT"), Some(0));
        assert_eq!(seconds("Sun, 06 Nov 1994 08:00:00 GMT"), Some(0));
        assert_eq!(seconds("soon"), None);
        assert_eq!(seconds("-1"), None);
    }
}
