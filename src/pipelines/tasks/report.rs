//! Workers report what became of tasks: completed, rejected, or to be held longer. Each item has its own answer.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::future;
use prost::Message as _;

use super::{Error, Handle, worker};
use crate::{
    model::{
        self, LeaseNumber, LeaseToken, MAX_RECORD_BYTES, QueueName, ShardId, StoredStatus, TaskId, WorkerName, validate,
    },
    queue::{self, Code, Completion, Extension, RejectMode, Rejection},
    store::StateFor,
    telemetry::metrics::{self, Method, Rejected},
    wire::pb,
};

/// Tasks that one completion may report as discovered.
const MAX_DISCOVERED: usize = 10_000;
/// Shards of one call that this process does not know, at most: another process may, but made-up tokens must not cost a call each.
const MAX_UNKNOWN_SHARDS: usize = 100;
/// Longer than anybody waits; a number that no clock holds would never come round.
const MAX_REJECT_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// An item's place in its request, and what a script needs of it.
struct Placed<T> {
    place: usize,
    item: T,
}

impl Handle {
    pub(super) async fn complete_tasks(
        &self,
        request: pb::CompleteTasksRequest,
    ) -> Result<pb::CompleteTasksResponse, Error> {
        let worker = worker(&request.worker)?;
        self.check_count(request.completions.len())?;
        let mut results: Vec<_> = request.completions.iter().map(|item| unanswered(&item.id)).collect();
        let items = place(request.completions, &mut results, |item| self.completion(&worker, item));
        let items = self.of_known_shards(items, &mut results, |item| &item.token.shard);
        let leases: HashMap<_, _> =
            items.iter().map(|placed| (placed.place, (placed.item.id, placed.item.token.lease()))).collect();
        let shards: BTreeSet<_> = items.iter().map(|placed| placed.item.token.shard.clone()).collect();
        let calls =
            items.into_iter().map(|Placed { place, item }| async move { (place, self.queue.complete(item).await) });
        let mut answers = future::join_all(calls).await;
        self.reported.add(shards);
        self.ask_sql(&worker, &leases, &mut answers).await;
        settle_all(&mut results, answers, |_, code| code)?;
        count(Method::Complete, &results);
        Ok(pb::CompleteTasksResponse { results })
    }

    /// Asks SQL about leases that the queue has lost, or takes for others: a repeat is `OK` for as long as SQL has its
    /// result.
    async fn ask_sql(
        &self,
        worker: &WorkerName,
        leases: &HashMap<usize, (TaskId, LeaseNumber)>,
        answers: &mut [(usize, queue::Result<Code>)],
    ) {
        let unsure = |answer: &queue::Result<Code>| {
            matches!(answer, Ok(Code::UnknownTask | Code::LeaseLost | Code::AlreadyCompleted))
        };
        let asked: Vec<_> =
            answers.iter().filter(|(_, answer)| unsure(answer)).map(|(place, _)| leases[place].0).collect();
        if asked.is_empty() {
            return;
        }
        let states = self.store.states_for(worker, &asked).await.map_err(Arc::new);
        let states = states.map(|states| states.into_iter().map(|state| (state.id, state)).collect::<HashMap<_, _>>());
        for (place, answer) in answers.iter_mut().filter(|(_, answer)| unsure(answer)) {
            let (id, lease) = &leases[place];
            match &states {
                Ok(states) => {
                    if let Some(code) = states.get(id).and_then(|state| code_in_sql(state, *lease)) {
                        *answer = Ok(code);
                    }
                }
                Err(error) => *answer = Err(queue::Error::Unsure(Arc::clone(error) as _)),
            }
        }
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
            generation: token.generation,
            grant: token.grant,
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

    pub(super) async fn reject_tasks(&self, request: pb::RejectTasksRequest) -> Result<pb::RejectTasksResponse, Error> {
        let worker = worker(&request.worker)?;
        self.check_count(request.rejections.len())?;
        let mut results: Vec<_> = request.rejections.iter().map(|item| unanswered(&item.id)).collect();
        let items = place(request.rejections, &mut results, |item| rejection(&worker, item));
        let items = self.of_known_shards(items, &mut results, |item| &item.token.shard);
        let shards: BTreeSet<_> = items.iter().map(|placed| placed.item.token.shard.clone()).collect();
        let answers = per_shard(
            items,
            |item: &Rejection| item.token.shard.clone(),
            |shard, items| async move {
                let backoff = &self.settings.queues.get(&shard.queue).backoff;
                self.queue.reject(&shard, &items, backoff).await
            },
        );
        let answers = answers.await;
        self.reported.add(shards);
        let outcome =
            |dead: bool| answers.iter().filter(|(_, answer)| matches!(answer, Ok((Code::Ok, d)) if *d == dead)).count();
        metrics::tasks_rejected(Rejected::Dead, outcome(true));
        metrics::tasks_rejected(Rejected::Retried, outcome(false));
        settle_all(&mut results, answers, |_, (code, _is_dead)| code)?;
        count(Method::Reject, &results);
        Ok(pb::RejectTasksResponse { results })
    }

    pub(super) async fn extend_tasks(&self, request: pb::ExtendTasksRequest) -> Result<pb::ExtendTasksResponse, Error> {
        let worker = worker(&request.worker)?;
        self.check_count(request.extensions.len())?;
        let mut results: Vec<_> = request.extensions.iter().map(|item| unanswered(&item.id)).collect();
        let items = place(request.extensions, &mut results, |item| {
            let (id, token) = lease(&item.id, &item.lease_token)?;
            let by = item.by.ok_or("by is missing: how long from now, for example 30s")?;
            Ok(Extension { id, token, worker: worker.clone(), by: self.lease("by", by)? })
        });
        let items = self.of_known_shards(items, &mut results, |item| &item.token.shard);
        let answers = per_shard(
            items,
            |item: &Extension| item.token.shard.clone(),
            |shard, items| async move { self.queue.extend(&shard, &items).await },
        );
        settle_all(&mut results, answers.await, |result, (code, until)| {
            if code == Code::Ok {
                result.lease_expires_at = Some(model::timestamp(until));
            }
            code
        })?;
        count(Method::Extend, &results);
        Ok(pb::ExtendTasksResponse { results })
    }

    /// Leaves out items whose shards nobody has heard of, beyond so many: each would be a call of its own.
    fn of_known_shards<T>(
        &self,
        items: Vec<Placed<T>>,
        results: &mut [pb::ItemResult],
        shard_of: impl Fn(&T) -> &ShardId,
    ) -> Vec<Placed<T>> {
        let mut unknown = BTreeSet::new();
        let (asked, left_out): (Vec<_>, Vec<_>) = items.into_iter().partition(|placed| {
            let shard = shard_of(&placed.item);
            if self.queue.knows(shard) || unknown.contains(shard) {
                return true;
            }
            unknown.len() < MAX_UNKNOWN_SHARDS && unknown.insert(shard.clone())
        });
        for placed in left_out {
            let why = format!("lease_token names one of more than {MAX_UNKNOWN_SHARDS} unknown queues in one call");
            invalid(&mut results[placed.place], why);
        }
        asked
    }

    fn check_count(&self, items: usize) -> Result<(), Error> {
        let max = self.settings.limits.max_items;
        if items > max {
            return Err(Error::Invalid(format!("{items} items in one call; at most {max}")));
        }
        Ok(())
    }
}

fn lease(id: &str, token: &str) -> Result<(TaskId, LeaseToken), String> {
    let id = id.parse().map_err(|_| format!("id {id:?} is not a task id"))?;
    Ok((id, token.parse().map_err(|e: model::InvalidToken| e.to_string())?))
}

fn rejection(worker: &WorkerName, item: pb::Rejection) -> Result<Rejection, String> {
    const MAX_REASON_BYTES: usize = 4096;
    let (id, token) = lease(&item.id, &item.lease_token)?;
    if item.reason.len() > MAX_REASON_BYTES {
        return Err(format!("reason has {} bytes; at most {MAX_REASON_BYTES}", item.reason.len()));
    }
    let delay = item.delay.map(|delay| validate::positive("delay", delay)).transpose()?;
    if let Some(delay) = delay.filter(|delay| *delay > MAX_REJECT_DELAY) {
        return Err(format!("delay is {}s; at most {}s, 365 days", delay.as_secs(), MAX_REJECT_DELAY.as_secs()));
    }
    let mode = match item.retry {
        Some(false) => RejectMode::Never,
        _ => RejectMode::Retry(delay),
    };
    Ok(Rejection { id, token, worker: worker.clone(), mode, reason: item.reason })
}

/// The answer of SQL, where it knows better than the queue.
fn code_in_sql(state: &StateFor, lease: LeaseNumber) -> Option<Code> {
    match state.completed_under {
        Some(LeaseNumber::UNKNOWN) => Some(Code::Repeat),
        Some(stored) if stored == lease => Some(Code::Repeat),
        Some(_) => Some(Code::AlreadyCompleted),
        None => (state.status == StoredStatus::Completed).then_some(Code::AlreadyCompleted),
    }
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

/// One call per shard, all at once; the answers with the items' places. A shard that fails fails its own items.
async fn per_shard<T, A, Fut>(
    items: Vec<Placed<T>>,
    shard_of: impl Fn(&T) -> ShardId,
    call: impl Fn(ShardId, Vec<T>) -> Fut,
) -> Vec<(usize, queue::Result<A>)>
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
        async move {
            match call.await {
                Ok(answers) => places.into_iter().zip(answers.into_iter().map(Ok)).collect::<Vec<_>>(),
                Err(error) => places.into_iter().map(|place| (place, Err(error.clone()))).collect(),
            }
        }
    });
    future::join_all(calls).await.into_iter().flatten().collect()
}

/// Writes the answers down. An error of the call as a whole when no item has an answer.
fn settle_all<A>(
    results: &mut [pb::ItemResult],
    answers: Vec<(usize, queue::Result<A>)>,
    code_of: impl Fn(&mut pb::ItemResult, A) -> Code,
) -> Result<(), Error> {
    let mut last = None;
    for (place, answer) in answers {
        match answer {
            Ok(answer) => {
                let code = code_of(&mut results[place], answer);
                settle(&mut results[place], code);
            }
            Err(error) => {
                results[place].set_status(pb::ItemStatus::TryLater);
                results[place].error = error.to_string();
                last = Some(error);
            }
        }
    }
    match last {
        Some(error) if results.iter().all(|result| result.status() == pb::ItemStatus::TryLater) => Err(error.into()),
        _ => Ok(()),
    }
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
