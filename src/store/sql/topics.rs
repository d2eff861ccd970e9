//! Topics of users.
//!
//! Each change raises `meta.topics_version`, whose row stays locked until the transaction ends, so
//! changes are serialized, and then `meta.feeds_version`, so that subscriptions hear of it.

use std::time::Duration;

use async_trait::async_trait;

use crate::{
    model::{Act, MOST_TOPICS, Topic, TopicName, TopicSettings, millis},
    store::{
        KeptTopic, Result, Topics,
        sql::{
            SqlStore,
            access::tokens,
            backend::Backend,
            meta,
            rows::{corrupt, number},
            session::Session,
            statement::Statement,
            subscriptions,
        },
    },
};

const VERSION: &str = "topics_version";

/// The columns of a topic.
type Columns = (String, i64, i64, i64, i64, i64, i64, i64);

const SELECT: &str =
    "SELECT name, partitions, age_ms, records, bytes, created_ms, deleting, attached FROM topics ";

fn topic(columns: Columns) -> Result<Topic> {
    let (name, partitions, age_ms, records, bytes, created_unix_ms, deleting, attached) = columns;
    Ok(Topic {
        name: TopicName::new(&name).map_err(|error| corrupt(error.to_string()))?,
        settings: TopicSettings {
            partitions: number(partitions)?,
            retention_age: Duration::from_millis(number(age_ms)?),
            retention_records: number(records)?,
            retention_bytes: number(bytes)?,
            is_attached: attached > 0,
        },
        created_unix_ms,
        is_deleting: deleting > 0,
    })
}

#[async_trait]
impl<DB: Backend> Topics for SqlStore<DB> {
    async fn topics(&self) -> Result<Vec<Topic>> {
        let select = Statement::new(format!("{SELECT} ORDER BY name"));
        let rows: Vec<Columns> = self.sql.read("topics", select).await?;
        rows.into_iter().map(topic).collect()
    }

    async fn keep_topic(
        &self,
        topic: &Topic,
        known: Option<&Topic>,
        act: &Act,
    ) -> Result<KeptTopic> {
        let kept = (topic.clone(), known.cloned(), act.clone());
        self.sql
            .run("keep_topic", kept, |session, (topic, known, act)| {
                Box::pin(keep(session, topic, known.as_ref(), act))
            })
            .await
    }

    async fn begin_delete_topic(&self, topic: &Topic, act: &Act) -> Result<bool> {
        let deleted = (topic.clone(), act.clone());
        self.sql
            .run("begin_delete_topic", deleted, |session, (topic, act)| {
                Box::pin(begin_delete(session, topic, act))
            })
            .await
    }

    async fn end_delete_topic(&self, topic: &Topic) -> Result<()> {
        self.sql
            .run("end_delete_topic", topic.clone(), |session, topic| {
                Box::pin(end_delete(session, topic))
            })
            .await
    }
}

async fn keep<S: Session>(
    session: &mut S,
    of: &Topic,
    known: Option<&Topic>,
    act: &Act,
) -> Result<KeptTopic> {
    meta::raise(session, VERSION).await?;
    // The call is being repeated, because the response to its COMMIT was lost.
    if tokens::is_recorded(session, act).await? {
        return Ok(KeptTopic::Yes);
    }
    let settings = &of.settings;
    let there = Statement::new(format!("{SELECT} WHERE name = ?")).bind(of.name.as_str());
    let there: Vec<Columns> = session.fetch(there).await?;
    let there = there.into_iter().next().map(topic).transpose()?;
    if there.as_ref().is_some_and(|there| there.is_deleting) {
        return Ok(KeptTopic::Deleting);
    }
    if there.as_ref() != known {
        return Ok(KeptTopic::Changed);
    }
    if let Some(there) = there {
        let partitions = there.settings.partitions;
        if partitions > settings.partitions {
            return Ok(KeptTopic::Fewer(partitions));
        }
        let change = Statement::new(
            "UPDATE topics SET partitions = ?, age_ms = ?, records = ?, bytes = ? WHERE name = ?",
        )
        .bind(settings.partitions)
        .bind(millis(settings.retention_age))
        .bind(settings.retention_records)
        .bind(settings.retention_bytes)
        .bind(of.name.as_str());
        session.execute(change).await?;
    } else {
        let count = Statement::new("SELECT COUNT(*) FROM topics");
        if tokens::count(session, count).await? >= i64::from(MOST_TOPICS) {
            return Ok(KeptTopic::NoRoom);
        }
        let row = [
            of.name.as_str().into(),
            settings.partitions.into(),
            millis(settings.retention_age).into(),
            settings.retention_records.into(),
            settings.retention_bytes.into(),
            of.created_unix_ms.into(),
            i64::from(settings.is_attached).into(),
        ];
        let insert = Statement::new(
            "INSERT INTO topics (name, partitions, age_ms, records, bytes, created_ms, attached)",
        );
        session.execute(insert.values([row].into_iter())).await?;
    }
    meta::raise(session, subscriptions::VERSION).await?;
    tokens::keep(session, act).await?;
    Ok(KeptTopic::Yes)
}

async fn begin_delete<S: Session>(session: &mut S, topic: &Topic, act: &Act) -> Result<bool> {
    meta::raise(session, VERSION).await?;
    let (name, created) = (topic.name.as_str(), topic.created_unix_ms);
    let mark = Statement::new(
        "UPDATE topics SET deleting = 1 WHERE name = ? AND deleting = 0 AND created_ms = ?",
    );
    if session.execute(mark.bind(name).bind(created)).await? > 0 {
        meta::raise(session, subscriptions::VERSION).await?;
        tokens::keep(session, act).await?;
        return Ok(true);
    }
    let there = Statement::new("SELECT COUNT(*) FROM topics WHERE name = ? AND created_ms = ?");
    Ok(tokens::count(session, there.bind(name).bind(created)).await? > 0)
}

async fn end_delete<S: Session>(session: &mut S, topic: &Topic) -> Result<()> {
    meta::raise(session, VERSION).await?;
    meta::raise(session, subscriptions::VERSION).await?;
    let remove =
        Statement::new("DELETE FROM topics WHERE name = ? AND deleting = 1 AND created_ms = ?");
    let remove = remove.bind(topic.name.as_str()).bind(topic.created_unix_ms);
    if session.execute(remove).await? > 0 {
        let remove = Statement::new("DELETE FROM positions WHERE topic = ?");
        session.execute(remove.bind(topic.name.as_str())).await?;
    }
    Ok(())
}
