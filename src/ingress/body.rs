//! A request's body on its way in. Its bytes count against the budget, it must keep coming, and a stop cuts it.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep_until, timeout};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::budget::{NoRoom, Share};

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The reason why taskd does not read the rest of a body.
#[derive(Debug, thiserror::Error)]
pub(super) enum Cut {
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    #[error("this process is stopping; send the request again")]
    Stopping,
    #[error("the body, or more of it, was not here after {0:?}")]
    Late(Duration),
    #[error("the body broke off: {0}")]
    Broken(hyper::Error),
}

/// The time that a body may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// The longest time between two parts.
    pub(super) silence: Duration,
    /// The longest time for the whole body.
    pub(super) whole: Duration,
}

/// The rest of a body that a handler did not read.
///
/// HTTP/2 resets a stream whose end the server did not read, and some clients then miss their answer.
#[derive(Clone, Default)]
pub(super) struct Unread(Arc<Mutex<Option<Incoming>>>);

impl Unread {
    /// Reads to the end, if the end is near.
    pub(super) async fn drain(self) {
        const BYTES: usize = 64 << 10;
        const WAIT: Duration = Duration::from_secs(1);
        let Some(mut body) = self.0.lock().take() else { return };
        let read = async {
            let mut bytes = 0;
            while let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                bytes += frame.data_ref().map_or(0, Bytes::len);
                if bytes > BYTES {
                    return;
                }
            }
        };
        drop(timeout(WAIT, read).await);
    }
}

/// The body of a request whose parts count against the budget.
pub(super) struct Counted {
    /// `None` only during the drop.
    inner: Option<Incoming>,
    unread: Unread,
    share: Share,
    /// Of a call that may stay open: room for the part that came last, until the call wants the next one.
    passing: Option<(Share, usize)>,
    stop: CancellationToken,
    /// `None`: the body may take any time.
    pace: Option<Pace>,
    end: Instant,
    /// Set by the first wait.
    waiting: Option<Waiting>,
    /// Turns a cut into an error of the protocol.
    wrap: fn(Cut) -> BoxError,
    is_cut: bool,
}

/// The ends of the wait for the next part.
struct Waiting {
    stopped: Pin<Box<WaitForCancellationFutureOwned>>,
    alarm: Pin<Box<Sleep>>,
}

impl Counted {
    pub(super) fn new(
        inner: Incoming,
        unread: Unread,
        share: Share,
        passing: Option<Share>,
        stop: CancellationToken,
        pace: Option<Pace>,
        wrap: fn(Cut) -> BoxError,
    ) -> Self {
        let end = Instant::now() + pace.map_or(Duration::ZERO, |pace| pace.whole);
        let (inner, passing) = (Some(inner), passing.map(|share| (share, 0)));
        Self { inner, unread, share, passing, stop, pace, end, waiting: None, wrap, is_cut: false }
    }

    fn cut(&mut self, why: Cut) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.is_cut = true;
        Poll::Ready(Some(Err((self.wrap)(why))))
    }

    /// The reason to stop waiting for the next part.
    fn poll_waiting(&mut self, cx: &mut Context<'_>) -> Poll<Cut> {
        let (stop, deadline) = (&self.stop, self.deadline());
        let waiting = self.waiting.get_or_insert_with(|| Waiting {
            stopped: Box::pin(stop.clone().cancelled_owned()),
            alarm: Box::pin(sleep_until(deadline)),
        });
        if waiting.stopped.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Cut::Stopping);
        }
        let Some(pace) = self.pace else { return Poll::Pending };
        ready!(waiting.alarm.as_mut().poll(cx));
        Poll::Ready(Cut::Late(if Instant::now() < self.end { pace.silence } else { pace.whole }))
    }

    fn deadline(&self) -> Instant {
        self.pace.map_or(self.end, |pace| self.end.min(Instant::now() + pace.silence))
    }
}

impl Body for Counted {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.is_cut {
            return Poll::Ready(None);
        }
        if let Some((share, held)) = &mut self.passing {
            share.shrink(std::mem::take(held));
        }
        let Some(inner) = &mut self.inner else { return Poll::Ready(None) };
        match Pin::new(inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                let passes = self.passing.as_mut().map_or(Ok(()), |(share, held)| {
                    *held = bytes;
                    share.grow(bytes)
                });
                if let Err(no_room) = passes.and_then(|()| self.share.grow(bytes)) {
                    return self.cut(no_room.into());
                }
                let deadline = self.deadline();
                if let Some(waiting) = &mut self.waiting {
                    waiting.alarm.as_mut().reset(deadline);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => self.cut(Cut::Broken(error)),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => {
                let why = ready!(self.poll_waiting(cx));
                self.cut(why)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.is_cut && !self.is_end_stream() {
            *self.unread.0.lock() = self.inner.take();
        }
    }
}
