//! One stream and its state.

use std::time::Duration;

use tokio::time::Instant;

use super::open::Open;
use crate::{error::Error, pb};

/// Defaults, for a taskd that does not send these values.
const HEARTBEAT: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(15);

/// A stream, and the state that ends with it.
pub(super) struct Line {
    pub(super) stream: Open,
    pub(super) address: String,
    pub(super) heartbeat: Duration,
    /// How long a stream may be silent. It is shorter than the session's timeout, which taskd
    /// counts from the last frame that it received, up to a heartbeat earlier: so the worker
    /// resumes its session before it ends.
    pub(super) patience: Duration,
    pub(super) heard: Instant,
    pub(super) spoke: Instant,
    /// The frame to send once the connection accepts it.
    pub(super) next: Option<pb::WorkerFrame>,
    /// The connection accepts no more frames; the receiving side will learn why.
    pub(super) is_deaf: bool,
    /// The server is shutting down.
    pub(super) is_ending: bool,
    pub(super) has_closed: bool,
}

impl Line {
    pub(super) fn new(stream: Open, address: &str) -> Self {
        let time = |time: Option<prost_types::Duration>, default| {
            time.and_then(|time| time.try_into().ok())
                .filter(|time| *time > Duration::ZERO)
                .unwrap_or(default)
        };
        let heartbeat = time(stream.opened.heartbeat, HEARTBEAT);
        let patience = time(stream.opened.timeout, TIMEOUT) * 3 / 5;
        let (now, address) = (Instant::now(), address.to_owned());
        let (heard, spoke, next) = (now, now, None);
        Self {
            stream,
            address,
            heartbeat,
            patience,
            heard,
            spoke,
            next,
            is_deaf: false,
            is_ending: false,
            has_closed: false,
        }
    }

    /// When the next heartbeat is due: a little earlier than taskd requires.
    pub(super) fn beats_at(&self) -> Instant {
        self.spoke + self.heartbeat * 4 / 5
    }

    pub(super) fn away(&self, message: String) -> Error {
        Error::Away {
            address: self.address.clone(),
            message,
        }
    }
}
