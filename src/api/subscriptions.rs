//! Subscriptions: making, showing and sending them to another place.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use tracing::Instrument as _;
use uuid::Uuid;

use super::{
    access::{reaches, reaches_everything, who},
    error::Error,
    handle::{Api, span},
    known_topics::KNOWN_FOR,
    reader::Reader,
    topics::CHANGES,
};
use crate::{
    bus::{Log, LogEnd, Logs, own_topics},
    config::Queues,
    model::{
        Act, BulkAction, Caller, ECHO, MOST_SUBSCRIPTIONS, Matching, Offset, OnDead, OwnTopic,
        Position, PositionKey, PositionView, PutSubscription, QueueName, QueueView, ReadCounts,
        ReadFrom, ReadUpTo, SUBSCRIPTION_HEADERS, SeekTo, SequenceBy, Subscription,
        SubscriptionName, SubscriptionView, TaskFilter, TaskStatus, Topic, TopicName, TopicPattern,
        millis, nearest, shorten,
    },
    store::{KeptSubscription, Sought, Store, StoredTopology},
    wire::topics::read_place,
};

/// Where a subscription begins that does not say it.
const START: &str = "$";
/// How many partitions are asked at once.
const AT_ONCE: usize = 8;

/// Makes a subscription that the settings declare, or changes it.
pub async fn declare_subscription(
    store: &dyn Store,
    logs: &dyn Logs,
    queues: &Queues,
    name: &SubscriptionName,
    request: &PutSubscription,
    now_unix_ms: i64,
) -> Result<(), Error> {
    let mut tries = 1;
    loop {
        let known = store.subscriptions().await?;
        let known = known.into_iter().find(|known| known.name == *name);
        let mut topics = store.topics().await?;
        let wanted = wanted(name, request, known.as_ref(), &topics, now_unix_ms)?;
        feeds_not_itself(&wanted, queues)?;
        if known.as_ref() == Some(&wanted) {
            return Ok(());
        }
        topics.extend(own_topics(logs, [wanted.topics.as_str()]).await?);
        let act = Act::at_time(now_unix_ms, "settings", "put subscription", name.as_str());
        match put(store, logs, &wanted, None, known.is_none(), &topics, &act).await {
            // Another process starts with the same settings.
            Err(Error::JustChanged(_)) if tries < CHANGES => tries += 1,
            done => return done,
        }
    }
}

/// The subscription that a request asks for. What it leaves out stays, or is the default.
pub(super) fn wanted(
    name: &SubscriptionName,
    request: &PutSubscription,
    known: Option<&Subscription>,
    topics: &[Topic],
    now_unix_ms: i64,
) -> Result<Subscription, Error> {
    let of_topics = match (&request.topic, known) {
        (Some(topic), _) => TopicPattern::new(topic).map_err(Error::Invalid)?,
        (None, Some(known)) => known.topics.clone(),
        (None, None) => {
            return Err(Error::Invalid(
                "topic is missing: name the topic that it reads, or PREFIX*".to_owned(),
            ));
        }
    };
    if let Some(known) = known
        && known.topics != of_topics
    {
        return Err(of_another(name, known.topics.as_str()));
    }
    let is_own = OwnTopic::of(of_topics.as_str()).is_some();
    if known.is_none() && of_topics.prefix().is_none() && !is_own {
        is_there(of_topics.as_str(), topics)?;
    }
    let queue = match (&request.queue, known) {
        (Some(queue), _) => queue.as_str(),
        (None, Some(known)) => known.queue.as_str(),
        (None, None) => name.as_str(),
    };
    let queue = QueueName::new(queue).map_err(|error| Error::Invalid(error.to_string()))?;
    let start = match (known, &request.start) {
        // It was decided when the subscription was made.
        (Some(known), _) => known.start.clone(),
        (None, Some(start)) => start.clone(),
        (None, None) => START.to_owned(),
    };
    let matching = match (&request.matching, known) {
        (Some(matching), _) => Matching::read(matching).map_err(Error::Invalid)?,
        (None, Some(known)) => known.matching.clone(),
        (None, None) => Matching::default(),
    };
    let sequence = known.map(|known| known.sequence).unwrap_or_default();
    let sequence = request.sequence.unwrap_or(sequence);
    let on_dead = known.map(|known| known.on_dead).unwrap_or_default();
    let on_dead = request.on_dead.unwrap_or(on_dead);
    if sequence == SequenceBy::None && on_dead == OnDead::Hold {
        return Err(Error::Invalid(
            "on_dead is hold, and sequence is none: give sequence = key, or leave out on_dead"
                .to_owned(),
        ));
    }
    Ok(Subscription {
        name: name.clone(),
        topics: of_topics,
        queue,
        start,
        matching,
        sequence,
        on_dead,
        created_unix_ms: known.map_or(now_unix_ms, |known| known.created_unix_ms),
        version: known.map_or(1, |known| known.version),
    })
}

/// Refuses to turn events into tasks that have events. What a process with other settings lets through
/// is left out by the feeder.
fn feeds_not_itself(subscription: &Subscription, queues: &Queues) -> Result<(), Error> {
    let is_of_events = OwnTopic::of(subscription.topics.as_str()) == Some(OwnTopic::Events);
    let queue = &subscription.queue;
    if is_of_events && queues.get(queue).events {
        return Err(Error::Invalid(format!(
            "queue {queue} has events = true, so each task of subscription {} would make another one: name a \
             queue without",
            subscription.name
        )));
    }
    Ok(())
}

/// Stores a subscription. The positions of a new one are resolved before, and stored with it.
async fn put(
    store: &dyn Store,
    logs: &dyn Logs,
    subscription: &Subscription,
    feed_of: Option<&StoredTopology>,
    is_new: bool,
    topics: &[Topic],
    act: &Act,
) -> Result<(), Error> {
    let mut positions = None;
    if is_new {
        let from = read_place("start", &subscription.start).map_err(Error::Invalid)?;
        let mut begins = Vec::new();
        for (key, up_to) in places(logs, subscription, topics, &from, act.at_unix_ms()).await? {
            begins.push(Position {
                key,
                up_to,
                counts: ReadCounts::default(),
            });
        }
        positions = Some(begins);
    }
    match store
        .keep_subscription(subscription, positions.as_deref(), feed_of, act)
        .await?
    {
        KeptSubscription::Yes => Ok(()),
        KeptSubscription::Gone => Err(Error::Invalid(format!(
            "subscription {} was deleted a moment ago: send it again to make a new one",
            subscription.name
        ))),
        KeptSubscription::Changed => Err(Error::JustChanged(format!(
            "subscription {}",
            subscription.name
        ))),
        KeptSubscription::OtherFile => Err(Error::Conflict(format!(
            "the topology was changed or deleted meanwhile, so {} is not made",
            subscription.name
        ))),
        KeptSubscription::OfTopic(topic) => Err(of_another(&subscription.name, &topic)),
        KeptSubscription::NoRoom => Err(Error::Invalid(format!(
            "there are {MOST_SUBSCRIPTIONS} subscriptions; delete one before"
        ))),
    }
}

/// Resolves a place in each partition that the subscription reads.
async fn places(
    logs: &dyn Logs,
    subscription: &Subscription,
    topics: &[Topic],
    from: &ReadFrom,
    now_unix_ms: i64,
) -> Result<Vec<(PositionKey, ReadUpTo)>, Error> {
    let mut places = Vec::new();
    for topic in topics {
        if topic.is_deleting || !subscription.topics.includes(&topic.name) {
            continue;
        }
        let partitions = topic.settings.partitions;
        let begins = places_in(logs, topic, from, now_unix_ms).await?;
        for (partition, up_to) in (0..partitions).zip(begins) {
            let key = PositionKey {
                subscription: subscription.name.clone(),
                topic: topic.name.clone(),
                partition,
            };
            places.push((key, up_to));
        }
    }
    Ok(places)
}

/// Resolves a place in each partition of a topic.
async fn places_in(
    logs: &dyn Logs,
    topic: &Topic,
    from: &ReadFrom,
    now_unix_ms: i64,
) -> Result<Vec<ReadUpTo>, Error> {
    let log = Log::from(topic);
    let partitions = topic.settings.partitions as usize;
    let first = ReadUpTo {
        count: Some(0),
        ..ReadUpTo::default()
    };
    let mut places = vec![first; partitions];
    let mut asked: Vec<(u32, Option<Offset>)> = Vec::new();
    match from {
        ReadFrom::First => return Ok(places),
        ReadFrom::Next => {
            let ends = logs.counted_ends(&log).await?;
            for (place, end) in places.iter_mut().zip(ends) {
                *place = at_end(end);
            }
            return Ok(places);
        }
        ReadFrom::At(unix_ms) => {
            let offsets = logs.at_time(&log, *unix_ms).await?;
            asked.extend((0..).zip(offsets));
        }
        ReadFrom::Ago(ago) => {
            let at = now_unix_ms.saturating_sub(millis(*ago));
            let offsets = logs.at_time(&log, at).await?;
            asked.extend((0..).zip(offsets));
        }
        ReadFrom::After(offset) if partitions == 1 => asked.push((0, Some(*offset))),
        ReadFrom::After(_) => {
            return Err(Error::Invalid(format!(
                "topic {} has {partitions} partitions: write PARTITION:OFFSET, with commas between them",
                topic.name
            )));
        }
        ReadFrom::AfterEach(offsets) => {
            for (partition, offset) in offsets {
                if *partition as usize >= partitions {
                    return Err(Error::Invalid(format!(
                        "there is no partition {partition}: topic {} has {partitions}, counted from 0",
                        topic.name
                    )));
                }
                asked.push((*partition, Some(*offset)));
            }
        }
    }
    // Asked after the places of a time, which therefore lie before these ends.
    let ends = logs.counted_ends(&log).await?;
    for (partition, offset) in asked {
        let Some(place) = places.get_mut(partition as usize) else {
            continue;
        };
        let end = ends.get(partition as usize).copied().unwrap_or_default();
        *place = place_after(topic, partition, offset, end)?;
        if place.count.is_none() {
            // So that records count as skipped if retention deletes them unread.
            let next = logs.read(&log, partition, offset, 1).await?;
            place.count = next.first().map(|next| next.number);
        }
    }
    Ok(places)
}

/// The place after an offset. One after the end of the partition is refused: the feeder would
/// conclude that the log has lost its records.
fn place_after(
    topic: &Topic,
    partition: u32,
    offset: Option<Offset>,
    end: LogEnd,
) -> Result<ReadUpTo, Error> {
    if offset.unwrap_or_default() > end.last.unwrap_or_default() {
        let offset = offset.unwrap_or_default();
        let ends = end
            .last
            .map_or_else(|| "is empty".to_owned(), |last| format!("ends at {last}"));
        return Err(Error::Invalid(format!(
            "offset {offset} is after the end of partition {partition} of topic {}, which {ends}; write $ to begin \
             with the next record",
            topic.name
        )));
    }
    if offset >= end.last {
        return Ok(at_end(end));
    }
    Ok(ReadUpTo {
        after: offset,
        count: None,
        replay: 0,
    })
}

fn at_end(end: LogEnd) -> ReadUpTo {
    ReadUpTo {
        after: end.last,
        count: Some(end.count),
        replay: 0,
    }
}

/// Refuses a topic that does not exist, with one that is meant perhaps.
fn is_there(name: &str, topics: &[Topic]) -> Result<(), Error> {
    let mut there = Vec::new();
    for topic in topics.iter().filter(|topic| !topic.is_deleting) {
        there.push(topic.name.as_str());
    }
    if there.contains(&name) {
        return Ok(());
    }
    let near = nearest(name, there);
    Err(Error::NoSuchTopic {
        name: shorten(name, ECHO).into_owned(),
        near: near.map_or_else(String::new, |near| format!("; did you mean {near:?}?")),
    })
}

fn of_another(name: &SubscriptionName, topic: &str) -> Error {
    Error::Invalid(format!(
        "subscription {name} reads topic {topic}, which never changes: delete it before, or choose another name"
    ))
}

impl Api {
    /// The subscriptions that the caller reaches.
    pub async fn subscriptions(&self, caller: &Caller) -> Result<Vec<SubscriptionView>, Error> {
        let query = self.query()?;
        let list = async {
            let mut all = query.store().subscriptions().await?;
            all.retain(|one| may_see(caller, one));
            let positions = query.store().positions(None).await?;
            query.views_of(&all, &positions, false).await
        };
        list.instrument(span("subscriptions", caller)).await
    }

    /// One subscription, with its positions.
    pub async fn subscription(
        &self,
        caller: &Caller,
        name: &str,
    ) -> Result<SubscriptionView, Error> {
        let query = self.query()?;
        let get = async {
            let subscription = query.known_subscription(caller, name).await?;
            query.view_of(subscription).await
        };
        get.instrument(span("subscription", caller)).await
    }

    /// Makes a subscription, or changes it. What the request leaves out stays.
    pub async fn put_subscription(
        &self,
        caller: &Caller,
        name: &str,
        request: &PutSubscription,
    ) -> Result<SubscriptionView, Error> {
        self.put_subscription_of(caller, name, request, None).await
    }

    /// Makes or changes the subscription of a feed of this topology, or of none.
    pub(super) async fn put_subscription_of(
        &self,
        caller: &Caller,
        name: &str,
        request: &PutSubscription,
        feed_of: Option<&StoredTopology>,
    ) -> Result<SubscriptionView, Error> {
        let query = self.query()?;
        let put = async {
            let name =
                SubscriptionName::new(name).map_err(|error| Error::Invalid(error.to_string()))?;
            let store = query.store();
            let logs = query.bus.logs();
            let mut tries = 1;
            loop {
                let known = store.subscriptions().await?;
                let known = known.into_iter().find(|known| known.name == name);
                if let Some(known) = &known {
                    may_change(caller, known)?;
                }
                let mut topics = store.topics().await?;
                let now = query.now_unix_ms();
                let wanted = wanted(&name, request, known.as_ref(), &topics, now)?;
                may_change(caller, &wanted)?;
                feeds_not_itself(&wanted, &query.settings.queues)?;
                topics.extend(own_topics(&*logs, [wanted.topics.as_str()]).await?);
                let act = Act::at_time(now, who(caller), "put subscription", name.as_str());
                let is_new = known.is_none();
                match put(store, &*logs, &wanted, feed_of, is_new, &topics, &act).await {
                    Ok(()) => return query.view_of(wanted).await,
                    Err(Error::JustChanged(_)) if tries < CHANGES => tries += 1,
                    Err(error) => return Err(error),
                }
            }
        };
        put.instrument(span("put_subscription", caller)).await
    }

    /// Deletes a subscription with its positions. Its tasks stay.
    pub async fn delete_subscription(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        let query = self.query()?;
        let delete = async {
            let known = query.known_subscription(caller, name).await?;
            may_change(caller, &known)?;
            let now = query.now_unix_ms();
            let act = Act::at_time(now, who(caller), "delete subscription", name);
            match query.store().delete_subscription(&known.name, &act).await? {
                true => Ok(()),
                false => Err(query.no_subscription(caller, name).await?),
            }
        };
        delete.instrument(span("delete_subscription", caller)).await
    }

    /// Sends a subscription to a place. The records from there on become new tasks; those of before
    /// stay.
    pub async fn seek(
        &self,
        caller: &Caller,
        name: &str,
        to: &SeekTo,
    ) -> Result<SubscriptionView, Error> {
        let query = self.query()?;
        let seek = async {
            let from = read_place("to", &to.place).map_err(Error::Invalid)?;
            let known = query.known_subscription(caller, name).await?;
            may_change(caller, &known)?;
            let store = query.store();
            let mut topics = store.topics().await?;
            let now = query.now_unix_ms();
            let logs = query.bus.logs();
            topics.extend(own_topics(&*logs, [known.topics.as_str()]).await?);
            let places = places(&*logs, &known, &topics, &from, now).await?;
            let what = format!("seek to {}", to.place);
            let act = Act::at_time(now, who(caller), &what, name);
            let (replay, before) = match store.seek(&known.name, &places, &act).await? {
                Sought::To { replay, before } => (replay, before),
                Sought::Unknown => return Err(query.no_subscription(caller, name).await?),
            };
            let mut bulk = None;
            if to.cancels {
                bulk = self.cancel_replays(caller, &known, replay, &before).await?;
            }
            // Until the feeder has read the subscriptions again, a record that is published may
            // become a task of the old replay number, and later one of the new number. Whoever
            // waits for the answer publishes to the new one only.
            tokio::time::sleep(KNOWN_FOR).await;
            // Once more, for the tasks that were inserted meanwhile. The first time was for a caller
            // that does not wait.
            if to.cancels {
                self.cancel_replays(caller, &known, replay, &before).await?;
            }
            let mut view = query.view_of(known).await?;
            view.bulk = bulk;
            Ok(view)
        };
        seek.instrument(span("seek", caller)).await
    }

    /// Begins to cancel the unfinished tasks with these replay numbers. Returns the bulk change of the
    /// last one.
    async fn cancel_replays(
        &self,
        caller: &Caller,
        subscription: &Subscription,
        replay: u64,
        before: &[u64],
    ) -> Result<Option<Uuid>, Error> {
        let mut last = None;
        for of in before {
            let filter = tasks_of(subscription, *of);
            let started = self.start_bulk_change(caller, BulkAction::Cancel, filter);
            let started = started.await.map_err(|cause| Error::NotCancelled {
                subscription: subscription.name.clone(),
                queue: subscription.queue.clone(),
                replay,
                cause: Box::new(cause),
            })?;
            last = Some(started.id);
        }
        Ok(last)
    }
}

/// The unfinished tasks that the records of a subscription have become with this replay number.
fn tasks_of(subscription: &Subscription, replay: u64) -> TaskFilter {
    let [of_subscription, of_replay] = SUBSCRIPTION_HEADERS;
    TaskFilter {
        queue: Some(subscription.queue.clone()),
        statuses: TaskStatus::UNFINISHED.to_vec(),
        headers: vec![
            (of_subscription.to_owned(), subscription.name.to_string()),
            (of_replay.to_owned(), replay.to_string()),
        ],
        ..TaskFilter::default()
    }
}

/// Whether the caller reaches the queue of a subscription.
pub(super) fn may_see(caller: &Caller, subscription: &Subscription) -> bool {
    reaches(caller, subscription.queue.as_str()).is_ok()
}

/// Refuses a caller that does not reach the queue and all topics of a subscription.
pub(super) fn may_change(caller: &Caller, subscription: &Subscription) -> Result<(), Error> {
    reaches(caller, subscription.queue.as_str())?;
    let topics = subscription.topics.as_str();
    if OwnTopic::of(topics).is_some() {
        // Their records are of tasks of all queues.
        reaches_everything(caller)?;
    }
    reaches(caller, topics)?;
    Ok(())
}

/// The unread records of a position.
#[derive(Clone, Copy, Default)]
struct Behind {
    records: u64,
    oldest_unix_ms: Option<i64>,
}

impl Reader {
    /// Finds a subscription that the caller reaches.
    async fn known_subscription(&self, caller: &Caller, name: &str) -> Result<Subscription, Error> {
        let all = self.store().subscriptions().await?;
        let found = all
            .into_iter()
            .find(|one| one.name.as_str() == name && may_see(caller, one));
        match found {
            Some(found) => Ok(found),
            None => Err(self.no_subscription(caller, name).await?),
        }
    }

    /// The error for a subscription that does not exist, with one that is meant perhaps.
    async fn no_subscription(&self, caller: &Caller, name: &str) -> Result<Error, Error> {
        let mut all = self.store().subscriptions().await?;
        all.retain(|one| may_see(caller, one));
        let near = nearest(name, all.iter().map(|one| one.name.as_str()));
        Ok(Error::NoSuchSubscription {
            name: shorten(name, ECHO).into_owned(),
            near: near.map_or_else(String::new, |near| format!("; did you mean {near:?}?")),
        })
    }

    /// A subscription with its positions.
    async fn view_of(&self, subscription: Subscription) -> Result<SubscriptionView, Error> {
        let positions = self.store().positions(Some(&subscription.name)).await?;
        let mut views = self.views_of(&[subscription], &positions, true).await?;
        Ok(views.remove(0))
    }

    /// Shows subscriptions, with what is left to read and the counts of their queues.
    async fn views_of(
        &self,
        subscriptions: &[Subscription],
        positions: &[Position],
        with_positions: bool,
    ) -> Result<Vec<SubscriptionView>, Error> {
        let queues: BTreeSet<&QueueName> = subscriptions.iter().map(|one| &one.queue).collect();
        let queues: Vec<QueueName> = queues.into_iter().cloned().collect();
        let mut shards = self.queue.shards();
        shards.retain(|shard| queues.binary_search(&shard.queue).is_ok());
        let queues = self.views(&queues, &shards).await?;
        let names: BTreeSet<&SubscriptionName> =
            subscriptions.iter().map(|one| &one.name).collect();
        let positions: Vec<&Position> = positions
            .iter()
            .filter(|position| names.contains(&position.key.subscription))
            .collect();
        let mut of_each: BTreeMap<&SubscriptionName, Vec<(&Position, Behind)>> = BTreeMap::new();
        for (position, behind) in positions.iter().zip(self.behind(&positions).await?) {
            let of_one = of_each.entry(&position.key.subscription).or_default();
            of_one.push((position, behind));
        }
        let now = self.now_unix_ms();
        let mut views = Vec::with_capacity(subscriptions.len());
        for subscription in subscriptions {
            let mut view = new_view(subscription, queues.get(&subscription.queue));
            let mut oldest = None;
            for (position, behind) in of_each.remove(&subscription.name).unwrap_or_default() {
                view.behind += behind.records;
                view.counts.add(&position.counts);
                oldest = match (oldest, behind.oldest_unix_ms) {
                    (Some(a), Some(b)) => Some(std::cmp::min::<i64>(a, b)),
                    (a, b) => a.or(b),
                };
                if with_positions {
                    view.positions.push(PositionView {
                        topic: position.key.topic.to_string(),
                        partition: position.key.partition,
                        offset: position.up_to.after.map(|after| after.to_string()),
                        replay: position.up_to.replay,
                        behind: behind.records,
                        counts: position.counts,
                    });
                }
            }
            let counts = &view.counts;
            let others = counts.duplicates + counts.filtered + counts.refused;
            view.tasks = counts.read.saturating_sub(others);
            let age = |unix_ms: i64| now.saturating_sub(unix_ms).max(0).unsigned_abs() / 1000;
            view.oldest_seconds = oldest.map(age);
            views.push(view);
        }
        Ok(views)
    }

    /// Counts the records after each position.
    async fn behind(&self, positions: &[&Position]) -> Result<Vec<Behind>, Error> {
        let logs = self.bus.logs();
        let read: BTreeSet<&TopicName> = positions.iter().map(|one| &one.key.topic).collect();
        let mut asked = Vec::new();
        let mut topics = self.store().topics().await?;
        let names = read.iter().map(|name| name.as_str());
        topics.extend(own_topics(&*logs, names).await?);
        for topic in topics {
            if !topic.is_deleting && read.contains(&topic.name) {
                asked.push(ends_of(Arc::clone(&logs), topic));
            }
        }
        let ends: BTreeMap<TopicName, Ends> =
            stream::iter(asked).buffered(AT_ONCE).try_collect().await?;
        // Subscriptions at the same place are counted once.
        let mut at_place = BTreeMap::new();
        for position in positions {
            at_place.insert(place(position), Behind::default());
        }
        let mut counted = Vec::new();
        for (topic, partition, after) in at_place.keys() {
            let ends = ends.get(*topic).cloned();
            counted.push(behind(Arc::clone(&logs), ends, *partition, *after));
        }
        let counted: Vec<Behind> = stream::iter(counted)
            .buffered(AT_ONCE)
            .try_collect()
            .await?;
        for (at, behind) in at_place.values_mut().zip(counted) {
            *at = behind;
        }
        let at = |position: &&Position| at_place.get(&place(position)).copied().unwrap_or_default();
        Ok(positions.iter().map(at).collect())
    }
}

fn place(position: &Position) -> (&TopicName, u32, Option<Offset>) {
    let key = &position.key;
    (&key.topic, key.partition, position.up_to.after)
}

/// A log, and the ends of its partitions.
type Ends = (Arc<Log>, Arc<[LogEnd]>);

async fn ends_of(logs: Arc<dyn Logs>, topic: Topic) -> Result<(TopicName, Ends), Error> {
    let log = Log::from(&topic);
    let ends = logs.counted_ends(&log).await?;
    Ok((topic.name, (Arc::new(log), ends.into())))
}

/// Counts the records of a partition after a place.
async fn behind(
    logs: Arc<dyn Logs>,
    ends: Option<Ends>,
    partition: u32,
    after: Option<Offset>,
) -> Result<Behind, Error> {
    let Some((log, ends)) = ends else {
        return Ok(Behind::default());
    };
    let Some(end) = ends.get(partition as usize) else {
        return Ok(Behind::default());
    };
    // Compared by offset, because a log that was made anew counts from 0 again.
    let has_read_all = after.is_some() && after >= end.last;
    if has_read_all || end.count == 0 {
        return Ok(Behind::default());
    }
    let next = logs.read(&log, partition, after, 1).await?;
    Ok(next.first().map_or_else(Behind::default, |next| Behind {
        records: end.count.saturating_sub(next.number),
        oldest_unix_ms: Some(next.published_unix_ms),
    }))
}

fn new_view(subscription: &Subscription, queue: Option<&QueueView>) -> SubscriptionView {
    let queue = queue.cloned();
    let count = |of: fn(&QueueView) -> u64| queue.as_ref().map_or(0, of);
    SubscriptionView {
        name: subscription.name.to_string(),
        topic: subscription.topics.to_string(),
        queue: subscription.queue.to_string(),
        start: subscription.start.clone(),
        matching: subscription.matching.to_json(),
        sequence: subscription.sequence,
        on_dead: subscription.on_dead,
        created_at: subscription.created_unix_ms,
        behind: 0,
        oldest_seconds: None,
        waiting: count(|queue| queue.pending + queue.waiting + queue.delayed),
        leased: count(|queue| queue.leases),
        done: count(|queue| queue.completed),
        dead: count(|queue| queue.dead),
        tasks: 0,
        counts: ReadCounts::default(),
        positions: Vec::new(),
        bulk: None,
    }
}
