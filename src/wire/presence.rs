//! Workers and processes, as the service `Operator` sends them.

use super::{pb, time::timestamp};
use crate::model::{SeenProcess, SeenWorker, SeenWorkers};

impl From<SeenWorkers> for pb::ListWorkersResponse {
    fn from(views: SeenWorkers) -> Self {
        Self {
            workers: views.workers.into_iter().map(Into::into).collect(),
            more: views.more,
            unread_leases: views.unread_leases,
        }
    }
}

impl From<SeenWorker> for pb::WorkerInfo {
    fn from(view: SeenWorker) -> Self {
        Self {
            worker: view.worker,
            process: view.process,
            address: view.address,
            queues: view.queues,
            since: Some(timestamp(view.since_unix_ms)),
            last_heard: Some(timestamp(view.heard_unix_ms)),
            in_hand: view.in_hand,
            done: view.done,
            failed: view.failed,
        }
    }
}

impl From<SeenProcess> for pb::ProcessInfo {
    fn from(view: SeenProcess) -> Self {
        Self {
            process: view.process,
            host: view.host,
            pid: view.pid,
            http: view.http,
            grpc: view.grpc,
            pipelines: view.pipelines,
            version: view.version,
            since: Some(timestamp(view.since_unix_ms)),
            last_heard: Some(timestamp(view.heard_unix_ms)),
            workers: view.workers,
        }
    }
}
