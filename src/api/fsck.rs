//! fsck and dumps: whether SQL, the bus and Redis agree, and what Redis holds.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, Instant},
};

use serde_json::Value;
use tracing::Instrument as _;

use super::{
    access::{reaches, reaches_all_of, who},
    error::Error,
    handle::{Api, span},
    reader::Reader,
};
use crate::{
    model::{Act, Caller, ECHO, Fsck, FsckPage, QueueName, ShardId, shorten},
    pipelines::checking::{self, Checker, Failed, Found, Pace},
    queue,
    store::Walked,
};

/// A call stops after this time, or with this many findings, and returns a cursor for the rest.
const PART: Duration = Duration::from_secs(2);
const MOST_FINDS: usize = 1000;
/// How many published tasks are compared at a time.
const TASKS: u32 = 1000;
/// How many entries of each key a dump has: by default, and at most.
const DUMPED: usize = 100;
const MOST_DUMPED: usize = 1000;

/// Where a part of the work begins.
#[derive(Clone, Debug, PartialEq)]
enum Place {
    Counts,
    /// The shards after this one.
    Shards(Option<ShardId>),
    /// The published tasks after this one.
    Tasks(Option<Walked>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Counts => Ok(()),
            Self::Shards(None) => f.write_str("shards"),
            Self::Shards(Some(shard)) => write!(f, "shards/{shard}"),
            Self::Tasks(None) => f.write_str("tasks"),
            Self::Tasks(Some(Walked { queue, id })) => write!(f, "tasks/{queue}/{id}"),
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shard = |text: &str| {
            let (queue, number) = text.rsplit_once(':')?;
            Some(ShardId {
                queue: QueueName::new(queue).ok()?,
                number: number.parse().ok()?,
            })
        };
        let task = |text: &str| {
            let (queue, id) = text.rsplit_once('/')?;
            Some(Walked {
                queue: QueueName::new(queue).ok()?,
                id: id.parse().ok()?,
            })
        };
        let place = match text.split_once('/') {
            None => match text {
                "" => Some(Self::Counts),
                "shards" => Some(Self::Shards(None)),
                "tasks" => Some(Self::Tasks(None)),
                _ => None,
            },
            Some(("shards", rest)) => shard(rest).map(|shard| Self::Shards(Some(shard))),
            Some(("tasks", rest)) => task(rest).map(|task| Self::Tasks(Some(task))),
            Some(_) => None,
        };
        let wrong = || {
            format!(
                "cursor {:?} is none; send the one of the answer before",
                shorten(text, ECHO)
            )
        };
        place.ok_or_else(wrong)
    }
}

impl Api {
    /// Checks a part, and repairs what it finds if requested. If a call broke off and is repeated,
    /// it finds only what is left.
    pub async fn fsck(&self, caller: &Caller, request: Fsck) -> Result<FsckPage, Error> {
        let Fsck {
            queue,
            repair,
            cursor,
        } = request;
        // The token may have been revoked while the body was read.
        self.authentication.still_valid(caller)?;
        let queue = Some(&queue)
            .filter(|queue| !queue.is_empty())
            .map(|queue| QueueName::new(queue))
            .transpose();
        let queue = queue.map_err(|error| Error::Invalid(error.to_string()))?;
        reaches_all_of(caller, queue.as_ref())?;
        let place: Place = cursor.parse().map_err(Error::Invalid)?;
        if let (Some(queue), Place::Tasks(Some(walked))) = (&queue, &place)
            && walked.queue != *queue
        {
            let wrong = format!(
                "cursor is of queue {}, not of {queue}; send the one of the answer before",
                walked.queue
            );
            return Err(Error::Invalid(wrong));
        }
        let reader = self.query()?;
        if repair {
            // The act is recorded before anything is changed.
            let target = queue.as_ref().map_or("all queues", QueueName::as_str);
            let act = Act::at_time(reader.now_unix_ms(), who(caller), "fsck --repair", target);
            reader.store.keep_acts(&[act]).await?;
        }
        check(reader, queue.as_ref(), place, repair)
            .instrument(span("fsck", caller))
            .await
    }

    /// Returns everything that the shards of a queue hold in Redis, decoded; `None` for a shard
    /// that Redis has lost, or that is being opened.
    pub async fn dump(
        &self,
        caller: &Caller,
        queue: &str,
        number: Option<u32>,
        limit: Option<usize>,
    ) -> Result<Vec<(u32, Option<Value>)>, Error> {
        let queue = QueueName::new(queue).map_err(|error| Error::Invalid(error.to_string()))?;
        reaches(caller, queue.as_str())?;
        let limit = limit.unwrap_or(DUMPED);
        if !(1..=MOST_DUMPED).contains(&limit) {
            return Err(Error::Invalid(format!(
                "limit is {limit}; must be 1 to {MOST_DUMPED}"
            )));
        }
        let reader = self.query()?;
        let dump = async {
            let mut shards = Vec::new();
            for shard in reader.queue.shards_of(&queue) {
                if number.is_some_and(|number| shard.id.number != number) {
                    continue;
                }
                let holds = match reader.queue.dump(&shard.id, limit).await {
                    Err(queue::Error::NoGeneration) => None,
                    other => Some(other?),
                };
                shards.push((shard.id.number, holds));
            }
            Ok(shards)
        };
        dump.instrument(span("dump", caller)).await
    }
}

async fn check(
    reader: &Reader,
    queue: Option<&QueueName>,
    mut place: Place,
    mends: bool,
) -> Result<FsckPage, Error> {
    let store = reader.store.clone();
    let bus = reader.bus.clone();
    let checker = Checker::new(store, reader.queue.clone(), bus, Pace::FAST);
    let began = Instant::now();
    let mut page = FsckPage::default();
    let mut all = Found::default();
    loop {
        place = match place {
            Place::Counts => {
                match checker.counts(queue, mends).await {
                    Ok(found) => all.absorb(found),
                    // One statement goes over all unfinished tasks. If the database cannot do that,
                    // the shards are checked all the same.
                    Err(checking::Error::Store(error)) if error.is_transient() => {
                        tracing::warn!("fsck: cannot count the unfinished tasks again: {error}");
                        all.unchecked += 1;
                    }
                    Err(error) => return Err(error.into()),
                }
                Place::Shards(None)
            }
            Place::Shards(after) => {
                let shards = reader.queue.shards().into_iter();
                let mut rest =
                    shards.filter(|shard| queue.is_none_or(|queue| shard.queue == *queue));
                match rest.find(|shard| after.as_ref().is_none_or(|after| shard > after)) {
                    Some(shard) => {
                        let began = Instant::now();
                        let (found, ended) = checker.shard(&shard, mends).await;
                        let mut failed = Failed::OfCheck(&mut page.unchecked_shards);
                        page.shards += u64::from(failed.note(&shard, began, ended)?.is_some());
                        all.absorb(found);
                        Place::Shards(Some(shard))
                    }
                    None => Place::Tasks(None),
                }
            }
            Place::Tasks(after) => {
                let unchecked = &mut page.unchecked_shards;
                let compared = checker
                    .published(queue, after.as_ref(), TASKS, mends, unchecked)
                    .await?;
                let (found, tasks, next) = compared;
                all.absorb(found);
                page.tasks += tasks;
                match next {
                    Some(next) => Place::Tasks(Some(next)),
                    None => return Ok(with(page, all)),
                }
            }
        };
        if began.elapsed() >= PART || all.finds.len().max(page.unchecked_shards.len()) >= MOST_FINDS
        {
            page.cursor = Some(place.to_string());
            return Ok(with(page, all));
        }
    }
}

fn with(page: FsckPage, found: Found) -> FsckPage {
    let Found {
        finds,
        more,
        unchecked,
    } = found;
    FsckPage {
        finds: finds.into_iter().collect(),
        more: more.into_values().sum(),
        unchecked,
        ..page
    }
}

impl From<checking::Error> for Error {
    fn from(error: checking::Error) -> Self {
        match error {
            checking::Error::Store(error) => error.into(),
            checking::Error::Queue(error) => error.into(),
            checking::Error::Bus(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::TaskId;

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        let shard = ShardId {
            queue: QueueName::new("a.b-c").unwrap(),
            number: 7,
        };
        for place in [
            Place::Counts,
            Place::Shards(None),
            Place::Shards(Some(shard)),
            Place::Tasks(None),
            Place::Tasks(Some(Walked {
                queue: QueueName::new("a.b-c").unwrap(),
                id: TaskId::new(),
            })),
        ] {
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        for wrong in [
            "x",
            "shards/",
            "shards/q",
            "shards/q:x",
            "tasks/1",
            "tasks/q/1",
            "counts/",
        ] {
            assert!(
                wrong.parse::<Place>().unwrap_err().starts_with("cursor "),
                "{wrong}"
            );
        }
    }
}
