//! Workers get tasks: one pass over all shards of the named queues, then claims, the most urgent
//! first. If there is nothing, the call waits.

use std::{
    collections::{BTreeSet, HashSet},
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher},
    sync::{Arc, atomic::Ordering},
    time::{Duration, SystemTime},
};

use futures::{StreamExt, future};
use tokio::time::Instant;

use super::{
    error::Error,
    handle::{Handle, worker},
    traced,
    weights::Weights,
};
use crate::{
    model::{GetTasks, HTTP_QUEUE, LeasedTask, Priority, QueueName, WorkerName, validate},
    queue::{self, Claim, Delivery, Granted, Leased, Shard},
    telemetry::{metrics, traces},
    wire,
};

/// The most bytes of tasks in one answer, unless the worker asks for another limit. gRPC clients
/// accept 4 MiB by default; the ids, tokens and names of 1,000 tasks need the rest. A single task
/// may be larger.
const ANSWER_BYTES: usize = (3 << 20) + (512 << 10);
/// The most bytes that a worker may ask for.
const MAX_ANSWER_BYTES: u64 = 64 << 20;
/// The most queues that one call may name.
const MAX_QUEUES: usize = 100;
/// The longest wait after a pass that no wake will follow: claims were refused because Redis or an
/// outbox was full, or the worker rests from a task.
const AGAIN_SOON: Duration = Duration::from_secs(1);
/// How many tasks whose deadline has passed one pass may put off. There are more only while nobody
/// ends them.
const MOST_OVERDUE: usize = 1000;
/// The most shards that one call asks concurrently.
const PEEKS_AT_ONCE: usize = 64;

/// Leased tasks, and their delivery to the worker.
///
/// The sender of the answer calls [`Delivery::delivered`] on each delivery when the worker has it.
/// A dropped delivery gives its leases back at no cost.
#[derive(Default)]
pub struct Leases {
    pub tasks: Vec<LeasedTask>,
    pub deliveries: Vec<Delivery>,
}

impl Leases {
    /// Marks the tasks as delivered and returns them.
    pub fn deliver(self) -> Vec<LeasedTask> {
        self.deliveries.into_iter().for_each(Delivery::delivered);
        self.tasks
    }
}

/// A checked request for tasks that are available now.
pub struct QueueRequest {
    queues: Vec<QueueName>,
    weights: Weights,
    claim: Claim,
}

/// What one pass has found so far.
struct Found {
    claim: Claim,
    /// The number of tasks at which to stop: all, or what is left of a queue's share.
    most: usize,
    /// The bytes at which to stop, likewise.
    most_bytes: usize,
    granted: Vec<Granted>,
    tasks: usize,
    bytes: usize,
    /// The error of the last shard that did not answer.
    error: Option<Error>,
    /// At least one shard has answered.
    any_asked: bool,
    /// Tasks that were left out because their deadline has passed.
    overdue: usize,
    /// Try again soon: no wake will come when a shard has something for this call.
    again_soon: bool,
}

impl Found {
    fn new(claim: Claim) -> Self {
        Self {
            most: claim.max_tasks,
            most_bytes: claim.max_bytes,
            claim,
            granted: Vec::new(),
            tasks: 0,
            bytes: 0,
            error: None,
            any_asked: false,
            overdue: 0,
            again_soon: false,
        }
    }

    fn is_enough(&self) -> bool {
        self.tasks >= self.most || self.bytes >= self.most_bytes
    }

    fn rest(&self, priority: Option<Priority>) -> Claim {
        let max_tasks = self.most - self.tasks;
        let max_bytes = self.most_bytes - self.bytes;
        Claim {
            max_tasks,
            max_bytes,
            is_first: self.tasks == 0,
            priority,
            ..self.claim.clone()
        }
    }

    fn add(&mut self, shard: &Shard, granted: Granted) {
        self.tasks += granted.len();
        self.bytes = (self.bytes + granted.bytes()).min(self.claim.max_bytes);
        metrics::tasks_claimed(shard.id.queue.as_str(), granted.len());
        self.granted.push(granted);
    }
}

impl Handle {
    /// Leases tasks, and waits only if there are none. Dropping the future gives back what it has
    /// leased.
    pub async fn get(&self, request: GetTasks) -> Result<Leases, Error> {
        let queues = queues(&request.queues)?;
        let weights = Weights::new(&request.weights, &queues)?;
        let (claim, wait) = self.claim(&request)?;
        self.wait_for(&queues, &weights, || claim.clone(), wait)
            .await
    }

    /// Leases tasks of a queue that workers cannot ask for.
    pub async fn get_own(&self, queue: QueueName, request: GetTasks) -> Result<Leases, Error> {
        let (claim, wait) = self.claim(&request)?;
        self.wait_for(&[queue], &Weights::default(), || claim.clone(), wait)
            .await
    }

    /// Checks a request for tasks that are available now, so it must not have a wait.
    pub fn queue_request(&self, request: &GetTasks) -> Result<QueueRequest, Error> {
        if !request.wait.is_zero() {
            return Err(Error::Invalid(
                "next has a wait: a report does not wait for tasks".into(),
            ));
        }
        let queues = queues(&request.queues)?;
        Ok(QueueRequest {
            weights: Weights::new(&request.weights, &queues)?,
            queues,
            claim: self.claim(request)?.0,
        })
    }

    /// Leases tasks that are available, as far as this process knows; none if the process is
    /// stopping.
    pub async fn get_now(&self, wish: QueueRequest) -> Result<Leases, Error> {
        if self.stop.is_cancelled() {
            return Ok(Leases::default());
        }
        let since = traces::now();
        let QueueRequest {
            queues,
            weights,
            claim,
        } = wish;
        match Box::pin(self.look(&queues, &weights, &claim, false)).await {
            Found {
                granted,
                error: Some(error),
                ..
            } if granted.is_empty() => Err(error),
            found => Ok(leases(found.granted, &claim.worker, since)),
        }
    }

    /// Asks `claim` for the claim to make in each pass, and waits only if there is nothing.
    pub(super) async fn wait_for(
        &self,
        queues: &[QueueName],
        weights: &Weights,
        claim: impl Fn() -> Claim,
        wait: Duration,
    ) -> Result<Leases, Error> {
        let deadline = Instant::now() + wait;
        let waiter = self.queue.wakes().waiter(queues);
        let mut listening = waiter.listen();
        let mut look_at = queues.to_vec();
        let mut batons = waiter.take_batons(&[]);
        loop {
            let since = traces::now();
            let left = deadline.saturating_duration_since(Instant::now());
            let is_last = left.is_zero() || self.stop.is_cancelled();
            let claim = claim();
            // Boxed, so that a waiting call, of which there may be ten thousand, need not have
            // space for a pass.
            let look = Box::pin(async {
                let before = self.queue.offers(batons.queues());
                let found = self.look(&look_at, weights, &claim, is_last).await;
                // A paused queue counts as empty, because its resumption wakes all.
                let is_empty =
                    |queue: &QueueName| self.queue.is_paused(queue) || before.are_taken(queue);
                batons.pass_on(!found.granted.is_empty(), is_empty);
                // The call waits on for the other shards when one fails.
                let wait_on = found.granted.is_empty()
                    && !is_last
                    && (found.error.is_none() || found.any_asked);
                match wait_on {
                    false => Ok(found),
                    true if found.again_soon => Err(left.min(AGAIN_SOON)),
                    true => Err(left),
                }
            });
            let found = tokio::select! {
                found = waiter.look_then_wait(&mut listening, look) => found,
                () = self.stopped_while_waiting(is_last) => Err(queues.to_vec()),
            };
            match found {
                Ok(Found {
                    granted,
                    error: Some(error),
                    ..
                }) if granted.is_empty() => return Err(error),
                Ok(found) => return Ok(leases(found.granted, &claim.worker, since)),
                // Only woken queues have something new. When the time is over, the call asks all
                // queues once more.
                Err(woken) if woken.is_empty() => queues.clone_into(&mut look_at),
                Err(woken) => {
                    batons = waiter.take_batons(&woken);
                    look_at = woken;
                }
            }
        }
    }

    pub(super) fn claim(&self, request: &GetTasks) -> Result<(Claim, Duration), Error> {
        let worker = worker(&request.worker)?;
        let limits = &self.settings.limits;
        let max_tasks = request.max_tasks.max(1) as usize;
        if max_tasks > limits.max_items {
            return Err(Error::Invalid(format!(
                "max_tasks is {max_tasks}; at most {}",
                limits.max_items
            )));
        }
        if let Some(lease) = request.lease_duration {
            validate::lease_duration("lease_duration", lease, limits.max_lease)
                .map_err(Error::Invalid)?;
        }
        let lease = request.lease_duration;
        let wait = request.wait.min(limits.max_wait);
        let max_bytes = match request.max_bytes.min(MAX_ANSWER_BYTES) {
            0 => ANSWER_BYTES,
            bytes => usize::try_from(bytes).unwrap_or(ANSWER_BYTES),
        };
        // The memory budget counts an answer as at most this part of itself.
        let max_bytes = max_bytes.min(limits.request_budget / 4);
        Ok((
            Claim {
                worker,
                max_tasks,
                max_bytes,
                is_first: true,
                lease,
                priority: None,
            },
            wait,
        ))
    }

    /// Returns when a stop ends long polls. The leases of a pass that it interrupts are given back.
    async fn stopped_while_waiting(&self, is_last: bool) {
        if is_last {
            future::pending::<()>().await;
        }
        self.stop.cancelled().await;
    }

    /// Makes one pass over all shards of the queues, until there is enough.
    ///
    /// A call that can wait leaves out the shards that are known to be empty, and trusts the last
    /// peeks and claims: a wake tells it of what has come since.
    async fn look(
        &self,
        queues: &[QueueName],
        weights: &Weights,
        claim: &Claim,
        is_last: bool,
    ) -> Found {
        // A paused queue counts as empty. Its resumption is a wake.
        let queues = queues.iter().filter(|queue| !self.queue.is_paused(queue));
        let mut shards: Vec<_> = queues
            .flat_map(|queue| self.queue.shards_of(queue))
            .collect();
        let mut found = Found::new(claim.clone());
        if !is_last {
            let all = shards.len();
            shards.retain(|shard| !shard.is_drained());
            found.any_asked = shards.len() < all;
        }
        if let [shard] = &shards[..] {
            // The script of a single shard knows the priorities.
            self.take(shard, None, &mut found).await;
            return found;
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        // Rotate the shards, so that none is always the last of its priority.
        let first = (turn + turn / TURNS) % shards.len().max(1);
        shards.rotate_left(first);
        let peeks = shards
            .into_iter()
            .map(|shard| async move { (self.queue.peek(&shard, !is_last).await, shard) });
        let peeks: Vec<_> = futures::stream::iter(peeks)
            .buffered(PEEKS_AT_ONCE)
            .collect()
            .await;
        if !weights.is_empty() {
            let mut shared = 0;
            for (queue, share) in weights.shares(&with_tasks(&peeks), claim.max_tasks, turn) {
                shared += share;
                found.most = found.tasks + share;
                // Large tasks fill an answer before they are many, so the bytes are shared, too.
                // What the queues before have left of theirs goes to this one: it may be less than
                // one task.
                found.most_bytes = part(claim.max_bytes, shared, claim.max_tasks);
                let of_queue = |shard: &Shard| shard.id.queue == *queue;
                self.take_in_order(&peeks, of_queue, turn, is_last, &mut found)
                    .await;
            }
            // What some queues have less of than their share goes to the others.
            found.most = claim.max_tasks;
            found.most_bytes = claim.max_bytes;
        }
        self.take_in_order(&peeks, |_| true, turn, is_last, &mut found)
            .await;
        found
    }

    /// Claims the most urgent tasks of these shards, until there is enough.
    async fn take_in_order(
        &self,
        peeks: &[Peeked],
        takes: impl Fn(&Shard) -> bool,
        turn: usize,
        is_last: bool,
        found: &mut Found,
    ) {
        for priority in order(turn) {
            for (peeked, shard) in peeks {
                if found.is_enough() {
                    return;
                }
                if !takes(shard) {
                    continue;
                }
                match peeked {
                    // Another call may have emptied it since.
                    Ok(priorities)
                        if priorities.contains(&priority) && (is_last || !shard.is_drained()) =>
                    {
                        self.take(shard, Some(priority), found).await;
                    }
                    Ok(_) => found.any_asked = true,
                    Err(error) => found.error = Some(error.clone().into()),
                }
            }
        }
    }

    /// Claims what the shard has, until there is enough.
    async fn take(&self, shard: &Arc<Shard>, priority: Option<Priority>, found: &mut Found) {
        loop {
            match self.queue.claim(shard, found.rest(priority)).await {
                Ok(granted) => {
                    found.any_asked = true;
                    found.again_soon |= granted.again_soon;
                    found.overdue += granted.overdue;
                    let more = granted.more || granted.overdue > 0;
                    if !granted.is_empty() {
                        found.add(shard, granted);
                    }
                    if !more || found.is_enough() {
                        return;
                    }
                    if found.overdue >= MOST_OVERDUE {
                        found.again_soon = true;
                        return;
                    }
                }
                Err(error) => {
                    tracing::debug!(shard = %shard.id, "cannot claim from {}: {error}", shard.id);
                    found.error = Some(error.into());
                    return;
                }
            }
        }
    }
}

/// Returns `count` of `of` equal parts of `bytes`.
fn part(bytes: usize, count: usize, of: usize) -> usize {
    let part = bytes as u128 * count as u128 / of as u128;
    usize::try_from(part).unwrap_or(bytes)
}

/// A shard, and the priorities of which it has tasks.
type Peeked = (queue::Result<Vec<Priority>>, Arc<Shard>);

/// The queues that have tasks.
fn with_tasks(peeks: &[Peeked]) -> BTreeSet<&QueueName> {
    peeks
        .iter()
        .filter(|(peeked, _)| peeked.as_ref().is_ok_and(|has| !has.is_empty()))
        .map(|(_, shard)| &shard.id.queue)
        .collect()
}

/// After this many calls the start of the next pass moves on by one more.
const TURNS: usize = 20;

/// Returns the order of priorities. It is strict, except that about one call in ten tries a lower
/// priority first, so that none starves. Calls for one queue may come in a fixed rhythm. Hashing
/// the turn breaks it, so every queue gets such calls. Within one shard, `claim.lua` decides.
fn order(turn: usize) -> [Priority; 3] {
    let [high, medium, low] = Priority::ALL;
    match BuildHasherDefault::<DefaultHasher>::default().hash_one(turn) % 20 {
        9 => [medium, low, high],
        19 => [low, medium, high],
        _ => [high, medium, low],
    }
}

pub(super) fn queues(names: &[String]) -> Result<Vec<QueueName>, Error> {
    if names.is_empty() {
        return Err(Error::Invalid("queues is empty: name at least one".into()));
    }
    if names.len() > MAX_QUEUES {
        return Err(Error::Invalid(format!(
            "{} queues; at most {MAX_QUEUES}",
            names.len()
        )));
    }
    if names.iter().any(|name| name == HTTP_QUEUE) {
        return Err(Error::Invalid(validate::queue_is_own()));
    }
    let mut seen = HashSet::with_capacity(names.len());
    let names = names.iter().filter(|name| seen.insert(name.as_str()));
    names
        .map(|name| QueueName::new(name).map_err(|e| Error::Invalid(e.to_string())))
        .collect()
}

fn leases(granted: Vec<Granted>, worker: &WorkerName, since: SystemTime) -> Leases {
    let mut leases = Leases::default();
    for one in granted {
        let tasks = one.tasks.into_iter().filter_map(leased_task);
        leases
            .tasks
            .extend(tasks.map(|task| traced::claimed(task, worker, since)));
        leases.deliveries.push(one.delivery);
    }
    leases
}

fn leased_task(leased: Leased) -> Option<LeasedTask> {
    let Leased {
        id,
        token,
        body,
        expires_unix_ms,
        lease,
    } = leased;
    match wire::read_body(id, &body) {
        Ok(body) => Some(LeasedTask {
            id,
            token,
            expires_unix_ms,
            lease,
            body,
        }),
        Err(error) => {
            // Another program wrote this body. The lease runs out, and the task ends up dead.
            tracing::error!(%id, "task {id} has a body that cannot be read: {error}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_in_any_rhythm_begin_with_each_priority_now_and_then() {
        for (rhythm, beat) in
            (1..=40).flat_map(|rhythm| (0..rhythm).map(move |beat| (rhythm, beat)))
        {
            let first = |call: usize| order(beat + rhythm * call)[0];
            let lower = (0..200)
                .map(first)
                .filter(|priority| *priority != Priority::High)
                .count();
            assert!(
                (2..60).contains(&lower),
                "{lower} of 200 calls, each {rhythm}th"
            );
            assert!(
                (0..200)
                    .map(first)
                    .any(|priority| priority == Priority::Low),
                "each {rhythm}th"
            );
        }
    }
}
