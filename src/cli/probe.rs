//! A look whether a port speaks HTTP/2, as gRPC does. A command would take another server for a
//! taskd that is away, and wait for it.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tonic::transport::Uri;

const WITHIN: Duration = Duration::from_secs(1);
/// The preface of a client and an empty frame of settings. The server's own settings are its first
/// frame (RFC 9113, section 3.4).
const HTTP_2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const SETTINGS: u8 = 4;
const HTTP_1: &[u8] = b"GET / HTTP/1.0\r\n\r\n";
/// A server with TLS answers these with an alert of TLS 1.0 to 1.3 (RFC 8446, section 5.1).
const ALERT: &[u8] = &[21, 3];

/// The protocol of a server that does not speak HTTP/2.
pub(super) enum Other {
    Http1,
    Tls,
}

/// Asks the server at a URL without TLS. `None`: it speaks HTTP/2, or does not answer.
pub(super) async fn speaks_other(url: &Uri) -> Option<Other> {
    let (Some("http"), Some(host)) = (url.scheme_str(), url.host()) else {
        return None;
    };
    let at = (host.trim_matches(['[', ']']), url.port_u16().unwrap_or(80));
    let look = async {
        let first = ask(at, HTTP_2).await.ok()?;
        if first.starts_with(ALERT) {
            return Some(Other::Tls);
        }
        if first.get(3) == Some(&SETTINGS) {
            return None;
        }
        ask(at, HTTP_1)
            .await
            .ok()?
            .starts_with(b"HTTP/1")
            .then_some(Other::Http1)
    };
    timeout(WITHIN, look).await.ok().flatten()
}

/// The first bytes of an answer: nine, or all.
async fn ask(at: (&str, u16), question: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(at).await?;
    stream.write_all(question).await?;
    let mut answer = Vec::new();
    stream.take(9).read_to_end(&mut answer).await?;
    Ok(answer)
}
