//! A look whether a port speaks HTTP/2, as gRPC does. A command would take another server for a taskd that is away, and
//! wait for it.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tonic::transport::Uri;

const WITHIN: Duration = Duration::from_secs(1);
/// The preface of a client and an empty frame of settings. The server's own settings are its first frame (RFC 9113,
/// section 3.4).
const HTTP_2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const SETTINGS: u8 = 4;
const HTTP_1: &[u8] = b"GET / HTTP/1.0\r\n\r\n";

/// Asks whether the server speaks HTTP/1 and not HTTP/2. A server that does not answer, or that has TLS, counts as one
/// that does not.
pub(super) async fn speaks_http_1(url: &Uri) -> bool {
    let (Some("http"), Some(host)) = (url.scheme_str(), url.host()) else { return false };
    let at = (host.trim_matches(['[', ']']), url.port_u16().unwrap_or(80));
    let look = async {
        let speaks_http_2 = ask(at, HTTP_2).await.is_ok_and(|answer| answer[3] == SETTINGS);
        !speaks_http_2 && ask(at, HTTP_1).await.is_ok_and(|answer| answer.starts_with(b"HTTP/1"))
    };
    timeout(WITHIN, look).await.unwrap_or(false)
}

/// The first bytes of an answer.
async fn ask(at: (&str, u16), question: &[u8]) -> std::io::Result<[u8; 9]> {
    let mut stream = TcpStream::connect(at).await?;
    stream.write_all(question).await?;
    let mut answer = [0; 9];
    stream.read_exact(&mut answer).await.map(|_| answer)
}
