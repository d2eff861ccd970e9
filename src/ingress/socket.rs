//! A client's socket: it gives up on a client that does not read, and confirms what it has written.

use std::{
    future::Future,
    io,
    mem::MaybeUninit,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep, sleep},
};

use super::delivery::Record;
use crate::queue::Delivery;

/// A client that takes nothing of its answer for so long has gone. Less than the default lease, so that it costs no
/// attempt.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes that the system may hold without having sent them. Without this bound megabytes of an answer would count as
/// written.
const UNSENT: u32 = 128 << 10;

/// The system asks a client that says nothing whether it is there, after so long, so often, so many times: one that
/// waits for a task may be gone without a word.
const SILENCE: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBES: u32 = 2;

/// The bytes that a connection has received, for those who wait for its first ones.
pub(super) type Received = Arc<AtomicUsize>;

/// A stream whose flushes confirm deliveries.
pub(super) struct Socket {
    stream: Patient<TcpStream>,
    record: Arc<Record>,
    received: Received,
}

impl Socket {
    pub(super) fn new(stream: TcpStream, record: Arc<Record>, received: Received) -> Self {
        let options = SockRef::from(&stream);
        let keepalive = TcpKeepalive::new().with_time(SILENCE).with_interval(PROBE_EVERY).with_retries(PROBES);
        let set = options
            .set_tcp_nodelay(true)
            .and_then(|()| options.set_tcp_notsent_lowat(UNSENT))
            .and_then(|()| options.set_tcp_keepalive(&keepalive));
        if let Err(error) = set {
            tracing::debug!("cannot set the options of a connection: {error}");
        }
        Self { stream: Patient::new(stream, WRITE_TIMEOUT), record, received }
    }

    /// Confirms the deliveries whose answers are written.
    fn confirm(&self) {
        self.record.take_written().into_iter().for_each(Delivery::delivered);
    }

    /// Refuses to write an answer with deliveries to a client that has hung up, as long as the client cannot have read
    /// all of it.
    fn check_client(&self) -> io::Result<()> {
        if !self.record.is_carrying() {
            return Ok(());
        }
        let mut byte = [MaybeUninit::uninit()];
        match SockRef::from(&self.stream.inner).peek(&mut byte) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the client has hung up")),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.received.fetch_add(buf.filled().len() - before, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check_client()?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_client()?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.confirm();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
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
}
