//! The frames of a stream with the resources that they hold, and the ways in which a stream ends.

use std::{any::Any, sync::Arc, time::Duration};

use tokio::sync::OwnedSemaphorePermit;

use crate::{
    api::{access::Denied, error::Error},
    model::{TaskdFrame, WorkerFrame},
    pipelines::tasks::Cut,
    queue::Delivery,
};

/// A part of the process's memory budget. Dropping it gives the bytes back.
pub type BytesPermit = Box<dyn Any + Send>;

/// Reserves memory for an answer of this many bytes. The error says why there is none.
pub type ReserveBytes = Arc<dyn Fn(usize) -> Result<BytesPermit, String> + Send + Sync>;

/// A frame from the worker, with the memory that it takes.
pub struct ReceivedFrame {
    pub frame: WorkerFrame,
    pub permit: BytesPermit,
}

/// A frame on its way to the worker, with the leases that it carries.
///
/// It is boxed on its way through the channel: a channel allocates 32 slots when it is created, and
/// nearly all sessions have no frame to send.
pub struct OutgoingFrame {
    pub frame: TaskdFrame,
    pub deliveries: Vec<Delivery>,
    pub permit: Option<BytesPermit>,
    /// Present on a frame with tasks: there is one such permit for each stream, so that at most one
    /// frame with tasks waits for the connection.
    pub(super) _tasks_permit: Option<OwnedSemaphorePermit>,
}

/// Why a stream ended, other than by a `close` of its worker.
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
    /// Not an error. A session with tasks in hand stays open until its time-out.
    #[error("the worker closed its side")]
    HalfClosed,
    #[error("another session of this worker took over")]
    TakenOver,
    #[error("the session goes on on another stream")]
    Displaced,
    /// The client is gone or sent something unreadable. The connection knows which.
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
