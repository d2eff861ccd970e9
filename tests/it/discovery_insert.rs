//! The insert side of discovery over real backends. If only a part of a request can be stored now,
//! the rest is told to come again, never that it is wrong.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use parking_lot::Mutex;
use prost::Message;
use redis::AsyncCommands;
use reqwest::header;
use serde_json::Value;
use taskd::{
    bus::{
        self, Bus, Keep, Log, LogEnd, LogMessage, LogRecord, Logs, Reader, Reading, Record,
        Retention, Topic, TopicName, redis_streams::RedisStreams,
    },
    config::Settings,
    ingress::{self, State},
    model::{
        InsertStatus, LetterPages, NewTask, Offset, QueueName, ShardId, StoredStatus, TaskId,
        validate,
    },
    pipelines::{
        discovery::{Error, Handle},
        publishing,
    },
    redis_pool::Redis,
    runtime::{Clock, Supervisor},
    store::{Settlement, Store, sqlite::SqliteStore},
    wire::pb::{self, report::What},
};
use tokio::sync::watch;

use crate::{
    ingress_http::idle_state,
    support::{
        process::Process,
        redis::{Fsync, RedisServer},
        sqlite::SqliteFile,
        store_contract::Database,
        until,
    },
};

/// Discovery that stores two tasks at once. The queue `full` holds one task.
pub(crate) struct Fixture {
    pub(crate) discovery: Handle,
    pub(crate) state: State,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) supervisor: Supervisor,
    pub(crate) redis: Redis,
    pub(crate) bus: Arc<RedisStreams>,
    pub(crate) clock: Clock,
    pub(crate) database: SqliteFile,
    pub(crate) server: RedisServer,
}

impl Fixture {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut Settings)) -> Self {
        Self::start_on(change, None).await
    }

    /// The database has room for so many pages.
    pub(crate) async fn start_on(change: impl FnOnce(&mut Settings), pages: Option<u32>) -> Self {
        Self::start_by(change, pages, |bus| bus).await
    }

    /// Discovery has a bus that is made of this one.
    pub(crate) async fn start_by(
        change: impl FnOnce(&mut Settings),
        pages: Option<u32>,
        by: impl FnOnce(Arc<RedisStreams>) -> Arc<dyn Bus>,
    ) -> Self {
        let mut state = idle_state(|settings| {
            change(settings);
            settings.discovery.batch_max = 2;
            let mut full = settings.queues.default.clone();
            full.max_unfinished = 1;
            settings
                .queues
                .named
                .insert(QueueName::new("full").unwrap(), full);
        });
        let (server, database) = (
            RedisServer::start(Fsync::EverySecond),
            SqliteFile::create().await,
        );
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        let store: Arc<dyn Store> =
            Arc::new(SqliteStore::open(&database.path(), pages).await.unwrap());
        let bus = Arc::new(RedisStreams::open(redis.clone(), "", 1).await.unwrap());
        let clock = Clock::of_this_machine();
        let supervisor = Supervisor::with_clock(clock.clone());
        let process = Process::with_clock(&redis, &store, by(bus.clone()), clock.clone());
        process.sync_queues(&supervisor).await;
        let discovery = process.discovery(&state.settings, &supervisor);
        Arc::get_mut(&mut state.api)
            .expect("nobody else has it")
            .discovery = Some(discovery.clone());
        state.gates = process.gates.clone();
        Self {
            discovery,
            state,
            store,
            supervisor,
            redis,
            bus,
            clock,
            database,
            server,
        }
    }

    /// Puts a task into `full` and waits until that is known; answers its id.
    pub(crate) async fn fill(&self) -> TaskId {
        let id = self
            .discovery
            .insert(tasks(&["full"]))
            .await
            .unwrap()
            .remove(0)
            .id
            .unwrap();
        until("the queue is full", async || {
            self.discovery.insert(tasks(&["full"])).await.is_err()
        })
        .await;
        id
    }

    pub(crate) async fn unfinished(&self) -> BTreeMap<String, u64> {
        let counts = self.store.counts(None).await.unwrap();
        let unfinished = counts
            .into_iter()
            .filter(|count| count.status == StoredStatus::Unfinished);
        unfinished
            .map(|count| (count.queue.as_str().to_owned(), count.count))
            .collect()
    }

    pub(crate) async fn letters(&self) -> Vec<pb::DeadLetter> {
        let letters: redis::streams::StreamRangeReply = self
            .redis
            .conn()
            .xrange_all("t:{bus}:dead-letters:0")
            .await
            .unwrap();
        let letter = |entry: &redis::streams::StreamId| {
            pb::DeadLetter::decode(&entry.get::<Vec<u8>>("v").unwrap()[..]).unwrap()
        };
        letters.ids.iter().map(letter).collect()
    }

    /// Reports as the forwarder publishes them.
    pub(crate) async fn report(&self, reports: Vec<(TaskId, What)>) {
        let report = |(id, what): (TaskId, What)| pb::Report {
            task_id: id.as_bytes().to_vec().into(),
            what: Some(what),
            at_unix_ms: 1,
        };
        let batch = pb::ReportBatch {
            queue: "q".into(),
            reports: reports.into_iter().map(report).collect(),
            ..Default::default()
        };
        let record = Record {
            partition: 0,
            value: batch.encode_to_vec().into(),
        };
        self.bus
            .publish(Topic::TaskResults, &[record])
            .await
            .unwrap();
    }

    pub(crate) async fn status(&self, id: TaskId) -> StoredStatus {
        self.store.task(id).await.unwrap().unwrap().status
    }

    pub(crate) async fn stop(self) {
        self.supervisor.stop();
        self.supervisor.wait().await;
    }

    /// Starts a server; answers its URL.
    async fn serve(&self) -> String {
        let listener = ingress::bind(([127, 0, 0, 1], 0).into(), "http")
            .await
            .unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(ingress::http::serve(listener, self.state.clone()));
        url
    }

    /// The answer of `/readyz`.
    async fn readiness(&self) -> (u16, Value) {
        let url = format!("{}/readyz", self.serve().await);
        let answer = crate::support::http_client().get(url).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap())
    }

    /// Sends a body to a server of its own.
    async fn post(&self, content_type: &str, body: String) -> reqwest::Response {
        crate::support::http_client()
            .post(format!("{}/v1/tasks", self.serve().await))
            .header(header::CONTENT_TYPE, content_type)
            .body(body)
            .send()
            .await
            .unwrap()
    }
}

/// A task for each queue named; `""` is none, which is wrong.
pub(crate) fn tasks(queues: &[&str]) -> Vec<NewTask> {
    let task = |(number, queue): (usize, &&str)| NewTask {
        queue: (*queue).into(),
        key: number.to_string().into(),
        ..Default::default()
    };
    queues.iter().enumerate().map(task).collect()
}

fn lines(queues: &[&str]) -> Vec<String> {
    let line =
        |(number, queue): (usize, &&str)| format!(r#"{{"queue":"{queue}","key":"{number}"}}"#);
    queues.iter().enumerate().map(line).collect()
}

#[tokio::test]
async fn what_comes_behind_a_part_that_was_stored_is_told_to_come_again() {
    use InsertStatus::{Created, Rejected, TryLater};
    let fixture = Fixture::start().await;
    fixture.fill().await;
    let answers = fixture
        .discovery
        .insert(tasks(&["q", "", "full", "", "q"]))
        .await
        .unwrap();
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [Created, Rejected, TryLater, TryLater, TryLater]);
    assert!(answers[2].error.contains("max_unfinished"), "{answers:?}");
    assert_eq!(
        fixture.unfinished().await,
        [("full".to_owned(), 1), ("q".to_owned(), 1)].into()
    );
    fixture.stop().await;
}

#[tokio::test]
async fn a_request_of_which_nothing_was_stored_fails_as_a_whole() {
    let fixture = Fixture::start().await;
    fixture.fill().await;
    let refused = fixture.discovery.insert(tasks(&["", "", "full"])).await;
    assert!(matches!(refused, Err(Error::Busy(_))), "{refused:?}");
    fixture.stop().await;
}

#[tokio::test]
async fn in_json_the_rest_is_answered_try_later() {
    let fixture = Fixture::start().await;
    fixture.fill().await;
    let body = format!("[{}]", lines(&["q", "q", "full"]).join(","));
    let answer: Value = fixture
        .post("application/json", body)
        .await
        .json()
        .await
        .unwrap();
    let statuses: Vec<_> = answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| &result["status"])
        .collect();
    assert_eq!(statuses, ["CREATED", "CREATED", "TRY_LATER"], "{answer}");
    fixture.stop().await;
}

#[tokio::test]
async fn lines_are_stored_when_there_is_room_and_only_what_was_missing() {
    let fixture = Fixture::start().await;
    let id = fixture.fill().await;
    let settle_when_the_others_are_stored = async {
        until("the others are stored", async || {
            fixture.unfinished().await.get("q") == Some(&2)
        })
        .await;
        let (reason, at_unix_ms) = (String::new(), 0);
        fixture
            .store
            .settle(&[Settlement::Died {
                id,
                reason,
                attempts: 1,
                history: vec![],
                epoch: None,
                at_unix_ms,
            }])
            .await
            .unwrap();
    };
    let body = lines(&["q", "q", "", "full"])
        .join("\n")
        .replace("\"3\"", "\"another\"");
    let answers = async {
        fixture
            .post("application/x-ndjson", body)
            .await
            .text()
            .await
            .unwrap()
    };
    let both = async { tokio::join!(answers, settle_when_the_others_are_stored) };
    let (answers, ()) = tokio::time::timeout(Duration::from_secs(60), both)
        .await
        .expect("all lines are answered");
    let statuses: Vec<Value> = answers
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["status"].clone())
        .collect();
    // As if they had been stored at once: a line that is sent again would be a duplicate.
    assert_eq!(
        statuses,
        ["CREATED", "CREATED", "REJECTED", "CREATED"],
        "{answers}"
    );
    fixture.stop().await;
}

#[tokio::test]
async fn a_caller_whose_task_sql_refuses_fails_alone() {
    // One waits for the other: two make a batch.
    let fixture =
        Fixture::start_with(|settings| settings.discovery.batch_delay = Duration::from_secs(60))
            .await;
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON tasks WHEN NEW.queue = 'bad' \
                  BEGIN SELECT RAISE(ABORT, 'no such queue'); END";
    fixture.database.execute(refuse).await;
    let insert = |queue| fixture.discovery.insert(tasks(&[queue]));
    let (good, bad) = tokio::join!(insert("q"), insert("bad"));
    assert_eq!(good.unwrap()[0].status, InsertStatus::Created);
    assert!(bad.unwrap_err().to_string().contains("no such queue"));
    fixture.stop().await;
}

fn keep_refused(settings: &mut Settings) {
    settings.queues.default.keep_refused = true;
}

#[tokio::test]
async fn a_refused_task_that_sql_has_as_a_letter_is_rejected_whatever_its_topic_says() {
    let fixture = Fixture::start_with(keep_refused).await;
    let () = redis::cmd("SET")
        .arg("t:{bus}:dead-letters:0")
        .arg("x")
        .query_async(&mut fixture.redis.conn())
        .await
        .unwrap();
    let answers = fixture.discovery.insert(tasks(&["", "q"])).await.unwrap();
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(
        statuses,
        [InsertStatus::Rejected, InsertStatus::Created],
        "{answers:?}"
    );
    let pages = LetterPages {
        limit: 10,
        ..LetterPages::default()
    };
    assert_eq!(
        fixture.store.letters(&pages).await.unwrap().letters.len(),
        1
    );
    fixture.stop().await;
}

#[tokio::test]
async fn tasks_beside_a_refused_one_do_not_wait_for_the_topic_of_letters() {
    let silent = |bus| Picky::silent(bus, Log::DEAD_LETTERS.name) as Arc<dyn Bus>;
    let fixture = Fixture::start_by(keep_refused, None, silent).await;
    let is_stored = until("the good one is stored", async || {
        fixture.unfinished().await.get("q") == Some(&1)
    });
    let mut inserting = Box::pin(fixture.discovery.insert(tasks(&["", "q"])));
    tokio::select! {
        answers = &mut inserting => panic!("the topic is silent: {answers:?}"),
        () = is_stored => {}
    }
    // SQL has the letter: nobody waits for ever.
    let statuses: Vec<_> = inserting
        .await
        .unwrap()
        .iter()
        .map(|answer| answer.status)
        .collect();
    assert_eq!(statuses, [InsertStatus::Rejected, InsertStatus::Created]);
    fixture.stop().await;
}

/// A bus that takes no record with a mark in it, as Kafka does with one that is too large. It trims
/// no `pipeline`.
#[derive(Clone)]
pub(crate) struct Picky {
    bus: Arc<RedisStreams>,
    /// A topic for whose records it does not answer.
    silent: watch::Sender<Option<TopicName>>,
    /// Topics that it was to trim.
    trimmed: Arc<Mutex<HashSet<TopicName>>>,
    /// Calls that it refused.
    pub(crate) refused: Arc<AtomicUsize>,
}

impl Picky {
    pub(crate) fn new(bus: Arc<RedisStreams>) -> Arc<Self> {
        Self::with(bus, None)
    }

    pub(crate) fn silent(bus: Arc<RedisStreams>, topic: impl Into<TopicName>) -> Arc<Self> {
        Self::with(bus, Some(topic.into()))
    }

    fn with(bus: Arc<RedisStreams>, silent: Option<TopicName>) -> Arc<Self> {
        let (silent, trimmed) = (watch::Sender::new(silent), Arc::default());
        Arc::new(Self {
            bus,
            silent,
            trimmed,
            refused: Arc::default(),
        })
    }
}

pub(crate) const TOO_LARGE: &[u8] = b"<a large one>";

impl Picky {
    async fn judge<'a>(
        &self,
        topic: TopicName,
        mut values: impl Iterator<Item = &'a [u8]>,
    ) -> bus::Result<()> {
        let is_large = |value: &[u8]| value.windows(TOO_LARGE.len()).any(|part| part == TOO_LARGE);
        if values.any(is_large) {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return Err(bus::Error::TooLarge {
                topic,
                cause: "too large".into(),
            });
        }
        self.silent
            .subscribe()
            .wait_for(|silent| silent.as_ref() != Some(&topic))
            .await
            .unwrap();
        Ok(())
    }
}

#[async_trait]
impl Logs for Picky {
    async fn exists(&self, log: &Log) -> bus::Result<bool> {
        self.bus.logs().exists(log).await
    }

    async fn make(&self, log: &Log) -> bus::Result<u32> {
        self.bus.logs().make(log).await
    }

    async fn delete(&self, log: &Log) -> bus::Result<()> {
        self.bus.logs().delete(log).await
    }

    async fn append(&self, log: &Log, records: &[LogRecord]) -> bus::Result<Vec<Offset>> {
        let values = records.iter().map(|record| &record.value[..]);
        self.judge(log.name.clone(), values).await?;
        self.bus.logs().append(log, records).await
    }

    async fn read(
        &self,
        log: &Log,
        partition: u32,
        after: Option<Offset>,
        max: usize,
    ) -> bus::Result<Vec<LogMessage>> {
        self.bus.logs().read(log, partition, after, max).await
    }

    async fn first(&self, log: &Log) -> bus::Result<Vec<Option<Offset>>> {
        self.bus.logs().first(log).await
    }

    async fn ends(&self, log: &Log) -> bus::Result<Vec<Option<Offset>>> {
        self.bus.logs().ends(log).await
    }

    async fn counted_ends(&self, log: &Log) -> bus::Result<Vec<LogEnd>> {
        self.bus.logs().counted_ends(log).await
    }

    async fn at_time(&self, log: &Log, unix_ms: i64) -> bus::Result<Vec<Option<Offset>>> {
        self.bus.logs().at_time(log, unix_ms).await
    }

    async fn trim(&self, log: &Log, keep: Retention) -> bus::Result<u64> {
        self.trimmed.lock().insert(log.name.clone());
        self.bus.logs().trim(log, keep).await
    }
}

#[async_trait]
impl Bus for Picky {
    fn generation(&self) -> &str {
        self.bus.generation()
    }

    fn partitions(&self, topic: Topic) -> u32 {
        self.bus.partitions(topic)
    }

    fn logs(&self) -> Arc<dyn Logs> {
        Arc::new(self.clone())
    }

    async fn publish(&self, topic: Topic, records: &[Record]) -> bus::Result<Vec<Offset>> {
        let values = records.iter().map(|record| &record.value[..]);
        self.judge(topic.into(), values).await?;
        self.bus.publish(topic, records).await
    }

    async fn subscribe(&self, topic: Topic, reading: Reading) -> bus::Result<Box<dyn Reader>> {
        self.bus.subscribe(topic, reading).await
    }

    async fn ends(&self, topic: Topic) -> bus::Result<Vec<Option<Offset>>> {
        self.bus.ends(topic).await
    }

    async fn committed(&self, topic: Topic) -> bus::Result<Vec<Option<Offset>>> {
        self.bus.committed(topic).await
    }

    async fn backlog(&self, topic: Topic) -> bus::Result<u64> {
        self.bus.backlog(topic).await
    }

    async fn trim(&self, topic: Topic, keep: Keep) -> bus::Result<u64> {
        self.trimmed.lock().insert(topic.into());
        if topic == Topic::Pipeline {
            return Err(bus::Error::Trim {
                topic: topic.into(),
                cause: "its leader is away".into(),
            });
        }
        self.bus.trim(topic, keep).await
    }

    async fn raise_partitions(&self, topic: Topic, count: u32) -> bus::Result<()> {
        self.bus.raise_partitions(topic, count).await
    }

    async fn check_partitions(&self) -> bus::Result<()> {
        self.bus.check_partitions().await
    }

    async fn close(&self) {
        self.bus.close().await;
    }
}

#[tokio::test]
async fn the_watchdog_publishes_what_stands_around_a_row_that_cannot_be() {
    let fixture = Fixture::start().await;
    let later = |key: &'static [u8], payload: &'static [u8]| {
        let delay = Some(Duration::from_secs(24 * 3600));
        let headers = [("h".to_owned(), "v".to_owned())].into();
        NewTask {
            queue: "q".into(),
            key: key.into(),
            payload: payload.into(),
            headers,
            delay,
            ..Default::default()
        }
    };
    let tasks = vec![later(b"1", b""), later(b"2", TOO_LARGE), later(b"3", b"")];
    let stored = fixture.discovery.insert(tasks).await.unwrap();
    let id: TaskId = stored[1].id.unwrap();
    fixture
        .database
        .execute("UPDATE outbox SET due_ms = 0")
        .await;

    let bus = Picky::new(fixture.bus.clone());
    let process = Process::new(&fixture.redis, &fixture.store, bus);
    process.watchdog(&fixture.state.settings, &fixture.supervisor);
    until("nothing is left", async || {
        fixture
            .store
            .due(i64::MAX, 10, &HashSet::new())
            .await
            .unwrap()
            .is_empty()
    })
    .await;
    let dead = fixture.store.task(id).await.unwrap().unwrap();
    assert_eq!((dead.status, dead.unpublished), (StoredStatus::Dead, false));
    assert!(dead.reason.contains("too large"), "{}", dead.reason);
    // The letter names what it cannot carry.
    let letters = fixture.letters().await;
    assert_eq!(letters.len(), 1);
    let (letter, task) = (&letters[0], letters[0].task.as_ref().unwrap());
    assert_eq!(
        (&letter.task_id[..], &task.key[..], &task.payload[..]),
        (&id.as_bytes()[..], &b"2"[..], &b""[..])
    );
    assert_eq!(task.headers["h"], "v");
    assert!(
        letter
            .reason
            .ends_with("(without its payload: too large for this topic)"),
        "{}",
        letter.reason
    );
    assert_eq!(
        fixture.store.unfinished().await.unwrap(),
        [(QueueName::new("q").unwrap(), 2)]
    );
    fixture.stop().await;
}

#[tokio::test]
async fn rows_that_were_stored_when_the_clock_was_ahead_are_published_soon() {
    let fixture = Fixture::start().await;
    let hour = 3_600_000;
    fixture
        .clock
        .follow(fixture.clock.now_unix_ms() + hour, Instant::now())
        .unwrap();
    // Stored, and killed before it was published.
    let clock = fixture.clock.clone();
    let process = Process::with_clock(&fixture.redis, &fixture.store, fixture.bus.clone(), clock);
    let rows: Vec<_> = tasks(&["q"; 5])
        .into_iter()
        .map(|task| {
            let (settings, now) = (&fixture.state.settings, fixture.clock.now_unix_ms());
            let row =
                validate::task_row(task, TaskId::at(now, 0), &settings.task_rules("q"), 1, now)
                    .unwrap();
            publishing::new_row(row, &process.gates, settings)
        })
        .collect();
    fixture.store.insert(&rows).await.unwrap();

    process.watchdog(&fixture.state.settings, &fixture.supervisor);
    let leads = async || watched(&fixture.supervisor).contains(&"watchdog/outbox".to_owned());
    until("the watchdog looks", leads).await;
    fixture
        .clock
        .follow(fixture.clock.now_unix_ms() - hour, Instant::now())
        .unwrap();
    let waiting = async || {
        fixture
            .store
            .due(i64::MAX, 10, &HashSet::new())
            .await
            .unwrap()
            .len()
    };
    until("all are published", async || waiting().await == 0).await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_topic_that_cannot_be_trimmed_holds_up_no_other() {
    let fixture = Fixture::start().await;
    let bus = Picky::new(fixture.bus.clone());
    let process = Process::new(&fixture.redis, &fixture.store, bus.clone());
    process.watchdog(&fixture.state.settings, &fixture.supervisor);
    until("all are trimmed", async || {
        bus.trimmed.lock().len() == Topic::ALL.len() + Log::REPORTS.len()
    })
    .await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_task_without_a_key_is_known_by_its_id() {
    let fixture = Fixture::start_with(keep_refused).await;
    let now = fixture.clock.now_unix_ms();
    let task = |part: u8| NewTask {
        id: Some(TaskId::derived_from(&[&[part]], now)),
        queue: "q".into(),
        payload: "the same".into(),
        ..Default::default()
    };
    let insert = async |tasks: Vec<NewTask>| fixture.discovery.insert(tasks).await.unwrap();
    let answers = insert((0..6).map(task).collect()).await;
    for (part, answer) in (0..).zip(&answers) {
        assert_eq!(answer.status, InsertStatus::Created);
        assert_eq!(answer.id, task(part).id);
    }
    // A second insert has the answers of the first one, and stores nothing.
    assert_eq!(insert((0..6).map(task).collect()).await, answers);
    // A task with a key comes last, so that the filter has what came before it by then.
    let with_key = NewTask {
        id: None,
        ..task(0)
    };
    assert_eq!(
        insert(vec![with_key]).await[0].status,
        InsertStatus::Created
    );
    let marked = async || {
        let keys: usize = fixture.redis.conn().hlen("t:{q}:seen").await.unwrap();
        keys == 2
    };
    until("the filter has its era and one key", marked).await;
    let unfinished = fixture.store.unfinished().await.unwrap();
    assert_eq!(unfinished, [(QueueName::new("q").unwrap(), 7)]);
    until("each is published once", async || {
        fixture
            .redis
            .conn()
            .xlen::<_, usize>("t:{bus}:pipeline:0")
            .await
            .unwrap()
            == 7
    })
    .await;

    // A refused one keeps its id in its letter, and two of the same payload have two letters.
    let refused = [8, 9].map(|part| NewTask {
        replicas: Some(1_000_000),
        ..task(part)
    });
    for _ in 0..2 {
        for answer in insert(refused.to_vec()).await {
            assert_eq!(answer.status, InsertStatus::Rejected);
        }
    }
    let pages = LetterPages {
        limit: 10,
        ..Default::default()
    };
    let letters = fixture.store.letters(&pages).await.unwrap().letters;
    let mut ids = HashSet::new();
    for letter in &letters {
        let whole = fixture.store.letter(letter.id).await.unwrap().unwrap();
        ids.extend(whole.letter.task.unwrap().id);
    }
    assert_eq!(letters.len(), 2);
    assert_eq!(ids, HashSet::from(refused.map(|task| task.id.unwrap())));
    fixture.stop().await;
}

#[tokio::test]
async fn keys_that_a_database_set_back_does_not_have_are_new_again() {
    let fixture = Fixture::start().await;
    let insert = async |key: &'static str| {
        let task = NewTask {
            queue: "q".into(),
            key: key.into(),
            ..Default::default()
        };
        fixture
            .discovery
            .insert(vec![task])
            .await
            .unwrap()
            .remove(0)
    };
    assert_eq!(insert("before").await.status, InsertStatus::Created);
    let lost = insert("lost").await;
    let marked = async || {
        fixture
            .redis
            .conn()
            .hlen::<_, usize>("t:{q}:seen")
            .await
            .unwrap()
            == 3
    };
    until("the filter knows both", marked).await;
    assert_eq!(insert("lost").await.id, lost.id);
    fixture
        .database
        .execute("DELETE FROM tasks WHERE task_key = CAST('lost' AS BLOB)")
        .await;
    until("the key is new again", async || {
        insert("lost").await.status == InsertStatus::Created
    })
    .await;
    let again = insert("lost").await;
    assert_ne!(again.id, lost.id);
    assert_eq!(
        (again.status, insert("before").await.status),
        (InsertStatus::Duplicate, InsertStatus::Duplicate)
    );
    fixture.stop().await;
}

#[tokio::test]
async fn a_batch_that_waited_for_the_bus_for_long_is_not_marked() {
    let mut silent = None;
    let by = |bus| silent.insert(Picky::silent(bus, Topic::Pipeline)).clone() as Arc<dyn Bus>;
    let fixture = Fixture::start_by(|_| {}, None, by).await;
    let insert = async |key: &'static str| {
        let task = NewTask {
            queue: "q".into(),
            key: key.into(),
            ..Default::default()
        };
        fixture
            .discovery
            .insert(vec![task])
            .await
            .unwrap()
            .remove(0)
            .id
            .unwrap()
    };
    let long_ago = insert("long ago").await;
    fixture.clock.advance(Duration::from_secs(4));
    // More than are published together, so that the last does not share the wait of the first.
    for key in ["1", "2", "3", "4", "5", "6", "7", "8"] {
        insert(key).await;
    }
    let last = insert("9").await;
    silent.unwrap().silent.send_replace(None);
    let known = async || {
        fixture
            .redis
            .conn()
            .hvals::<_, Vec<Vec<u8>>>("t:{q}:seen")
            .await
            .unwrap()
    };
    until("the filter knows the last", async || {
        known().await.iter().any(|id| id == last.as_bytes())
    })
    .await;
    assert!(!known().await.iter().any(|id| id == long_ago.as_bytes()));
    fixture.stop().await;
}

#[tokio::test]
async fn the_filter_has_tasks_that_are_due_later_and_learns_again_what_it_forgot() {
    let fixture = Fixture::start().await;
    let shard = ShardId {
        queue: QueueName::new("q").unwrap(),
        number: 0,
    };
    fixture.store.open_shards(&[shard]).await.unwrap();
    let insert = async |delay: Option<Duration>| {
        let task = |task| NewTask { delay, ..task };
        fixture
            .discovery
            .insert(tasks(&["q"; 7]).into_iter().map(task).collect())
            .await
            .unwrap()
    };
    let stored = insert(Some(Duration::from_secs(3600))).await;
    let ids: Vec<TaskId> = stored.iter().map(|one| one.id.unwrap()).collect();
    let known = async || {
        let known: HashMap<Vec<u8>, Vec<u8>> =
            fixture.redis.conn().hgetall("t:{q}:seen").await.unwrap();
        ids.iter()
            .map(|id| known.values().any(|known| known == id.as_bytes()))
            .collect::<Vec<_>>()
    };
    until("the filter has tasks that are due in an hour", async || {
        known().await == [true; 7]
    })
    .await;

    // SQL says how those have ended.
    let died = |id| Settlement::Died {
        id,
        reason: String::new(),
        attempts: 1,
        history: Vec::new(),
        epoch: None,
        at_unix_ms: 1,
    };
    fixture.store.settle(&[died(ids[6])]).await.unwrap();
    fixture
        .redis
        .conn()
        .del::<_, ()>("t:{q}:seen")
        .await
        .unwrap();
    let again = async || {
        let answers = insert(None).await;
        assert!(
            answers
                .iter()
                .zip(&ids)
                .all(|(answer, id)| answer.id == Some(*id)),
            "{answers:?}"
        );
        assert!(answers[6].error.contains("DEAD"), "{answers:?}");
        known().await
    };
    until("it has learnt them again", async || {
        again().await[..6] == [true; 6]
    })
    .await;
    assert_eq!(again().await, [true, true, true, true, true, true, false]);
    fixture.stop().await;
}

#[tokio::test]
async fn a_bus_that_lost_everything_is_given_up_and_the_tasks_stay() {
    let fixture = Fixture::start().await;
    redis::cmd("FLUSHALL")
        .query_async::<()>(&mut fixture.redis.conn())
        .await
        .unwrap();
    let answers = fixture.discovery.insert(tasks(&["q"])).await.unwrap();
    assert_eq!(answers[0].status, InsertStatus::Created);
    let given_up = tokio::time::timeout(Duration::from_secs(60), fixture.supervisor.given_up());
    let error = given_up.await.expect("somebody notices").to_string();
    assert!(error.contains("the bus has lost its records"), "{error}");
    assert_eq!(
        fixture
            .store
            .due(i64::MAX, 10, &HashSet::new())
            .await
            .unwrap()
            .len(),
        1,
        "what was not published stays in the outbox"
    );
    fixture.stop().await;
}

#[tokio::test]
async fn every_loop_is_watched() {
    let fixture = Fixture::start().await;
    let expected = [
        "feeds",
        "filter",
        "insert",
        "mark-published",
        "marks",
        "publish",
        "results",
        "sources",
        "turned-away",
    ];
    let expected = expected.map(|name| format!("discovery/{name}"));
    let expected: Vec<String> = expected.into_iter().chain(["queues".to_owned()]).collect();
    assert_eq!(watched(&fixture.supervisor), expected);
    fixture.stop().await;
}

/// The loops that show progress.
pub(crate) fn watched(supervisor: &Supervisor) -> Vec<String> {
    supervisor
        .progress()
        .stalled(Duration::ZERO)
        .into_iter()
        .map(|(name, _)| name)
        .collect()
}

#[tokio::test]
async fn a_database_without_room_is_told_and_what_was_answered_is_kept() {
    let fixture = Fixture::start_on(|_| {}, Some(100)).await;
    let mut created = 0;
    let insert = async |key: u64| {
        let task = serde_json::json!({"queue": "q", "key": key.to_string(), "payload": "x".repeat(10_000)});
        fixture.post("application/json", task.to_string()).await
    };
    assert!(fixture.readiness().await.1["database"].is_null());
    let refused = loop {
        let response = insert(created).await;
        if response.status() != 200 {
            break response;
        }
        created += 1;
        assert!(created < 100, "more was stored than there is room for");
    };
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key(header::RETRY_AFTER));
    let problem: Value = refused.json().await.unwrap();
    assert!(
        problem["detail"].as_str().unwrap().contains("full"),
        "{problem}"
    );
    assert_eq!(fixture.unfinished().await["q"], created);

    // A duplicate needs no room.
    assert_eq!(insert(0).await.status(), 200);
    let (status, answer) = fixture.readiness().await;
    assert_eq!(status, 200, "{answer}");
    assert!(
        answer["database"].as_str().unwrap().contains("full"),
        "{answer}"
    );
    fixture
        .database
        .execute("UPDATE tasks SET payload = x''")
        .await;
    assert_eq!(insert(created).await.status(), 200);
    assert!(fixture.readiness().await.1["database"].is_null());
    fixture.stop().await;
}
