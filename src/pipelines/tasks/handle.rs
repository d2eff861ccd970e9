//! The handle of the tasks service.

use std::sync::{Arc, atomic::AtomicUsize};

use tokio_util::sync::CancellationToken;

use super::{error::Error, forward::Reported, sessions::registry::Sessions};
use crate::{
    config::Settings,
    model::{Shares, WorkerName},
    pipelines::admission::KnownTopologies,
    queue::WorkerQueue,
    store::Store,
};

/// The entry point of the service. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    pub(super) queue: WorkerQueue,
    pub(super) store: Arc<dyn Store>,
    pub(super) settings: Arc<Settings>,
    pub(super) topologies: KnownTopologies,
    /// Tells the forwarder which outboxes have something.
    pub(super) reported: Arc<Reported>,
    /// The turn of the next pass, which moves its start, so that no shard is always the last.
    pub(super) turn: Arc<AtomicUsize>,
    pub(super) sessions: Arc<Sessions>,
    /// The sessions with streams, by their tokens.
    pub(super) session_shares: Shares,
    pub(super) stop: CancellationToken,
}

pub(super) fn worker(name: &str) -> Result<WorkerName, Error> {
    WorkerName::new(name).map_err(|e| Error::Invalid(e.to_string()))
}
