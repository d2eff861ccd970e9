//! Sources: reads the feeds of topologies that are outside of taskd. [`super::feeds`] reads topics.
//!
//! One process at a time reads them, under a lease in Redis. Each feed has a task of its own, so that
//! a source that does not answer holds up no other.

mod reader;
mod record_task;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::reader::Reader;
use super::{error::Failure, insert::Handle};
use crate::{
    model::{SubscriptionName, Topology, in_short},
    pipelines::context::Context,
    runtime::{LastSaid, Loop, Supervisor},
    store,
};

/// The work that the lease is for.
const WORK: &str = "sources";
/// How long a process that has stopped renewing keeps the lease.
const LEASE: Duration = Duration::from_secs(4);
/// How often the lease is renewed, and how often to check whether topologies changed.
const TICK: Duration = Duration::from_secs(1);
/// How often feeds of topologies that are gone are forgotten, and how old they must be.
const FORGET_EVERY: Duration = Duration::from_secs(600);
const FORGET_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Starts the loop.
pub(super) fn start(context: &Context, handle: &Handle, supervisor: &Supervisor) {
    let sources = Sources {
        context: context.clone(),
        handle: handle.clone(),
        supervisor: supervisor.clone(),
    };
    supervisor.spawn_loop("discovery/sources", sources, |sources, cx| async move {
        sources.run(cx).await
    });
}

#[derive(Clone)]
struct Sources {
    context: Context,
    handle: Handle,
    supervisor: Supervisor,
}

/// A feed that this process reads.
struct Running {
    topology: Arc<Topology>,
    place: usize,
    /// Its end stops the reading. `None`: it is stopping.
    guard: Option<DropGuard>,
    reading: JoinHandle<()>,
}

type RunningFeeds = HashMap<SubscriptionName, Running>;

/// The feeds that are outside of taskd, each with its topology and its place there.
type Wanted = HashMap<SubscriptionName, (Arc<Topology>, usize)>;

impl Sources {
    async fn run(self, cx: Loop) -> Result<(), Failure> {
        let mut running = RunningFeeds::new();
        let mut has_lease = false;
        let mut said = LastSaid::nothing();
        let mut forgot_at: Option<Instant> = None;
        while !cx.stop.is_cancelled() {
            let wanted = self.wanted();
            let leads = match wanted.is_empty() && running.is_empty() {
                true => false,
                // An error must end the reading as the loss of the lease does: in order.
                false => match self.context.coordination.lease(WORK, LEASE).await {
                    Ok(leads) => leads,
                    Err(error) => {
                        let why = in_short(&error);
                        if said.is_news(&why) {
                            tracing::warn!("feeds wait, because their lease is not renewed: {why}");
                        }
                        false
                    }
                },
            };
            if has_lease && wanted.is_empty() && running.is_empty() {
                self.context.coordination.release(WORK).await?;
            }
            has_lease = leads;
            if leads && forgot_at.is_none_or(|at| at.elapsed() >= FORGET_EVERY) {
                if let Err(error) = self.forget().await {
                    tracing::debug!("cannot forget feeds, trying later: {error}");
                }
                forgot_at = Some(Instant::now());
            }
            self.start_and_stop(&mut running, if leads { wanted } else { Wanted::new() });
            cx.beat();
            cx.pause(TICK).await;
        }
        for (_, feed) in running {
            drop(feed.guard);
            // A panic is no reason to keep the lease.
            drop(feed.reading.await);
        }
        if has_lease {
            self.context.coordination.release(WORK).await?;
        }
        Ok(())
    }

    /// Forgets feeds that have been in no file for long.
    async fn forget(&self) -> store::Result<()> {
        let store = &self.context.store;
        let mut known = Vec::new();
        for stored in store.topologies().await? {
            let Ok(topology) = Topology::read(&stored.text) else {
                // Only another version of taskd knows its feeds.
                return Ok(());
            };
            let feeds = topology.feeds.into_iter();
            known.extend(feeds.map(|feed| (feed.name, feed.source.identity())));
        }
        store.forget_feeds(&known, FORGET_AFTER).await
    }

    fn wanted(&self) -> Wanted {
        let mut wanted = Wanted::new();
        for topology in self.handle.stages().all() {
            for (place, feed) in topology.feeds.iter().enumerate() {
                if !feed.source.is_topic() {
                    wanted.insert(feed.name.clone(), (Arc::clone(topology), place));
                }
            }
        }
        wanted
    }

    /// Stops the feeds that changed or are gone, and starts those that are not running.
    fn start_and_stop(&self, running: &mut RunningFeeds, wanted: Wanted) {
        running.retain(|name, feed| {
            let is_same = wanted
                .get(name)
                .is_some_and(|(topology, place)| feed.is_of(topology, *place));
            if !is_same {
                feed.guard = None;
            }
            !feed.reading.is_finished()
        });
        for (name, (topology, place)) in wanted {
            running
                .entry(name)
                .or_insert_with(|| self.start_one(topology, place));
        }
    }

    fn start_one(&self, topology: Arc<Topology>, place: usize) -> Running {
        let stop: CancellationToken = self.supervisor.stop_token().child_token();
        let name = format!("sources/{}", topology.feeds[place].name);
        let cx = Loop {
            beat: Arc::new(self.supervisor.progress().register(name)),
            stop: stop.clone(),
        };
        let (context, handle) = (self.context.clone(), self.handle.clone());
        let reader = Reader::new(context, handle, Arc::clone(&topology), place, cx);
        Running {
            topology,
            place,
            guard: Some(stop.drop_guard()),
            reading: self.supervisor.spawn_once(reader.run()),
        }
    }
}

impl Running {
    fn is_of(&self, topology: &Arc<Topology>, place: usize) -> bool {
        self.place == place
            && (Arc::ptr_eq(&self.topology, topology) || *self.topology == **topology)
    }
}
