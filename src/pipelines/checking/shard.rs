//! The walk over a shard.

use std::collections::{HashMap, HashSet};

use super::{
    checker::{Checker, find},
    error::Error,
    found::Found,
};
use crate::{
    model::{FindKind, ShardId, StoredStatus, TaskId},
    queue::{self, Checked, CheckedTask, Part, ShardFind, Suspicion},
    store::Unpublished,
};

/// The most elements that a walk passes to check suspected tasks again, which takes some seconds.
/// The rest is left to the next walk.
const MOST_PASSED: u64 = 200_000_000;
const LANES: usize = 6;

/// One walk: the parts that a script compares with the rest by itself, then the lanes and the list
/// of final records, which are compared here.
pub(super) struct Walk<'a> {
    checker: &'a Checker,
    shard: &'a ShardId,
    mends: bool,
    found: Found,
    /// Elements that were passed to check suspected tasks again.
    passed: u64,
    pass: Pass,
}

/// A part of the records, selected by the end of the id, which is random.
#[derive(Clone, Copy)]
struct Portion {
    number: u32,
    of: u32,
}

/// The records of a portion, as far as they have to be compared with lanes, lists and SQL.
#[derive(Default)]
struct Pass {
    /// Tasks with a replica to claim: the newest offer, and how many elements with it were seen.
    open: HashMap<TaskId, (u64, u32)>,
    /// Live tasks: how many entries of past ends the list of final records has yet to show.
    live: HashMap<TaskId, u64>,
    /// Final records that the list has not shown yet.
    unlisted: HashSet<TaskId>,
}

impl Portion {
    const WHOLE: Self = Self { number: 0, of: 1 };

    fn has(self, id: TaskId) -> bool {
        let [.., a, b, c, d] = *id.as_bytes();
        u32::from_be_bytes([a, b, c, d]) % self.of == self.number
    }
}

impl<'a> Walk<'a> {
    pub(super) fn new(checker: &'a Checker, shard: &'a ShardId, mends: bool) -> Self {
        Self {
            checker,
            shard,
            mends,
            found: Default::default(),
            passed: 0,
            pass: Default::default(),
        }
    }

    pub(super) async fn run(mut self) -> (Found, Result<(), Error>) {
        match self.walk().await {
            // The shard was closed, or Redis lost it, and the watchdog brings it back.
            Err(Error::Queue(queue::Error::NoGeneration)) => (Found::default(), Ok(())),
            ended => (self.found, ended),
        }
    }

    async fn walk(&mut self) -> Result<(), Error> {
        let pointers = (1..=LANES).map(Part::Pointers);
        let parts = [Part::Leases, Part::Delayed, Part::Limits];
        for part in parts.into_iter().chain(pointers) {
            self.slices(part, Portion::WHOLE, self.mends).await?;
        }
        let of = self.portions().await?;
        for number in 0..of {
            // The first pass has repaired what a record, or a body without one, shows by itself.
            for part in [Part::Records, Part::Bodies] {
                self.slices(part, Portion { number, of }, self.mends && number == 0)
                    .await?;
            }
            self.lanes().await?;
            self.finals().await?;
            self.confirm_ended().await?;
            self.pass = Pass::default();
        }
        let Checker { queue, pace, .. } = self.checker;
        let recount = queue.recount(self.shard, pace.counted, self.mends);
        let wrong = self.checker.paced(recount).await?.unwrap_or_default();
        self.add(wrong);
        Ok(())
    }

    /// Returns in how many passes the records are checked. If the counts are wrong, a pass leaves
    /// out the records for which it has no memory.
    async fn portions(&self) -> Result<u32, Error> {
        let holdings = self
            .checker
            .queue
            .holdings(std::slice::from_ref(self.shard))
            .await?;
        let holding = holdings.into_iter().next().transpose()?.flatten();
        let records = holding.map_or(0, |holding| holding.live + holding.finals);
        Ok(u32::try_from(records / self.checker.pace.kept as u64)
            .unwrap_or(u32::MAX)
            .saturating_add(1))
    }

    fn add(&mut self, finds: Vec<ShardFind>) {
        let shard = self.shard;
        let mends = self.mends;
        finds.into_iter().for_each(|of| {
            self.found
                .add(find(of.kind, shard, of.task, of.says, mends))
        });
    }

    /// Checks a part. Keeps what the records of a portion say of lanes and of the list of final
    /// records.
    async fn slices(&mut self, part: Part, portion: Portion, mends: bool) -> Result<(), Error> {
        let Checker { queue, pace, .. } = self.checker;
        let mut cursor = "0".to_owned();
        loop {
            let check = queue.check(self.shard, part, &cursor, pace.entries, mends);
            let slice = self.checker.paced(check).await?;
            // Every pass sees all tasks: report them only once.
            if portion.number == 0 {
                self.publish_dropped(&slice.finds).await?;
                self.add(slice.finds);
            }
            slice
                .tasks
                .into_iter()
                .filter(|task| portion.has(task.id))
                .for_each(|task| self.keep(&task));
            let Some(next) = slice.next else {
                return Ok(());
            };
            cursor = next;
        }
    }

    fn keep(&mut self, task: &CheckedTask) {
        let CheckedTask {
            id,
            state,
            past_ends,
        } = *task;
        let Pass {
            open,
            live,
            unlisted,
        } = &mut self.pass;
        if live.len() + unlisted.len() >= 2 * self.checker.pace.kept {
            self.found.unchecked += 1;
            return;
        }
        match state {
            Checked::Open(offer) => drop(open.insert(id, (offer, 0))),
            Checked::Final => drop(unlisted.insert(id)),
            Checked::Live => {}
        }
        if state != Checked::Final {
            live.insert(id, past_ends);
        }
    }

    /// Goes over the lanes, starting at the tail, where elements leave. A position counts all
    /// elements that ever were before it, so elements that leave meanwhile shift nothing, and the
    /// walk also reaches those that are added.
    async fn lanes(&mut self) -> Result<(), Error> {
        let Checker { queue, pace, .. } = self.checker;
        for lane in 1..=LANES {
            let mut from = Some(0);
            while let Some(at) = from {
                let page = self
                    .checker
                    .paced(queue.check_order(self.shard, lane, at, pace.entries))
                    .await?;
                for (id, offer) in page.listed {
                    if let Some((newest, seen)) = self.pass.open.get_mut(&id)
                        && (*newest == 0 || *newest == offer)
                    {
                        *seen += 1;
                    }
                }
                from = page.next;
            }
        }
        let odd = std::mem::take(&mut self.pass.open)
            .into_iter()
            .filter(|(_, (_, seen))| *seen != 1);
        let why = |seen| {
            if seen == 0 {
                Suspicion::Missing
            } else {
                Suspicion::Twice
            }
        };
        let suspects: Vec<_> = odd.map(|(id, (_, seen))| (id, why(seen))).collect();
        self.look_again(&suspects, SecondLook::ToMend)
            .await
            .map(drop)
    }

    /// Goes over the list of final records, starting at its end, where it grows.
    async fn finals(&mut self) -> Result<(), Error> {
        let Checker { queue, pace, .. } = self.checker;
        let mut from = Some(0);
        let mut listed = HashSet::new();
        while let Some(at) = from {
            let page = self
                .checker
                .paced(queue.check_order(self.shard, 0, at, pace.entries))
                .await?;
            for (id, _) in page.listed {
                self.pass.unlisted.remove(&id);
                match self.pass.live.get_mut(&id) {
                    Some(0) => drop(listed.insert(id)),
                    Some(past_ends) => *past_ends -= 1,
                    None => {}
                }
            }
            from = page.next;
        }
        let unlisted = std::mem::take(&mut self.pass.unlisted)
            .into_iter()
            .map(|id| (id, Suspicion::Unlisted));
        let listed = listed.into_iter().map(|id| (id, Suspicion::Listed));
        let suspects: Vec<_> = listed.chain(unlisted).collect();
        self.look_again(&suspects, SecondLook::ToMend)
            .await
            .map(drop)
    }

    /// Checks suspected tasks again, each in one step. Returns those whose suspicion was confirmed.
    async fn look_again(
        &mut self,
        mut suspects: &[(TaskId, Suspicion)],
        looks: SecondLook,
    ) -> Result<Vec<TaskId>, Error> {
        let Checker { queue, pace, .. } = self.checker;
        let mut found = Vec::new();
        while !suspects.is_empty() {
            if self.passed >= MOST_PASSED {
                self.found.unchecked += suspects.len() as u64;
                break;
            }
            let some = &suspects[..suspects.len().min(pace.entries)];
            let mends = self.mends && looks == SecondLook::ToMend;
            let done = self
                .checker
                .paced(queue.check_tasks(self.shard, some, mends))
                .await?;
            self.passed += done.passed;
            self.found.unchecked += done.untold;
            found.extend(done.finds.iter().filter_map(|find| find.task));
            if looks == SecondLook::ToMend {
                self.add(done.finds);
            }
            suspects = &suspects[done.dealt_with.clamp(1, some.len())..];
        }
        Ok(found)
    }

    /// Finds live tasks that SQL shows final, or behind others of their sequences. Workers would do
    /// them for nothing, or too early.
    ///
    /// A task ends in Redis first. So one that is final in SQL before Redis shows it live will
    /// never end here, unless it was sent again in between: SQL is asked a second time.
    async fn confirm_ended(&mut self) -> Result<(), Error> {
        let live: Vec<TaskId> = std::mem::take(&mut self.pass.live).into_keys().collect();
        for ids in live.chunks(self.checker.pace.entries) {
            let ended = self.ended(ids).await?;
            let found = self.look_again(&ended, SecondLook::ToTell).await?;
            let still = self.ended(&found).await?;
            self.look_again(&still, SecondLook::ToMend).await?;
        }
        Ok(())
    }

    /// Returns the tasks that SQL shows as completed or dead, or behind. Not the cancelled ones,
    /// which may just be leaving Redis.
    async fn ended(&self, ids: &[TaskId]) -> Result<Vec<(TaskId, Suspicion)>, Error> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let states = self.checker.paced(self.checker.store.states(ids)).await?;
        let is_over = |status| matches!(status, StoredStatus::Completed | StoredStatus::Dead);
        let ended = states
            .into_iter()
            .filter(|state| is_over(state.status) || state.is_behind);
        Ok(ended.map(|state| (state.id, Suspicion::Ended)).collect())
    }

    /// Publishes the tasks again that a slice has removed from Redis, if SQL shows them as
    /// unfinished.
    async fn publish_dropped(&self, finds: &[ShardFind]) -> Result<(), Error> {
        const DROPPED: [FindKind; 3] = [
            FindKind::LostPayload,
            FindKind::UnreadableRecord,
            FindKind::WaitsWithoutDelay,
        ];
        let dropped = finds
            .iter()
            .filter(|find| self.mends && DROPPED.contains(&find.kind));
        let ids: Vec<TaskId> = dropped.filter_map(|find| find.task).collect();
        if ids.is_empty() {
            return Ok(());
        }
        let (_, records) = self.checker.queue.inspect(self.shard, &ids).await?;
        let gone = ids
            .into_iter()
            .zip(records)
            .filter(|(_, record)| record.is_none())
            .map(|(id, _)| id);
        Ok(self
            .checker
            .store
            .unpublish(&gone.collect::<Vec<_>>(), Unpublished::Missing)
            .await?)
    }
}

/// The purpose of checking a suspected task again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SecondLook {
    /// A confirmed suspicion is a finding, and is repaired if asked for.
    ToMend,
    /// Only selects tasks: another check decides.
    ToTell,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_task_is_in_one_portion() {
        for of in [1, 2, 7] {
            let count = |id| {
                (0..of)
                    .filter(|number| {
                        Portion {
                            number: *number,
                            of,
                        }
                        .has(id)
                    })
                    .count()
            };
            assert!((0..100).all(|_| count(TaskId::new()) == 1));
        }
        assert!(Portion::WHOLE.has(TaskId::new()));
        let ids = (0..1000).map(|_| TaskId::new());
        let half = Portion { number: 1, of: 2 };
        assert!((300..700).contains(&ids.filter(|id| half.has(*id)).count()));
    }
}
