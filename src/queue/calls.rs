//! The calls that combine callers: each takes what the combiner has gathered.

use std::{
    fmt::Write as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use redis::Value;
use tokio::sync::mpsc;
use uuid::Uuid;

use super::{
    claimed::Claimed,
    delivery::{Delivery, Granted, Undelivered},
    error::{Error, Result},
    history::History,
    keys::{ShardKeys, wake_channel},
    limits::Limits,
    shard_cache::ShardCache,
    types::{Claim, Code, Completion, Leased, OUTBOX_FULL, OUTBOX_FULL_BYTES, Together},
    wire::{bytes, ms, number},
};
use crate::{
    model::{LeaseToken, QueueName},
    redis_pool::{Batch, Call, Redis, Script, scripts},
    runtime::Clock,
    wire::{self, frame_report},
};

/// The most elements that one claim checks before it returns `more`.
const SCAN_BUDGET: usize = 2000;
/// The most tasks and requests in one script call: far below what Lua's stack holds.
pub(super) const MAX_COMBINED: usize = 1000;
/// About how many bytes the answer to one call may have. While Redis writes it, no other caller is
/// served.
const CALL_BYTES: usize = 16 << 20;
/// How many leases of a shard may be out when memory is full. With none, a Redis in which all tasks
/// wait would stay full.
pub(super) const LEASES_AT_FULL_MEMORY: usize = 16;
/// The bytes in a shard's outbox from which completions are refused. It is far more than where
/// claims pause, so that workers that hold leases by then can still report.
const OUTBOX_MAX_BYTES: usize = 4 * OUTBOX_FULL_BYTES;

/// The bytes that a frame adds to a small report.
const FRAME: usize = 4;

/// What is needed to call a shard's scripts.
#[derive(Clone)]
pub(super) struct Reach {
    pub(super) redis: Redis,
    pub(super) keys: ShardKeys,
    pub(super) clock: Clock,
    pub(super) history: Arc<History>,
    pub(super) secret_grants: Arc<AtomicBool>,
    pub(super) limits: Arc<Limits>,
}

impl Reach {
    pub(super) fn call(&self, script: &'static Script) -> Call {
        self.keys.call(script, self.clock.moved_unix_ms())
    }

    /// The limits of the queue, for the scripts of shards with limit keys.
    pub(super) fn limits_of(&self, queue: &QueueName) -> Vec<u8> {
        self.limits
            .packed(queue, &wake_channel(self.redis.prefix()))
    }
}

pub(super) async fn claim(
    reach: Reach,
    cache: Arc<ShardCache>,
    release: mpsc::UnboundedSender<Undelivered>,
    requests: Vec<Claim>,
) -> Result<Vec<Granted>> {
    let claiming = Claiming::begin(reach, cache, release, requests);
    let answer = claiming.call().run(&mut claiming.reach.redis.conn()).await;
    Ok(claiming.finish(answer.map_err(Error::from)).await?.granted)
}

/// The outcome of a claim.
pub(super) struct Outcome {
    /// One per caller.
    pub(super) granted: Vec<Granted>,
    /// The claim left no element.
    pub(super) is_drained: bool,
}

/// A claim for several callers that has not been answered yet.
pub(super) struct Claiming {
    reach: Reach,
    cache: Arc<ShardCache>,
    release: mpsc::UnboundedSender<Undelivered>,
    requests: Vec<Claim>,
    /// The deliveries that this call reports.
    delivered: Vec<u64>,
    /// The number of offers before this call.
    offers: u64,
    /// The number before its first grant, which is random so that nobody can guess the token of
    /// another worker's lease.
    secret: Option<u64>,
}

/// A random number of 15 digits. The first request with tasks has the next number as its grant, and
/// so on. Scripts compute with grants, so they stay below 2^53, which a number of Lua holds exactly.
fn secret() -> u64 {
    const LEAST: u64 = 100_000_000_000_000;
    const RANGE: u64 = 820_000_000_000_000;
    // The upper half contains the version of the UUID, so take the lower one.
    let random = Uuid::new_v4().as_u64_pair().1;
    LEAST + (random & (u64::MAX >> 2)) % RANGE
}

impl Claiming {
    pub(super) fn begin(
        reach: Reach,
        cache: Arc<ShardCache>,
        release: mpsc::UnboundedSender<Undelivered>,
        requests: Vec<Claim>,
    ) -> Self {
        let delivered = cache.take_delivered();
        let offers = cache.offers();
        let secret = reach.secret_grants.load(Ordering::Relaxed).then(secret);
        Self {
            reach,
            cache,
            release,
            requests,
            delivered,
            offers,
            secret,
        }
    }

    pub(super) fn call(&self) -> Call {
        self.ask(None)
    }

    /// `leases_max`: at full memory, the leases that may be out.
    fn ask(&self, leases_max: Option<usize>) -> Call {
        let is_limited = self.cache.is_limited();
        let script = match (is_limited, leases_max) {
            (false, None) => &scripts::CLAIM,
            (false, Some(_)) => &scripts::CLAIM_AT_FULL_MEMORY,
            (true, None) => &scripts::CLAIM_LIMITED,
            (true, Some(_)) => &scripts::CLAIM_LIMITED_AT_FULL_MEMORY,
        };
        let mut call = self.reach.call(script).of_items(self.requests.len());
        call.arg(SCAN_BUDGET)
            .arg(OUTBOX_FULL)
            .arg(OUTBOX_FULL_BYTES)
            .arg(CALL_BYTES);
        call.arg(leases_max.map(|max| max.to_string()).unwrap_or_default());
        call.arg(self.delivered.len()).arg(&self.delivered);
        for (place, request) in self.requests.iter().enumerate() {
            let most = leases_max.map_or(request.max_tasks, |max| usize::from(place < max));
            call.arg(request.worker.as_str())
                .arg(ask_text(request, most, self.secret));
        }
        if is_limited {
            call.arg(self.reach.limits_of(&self.cache.id.queue));
        }
        call
    }

    /// Treats the shard as empty, so that its callers keep waiting, and wake nobody in vain.
    pub(super) fn give_up(self) -> Result<Outcome> {
        self.cache.put_back_delivered(self.delivered);
        self.cache.note_drained(self.offers);
        // This makes the next pass ask the shard all the same.
        self.cache.note_offer();
        Err(Error::NoGeneration)
    }

    /// Reads the answer to [`Self::call`]. If memory is full, claims again for fewer tasks.
    pub(super) async fn finish(self, mut answer: Result<Value>) -> Result<Outcome> {
        if let Err(Error::Limited) = answer {
            self.cache.note_limited();
            let again = self.ask(None);
            answer = again
                .run(&mut self.reach.redis.conn())
                .await
                .map_err(Error::from);
        }
        if answer.as_ref().is_err_and(Error::is_out_of_memory) {
            let trickle = self.ask(Some(LEASES_AT_FULL_MEMORY));
            answer = trickle
                .run(&mut self.reach.redis.conn())
                .await
                .map_err(Error::from);
        }
        let Self {
            reach,
            cache,
            release,
            requests,
            delivered,
            offers,
            secret,
        } = self;
        let claimed = match answer.and_then(Claimed::read) {
            Ok(claimed) => {
                let mut claimed = claimed.with_secret(secret);
                claimed.tells_time = reach.history.is_on();
                claimed
            }
            Err(error) => {
                cache.put_back_delivered(delivered);
                cache.note_offer();
                return Err(error);
            }
        };
        if claimed.wrote_nothing && !delivered.is_empty() {
            cache.put_back_delivered(delivered);
        }
        match claimed.left {
            Some(0) => cache.note_drained(offers),
            Some(priorities) => cache.note_priorities(offers, priorities),
            None => cache.forget_priorities(),
        }
        if let Some(wait_ms) = claimed.next_start_ms {
            let at = reach.clock.now_unix_ms() + wait_ms;
            reach.limits.note_start(&cache.id, at);
        }
        let is_drained = claimed.left == Some(0);
        let granted = read_grants(claimed, requests, &cache, &release)?;
        if let Some(shortest) = granted
            .iter()
            .flat_map(|one| &one.tasks)
            .map(|task| task.lease)
            .min()
        {
            cache.note_lease(shortest);
        }
        Ok(Outcome {
            granted,
            is_drained,
        })
    }
}

/// The parameters of a request as one text, because most requests of a call have the same.
fn ask_text(request: &Claim, max_tasks: usize, secret: Option<u64>) -> String {
    let lease_ms = request.lease.map_or(0, ms);
    let priority = request.priority.map_or(0, |priority| priority as u8);
    let mut text = format!(
        "{max_tasks} {} {} {lease_ms} {priority}",
        request.max_bytes,
        u8::from(request.is_first)
    );
    if let Some(secret) = secret {
        // Writing to a `String` cannot fail.
        write!(text, " {secret}").ok();
    }
    text
}

fn read_grants(
    mut claimed: Claimed,
    requests: Vec<Claim>,
    cache: &Arc<ShardCache>,
    release: &mpsc::UnboundedSender<Undelivered>,
) -> Result<Vec<Granted>> {
    let mut granted = Vec::with_capacity(requests.len());
    for (place, Claim { worker, lease, .. }) in requests.into_iter().enumerate() {
        let shard = cache.id.clone();
        let cache = Arc::clone(cache);
        let release = release.clone();
        let mut delivery = Delivery {
            worker,
            leases: Vec::new(),
            shard,
            cache,
            release,
        };
        let mut tasks = claimed.next_request(&delivery.shard, lease)?;
        let is_overdue = |task: &Leased| {
            wire::deadline_of(&task.body).is_some_and(|at| at <= claimed.now_unix_ms)
        };
        let overdue: Vec<Leased> = match tasks.iter().any(is_overdue) {
            true => tasks.extract_if(.., |task| is_overdue(task)).collect(),
            false => Vec::new(),
        };
        let overdue_count = overdue.len();
        delivery.put_off(overdue);
        delivery.leases = tasks
            .iter()
            .map(|task| (task.id, task.token.clone()))
            .collect();
        let more = claimed.has_more(place);
        granted.push(Granted {
            tasks,
            more,
            overdue: overdue_count,
            again_soon: claimed.again_soon,
            delivery,
        });
    }
    Ok(granted)
}

pub(super) async fn peek(reach: Reach, cache: Arc<ShardCache>, callers: usize) -> Result<Vec<u8>> {
    let offers = cache.offers();
    let answer = reach
        .call(&scripts::PEEK)
        .of_items(callers)
        .run(&mut reach.redis.conn())
        .await;
    if answer.is_err() {
        cache.note_offer();
    }
    let priorities = number(Some(answer?))?;
    if priorities == 0 {
        cache.note_drained(offers);
    }
    cache.note_priorities(offers, priorities);
    Ok(vec![priorities; callers])
}

/// Completes what these callers have. Answers per caller, and per completion of each. `cache`: of
/// the shard, if this process knows it.
pub(super) async fn complete(
    reach: Reach,
    cache: Option<Arc<ShardCache>>,
    callers: Vec<Together>,
) -> Result<Vec<Vec<Code>>> {
    let completions: Vec<&Completion> = callers.iter().flat_map(|caller| caller.iter()).collect();
    // Only the row for limited shards reads reports about limit keys.
    let mut is_limited = cache.as_ref().is_some_and(|cache| cache.is_limited())
        || completions.iter().any(|item| !item.limit.is_empty());
    let mut answer = ask_complete(&reach, &completions, is_limited).await;
    if let Err(Error::Limited) = answer {
        if let Some(cache) = &cache {
            cache.note_limited();
        }
        is_limited = true;
        answer = ask_complete(&reach, &completions, is_limited).await;
    }
    let answer = bytes(Some(answer?))?;
    let Some((codes, rest)) = answer.split_at_checked(completions.len()) else {
        return Err(Error::Answer(format!(
            "{} codes for {} completions",
            answer.len(),
            completions.len()
        )));
    };
    if let (Some(cache), true) = (&cache, rest.starts_with(b"0")) {
        cache.note_due();
    }
    if let (Some(cache), true) = (&cache, is_limited) {
        // What waits for its time stands behind a space.
        let text = std::str::from_utf8(rest).unwrap_or_default();
        let wait_ms: Option<i64> = text.split_once(' ').and_then(|(_, ms)| ms.parse().ok());
        if let Some(wait_ms) = wait_ms {
            let at = reach.clock.now_unix_ms() + wait_ms;
            reach.limits.note_start(&cache.id, at);
        }
    }
    let mut codes = codes
        .iter()
        .map(|digit| Code::from_number(i64::from(*digit) - i64::from(b'0')));
    callers
        .iter()
        .map(|caller| codes.by_ref().take(caller.len()).collect())
        .collect()
}

async fn ask_complete(
    reach: &Reach,
    completions: &[&Completion],
    is_limited: bool,
) -> Result<Value> {
    let script = if is_limited {
        &scripts::COMPLETE_LIMITED
    } else {
        &scripts::COMPLETE
    };
    let mut call = reach.call(script).of_items(completions.len());
    // The parts that the items share are sent once.
    let generation = completions.first().map_or(0, |item| item.token.generation);
    let ids: Vec<u8> = completions
        .iter()
        .flat_map(|item| *item.id.as_bytes())
        .collect();
    let room = completions
        .iter()
        .map(|item| item.report.len() + FRAME)
        .sum();
    let mut frames = Vec::with_capacity(room);
    let mut numbers = Vec::with_capacity(8 * completions.len());
    let mut number = |number: usize| {
        let number = u32::try_from(number).expect("a result is far below 4 GiB");
        numbers.extend(number.to_be_bytes());
    };
    for item in completions {
        number(frame_report(&item.report, &mut frames));
    }
    // Tasks that a worker got together are mostly completed together.
    let runs =
        || completions.chunk_by(|a, b| a.token.grant == b.token.grant && a.worker == b.worker);
    runs().for_each(|run| number(run.len()));
    call.arg(OUTBOX_MAX_BYTES)
        .arg(generation)
        .arg(ids)
        .arg(frames)
        .arg(numbers);
    for item in runs().map(|run| run[0]) {
        call.arg(format!("h{}:{}", item.token.grant, item.worker));
    }
    for (place, item) in completions.iter().enumerate() {
        let LeaseToken {
            generation: of_item,
            attempt,
            ..
        } = item.token;
        if of_item != generation || attempt != 1 || !item.limit.is_empty() {
            call.arg(place + 1).arg(of_item).arg(attempt);
            if is_limited {
                call.arg(ms(item.limit.hold)).arg(ms(item.limit.pace));
            }
        }
    }
    Ok(match reach.redis.durability() {
        None => call.run(&mut reach.redis.conn()).await?,
        Some(durability) => {
            let (mut conn, _turn) = reach.redis.waiting_conn().await?;
            let mut batch = Batch::default();
            batch.script(call);
            durability.ask(&mut batch, reach.keys.waited());
            let mut answers = batch.run_all(&mut conn).await?;
            durability.judge_last(&mut answers)?;
            answers.swap_remove(0)
        }
    })
}
