//! The tasks of one run: their queues and keys, and the calls of inserters and workers.

use anyhow::{Context, bail};
use backon::BackoffBuilder;
use bytes::Bytes;
use tonic::{Response, Status};

use super::{
    args::{QUEUES_A_CALL, Work},
    pushed::{Pushed, may_open_again},
};
use crate::{
    cli::client::{Taskd, WAITS, is_transient},
    wire::pb::{self, discovery_client::DiscoveryClient, tasks_client::TasksClient},
};

/// How long a get call may wait. The wait is cancelled at the end of a phase.
const WAIT: Option<prost_types::Duration> = Some(prost_types::Duration {
    seconds: 20,
    nanos: 0,
});
/// The lease duration: longer than any stall, so that no worker loses a lease to another.
const LEASE: Option<prost_types::Duration> = Some(prost_types::Duration {
    seconds: 600,
    nanos: 0,
});

/// Tasks in queues of their own, numbered from 0.
#[derive(Clone)]
pub(super) struct Tasks {
    pub(super) queues: Vec<String>,
    payload: Bytes,
    replicas: u16,
    /// The limit keys that the tasks share, in turn: the start of their names, and how many there
    /// are; 0 for none.
    limit_keys: (&'static str, u32),
    /// The sequences that the tasks share, in turn; 0 for none.
    sequences: u32,
}

impl Tasks {
    /// `name` is the prefix of the queue names.
    pub(super) fn new(name: &str, work: &Work) -> Self {
        let queues = match work.queues {
            1 => vec![name.to_owned()],
            count => (1..=count)
                .map(|number| format!("{name}-{number}"))
                .collect(),
        };
        // The size has already been validated.
        let payload = vec![b'x'; usize::try_from(work.payload.0).unwrap_or_default()].into();
        Self {
            queues,
            payload,
            replicas: work.replicas,
            limit_keys: ("", 0),
            sequences: 0,
        }
    }

    /// The tasks share so many limit keys, in turn.
    pub(super) fn limited(self, name: &'static str, limit_keys: u32) -> Self {
        Self {
            limit_keys: (name, limit_keys),
            ..self
        }
    }

    /// The tasks share so many sequences, in turn.
    pub(super) fn in_sequences(self, sequences: u32) -> Self {
        Self { sequences, ..self }
    }

    pub(super) fn task(&self, number: u32) -> pb::NewTask {
        pb::NewTask {
            queue: self.queues[number as usize % self.queues.len()].clone(),
            key: key(number).into(),
            payload: self.payload.clone(),
            replicas: Some(self.replicas.into()),
            limit_key: match number.checked_rem(self.limit_keys.1) {
                Some(place) => format!("{}-{place}", self.limit_keys.0),
                None => String::new(),
            },
            sequence: match number.checked_rem(self.sequences) {
                Some(place) => format!("sequence-{place}"),
                None => String::new(),
            },
            ..Default::default()
        }
    }
}

pub(super) fn key(number: u32) -> String {
    format!("{number:09}")
}

fn number(key: &[u8]) -> anyhow::Result<u32> {
    let number = str::from_utf8(key).ok().and_then(|key| key.parse().ok());
    number.with_context(|| {
        format!(
            "a worker got the task {:?}, which the benchmark did not insert",
            key.escape_ascii()
        )
    })
}

/// Inserts tasks, and repeats the call until each is answered. Returns the numbers of the new ones,
/// and how often a call was repeated.
pub(super) async fn insert(
    mut client: DiscoveryClient<Taskd>,
    tasks: &Tasks,
    mut numbers: Vec<u32>,
) -> anyhow::Result<Inserted> {
    let (mut waits, mut inserted) = (WAITS.build(), Inserted::default());
    loop {
        let tasks = numbers.iter().map(|number| tasks.task(*number)).collect();
        let request = pb::InsertTasksRequest {
            tasks,
            ..Default::default()
        };
        match client.insert_tasks(request).await.map(Response::into_inner) {
            Ok(answer) => numbers = inserted.note(numbers, answer.results)?,
            Err(status) if is_transient(&status) => inserted.errors += 1,
            Err(status) => bail!("taskd did not take an insert: {}", status.message()),
        }
        if numbers.is_empty() {
            return Ok(inserted);
        }
        inserted.repeated += 1;
        tokio::time::sleep(waits.next().unwrap_or_default()).await;
    }
}

/// The outcome of an insert.
#[derive(Default)]
pub(super) struct Inserted {
    pub(super) new: Vec<u32>,
    pub(super) known: u32,
    /// Calls that were repeated, because taskd was busy or unavailable.
    pub(super) repeated: u32,
    /// Calls that failed: they may have stored their tasks.
    pub(super) errors: u32,
}

impl Inserted {
    pub(super) fn add(&mut self, other: Self) {
        self.new.extend(other.new);
        self.known += other.known;
        self.repeated += other.repeated;
        self.errors += other.errors;
    }

    /// Counts the results; returns the numbers of the tasks to send again.
    fn note(&mut self, sent: Vec<u32>, results: Vec<pb::InsertResult>) -> anyhow::Result<Vec<u32>> {
        let mut again = Vec::new();
        for (number, result) in sent.into_iter().zip(results) {
            match result.status() {
                pb::InsertStatus::Created => self.new.push(number),
                pb::InsertStatus::Duplicate => self.known += 1,
                pb::InsertStatus::TryLater => again.push(number),
                pb::InsertStatus::Rejected | pb::InsertStatus::Unspecified => {
                    bail!("taskd rejected a task: {}", result.error)
                }
            }
        }
        Ok(again)
    }
}

/// A worker that makes one call at a time.
pub(super) struct Worker {
    client: TasksClient<Taskd>,
    name: String,
    queues: Vec<String>,
    batch: u32,
    /// `None` if it uses calls; otherwise its stream, if one is open.
    stream: Option<Option<Pushed>>,
    /// The worker fetches its next tasks in the call that reports the previous ones.
    pub(super) asks_next: bool,
    /// The tasks that arrived with the answer to a report.
    next: Vec<pb::LeasedTask>,
    pub(super) repeated: u32,
}

/// A task that a worker holds.
pub(super) struct Leased {
    pub(super) number: u32,
    pub(super) attempt: u32,
    id: String,
    token: String,
}

impl Worker {
    pub(super) fn new(channel: Taskd, number: u16, tasks: &Tasks, work: &Work) -> Self {
        let name = format!("bench-{number}");
        // Each worker uses as many queues as one call may list; the next worker uses the next
        // group.
        let groups: Vec<&[String]> = tasks.queues.chunks(QUEUES_A_CALL.into()).collect();
        let queues = groups[usize::from(number) % groups.len()].to_vec();
        let (client, batch, stream) = (
            TasksClient::new(channel),
            work.batch.into(),
            work.stream.then_some(None),
        );
        Self {
            client,
            name,
            queues,
            batch,
            stream,
            asks_next: work.next,
            next: Vec::new(),
            repeated: 0,
        }
    }

    /// Waits for tasks on the stream, which is opened if necessary.
    async fn pushed(&mut self) -> Result<Vec<pb::LeasedTask>, Status> {
        let Some(stream) = &mut self.stream else {
            return Ok(Vec::new());
        };
        if stream.is_none() {
            let (worker, queues, want) = (self.name.clone(), self.queues.clone(), self.batch);
            let open = pb::OpenSession {
                worker,
                queues,
                want,
                lease_duration: LEASE,
                ..Default::default()
            };
            *stream = Some(Pushed::open(&mut self.client, open).await?);
        }
        match stream {
            Some(open) => open.tasks(self.batch).await,
            None => Ok(Vec::new()),
        }
    }

    /// Reports completions over the stream if one is open, otherwise by a call.
    async fn report(
        &mut self,
        completions: Vec<pb::Completion>,
    ) -> Result<Vec<pb::ItemResult>, Status> {
        if let Some(Some(stream)) = &mut self.stream {
            return stream.complete(completions).await;
        }
        let next = (self.asks_next && self.next.is_empty()).then(|| pb::GetTasksRequest {
            queues: self.queues.clone(),
            max_tasks: self.batch,
            lease_duration: LEASE,
            ..Default::default()
        });
        let request = pb::CompleteTasksRequest {
            worker: self.name.clone(),
            completions,
            next,
        };
        let answer = self.client.complete_tasks(request).await?.into_inner();
        self.next.extend(answer.tasks);
        Ok(answer.results)
    }

    /// Gets the next tasks; returns none if none arrive for a while.
    pub(super) async fn get(&mut self) -> anyhow::Result<Vec<Leased>> {
        let tasks = if !self.next.is_empty() {
            Ok(std::mem::take(&mut self.next))
        } else if self.stream.is_some() {
            self.pushed().await
        } else {
            let request = pb::GetTasksRequest {
                worker: self.name.clone(),
                queues: self.queues.clone(),
                max_tasks: self.batch,
                wait: WAIT,
                lease_duration: LEASE,
                ..Default::default()
            };
            self.client
                .get_tasks(request)
                .await
                .map(|answer| answer.into_inner().tasks)
        };
        let tasks = match tasks {
            Ok(tasks) => tasks,
            Err(status) => return self.failed("get", &status).await.map(|()| Vec::new()),
        };
        let leased = |task: pb::LeasedTask| {
            // The task of a record has no key of its own.
            let key_of_record = task.headers.get("taskd-key").map(String::as_bytes);
            let number = number(key_of_record.unwrap_or(&task.key))?;
            Ok(Leased {
                number,
                attempt: task.attempt,
                id: task.id,
                token: task.lease_token,
            })
        };
        tasks.into_iter().map(leased).collect()
    }

    /// Completes tasks; returns the numbers of those that were answered with OK.
    pub(super) async fn complete(&mut self, mut tasks: Vec<Leased>) -> anyhow::Result<Vec<u32>> {
        let mut done = Vec::with_capacity(tasks.len());
        while !tasks.is_empty() {
            let completion = |task: &Leased| pb::Completion {
                id: task.id.clone(),
                lease_token: task.token.clone(),
                ..Default::default()
            };
            let completions = tasks.iter().map(completion).collect();
            // A repeated completion is answered with OK again, and counts once.
            let results = match self.report(completions).await {
                Ok(results) => results,
                Err(status) => {
                    self.failed("complete", &status).await?;
                    continue;
                }
            };
            let mut again = Vec::new();
            for (task, result) in tasks.into_iter().zip(results) {
                match result.status() {
                    pb::ItemStatus::Ok => done.push(task.number),
                    pb::ItemStatus::TryLater => again.push(task),
                    // Another worker does this replica, or has done it; the ledger checks the
                    // count.
                    pb::ItemStatus::LeaseLost | pb::ItemStatus::AlreadyCompleted => {}
                    other => bail!(
                        "taskd answered a completion with {}: {}",
                        other.as_str_name(),
                        result.error
                    ),
                }
            }
            tasks = again;
        }
        Ok(done)
    }

    /// Rejects tasks such that the next worker gets them at once.
    pub(super) async fn pass_on(&mut self, tasks: &[Leased]) -> anyhow::Result<()> {
        let rejection = |task: &Leased| pb::Rejection {
            id: task.id.clone(),
            lease_token: task.token.clone(),
            reason: "measured".to_owned(),
            retry: None,
            delay: Some(prost_types::Duration::default()),
            not_started: false,
            limit: None,
        };
        let rejections = tasks.iter().map(rejection).collect();
        let request = pb::RejectTasksRequest {
            worker: self.name.clone(),
            rejections,
        };
        let answer = self
            .client
            .reject_tasks(request)
            .await
            .context("taskd did not take a rejection")?
            .into_inner();
        match answer
            .results
            .iter()
            .find(|result| result.status() != pb::ItemStatus::Ok)
        {
            None => Ok(()),
            Some(other) => bail!("taskd answered a rejection with {other:?}"),
        }
    }

    /// Waits a moment after a transient error; fails after any other.
    async fn failed(&mut self, call: &str, status: &Status) -> anyhow::Result<()> {
        // A new stream is opened later; until then, reports use calls.
        let is_stream = self
            .stream
            .as_mut()
            .is_some_and(|stream| stream.take().is_some());
        if !(is_transient(status) || is_stream && may_open_again(status)) {
            bail!("taskd did not take a {call}: {}", status.message());
        }
        self.repeated += 1;
        tokio::time::sleep(WAITS.build().next().unwrap_or_default()).await;
        Ok(())
    }
}
