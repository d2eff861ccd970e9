//! The checks after the work is done: in SQL, in Redis and on the bus.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    error::KafkaResult,
};
use redis::AsyncCommands;
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use taskd::model::StoredStatus;

use crate::{
    crowd::{DOOMED, QUEUES},
    executions,
    ledger::{Book, Key, Seen},
    records, topologies,
    world::{Bus, PARTITIONS, World},
};

pub(crate) async fn execute(url: &str, sql: &str) {
    let mut connection = MySqlConnection::connect(url).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(&mut connection)
        .await
        .unwrap();
}

async fn number(connection: &mut MySqlConnection, sql: &str) -> Result<i64, String> {
    sqlx::query_scalar(AssertSqlSafe(sql))
        .fetch_one(connection)
        .await
        .map_err(|error| error.to_string())
}

/// Fails while a task is unfinished or waits to be published, or an execution, a tree or a join is open.
pub(crate) async fn is_done(database: &str) -> Result<(), String> {
    let mut connection = MySqlConnection::connect(database)
        .await
        .map_err(|error| error.to_string())?;
    let unfinished = number(
        &mut connection,
        "SELECT COUNT(*) FROM tasks WHERE status = 0",
    )
    .await?;
    let outbox = number(&mut connection, "SELECT COUNT(*) FROM outbox").await?;
    let batches = number(
        &mut connection,
        "SELECT COUNT(*) FROM batches WHERE generation = ''",
    )
    .await?;
    let executions = number(
        &mut connection,
        "SELECT COUNT(*) FROM executions WHERE ended_ms = 0",
    )
    .await?;
    let trees = number(
        &mut connection,
        "SELECT (SELECT COUNT(*) FROM trees WHERE state = 0) + (SELECT COUNT(*) FROM subtrees)",
    )
    .await?;
    match (unfinished, outbox, batches, executions, trees) {
        (0, 0, 0, 0, 0) => Ok(()),
        _ => Err(format!(
            "{unfinished} tasks are unfinished, {outbox} rows in the outbox, {batches} batches wait, {executions} \
             executions, {trees} trees and joins are open"
        )),
    }
}

/// The places that must become empty some time after the work is done.
pub(crate) struct Leftovers {
    /// The brokers and the prefix of the topics; `None` if the bus is in Redis.
    kafka: Option<(String, String)>,
    nodes: Vec<redis::aio::MultiplexedConnection>,
    prefix: String,
}

impl Leftovers {
    pub(crate) async fn open(world: &World<'_>) -> Self {
        let kafka = (world.plan.bus == Bus::Kafka).then(|| {
            (
                world.servers.kafka[0].address().to_owned(),
                format!("{}-", world.name),
            )
        });
        Self {
            kafka,
            nodes: world.redis_nodes().await,
            prefix: world.name.clone(),
        }
    }

    /// Fails if anything is left, and lists it.
    pub(crate) async fn none(&mut self) -> Result<(), String> {
        if let Some((brokers, prefix)) = &self.kafka {
            for topic in ["pipeline", "task-results"] {
                tokio::task::block_in_place(|| all_is_committed(brokers, prefix, topic))?;
            }
        }
        let mut left = Vec::new();
        for node in &mut self.nodes {
            for key in keys(node, &self.prefix).await {
                left.extend(
                    leftover(node, &key)
                        .await
                        .map(|what| format!("{key}: {what}")),
                );
            }
        }
        if left.is_empty() {
            Ok(())
        } else {
            Err(left.join("; "))
        }
    }
}

/// Checks that the group has committed each partition to its end.
fn all_is_committed(brokers: &str, prefix: &str, topic: &str) -> Result<(), String> {
    let (name, within) = (format!("{prefix}{topic}"), Duration::from_secs(10));
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("group.id", format!("{prefix}taskd-{topic}"));
    let consumer: BaseConsumer = config.create().unwrap();
    let ask = || -> KafkaResult<Vec<String>> {
        let mut partitions = TopicPartitionList::new();
        partitions.add_partition_range(&name, 0, PARTITIONS - 1);
        let mut behind = Vec::new();
        for committed in consumer.committed_offsets(partitions, within)?.elements() {
            let (_, end) = consumer.fetch_watermarks(&name, committed.partition(), within)?;
            if committed.offset() != Offset::Offset(end) && end > 0 {
                behind.push(format!(
                    "{name}/{} ends at {end}, {:?} is committed",
                    committed.partition(),
                    committed.offset()
                ));
            }
        }
        Ok(behind)
    };
    match ask() {
        Ok(behind) if behind.is_empty() => Ok(()),
        Ok(behind) => Err(behind.join("; ")),
        Err(error) => Err(error.to_string()),
    }
}

/// Fails while a subscription has not read all records.
pub(crate) async fn is_read(url: &str) -> Result<(), String> {
    for one in subscriptions(url).await?["subscriptions"]
        .as_array()
        .ok_or("no subscriptions")?
    {
        if one["behind"] != 0 {
            return Err(one.to_string());
        }
    }
    Ok(())
}

async fn subscriptions(url: &str) -> Result<serde_json::Value, String> {
    answer(reqwest::get(format!("{url}/v1/subscriptions")).await).await
}

/// Checks that, according to every process, the books of all queues balance and fsck finds nothing.
pub(crate) async fn books_and_fsck(urls: &[String]) -> Result<(), String> {
    for url in urls {
        let books = answer(reqwest::get(format!("{url}/v1/books")).await).await?;
        let queues = books["queues"].as_array().ok_or("no books")?;
        if let Some((name, _)) = QUEUES
            .iter()
            .find(|(name, _)| !queues.iter().any(|of| of["queue"] == *name))
        {
            return Err(format!("{url} has no books of {name}"));
        }
        for of in queues {
            if of["state"] != "BALANCED" || of["held"]["between"] != 0 {
                return Err(format!("the books of {url}: {of}"));
            }
        }
    }
    let (mut cursor, mut shards) = (String::new(), 0);
    loop {
        let request = crate::support::http_client().post(format!("{}/v1/fsck", urls[0]));
        let page = answer(request.json(&json!({"cursor": cursor})).send().await).await?;
        if ["finds", "unchecked_shards"]
            .iter()
            .any(|list| page[list] != json!([]))
            || page["unchecked"] != 0
        {
            return Err(format!("fsck says {page}"));
        }
        shards += page["shards"].as_u64().unwrap_or(0);
        match page["cursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None if shards >= QUEUES.len() as u64 => return Ok(()),
            None => return Err(format!("fsck has checked {shards} shards")),
        }
    }
}

async fn answer(answer: reqwest::Result<reqwest::Response>) -> Result<serde_json::Value, String> {
    let answer = answer
        .and_then(reqwest::Response::error_for_status)
        .map_err(|error| error.to_string())?;
    answer.json().await.map_err(|error| error.to_string())
}

type Node = redis::aio::MultiplexedConnection;

async fn keys(node: &mut Node, prefix: &str) -> Vec<String> {
    let mut scan = node
        .scan_match::<_, String>(format!("{prefix}:*"))
        .await
        .unwrap();
    let mut keys = Vec::new();
    while let Some(key) = scan.next_item().await {
        keys.push(key.unwrap());
    }
    keys
}

/// Describes what a key still contains although it should be empty.
async fn leftover(node: &mut Node, key: &str) -> Option<String> {
    // Keys of a shard: `<p>:{<queue>:<number>}:<name>`.
    let (tag, name) = key.split_once('{')?.1.split_once('}')?;
    if tag.starts_with("bus") {
        return undone(node, key).await;
    }
    // What living processes say of themselves expires, and so do the depths of the last day.
    if tag == "processes" || tag == "depths" {
        return None;
    }
    // Topics keep their records.
    if tag.starts_with("topic:") {
        return None;
    }
    match name.strip_prefix(':')? {
        "generation" | "offset" | "seen" => None,
        // Keys of the filter.
        "era" | "stored" if tag == "filter" => None,
        "counters" => {
            let counters: HashMap<String, String> = node.hgetall(key).await.unwrap();
            let is_zero = |name: &str| counters.get(name).is_none_or(|count| count == "0");
            let wrong = ["open", "live", "open_bytes", "outbox_bytes", "behind"]
                .into_iter()
                .filter(|name| !is_zero(name));
            let wrong: Vec<_> = wrong
                .map(|name| format!("{name} = {}", counters[name]))
                .collect();
            (!wrong.is_empty()).then(|| wrong.join(", "))
        }
        "outbox" => length(node, "XLEN", key).await,
        "records" | "bodies" | "lines" => length(node, "HLEN", key).await,
        "leases" | "delayed" | "starts" => length(node, "ZCARD", key).await,
        // The limits of the queue stay; each key leaves when its times are over.
        "limits" => {
            let keys: Vec<Vec<u8>> = node.hkeys(key).await.unwrap();
            let keys = keys.iter().filter(|name| !name.is_empty()).count();
            (keys > 0).then(|| format!("{keys} limit keys"))
        }
        "finals" => length(node, "LLEN", key).await,
        // No record is left, so the elements that remain in a lane are spent, and will be swept.
        name if name.ends_with(":T") => length(node, "LLEN", key).await,
        name if name.ends_with(":C") || name.ends_with(":P") => None,
        _ => Some("a key that nobody knows".into()),
    }
}

async fn length(node: &mut Node, command: &str, key: &str) -> Option<String> {
    let length: u64 = redis::cmd(command)
        .arg(key)
        .query_async(node)
        .await
        .unwrap();
    (length > 0).then(|| format!("{command} {length}"))
}

/// Describes what a key of the bus still contains: records that are unread, or not acknowledged.
async fn undone(node: &mut Node, key: &str) -> Option<String> {
    let kind: String = redis::cmd("TYPE").arg(key).query_async(node).await.unwrap();
    // The other topics are read by people or other programs, not by taskd.
    if kind != "stream" || !(key.contains("pipeline") || key.contains("task-results")) {
        return None;
    }
    if let Some(length) = length(node, "XLEN", key).await {
        return Some(length);
    }
    let groups: Vec<HashMap<String, redis::Value>> = redis::cmd("XINFO")
        .arg("GROUPS")
        .arg(key)
        .query_async(node)
        .await
        .unwrap();
    let pending = groups
        .iter()
        .filter(|group| !matches!(group.get("pending"), Some(redis::Value::Int(0)) | None));
    let pending: Vec<_> = pending.map(|group| format!("{group:?}")).collect();
    (!pending.is_empty()).then(|| pending.join(", "))
}

struct Task {
    id: Vec<u8>,
    queue: String,
    task_key: Vec<u8>,
    replicas: i64,
    status: i64,
    completed: i64,
    reason: String,
}

struct Outcome {
    task_id: Vec<u8>,
    worker: Vec<u8>,
    surplus: i64,
    result: Vec<u8>,
}

/// Compares SQL with the ledger. Prints all mistakes, then panics.
pub(crate) async fn everything(world: &World<'_>) {
    let mut connection = MySqlConnection::connect(&world.database).await.unwrap();
    let tasks = sqlx::query_as(
        "SELECT id, queue, task_key, replicas, status, completed, reason FROM tasks",
    )
    .fetch_all(&mut connection)
    .await
    .unwrap();
    let tasks: Vec<Task> = tasks
        .into_iter()
        .map(
            |(id, queue, task_key, replicas, status, completed, reason)| Task {
                id,
                queue,
                task_key,
                replicas,
                status,
                completed,
                reason,
            },
        )
        .collect();
    let outcomes = sqlx::query_as("SELECT task_id, worker, surplus, result FROM results")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    let outcomes: Vec<Outcome> = outcomes
        .into_iter()
        .map(|(task_id, worker, surplus, result)| Outcome {
            task_id,
            worker,
            surplus,
            result,
        })
        .collect();
    let counts: Vec<(String, i64, i64)> = sqlx::query_as(
        "SELECT queue, CAST(status AS SIGNED), count FROM queue_counts WHERE count <> 0",
    )
    .fetch_all(&mut connection)
    .await
    .unwrap();

    // Steps of executions leave none.
    let dead = "SELECT COUNT(*) FROM tasks LEFT JOIN letters ON letters.id = tasks.id \
                WHERE tasks.status = 2 AND COALESCE(execution, '') = ''";
    let letters = number(
        &mut connection,
        &format!("{dead} AND letters.id IS NOT NULL"),
    )
    .await
    .unwrap();
    let without = number(&mut connection, &format!("{dead} AND letters.id IS NULL"))
        .await
        .unwrap();

    let ended: Vec<(Vec<u8>, i64)> =
        sqlx::query_as("SELECT given_id, CAST(status AS SIGNED) FROM executions")
            .fetch_all(&mut connection)
            .await
            .unwrap();
    let ended = ended
        .into_iter()
        .map(|(id, status)| (String::from_utf8(id).unwrap(), status));
    let ended: BTreeMap<String, i64> = ended.collect();
    let states: Vec<(Vec<u8>, i64)> = sqlx::query_as("SELECT id, CAST(state AS SIGNED) FROM trees")
        .fetch_all(&mut connection)
        .await
        .unwrap();
    let states = states.into_iter().map(|(id, state)| {
        let id = uuid::Uuid::from_slice(&id).unwrap();
        (id.to_string(), state)
    });
    let states: BTreeMap<String, i64> = states.collect();
    let subscriptions = subscriptions(&world.daemons[0].http()).await.unwrap();
    let book = world.ledger.book();
    let mut wrong = book.violations.clone();
    if letters == 0 || without > 0 {
        wrong.push(format!(
            "{letters} dead tasks have a letter, {without} have none"
        ));
    }
    let mut results: HashMap<Vec<u8>, Vec<&Outcome>> = HashMap::new();
    outcomes.iter().for_each(|outcome| {
        results
            .entry(outcome.task_id.clone())
            .or_default()
            .push(outcome)
    });
    let mut by_key: BTreeMap<Key, String> = BTreeMap::new();
    let mut counted: BTreeMap<(String, i64), i64> = BTreeMap::new();
    let mut of_records: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut steps: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut of_stages: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let none = Seen::default();
    for task in &tasks {
        let id = uuid::Uuid::from_slice(&task.id).unwrap().to_string();
        let key = (
            task.queue.clone(),
            String::from_utf8(task.task_key.clone()).unwrap(),
        );
        *counted
            .entry((task.queue.clone(), task.status))
            .or_default() += 1;
        let outcomes = results.remove(&task.id).unwrap_or_default();
        if executions::QUEUES.contains(&&*task.queue) {
            steps.entry(task.queue.clone()).or_default().insert(id);
            continue;
        }
        if topologies::QUEUES.contains(&&*task.queue) {
            of_stages.entry(task.queue.clone()).or_default().insert(id);
            continue;
        }
        if records::QUEUES.contains(&&*task.queue) {
            if StoredStatus::from_number(task.status).unwrap() != StoredStatus::Completed {
                wrong.push(format!("{id} of {} has status {}", task.queue, task.status));
            }
            of_records.entry(task.queue.clone()).or_default().insert(id);
            continue;
        }
        let seen = book.tasks.get(&id).unwrap_or(&none);
        let what = of_task(task, &outcomes, seen, &book);
        wrong.extend(what.into_iter().map(|what| format!("{id} {key:?}: {what}")));
        if let Some(before) = by_key.insert(key, id.clone()) {
            wrong.push(format!("{id} and {before} have the same key"));
        }
    }
    wrong.extend(
        results
            .keys()
            .map(|id| format!("results of {id:x?}, which is no task")),
    );
    let counts: BTreeMap<_, _> = counts
        .into_iter()
        .map(|(queue, status, count)| ((queue, status), count))
        .collect();
    if counts != counted {
        wrong.push(format!(
            "queue_counts says {counts:?}, there are {counted:?}"
        ));
    }
    let bus = world.plan.bus;
    wrong.extend(
        book.records
            .check(&of_records, &subscriptions, bus, book.losses),
    );
    wrong.extend(book.executions.check(&steps, &ended));
    wrong.extend(book.topologies.check(&of_stages, &states));
    wrong.extend(of_inserts(&book, &by_key));
    wrong.extend(of_children(&book, &by_key));
    for (n, daemon) in world.daemons.iter().enumerate() {
        let log = daemon.log();
        wrong.extend(
            log.lines()
                .filter(|line| line.contains("panicked"))
                .map(|line| format!("process {n}: {line}")),
        );
    }
    drop(book);
    assert!(
        wrong.is_empty(),
        "{} things are wrong:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(40)].join("\n")
    );
}

fn of_task(task: &Task, outcomes: &[&Outcome], seen: &Seen, book: &Book) -> Vec<String> {
    let mut wrong = Vec::new();
    let credited = outcomes
        .iter()
        .filter(|outcome| outcome.surplus == 0)
        .count() as i64;
    if credited != task.completed {
        wrong.push(format!(
            "completed says {}, {credited} results count",
            task.completed
        ));
    }
    match StoredStatus::from_number(task.status).unwrap() {
        StoredStatus::Completed => {
            if credited != task.replicas {
                wrong.push(format!("COMPLETED by {credited} of {}", task.replicas));
            }
            if book.losses == 0 && outcomes.len() as i64 != credited {
                wrong.push(format!(
                    "{} surplus results, although Redis lost nothing",
                    outcomes.len() as i64 - credited
                ));
            }
        }
        StoredStatus::Dead => {
            if task.reason.is_empty() {
                wrong.push("DEAD without a reason".into());
            }
            if task.queue != DOOMED {
                wrong.push(format!("DEAD: {}", task.reason));
            }
        }
        other => wrong.push(format!("is {other:?}")),
    }
    // Each result in SQL must have been sent with a valid token, and its call was answered with OK,
    // or not at all.
    for outcome in outcomes {
        let worker = String::from_utf8_lossy(&outcome.worker);
        let result = String::from_utf8_lossy(&outcome.result);
        let grant = result
            .split_once(' ')
            .filter(|(name, _)| *name == worker)
            .and_then(|(_, token)| seen.grants.get(token));
        match grant {
            Some(grant)
                if grant.worker == worker
                    && grant.sent > 0
                    && (grant.ok.is_some() || !grant.refused) => {}
            _ => wrong.push(format!(
                "the result {result:?} of {worker} is none that it was answered OK"
            )),
        }
    }
    // Each completion that was answered with OK must be in SQL, unless Redis lost it.
    let workers: BTreeSet<_> = outcomes
        .iter()
        .map(|outcome| String::from_utf8_lossy(&outcome.worker))
        .collect();
    let promised = seen
        .grants
        .values()
        .filter(|grant| grant.ok == Some(book.losses));
    let missing = promised.filter(|grant| !workers.contains(grant.worker.as_str()));
    wrong
        .extend(missing.map(|grant| format!("{} was answered OK and has no result", grant.worker)));
    wrong
}

/// Checks that each accepted task exists, with the id that was answered.
fn of_inserts(book: &Book, by_key: &BTreeMap<Key, String>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (key, insert) in &book.inserts {
        match (insert.ids.first(), by_key.get(key)) {
            (Some(told), None) => wrong.push(format!("{key:?} was accepted as {told} and is lost")),
            (Some(told), Some(id)) if told != id => {
                wrong.push(format!("{key:?} was accepted as {told} and is {id}"))
            }
            _ => {}
        }
    }
    wrong
}

/// Checks that each task discovered by a successful completion exists, and that no task exists that
/// was never sent.
fn of_children(book: &Book, by_key: &BTreeMap<Key, String>) -> Vec<String> {
    let grants = || {
        book.tasks
            .iter()
            .flat_map(|(id, seen)| seen.grants.values().map(move |grant| (id, grant)))
    };
    let promised = grants().filter(|(_, grant)| grant.ok == Some(book.losses));
    let lost = promised.flat_map(|(id, grant)| {
        let lost = grant
            .children
            .iter()
            .filter(|child| !by_key.contains_key(child));
        lost.map(move |child| {
            format!(
                "{child:?}, discovered by {} with {id}, is lost",
                grant.worker
            )
        })
    });
    let sent: BTreeSet<&Key> = grants()
        .filter(|(_, grant)| grant.sent > 0)
        .flat_map(|(_, grant)| &grant.children)
        .collect();
    let unknown = by_key
        .keys()
        .filter(|key| !sent.contains(key) && !book.inserts.contains_key(*key));
    lost.chain(unknown.map(|key| format!("{key:?} was sent by nobody")))
        .collect()
}
