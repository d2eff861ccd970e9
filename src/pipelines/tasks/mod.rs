//! The tasks service: workers get tasks and report what became of them.

mod batch;
mod error;
mod forward;
mod get;
mod handle;
mod outputs;
mod report;
mod schema;
mod sessions;
mod traced;
mod weights;

use std::sync::Arc;

pub use self::{
    error::Error,
    get::Leases,
    handle::Handle,
    sessions::{Attached, Cut, Opened, Reports, Shared, SharedTasks, heartbeat},
};
use self::{forward::Reported, sessions::registry::Sessions};
use crate::{
    bus::Bus, config::Settings, model::Shares, pipelines::admission::KnownTopologies, queue::Queue,
    runtime::Supervisor, store::Store,
};

/// Starts the service.
pub fn start(
    queue: Queue,
    store: Arc<dyn Store>,
    bus: Arc<dyn Bus>,
    topologies: KnownTopologies,
    settings: &Arc<Settings>,
    supervisor: &Supervisor,
) -> Handle {
    let reported = Arc::<Reported>::default();
    forward::start(
        queue.upkeep,
        bus,
        Arc::clone(&reported),
        settings,
        supervisor,
    );
    let queue = queue.worker;
    let settings = Arc::clone(settings);
    let turn = Arc::default();
    let sessions = Arc::<Sessions>::default();
    let deliveries = (queue.clone(), sessions.streams.clone());
    supervisor.spawn_loop(
        "tasks/deliveries",
        deliveries,
        |(queue, streams), cx| async move {
            queue
                .settle_deliveries(&cx.beat, &cx.stop, streams.wait())
                .await;
        },
    );
    let stop = supervisor.stop_token();
    let session_shares = Shares::new(settings.limits.max_sessions);
    let handle = Handle {
        queue,
        store,
        settings,
        topologies,
        reported,
        turn,
        sessions,
        session_shares,
        stop,
    };
    sessions::start(&handle, supervisor);
    handle
}
