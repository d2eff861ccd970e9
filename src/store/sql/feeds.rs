//! Feeds of topologies, and the records that they have to acknowledge.

use std::{collections::HashSet, time::Duration};

use async_trait::async_trait;

use crate::{
    model::{FeedCounts, SubscriptionName, TaskId},
    store::{
        Feeds, Result, StoredFeed,
        sql::{
            SqlStore,
            backend::Backend,
            dialect::Dialect,
            rows::{columns, corrupt, number},
            session::Session,
            statement::{Statement, lists},
            tasks::retention,
        },
    },
};

columns! {
    pub struct FeedColumns {
        name: String,
        source: String,
        run: i64,
        trees: i64,
        duplicates: i64,
        refused: i64,
        acknowledged: i64,
        acks_pending: i64,
        held: String,
    }
}

/// The columns that change.
const CHANGING: [&str; 8] = [
    "run",
    "trees",
    "duplicates",
    "refused",
    "acknowledged",
    "acks_pending",
    "held",
    "at_ms",
];

impl TryFrom<FeedColumns> for StoredFeed {
    type Error = crate::store::Error;

    fn try_from(columns: FeedColumns) -> Result<Self> {
        Ok(Self {
            name: feed_name(&columns.name)?,
            source: columns.source,
            run: number(columns.run)?,
            counts: FeedCounts {
                trees: number(columns.trees)?,
                duplicates: number(columns.duplicates)?,
                refused: number(columns.refused)?,
                acknowledged: number(columns.acknowledged)?,
            },
            acks_pending: number(columns.acks_pending)?,
            held: columns.held,
        })
    }
}

fn feed_name(name: &str) -> Result<SubscriptionName> {
    SubscriptionName::new(name).map_err(|error| corrupt(error.to_string()))
}

#[async_trait]
impl<DB: Backend> Feeds for SqlStore<DB> {
    async fn feeds(&self) -> Result<Vec<StoredFeed>> {
        let select = Statement::new(
            "SELECT name, source, run, trees, duplicates, refused, acknowledged, acks_pending, held FROM feeds \
             ORDER BY name, at_ms",
        );
        let rows: Vec<FeedColumns> = self.sql.read("feeds", select).await?;
        rows.into_iter().map(StoredFeed::try_from).collect()
    }

    async fn keep_feed(&self, feed: &StoredFeed) -> Result<u64> {
        self.sql
            .run("keep_feed", feed.clone(), |session, feed| {
                Box::pin(keep(session, feed))
            })
            .await
    }

    async fn due_acks(&self, feed: &SubscriptionName, run: u64, limit: u32) -> Result<Vec<String>> {
        let due = Statement::new("SELECT reference FROM feed_acks WHERE feed = ? AND ")
            .bind(feed.as_str().to_owned())
            .append(of_run(run))
            .sql(" ORDER BY reference LIMIT ?")
            .bind(limit);
        let rows: Vec<(String,)> = self.sql.read("due_acks", due).await?;
        Ok(rows.into_iter().map(|(reference,)| reference).collect())
    }

    async fn due_among(
        &self,
        feed: &SubscriptionName,
        references: &[String],
    ) -> Result<Vec<String>> {
        let references: Vec<&str> = references.iter().map(String::as_str).collect();
        let mut found = Vec::new();
        for some in lists(&references) {
            let due =
                Statement::new("SELECT reference FROM feed_acks WHERE feed = ? AND reference IN ")
                    .bind(feed.as_str())
                    .list(some);
            let rows: Vec<(String,)> = self.sql.read("due_among", due).await?;
            found.extend(rows.into_iter().map(|(reference,)| reference));
        }
        Ok(found)
    }

    async fn count_acks(&self, feed: &SubscriptionName, run: u64) -> Result<u64> {
        let count = Statement::new("SELECT COUNT(*) FROM feed_acks WHERE feed = ? AND ")
            .bind(feed.as_str().to_owned())
            .append(of_run(run));
        let counts: Vec<(i64,)> = self.sql.read("count_acks", count).await?;
        counts.first().map_or(Ok(0), |(count,)| number(*count))
    }

    async fn remove_acks(&self, feed: &SubscriptionName, references: &[String]) -> Result<()> {
        let removed = (feed.clone(), references.to_vec());
        self.sql
            .run("remove_acks", removed, |session, (feed, references)| {
                Box::pin(remove(session, feed, references))
            })
            .await
    }

    async fn open_of_feed(&self, feed: &SubscriptionName, trees: &[TaskId]) -> Result<Vec<TaskId>> {
        let mut found = Vec::new();
        for some in lists(trees) {
            let open = Statement::new("SELECT id FROM trees ")
                .sql(DB::Connection::BY_PRIMARY_KEY)
                .sql(" WHERE state = 0 AND feed = ? AND id IN ")
                .bind(feed.as_str())
                .list(some);
            found.extend(self.sql.ids("open_of_feed", open).await?);
        }
        Ok(found)
    }

    async fn forget_feeds(
        &self,
        known: &[(SubscriptionName, String)],
        age: Duration,
    ) -> Result<()> {
        let known: HashSet<(SubscriptionName, String)> = known.iter().cloned().collect();
        self.sql
            .run("forget_feeds", (known, age), |session, (known, age)| {
                Box::pin(forget(session, known, *age))
            })
            .await
    }
}

/// The condition that a reference is of this run.
fn of_run<'a>(run: u64) -> Statement<'a> {
    // The sign after a colon.
    Statement::new("reference >= ? AND reference < ?")
        .bind(format!("{run}:"))
        .bind(format!("{run};"))
}

async fn keep<S: Session>(session: &mut S, feed: &StoredFeed) -> Result<u64> {
    let run = Statement::new("SELECT run FROM feeds WHERE name = ? AND source = ?")
        .bind(feed.name.as_str())
        .bind(feed.source.as_str())
        .sql(S::FOR_UPDATE);
    let runs: Vec<(i64,)> = session.fetch(run).await?;
    if let Some((run,)) = runs.first() {
        let run: u64 = number(*run)?;
        if run > feed.run {
            return Ok(run);
        }
    }
    let now_ms = super::tasks::trees::now_ms(session).await?;
    let row = [
        feed.name.as_str().into(),
        feed.source.as_str().into(),
        feed.run.into(),
        feed.counts.trees.into(),
        feed.counts.duplicates.into(),
        feed.counts.refused.into(),
        feed.counts.acknowledged.into(),
        feed.acks_pending.into(),
        feed.held.as_str().into(),
        now_ms.into(),
    ];
    let keep = Statement::new(
        "INSERT INTO feeds (name, source, run, trees, duplicates, refused, acknowledged, acks_pending, held, at_ms)",
    )
    .values([row].into_iter())
    .sql(&S::replace("name, source", &CHANGING));
    session.execute(keep).await?;
    Ok(feed.run)
}

async fn remove<S: Session>(
    session: &mut S,
    feed: &SubscriptionName,
    references: &[String],
) -> Result<()> {
    let references: Vec<&str> = references.iter().map(String::as_str).collect();
    for some in lists(&references) {
        let remove = Statement::new("DELETE FROM feed_acks WHERE feed = ? AND reference IN ")
            .bind(feed.as_str())
            .list(some);
        session.execute(remove).await?;
    }
    Ok(())
}

async fn forget<S: Session>(
    session: &mut S,
    known: &HashSet<(SubscriptionName, String)>,
    age: Duration,
) -> Result<()> {
    let now_ms = super::tasks::trees::now_ms(session).await?;
    let select = Statement::new("SELECT name, source FROM feeds");
    let rows: Vec<(String, String)> = session.fetch(select).await?;
    for (name, source) in rows {
        let of = (feed_name(&name)?, source);
        let change = if known.contains(&of) {
            Statement::new("UPDATE feeds SET at_ms = ? WHERE name = ? AND source = ?")
                .bind(now_ms)
                .bind(name.as_str())
                .bind(of.1.as_str())
        } else {
            Statement::new("DELETE FROM feeds WHERE name = ? AND source = ? AND at_ms <= ")
                .bind(name.as_str())
                .bind(of.1.as_str())
                .append(retention::before::<S>(age))
        };
        session.execute(change).await?;
    }
    let select = Statement::new("SELECT name, run FROM feeds");
    let runs: Vec<(String, i64)> = session.fetch(select).await?;
    let select = Statement::new("SELECT DISTINCT feed FROM feed_acks");
    let feeds: Vec<(String,)> = session.fetch(select).await?;
    for (feed,) in feeds {
        let mut forget = Statement::new("DELETE FROM feed_acks WHERE feed = ? AND at_ms <= ")
            .bind(feed.as_str())
            .append(retention::before::<S>(age));
        for (_, run) in runs.iter().filter(|(name, _)| *name == feed) {
            forget = forget
                .sql(" AND NOT (")
                .append(of_run(number(*run)?))
                .sql(")");
        }
        session.execute(forget).await?;
    }
    Ok(())
}
