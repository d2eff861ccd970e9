//! Subscriptions and their positions.
//!
//! Each change of a subscription raises `meta.feeds_version`, whose row stays locked until the
//! transaction ends, so changes are serialized. A position that moves raises nothing.

use std::collections::HashSet;

use async_trait::async_trait;

use crate::{
    model::{
        Act, MOST_SUBSCRIPTIONS, Matching, Offset, OnDead, Position, PositionKey, PositionMove,
        QueueName, ReadCounts, ReadUpTo, SequenceBy, Subscription, SubscriptionName, TopicName,
        TopicPattern,
    },
    store::{
        KeptSubscription, Result, Sought, StoredTopology, Subscriptions,
        sql::{
            SqlStore,
            access::tokens,
            backend::Backend,
            meta,
            rows::{columns, corrupt, number, queue_name},
            session::Session,
            statement::{Statement, Value, pieces},
        },
    },
};

/// How many positions a transaction adds at most. On SQLite no task is inserted meanwhile.
const ADDED_AT_ONCE: usize = 2048;

/// Changes of topics raise it, too.
pub(super) const VERSION: &str = "feeds_version";

columns! {
    pub struct SubscriptionColumns {
        name: String,
        topic: String,
        queue: String,
        start_at: String,
        matching: String,
        sequence_by: i64,
        on_dead: i64,
        created_ms: i64,
        version: i64,
    }
}

impl TryFrom<SubscriptionColumns> for Subscription {
    type Error = crate::store::Error;

    fn try_from(columns: SubscriptionColumns) -> Result<Self> {
        let matching = serde_json::from_str(&columns.matching)
            .map_err(|error| error.to_string())
            .and_then(|json| Matching::read(&json))
            .map_err(corrupt)?;
        let queue: QueueName = queue_name(&columns.queue)?;
        Ok(Self {
            name: subscription_name(&columns.name)?,
            topics: TopicPattern::new(&columns.topic).map_err(corrupt)?,
            queue,
            start: columns.start_at,
            matching,
            sequence: match columns.sequence_by {
                1 => SequenceBy::Key,
                _ => SequenceBy::None,
            },
            on_dead: match columns.on_dead {
                1 => OnDead::Hold,
                _ => OnDead::Next,
            },
            created_unix_ms: columns.created_ms,
            version: number(columns.version)?,
        })
    }
}

columns! {
    pub struct PositionColumns {
        subscription: String,
        topic: String,
        part: i64,
        major: i64,
        minor: i64,
        appended: i64,
        replay: i64,
        records_read: i64,
        duplicates: i64,
        filtered: i64,
        refused: i64,
        skipped: i64,
    }
}

const POSITION_COLUMNS: &str = "subscription, topic, part, major, minor, appended, replay, records_read, \
     duplicates, filtered, refused, skipped";

impl TryFrom<PositionColumns> for Position {
    type Error = crate::store::Error;

    fn try_from(columns: PositionColumns) -> Result<Self> {
        let key = PositionKey {
            subscription: subscription_name(&columns.subscription)?,
            topic: TopicName::new(&columns.topic).map_err(|error| corrupt(error.to_string()))?,
            partition: number(columns.part)?,
        };
        let after = match u64::try_from(columns.major) {
            Ok(major) => Some(Offset {
                major,
                minor: number(columns.minor)?,
            }),
            Err(_) => None,
        };
        Ok(Self {
            key,
            up_to: ReadUpTo {
                after,
                count: u64::try_from(columns.appended).ok(),
                replay: number(columns.replay)?,
            },
            counts: ReadCounts {
                read: number(columns.records_read)?,
                duplicates: number(columns.duplicates)?,
                filtered: number(columns.filtered)?,
                refused: number(columns.refused)?,
                skipped: number(columns.skipped)?,
            },
        })
    }
}

fn subscription_name(name: &str) -> Result<SubscriptionName> {
    SubscriptionName::new(name).map_err(|error| corrupt(error.to_string()))
}

/// The columns `major` and `minor`.
fn place(after: Option<Offset>) -> [i64; 2] {
    match after {
        Some(after) => [
            i64::try_from(after.major).unwrap_or(i64::MAX),
            // The minor part of a place in a stream may be any number.
            i64::try_from(after.minor).unwrap_or(i64::MAX),
        ],
        None => [-1, 0],
    }
}

/// The column `appended`.
fn appended(count: Option<u64>) -> i64 {
    count.map_or(-1, |count| i64::try_from(count).unwrap_or(i64::MAX))
}

#[async_trait]
impl<DB: Backend> Subscriptions for SqlStore<DB> {
    async fn feeds_version(&self) -> Result<u64> {
        meta::read(&self.sql, "feeds_version", VERSION).await
    }

    async fn subscriptions(&self) -> Result<Vec<Subscription>> {
        let select = Statement::new(
            "SELECT name, topic, queue, start_at, matching, sequence_by, on_dead, created_ms, version \
             FROM subscriptions ORDER BY name",
        );
        let rows: Vec<SubscriptionColumns> = self.sql.read("subscriptions", select).await?;
        rows.into_iter().map(Subscription::try_from).collect()
    }

    async fn keep_subscription(
        &self,
        subscription: &Subscription,
        positions: Option<&[Position]>,
        feed_of: Option<&StoredTopology>,
        act: &Act,
    ) -> Result<KeptSubscription> {
        let positions = positions.map(<[Position]>::to_vec);
        let feed_of = feed_of.cloned();
        let kept = (subscription.clone(), positions, feed_of, act.clone());
        self.sql
            .run(
                "keep_subscription",
                kept,
                |session, (subscription, positions, feed_of, act)| {
                    let (positions, feed_of) = (positions.as_deref(), feed_of.as_ref());
                    Box::pin(keep(session, subscription, positions, feed_of, act))
                },
            )
            .await
    }

    async fn delete_subscription(&self, name: &SubscriptionName, act: &Act) -> Result<bool> {
        let deleted = (name.clone(), act.clone());
        self.sql
            .run("delete_subscription", deleted, |session, (name, act)| {
                Box::pin(delete(session, name, act))
            })
            .await
    }

    async fn positions(&self, of: Option<&SubscriptionName>) -> Result<Vec<Position>> {
        let mut select = Statement::new(format!("SELECT {POSITION_COLUMNS} FROM positions "));
        if let Some(name) = of {
            select = select
                .sql("WHERE subscription = ? ")
                .bind(name.as_str().to_owned());
        }
        let select = select.sql("ORDER BY subscription, topic, part");
        let rows: Vec<PositionColumns> = self.sql.read("positions", select).await?;
        rows.into_iter().map(Position::try_from).collect()
    }

    async fn add_positions(&self, positions: &[Position]) -> Result<()> {
        for some in positions.chunks(ADDED_AT_ONCE) {
            self.sql
                .run("add_positions", some.to_vec(), |session, some| {
                    Box::pin(add_missing(session, some))
                })
                .await?;
        }
        Ok(())
    }

    async fn move_position(&self, to: &PositionMove) -> Result<bool> {
        self.sql
            .run("move_position", to.clone(), |session, to| {
                Box::pin(move_one(session, to))
            })
            .await
    }

    async fn seek(
        &self,
        name: &SubscriptionName,
        to: &[(PositionKey, ReadUpTo)],
        act: &Act,
    ) -> Result<Sought> {
        let sought = (name.clone(), to.to_vec(), act.clone());
        self.sql
            .run("seek", sought, |session, (name, to, act)| {
                Box::pin(seek(session, name, to, act))
            })
            .await
    }
}

async fn keep<S: Session>(
    session: &mut S,
    subscription: &Subscription,
    positions: Option<&[Position]>,
    feed_of: Option<&StoredTopology>,
    act: &Act,
) -> Result<KeptSubscription> {
    // The row of the topology first, as those do that change it.
    let is_of_another = match feed_of {
        Some(topology) => !is_in_force(session, topology).await?,
        None => false,
    };
    meta::raise(session, VERSION).await?;
    // The call is being repeated, because the response to its COMMIT was lost.
    if tokens::is_recorded(session, act).await? {
        return Ok(KeptSubscription::Yes);
    }
    if is_of_another {
        return Ok(KeptSubscription::OtherFile);
    }
    let name = subscription.name.as_str();
    let matching = subscription.matching.to_json().to_string();
    let same = Statement::new("SELECT topic, version FROM subscriptions WHERE name = ?");
    let same: Vec<(String, i64)> = session.fetch(same.bind(name)).await?;
    if let Some((topic, version)) = same.into_iter().next() {
        if topic != subscription.topics.as_str() {
            return Ok(KeptSubscription::OfTopic(topic));
        }
        let version: u64 = number(version)?;
        if positions.is_some() || version != subscription.version {
            return Ok(KeptSubscription::Changed);
        }
        let change = Statement::new(
            "UPDATE subscriptions SET queue = ?, matching = ?, sequence_by = ?, on_dead = ?, \
             version = version + 1 WHERE name = ?",
        )
        .bind(&subscription.queue)
        .bind(matching)
        .bind(subscription.sequence as i64)
        .bind(subscription.on_dead as i64)
        .bind(name);
        session.execute(change).await?;
    } else {
        let Some(positions) = positions else {
            return Ok(KeptSubscription::Gone);
        };
        let count = Statement::new("SELECT COUNT(*) FROM subscriptions");
        if tokens::count(session, count).await? >= i64::from(MOST_SUBSCRIPTIONS) {
            return Ok(KeptSubscription::NoRoom);
        }
        let row = [
            name.into(),
            subscription.topics.as_str().into(),
            (&subscription.queue).into(),
            subscription.start.as_str().into(),
            matching.into(),
            (subscription.sequence as i64).into(),
            (subscription.on_dead as i64).into(),
            subscription.created_unix_ms.into(),
            1_i64.into(),
        ];
        let insert = Statement::new(
            "INSERT INTO subscriptions (name, topic, queue, start_at, matching, sequence_by, on_dead, \
             created_ms, version)",
        );
        session.execute(insert.values([row].into_iter())).await?;
        let positions: Vec<&Position> = positions.iter().collect();
        add(session, &positions, &S::keep_first("part")).await?;
    }
    tokens::keep(session, act).await?;
    Ok(KeptSubscription::Yes)
}

/// Whether the file of a topology is this one, until the transaction ends.
async fn is_in_force<S: Session>(session: &mut S, topology: &StoredTopology) -> Result<bool> {
    let select = Statement::new("SELECT content FROM topologies WHERE name = ?")
        .bind(topology.name.as_str())
        .sql(S::FOR_UPDATE);
    let texts: Vec<(String,)> = session.fetch(select).await?;
    Ok(texts.first().is_some_and(|(text,)| *text == topology.text))
}

async fn delete<S: Session>(session: &mut S, name: &SubscriptionName, act: &Act) -> Result<bool> {
    meta::raise(session, VERSION).await?;
    if tokens::is_recorded(session, act).await? {
        return Ok(true);
    }
    if !remove(session, name).await? {
        return Ok(false);
    }
    tokens::keep(session, act).await?;
    Ok(true)
}

/// Deletes those of these subscriptions that there are, as part of another change.
pub(super) async fn delete_all<S: Session>(
    session: &mut S,
    names: &[SubscriptionName],
) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    meta::raise(session, VERSION).await?;
    for name in names {
        remove(session, name).await?;
    }
    Ok(())
}

/// Removes a subscription and its positions. Returns false if there is none.
async fn remove<S: Session>(session: &mut S, name: &SubscriptionName) -> Result<bool> {
    let remove = Statement::new("DELETE FROM subscriptions WHERE name = ?").bind(name.as_str());
    if session.execute(remove).await? == 0 {
        return Ok(false);
    }
    let remove = Statement::new("DELETE FROM positions WHERE subscription = ?");
    session.execute(remove.bind(name.as_str())).await?;
    Ok(true)
}

async fn add_missing<S: Session>(session: &mut S, positions: &[Position]) -> Result<()> {
    // So that no subscription is deleted meanwhile.
    meta::raise(session, VERSION).await?;
    let names: Vec<(String,)> = session
        .fetch(Statement::new("SELECT name FROM subscriptions"))
        .await?;
    let names: HashSet<&str> = names.iter().map(|(name,)| name.as_str()).collect();
    let of_known = positions
        .iter()
        .filter(|position| names.contains(position.key.subscription.as_str()));
    let of_known: Vec<&Position> = of_known.collect();
    add(session, &of_known, &S::keep_first("part")).await
}

/// Adds positions, with this suffix for those that exist.
async fn add<S: Session>(session: &mut S, positions: &[&Position], suffix: &str) -> Result<()> {
    for piece in pieces(positions, |_| 0) {
        let rows = piece.iter().map(|position| {
            let [major, minor] = place(position.up_to.after);
            let row: [Value<'_>; 7] = [
                position.key.subscription.as_str().into(),
                position.key.topic.as_str().into(),
                position.key.partition.into(),
                major.into(),
                minor.into(),
                appended(position.up_to.count).into(),
                position.up_to.replay.into(),
            ];
            row
        });
        let insert = Statement::new(
            "INSERT INTO positions (subscription, topic, part, major, minor, appended, replay)",
        );
        session.execute(insert.values(rows).sql(suffix)).await?;
    }
    Ok(())
}

async fn move_one<S: Session>(session: &mut S, to: &PositionMove) -> Result<bool> {
    let [major, minor] = place(to.to.after);
    let [from_major, from_minor] = place(to.from.after);
    let counts = &to.counts;
    let update = Statement::new(
        "UPDATE positions SET major = ?, minor = ?, appended = ?, replay = ?, \
         records_read = records_read + ?, duplicates = duplicates + ?, filtered = filtered + ?, \
         refused = refused + ?, skipped = skipped + ? \
         WHERE subscription = ? AND topic = ? AND part = ? AND major = ? AND minor = ? AND replay = ?",
    )
    .bind(major)
    .bind(minor)
    .bind(appended(to.to.count))
    .bind(to.to.replay)
    .bind(counts.read)
    .bind(counts.duplicates)
    .bind(counts.filtered)
    .bind(counts.refused)
    .bind(counts.skipped)
    .bind(to.key.subscription.as_str())
    .bind(to.key.topic.as_str())
    .bind(to.key.partition)
    .bind(from_major)
    .bind(from_minor)
    .bind(to.from.replay);
    Ok(session.execute(update).await? > 0)
}

async fn seek<S: Session>(
    session: &mut S,
    name: &SubscriptionName,
    to: &[(PositionKey, ReadUpTo)],
    act: &Act,
) -> Result<Sought> {
    meta::raise(session, VERSION).await?;
    let is_repeated = tokens::is_recorded(session, act).await?;
    if !is_repeated {
        let change =
            Statement::new("UPDATE subscriptions SET version = version + 1 WHERE name = ?");
        if session.execute(change.bind(name.as_str())).await? == 0 {
            return Ok(Sought::Unknown);
        }
    }
    // They differ after the log of one partition was made anew.
    let replays = Statement::new("SELECT DISTINCT replay FROM positions WHERE subscription = ?");
    let rows: Vec<(i64,)> = session.fetch(replays.bind(name.as_str())).await?;
    let mut before = Vec::with_capacity(rows.len());
    for (replay,) in rows {
        before.push(number(replay)?);
    }
    before.sort_unstable();
    let last: u64 = before.last().copied().unwrap_or_default();
    if is_repeated {
        return Ok(Sought::To {
            replay: last,
            before: vec![last.saturating_sub(1)],
        });
    }
    let replay = last + 1;
    let raise = Statement::new("UPDATE positions SET replay = ? WHERE subscription = ?");
    session
        .execute(raise.bind(replay).bind(name.as_str()))
        .await?;
    let there = Statement::new("SELECT topic, part FROM positions WHERE subscription = ?");
    let there: Vec<(String, i64)> = session.fetch(there.bind(name.as_str())).await?;
    let there: HashSet<(&str, i64)> = there
        .iter()
        .map(|(topic, part)| (&**topic, *part))
        .collect();
    let mut moved = Vec::new();
    for (key, up_to) in to {
        // One whose topic was deleted meanwhile does not come back.
        if there.contains(&(key.topic.as_str(), key.partition.into())) {
            moved.push(Position {
                key: key.clone(),
                up_to: ReadUpTo { replay, ..*up_to },
                counts: ReadCounts::default(),
            });
        }
    }
    let moved: Vec<&Position> = moved.iter().collect();
    let places = ["major", "minor", "appended"];
    let replaced = S::replace("subscription, topic, part", &places);
    add(session, &moved, &replaced).await?;
    tokens::keep(session, act).await?;
    Ok(Sought::To { replay, before })
}
