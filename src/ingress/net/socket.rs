//! A client's socket: it gives up on a client that does not read, and confirms what it has written.

use std::{
    io,
    mem::MaybeUninit,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_io_timeout::TimeoutWriter;

use super::delivery::{Record, WRITE_TIMEOUT};
use crate::queue::Delivery;

/// The most unsent bytes that the kernel may hold. Without this limit, megabytes of an answer would
/// count as written.
const UNSENT: u32 = 128 << 10;

/// The probes of a silent client: the first after `SILENCE`, then one every `PROBE_EVERY`. A client
/// that waits for a task may vanish without closing its connection.
const SILENCE: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBES: u32 = 2;

/// A stream whose flushes confirm deliveries, and whose writes time out.
pub(in crate::ingress) struct Socket {
    stream: Pin<Box<TimeoutWriter<TcpStream>>>,
    record: Arc<Record>,
}

impl Socket {
    pub(in crate::ingress) fn new(stream: TcpStream, record: Arc<Record>) -> Self {
        let options = SockRef::from(&stream);
        let keepalive = TcpKeepalive::new()
            .with_time(SILENCE)
            .with_interval(PROBE_EVERY)
            .with_retries(PROBES);
        let set = options
            .set_tcp_nodelay(true)
            .and_then(|()| options.set_tcp_notsent_lowat(UNSENT))
            .and_then(|()| options.set_tcp_keepalive(&keepalive));
        if let Err(error) = set {
            tracing::debug!("cannot set the options of a connection: {error}");
        }
        Self {
            stream: with_write_timeout(stream, WRITE_TIMEOUT),
            record,
        }
    }

    /// Confirms the deliveries whose answers have been written.
    fn confirm(&self) {
        self.record
            .take_written()
            .into_iter()
            .for_each(Delivery::delivered);
    }

    /// Refuses to write an answer with deliveries to a client that has hung up and cannot have read
    /// all of it.
    fn check_client(&self) -> io::Result<()> {
        if !self.record.is_carrying() {
            return Ok(());
        }
        let mut byte = [MaybeUninit::uninit()];
        match SockRef::from(self.stream.get_ref()).peek(&mut byte) {
            Ok(0) => Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                "the client has hung up",
            )),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_client()?;
        self.stream.as_mut().poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_client()?;
        self.stream.as_mut().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.stream.as_mut().poll_flush(cx))?;
        self.confirm();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(cx)
    }
}

/// Fails writes that make no progress for `limit`.
fn with_write_timeout<T: AsyncRead + AsyncWrite>(
    stream: T,
    limit: Duration,
) -> Pin<Box<TimeoutWriter<T>>> {
    let mut stream = TimeoutWriter::new(stream);
    stream.set_timeout(Some(limit));
    Box::pin(stream)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_write_that_nobody_takes_fails_instead_of_waiting_for_ever() {
        let (ours, mut theirs) = tokio::io::duplex(4);
        let mut ours = with_write_timeout(ours, Duration::from_millis(50));
        let mut bytes = [0; 4];
        for _ in 0..2 {
            ours.write_all(b"1234").await.unwrap();
            theirs.read_exact(&mut bytes).await.unwrap();
        }
        let error = ours.write_all(b"12345").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
