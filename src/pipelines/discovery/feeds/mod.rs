//! Feeds: reads topics after the positions of subscriptions, and inserts a task for each record that
//! matches.
//!
//! One process at a time is the feeder, under a lease in Redis. It takes each partition of each
//! subscription in steps ([`step`]), many at once, so that a subscription whose queue is full holds
//! up no other. A record is read once for all subscriptions at its place ([`pages`]).
//!
//! Publishers tell which partitions have records. For a message that was lost, each second a few
//! topics are asked for their ends, and each of them twice a minute, however many subscriptions it
//! has. To an attached topic others publish, too, and to those of taskd itself the other pipelines.
//! They tell nobody, so these topics are asked each second. All are asked less often if that takes
//! long.
//!
//! Subscriptions may read topics of taskd itself, about tasks. A task that comes of such a record
//! must not make another one: records about tasks of the queues of these subscriptions are left out.

mod measure;
mod pages;
mod record_task;
mod step;
mod turns;

pub use record_task::record_task;
pub(super) use record_task::{encoding, put};

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{
    FutureExt as _, StreamExt as _,
    future::BoxFuture,
    stream::{self, FuturesUnordered},
};

use self::{
    measure::{Measured, Unread, measure},
    pages::{PAGE, Pages},
    step::{Moved, Moving, Outcome, Step},
    turns::Turns,
};
use super::{error::Failure, insert::Handle};
use crate::{
    bus::{Log, Logs, own_topics},
    model::{
        Offset, OwnTopic, Position, PositionKey, QueueName, ReadUpTo, Subscription,
        SubscriptionName, TopicName,
    },
    pipelines::context::Context,
    queue::Heard,
    runtime::{LastSaid, Loop, Supervisor},
    telemetry::metrics,
};

/// The work that the lease is for.
const WORK: &str = "feeds";
/// How long a feeder that has stopped renewing keeps the lease.
const LEASE: Duration = Duration::from_secs(4);
/// How often the lease is renewed, and how often to check whether subscriptions or topics changed.
const TICK: Duration = Duration::from_secs(1);
/// How many steps run at once.
const STEPS: usize = 32;
/// In how many ticks every topic is asked for its ends.
const LOOK_ROUND: usize = 30;
/// How often what is left to read is measured, in ticks.
const MEASURE_EVERY: u64 = 5;
/// How many topics are asked for their ends at once.
const ASKED_AT_ONCE: usize = 2;
/// After that nobody asks for this many times as long as it took, and at most for this long: a slow
/// server is not asked each second.
const ASKING_RESTS: u32 = 5;
const ASKING_RESTS_MOST: Duration = Duration::from_secs(30);
/// How many records behind a position may have been inserted: a page whose move has not ended, and the
/// next one.
const AHEAD: usize = 2 * PAGE;
/// How long a subscription waits whose queue takes nothing, at first and at most.
const HELD_FIRST: Duration = Duration::from_millis(100);
const HELD_MOST: Duration = Duration::from_secs(1);

/// Starts the loop.
pub(super) fn start(context: &Context, handle: &Handle, supervisor: &Supervisor) {
    let feeder = Feeder {
        context: context.clone(),
        handle: handle.clone(),
    };
    supervisor.spawn_loop("discovery/feeds", feeder, |feeder, cx| async move {
        feeder.run(cx).await
    });
}

#[derive(Clone)]
struct Feeder {
    context: Context,
    handle: Handle,
}

type Running = FuturesUnordered<BoxFuture<'static, Ended>>;

/// The ends of the partitions of topics.
type SeenEnds = Vec<(TopicName, Vec<Option<Offset>>)>;

/// What has ended.
enum Ended {
    Step(Box<Step>, Outcome),
    Move(Moved),
}

/// Waits for `act`, and meanwhile drives the steps that run, which go to `done` when they end: they
/// hold connections to SQL that `act` may be waiting for.
async fn while_steps_run<T>(
    running: &mut Running,
    done: &mut Vec<Ended>,
    act: impl Future<Output = T>,
) -> T {
    let mut act = pin!(act);
    loop {
        tokio::select! {
            result = &mut act => return result,
            Some(ended) = running.next() => done.push(ended),
        }
    }
}

impl Feeder {
    async fn run(self, cx: Loop) -> Result<(), Failure> {
        let mut feeds = Feeds::new(self.context.bus.logs());
        let mut running = Running::new();
        // At most one, because it may take longer than its interval.
        let mut measuring: FuturesUnordered<BoxFuture<'static, Measured>> = FuturesUnordered::new();
        let mut looking: FuturesUnordered<BoxFuture<'static, SeenEnds>> = FuturesUnordered::new();
        let mut tick_at = cx.clock().now();
        // When the last look began, and when the next one may.
        let (mut looked_at, mut look_at) = (tick_at, tick_at);
        while !cx.stop.is_cancelled() {
            if cx.clock().now() >= tick_at {
                let mut done = Vec::new();
                while_steps_run(&mut running, &mut done, self.tick(&mut feeds, &cx)).await?;
                feeds.forget_gauges();
                if feeds.is_measured_now() && measuring.is_empty() {
                    measuring.push(Box::pin(self.measure(&feeds)));
                }
                let now = cx.clock().now();
                if feeds.until.is_some() && looking.is_empty() && now >= look_at {
                    looking.push(feeds.next_ends().boxed());
                    looked_at = now;
                }
                tick_at = cx.clock().now() + TICK;
                for ended in done {
                    if feeds.end(ended, &mut running, cx.clock().now()) == Finished::Elsewhere {
                        tick_at = cx.clock().now();
                    }
                }
                cx.beat();
            }
            feeds.release_held(cx.clock().now(), |queue| self.takes_nothing(queue));
            while running.len() < STEPS && feeds.leads(&cx) {
                let Some(step) = feeds.next_step() else { break };
                let (context, handle) = (self.context.clone(), self.handle.clone());
                running.push(Box::pin(async move {
                    let (step, outcome) = step.run(context, handle).await;
                    Ended::Step(Box::new(step), outcome)
                }));
            }
            let now = cx.clock().now();
            let pause = feeds.wake_at(tick_at).saturating_duration_since(now);
            let heard = async {
                match feeds.subscriptions.is_empty() {
                    true => std::future::pending().await,
                    false => self.context.queue.published_topics().next().await,
                }
            };
            tokio::select! {
                Some(ended) = running.next() => {
                    if feeds.end(ended, &mut running, cx.clock().now()) == Finished::Elsewhere {
                        tick_at = cx.clock().now();
                    }
                }
                heard = heard => feeds.hear(&heard),
                Some(measured) = measuring.next() => feeds.set_gauges(measured),
                Some(seen) = looking.next() => {
                    feeds.see(&seen);
                    let now = cx.clock().now();
                    look_at = now + asking_rest(now.saturating_duration_since(looked_at));
                }
                () = cx.clock().sleep(pause) => {}
                () = cx.stop.cancelled() => {}
            }
        }
        // What is not finished would be read again. Finishing it costs the next feeder less.
        while let Some(ended) = running.next().await {
            feeds.end(ended, &mut running, cx.clock().now());
        }
        if feeds.until.is_some() {
            self.context.coordination.release(WORK).await?;
        }
        Ok(())
    }

    /// Keeps the lease, and reads subscriptions, topics and positions again if they changed.
    async fn tick(&self, feeds: &mut Feeds, cx: &Loop) -> Result<(), Failure> {
        let store = &self.context.store;
        let version = store.feeds_version().await?;
        if feeds.version != Some(version) {
            let subscriptions = store.subscriptions().await?;
            feeds.subscriptions = subscriptions
                .into_iter()
                .map(|one| (one.name.clone(), Arc::new(one)))
                .collect();
            let of_own = feeds
                .subscriptions
                .values()
                .filter(|one| OwnTopic::of(one.topics.as_str()).is_some());
            feeds.left_out = Arc::new(of_own.map(|one| one.queue.clone()).collect());
            feeds.version = Some(version);
            feeds.is_loaded = false;
        }
        if feeds.subscriptions.is_empty() {
            if feeds.until.take().is_some() {
                self.context.coordination.release(WORK).await?;
            }
            feeds.forget();
            return Ok(());
        }
        let asked = cx.clock().now();
        let leads = self.context.coordination.lease(WORK, LEASE).await?;
        if leads != feeds.until.is_some() {
            let does = if leads { "feeds" } else { "does not feed" };
            tracing::debug!("this process {does} subscriptions");
        }
        feeds.until = leads.then(|| asked + LEASE);
        if !leads {
            feeds.forget();
            return Ok(());
        }
        if !feeds.is_loaded {
            self.load(feeds).await?;
        }
        feeds.ticks += 1;
        Ok(())
    }

    /// Whether a queue would refuse all tasks now.
    fn takes_nothing(&self, queue: &QueueName) -> bool {
        let most = self.context.settings.queues.get(queue).max_unfinished;
        self.context.gates.is_short() || self.context.occupancy.unfinished_of(queue) >= most
    }

    /// Counts what subscriptions have left to read, for the metrics.
    fn measure(&self, feeds: &Feeds) -> impl Future<Output = Measured> + use<> {
        let mut by_subscription: BTreeMap<SubscriptionName, Vec<Unread>> = BTreeMap::new();
        for name in feeds.subscriptions.keys() {
            by_subscription.insert(name.clone(), Vec::new());
        }
        for (key, cursor) in &feeds.cursors {
            if cursor.state == CursorState::Idle {
                continue;
            }
            if let Some(log) = feeds.logs.get(&key.topic)
                && let Some(unread) = by_subscription.get_mut(&key.subscription)
            {
                unread.push(Unread {
                    log: Arc::clone(log),
                    partition: key.partition,
                    after: cursor.up_to.after,
                });
            }
        }
        // Not all may be measured at once, so each time begins with another subscription.
        let mut unread: Vec<(SubscriptionName, Vec<Unread>)> =
            by_subscription.into_iter().collect();
        let round = usize::try_from(feeds.ticks / MEASURE_EVERY).unwrap_or(0);
        let first = round % unread.len().max(1);
        unread.rotate_left(first);
        let logs = Arc::clone(&feeds.handle);
        measure(logs, unread, self.context.clock.clone())
    }

    /// Reads topics and positions. Adds the positions of topics and partitions that came later.
    async fn load(&self, feeds: &mut Feeds) -> Result<(), Failure> {
        let store = &self.context.store;
        let mut topics = store.topics().await?;
        let names = feeds.subscriptions.values().map(|one| one.topics.as_str());
        topics.extend(own_topics(&*feeds.handle, names).await?);
        let mut positions: BTreeMap<PositionKey, Position> = BTreeMap::new();
        // A partition that is added to a subscription that was sent back counts as sent back, too.
        let mut replays: BTreeMap<SubscriptionName, u64> = BTreeMap::new();
        for position in store.positions(None).await? {
            let replay = replays
                .entry(position.key.subscription.clone())
                .or_default();
            *replay = position.up_to.replay.max(*replay);
            positions.insert(position.key.clone(), position);
        }
        let mut missing = Vec::new();
        let mut wanted = BTreeSet::new();
        feeds.logs.clear();
        for topic in topics.iter().filter(|topic| !topic.is_deleting) {
            let log = Arc::new(Log::from(topic));
            let of_topic = feeds
                .subscriptions
                .values()
                .filter(|subscription| subscription.topics.includes(&topic.name));
            for subscription in of_topic {
                for partition in 0..topic.settings.partitions {
                    let key = PositionKey {
                        subscription: subscription.name.clone(),
                        topic: topic.name.clone(),
                        partition,
                    };
                    if !positions.contains_key(&key) {
                        let mut position = Position::at_beginning(key.clone());
                        let replay = replays.get(&subscription.name);
                        position.up_to.replay = replay.copied().unwrap_or_default();
                        missing.push(position);
                    }
                    wanted.insert(key);
                }
            }
            feeds.logs.insert(topic.name.clone(), log);
        }
        if !missing.is_empty() {
            store.add_positions(&missing).await?;
            positions.extend(missing.into_iter().map(|one| (one.key.clone(), one)));
        }
        positions.retain(|key, _| wanted.contains(key));
        feeds.set_positions(positions);
        feeds.is_loaded = true;
        Ok(())
    }
}

/// What the feeder knows.
struct Feeds {
    handle: Arc<dyn Logs>,
    /// `meta.feeds_version`, when subscriptions were read.
    version: Option<u64>,
    subscriptions: BTreeMap<SubscriptionName, Arc<Subscription>>,
    /// The queues of those that read topics of taskd itself.
    left_out: Arc<BTreeSet<QueueName>>,
    /// When the lease ends, counted from before it was asked for.
    until: Option<Instant>,
    /// False if topics and positions must be read again.
    is_loaded: bool,
    logs: BTreeMap<TopicName, Arc<Log>>,
    cursors: BTreeMap<PositionKey, Cursor>,
    /// Those of each partition.
    readers: HashMap<TopicName, BTreeMap<u32, Vec<PositionKey>>>,
    turns: Turns,
    held: BTreeSet<(Instant, PositionKey)>,
    pages: Pages,
    /// The topic of the rounds that was asked last.
    asked: Option<TopicName>,
    said: LastSaid,
    ticks: u64,
    /// How many steps were begun.
    steps: u64,
    /// The subscriptions whose gauges show what they have left to read.
    gauges: BTreeSet<SubscriptionName>,
}

impl Drop for Feeds {
    /// Another process may be the feeder from now on.
    fn drop(&mut self) {
        for name in &self.gauges {
            metrics::subscription_left(name.as_str(), 0, 0);
        }
    }
}

/// A subscription's reading of a partition.
struct Cursor {
    up_to: ReadUpTo,
    state: CursorState,
    /// The most records of a page.
    most: usize,
    /// So many of the next records may have been inserted before, by another feeder or in vain.
    may_be_repeated: usize,
    /// How long it was held the last time.
    held_for: Duration,
    /// The last move of the position, which may not have ended.
    moving: Option<Moving>,
    /// The end of its partition that it was made due for without being told. The last offsets may be
    /// no records, and then it never gets there.
    seen: Option<Offset>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CursorState {
    /// It has read all records.
    Idle,
    Due {
        is_look: bool,
    },
    Running {
        /// The number of its step.
        step: u64,
        /// There are records that its page may not have.
        again: bool,
    },
    Held,
}

/// Why a partition may have records.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// Nobody said so.
    Look,
    /// Somebody published, or the position is another one.
    Told,
    /// The step before this one has read some.
    Next,
}

#[derive(PartialEq, Eq)]
enum Finished {
    GoesOn,
    /// The position must be read again.
    Elsewhere,
}

impl Feeds {
    fn new(handle: Arc<dyn Logs>) -> Self {
        Self {
            handle,
            version: None,
            subscriptions: BTreeMap::new(),
            left_out: Arc::default(),
            until: None,
            is_loaded: false,
            logs: BTreeMap::new(),
            cursors: BTreeMap::new(),
            readers: HashMap::new(),
            turns: Turns::default(),
            held: BTreeSet::new(),
            pages: Pages::default(),
            asked: None,
            said: LastSaid::nothing(),
            ticks: 0,
            steps: 0,
            gauges: BTreeSet::new(),
        }
    }

    fn is_measured_now(&self) -> bool {
        self.until.is_some() && self.ticks.is_multiple_of(MEASURE_EVERY)
    }

    fn leads(&self, cx: &Loop) -> bool {
        self.until.is_some_and(|until| cx.clock().now() < until)
    }

    /// Forgets the positions, which another feeder may move from now on.
    fn forget(&mut self) {
        self.is_loaded = false;
        self.cursors.clear();
        self.readers.clear();
        self.turns.clear();
        self.held.clear();
        self.pages.forget_all();
    }

    fn set_positions(&mut self, positions: BTreeMap<PositionKey, Position>) {
        self.pages.forget_all();
        self.cursors.retain(|key, _| positions.contains_key(key));
        self.readers.clear();
        for (key, position) in positions {
            let of_topic = self.readers.entry(key.topic.clone()).or_default();
            of_topic.entry(key.partition).or_default().push(key.clone());
            match self.cursors.get_mut(&key) {
                // A move whose answer was lost has happened all the same.
                Some(cursor) if cursor.up_to == position.up_to => cursor.moving = None,
                Some(cursor) => {
                    cursor.up_to = position.up_to;
                    cursor.moving = None;
                    cursor.may_be_repeated = AHEAD;
                    self.make_due(&key, Cause::Told);
                }
                None => {
                    let cursor = Cursor {
                        up_to: position.up_to,
                        state: CursorState::Idle,
                        most: PAGE,
                        may_be_repeated: AHEAD,
                        held_for: Duration::ZERO,
                        moving: None,
                        seen: None,
                    };
                    self.cursors.insert(key.clone(), cursor);
                    self.make_due(&key, Cause::Look);
                }
            }
        }
    }

    /// Notes that a partition may have records.
    fn make_due(&mut self, key: &PositionKey, cause: Cause) {
        let Some(cursor) = self.cursors.get_mut(key) else {
            return;
        };
        match &mut cursor.state {
            CursorState::Idle => {
                // If somebody published and there is nothing after the position, the log may have
                // been made anew.
                let is_look = cause != Cause::Next;
                cursor.state = CursorState::Due { is_look };
                self.turns.push(key.clone());
            }
            CursorState::Running { again, .. } => *again = *again || cause != Cause::Look,
            CursorState::Due { is_look } => *is_look = *is_look || cause != Cause::Next,
            CursorState::Held => {}
        }
    }

    /// Shows what subscriptions have left to read, unless another feeder does so by now.
    fn set_gauges(&mut self, measured: Measured) {
        if self.until.is_none() {
            return;
        }
        for (name, left) in measured {
            if self.subscriptions.contains_key(&name) {
                metrics::subscription_left(name.as_str(), left.records, left.oldest_seconds);
                self.gauges.insert(name);
            }
        }
    }

    /// Sets the gauges to 0 that nobody will measure any more in this process.
    fn forget_gauges(&mut self) {
        let leads = self.until.is_some();
        let subscriptions = &self.subscriptions;
        self.gauges.retain(|name| {
            let stays = leads && subscriptions.contains_key(name);
            if !stays {
                metrics::subscription_left(name.as_str(), 0, 0);
            }
            stays
        });
    }

    fn hear(&mut self, heard: &Heard) {
        for (topic, partitions) in &heard.partitions {
            self.pages.forget(topic, partitions);
        }
        if heard.is_incomplete {
            self.pages.forget_all();
        }
        let mut keys: Vec<PositionKey> = Vec::new();
        if heard.is_incomplete {
            keys.extend(self.cursors.keys().cloned());
        }
        for (topic, partitions) in &heard.partitions {
            let Some(of_topic) = self.readers.get(topic) else {
                continue;
            };
            for partition in partitions {
                keys.extend(of_topic.get(partition).into_iter().flatten().cloned());
            }
        }
        for key in keys {
            self.make_due(&key, Cause::Told);
        }
    }

    /// Asks for the ends of those topics that nobody tells of, and of the next few others.
    fn next_ends(&mut self) -> impl Future<Output = SeenEnds> + use<> {
        let read = |topic: &TopicName| self.readers.contains_key(topic);
        let (untold, told): (Vec<_>, Vec<_>) = self
            .logs
            .iter()
            .filter(|(topic, _)| read(topic))
            .partition(|(_, log)| is_untold(log));
        let first = match &self.asked {
            Some(asked) => told.partition_point(|(topic, _)| *topic <= asked),
            None => 0,
        };
        let last = told.len().min(first + told.len().div_ceil(LOOK_ROUND));
        let others = &told[first..last];
        let mut asked: Vec<(TopicName, Arc<Log>)> = Vec::new();
        let mut ask = |(topic, log): &(&TopicName, &Arc<Log>)| {
            asked.push(((*topic).clone(), Arc::clone(log)));
        };
        untold.iter().for_each(&mut ask);
        others.iter().for_each(&mut ask);
        // Begins again after the last one.
        self.asked = match others.last() {
            Some((topic, _)) if last < told.len() => Some((*topic).clone()),
            _ => None,
        };
        let logs = Arc::clone(&self.handle);
        let asked = stream::iter(asked).map(move |(topic, log)| {
            let logs = Arc::clone(&logs);
            async move {
                // A broker that is away is asked again.
                let ends = logs.counted_ends(&log).await.unwrap_or_default();
                (topic, ends.into_iter().map(|end| end.last).collect())
            }
        });
        asked.buffer_unordered(ASKED_AT_ONCE).collect()
    }

    /// Notes which partitions have records after positions.
    fn see(&mut self, seen: &SeenEnds) {
        let mut keys = Vec::new();
        for (topic, ends) in seen {
            let Some(of_topic) = self.readers.get(topic) else {
                continue;
            };
            for (partition, end) in (0..).zip(ends) {
                for key in of_topic.get(&partition).into_iter().flatten() {
                    let Some(cursor) = self.cursors.get_mut(key) else {
                        continue;
                    };
                    // One that lies before the position is that of a log that was made anew.
                    let is_other = end.is_some() && *end != cursor.up_to.after;
                    if is_other && *end != cursor.seen {
                        cursor.seen = *end;
                        keys.push(key.clone());
                    }
                }
            }
        }
        for key in keys {
            // A page that was read before, and found nothing, is no answer.
            self.pages.forget(&key.topic, &[key.partition].into());
            self.make_due(&key, Cause::Told);
        }
    }

    /// Lets those go on that have been held long enough, unless their queues still take nothing:
    /// their pages would be read and checked in vain.
    fn release_held(&mut self, now: Instant, takes_nothing: impl Fn(&QueueName) -> bool) {
        while let Some((at, _)) = self.held.first()
            && *at <= now
        {
            let Some((_, key)) = self.held.pop_first() else {
                break;
            };
            let (Some(cursor), Some(subscription)) = (
                self.cursors.get_mut(&key),
                self.subscriptions.get(&key.subscription),
            ) else {
                continue;
            };
            if cursor.state != CursorState::Held {
                continue;
            }
            if takes_nothing(&subscription.queue) {
                cursor.held_for = held_for(cursor.held_for);
                self.held.insert((now + cursor.held_for, key));
                continue;
            }
            // Somebody may have published meanwhile.
            cursor.state = CursorState::Due { is_look: true };
            self.turns.push(key);
        }
    }

    /// When there is something to do at the latest.
    fn wake_at(&self, tick_at: Instant) -> Instant {
        match self.held.first() {
            Some((at, _)) => tick_at.min(*at),
            None => tick_at,
        }
    }

    /// Takes the next step.
    fn next_step(&mut self) -> Option<Step> {
        loop {
            let key = self.turns.next()?;
            let (Some(cursor), Some(log), Some(subscription)) = (
                self.cursors.get_mut(&key),
                self.logs.get(&key.topic),
                self.subscriptions.get(&key.subscription),
            ) else {
                self.turns.end(&key.subscription);
                continue;
            };
            let CursorState::Due { is_look } = cursor.state else {
                self.turns.end(&key.subscription);
                continue;
            };
            self.steps += 1;
            let number = self.steps;
            cursor.state = CursorState::Running {
                step: number,
                again: false,
            };
            let after = cursor.up_to.after;
            let page = self
                .pages
                .get(&self.handle, &key.topic, log, key.partition, after);
            return Some(Step {
                number,
                subscription: Arc::clone(subscription),
                log: Arc::clone(log),
                from: cursor.up_to,
                page,
                left_out: log.is_report.then(|| Arc::clone(&self.left_out)),
                most: cursor.most,
                may_be_repeated: cursor.may_be_repeated,
                before: cursor.moving.clone(),
                is_look,
                key,
            });
        }
    }

    fn end(&mut self, ended: Ended, running: &mut Running, now: Instant) -> Finished {
        match ended {
            Ended::Step(step, outcome) => {
                if let Outcome::Inserted { moving, .. } = &outcome {
                    running.push(moving.clone().map(Ended::Move).boxed());
                }
                self.finish(&step, outcome, now)
            }
            Ended::Move(Moved::Done) => Finished::GoesOn,
            // The steps behind it begin where the position is not.
            Ended::Move(Moved::Elsewhere | Moved::Failed(_)) => {
                self.is_loaded = false;
                Finished::Elsewhere
            }
        }
    }

    fn finish(&mut self, step: &Step, outcome: Outcome, now: Instant) -> Finished {
        let key = &step.key;
        self.turns.end(&key.subscription);
        let Some(cursor) = self.cursors.get_mut(key) else {
            return Finished::GoesOn;
        };
        let again = match cursor.state {
            CursorState::Running { step: of, again } if of == step.number => again,
            // It was begun before the lease was lost and taken again. The cursor is a new one.
            _ => return Finished::GoesOn,
        };
        // Positions may have been read again meanwhile.
        let is_same = cursor.up_to == step.from;
        let is_told = again || !is_same;
        cursor.state = CursorState::Idle;
        match outcome {
            Outcome::Inserted {
                to,
                may_be_repeated,
                moving,
                next,
            } => {
                if is_same {
                    cursor.up_to = to;
                    cursor.moving = Some(moving);
                    cursor.may_be_repeated = may_be_repeated;
                }
                if let Some(next) = next {
                    self.pages.keep(&key.topic, key.partition, to.after, next);
                }
                if is_told {
                    self.pages.forget(&key.topic, &[key.partition].into());
                }
                cursor.most = (cursor.most * 2).min(PAGE);
                cursor.held_for = Duration::ZERO;
                let cause = if is_told { Cause::Told } else { Cause::Next };
                self.make_due(key, cause);
            }
            Outcome::AtEnd => {
                cursor.held_for = Duration::ZERO;
                if is_told {
                    self.make_due(key, Cause::Told);
                }
            }
            Outcome::Refused => {
                cursor.most = (cursor.most / 2).max(1);
                cursor.may_be_repeated = AHEAD;
                self.make_due(key, Cause::Told);
            }
            Outcome::Held(why) => {
                cursor.state = CursorState::Held;
                cursor.may_be_repeated = AHEAD;
                cursor.held_for = held_for(cursor.held_for);
                self.held.insert((now + cursor.held_for, key.clone()));
                // An error must not be kept for the next try.
                self.pages.forget(&key.topic, &[key.partition].into());
                let said = format!("subscription {} waits: {why}", key.subscription);
                if self.said.is_news(&said) {
                    tracing::info!("{said}");
                }
            }
            Outcome::Elsewhere => {
                // If the position was read again during the step, nobody else makes it due.
                if is_told {
                    self.make_due(key, Cause::Told);
                }
                self.is_loaded = false;
                return Finished::Elsewhere;
            }
        }
        Finished::GoesOn
    }
}

/// Whether some of those who publish to a log tell nobody.
fn is_untold(log: &Log) -> bool {
    log.is_attached || log.is_report
}

/// How long nobody asks for the ends of topics after that took so long.
fn asking_rest(took: Duration) -> Duration {
    took.saturating_mul(ASKING_RESTS).min(ASKING_RESTS_MOST)
}

/// How long a subscription waits that has been held for this time.
fn held_for(before: Duration) -> Duration {
    (before * 2).clamp(HELD_FIRST, HELD_MOST)
}

#[cfg(test)]
mod tests {
    use futures::future::ready;

    use super::*;
    use crate::{
        bus::{self, LogEnd, LogMessage, LogRecord, Retention},
        model::{Matching, Offset, OnDead, SequenceBy, Topic, TopicPattern, TopicSettings},
    };

    /// Logs that nobody asks.
    struct Unasked;

    #[async_trait::async_trait]
    impl Logs for Unasked {
        async fn exists(&self, _log: &Log) -> bus::Result<bool> {
            unreachable!()
        }

        async fn make(&self, _log: &Log) -> bus::Result<u32> {
            unreachable!()
        }

        async fn delete(&self, _log: &Log) -> bus::Result<()> {
            unreachable!()
        }

        async fn append(&self, _log: &Log, _records: &[LogRecord]) -> bus::Result<Vec<Offset>> {
            unreachable!()
        }

        async fn read(
            &self,
            _log: &Log,
            _partition: u32,
            _after: Option<Offset>,
            _max: usize,
        ) -> bus::Result<Vec<LogMessage>> {
            unreachable!()
        }

        async fn first(&self, _log: &Log) -> bus::Result<Vec<Option<Offset>>> {
            unreachable!()
        }

        async fn ends(&self, _log: &Log) -> bus::Result<Vec<Option<Offset>>> {
            unreachable!()
        }

        async fn counted_ends(&self, _log: &Log) -> bus::Result<Vec<LogEnd>> {
            unreachable!()
        }

        async fn at_time(&self, _log: &Log, _unix_ms: i64) -> bus::Result<Vec<Option<Offset>>> {
            unreachable!()
        }

        async fn trim(&self, _log: &Log, _keep: Retention) -> bus::Result<u64> {
            unreachable!()
        }
    }

    /// The feeds of a subscription of a topic with so many partitions, which all are idle.
    fn idle(partitions: u32) -> Feeds {
        let mut feeds = Feeds::new(Arc::new(Unasked));
        let name = SubscriptionName::new("s").unwrap();
        let topic = TopicName::new("t").unwrap();
        let subscription = Subscription {
            name: name.clone(),
            topics: TopicPattern::new("t").unwrap(),
            queue: QueueName::new("q").unwrap(),
            start: "0".to_owned(),
            matching: Matching::default(),
            sequence: SequenceBy::None,
            on_dead: OnDead::Next,
            created_unix_ms: 1,
            version: 1,
        };
        feeds
            .subscriptions
            .insert(name.clone(), Arc::new(subscription));
        let log = Log::from(&Topic {
            name: topic.clone(),
            settings: TopicSettings {
                partitions,
                ..TopicSettings::default()
            },
            created_unix_ms: 1,
            is_deleting: false,
        });
        feeds.logs.insert(topic.clone(), Arc::new(log));
        let mut positions = BTreeMap::new();
        for partition in 0..partitions {
            let key = PositionKey {
                subscription: name.clone(),
                topic: topic.clone(),
                partition,
            };
            positions.insert(key.clone(), Position::at_beginning(key));
        }
        feeds.set_positions(positions);
        while let Some(step) = feeds.next_step() {
            feeds.finish(&step, Outcome::AtEnd, Instant::now());
        }
        feeds
    }

    /// Makes all partitions due.
    fn look(feeds: &mut Feeds) {
        let keys: Vec<PositionKey> = feeds.cursors.keys().cloned().collect();
        for key in &keys {
            feeds.make_due(key, Cause::Look);
        }
    }

    /// Takes the steps that are due, and says of which partitions they are.
    fn due(feeds: &mut Feeds) -> Vec<u32> {
        let steps: Vec<Step> = std::iter::from_fn(|| feeds.next_step()).collect();
        for step in &steps {
            feeds.finish(step, Outcome::AtEnd, Instant::now());
        }
        steps.iter().map(|step| step.key.partition).collect()
    }

    #[test]
    fn only_partitions_with_new_records_are_due() {
        let mut feeds = idle(8);
        let mut heard = Heard::default();
        let topic = |name: &str| TopicName::new(name).unwrap();
        heard.partitions.insert(topic("t"), [2, 5, 9].into());
        heard.partitions.insert(topic("other"), [3].into());
        feeds.hear(&heard);
        assert_eq!(due(&mut feeds), [2, 5]);
        feeds.hear(&Heard {
            is_incomplete: true,
            ..Heard::default()
        });
        assert_eq!(due(&mut feeds), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn partitions_that_end_after_a_position_are_due_once() {
        let mut feeds = idle(3);
        let topic = TopicName::new("t").unwrap();
        let end = |major| Some(Offset { major, minor: 0 });
        let seen = vec![(topic.clone(), vec![None, end(7), None, end(9)])];
        feeds.see(&seen);
        assert_eq!(due(&mut feeds), [1]);
        // Its last offset is no record.
        feeds.see(&seen);
        assert_eq!(due(&mut feeds), [] as [u32; 0]);
        feeds.see(&vec![(topic, vec![end(1), end(8)])]);
        assert_eq!(due(&mut feeds), [0, 1]);
        // A log that was made anew ends before the position.
        let at = |feeds: &mut Feeds, after| {
            let cursors = feeds.cursors.values_mut();
            cursors.for_each(|cursor| cursor.up_to.after = after);
        };
        at(&mut feeds, end(9));
        let topic = TopicName::new("t").unwrap();
        feeds.see(&vec![(topic, vec![end(9), end(2), None])]);
        assert_eq!(due(&mut feeds), [1]);
    }

    #[test]
    fn a_slow_server_is_not_asked_for_ends_each_second() {
        let rest = |ms| asking_rest(Duration::from_millis(ms));
        assert!(rest(20) < TICK);
        assert_eq!(rest(2_000), Duration::from_secs(10));
        assert_eq!(rest(60_000), ASKING_RESTS_MOST);
    }

    /// The positions of [`idle`] with this replay number.
    fn sought(feeds: &Feeds, replay: u64) -> BTreeMap<PositionKey, Position> {
        let mut positions = BTreeMap::new();
        for key in feeds.cursors.keys() {
            let mut position = Position::at_beginning(key.clone());
            position.up_to.replay = replay;
            positions.insert(key.clone(), position);
        }
        positions
    }

    #[test]
    fn a_seek_during_a_step_makes_its_partition_due() {
        let now = Instant::now();
        let mut feeds = idle(1);
        look(&mut feeds);
        let step = feeds.next_step().unwrap();
        // The new positions are read before the step finds that it moved nothing, or after it.
        feeds.set_positions(sought(&feeds, 1));
        assert!(feeds.finish(&step, Outcome::Elsewhere, now) == Finished::Elsewhere);
        let step = feeds.next_step().unwrap();
        assert_eq!(step.from.replay, 1);
        assert!(feeds.finish(&step, Outcome::Elsewhere, now) == Finished::Elsewhere);
        assert!(feeds.next_step().is_none());
        feeds.set_positions(sought(&feeds, 2));
        assert_eq!(feeds.next_step().unwrap().from.replay, 2);
    }

    #[test]
    fn a_step_from_before_the_lease_was_lost_leaves_the_new_cursor_as_it_is() {
        let now = Instant::now();
        let mut feeds = idle(1);
        look(&mut feeds);
        let old = feeds.next_step().unwrap();
        let positions = sought(&feeds, 0);
        feeds.forget();
        feeds.set_positions(positions);
        feeds.finish(&old, Outcome::AtEnd, now);
        let new = feeds.next_step().unwrap();
        feeds.finish(&new, Outcome::AtEnd, now);
        assert!(feeds.next_step().is_none());
    }

    #[test]
    fn what_somebody_has_published_is_looked_for_even_if_the_log_was_made_anew() {
        let now = Instant::now();
        let mut feeds = idle(1);
        let mut heard = Heard::default();
        let topic = TopicName::new("t").unwrap();
        heard.partitions.insert(topic, [0].into());
        feeds.hear(&heard);
        let step = feeds.next_step().unwrap();
        assert!(step.is_look);
        // Nobody has to say that there may be another page.
        let moved = |step: &Step| Outcome::Inserted {
            to: step.from,
            may_be_repeated: 0,
            moving: ready(Moved::Done).boxed().shared(),
            next: None,
        };
        feeds.finish(&step, moved(&step), now);
        let step = feeds.next_step().unwrap();
        assert!(!step.is_look);
        feeds.hear(&heard);
        feeds.finish(&step, moved(&step), now);
        assert!(feeds.next_step().unwrap().is_look);
    }

    #[test]
    fn a_move_whose_answer_was_lost_holds_up_no_later_step() {
        let mut feeds = idle(1);
        look(&mut feeds);
        let step = feeds.next_step().unwrap();
        let to = ReadUpTo {
            count: Some(1),
            ..step.from
        };
        let outcome = Outcome::Inserted {
            to,
            may_be_repeated: 0,
            moving: ready(Moved::Failed("reset by peer".to_owned()))
                .boxed()
                .shared(),
            next: None,
        };
        feeds.finish(&step, outcome, Instant::now());
        let mut positions = sought(&feeds, 0);
        for position in positions.values_mut() {
            position.up_to = to;
        }
        feeds.set_positions(positions);
        let step = feeds.next_step().unwrap();
        assert_eq!(step.from, to);
        assert!(step.before.is_none());
    }

    #[test]
    fn nothing_is_read_for_a_queue_that_takes_nothing() {
        let mut feeds = idle(1);
        look(&mut feeds);
        let step = feeds.next_step().unwrap();
        let mut now = Instant::now();
        feeds.finish(&step, Outcome::Held("it is full".to_owned()), now);
        for _ in 0..10 {
            assert!(feeds.wake_at(now + HELD_MOST) > now);
            now += HELD_MOST;
            feeds.release_held(now, |_| true);
            assert!(feeds.next_step().is_none());
        }
        now += HELD_MOST;
        feeds.release_held(now, |_| false);
        let step = feeds.next_step().unwrap();
        assert_eq!(step.may_be_repeated, AHEAD, "some may have been inserted");
    }
}
