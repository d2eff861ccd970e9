//! The tasks service: workers get tasks and report what became of them.

mod forward;

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::future;
use prost::Message as _;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::{
    bus::Bus,
    config::Settings,
    model::{self, LeaseToken, MAX_RECORD_BYTES, QueueName, ShardId, TaskId, WorkerName, validate},
    pb,
    queue::{self, Claim, Code, Completion, Delivery, Extension, Granted, HandBack, How, Leased, Queue},
    supervise::Supervisor,
    telemetry::metrics::{self, CallResult, Method},
};

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The request as a whole is wrong. HTTP 400, gRPC INVALID_ARGUMENT.
    #[error("{0}")]
    Invalid(String),
    /// HTTP 503, gRPC UNAVAILABLE.
    #[error("cannot reach the queue now: {0}")]
    Unavailable(String),
}

impl From<queue::Error> for Error {
    fn from(error: queue::Error) -> Self {
        Self::Unavailable(error.to_string())
    }
}

/// Bytes of tasks in one answer, about, where the worker does not say; a single task may be larger. gRPC clients take 4
/// MiB by default.
const MAX_ANSWER_BYTES: usize = 7 << 19;
/// … and where it does, at most.
const MOST_ANSWER_BYTES: u64 = 64 << 20;
/// Queues that one call may name.
const MAX_QUEUES: usize = 100;
/// Tasks that one completion may report as discovered.
const MAX_DISCOVERED: usize = 10_000;

/// Longer than anybody waits; a number that no clock holds would never come round.
const MAX_REJECT_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// The answer to a get call, and the leases in it. Whoever sends the answer calls [`Delivery::delivered`] on each when the worker has it,
/// and drops them when it does not get it: then they go back at no cost.
#[derive(Default)]
pub struct Answer {
    pub response: pb::GetTasksResponse,
    pub deliveries: Vec<Delivery>,
}

impl Answer {
    /// The response, taken as delivered.
    pub fn deliver(self) -> pb::GetTasksResponse {
        self.deliveries.into_iter().for_each(Delivery::delivered);
        self.response
    }
}

/// How callers reach the service. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    queue: Queue,
    settings: Arc<Settings>,
    /// Tells the forwarder that there is something in an outbox.
    reported: Arc<Notify>,
    /// Where the next look begins, so that no shard is always the last.
    turn: Arc<AtomicUsize>,
    stop: CancellationToken,
}

/// Starts the service.
pub fn start(queue: Queue, bus: Arc<dyn Bus>, settings: &Arc<Settings>, supervisor: &Supervisor) -> Handle {
    let reported = Arc::new(Notify::new());
    forward::start(&queue, bus, Arc::clone(&reported), supervisor);
    let watched = |name| (queue.clone(), Arc::new(supervisor.progress().register(name)), supervisor.stop_token());
    let (waking, beat, stop) = watched("tasks/wakes");
    supervisor.spawn("tasks/wakes", move || {
        let (queue, beat, stop) = (waking.clone(), Arc::clone(&beat), stop.clone());
        async move { Ok(queue.listen(&beat, &stop).await?) }
    });
    let (releasing, beat, stop) = watched("tasks/release");
    supervisor.spawn("tasks/release", move || {
        let (queue, beat, stop) = (releasing.clone(), Arc::clone(&beat), stop.clone());
        async move {
            queue.give_back_undelivered(&beat, &stop).await;
            Ok(())
        }
    });
    let stop = supervisor.stop_token();
    Handle { queue, settings: Arc::clone(settings), reported, turn: Arc::default(), stop }
}

/// An item's place in its request, and what a script needs of it.
struct Placed<T> {
    place: usize,
    item: T,
}

impl Handle {
    /// Leases tasks; waits only when there is nothing. Dropping the future gives back what was leased meanwhile.
    pub async fn get(&self, request: pb::GetTasksRequest) -> Result<Answer, Error> {
        counted(Method::Get, self.get_tasks(request), |answer| answer.response.tasks.is_empty()).await
    }

    pub async fn complete(&self, request: pb::CompleteTasksRequest) -> Result<pb::CompleteTasksResponse, Error> {
        counted(Method::Complete, self.complete_tasks(request), |response| response.results.is_empty()).await
    }

    pub async fn reject(&self, request: pb::RejectTasksRequest) -> Result<pb::RejectTasksResponse, Error> {
        counted(Method::Reject, self.reject_tasks(request), |response| response.results.is_empty()).await
    }

    pub async fn extend(&self, request: pb::ExtendTasksRequest) -> Result<pb::ExtendTasksResponse, Error> {
        counted(Method::Extend, self.extend_tasks(request), |response| response.results.is_empty()).await
    }

    async fn get_tasks(&self, request: pb::GetTasksRequest) -> Result<Answer, Error> {
        let worker = worker(&request.worker)?;
        if request.queues.is_empty() {
            return Err(Error::Invalid("queues is empty: name at least one".into()));
        }
        if request.queues.len() > MAX_QUEUES {
            return Err(Error::Invalid(format!("{} queues; at most {MAX_QUEUES}", request.queues.len())));
        }
        let mut queues = Vec::with_capacity(request.queues.len());
        for name in &request.queues {
            let queue = QueueName::new(name).map_err(|e| Error::Invalid(e.to_string()))?;
            if !queues.contains(&queue) {
                queues.push(queue);
            }
        }
        let limits = &self.settings.limits;
        let max_tasks = request.max_tasks.max(1) as usize;
        if max_tasks > limits.max_items {
            return Err(Error::Invalid(format!("max_tasks is {max_tasks}; at most {}", limits.max_items)));
        }
        let lease = request.lease_duration.map(|lease| self.lease("lease_duration", lease)).transpose();
        let lease = lease.map_err(Error::Invalid)?;
        let wait = request.wait.map(|wait| validate::positive("wait", wait)).transpose().map_err(Error::Invalid)?;
        let wait = wait.unwrap_or_default().min(limits.max_wait);

        let max_bytes = match request.max_bytes.min(MOST_ANSWER_BYTES) {
            0 => MAX_ANSWER_BYTES,
            bytes => usize::try_from(bytes).unwrap_or(MAX_ANSWER_BYTES),
        };
        let claim = Claim { worker, max_tasks, max_bytes, lease };
        let deadline = tokio::time::Instant::now() + wait;
        let waiter = self.queue.wakes().waiter(&queues);
        loop {
            let left = deadline.saturating_duration_since(tokio::time::Instant::now());
            let look = async {
                match self.look(&queues, &claim).await {
                    Ok(granted) if granted.is_empty() && !left.is_zero() && !self.stop.is_cancelled() => None,
                    answer => Some(answer),
                }
            };
            let answer = tokio::select! {
                answer = waiter.look_then_wait(look, left) => answer,
                () = self.stopped_while_waiting(left) => None,
            };
            if let Some(answer) = answer {
                return Ok(leased_tasks(answer?));
            }
        }
    }

    /// A stop ends long polls; a look under way ends by itself.
    async fn stopped_while_waiting(&self, left: Duration) {
        if left.is_zero() || self.stop.is_cancelled() {
            future::pending::<()>().await;
        }
        self.stop.cancelled().await;
    }

    /// One look at all shards of the queues, until there is enough.
    async fn look(&self, queues: &[QueueName], claim: &Claim) -> Result<Vec<Granted>, Error> {
        let shards: Vec<_> = queues.iter().flat_map(|queue| self.queue.shards_of(queue)).collect();
        let (mut granted, mut tasks, mut bytes) = (Vec::new(), 0, 0);
        if shards.is_empty() {
            return Ok(granted);
        }
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % shards.len();
        for shard in shards[first..].iter().chain(&shards[..first]) {
            loop {
                let rest =
                    Claim { max_tasks: claim.max_tasks - tasks, max_bytes: claim.max_bytes - bytes, ..claim.clone() };
                let one = self.queue.claim(shard, rest).await?;
                let more = one.more;
                tasks += one.len();
                bytes = (bytes + one.bytes()).min(claim.max_bytes);
                if !one.is_empty() {
                    metrics::tasks_claimed(shard.id.queue.as_str(), one.len());
                    granted.push(one);
                }
                if !more || tasks >= claim.max_tasks || bytes >= claim.max_bytes {
                    break;
                }
            }
            if tasks >= claim.max_tasks || bytes >= claim.max_bytes {
                break;
            }
        }
        Ok(granted)
    }

    async fn complete_tasks(&self, request: pb::CompleteTasksRequest) -> Result<pb::CompleteTasksResponse, Error> {
        let worker = worker(&request.worker)?;
        self.check_count(request.completions.len())?;
        let mut results: Vec<_> = request.completions.iter().map(|item| unanswered(&item.id)).collect();
        let mut calls = Vec::new();
        for (place, item) in request.completions.into_iter().enumerate() {
            match self.completion(&worker, item) {
                Ok(item) => calls.push(async move { (place, self.queue.complete(item).await) }),
                Err(error) => invalid(&mut results[place], error),
            }
        }
        let answers = future::join_all(calls).await;
        self.reported.notify_one();
        for (place, code) in answers {
            settle(&mut results[place], code?);
        }
        count(Method::Complete, &results);
        Ok(pb::CompleteTasksResponse { results })
    }

    fn completion(&self, worker: &WorkerName, item: pb::Completion) -> Result<Completion, String> {
        let (id, token) = lease(&item.id, &item.lease_token)?;
        let limits = &self.settings.limits;
        if item.result.len() > limits.max_result_bytes {
            return Err(format!("result has {} bytes; at most {}", item.result.len(), limits.max_result_bytes));
        }
        if item.discovered.len() > MAX_DISCOVERED {
            return Err(format!("discovered has {} tasks; at most {MAX_DISCOVERED}", item.discovered.len()));
        }
        let encoding = validate::encoding("result", item.result_encoding, &item.result)?;
        let task_id = Bytes::copy_from_slice(id.as_bytes());
        let done = pb::Completed {
            worker: worker.as_str().to_owned(),
            result: item.result,
            result_encoding: encoding.to_pb().into(),
            discovered: item.discovered,
            attempt: token.attempt,
        };
        let bytes = done.encoded_len();
        if bytes > MAX_RECORD_BYTES {
            return Err(format!("result and discovered have {bytes} bytes together; at most {MAX_RECORD_BYTES}"));
        }
        for (index, task) in done.discovered.iter().enumerate() {
            let queue = QueueName::new(&task.queue);
            let queues = &self.settings.queues;
            let settings = queue.as_ref().map_or(&queues.default, |queue| queues.get(queue));
            // Checked here, because nobody could be told later.
            validate::task_row(task.clone(), id, settings, limits, 1, model::now_unix_ms())
                .map_err(|error| format!("discovered[{index}]: {error}"))?;
        }
        let report = pb::Report { task_id, what: Some(pb::report::What::Completed(done)), at_unix_ms: 0 };
        Ok(Completion { id, token, worker: worker.clone(), report: report.encode_to_vec().into() })
    }

    async fn reject_tasks(&self, request: pb::RejectTasksRequest) -> Result<pb::RejectTasksResponse, Error> {
        let worker = worker(&request.worker)?;
        self.check_count(request.rejections.len())?;
        let mut results: Vec<_> = request.rejections.iter().map(|item| unanswered(&item.id)).collect();
        let items = place(request.rejections, &mut results, |item| rejection(&worker, item));
        let answers = per_shard(
            items,
            |item: &HandBack| item.token.shard.clone(),
            |shard, items| async move {
                let backoff = &self.settings.queues.get(&shard.queue).backoff;
                let answers = self.queue.hand_back(&shard, &items, backoff).await?;
                Ok(answers.into_iter().map(|(code, _dead)| code).collect())
            },
        );
        for (place, code) in answers.await? {
            settle(&mut results[place], code);
        }
        self.reported.notify_one();
        count(Method::Reject, &results);
        Ok(pb::RejectTasksResponse { results })
    }

    async fn extend_tasks(&self, request: pb::ExtendTasksRequest) -> Result<pb::ExtendTasksResponse, Error> {
        let worker = worker(&request.worker)?;
        self.check_count(request.extensions.len())?;
        let mut results: Vec<_> = request.extensions.iter().map(|item| unanswered(&item.id)).collect();
        let items = place(request.extensions, &mut results, |item| {
            let (id, token) = lease(&item.id, &item.lease_token)?;
            let by = item.by.ok_or("by is missing: how long from now, for example 30s")?;
            Ok(Extension { id, token, worker: worker.clone(), by: self.lease("by", by)? })
        });
        let answers = per_shard(
            items,
            |item: &Extension| item.token.shard.clone(),
            |shard, items| async move { self.queue.extend(&shard, &items).await },
        );
        for (place, (code, until)) in answers.await? {
            settle(&mut results[place], code);
            if code == Code::Ok {
                results[place].lease_expires_at = Some(model::timestamp(until));
            }
        }
        count(Method::Extend, &results);
        Ok(pb::ExtendTasksResponse { results })
    }

    fn check_count(&self, items: usize) -> Result<(), Error> {
        let max = self.settings.limits.max_items;
        if items > max {
            return Err(Error::Invalid(format!("{items} items in one call; at most {max}")));
        }
        Ok(())
    }

    fn lease(&self, what: &str, duration: prost_types::Duration) -> Result<Duration, String> {
        let lease = validate::positive(what, duration)?;
        let max = self.settings.limits.max_lease;
        if lease < Duration::from_millis(100) || lease > max {
            let (lease, max) = (humantime::format_duration(lease), humantime::format_duration(max));
            return Err(format!("{what} is {lease}; must be 100ms to {max}"));
        }
        Ok(lease)
    }
}

/// Runs a call and records how it ended. A caller that went away got no answer, and is not recorded.
async fn counted<T>(
    method: Method,
    call: impl Future<Output = Result<T, Error>>,
    is_empty: impl Fn(&T) -> bool,
) -> Result<T, Error> {
    let started = Instant::now();
    let answer = call.await;
    let result = match &answer {
        Ok(response) if is_empty(response) => CallResult::Empty,
        Ok(_) => CallResult::Ok,
        Err(Error::Invalid(_)) => CallResult::Invalid,
        Err(Error::Unavailable(_)) => CallResult::Unavailable,
    };
    metrics::tasks_call(method, result, started.elapsed());
    answer
}

fn worker(name: &str) -> Result<WorkerName, Error> {
    WorkerName::new(name).map_err(|e| Error::Invalid(e.to_string()))
}

fn lease(id: &str, token: &str) -> Result<(TaskId, LeaseToken), String> {
    let id = id.parse().map_err(|_| format!("id {id:?} is not a task id"))?;
    Ok((id, token.parse().map_err(|e: model::InvalidToken| e.to_string())?))
}

fn rejection(worker: &WorkerName, item: pb::Rejection) -> Result<HandBack, String> {
    const MAX_REASON_BYTES: usize = 4096;
    let (id, token) = lease(&item.id, &item.lease_token)?;
    if item.reason.len() > MAX_REASON_BYTES {
        return Err(format!("reason has {} bytes; at most {MAX_REASON_BYTES}", item.reason.len()));
    }
    let delay = item.delay.map(|delay| validate::positive("delay", delay)).transpose()?;
    if let Some(delay) = delay.filter(|delay| *delay > MAX_REJECT_DELAY) {
        return Err(format!("delay is {}s; at most {}s, 365 days", delay.as_secs(), MAX_REJECT_DELAY.as_secs()));
    }
    let how = match item.retry {
        Some(false) => How::Never,
        _ => How::Retry(delay),
    };
    Ok(HandBack { id, token, worker: worker.clone(), how, reason: item.reason })
}

/// Items that can be told apart from the wrong ones, with their places.
fn place<I, T>(
    items: Vec<I>,
    results: &mut [pb::ItemResult],
    check: impl Fn(I) -> Result<T, String>,
) -> Vec<Placed<T>> {
    let mut placed = Vec::with_capacity(items.len());
    for (place, item) in items.into_iter().enumerate() {
        match check(item) {
            Ok(item) => placed.push(Placed { place, item }),
            Err(error) => invalid(&mut results[place], error),
        }
    }
    placed
}

/// One call per shard, all at once; the answers with the items' places.
async fn per_shard<T, A, Fut>(
    items: Vec<Placed<T>>,
    shard_of: impl Fn(&T) -> ShardId,
    call: impl Fn(ShardId, Vec<T>) -> Fut,
) -> Result<Vec<(usize, A)>, Error>
where
    Fut: Future<Output = queue::Result<Vec<A>>>,
{
    let mut shards: BTreeMap<ShardId, (Vec<usize>, Vec<T>)> = BTreeMap::new();
    for placed in items {
        let (places, items) = shards.entry(shard_of(&placed.item)).or_default();
        places.push(placed.place);
        items.push(placed.item);
    }
    let calls = shards.into_iter().map(|(shard, (places, items))| {
        let call = call(shard, items);
        async move { Ok::<_, Error>(places.into_iter().zip(call.await?).collect::<Vec<_>>()) }
    });
    Ok(future::try_join_all(calls).await?.into_iter().flatten().collect())
}

fn unanswered(id: &str) -> pb::ItemResult {
    pb::ItemResult { id: id.to_owned(), ..Default::default() }
}

fn invalid(result: &mut pb::ItemResult, error: String) {
    result.set_status(pb::ItemStatus::Invalid);
    result.error = error;
}

fn settle(result: &mut pb::ItemResult, code: Code) {
    result.set_status(match code {
        Code::Ok | Code::Repeat => pb::ItemStatus::Ok,
        Code::LeaseLost => pb::ItemStatus::LeaseLost,
        Code::AlreadyCompleted => pb::ItemStatus::AlreadyCompleted,
        Code::UnknownTask => pb::ItemStatus::UnknownTask,
        Code::Cancelled => pb::ItemStatus::Cancelled,
    });
}

fn count(method: Method, results: &[pb::ItemResult]) {
    let mut by_status: BTreeMap<&'static str, usize> = BTreeMap::new();
    for result in results {
        let name = result.status().as_str_name();
        *by_status.entry(name.trim_start_matches("ITEM_STATUS_")).or_default() += 1;
    }
    by_status.into_iter().for_each(|(status, count)| metrics::tasks_items(method, status, count));
}

fn leased_tasks(granted: Vec<Granted>) -> Answer {
    let mut answer = Answer::default();
    for one in granted {
        answer.response.tasks.extend(one.tasks.into_iter().filter_map(leased_task));
        answer.deliveries.push(one.delivery);
    }
    answer
}

fn leased_task(leased: Leased) -> Option<pb::LeasedTask> {
    let body = match model::decode_body_blob(&leased.body) {
        Ok(body) => body,
        Err(error) => {
            // Written by ourselves and checked by the fanout; the lease runs out, and at last the task is dead.
            tracing::error!(id = %leased.id, "task {} has a body that cannot be read: {error}", leased.id);
            return None;
        }
    };
    Some(pb::LeasedTask {
        id: leased.id.to_string(),
        queue: leased.token.shard.queue.as_str().to_owned(),
        key: body.key,
        payload_encoding: body.payload_encoding,
        payload: body.payload,
        headers: body.headers,
        traceparent: body.traceparent,
        attempt: leased.token.attempt,
        lease_token: leased.token.to_string(),
        lease_expires_at: Some(model::timestamp(leased.expires_unix_ms)),
        replicas: body.replicas,
        priority: body.priority,
    })
}
