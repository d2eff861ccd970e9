//! One stream, while it lasts.

use std::time::Duration;

use tokio::time::Instant;

use super::open::Open;
use crate::{error::Error, pb};

/// For a taskd that does not say.
const HEARTBEAT: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(15);

/// One stream, and the state that ends with it.
pub(super) struct Line {
    pub(super) stream: Open,
    pub(super) address: String,
    pub(super) heartbeat: Duration,
    /// How long a stream may be silent. It is less than the time-out of the session, which taskd
    /// counts from the last frame that it heard, up to a heartbeat before: the worker goes on with
    /// its session before it ends.
    pub(super) patience: Duration,
    pub(super) heard: Instant,
    pub(super) spoke: Instant,
    /// The frame that waits for the connection.
    pub(super) next: Option<pb::WorkerFrame>,
    /// The connection takes no more frames; the reading side will say why.
    pub(super) is_deaf: bool,
    /// The server stops.
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

    /// A little earlier than taskd asks for.
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
