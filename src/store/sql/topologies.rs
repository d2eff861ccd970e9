//! Topologies.
//!
//! Each change raises `meta.topologies_version`, whose row stays locked until the transaction ends,
//! so changes are serialized.

use async_trait::async_trait;

use crate::{
    model::{Act, MOST_TOPOLOGIES, QueueName, TopologyName},
    store::{
        KeptTopology, Leaving, Result, StoredTopology, Topologies,
        sql::{
            SqlStore,
            access::tokens,
            backend::Backend,
            meta,
            rows::{corrupt, number, queue_name},
            session::Session,
            statement::Statement,
            subscriptions,
        },
    },
};

const VERSION: &str = "topologies_version";

/// The columns of a topology.
type Columns = (String, i64, String, String, i64);

fn topology(columns: Columns) -> Result<StoredTopology> {
    let (name, version, text, applied_by, applied_unix_ms) = columns;
    Ok(StoredTopology {
        name: TopologyName::new(&name).map_err(|error| corrupt(error.to_string()))?,
        version: number(version)?,
        text,
        applied_by,
        applied_unix_ms,
    })
}

#[async_trait]
impl<DB: Backend> Topologies for SqlStore<DB> {
    async fn topologies_version(&self) -> Result<u64> {
        meta::read(&self.sql, "topologies_version", VERSION).await
    }

    async fn topologies(&self) -> Result<Vec<StoredTopology>> {
        let select = Statement::new(
            "SELECT name, version, content, applied_by, applied_ms FROM topologies ORDER BY name",
        );
        let rows: Vec<Columns> = self.sql.read("topologies", select).await?;
        rows.into_iter().map(topology).collect()
    }

    async fn keep_topology(
        &self,
        topology: &StoredTopology,
        leaving: &Leaving,
        act: &Act,
    ) -> Result<KeptTopology> {
        let kept = (topology.clone(), leaving.clone(), act.clone());
        self.sql
            .run(
                "keep_topology",
                kept,
                |session, (topology, leaving, act)| Box::pin(keep(session, topology, leaving, act)),
            )
            .await
    }

    async fn delete_topology(
        &self,
        name: &TopologyName,
        version: u64,
        leaving: &Leaving,
        act: &Act,
    ) -> Result<KeptTopology> {
        let deleted = (name.clone(), version, leaving.clone(), act.clone());
        self.sql
            .run(
                "delete_topology",
                deleted,
                |session, (name, version, leaving, act)| {
                    Box::pin(delete(session, name, *version, leaving, act))
                },
            )
            .await
    }
}

async fn keep<S: Session>(
    session: &mut S,
    topology: &StoredTopology,
    leaving: &Leaving,
    act: &Act,
) -> Result<KeptTopology> {
    meta::raise(session, VERSION).await?;
    // The call is being repeated, because the response to its COMMIT was lost.
    if tokens::is_recorded(session, act).await? {
        return Ok(KeptTopology::Yes);
    }
    let name = topology.name.as_str();
    if let Some(refused) = refused(session, name, topology.version, &leaving.queues).await? {
        return Ok(refused);
    }
    if topology.version == 0 {
        let count = Statement::new("SELECT COUNT(*) FROM topologies");
        if tokens::count(session, count).await? >= i64::from(MOST_TOPOLOGIES) {
            return Ok(KeptTopology::NoRoom);
        }
        let row = [
            name.into(),
            1_i64.into(),
            topology.text.as_str().into(),
            topology.applied_by.as_str().into(),
            topology.applied_unix_ms.into(),
        ];
        let insert = Statement::new(
            "INSERT INTO topologies (name, version, content, applied_by, applied_ms)",
        );
        session.execute(insert.values([row].into_iter())).await?;
    } else {
        let change = Statement::new(
            "UPDATE topologies SET version = version + 1, content = ?, applied_by = ?, applied_ms = ? \
             WHERE name = ?",
        )
        .bind(topology.text.as_str())
        .bind(topology.applied_by.as_str())
        .bind(topology.applied_unix_ms)
        .bind(name);
        session.execute(change).await?;
    }
    subscriptions::delete_all(session, &leaving.subscriptions).await?;
    tokens::keep(session, act).await?;
    Ok(KeptTopology::Yes)
}

async fn delete<S: Session>(
    session: &mut S,
    name: &TopologyName,
    version: u64,
    leaving: &Leaving,
    act: &Act,
) -> Result<KeptTopology> {
    meta::raise(session, VERSION).await?;
    if tokens::is_recorded(session, act).await? {
        return Ok(KeptTopology::Yes);
    }
    if let Some(refused) = refused(session, name.as_str(), version, &leaving.queues).await? {
        return Ok(refused);
    }
    let remove = Statement::new("DELETE FROM topologies WHERE name = ?").bind(name.as_str());
    session.execute(remove).await?;
    subscriptions::delete_all(session, &leaving.subscriptions).await?;
    tokens::keep(session, act).await?;
    Ok(KeptTopology::Yes)
}

/// Why a topology cannot be changed: it is not as it was read, or stages that leave have unfinished
/// tasks.
async fn refused<S: Session>(
    session: &mut S,
    name: &str,
    version: u64,
    removed: &[QueueName],
) -> Result<Option<KeptTopology>> {
    let select = Statement::new("SELECT version FROM topologies WHERE name = ?").bind(name);
    let versions: Vec<(i64,)> = session.fetch(select).await?;
    let present: u64 = match versions.first() {
        Some((present,)) => number(*present)?,
        None => 0,
    };
    if present != version {
        return Ok(Some(KeptTopology::Changed));
    }
    if removed.is_empty() {
        return Ok(None);
    }
    let select = Statement::new(
        "SELECT queue FROM queue_counts WHERE status = 0 AND count > 0 AND queue IN ",
    );
    let select = select.list(removed).sql(" ORDER BY queue");
    let rows: Vec<(String,)> = session.fetch(select).await?;
    let mut unfinished = Vec::new();
    for (queue,) in rows {
        unfinished.push(queue_name(&queue)?);
    }
    Ok((!unfinished.is_empty()).then_some(KeptTopology::Unfinished(unfinished)))
}
