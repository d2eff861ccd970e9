//! A taskd process inside the test, which starts only the pipelines that it needs.

use std::{sync::Arc, time::Duration};

use taskd::{
    bus::Bus,
    config::Settings,
    coordination::Coordination,
    dedup::Filter,
    model::{ShardId, WorkerName},
    outbound::Outbound,
    pipelines::{
        admission::{Gates, Occupancy, QueueSync},
        context::Context,
        discovery, fanout,
        publishing::{DeadLetters, Publisher},
        shortcut::Shortcut,
        watchdog,
    },
    queue::{Claim, Code, Completion, Queue},
    redis_pool::Redis,
    runtime::{Clock, Supervisor},
    store::Store,
};
use uuid::Uuid;

/// Completes and forgets all tasks of a shard, so that nothing is left in it.
pub(crate) async fn work_off(queue: &Queue, shard: &ShardId) {
    let (known, worker) = (
        queue.shards_of(&shard.queue).remove(0),
        WorkerName::new("w").unwrap(),
    );
    let claim = Claim {
        worker: worker.clone(),
        max_tasks: 10,
        max_bytes: 1 << 20,
        is_first: true,
        lease: None,
        priority: None,
    };
    let granted = queue.worker.claim(&known, claim).await.unwrap();
    granted.delivery.delivered();
    for leased in granted.tasks {
        let completion = Completion {
            id: leased.id,
            token: leased.token,
            worker: worker.clone(),
            report: "report".into(),
            limit: Default::default(),
        };
        assert_eq!(queue.worker.complete(completion).await.unwrap(), Code::Ok);
    }
    let entries = queue.upkeep.outbox(shard, 10, 1 << 20).await.unwrap();
    queue.upkeep.forwarded(shard, &entries).await.unwrap();
    let done = queue
        .upkeep
        .finals(shard, Duration::ZERO, 10)
        .await
        .unwrap();
    let done: Vec<_> = done.ids.into_iter().map(|id| (id, true)).collect();
    queue
        .upkeep
        .forget(shard, Duration::ZERO, &done)
        .await
        .unwrap();
}

/// One process with its backends.
pub(crate) struct Process {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) bus: Arc<dyn Bus>,
    pub(crate) queue: Queue,
    pub(crate) gates: Gates,
    /// `None` unless a test creates one; then all tasks go over the bus.
    pub(crate) shortcut: Option<Shortcut>,
    pub(crate) clock: Clock,
    coordination: Coordination,
    filter: Filter,
    occupancy: Occupancy,
}

impl Process {
    pub(crate) fn new(redis: &Redis, store: &Arc<dyn Store>, bus: Arc<dyn Bus>) -> Self {
        Self::with_clock(redis, store, bus, Clock::of_this_machine())
    }

    pub(crate) fn with_clock(
        redis: &Redis,
        store: &Arc<dyn Store>,
        bus: Arc<dyn Bus>,
        clock: Clock,
    ) -> Self {
        Self::named("p", redis, store, bus, clock)
    }

    /// Creates a process with this name and this clock.
    pub(crate) fn named(
        name: &str,
        redis: &Redis,
        store: &Arc<dyn Store>,
        bus: Arc<dyn Bus>,
        clock: Clock,
    ) -> Self {
        Self {
            store: Arc::clone(store),
            bus,
            queue: Queue::with_clock(redis.clone(), Uuid::new_v4().to_string(), clock.clone()),
            gates: Gates::default(),
            shortcut: None,
            coordination: Coordination::new(redis.clone(), name, clock.clone()),
            clock,
            filter: Filter::new(redis.clone()),
            occupancy: Occupancy::default(),
        }
    }

    pub(crate) fn make_shortcut(&mut self, settings: &Arc<Settings>) -> Shortcut {
        let shortcut = Shortcut::new(
            self.queue.enqueuer.clone(),
            self.gates.clone(),
            Arc::clone(settings),
        );
        self.shortcut = Some(shortcut.clone());
        shortcut
    }

    pub(crate) fn publisher(&self, settings: &Arc<Settings>) -> Publisher {
        Publisher::new(
            self.store.clone(),
            Arc::clone(&self.bus),
            self.clock.clone(),
            Arc::clone(settings),
        )
    }

    /// Keeps the process's view of the queues up to date.
    pub(crate) async fn sync_queues(&self, supervisor: &Supervisor) {
        let (gates, occupancy) = (self.gates.clone(), self.occupancy.clone());
        let (store, queue) = (Arc::clone(&self.store), self.queue.shards.clone());
        QueueSync::start(store, queue, gates, occupancy, self.clock.clone())
            .await
            .unwrap()
            .keep_on(supervisor);
    }

    fn context(&self, settings: &Arc<Settings>) -> Context {
        let letters = DeadLetters::new(self.store.clone(), &*self.bus, self.clock.clone());
        Context {
            settings: Arc::clone(settings),
            store: Arc::clone(&self.store),
            bus: Arc::clone(&self.bus),
            queue: self.queue.clone(),
            coordination: self.coordination.clone(),
            filter: self.filter.clone(),
            publisher: self.publisher(settings),
            letters,
            gates: self.gates.clone(),
            shortcut: self.shortcut.clone(),
            occupancy: self.occupancy.clone(),
            clock: self.clock.clone(),
            executions: Default::default(),
            outbound: Outbound::new(&settings.calls),
            limit_partitions: 0,
        }
    }

    pub(crate) fn discovery(
        &self,
        settings: &Arc<Settings>,
        supervisor: &Supervisor,
    ) -> discovery::Handle {
        discovery::start(&self.context(settings), supervisor)
    }

    pub(crate) fn fanout(&self, settings: &Arc<Settings>, supervisor: &Supervisor) {
        fanout::start(&self.context(settings), supervisor);
    }

    pub(crate) fn watchdog(&self, settings: &Arc<Settings>, supervisor: &Supervisor) {
        watchdog::start(&self.context(settings), supervisor);
    }
}
