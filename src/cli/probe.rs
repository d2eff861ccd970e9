//! Probes whether a port speaks HTTP/2, as gRPC does. Without this, a command would take another
//! server for a taskd that is away, and wait for it.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tonic::transport::Uri;

const WITHIN: Duration = Duration::from_secs(1);
/// A client's connection preface and an empty SETTINGS frame. The first frame of a server is a
/// SETTINGS frame, too (RFC 9113, section 3.4).
const HTTP_2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const SETTINGS: u8 = 4;
const HTTP_1: &[u8] = b"GET / HTTP/1.0\r\n\r\n";
/// A TLS server answers both requests with an alert, in TLS 1.0 to 1.3 (RFC 8446, section 5.1).
const ALERT: &[u8] = &[21, 3];

/// The protocol of a server that does not speak HTTP/2.
pub(super) enum Other {
    Http1,
    Tls,
}

/// Returns which other protocol the server at an `http://` URL speaks, or `None` if it speaks
/// HTTP/2 or does not answer.
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

/// Sends a request, and returns the first nine bytes of the answer, the length of an HTTP/2 frame
/// header.
async fn ask(at: (&str, u16), question: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(at).await?;
    stream.write_all(question).await?;
    let mut answer = Vec::new();
    stream.take(9).read_to_end(&mut answer).await?;
    Ok(answer)
}
