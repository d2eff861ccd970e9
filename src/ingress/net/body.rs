//! A request's body as it arrives. Its bytes count against the budget, it must keep coming, and a
//! stop cuts it off.

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

use super::{
    budget::{NoRoom, Share},
    messages::Messages,
};

/// How long a gRPC message may take from its first byte, whatever the limit of the whole body is.
const MESSAGE_TIME: Duration = Duration::from_secs(120);

pub(in crate::ingress) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why taskd does not read the rest of a body.
#[derive(Debug, thiserror::Error)]
pub(in crate::ingress) enum Cut {
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    #[error("this process is stopping; send the request again")]
    Stopping,
    #[error("the body, or more of it, was not here after {0:?}")]
    Late(Duration),
    #[error(
        "a line did not end within {0:?} of its first byte; send shorter lines, or send faster"
    )]
    LongLine(Duration),
    #[error("the body broke off: {0}")]
    Broken(hyper::Error),
}

/// How long a body may take.
#[derive(Clone, Copy, Debug)]
pub(in crate::ingress) struct Pace {
    /// The longest time between two parts.
    pub(in crate::ingress) silence: Duration,
    /// The longest time for the whole body.
    pub(in crate::ingress) whole: Duration,
}

/// The rest of a body that a handler did not read.
///
/// HTTP/2 resets a stream whose end the server did not read, and some clients then miss their
/// answer.
#[derive(Clone, Default)]
pub(in crate::ingress) struct Unread(Arc<Mutex<Option<Incoming>>>);

impl Unread {
    /// Reads the rest if it is short.
    pub(in crate::ingress) async fn drain(self) {
        const BYTES: usize = 64 << 10;
        const WAIT: Duration = Duration::from_secs(1);
        let Some(mut body) = self.0.lock().take() else {
            return;
        };
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
pub(in crate::ingress) struct Counted {
    /// `None` only while this is dropped.
    inner: Option<Incoming>,
    unread: Unread,
    share: Share,
    /// For a call that may stay open: the memory of the last part, until the call asks for the next
    /// one.
    passing: Option<(Share, usize)>,
    /// For gRPC only.
    messages: Option<Messages>,
    stop: CancellationToken,
    /// `None` if the body may take any time; its messages may not.
    pace: Option<Pace>,
    end: Instant,
    /// When the message began that is not complete yet.
    message_begun: Option<Instant>,
    /// Set by the first wait.
    waiting: Option<Waiting>,
    /// Turns a cut into an error of the protocol.
    wrap: fn(Cut) -> BoxError,
    is_cut: bool,
}

/// What ends the wait for the next part.
struct Waiting {
    stopped: Pin<Box<WaitForCancellationFutureOwned>>,
    /// `None` until there is a deadline.
    alarm: Option<Pin<Box<Sleep>>>,
    /// When the last part arrived, or the wait began.
    heard: Instant,
}

impl Counted {
    #[expect(
        clippy::too_many_arguments,
        reason = "each bounds the body in a way of its own, and one place makes it"
    )]
    pub(in crate::ingress) fn new(
        inner: Incoming,
        unread: Unread,
        share: Share,
        passing: Option<Share>,
        messages: Option<Messages>,
        stop: CancellationToken,
        pace: Option<Pace>,
        wrap: fn(Cut) -> BoxError,
    ) -> Self {
        Self {
            inner: Some(inner),
            unread,
            share,
            passing: passing.map(|share| (share, 0)),
            messages,
            stop,
            pace,
            end: Instant::now() + pace.map_or(Duration::ZERO, |pace| pace.whole),
            message_begun: None,
            waiting: None,
            wrap,
            is_cut: false,
        }
    }

    fn cut(&mut self, why: Cut) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.is_cut = true;
        Poll::Ready(Some(Err((self.wrap)(why))))
    }

    /// Resolves with the reason when the wait for the next part must end.
    fn poll_waiting(&mut self, cx: &mut Context<'_>) -> Poll<Cut> {
        let stop = &self.stop;
        let waiting = self.waiting.get_or_insert_with(|| Waiting {
            stopped: Box::pin(stop.clone().cancelled_owned()),
            alarm: None,
            heard: Instant::now(),
        });
        if waiting.stopped.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Cut::Stopping);
        }
        let of_message = self
            .message_begun
            .map(|begun| (begun + MESSAGE_TIME, MESSAGE_TIME));
        let of_body = self.pace.map(|pace| (self.end, pace.whole));
        let of_part = self
            .pace
            .map(|pace| (waiting.heard + pace.silence, pace.silence));
        let Some((end, time)) = [of_message, of_body, of_part].into_iter().flatten().min() else {
            return Poll::Pending;
        };
        let alarm = waiting
            .alarm
            .get_or_insert_with(|| Box::pin(sleep_until(end)));
        if alarm.deadline() != end {
            alarm.as_mut().reset(end);
        }
        ready!(alarm.as_mut().poll(cx));
        Poll::Ready(Cut::Late(time))
    }

    /// Counts a part of the body.
    fn count(&mut self, bytes: usize) -> Result<(), NoRoom> {
        if let Some((share, held)) = &mut self.passing {
            *held = bytes;
            share.grow(bytes)?;
        }
        self.share.grow(bytes)
    }

    /// Waits for the next part of the body.
    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(None);
        };
        let Poll::Ready(part) = Pin::new(inner).poll_frame(cx) else {
            let why = ready!(self.poll_waiting(cx));
            return Poll::Ready(Some(Err(why)));
        };
        if let Some(waiting) = &mut self.waiting {
            waiting.heard = Instant::now();
        }
        let counted = part.map(|part| {
            let frame = part.map_err(Cut::Broken)?;
            self.count(frame.data_ref().map_or(0, Bytes::len))?;
            Ok(frame)
        });
        Poll::Ready(counted)
    }

    /// Waits for the next bytes to hand on to gRPC.
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        loop {
            let Some(messages) = &mut self.messages else {
                return self.poll_part(cx);
            };
            if let Some(bytes) = messages.next() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            let part = ready!(self.poll_part(cx)?);
            let Some(messages) = &mut self.messages else {
                return Poll::Ready(part.map(Ok));
            };
            match part.map(Frame::into_data) {
                Some(Ok(bytes)) => {
                    let next = messages.take(bytes);
                    if messages.is_whole() {
                        self.message_begun = None;
                    } else {
                        self.message_begun.get_or_insert_with(Instant::now);
                    }
                    if let Some(bytes) = next {
                        return Poll::Ready(Some(Ok(Frame::data(bytes))));
                    }
                }
                Some(Err(trailers)) => return Poll::Ready(Some(Ok(trailers))),
                None if messages.is_empty() => return Poll::Ready(None),
                None => messages.end(),
            }
        }
    }
}

impl Body for Counted {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.is_cut {
            return Poll::Ready(None);
        }
        if let Some((share, held)) = &mut self.passing {
            share.shrink(std::mem::take(held));
        }
        match ready!(self.poll_message(cx)) {
            Some(Err(why)) => self.cut(why),
            Some(Ok(frame)) => Poll::Ready(Some(Ok(frame))),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.messages.as_ref().is_none_or(Messages::is_empty)
            && self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.inner, &self.messages) {
            (Some(inner), None) => inner.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.is_cut && !self.is_end_stream() {
            *self.unread.0.lock() = self.inner.take();
        }
    }
}
