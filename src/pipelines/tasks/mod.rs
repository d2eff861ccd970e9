//! The tasks service: workers get tasks and report what became of them.

mod forward;
mod get;
mod report;

use std::{
    future::Future,
    sync::{Arc, atomic::AtomicUsize},
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use self::forward::Reported;
pub use self::get::Answer;
use crate::{
    bus::Bus,
    config::Settings,
    model::{WorkerName, validate},
    queue::{self, Queue, WorkerQueue},
    runtime::Supervisor,
    store::Store,
    telemetry::metrics::{self, CallResult, Method},
    wire::pb,
};

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The request as a whole is wrong. HTTP 400, gRPC INVALID_ARGUMENT.
    #[error("{0}")]
    Invalid(String),
    /// HTTP 503, gRPC UNAVAILABLE.
    #[error("cannot reach the queue now: {0}")]
    Unavailable(String),
}

impl From<queue::Error> for Error {
    fn from(error: queue::Error) -> Self {
        Self::Unavailable(error.to_string())
    }
}

/// How callers reach the service. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    queue: WorkerQueue,
    store: Arc<dyn Store>,
    settings: Arc<Settings>,
    /// Tells the forwarder which outboxes have something.
    reported: Arc<Reported>,
    /// Where the next look begins, so that no shard is always the last.
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
    forward::start(queue.upkeep, bus, Arc::clone(&reported), settings, supervisor);
    let (beat, stop) = (Arc::new(supervisor.progress().register("tasks/deliveries")), supervisor.stop_token());
    let queue = queue.worker;
    let deliveries = queue.clone();
    supervisor.spawn("tasks/deliveries", move || {
        let (queue, beat, stop) = (deliveries.clone(), Arc::clone(&beat), stop.clone());
        async move {
            queue.settle_deliveries(&beat, &stop).await;
            Ok(())
        }
    });
    let stop = supervisor.stop_token();
    Handle { queue, store, settings: Arc::clone(settings), reported, turn: Arc::default(), stop }
}

impl Handle {
    /// Leases tasks; waits only when there is nothing. Dropping the future gives back what was leased meanwhile.
    pub async fn get(&self, request: pb::GetTasksRequest) -> Result<Answer, Error> {
        counted(Method::Get, self.get_tasks(request), |answer| answer.response.tasks.is_empty()).await
    }

    pub async fn complete(&self, request: pb::CompleteTasksRequest) -> Result<pb::CompleteTasksResponse, Error> {
        counted(Method::Complete, self.complete_tasks(request), |response| response.results.is_empty()).await
    }

    pub async fn reject(&self, request: pb::RejectTasksRequest) -> Result<pb::RejectTasksResponse, Error> {
        counted(Method::Reject, self.reject_tasks(request), |response| response.results.is_empty()).await
    }

    pub async fn extend(&self, request: pb::ExtendTasksRequest) -> Result<pb::ExtendTasksResponse, Error> {
        counted(Method::Extend, self.extend_tasks(request), |response| response.results.is_empty()).await
    }

    fn lease(&self, what: &str, duration: prost_types::Duration) -> Result<Duration, String> {
        let lease = validate::positive(what, duration)?;
        let max = self.settings.limits.max_lease;
        if lease < Duration::from_millis(100) || lease > max {
            let (lease, max) = (humantime::format_duration(lease), humantime::format_duration(max));
            return Err(format!("{what} is {lease}; must be 100ms to {max}"));
        }
        Ok(lease)
    }
}

/// Runs a call and records how it ended. A caller that went away got no answer, and is not recorded.
async fn counted<T>(
    method: Method,
    call: impl Future<Output = Result<T, Error>>,
    is_empty: impl Fn(&T) -> bool,
) -> Result<T, Error> {
    let started = Instant::now();
    let answer = call.await;
    let result = match &answer {
        Ok(response) if is_empty(response) => CallResult::Empty,
        Ok(_) => CallResult::Ok,
        Err(Error::Invalid(_)) => CallResult::Invalid,
        Err(Error::Unavailable(_)) => CallResult::Unavailable,
    };
    metrics::tasks_call(method, result, started.elapsed());
    answer
}

fn worker(name: &str) -> Result<WorkerName, Error> {
    WorkerName::new(name).map_err(|e| Error::Invalid(e.to_string()))
}
