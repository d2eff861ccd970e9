//! One inserter and twenty workers, some of which lie, crash, stall, reject or repeat themselves.
//! Half of them hold streams, the other half poll. A publisher, a starter of executions and a
//! beginner of trees, and their workers (`records`, `executions`, `topologies`), are beside them.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use reqwest::Method;
use serde_json::{Value, json};
use taskd::wire::pb;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    dice::Dice,
    executions,
    ledger::{Key, Lease, Ledger, Sent, now_ms},
    pushed::{self, Pushed},
    records,
    support::session::{opening, seconds},
    topologies,
};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Honest,
    /// Takes tasks and disappears. On a stream it either disconnects, or stays and ignores them.
    Crashes,
    /// Reports only after its lease has expired.
    Stalls,
    /// Completes with tokens of others, with made-up ones, and under other names. Resumes the
    /// sessions of others.
    Lies,
    /// Sends each completion several times, both immediately and much later, to all processes.
    Repeats,
    Rejects,
    Extends,
}

const KINDS: [Kind; 20] = {
    use Kind::*;
    [
        Honest, Honest, Honest, Honest, Honest, Honest, Honest, Honest, Crashes, Crashes, Stalls,
        Stalls, Lies, Lies, Repeats, Repeats, Repeats, Rejects, Rejects, Extends,
    ]
};

/// The queues with their NUM. Many tasks in `doomed` are rejected for good; those in `limited` have
/// limit keys.
pub(crate) const QUEUES: [(&str, usize); 5] = [
    ("one", 1),
    ("two", 2),
    ("three", 3),
    ("doomed", 1),
    (LIMITED, 1),
];
pub(crate) const DOOMED: &str = "doomed";
pub(crate) const LIMITED: &str = "limited";
/// The limit keys. Inserts bring about as much as their limits let through.
const LIMIT_KEYS: usize = 6;
/// The timeout of a call, like that of a real caller, which then tries another process.
pub(crate) const PATIENCE: Duration = Duration::from_secs(4);

pub(crate) struct Crowd {
    client: reqwest::Client,
    /// The HTTP addresses of the processes.
    urls: Vec<String>,
    /// The ports on which the processes accept streams.
    ports: Vec<u16>,
    pub(crate) seed: u64,
    pub(crate) ledger: Arc<Ledger>,
    /// The ids of sessions that workers have had.
    sessions: Mutex<Vec<String>>,
    /// From now on all workers are honest, so that the work gets done.
    honest: AtomicBool,
    pub(crate) inserting: CancellationToken,
    pub(crate) stop: CancellationToken,
}

/// The running crowd. Dropping it stops it.
pub(crate) struct Running {
    pub(crate) crowd: Arc<Crowd>,
    workers: JoinSet<()>,
    inserter: JoinHandle<()>,
    publisher: JoinHandle<()>,
    starter: JoinHandle<()>,
    surfer: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start(urls: Vec<String>, ports: Vec<u16>, seed: u64) -> Self {
        let client = reqwest::Client::builder()
            .timeout(PATIENCE)
            .build()
            .unwrap();
        let crowd = Arc::new(Crowd {
            client,
            urls,
            ports,
            seed,
            ledger: Arc::default(),
            sessions: Mutex::default(),
            honest: AtomicBool::new(false),
            inserting: CancellationToken::new(),
            stop: CancellationToken::new(),
        });
        let mut workers = JoinSet::new();
        for (n, kind) in KINDS.into_iter().enumerate() {
            workers.spawn(Worker::new(Arc::clone(&crowd), n, kind).run());
        }
        for n in 0..records::WORKERS {
            workers.spawn(records::work(Arc::clone(&crowd), n));
        }
        let inserter = tokio::spawn(insert(Arc::clone(&crowd)));
        for n in 0..executions::WORKERS {
            workers.spawn(executions::work(Arc::clone(&crowd), n));
        }
        let publisher = tokio::spawn(records::publish(Arc::clone(&crowd)));
        for n in 0..topologies::WORKERS {
            workers.spawn(topologies::work(Arc::clone(&crowd), n));
        }
        let starter = tokio::spawn(executions::start(Arc::clone(&crowd)));
        let surfer = tokio::spawn(topologies::begin(Arc::clone(&crowd)));
        Self {
            crowd,
            workers,
            inserter,
            publisher,
            starter,
            surfer,
        }
    }

    /// Stops inserting, and makes all workers honest.
    pub(crate) async fn calm_down(&mut self) {
        self.crowd.inserting.cancel();
        self.crowd.honest.store(true, Ordering::Relaxed);
        (&mut self.inserter).await.unwrap();
        (&mut self.publisher).await.unwrap();
        (&mut self.starter).await.unwrap();
        (&mut self.surfer).await.unwrap();
    }

    /// Stops the workers. Call [`Self::calm_down`] first.
    pub(crate) async fn stop(mut self) {
        self.crowd.stop.cancel();
        while let Some(ended) = self.workers.join_next().await {
            ended.unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.crowd.inserting.cancel();
    }
}

impl Crowd {
    pub(crate) fn is_honest(&self) -> bool {
        self.honest.load(Ordering::Relaxed)
    }

    /// Calls one process, or the next if it cannot be reached. Returns `None` unless one answers
    /// successfully.
    pub(crate) async fn call(&self, dice: &mut Dice, path: &str, body: &Value) -> Option<Value> {
        self.send(dice, Method::POST, path, body).await
    }

    /// The same with another method.
    pub(crate) async fn send(
        &self,
        dice: &mut Dice,
        method: Method,
        path: &str,
        body: &Value,
    ) -> Option<Value> {
        let first = dice.below(self.urls.len());
        for n in 0..self.urls.len() {
            let url = format!("{}{path}", self.urls[(first + n) % self.urls.len()]);
            // A call without an answer may have been executed, so it is repeated only on purpose.
            match self
                .client
                .request(method.clone(), &url)
                .json(body)
                .send()
                .await
            {
                Err(error) if error.is_connect() => {}
                Err(_) => break,
                Ok(answer) if answer.status().is_success() => return answer.json().await.ok(),
                Ok(_) => break,
            }
        }
        // Pause, so that the caller does not retry at once.
        tokio::time::sleep(Duration::from_millis(50)).await;
        None
    }

    /// Inserts tasks; returns the keys that taskd asks to send later, or `None` without an answer.
    async fn insert(&self, dice: &mut Dice, keys: &[Key]) -> Option<Vec<Key>> {
        let delays: Vec<u64> = keys.iter().map(|_| delay(dice)).collect();
        let task = |(key, delay): (&Key, &u64)| {
            let delay = (*delay > 0).then(|| format!("{delay}ms"));
            let limit_key = limit_key(key).unwrap_or_default();
            let (queue, key) = key;
            json!({"queue": queue, "key": key, "payload": key, "delay": delay, "limit_key": limit_key})
        };
        let tasks: Vec<_> = keys.iter().zip(&delays).map(task).collect();
        self.ledger.inserting(keys);
        let sent_ms = now_ms();
        let answer = self.call(dice, "/v1/tasks", &json!(tasks)).await?;
        let mut later = Vec::new();
        for ((key, delay), result) in keys
            .iter()
            .zip(delays)
            .zip(answer["results"].as_array().unwrap())
        {
            let (status, id) = (
                result["status"].as_str().unwrap(),
                result["id"].as_str().unwrap_or_default(),
            );
            self.ledger.inserted(key, status, id);
            match status {
                "CREATED" if delay > 0 => self.ledger.waits(id, sent_ms + u128::from(delay)),
                "TRY_LATER" => later.push(key.clone()),
                _ => {}
            }
        }
        Some(later)
    }
}

/// Inserts batches of new and known keys; some of those without an answer are retried. At the end
/// all of them are: a call whose caller has given up may still store its tasks at any later time,
/// unless their keys are stored already.
async fn insert(crowd: Arc<Crowd>) {
    let mut dice = Dice::new(crowd.seed, "inserter");
    let (mut count, mut unanswered) = (0, Vec::new());
    while !crowd.inserting.is_cancelled() {
        let mut keys: Vec<Key> = std::mem::take(&mut unanswered);
        for _ in 0..1 + dice.below(12) {
            let n = if dice.chance(15) {
                dice.below(count + 1)
            } else {
                count
            };
            count = count.max(n + 1);
            // The queue depends only on the number, so a known key is a duplicate.
            let queue = match n % 16 {
                5 => LIMITED,
                _ => QUEUES[n * 7 / 3 % (QUEUES.len() - 1)].0,
            };
            keys.push((queue.to_owned(), format!("k{n}")));
        }
        unanswered = match crowd.insert(&mut dice, &keys).await {
            Some(later) => later,
            None if dice.chance(70) => keys,
            None => Vec::new(),
        };
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let unanswered = crowd.ledger.unanswered();
        if unanswered.is_empty() {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "nobody answers inserts of {unanswered:?}"
        );
        for keys in unanswered.chunks(100) {
            crowd.insert(&mut dice, keys).await;
        }
    }
}

/// What a task shares its limits with, if its queue has limits.
pub(crate) fn limit_key((queue, key): &Key) -> Option<String> {
    let number: usize = key.strip_prefix('k')?.parse().ok()?;
    (queue == LIMITED).then(|| format!("host{}", number / 16 % LIMIT_KEYS))
}

/// Most tasks have no delay; others have a short one, or one longer than the restart of a process.
fn delay(dice: &mut Dice) -> u64 {
    match dice.chance(12) {
        true => 300 + dice.below(3000) as u64,
        false => 0,
    }
}

/// The answer to one item of a report: its status, and the new deadline of its lease.
type Answer = (String, Option<u128>);

struct Worker {
    crowd: Arc<Crowd>,
    name: String,
    kind: Kind,
    /// True if it uses a stream instead of polling.
    is_pushed: bool,
    stream: Option<Pushed>,
    /// The session of its last stream.
    session: String,
    dice: Dice,
    /// Tasks that arrived with the answers to reports made by calls.
    next: Vec<Lease>,
    /// Leases to be reported at this time, which is too late.
    late: VecDeque<(Instant, Vec<Lease>)>,
    /// Leases that were completed long ago.
    old: Vec<Lease>,
    children: usize,
}

impl Worker {
    fn new(crowd: Arc<Crowd>, n: usize, kind: Kind) -> Self {
        let name = format!("w{n}-{kind:?}").to_lowercase();
        let dice = Dice::new(crowd.seed, &name);
        // Neighbours in KINDS are mostly of the same kind, so nearly every kind has both.
        let (is_pushed, stream, session) = (n % 2 == 1, None, String::new());
        let (next, late, old, children) = (Vec::new(), VecDeque::new(), Vec::new(), 0);
        Self {
            crowd,
            name,
            kind,
            is_pushed,
            stream,
            session,
            dice,
            next,
            late,
            old,
            children,
        }
    }

    async fn run(mut self) {
        while !self.crowd.stop.is_cancelled() {
            let leases = self.get().await;
            if !leases.is_empty() {
                // Simulates the work.
                let work = Duration::from_millis(self.dice.below(30) as u64);
                tokio::time::sleep(work).await;
                self.deal_with(leases).await;
            }
            while self
                .late
                .front()
                .is_some_and(|(at, _)| *at <= Instant::now())
            {
                let (_, leases) = self.late.pop_front().unwrap();
                self.complete(&leases).await;
            }
        }
        if let Some(stream) = self.stream.take() {
            stream.close().await;
        }
    }

    fn kind(&self) -> Kind {
        if self.crowd.is_honest() {
            Kind::Honest
        } else {
            self.kind
        }
    }

    async fn get(&mut self) -> Vec<Lease> {
        match self.is_pushed {
            _ if !self.next.is_empty() => std::mem::take(&mut self.next),
            true => self.next_pushed().await,
            false => self.poll().await,
        }
    }

    /// Waits for tasks on its stream. If the stream breaks, it is dropped, and the next call opens
    /// a new one.
    async fn next_pushed(&mut self) -> Vec<Lease> {
        let most = 1 + u32::try_from(self.dice.below(10)).unwrap();
        let stream = match self.stream.take() {
            Some(stream) => Some(stream),
            None => self.open(most).await,
        };
        let Some(mut stream) = stream else {
            return Vec::new();
        };
        let ledger = Arc::clone(&self.crowd.ledger);
        if self.dice.chance(5) && stream.surrender(&ledger).await.is_err() {
            return Vec::new();
        }
        let Ok((tasks, asked)) = stream.tasks(most, &ledger).await else {
            return Vec::new();
        };
        self.stream = Some(stream);
        let leases: Vec<_> = tasks.iter().map(|task| self.pushed_lease(task)).collect();
        for lease in &leases {
            ledger.leased(&self.name, lease, asked);
        }
        ledger.book().pushed += leases.len();
        leases
    }

    /// Opens a stream to any process that answers: resumes the session, takes it over, or starts a
    /// new one.
    async fn open(&mut self, want: u32) -> Option<Pushed> {
        let ledger = Arc::clone(&self.crowd.ledger);
        let goes_on = !self.session.is_empty() && self.dice.chance(50);
        let takeover = !goes_on && self.dice.chance(30);
        // A worker that drops tasks must not keep their leases.
        let keep_leases = matches!(self.kind, Kind::Honest | Kind::Repeats) && self.dice.chance(40);
        let mut open = pb::OpenSession {
            takeover,
            keep_leases,
            ..opening(&self.name, want)
        };
        open.queues = QUEUES
            .iter()
            .map(|(queue, _)| (*queue).to_owned())
            .collect();
        open.tells_started = self.dice.chance(50);
        if goes_on {
            open.session.clone_from(&self.session);
            open.holding = self
                .late
                .iter()
                .flat_map(|(_, leases)| leases)
                .map(|lease| lease.id.clone())
                .collect();
        }
        if goes_on || takeover {
            ledger.lets_go(&self.name, &open.holding);
        }
        let steals = self.kind() == Kind::Lies && self.dice.chance(30);
        if steals {
            let sessions = self.crowd.sessions.lock().unwrap();
            let others: Vec<_> = sessions
                .iter()
                .filter(|session| **session != self.session)
                .collect();
            if !others.is_empty() {
                open.session = self.dice.pick(&others).to_string();
                open.holding.clear();
            }
        }
        let (first, all) = (
            self.dice.below(self.crowd.ports.len()),
            self.crowd.ports.len(),
        );
        for n in 0..all {
            let port = self.crowd.ports[(first + n) % all];
            let Ok(stream) = Pushed::open(port, open.clone(), &ledger).await else {
                continue;
            };
            let opened = stream.opened();
            let is_own = self.session == open.session;
            if opened.resumed && !is_own {
                ledger.broken(format!(
                    "{} goes on with a session of another: {}",
                    self.name, open.session
                ));
            }
            self.session.clone_from(&opened.session);
            self.crowd
                .sessions
                .lock()
                .unwrap()
                .push(opened.session.clone());
            return Some(stream);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        None
    }

    async fn poll(&mut self) -> Vec<Lease> {
        let mut body = self.wish();
        (body["worker"], body["wait"]) = (json!(self.name), json!("200ms"));
        let sent = self.crowd.ledger.sending();
        let Some(answer) = self
            .crowd
            .call(&mut self.dice, "/v1/tasks:get", &body)
            .await
        else {
            return Vec::new();
        };
        self.leases(&answer, sent)
    }

    /// The parameters of its request for tasks, as in a call.
    fn wish(&mut self) -> Value {
        let queues: Vec<_> = QUEUES.iter().map(|(queue, _)| queue).collect();
        json!({"queues": queues, "max_tasks": 1 + self.dice.below(10)})
    }

    /// Reads the tasks in the answer to a call, if there are any.
    fn leases(&mut self, answer: &Value, sent: Sent) -> Vec<Lease> {
        let tasks = answer["tasks"].as_array().into_iter().flatten();
        let leases: Vec<_> = tasks.map(|task| self.lease(task)).collect();
        for lease in &leases {
            self.crowd.ledger.leased(&self.name, lease, sent);
        }
        leases
    }

    fn lease(&mut self, task: &Value) -> Lease {
        let text = |name: &str| task[name].as_str().unwrap().to_owned();
        let (queue, key) = (text("queue"), text("key"));
        assert_eq!(
            task["payload"],
            *task["key"]
                .as_str()
                .unwrap()
                .split('/')
                .next_back()
                .unwrap(),
            "{task}"
        );
        let children = self.discover(&key);
        Lease {
            id: text("id"),
            token: text("lease_token"),
            key: (queue, key),
            replicas: task["replicas"].as_u64().unwrap() as usize,
            expires_ms: rfc3339_ms(&text("lease_expires_at")),
            children,
        }
    }

    fn pushed_lease(&mut self, task: &pb::LeasedTask) -> Lease {
        let key = String::from_utf8(task.key.to_vec()).unwrap();
        assert_eq!(
            task.payload,
            key.split('/').next_back().unwrap(),
            "{task:?}"
        );
        Lease {
            id: task.id.clone(),
            token: task.lease_token.clone(),
            replicas: task.replicas as usize,
            expires_ms: pushed::unix_ms(task.lease_expires_at.unwrap()),
            children: self.discover(&key),
            key: (task.queue.clone(), key),
        }
    }

    /// Discovers up to two tasks. Some of them are discovered by several workers, and some are
    /// already known.
    fn discover(&mut self, parent: &str) -> Vec<Key> {
        if parent.matches('/').count() >= 2 || self.dice.chance(60) {
            return Vec::new();
        }
        let mut child = || {
            self.children += 1;
            let queue = self.dice.pick(&QUEUES[..3]).0.to_owned();
            match self.dice.below(4) {
                0 => (queue, format!("{parent}/{}", self.dice.below(2))),
                1 => (queue, format!("s/{}", self.dice.below(200))),
                _ => (queue, format!("{parent}/{}-{}", self.name, self.children)),
            }
        };
        if child().1.len() % 2 == 0 {
            vec![child()]
        } else {
            vec![child(), child()]
        }
    }

    async fn deal_with(&mut self, leases: Vec<Lease>) {
        let (doomed, leases): (Vec<_>, Vec<_>) =
            leases.into_iter().partition(|lease| lease.key.0 == DOOMED);
        for lease in doomed {
            match self.dice.below(3) {
                0 => self.complete(&[lease]).await,
                n => self.reject(&[lease], n == 1).await,
            }
        }
        if leases.is_empty() {
            return;
        }
        match self.kind() {
            Kind::Crashes if self.dice.chance(70) => {
                if self.dice.chance(50) {
                    self.forget();
                }
            }
            Kind::Stalls if self.dice.chance(70) => {
                let longest = leases.iter().map(|lease| lease.expires_ms).max().unwrap();
                let late = longest.saturating_sub(now_ms()) as u64 + self.dice.below(1000) as u64;
                self.late
                    .push_back((Instant::now() + Duration::from_millis(late), leases));
            }
            Kind::Lies => {
                self.lie(&leases).await;
                if self.dice.chance(50) {
                    self.complete(&leases).await;
                }
            }
            Kind::Repeats => self.repeat(leases).await,
            Kind::Rejects if self.dice.chance(60) => self.reject(&leases, true).await,
            Kind::Extends => {
                self.extend(&leases).await;
                self.complete(&leases).await;
            }
            _ => self.complete(&leases).await,
        }
    }

    fn completion(&self, lease: &Lease) -> Value {
        let discovered: Vec<_> = lease
            .children
            .iter()
            .map(|(queue, key)| json!({"queue": queue, "key": key, "payload": key.split('/').next_back()}))
            .collect();
        let result = lease.result(&self.name);
        json!({"id": lease.id, "lease_token": lease.token, "result": result, "discovered": discovered})
    }

    /// Repeats completions until they are answered, but only a few times.
    async fn complete(&mut self, leases: &[Lease]) {
        for _ in 0..3 {
            if self.complete_once(leases).await {
                return;
            }
        }
        self.forget();
    }

    /// Drops everything that it has not reported, including the stream, which would otherwise keep
    /// the leases alive forever.
    fn forget(&mut self) {
        self.crowd.ledger.lets_go(&self.name, &[]);
        self.next.clear();
        self.stream = None;
    }

    /// Returns true if all items have a final answer.
    async fn complete_once(&mut self, leases: &[Lease]) -> bool {
        let completions: Vec<_> = leases.iter().map(|lease| self.completion(lease)).collect();
        let mut body = json!({"worker": self.name, "completions": completions});
        let completions = leases
            .iter()
            .map(|lease| pushed::completion(lease, &self.name))
            .collect();
        let mut frame = pb::WorkerFrame {
            completions,
            ..Default::default()
        };
        if self.dice.chance(50) {
            body["next"] = self.wish();
            frame.want = 1 + u32::try_from(self.dice.below(10)).unwrap();
        }
        let ledger = Arc::clone(&self.crowd.ledger);
        ledger.ending(leases, true);
        let sent = ledger.sending();
        let Some(answers) = self.report("/v1/tasks:complete", &body, frame).await else {
            return false;
        };
        for (lease, (status, _)) in leases.iter().zip(&answers) {
            ledger.answered(lease, status, sent);
        }
        is_final(&answers)
    }

    /// Sends a report on its stream, if it has one, or by a call. Returns `None` if it was not
    /// answered.
    async fn report(
        &mut self,
        path: &str,
        body: &Value,
        frame: pb::WorkerFrame,
    ) -> Option<Vec<Answer>> {
        let calls = self.dice.chance(10);
        let sent = self.crowd.ledger.sending();
        let Some(mut stream) = self.stream.take_if(|_| !calls) else {
            let answer = self.crowd.call(&mut self.dice, path, body).await?;
            let next = self.leases(&answer, sent);
            self.next.extend(next);
            return Some(
                answer["results"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(read)
                    .collect(),
            );
        };
        match stream.report(frame, &self.crowd.ledger).await {
            Ok(answer) => {
                self.stream = Some(stream);
                let all = answer
                    .completions
                    .iter()
                    .chain(&answer.rejections)
                    .chain(&answer.extensions);
                Some(all.map(pushed::read).collect())
            }
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                None
            }
        }
    }

    async fn repeat(&mut self, leases: Vec<Lease>) {
        let mut answered = false;
        for _ in 0..2 + self.dice.below(2) {
            answered |= self.complete_once(&leases).await;
        }
        if !answered {
            self.forget();
        }
        self.old.extend(leases);
        if self.dice.chance(30) {
            let old = self.dice.pick(&self.old).clone();
            self.complete_once(&[old]).await;
        }
    }

    async fn reject(&mut self, leases: &[Lease], retry: bool) {
        let not_started = retry && self.dice.chance(25);
        let delays = [None, Some("0s"), Some("150ms")];
        let delay = *self.dice.pick(&delays);
        let one = |lease: &Lease| {
            let (id, token) = (&lease.id, &lease.token);
            let mut one = json!({"id": id, "lease_token": token, "reason": "no", "retry": retry});
            if not_started {
                one["not_started"] = json!(true);
            }
            if let Some(delay) = delay.filter(|_| retry) {
                one["delay"] = json!(delay);
            }
            one
        };
        let body =
            json!({"worker": self.name, "rejections": leases.iter().map(one).collect::<Vec<_>>()});
        let millis = |delay: &str| {
            i32::try_from(humantime::parse_duration(delay).unwrap().as_millis()).unwrap()
        };
        let delay = delay.filter(|_| retry).map(|delay| prost_types::Duration {
            seconds: 0,
            nanos: millis(delay) * 1_000_000,
        });
        let one = |lease: &Lease| {
            let (id, lease_token, reason) =
                (lease.id.clone(), lease.token.clone(), "no".to_owned());
            pb::Rejection {
                id,
                lease_token,
                reason,
                retry: Some(retry),
                delay,
                not_started,
                limit: None,
            }
        };
        let frame = pb::WorkerFrame {
            rejections: leases.iter().map(one).collect(),
            ..Default::default()
        };
        let ledger = Arc::clone(&self.crowd.ledger);
        ledger.ending(leases, false);
        let sent = ledger.sending();
        let Some(answers) = self.report("/v1/tasks:reject", &body, frame).await else {
            return self.forget();
        };
        for (lease, (status, _)) in leases.iter().zip(&answers) {
            ledger.rejected(lease, status, sent);
        }
        if !is_final(&answers) {
            self.forget();
        }
        // Then completes them after all, which is too late.
        if self.dice.chance(20) {
            self.complete_once(leases).await;
        }
    }

    async fn extend(&mut self, leases: &[Lease]) {
        let one = |lease: &Lease| json!({"id": lease.id, "lease_token": lease.token, "by": "2s"});
        let body =
            json!({"worker": self.name, "extensions": leases.iter().map(one).collect::<Vec<_>>()});
        let one = |lease: &Lease| {
            let (id, lease_token, by) = (lease.id.clone(), lease.token.clone(), seconds(2));
            pb::Extension {
                id,
                lease_token,
                by,
            }
        };
        let frame = pb::WorkerFrame {
            extensions: leases.iter().map(one).collect(),
            ..Default::default()
        };
        let Some(answers) = self.report("/v1/tasks:extend", &body, frame).await else {
            return;
        };
        for (lease, (_, until)) in leases.iter().zip(answers) {
            if let Some(until) = until {
                self.crowd.ledger.extended(lease, until);
            }
        }
    }

    /// Sends reports that must all be refused.
    async fn lie(&mut self, leases: &[Lease]) {
        let mine = self.dice.pick(leases).clone();
        let foreign = {
            let book = self.crowd.ledger.book();
            let grants = book
                .tasks
                .iter()
                .flat_map(|(id, seen)| seen.grants.iter().map(move |grant| (id, grant)));
            let others = grants.filter(|(_, (_, grant))| grant.worker != self.name);
            others
                .map(|(id, (token, _))| (id.clone(), token.clone()))
                .nth(self.dice.below(20))
        };
        let mut lies = vec![
            (
                "a made-up token",
                self.name.clone(),
                mine.id.clone(),
                "AAAA".to_owned(),
            ),
            (
                "a changed token",
                self.name.clone(),
                mine.id.clone(),
                changed(&mine.token, &mut self.dice),
            ),
            (
                "as somebody else",
                "w0-honest".to_owned(),
                mine.id.clone(),
                mine.token.clone(),
            ),
        ];
        if let Some((id, token)) = foreign {
            // A token identifies a grant, which may have several tasks: using it for another task
            // of the same grant is not a lie.
            lies.push(("another's token", self.name.clone(), id.clone(), token));
            if !leases.iter().any(|lease| lease.id == id) {
                lies.push(("a task never held", self.name.clone(), id, mine.token));
            }
        }
        for (lie, worker, id, token) in lies {
            let completion = json!({"id": id, "lease_token": token, "result": "a lie"});
            let body = json!({"worker": worker, "completions": [completion]});
            let (of, said) = (self.name == worker, format!("{lie}, {worker} {id} {token}"));
            let answers = match of {
                true => {
                    let one = pb::Completion {
                        id,
                        lease_token: token,
                        result: "a lie".into(),
                        ..Default::default()
                    };
                    // It also claims to have started a task that is not its own.
                    let (completions, started) = (vec![one.clone()], vec![one.id]);
                    let frame = pb::WorkerFrame {
                        completions,
                        started,
                        ..Default::default()
                    };
                    self.report("/v1/tasks:complete", &body, frame).await
                }
                // Only by call: on a stream, the worker's name is fixed.
                false => {
                    let answer = self
                        .crowd
                        .call(&mut self.dice, "/v1/tasks:complete", &body)
                        .await;
                    answer.map(|answer| {
                        answer["results"]
                            .as_array()
                            .unwrap()
                            .iter()
                            .map(read)
                            .collect()
                    })
                }
            };
            if let Some((status, _)) =
                answers.and_then(|answers: Vec<Answer>| answers.into_iter().next())
            {
                self.crowd.ledger.lied(&said, &status);
            }
        }
    }
}

/// Changes the shard, the generation or the grant in the token.
fn changed(token: &str, dice: &mut Dice) -> String {
    let mut parts: Vec<_> = token.split(':').map(str::to_owned).collect();
    let at = 1 + dice.below(3);
    parts[at] = (parts[at].parse::<u64>().unwrap() + 1).to_string();
    parts.join(":")
}

fn is_final(answers: &[Answer]) -> bool {
    answers.iter().all(|(status, _)| status != "TRY_LATER")
}

fn read(result: &Value) -> Answer {
    (
        result["status"].as_str().unwrap().to_owned(),
        result["lease_expires_at"].as_str().map(rfc3339_ms),
    )
}

pub(crate) fn rfc3339_ms(text: &str) -> u128 {
    let time =
        humantime::parse_rfc3339_weak(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    time.duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis()
}
