//! Topics: making, publishing and reading them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt as _, future::join_all, stream};
use tokio::{sync::watch, time::Instant};
use tracing::Instrument as _;

use super::{
    access::{reaches, who},
    error::Error,
    handle::{Api, span},
    known_topics::KNOWN_FOR,
    query::{LISTED, bounded},
    reader::Reader,
};
use crate::{
    bus::{self, Log, LogMessage, LogRecord, Logs, PAGE_BYTES},
    model::{
        Act, Caller, ECHO, MOST_PUBLISHED, MOST_TOPICS, NewRecord, Offset, PartitionOffsets,
        PublishStatus, Published, PutTopic, ReadFrom, ReadTopic, Topic, TopicName, TopicPage,
        TopicRecord, TopicSettings, TopicView, in_short, millis, nearest, shorten, topic_of_users,
    },
    queue::{PublishedTopics, Told},
    store::{KeptTopic, Store},
    telemetry::metrics,
};

/// How often calls that wait look for records that another process published, if the topic has at
/// most 16 partitions. All calls of a process for a topic share a look.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How many partitions a call reads at once.
const AT_ONCE: usize = 4;
/// How often a change is tried while others change the same topic or subscription.
pub(super) const CHANGES: u32 = 5;

impl Reader {
    /// Finds a topic that the caller reaches, and that is not being deleted.
    pub(super) async fn topic_of(&self, caller: &Caller, name: &str) -> Result<Topic, Error> {
        if let Some(topic) = self.find_topic(name).await? {
            return Ok(topic);
        }
        let topics = self.topics.all(self.store()).await?;
        let names = topics.values().filter(|topic| !topic.is_deleting);
        let names = names.map(|topic| topic.name.as_str());
        let near = nearest(name, names.filter(|name| caller.access.reaches(name)));
        Err(Error::NoSuchTopic {
            name: shorten(name, ECHO).into_owned(),
            near: near.map_or_else(String::new, |near| format!("; did you mean {near:?}?")),
        })
    }

    /// The topic of this name, if there is one.
    pub(super) async fn find_topic(&self, name: &str) -> Result<Option<Topic>, Error> {
        let find = |topics: &BTreeMap<TopicName, Topic>| {
            let found = TopicName::new(name)
                .ok()
                .and_then(|name| topics.get(&name).cloned());
            found.filter(|topic| !topic.is_deleting)
        };
        if let Some(topic) = find(&*self.topics.all(self.store()).await?) {
            return Ok(Some(topic));
        }
        // Another process may have made it a moment ago.
        Ok(find(&*self.topics.newest(self.store()).await?))
    }

    fn logs(&self) -> Arc<dyn Logs> {
        self.bus.logs()
    }
}

/// Makes a topic that the settings declare, or changes it.
pub async fn declare_topic(
    store: &dyn Store,
    logs: &dyn Logs,
    name: &TopicName,
    settings: &TopicSettings,
    now_unix_ms: i64,
) -> Result<(), Error> {
    let mut tries = 1;
    loop {
        match declare(store, logs, name, settings, now_unix_ms).await {
            // Another process starts with the same settings.
            Err(Error::JustChanged(_)) if tries < CHANGES => tries += 1,
            done => return done,
        }
    }
}

async fn declare(
    store: &dyn Store,
    logs: &dyn Logs,
    name: &TopicName,
    settings: &TopicSettings,
    now_unix_ms: i64,
) -> Result<(), Error> {
    let act = Act::at_time(now_unix_ms, "settings", "put topic", name.as_str());
    let mut known = known_topic(store, name).await?;
    if let Some(topic) = known.as_ref().filter(|topic| topic.is_deleting) {
        // The watchdog, which would end the deletion, runs only after this.
        end_deletion(store, logs, topic).await?;
        known = known_topic(store, name).await?;
    }
    if settings.is_attached {
        if let Some(topic) = known.as_ref().filter(|topic| topic.settings.is_attached)
            && !logs.exists(&Log::from(topic)).await?
        {
            // Whoever owns it must not be able to stop taskd.
            tracing::warn!(topic = %name, "topic {name} is not on Kafka any more, so nothing is read from it");
            return Ok(());
        }
        let settings = attached(logs, name, known.as_ref()).await?;
        return put(store, logs, name, &settings, known.as_ref(), &act).await;
    }
    if known
        .as_ref()
        .is_some_and(|topic| topic.settings.is_attached)
    {
        return Err(Error::Invalid(format!(
            "topics.{name} is attached already: write attached = true, or delete the topic before"
        )));
    }
    let mut settings = settings.clone();
    let made = known.as_ref().map_or(0, |topic| topic.settings.partitions);
    if made > settings.partitions {
        tracing::warn!(
            topic = %name,
            "topics.{name}.partitions = {}: the topic has {made} already, and keeps them",
            settings.partitions
        );
        settings.partitions = made;
    }
    put(store, logs, name, &settings, known.as_ref(), &act).await?;
    if let Some(known) = known
        && let Err(error) = change(store, logs, &known, &settings).await
    {
        // Records go to it nevertheless, and the next start tries again.
        let why = in_short(&error);
        tracing::warn!(topic = %name, "topics.{name} keeps its former bounds: {why}");
    }
    Ok(())
}

/// Applies the bounds of a topic that exists to its log. Also if they did not change: an earlier call
/// may have got no further than SQL.
///
/// Another call may have stored others meanwhile, and applied them before this one did. So what SQL
/// has afterwards is applied, too.
async fn change(
    store: &dyn Store,
    logs: &dyn Logs,
    known: &Topic,
    settings: &TopicSettings,
) -> Result<(), Error> {
    let mut topic = Topic {
        settings: settings.clone(),
        ..known.clone()
    };
    for _ in 0..CHANGES {
        logs.change(&Log::from(&topic)).await?;
        match known_topic(store, &known.name).await? {
            Some(now)
                if !now.is_deleting
                    && now.created_unix_ms == known.created_unix_ms
                    && now.settings != topic.settings =>
            {
                topic = now;
            }
            _ => break,
        }
    }
    Ok(())
}

/// The settings of a topic that somebody else has made. Its partitions are those that it has now.
async fn attached(
    logs: &dyn Logs,
    name: &TopicName,
    known: Option<&Topic>,
) -> Result<TopicSettings, Error> {
    if known.is_some_and(|known| !known.settings.is_attached) {
        return Err(Error::Invalid(format!(
            "topic {name} is one that taskd has made: delete it before, or attach another one"
        )));
    }
    let mut settings = TopicSettings {
        is_attached: true,
        ..TopicSettings::default()
    };
    let log = Log::from(&Topic {
        name: name.clone(),
        settings: settings.clone(),
        created_unix_ms: 0,
        is_deleting: false,
    });
    if !logs.exists(&log).await? {
        return Err(Error::Invalid(format!(
            "attached: there is no topic {name} on Kafka; without it, taskd makes one"
        )));
    }
    settings.partitions = logs.make(&log).await?;
    Ok(settings)
}

async fn known_topic(store: &dyn Store, name: &TopicName) -> Result<Option<Topic>, Error> {
    let topics = store.topics().await?;
    Ok(topics.into_iter().find(|topic| topic.name == *name))
}

/// Ends the deletion of a topic. If somebody else has ended it, there may be another topic with this
/// name by now, which stays.
async fn end_deletion(store: &dyn Store, logs: &dyn Logs, topic: &Topic) -> Result<(), Error> {
    // Read again, because it may have got more partitions before it was marked.
    let Some(now) = known_topic(store, &topic.name).await? else {
        return Ok(());
    };
    if now.is_deleting && now.created_unix_ms == topic.created_unix_ms {
        logs.delete(&Log::from(&now)).await?;
        store.end_delete_topic(&now).await?;
    }
    Ok(())
}

/// Stores a topic, then makes its log. If the process is killed in between, or does not hear whether
/// the log was made, the first record makes it, or the next call.
async fn put(
    store: &dyn Store,
    logs: &dyn Logs,
    name: &TopicName,
    settings: &TopicSettings,
    known: Option<&Topic>,
    act: &Act,
) -> Result<(), Error> {
    if let Some((setting, why)) = settings.mistake() {
        return Err(Error::Invalid(format!("{setting} {why}")));
    }
    let topic = Topic {
        name: name.clone(),
        settings: settings.clone(),
        created_unix_ms: act.at_unix_ms(),
        is_deleting: false,
    };
    let log = Log::from(&topic);
    // Nobody but taskd may have made a topic that it trims and deletes. If another process has made
    // it meanwhile, SQL has it.
    if !settings.is_attached
        && known.is_none()
        && logs.exists(&log).await?
        && known_topic(store, name).await?.is_none()
    {
        return Err(Error::Invalid(format!(
            "the brokers have a topic {name}, which taskd did not make; choose another name, or attach it (attached = true)"
        )));
    }
    if known.is_none_or(|known| known.settings != *settings || known.is_deleting) {
        match store.keep_topic(&topic, known, act).await? {
            KeptTopic::Yes => {}
            KeptTopic::Fewer(partitions) => {
                return Err(Error::Invalid(format!(
                    "topic {name} has {partitions} partitions, and there is no way back: records would go with them"
                )));
            }
            KeptTopic::NoRoom => {
                return Err(Error::Invalid(format!(
                    "there are {MOST_TOPICS} topics; delete one before"
                )));
            }
            KeptTopic::Changed => return Err(Error::JustChanged(format!("topic {name}"))),
            KeptTopic::Deleting => return Err(Error::TopicIsDeleted(name.clone())),
        }
    }
    let made = logs.make(&log).await;
    if let Err(bus::Error::NotMade(_)) = made
        && known.is_none()
        && !logs.exists(&log).await?
        && known_topic(store, name).await?.as_ref() == Some(&topic)
    {
        // The server may never make it, for example because of its name. A row that somebody has
        // changed meanwhile is theirs.
        store.begin_delete_topic(&topic, act).await?;
        store.end_delete_topic(&topic).await?;
    }
    made?;
    Ok(())
}

impl Api {
    /// The topics that the caller reaches.
    pub async fn topics(&self, caller: &Caller) -> Result<Vec<TopicView>, Error> {
        let query = self.query()?;
        let list = async {
            let mut views = Vec::new();
            for topic in query.store().topics().await? {
                if !topic.is_deleting && caller.access.reaches(topic.name.as_str()) {
                    views.push(TopicView::from(&topic));
                }
            }
            Ok(views)
        };
        list.instrument(span("topics", caller)).await
    }

    /// One topic, with the extents of its partitions.
    pub async fn topic(&self, caller: &Caller, name: &str) -> Result<TopicView, Error> {
        let query = self.query()?;
        let get = async {
            reaches(caller, name)?;
            let topic = query.topic_of(caller, name).await?;
            let log = Log::from(&topic);
            let logs = query.logs();
            let first = logs.first(&log).await?;
            let last = logs.ends(&log).await?;
            let mut view = TopicView::from(&topic);
            for (partition, (first, last)) in (0..).zip(first.into_iter().zip(last)) {
                view.offsets.push(PartitionOffsets {
                    partition,
                    first,
                    last,
                });
            }
            Ok(view)
        };
        get.instrument(span("topic", caller)).await
    }

    /// Makes a topic, or changes its settings. Those that the request leaves out stay.
    pub async fn put_topic(
        &self,
        caller: &Caller,
        name: &str,
        request: &PutTopic,
    ) -> Result<TopicView, Error> {
        let query = self.query()?;
        let put = async {
            let name = topic_of_users(name).map_err(Error::Invalid)?;
            reaches(caller, name.as_str())?;
            let mut tries = 1;
            loop {
                match query.put_topic(caller, &name, request).await {
                    Err(Error::JustChanged(_)) if tries < CHANGES => tries += 1,
                    done => return done,
                }
            }
        };
        put.instrument(span("put_topic", caller)).await
    }

    /// Deletes a topic with its records.
    pub async fn delete_topic(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        let query = self.query()?;
        let delete = async {
            reaches(caller, name)?;
            let known = query.store().topics().await?;
            let known = known.into_iter().find(|known| known.name.as_str() == name);
            let Some(topic) = known else {
                // Names others that are like it.
                query.topics.forget();
                return Err(match query.topic_of(caller, name).await {
                    Err(error) => error,
                    Ok(_) => Error::Invalid(format!("topic {name} was made a moment ago")),
                });
            };
            let now = query.now_unix_ms();
            let act = Act::at_time(now, who(caller), "delete topic", name);
            query.store().begin_delete_topic(&topic, &act).await?;
            query.topics.forget();
            // Until then other processes may publish. If the process is killed here, the watchdog
            // goes on.
            tokio::time::sleep(KNOWN_FOR).await;
            end_deletion(query.store(), &*query.logs(), &topic).await
        };
        delete.instrument(span("delete_topic", caller)).await
    }

    /// The turn of a request, which says where its records without a key go.
    pub fn turn(&self) -> u32 {
        self.query().map_or(0, |query| query.topics.turn())
    }

    /// Publishes records, and answers each. Records of a key keep their order; those without one go
    /// to the partition whose turn it is.
    pub async fn publish(
        &self,
        caller: &Caller,
        name: &str,
        records: Vec<Result<NewRecord, String>>,
        turn: u32,
    ) -> Result<Vec<Published>, Error> {
        let query = self.query()?;
        if records.len() > MOST_PUBLISHED {
            let count = records.len();
            return Err(Error::Invalid(format!(
                "{count} records at once; at most {MOST_PUBLISHED}, or lines of any number"
            )));
        }
        let publish = async {
            reaches(caller, name)?;
            self.authentication.still_valid(caller)?;
            let topic = query.topic_of(caller, name).await?;
            Ok(query.publish(&topic, records, turn).await)
        };
        publish.instrument(span("publish", caller)).await
    }

    /// Reads a page of records. Waits for a record if there is none and the request says so.
    pub async fn read_topic(
        &self,
        caller: &Caller,
        name: &str,
        request: &ReadTopic,
    ) -> Result<TopicPage, Error> {
        self.read_on(caller, name, request, &mut Reading::default())
            .await
    }

    /// As [`Self::read_topic`], for a reader that begins where its last page ended. Reads only the
    /// partitions that may have new records.
    pub async fn read_on(
        &self,
        caller: &Caller,
        name: &str,
        request: &ReadTopic,
        reading: &mut Reading,
    ) -> Result<TopicPage, Error> {
        let query = self.query()?;
        let limit = bounded(request.limit, LISTED)? as usize;
        let read = async {
            reaches(caller, name)?;
            self.authentication.still_valid(caller)?;
            let mut topic = query.topic_of(caller, name).await?;
            let mut position = query.begin(&topic, request).await?;
            let begin = position.to_string();
            let page = |records, position: &Position| TopicPage {
                records,
                begin: begin.clone(),
                next: position.to_string(),
            };
            let wait = request.wait.min(query.settings.limits.max_wait);
            let deadline = Instant::now() + wait;
            let _wait = (!wait.is_zero()).then(|| self.wait(caller)).transpose()?;
            loop {
                let published = query.queue.published_topics();
                let open = reading.open(published, &topic);
                let every = look_every(&topic, request);
                if open.looked.elapsed() >= every {
                    open.looked = Instant::now();
                    let unread = query.partitions_after(&topic, &position, every).await?;
                    open.unread.extend(unread);
                }
                let records = query.page(&topic, &mut position, limit, open).await?;
                if records.is_empty() && !open.is_checked {
                    query.lies_within(&topic, &position).await?;
                    open.is_checked = true;
                }
                let now = Instant::now();
                if records.is_empty() && now >= deadline {
                    // Its next call looks whether the topic was made anew.
                    open.is_checked = false;
                }
                if !records.is_empty() || now >= deadline {
                    return Ok(page(records, &position));
                }
                let look = deadline.min(open.looked + every);
                tokio::select! {
                    biased;
                    () = self.stop.cancelled() => return Ok(page(records, &position)),
                    denied = self.authentication.revoked(&caller.access) => return Err(denied.into()),
                    // Checked first: a busy topic has news all the time, perhaps of other partitions.
                    () = tokio::time::sleep_until(look) => {}
                    Ok(()) = open.published.changed() => {}
                }
                // It may have been deleted, or have more partitions.
                topic = query.topic_of(caller, name).await?;
            }
        };
        let read = read.instrument(span("read_topic", caller)).await;
        if read.is_err() {
            // Otherwise partitions of a page that nobody got would count as read.
            *reading = Reading::default();
        }
        read
    }
}

/// About how many bytes of Redis a record takes.
fn size(record: &NewRecord) -> u64 {
    /// What an entry of a stream has beside its fields.
    const BESIDE: usize = 100;
    let attributes = record.attributes.iter();
    let attributes: usize = attributes
        .map(|(name, value)| name.len() + value.len())
        .sum();
    let bytes = record.value.len() + record.key.len() + record.id.len() + attributes + BESIDE;
    bytes as u64
}

impl Reader {
    /// Makes or changes a topic, unless somebody else changes it meanwhile.
    async fn put_topic(
        &self,
        caller: &Caller,
        name: &TopicName,
        request: &PutTopic,
    ) -> Result<TopicView, Error> {
        let known = known_topic(self.store(), name).await?;
        let before = known
            .as_ref()
            .map(|known| known.settings.clone())
            .unwrap_or_default();
        let mut settings = request.over(&before);
        if before.is_attached && !settings.is_attached {
            return Err(Error::Invalid(format!(
                "topic {name} is attached: to let taskd make one, delete it before"
            )));
        }
        if settings.is_attached && request.has_settings() {
            return Err(Error::Invalid(
                "an attached topic has the partitions and the retention that Kafka has: leave them out"
                    .to_owned(),
            ));
        }
        let logs = self.logs();
        if settings.is_attached {
            settings = attached(&*logs, name, known.as_ref()).await?;
        }
        let now = self.now_unix_ms();
        let act = Act::at_time(now, who(caller), "put topic", name.as_str());
        put(self.store(), &*logs, name, &settings, known.as_ref(), &act).await?;
        self.topics.forget();
        if let Some(known) = &known {
            change(self.store(), &*logs, known, &settings).await?;
        }
        let created_unix_ms = known.map_or(now, |known| known.created_unix_ms);
        Ok(TopicView::from(&Topic {
            name: name.clone(),
            settings,
            created_unix_ms,
            is_deleting: false,
        }))
    }

    pub(super) async fn publish(
        &self,
        topic: &Topic,
        records: Vec<Result<NewRecord, String>>,
        turn: u32,
    ) -> Vec<Published> {
        let partitions = topic.settings.partitions;
        let shortage = if self.bus.has_other_readers() {
            None
        } else {
            self.gates.logs_shortage()
        };
        let mut answers = vec![None; records.len()];
        // Once there is none, later records wait, too: those of a key stay in order.
        let mut has_room = true;
        let mut by_partition: BTreeMap<u32, (Vec<usize>, Vec<LogRecord>)> = BTreeMap::new();
        for (place, record) in records.into_iter().enumerate() {
            let checked = record.and_then(|record| match record.mistake() {
                Some(why) => Err(why),
                None => Ok(record),
            });
            let record = match checked {
                Ok(record) => record,
                Err(why) => {
                    answers[place] = Some(Published::failed(PublishStatus::Rejected, why));
                    continue;
                }
            };
            if let Some(why) = &shortage {
                answers[place] = Some(Published::failed(PublishStatus::TryLater, why.clone()));
                continue;
            }
            let is_in_redis = !self.bus.has_other_readers();
            has_room = has_room && (!is_in_redis || self.gates.take_logs_room(size(&record)));
            if !has_room {
                let why = "topics have taken what Redis has room for in this second".to_owned();
                answers[place] = Some(Published::failed(PublishStatus::TryLater, why));
                continue;
            }
            let of_key = record.partition(&topic.name, partitions);
            let partition = of_key.unwrap_or(turn % partitions.max(1));
            let (places, some) = by_partition.entry(partition).or_default();
            places.push(place);
            let attributes = record.marked_attributes();
            some.push(LogRecord {
                partition,
                value: record.value,
                key: record.key,
                attributes,
                id: record.id,
            });
        }
        let log = Log::from(topic);
        let logs = self.logs();
        let appends = by_partition.into_iter().map(|(partition, (places, some))| {
            let logs = Arc::clone(&logs);
            let log = &log;
            async move { (partition, places, logs.append(log, &some).await) }
        });
        let mut published = BTreeSet::new();
        for (partition, places, appended) in join_all(appends).await {
            // After an error, some may have been appended.
            published.insert(partition);
            match appended {
                Ok(offsets) => {
                    for (place, offset) in places.into_iter().zip(offsets) {
                        answers[place] = Some(Published::stored(partition, offset));
                    }
                }
                Err(error) => {
                    let is_alone = places.len() == 1;
                    for place in places {
                        answers[place] = Some(refused(&error, is_alone));
                    }
                }
            }
        }
        self.queue
            .published_topics()
            .published(&topic.name, &published);
        let answers: Vec<Published> = answers.into_iter().flatten().collect();
        for status in [
            PublishStatus::Stored,
            PublishStatus::Rejected,
            PublishStatus::TryLater,
        ] {
            let count = answers.iter().filter(|answer| answer.status == status);
            metrics::topic_published(topic.name.as_str(), status, count.count());
        }
        answers
    }

    /// Refuses a position after the end of a topic of Kafka, whose offsets are counts. Its reader
    /// would wait for a record that may never come, and skip those that come before. Offsets in Redis
    /// are times, which may be in the future.
    async fn lies_within(&self, topic: &Topic, position: &Position) -> Result<(), Error> {
        if !self.bus.has_other_readers() || position.after.iter().all(Option::is_none) {
            return Ok(());
        }
        let ends = self.logs().ends(&Log::from(topic)).await?;
        for ((partition, after), end) in (0..).zip(&position.after).zip(ends) {
            if let (Some(after), Some(end)) = (after, end)
                && *after > end
            {
                return Err(Error::Invalid(format!(
                    "offset {after} is after the end of partition {partition} of topic {}, which is {end}: \
                     the topic was made anew; begin with from=0",
                    topic.name
                )));
            }
        }
        Ok(())
    }

    /// Finds where a request begins.
    async fn begin(&self, topic: &Topic, request: &ReadTopic) -> Result<Position, Error> {
        let partitions = topic.settings.partitions;
        let log = Log::from(topic);
        let logs = self.logs();
        if let Some(partition) = request.partition.filter(|number| *number >= partitions) {
            return Err(no_partition(topic, partition));
        }
        let mut after = vec![None; partitions as usize];
        match &request.from {
            ReadFrom::First => {}
            ReadFrom::Next => after = logs.ends(&log).await?,
            ReadFrom::At(unix_ms) => after = logs.at_time(&log, *unix_ms).await?,
            ReadFrom::Ago(ago) => {
                let at = self.now_unix_ms().saturating_sub(millis(*ago));
                after = logs.at_time(&log, at).await?;
            }
            ReadFrom::After(offset) => match (request.partition, partitions) {
                (Some(partition), _) => after[partition as usize] = Some(*offset),
                (None, 1) => after[0] = Some(*offset),
                (None, _) => {
                    return Err(Error::Invalid(format!(
                        "topic {} has {partitions} partitions: name one with `partition`, or write \
                         PARTITION:OFFSET, with commas between them",
                        topic.name
                    )));
                }
            },
            ReadFrom::AfterEach(offsets) => {
                for (partition, offset) in offsets {
                    match after.get_mut(*partition as usize) {
                        Some(after) => *after = Some(*offset),
                        None => return Err(no_partition(topic, *partition)),
                    }
                }
            }
        }
        after.resize(partitions as usize, None);
        Ok(Position {
            after,
            only: request.partition,
        })
    }

    /// The partitions that have records after the position, as somebody saw them at most `within`
    /// ago.
    async fn partitions_after(
        &self,
        topic: &Topic,
        position: &Position,
        within: Duration,
    ) -> Result<BTreeSet<u32>, Error> {
        let logs = self.logs();
        let log = Log::from(topic);
        let ends = self.topics.ends(&*logs, &log, &topic.name, within).await?;
        let mut partitions = BTreeSet::new();
        for (partition, after) in position.wanted() {
            // One that was added a moment ago may not be among the ends.
            let end = ends.get(partition as usize);
            if end.is_none_or(|end| *end > after) {
                partitions.insert(partition);
            }
        }
        Ok(partitions)
    }

    /// Reads the next records, and moves the position after them. Each partition gets a share of
    /// the page. One that has no more records is not read again until somebody publishes to it.
    async fn page(
        &self,
        topic: &Topic,
        position: &mut Position,
        limit: usize,
        open: &mut OpenReading,
    ) -> Result<Vec<TopicRecord>, Error> {
        let log = Log::from(topic);
        let logs = self.logs();
        let partitions = topic.settings.partitions as usize;
        position.after.resize(partitions, None);
        let mut wanted: Vec<(u32, Option<Offset>)> = position.wanted().collect();
        wanted.retain(|(partition, _)| open.unread.contains(partition));
        // A page may not have room for all partitions, so it begins where the one before has ended.
        let first = wanted.partition_point(|(partition, _)| *partition < open.next);
        wanted.rotate_left(first);
        let share = limit.div_ceil(wanted.len().max(1));
        let reads = wanted.into_iter().map(|(partition, after)| {
            let logs = Arc::clone(&logs);
            let log = &log;
            async move { (partition, logs.read(log, partition, after, share).await) }
        });
        let mut reads = stream::iter(reads).buffered(AT_ONCE);
        let mut records = Vec::new();
        let mut bytes = 0;
        while let Some((partition, read)) = reads.next().await {
            let messages = read?;
            let of_partition: usize = messages.iter().map(|one| one.record.bytes()).sum();
            let is_read = messages.len() < share && of_partition < PAGE_BYTES;
            for message in messages {
                bytes += message.record.bytes();
                position.after[partition as usize] = Some(message.offset);
                records.push(record(message));
                open.next = partition + 1;
                if records.len() >= limit || bytes >= PAGE_BYTES {
                    return Ok(records);
                }
            }
            if is_read {
                open.unread.remove(&partition);
            }
        }
        Ok(records)
    }
}

/// What a reader knows between two pages.
#[derive(Default)]
pub struct Reading(Option<OpenReading>);

struct OpenReading {
    published: watch::Receiver<Told>,
    /// What it has heard of.
    told: Told,
    /// How many partitions it knows.
    partitions: u32,
    /// The partitions that may have records after the position.
    unread: BTreeSet<u32>,
    /// When it last looked for records that nobody told of.
    looked: Instant,
    /// The partition with which the next page begins.
    next: u32,
    /// Whether the position is known to lie within the topic.
    is_checked: bool,
}

impl Reading {
    /// Notes what was published since the last time. The first time all partitions are unread, also
    /// if the process has another connection to the others since.
    fn open(&mut self, published: &PublishedTopics, topic: &Topic) -> &mut OpenReading {
        if let Some(open) = &self.0
            && open.published.has_changed().is_err()
        {
            self.0 = None;
        }
        let open = self.0.get_or_insert_with(|| {
            let published = published.watch(&topic.name);
            let told = published.borrow().clone();
            OpenReading {
                published,
                told,
                partitions: 0,
                unread: BTreeSet::new(),
                looked: Instant::now(),
                // Readers without a memory begin anywhere, so that none of their partitions starves.
                next: getrandom::u32().unwrap_or_default() % topic.settings.partitions.max(1),
                is_checked: false,
            }
        });
        let told = open.published.borrow_and_update().clone();
        match told.since(&open.told) {
            Some(news) => open.unread.extend(news),
            None => open.partitions = 0,
        }
        open.told = told;
        open.unread
            .extend(open.partitions..topic.settings.partitions);
        open.partitions = topic.settings.partitions;
        open
    }
}

/// How far a reader has read.
struct Position {
    /// By partition; `None`: nothing.
    after: Vec<Option<Offset>>,
    /// The only partition that it reads.
    only: Option<u32>,
}

impl Position {
    fn wanted(&self) -> impl Iterator<Item = (u32, Option<Offset>)> {
        let all = (0..).zip(self.after.iter().copied());
        all.filter(|(partition, _)| self.only.is_none_or(|only| only == *partition))
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut is_first = true;
        for (partition, after) in self.wanted() {
            let Some(after) = after else { continue };
            if !is_first {
                f.write_str(",")?;
            }
            is_first = false;
            write!(f, "{partition}:{after}")?;
        }
        if is_first {
            f.write_str("0")?;
        }
        Ok(())
    }
}

fn record(message: LogMessage) -> TopicRecord {
    let LogRecord {
        partition,
        value,
        key,
        attributes,
        id,
    } = message.record;
    TopicRecord {
        partition,
        offset: message.offset,
        published_unix_ms: message.published_unix_ms,
        record: NewRecord::of_log(value, key, attributes, id),
    }
}

fn refused(error: &bus::Error, is_alone: bool) -> Published {
    match error {
        bus::Error::TooLarge { .. } if is_alone => {
            Published::failed(PublishStatus::Rejected, in_short(error))
        }
        bus::Error::TooLarge { .. } => Published::failed(
            PublishStatus::TryLater,
            "a record of this call is too large; publish them one by one".to_owned(),
        ),
        error => Published::failed(PublishStatus::TryLater, in_short(error)),
    }
}

/// How often a call that waits looks. Each look asks for each partition.
fn look_every(topic: &Topic, request: &ReadTopic) -> Duration {
    let partitions = match request.partition {
        Some(_) => 1,
        None => topic.settings.partitions,
    };
    LOOK_EVERY * partitions.div_ceil(16).max(1)
}

fn no_partition(topic: &Topic, partition: u32) -> Error {
    let partitions = topic.settings.partitions;
    Error::Invalid(format!(
        "there is no partition {partition}: topic {} has {partitions}, counted from 0",
        topic.name
    ))
}
