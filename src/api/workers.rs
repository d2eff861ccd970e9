//! The lists of workers and processes: what all processes tell of themselves, and the leases that
//! Redis has, whatever process gave them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tracing::Instrument as _;

use super::{
    access::{reaches, reaches_everything},
    error::Error,
    handle::{Api, span},
    heard::MOST_QUEUES,
    reader::Reader,
};
use crate::model::{Caller, Presence, QueueName, SeenProcess, SeenWorker, SeenWorkers, ShardId};

/// The leases that one question reads in a shard, and in all.
const LEASES_OF_SHARD: usize = 1_000;
const LEASES: usize = 100_000;

/// What all processes and Redis say of workers, of all queues that were asked for.
pub struct WorkersLook {
    processes: Vec<Presence>,
    /// The leases of each worker in each queue.
    in_hand: HashMap<String, HashMap<String, u64>>,
    /// The leases in each queue that were not read.
    unread_leases: HashMap<String, u64>,
}

impl WorkersLook {
    /// The workers that the caller may see, the last heard first; with a queue only those of it.
    pub fn seen_by(&self, caller: &Caller, queue: &str) -> Result<SeenWorkers, Error> {
        let queue = queue_of(caller, queue)?;
        let is_asked = |name: &str| is_asked(caller, queue.as_ref(), name);
        let mut views = merged(&self.processes, is_asked);
        // A token for one worker sees no other.
        let own = caller
            .access
            .token()
            .and_then(|token| token.worker.as_ref());
        if let Some(own) = own {
            views.workers.retain(|view| view.worker == own.as_str());
            views.more = 0;
        }
        let sees_all = queue.is_none() && caller.access.reaches_everything();
        if !sees_all {
            views.workers.retain(|view| !view.queues.is_empty());
        }
        let mut in_hand: HashMap<&str, u64> = HashMap::new();
        for (queue, workers) in &self.in_hand {
            if is_asked(queue) {
                for (worker, leases) in workers {
                    *in_hand.entry(worker).or_default() += leases;
                }
            }
        }
        for view in &mut views.workers {
            view.in_hand = in_hand.get(&view.worker[..]).copied().unwrap_or(0);
        }
        let unread = self.unread_leases.iter();
        views.unread_leases = unread
            .filter(|(queue, _)| is_asked(queue))
            .map(|(_, leases)| leases)
            .sum();
        Ok(views)
    }
}

/// The queue whose workers are asked for; `None` for all.
fn queue_of(caller: &Caller, queue: &str) -> Result<Option<QueueName>, Error> {
    let queue = Some(queue)
        .filter(|queue| !queue.is_empty())
        .map(QueueName::new)
        .transpose();
    let queue = queue.map_err(|error| Error::Invalid(error.to_string()))?;
    if let Some(queue) = &queue {
        reaches(caller, queue.as_str())?;
    }
    Ok(queue)
}

fn is_asked(caller: &Caller, queue: Option<&QueueName>, name: &str) -> bool {
    match queue {
        Some(queue) => queue.as_str() == name,
        None => caller.access.reaches(name),
    }
}

impl Api {
    /// The workers that the caller may see, the last heard first; with a queue only those of it.
    pub async fn workers(&self, caller: &Caller, queue: &str) -> Result<SeenWorkers, Error> {
        let look = self.workers_look(caller, queue).await?;
        look.seen_by(caller, queue)
    }

    /// What is known of the workers of the queues that the caller reaches, or of one queue.
    pub async fn workers_look(&self, caller: &Caller, queue: &str) -> Result<WorkersLook, Error> {
        let queue = queue_of(caller, queue)?;
        let read = async {
            let query = self.query()?;
            let processes = self.workers.with_own(query.processes().await?);
            let is_asked = |name: &str| is_asked(caller, queue.as_ref(), name);
            let (in_hand, unread_leases) = query.leases_of_workers(is_asked).await?;
            Ok(WorkersLook {
                processes,
                in_hand,
                unread_leases,
            })
        };
        read.instrument(span("workers", caller)).await
    }

    /// The processes that live.
    pub async fn processes(&self, caller: &Caller) -> Result<Vec<SeenProcess>, Error> {
        reaches_everything(caller)?;
        let processes = self.query()?.processes();
        let processes = processes.instrument(span("processes", caller)).await?;
        let mut processes = self.workers.with_own(processes);
        processes.sort_by(|a, b| (a.since_unix_ms, &a.process).cmp(&(b.since_unix_ms, &b.process)));
        let view = |one: Presence| SeenProcess {
            workers: one.workers.len() as u64 + one.more,
            process: one.process,
            host: one.host,
            pid: one.pid,
            http: one.http,
            grpc: one.grpc,
            pipelines: one.pipelines,
            version: one.version,
            since_unix_ms: one.since_unix_ms,
            heard_unix_ms: one.heard_unix_ms,
            leads: one.leads,
            stalled: one.stalled,
            differences: one.differences,
        };
        Ok(processes.into_iter().map(view).collect())
    }
}

/// What all processes heard of each worker, by the queues that are asked for. The one that heard
/// it last says where it is.
fn merged(processes: &[Presence], is_asked: impl Fn(&str) -> bool) -> SeenWorkers {
    let mut views: BTreeMap<String, SeenWorker> = BTreeMap::new();
    let mut more = 0;
    for process in processes {
        more += process.more;
        for heard in &process.workers {
            let view = views
                .entry(heard.worker.clone())
                .or_insert_with(|| SeenWorker {
                    worker: heard.worker.clone(),
                    process: String::new(),
                    address: String::new(),
                    queues: Vec::new(),
                    since_unix_ms: heard.since_unix_ms,
                    heard_unix_ms: i64::MIN,
                    in_hand: 0,
                    done: 0,
                    failed: 0,
                });
            view.since_unix_ms = view.since_unix_ms.min(heard.since_unix_ms);
            if heard.heard_unix_ms > view.heard_unix_ms {
                view.heard_unix_ms = heard.heard_unix_ms;
                view.process.clone_from(&process.process);
                view.address.clone_from(&heard.address);
            }
            let mut queues: BTreeSet<String> = view.queues.drain(..).collect();
            for counts in &heard.queues {
                if is_asked(&counts.queue) {
                    view.done += counts.done;
                    view.failed += counts.failed;
                    queues.insert(counts.queue.clone());
                }
            }
            view.queues = queues.into_iter().take(MOST_QUEUES).collect();
        }
    }
    let mut workers: Vec<SeenWorker> = views.into_values().collect();
    workers.sort_by(|a, b| (b.heard_unix_ms, &a.worker).cmp(&(a.heard_unix_ms, &b.worker)));
    SeenWorkers {
        workers,
        more,
        unread_leases: 0,
    }
}

impl Reader {
    async fn processes(&self) -> Result<Vec<Presence>, Error> {
        Ok(self.coordination.processes().await?)
    }

    /// The leases of each worker in the open shards of these queues, and how many were not read.
    async fn leases_of_workers(
        &self,
        is_asked: impl Fn(&str) -> bool,
    ) -> Result<LeasesOfWorkers, Error> {
        let mut shards: Vec<ShardId> = self.queue.shards();
        shards.retain(|shard| is_asked(shard.queue.as_str()));
        let per_shard = (LEASES / shards.len().max(1)).clamp(1, LEASES_OF_SHARD);
        let holders = self.queue.lease_holders(&shards, per_shard).await?;
        let mut in_hand: HashMap<String, HashMap<String, u64>> = HashMap::new();
        let mut unread: HashMap<String, u64> = HashMap::new();
        for (shard, holders) in shards.iter().zip(holders) {
            let queue = shard.queue.as_str();
            let of_queue = match holders {
                Ok(holders) => {
                    let of_queue = in_hand.entry(queue.to_owned()).or_default();
                    for (worker, leases) in holders.workers {
                        *of_queue.entry(worker).or_default() += leases;
                    }
                    holders.unread
                }
                // The workers are shown nevertheless. The unknown leases of the shard count as one.
                Err(error) => {
                    tracing::debug!("cannot read the leases of {shard}: {error}");
                    1
                }
            };
            *unread.entry(queue.to_owned()).or_default() += of_queue;
        }
        Ok((in_hand, unread))
    }
}

/// The leases of each worker in each queue, and how many of each queue were not read.
type LeasesOfWorkers = (HashMap<String, HashMap<String, u64>>, HashMap<String, u64>);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{HeardWorker, WorkerCounts};

    fn heard(worker: &str, at: i64, queues: &[(&str, u64, u64)]) -> HeardWorker {
        let counts = |(queue, done, failed): &(&str, u64, u64)| WorkerCounts {
            queue: (*queue).to_owned(),
            done: *done,
            failed: *failed,
        };
        HeardWorker {
            worker: worker.to_owned(),
            address: format!("address of {worker} at {at}"),
            since_unix_ms: at - 100,
            heard_unix_ms: at,
            queues: queues.iter().map(counts).collect(),
        }
    }

    #[test]
    fn the_counts_of_all_processes_are_added_and_the_last_says_where_a_worker_is() {
        let process = |name: &str, workers| Presence {
            process: name.to_owned(),
            workers,
            more: 1,
            ..Presence::default()
        };
        let processes = vec![
            process("a", vec![heard("w", 1000, &[("q", 2, 1), ("r", 5, 0)])]),
            process(
                "b",
                vec![heard("v", 3000, &[]), heard("w", 2000, &[("q", 3, 0)])],
            ),
        ];
        let SeenWorkers { workers, more, .. } = merged(&processes, |queue| queue == "q");
        let names: Vec<&str> = workers.iter().map(|view| &view.worker[..]).collect();
        assert_eq!((names, more), (vec!["v", "w"], 2));
        let view = &workers[1];
        assert_eq!(
            (&view.process[..], view.since_unix_ms, view.heard_unix_ms),
            ("b", 900, 2000)
        );
        assert_eq!(
            (view.done, view.failed, &view.queues[..]),
            (5, 1, &["q".to_owned()][..])
        );
    }
}
