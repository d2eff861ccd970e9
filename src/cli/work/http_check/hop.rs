//! Makes one request, over a new connection, so that the times and the certificate belong to this
//! request.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, anyhow, bail};
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
    net::{TcpStream, lookup_host},
    task::JoinSet,
};
use tokio_rustls::TlsConnector;
use url::Url;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::model::to_rfc_3339;

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
    /// The address that the request connected to.
    pub(super) server: SocketAddr,
    pub(super) tls_expires_at: Option<String>,
}

impl Answer {
    /// The target of a redirect. Non-ASCII bytes are percent-encoded, as in curl.
    pub(super) fn redirect(&self) -> Option<String> {
        let is_redirect = matches!(self.status.as_u16(), 301 | 302 | 303 | 307 | 308);
        self.headers
            .get(header::LOCATION)
            .filter(|_| is_redirect)
            .map(ascii)
    }

    /// How long a busy server asks to wait.
    pub(super) fn asks_to_wait(&self) -> Option<Duration> {
        let is_busy = matches!(
            self.status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        );
        wait(
            &self.text(header::RETRY_AFTER).filter(|_| is_busy)?,
            SystemTime::now(),
        )
    }

    pub(super) fn content_length(&self) -> Option<u64> {
        self.text(header::CONTENT_LENGTH)?.parse().ok()
    }

    pub(super) fn content_type(&self) -> Option<String> {
        self.text(header::CONTENT_TYPE)
    }

    /// The value of a header; invalid UTF-8 is replaced.
    fn text(&self, name: HeaderName) -> Option<String> {
        self.headers
            .get(name)
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
    }
}

impl Hop {
    /// Returns the answer; the error says which step failed. The caller sets a deadline.
    ///
    /// `sent_by` is the address of the public site that redirects here, if there is one. Then only
    /// public addresses, and the site itself, are connected to.
    pub(super) async fn ask(
        &self,
        url: &Url,
        method: &Method,
        sent_by: Option<IpAddr>,
    ) -> Result<Answer, String> {
        // Show all causes, because that of TLS comes last.
        self.request(url, method, sent_by)
            .await
            .map_err(|error| format!("{error:#}"))
    }

    async fn request(
        &self,
        url: &Url,
        method: &Method,
        sent_by: Option<IpAddr>,
    ) -> anyhow::Result<Answer> {
        let began = Instant::now();
        let host = url
            .host_str()
            .context("it has no host")?
            .trim_matches(['[', ']']);
        let port = url.port_or_known_default().context("it has no port")?;
        let mut addresses: Vec<_> = lookup_host((host, port))
            .await
            .context("cannot connect")?
            .collect();
        if let Some(sent_by) = sent_by {
            let first = addresses.first().copied();
            // A site may redirect to itself.
            addresses.retain(|address| !is_inside(address.ip()) || address.ip() == sent_by);
            if let Some(first) = first.filter(|_| addresses.is_empty()) {
                bail!(
                    "a site outside redirects to {first}, which is not an address of the internet"
                );
            }
        }
        let socket = TcpStream::connect(&addresses[..])
            .await
            .context("cannot connect")?;
        let server = socket.peer_addr()?;
        let mut tls_expires_at = None;
        let mut driver = JoinSet::new();
        let mut sender = if url.scheme() == "https" {
            let name = ServerName::try_from(host.to_owned())?;
            let encrypted = TlsConnector::from(self.tls.clone())
                .connect(name, socket)
                .await
                .context("cannot speak TLS")?;
            let certificate = encrypted
                .get_ref()
                .1
                .peer_certificates()
                .and_then(<[_]>::first);
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

    /// Reads the body; returns how much was read, and whether there is more.
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

/// Percent-encodes the bytes of the value that are not ASCII.
fn ascii(value: &HeaderValue) -> String {
    let mut text = String::new();
    for byte in value.as_bytes() {
        if byte.is_ascii() {
            text.push(char::from(*byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// True for an address in a private network. Only servers there may redirect to other internal
/// addresses.
pub(super) fn is_of_own_network(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(ip) => {
            ip.is_private() || ip.is_loopback() || ip.is_link_local() || ip.is_unspecified()
        }
        IpAddr::V6(ip) => {
            ip.is_unique_local()
                || ip.is_loopback()
                || ip.is_unicast_link_local()
                || ip.is_unspecified()
        }
    }
}

/// True for an address that IANA's special-purpose registries do not list as globally reachable,
/// and for one that maps to such an address by translation or tunneling.
pub(super) fn is_inside(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_inside_v4(ip),
        IpAddr::V6(ip) => is_inside_v6(ip),
    }
}

fn is_inside_v4(ip: Ipv4Addr) -> bool {
    const INSIDE: [([u8; 4], u32); 16] = [
        ([0, 0, 0, 0], 8),
        ([10, 0, 0, 0], 8),
        ([100, 64, 0, 0], 10),
        ([127, 0, 0, 0], 8),
        ([169, 254, 0, 0], 16),
        ([172, 16, 0, 0], 12),
        ([192, 0, 0, 0], 24),
        ([192, 0, 2, 0], 24),
        // 6to4 relays, which no longer exist.
        ([192, 88, 99, 0], 24),
        ([192, 168, 0, 0], 16),
        ([198, 18, 0, 0], 15),
        ([198, 51, 100, 0], 24),
        ([203, 0, 113, 0], 24),
        // Multicast.
        ([224, 0, 0, 0], 4),
        ([240, 0, 0, 0], 4),
        ([255, 255, 255, 255], 32),
    ];
    // Anycast addresses of PCP and TURN.
    const OUTSIDE: [[u8; 4]; 2] = [[192, 0, 0, 9], [192, 0, 0, 10]];
    let bits = ip.to_bits();
    let is_in = |(net, length): &([u8; 4], u32)| {
        (bits ^ u32::from_be_bytes(*net)).leading_zeros() >= *length
    };
    INSIDE.iter().any(is_in) && !OUTSIDE.contains(&ip.octets())
}

fn is_inside_v6(ip: Ipv6Addr) -> bool {
    const INSIDE: [(Ipv6Addr, u32); 13] = [
        // Unspecified, loopback, and the deprecated IPv4-compatible addresses.
        (Ipv6Addr::UNSPECIFIED, 96),
        // IPv4-translated (RFC 2765).
        (Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, 0, 0), 96),
        // NAT64 prefixes for local use.
        (Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0), 48),
        (Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0), 64),
        (Ipv6Addr::new(0x100, 0, 0, 1, 0, 0, 0, 0), 64),
        (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
        (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
        (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
        (Ipv6Addr::new(0x5f00, 0, 0, 0, 0, 0, 0, 0), 16),
        (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7),
        (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10),
        // Site-local addresses, which are deprecated.
        (Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0), 10),
        // Multicast.
        (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8),
    ];
    // Exceptions within 2001::/23.
    const OUTSIDE: [(Ipv6Addr, u32); 7] = [
        (Ipv6Addr::new(0x2001, 1, 0, 0, 0, 0, 0, 1), 128),
        (Ipv6Addr::new(0x2001, 1, 0, 0, 0, 0, 0, 2), 128),
        (Ipv6Addr::new(0x2001, 1, 0, 0, 0, 0, 0, 3), 128),
        (Ipv6Addr::new(0x2001, 3, 0, 0, 0, 0, 0, 0), 32),
        (Ipv6Addr::new(0x2001, 4, 0x112, 0, 0, 0, 0, 0), 48),
        (Ipv6Addr::new(0x2001, 0x20, 0, 0, 0, 0, 0, 0), 28),
        (Ipv6Addr::new(0x2001, 0x30, 0, 0, 0, 0, 0, 0), 28),
    ];
    const MAPPED: (Ipv6Addr, u32) = (Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96);
    const NAT64: (Ipv6Addr, u32) = (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);
    const TEREDO: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32);
    const SIX_TO_FOUR: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16);
    let bits = ip.to_bits();
    let is_in = |(net, length): &(Ipv6Addr, u32)| (bits ^ net.to_bits()).leading_zeros() >= *length;
    // The IPv4 address that starts at this bit.
    let v4_at = |bit: u32| {
        Ipv4Addr::from_bits(u32::try_from(bits >> (96 - bit) & 0xffff_ffff).unwrap_or_default())
    };
    if is_in(&MAPPED) || is_in(&NAT64) {
        return is_inside_v4(v4_at(96));
    }
    if is_in(&SIX_TO_FOUR) {
        return is_inside_v4(v4_at(16));
    }
    if is_in(&TEREDO) {
        let server = v4_at(32);
        // The client's address is stored inverted.
        let client = Ipv4Addr::from_bits(!v4_at(96).to_bits());
        return is_inside_v4(server) || is_inside_v4(client);
    }
    INSIDE.iter().any(is_in) && !OUTSIDE.iter().any(is_in)
}

/// Parses the value of `Retry-After`: seconds, or the time until which to wait. A time in the past
/// means no wait.
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

/// The expiry time of a certificate, in RFC 3339 format.
fn expires_at(certificate: &[u8]) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(to_rfc_3339(
        certificate
            .validity()
            .not_after
            .timestamp()
            .checked_mul(1000)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_not_globally_reachable_are_inside() {
        let is_inside = |text: &str| is_inside(text.parse().unwrap());
        for inside in [
            "0.0.0.0",
            "0.1.2.3",
            "10.1.2.3",
            "100.64.0.0",
            "100.100.100.200",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.0.8",
            "192.0.0.170",
            "192.0.2.7",
            "192.88.99.1",
            "192.168.0.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.5",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:0:10.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:192.0.2.7",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b::127.0.0.1",
            "64:ff9b:1::1",
            "64:ff9b:1::8.8.8.8",
            "100::1",
            "100:0:0:1::1",
            // Teredo: the server is 127.0.0.1, or the client is 10.0.0.1.
            "2001:0:7f00:1::1",
            "2001:0:808:808:0:0:f5ff:fffe",
            "2001:1::4",
            "2001:2::1",
            "2001:10::1",
            "2001:1ff::1",
            "2001:db8::1",
            "2002:7f00:1::1",
            "2002:a9fe:a9fe::1",
            "3fff::1",
            "3fff:fff::1",
            "5f00::1",
            "fc00::1",
            "fd00::1",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(is_inside(inside), "{inside}");
        }
        for outside in [
            "1.1.1.1",
            "8.8.8.8",
            "100.63.255.255",
            "100.128.0.0",
            "172.15.255.255",
            "172.32.0.1",
            "192.0.0.9",
            "192.0.0.10",
            "192.0.1.1",
            "192.0.3.1",
            "198.17.255.255",
            "198.20.0.0",
            "203.0.114.1",
            "223.255.255.255",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
            "2001:0:808:808:0:0:f7f7:f7f7",
            "2001:1::1",
            "2001:1::2",
            "2001:1::3",
            "2001:3::1",
            "2001:4:112::1",
            "2001:20::1",
            "2001:3f::1",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2002:808:808::1",
            "2606:4700::1",
            "2620:4f:8000::1",
            "4000::1",
        ] {
            assert!(!is_inside(outside), "{outside}");
        }
    }

    #[tokio::test]
    async fn a_site_outside_leads_to_no_server_inside() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let tls = ClientConfig::builder()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let hop = Hop {
            tls: tls.into(),
            user_agent: HeaderValue::from_static("test"),
            most_bytes: 1,
        };
        let outside = Some("203.0.113.5".parse().unwrap());
        for host in ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"] {
            let url = Url::parse(&format!("http://{host}:{port}/")).unwrap();
            let said = hop.ask(&url, &Method::GET, outside).await.err().unwrap();
            assert!(
                said.starts_with("a site outside redirects to ")
                    && said.ends_with("address of the internet"),
                "{said}"
            );
        }
        // Addresses are checked before connecting, so the first connection to arrive is this test's
        // own.
        let own = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (_, peer) = listener.accept().await.unwrap();
        assert_eq!(peer, own.local_addr().unwrap());
    }

    #[test]
    fn a_location_is_followed_whatever_its_bytes_are() {
        let base = Url::parse("http://example.org/start").unwrap();
        let cases: [(&[u8], &str); 5] = [
            (b"/cafe", "http://example.org/cafe"),
            (
                "/café?q=ü#é".as_bytes(),
                "http://example.org/caf%C3%A9?q=%C3%BC#%C3%A9",
            ),
            (b"/caf\xe9", "http://example.org/caf%E9"),
            ("/caf%C3%A9".as_bytes(), "http://example.org/caf%C3%A9"),
            (
                "http://bücher.example/".as_bytes(),
                "http://xn--bcher-kva.example/",
            ),
        ];
        for (bytes, want) in cases {
            let target = ascii(&HeaderValue::from_bytes(bytes).unwrap());
            assert_eq!(base.join(&target).unwrap().as_str(), want);
        }
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
