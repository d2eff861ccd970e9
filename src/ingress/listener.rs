//! Sockets: bound once, with an error that says what to do, and connections that cannot be held open by doing nothing.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::Router;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Instant, Sleep, sleep},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// A client may take so long for its request's head, or between two requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// A client that takes nothing of its answer for so long has gone.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// Listens on `addr`; `what` is `http` or `grpc`, as in `--http-listen`.
pub async fn bind(addr: SocketAddr, what: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(addr).await.map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::AddrInUse => "address in use".to_owned(),
            io::ErrorKind::AddrNotAvailable => "this machine has no such address".to_owned(),
            io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
            _ => error.to_string(),
        };
        anyhow::anyhow!("cannot listen on {addr} ({what}): {why}; choose another with --{what}-listen")
    })
}

/// Serves until `stop`, then until the requests in hand are answered.
pub(super) async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            Ok((stream, _)) => drop(connections.spawn(connection(stream, router.clone(), stop.clone()))),
            // Mostly too many open files: others have to end first.
            Err(error) => {
                tracing::warn!("cannot accept an HTTP connection: {error}");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn connection(stream: TcpStream, router: Router, stop: CancellationToken) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("cannot set TCP_NODELAY: {error}");
    }
    let io = TokioIo::new(Patient::new(stream, WRITE_TIMEOUT));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(io, TowerToHyperService::new(router));
    let mut connection = std::pin::pin!(connection);
    let served = tokio::select! {
        served = &mut connection => served,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        tracing::debug!("an HTTP connection ended with {error}");
    }
}

/// A stream whose writes fail when none of them has got through for `limit`. Patient, but not for ever.
struct Patient<T> {
    inner: T,
    limit: Duration,
    /// Runs while a write waits.
    waiting: bool,
    deadline: Pin<Box<Sleep>>,
}

impl<T> Patient<T> {
    fn new(inner: T, limit: Duration) -> Self {
        Self { inner, limit, waiting: false, deadline: Box::pin(sleep(limit)) }
    }

    fn watch<R>(&mut self, written: Poll<io::Result<R>>, cx: &mut Context<'_>) -> Poll<io::Result<R>> {
        if written.is_ready() {
            self.waiting = false;
            return written;
        }
        if !self.waiting {
            self.waiting = true;
            self.deadline.as_mut().reset(Instant::now() + self.limit);
        }
        ready!(self.deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read its answer")))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Patient<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Patient<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.watch(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.watch(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        self.watch(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.watch(shut, cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_write_that_nobody_takes_fails_instead_of_waiting_for_ever() {
        let (ours, mut theirs) = tokio::io::duplex(4);
        let mut ours = Patient::new(ours, Duration::from_millis(50));
        let mut bytes = [0; 4];
        for _ in 0..2 {
            ours.write_all(b"1234").await.unwrap();
            theirs.read_exact(&mut bytes).await.unwrap();
        }
        let error = ours.write_all(b"12345").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_taken_address_is_answered_with_the_flag_that_helps() {
        let taken = bind("127.0.0.1:0".parse().unwrap(), "http").await.unwrap().local_addr().map(|addr| addr.port());
        let holder = bind(([127, 0, 0, 1], taken.unwrap()).into(), "http").await.unwrap();
        let addr = holder.local_addr().unwrap();
        let error = bind(addr, "http").await.unwrap_err().to_string();
        assert_eq!(error, format!("cannot listen on {addr} (http): address in use; choose another with --http-listen"));
    }
}
