//! The frames of a stream with what they carry, and the ends of a stream.

use std::{
    any::Any,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::OwnedSemaphorePermit;

use crate::{
    api::{access::Denied, error::Error},
    model::{FrameAnswer, TaskdFrame, WorkerFrame},
    pipelines::tasks::{Cut, Leases},
    queue::Delivery,
};

/// Room for bytes in hand; dropped, it is free again.
pub type Room = Box<dyn Any + Send>;

/// A worker's frame, with the room that it takes.
pub struct Received {
    pub frame: WorkerFrame,
    pub room: Room,
}

/// A frame on its way to the worker, with the leases that it carries. It travels in a box: a
/// channel has room for 32 values from its start on, and nearly all sessions have no frame on its
/// way.
pub struct Sent {
    pub frame: TaskdFrame,
    pub deliveries: Vec<Delivery>,
    pub room: Option<Room>,
    /// Held by the one frame with tasks that may wait.
    pub(super) _place: Option<OwnedSemaphorePermit>,
}

/// The answer to a frame, and how much it wants behind it, if nothing was surrendered since.
pub(super) struct Answered {
    pub(super) answer: FrameAnswer,
    pub(super) want: u32,
    /// The demand that it has already, of which its worker does not know.
    pub(super) early: u32,
    pub(super) surrenders: u64,
    pub(super) is_asked: bool,
    /// The number of its reports in [`super::serve::Streaming::reporting`]; 0: it has none.
    pub(super) reports: u64,
}

/// Tasks that wait for the answer which tells the worker of their demand.
pub(super) struct Held {
    pub(super) leases: Leases,
    pub(super) place: OwnedSemaphorePermit,
    pub(super) room: Room,
    pub(super) since: Instant,
}

/// The end of a stream that did not end well.
#[derive(Debug, thiserror::Error)]
pub enum StreamEnd {
    #[error("{0}")]
    Wrong(String),
    #[error(transparent)]
    Refused(#[from] Error),
    #[error("no frame came for {0:?}: the session is over")]
    Silent(Duration),
    #[error("this process stops: go on with the session at another one")]
    Stopping,
    /// The stream went well, and a session with tasks in hand stays for its time-out.
    #[error("the worker closed its side")]
    HalfClosed,
    #[error("another session of this worker took over")]
    TakenOver,
    #[error("the session goes on on another stream")]
    Displaced,
    /// The client is gone, or its frames cannot be read; the connection knows why.
    #[error("the stream broke")]
    Broken,
}

impl From<Denied> for StreamEnd {
    fn from(denied: Denied) -> Self {
        Self::Refused(denied.into())
    }
}

impl From<Cut> for StreamEnd {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::Displaced => Self::Displaced,
            Cut::Ended(_) => Self::TakenOver,
        }
    }
}

/// Finds room for an answer of so many bytes.
pub type FindRoom = Arc<dyn Fn(usize) -> Result<Room, String> + Send + Sync>;
