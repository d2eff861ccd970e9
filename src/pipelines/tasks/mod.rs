//! The tasks service: workers get tasks and report what became of them.

mod batch;
mod forward;
mod get;
mod report;

use std::{
    convert::Infallible,
    sync::{Arc, atomic::AtomicUsize},
};

use tokio_util::sync::CancellationToken;

use self::forward::Reported;
pub use self::get::Leases;
use crate::{
    bus::Bus,
    config::Settings,
    model::WorkerName,
    queue::{self, Queue},
    runtime::{Policy, Supervisor},
    store::Store,
};

/// The reason why a call as a whole has no answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The request is wrong.
    #[error("{0}")]
    Invalid(String),
    #[error("cannot reach the queue now: {0}")]
    Unavailable(#[from] queue::Error),
}

/// The service's entry for its callers. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    queue: Queue,
    store: Arc<dyn Store>,
    settings: Arc<Settings>,
    /// Tells the forwarder which outboxes have something.
    reported: Arc<Reported>,
    /// The start of the next look, so that no shard is always the last.
    turn: Arc<AtomicUsize>,
    stop: CancellationToken,
}

/// Starts the service.
pub fn start(
    queue: Queue,
    store: Arc<dyn Store>,
    bus: Arc<dyn Bus>,
    settings: &Arc<Settings>,
    supervisor: &Supervisor,
) -> Handle {
    let reported = Arc::<Reported>::default();
    forward::start(&queue, bus, Arc::clone(&reported), settings, supervisor);
    let deliveries = queue.clone();
    supervisor.spawn_loop("tasks/deliveries", Policy::Restart, move |cx| {
        let queue = deliveries.clone();
        async move {
            queue.settle_deliveries(&cx.beat, &cx.stop).await;
            Ok::<_, Infallible>(())
        }
    });
    let stop = supervisor.stop_token();
    Handle { queue, store, settings: Arc::clone(settings), reported, turn: Arc::default(), stop }
}

fn worker(name: &str) -> Result<WorkerName, Error> {
    WorkerName::new(name).map_err(|e| Error::Invalid(e.to_string()))
}
