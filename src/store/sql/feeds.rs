//! Feeds of topologies, and the records that they have to acknowledge.

use std::{collections::HashSet, time::Duration};

use async_trait::async_trait;

use crate::{
    model::{FeedCounts, SubscriptionName},
    store::{
        Feeds, Result, StoredFeed,
        sql::{
            SqlStore,
            backend::Backend,
            rows::{columns, corrupt, number},
            session::Session,
            statement::{Statement, Value, lists, pieces},
            tasks::retention,
        },
    },
};

columns! {
    pub struct FeedColumns {
        name: String,
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
            "SELECT name, run, trees, duplicates, refused, acknowledged, acks_pending, held FROM feeds \
             ORDER BY name",
        );
        let rows: Vec<FeedColumns> = self.sql.read("feeds", select).await?;
        rows.into_iter().map(StoredFeed::try_from).collect()
    }

    async fn keep_feed(&self, feed: &StoredFeed) -> Result<()> {
        self.sql
            .run("keep_feed", feed.clone(), |session, feed| {
                Box::pin(keep(session, feed))
            })
            .await
    }

    async fn due_acks(&self, feed: &SubscriptionName, limit: u32) -> Result<Vec<String>> {
        let due = Statement::new(
            "SELECT reference FROM feed_acks WHERE feed = ? ORDER BY reference LIMIT ?",
        )
        .bind(feed.as_str().to_owned())
        .bind(limit);
        let rows: Vec<(String,)> = self.sql.read("due_acks", due).await?;
        Ok(rows.into_iter().map(|(reference,)| reference).collect())
    }

    async fn add_acks(&self, feed: &SubscriptionName, references: &[String]) -> Result<()> {
        let mut references = references.to_vec();
        references.sort_unstable();
        self.sql
            .run(
                "add_acks",
                (feed.clone(), references),
                |session, (feed, references)| Box::pin(add(session, feed, references)),
            )
            .await
    }

    async fn count_acks(&self, feed: &SubscriptionName) -> Result<u64> {
        let count = Statement::new("SELECT COUNT(*) FROM feed_acks WHERE feed = ?")
            .bind(feed.as_str().to_owned());
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

    async fn forget_feeds(&self, known: &[SubscriptionName], age: Duration) -> Result<()> {
        let known: HashSet<SubscriptionName> = known.iter().cloned().collect();
        self.sql
            .run("forget_feeds", (known, age), |session, (known, age)| {
                Box::pin(forget(session, known, *age))
            })
            .await
    }
}

async fn keep<S: Session>(session: &mut S, feed: &StoredFeed) -> Result<()> {
    let run = Statement::new("SELECT run FROM feeds WHERE name = ?")
        .bind(feed.name.as_str())
        .sql(S::FOR_UPDATE);
    let runs: Vec<(i64,)> = session.fetch(run).await?;
    let is_later = |(run,): &(i64,)| run.max(&0).unsigned_abs() > feed.run;
    if runs.iter().any(is_later) {
        return Ok(());
    }
    let now_ms = super::tasks::trees::now_ms(session).await?;
    let row = [
        feed.name.as_str().into(),
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
        "INSERT INTO feeds (name, run, trees, duplicates, refused, acknowledged, acks_pending, held, at_ms)",
    )
    .values([row].into_iter())
    .sql(&S::replace("name", &CHANGING));
    session.execute(keep).await.map(drop)
}

async fn add<S: Session>(
    session: &mut S,
    feed: &SubscriptionName,
    references: &[String],
) -> Result<()> {
    let now_ms = super::tasks::trees::now_ms(session).await?;
    for piece in pieces(references, |_| 0) {
        let rows = piece.iter().map(|reference| -> [Value<'_>; 3] {
            [
                feed.as_str().into(),
                reference.as_str().into(),
                now_ms.into(),
            ]
        });
        let add = Statement::new("INSERT INTO feed_acks (feed, reference, at_ms)").values(rows);
        session.execute(add.sql(&S::keep_first("feed"))).await?;
    }
    Ok(())
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
    known: &HashSet<SubscriptionName>,
    age: Duration,
) -> Result<()> {
    for (table, name) in [("feeds", "name"), ("feed_acks", "feed")] {
        let select = Statement::new(format!("SELECT DISTINCT {name} FROM {table}"));
        let names: Vec<(String,)> = session.fetch(select).await?;
        for (of,) in names {
            if known.contains(&feed_name(&of)?) {
                continue;
            }
            let forget = Statement::new(format!(
                "DELETE FROM {table} WHERE {name} = ? AND at_ms <= "
            ))
            .bind(of.as_str())
            .append(retention::before::<S>(age));
            session.execute(forget).await?;
        }
    }
    Ok(())
}
