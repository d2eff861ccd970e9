//! What all batch calls have in common: items are checked, sent to their shards, and answered in
//! their order.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
};

use futures::future;

use super::{error::Error, handle::Handle};
use crate::{
    model::{
        ECHO, InvalidToken, Item, ItemAnswer, ItemStatus, LeaseToken, ShardId, TaskId, shorten,
    },
    queue::{self, Code},
};

/// The most unknown shards of one call. Another process may know them, but made-up tokens must not
/// cost a call each.
const MAX_UNKNOWN_SHARDS: usize = 100;

/// A checked item and its index in its request.
pub(super) struct Placed<T> {
    pub(super) place: usize,
    pub(super) shard: ShardId,
    pub(super) item: T,
}

/// The queue's answers, with the items' indices.
pub(super) type Outcomes<A> = Vec<(usize, queue::Result<A>)>;

impl Handle {
    /// Checks the items. The returned answers are final for the invalid ones.
    pub(super) fn accept<I, T>(
        &self,
        items: Vec<Item<I>>,
        check: impl Fn(TaskId, LeaseToken, I) -> Result<T, String>,
    ) -> Result<(Vec<ItemAnswer>, Vec<Placed<T>>), Error> {
        let max = self.settings.limits.max_items;
        if items.len() > max {
            return Err(Error::Invalid(format!(
                "{} items in one call; at most {max}",
                items.len()
            )));
        }
        let mut answers = Vec::with_capacity(items.len());
        let mut accepted = Vec::with_capacity(items.len());
        let mut unknown = BTreeSet::new();
        let mut last = None;
        for (
            place,
            Item {
                id,
                lease_token,
                report,
            },
        ) in items.into_iter().enumerate()
        {
            let checked = parse_lease(&id, lease_token, &mut last).and_then(|(task, token)| {
                let shard = token.shard.clone();
                let item = check(task, token, report?)?;
                self.limit_unknown(&shard, &mut unknown)?;
                Ok(Placed { place, shard, item })
            });
            answers.push(match checked {
                Ok(placed) => {
                    accepted.push(placed);
                    ItemAnswer::new(id, ItemStatus::TryLater)
                }
                // An invalid id can be megabytes long: shorten it before echoing it.
                Err(error) => ItemAnswer::invalid(shorten(&id, ECHO).into_owned(), error),
            });
        }
        Ok((answers, accepted))
    }

    /// Refuses unknown shards beyond the limit: each would be a call of its own.
    fn limit_unknown(
        &self,
        shard: &ShardId,
        unknown: &mut BTreeSet<ShardId>,
    ) -> Result<(), String> {
        if self.queue.knows(shard) || unknown.contains(shard) {
            return Ok(());
        }
        if unknown.len() >= MAX_UNKNOWN_SHARDS {
            return Err(format!(
                "lease_token names one of more than {MAX_UNKNOWN_SHARDS} unknown queues in one call"
            ));
        }
        unknown.insert(shard.clone());
        Ok(())
    }
}

/// Tasks that were leased in one call share a token, so the last token is parsed only once.
fn parse_lease(
    id: &str,
    lease_token: String,
    last: &mut Option<(String, LeaseToken)>,
) -> Result<(TaskId, LeaseToken), String> {
    let id = id
        .parse()
        .map_err(|_| format!("id {:?} is not a task id", shorten(id, ECHO)))?;
    let token = match last {
        Some((text, token)) if *text == lease_token => token.clone(),
        _ => {
            let token: LeaseToken = lease_token
                .parse()
                .map_err(|e: InvalidToken| e.to_string())?;
            last.insert((lease_token, token)).1.clone()
        }
    };
    Ok((id, token))
}

pub(super) fn shards<T>(items: &[Placed<T>]) -> BTreeSet<ShardId> {
    items.iter().map(|placed| placed.shard.clone()).collect()
}

/// Groups the items by shard, with their indices.
pub(super) fn by_shard<T>(items: Vec<Placed<T>>) -> BTreeMap<ShardId, (Vec<usize>, Vec<T>)> {
    let mut by_shard: BTreeMap<ShardId, (Vec<usize>, Vec<T>)> = BTreeMap::new();
    for Placed { place, shard, item } in items {
        let (places, items) = by_shard.entry(shard).or_default();
        places.push(place);
        items.push(item);
    }
    by_shard
}

/// Calls all shards concurrently, each once. If one fails, only its own items fail.
pub(super) async fn per_shard<T, A, Fut>(
    items: Vec<Placed<T>>,
    call: impl Fn(ShardId, Vec<T>) -> Fut,
) -> Outcomes<A>
where
    Fut: Future<Output = queue::Result<Vec<A>>>,
{
    let calls = by_shard(items).into_iter().map(|(shard, (places, items))| {
        let call = call(shard, items);
        async move {
            match call.await {
                Ok(answers) => places
                    .into_iter()
                    .zip(answers.into_iter().map(Ok))
                    .collect::<Vec<_>>(),
                Err(error) => places
                    .into_iter()
                    .map(|place| (place, Err(error.clone())))
                    .collect(),
            }
        }
    });
    future::join_all(calls)
        .await
        .into_iter()
        .flatten()
        .collect()
}

/// Adds the outcomes to the answers. Returns an error if no item has an answer.
pub(super) fn answer<A>(
    mut answers: Vec<ItemAnswer>,
    outcomes: Outcomes<A>,
    code_of: impl Fn(&mut ItemAnswer, A) -> Code,
) -> Result<Vec<ItemAnswer>, Error> {
    let mut last = None;
    for (place, outcome) in outcomes {
        let answer = &mut answers[place];
        match outcome {
            Ok(outcome) => {
                let code = code_of(answer, outcome);
                if code == Code::NotLimited {
                    answer.error = "limit is given, and the task has no limit key".to_owned();
                }
                answer.status = status(code);
            }
            Err(error) => {
                answer.error = error.to_string();
                last = Some(error);
            }
        }
    }
    match last {
        Some(error)
            if answers
                .iter()
                .all(|answer| answer.status == ItemStatus::TryLater) =>
        {
            Err(error.into())
        }
        _ => Ok(answers),
    }
}

fn status(code: Code) -> ItemStatus {
    match code {
        Code::Ok | Code::Repeat => ItemStatus::Ok,
        Code::LeaseLost => ItemStatus::LeaseLost,
        Code::AlreadyCompleted => ItemStatus::AlreadyCompleted,
        Code::UnknownTask => ItemStatus::UnknownTask,
        Code::Cancelled => ItemStatus::Cancelled,
        Code::NotLimited => ItemStatus::Invalid,
    }
}
