//! The walk over a shard.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::{
    checker::{Checker, find},
    error::Error,
};
use crate::{
    model::{Find, FindKind, ShardId, StoredStatus, TaskId},
    queue::{self, Checked, Part, ShardFind, Suspicion},
    store::Unpublished,
};

/// Tasks that one script looks at again. Each may cost a walk over its lane.
const CONFIRMED_AT_ONCE: usize = 16;
/// Tasks that a walk looks at again, at most. The next walk finds the rest.
const MOST_SUSPECTS: usize = 2_000;
const LANES: usize = 6;

/// One walk: the parts that a script compares with the rest by itself, then the lanes and the list of final records,
/// which are compared here.
pub(super) struct Walk<'a> {
    checker: &'a Checker,
    shard: &'a ShardId,
    mends: bool,
    /// Without repetitions: a scan may show an entry twice.
    finds: BTreeSet<Find>,
    /// Tasks with a replica to claim: the newest offer, and how often a lane had it.
    open: HashMap<TaskId, (u64, u32)>,
    live: HashSet<TaskId>,
    /// Final records that the list has not shown yet.
    unlisted: HashSet<TaskId>,
    suspects: BTreeSet<(TaskId, Suspicion)>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(checker: &'a Checker, shard: &'a ShardId, mends: bool) -> Self {
        let (open, live, unlisted) = Default::default();
        Self { checker, shard, mends, finds: BTreeSet::new(), open, live, unlisted, suspects: BTreeSet::new() }
    }

    pub(super) async fn run(mut self) -> Result<Vec<Find>, Error> {
        match self.walk().await {
            // It was closed, or Redis lost it, and the watchdog brings it back.
            Err(Error::Queue(queue::Error::NoGeneration)) => Ok(Vec::new()),
            Err(error) => Err(error),
            Ok(()) => Ok(self.finds.into_iter().collect()),
        }
    }

    async fn walk(&mut self) -> Result<(), Error> {
        let pointers = (1..=LANES).map(Part::Pointers);
        for part in [Part::Leases, Part::Delayed, Part::Bodies].into_iter().chain(pointers) {
            self.slices(part).await?;
        }
        self.slices(Part::Records).await?;
        self.lanes().await?;
        self.finals().await?;
        self.confirm().await?;
        self.confirm_ended().await?;
        let Checker { queue, pace, .. } = self.checker;
        let recount = queue.recount(self.shard, pace.counted, self.mends);
        let wrong = self.checker.paced(recount).await?.unwrap_or_default();
        self.add(wrong);
        self.publish_dropped().await
    }

    fn add(&mut self, finds: Vec<ShardFind>) {
        let (shard, mends) = (self.shard, self.mends);
        self.finds.extend(finds.into_iter().map(|of| find(of.kind, shard, of.task, of.says, mends)));
    }

    /// Checks a part. Keeps what records say of lanes and of the list of final records.
    async fn slices(&mut self, part: Part) -> Result<(), Error> {
        let Checker { queue, pace, .. } = self.checker;
        let mut cursor = "0".to_owned();
        loop {
            let check = queue.check(self.shard, part, &cursor, pace.entries, self.mends);
            let slice = self.checker.paced(check).await?;
            self.add(slice.finds);
            for (id, state) in slice.tasks {
                match state {
                    Checked::Open(offer) => drop(self.open.insert(id, (offer, 0))),
                    Checked::Final => drop(self.unlisted.insert(id)),
                    Checked::Live => {}
                }
                if state != Checked::Final {
                    self.live.insert(id);
                }
            }
            let Some(next) = slice.next else { return Ok(()) };
            cursor = next;
        }
    }

    /// Goes over the lanes from the tail on. A place counts from the beginning, so elements that leave meanwhile move
    /// nothing, and the walk meets those that come.
    async fn lanes(&mut self) -> Result<(), Error> {
        let Checker { queue, pace, .. } = self.checker;
        for lane in 1..=LANES {
            let mut from = Some(0);
            while let Some(at) = from {
                let page = self.checker.paced(queue.check_order(self.shard, lane, at, pace.entries)).await?;
                for (id, offer) in page.listed {
                    if let Some((newest, seen)) = self.open.get_mut(&id)
                        && (*newest == 0 || *newest == offer)
                    {
                        *seen += 1;
                    }
                }
                from = page.next;
            }
        }
        let odd = std::mem::take(&mut self.open).into_iter().filter(|(_, (_, seen))| *seen != 1);
        let why = |seen| if seen == 0 { Suspicion::Missing } else { Suspicion::Twice };
        self.suspects.extend(odd.map(|(id, (_, seen))| (id, why(seen))));
        Ok(())
    }

    /// Goes over the list of final records from its end on, where it grows.
    async fn finals(&mut self) -> Result<(), Error> {
        let Checker { queue, pace, .. } = self.checker;
        let mut from = Some(0);
        while let Some(at) = from {
            let page = self.checker.paced(queue.check_order(self.shard, 0, at, pace.entries)).await?;
            for (id, _) in page.listed {
                self.unlisted.remove(&id);
                if self.live.contains(&id) {
                    self.suspects.insert((id, Suspicion::Listed));
                }
            }
            from = page.next;
        }
        self.suspects.extend(self.unlisted.drain().map(|id| (id, Suspicion::Unlisted)));
        Ok(())
    }

    /// Looks at suspected tasks again, each in one step.
    async fn confirm(&mut self) -> Result<(), Error> {
        let suspects: Vec<_> = std::mem::take(&mut self.suspects).into_iter().take(MOST_SUSPECTS).collect();
        for suspects in suspects.chunks(CONFIRMED_AT_ONCE) {
            let confirm = self.checker.queue.check_tasks(self.shard, suspects, self.mends);
            let finds = self.checker.paced(confirm).await?;
            self.add(finds);
        }
        Ok(())
    }

    /// Finds live tasks that SQL shows final. Workers would do them for nothing.
    ///
    /// A task ends in Redis first. So one that is final in SQL before Redis shows it live will never end here, unless
    /// it was sent again in between: SQL is asked a second time.
    async fn confirm_ended(&mut self) -> Result<(), Error> {
        let live: Vec<TaskId> = std::mem::take(&mut self.live).into_iter().collect();
        for ids in live.chunks(self.checker.pace.entries) {
            let ended: Vec<_> = self.ended(ids).await?.into_iter().map(|id| (id, Suspicion::Ended)).collect();
            for ended in ended.chunks(CONFIRMED_AT_ONCE) {
                let finds = self.checker.queue.check_tasks(self.shard, ended, false).await?;
                let found: Vec<TaskId> = finds.iter().filter_map(|find| find.task).collect();
                let still: Vec<_> = self.ended(&found).await?.into_iter().map(|id| (id, Suspicion::Ended)).collect();
                let confirm = self.checker.queue.check_tasks(self.shard, &still, self.mends);
                let finds = self.checker.paced(confirm).await?;
                self.add(finds);
            }
        }
        Ok(())
    }

    /// Those that SQL shows completed or dead. A cancelled task may be on its way out.
    async fn ended(&self, ids: &[TaskId]) -> Result<Vec<TaskId>, Error> {
        let states = self.checker.paced(self.checker.store.states(ids)).await?;
        let is_over = |status| matches!(status, StoredStatus::Completed | StoredStatus::Dead);
        Ok(states.into_iter().filter(|state| is_over(state.status)).map(|state| state.id).collect())
    }

    /// Publishes the tasks again that this walk has taken out of Redis, as far as SQL shows them unfinished.
    async fn publish_dropped(&mut self) -> Result<(), Error> {
        const DROPPED: [FindKind; 3] = [FindKind::LostPayload, FindKind::UnreadableRecord, FindKind::WaitsWithoutDelay];
        let dropped = self.finds.iter().filter(|find| find.mended && DROPPED.contains(&find.kind));
        let ids: Vec<TaskId> = dropped.filter_map(|find| find.task).collect();
        if ids.is_empty() {
            return Ok(());
        }
        let (_, records) = self.checker.queue.inspect(self.shard, &ids).await?;
        let gone = ids.into_iter().zip(records).filter(|(_, record)| record.is_none()).map(|(id, _)| id);
        Ok(self.checker.store.unpublish(&gone.collect::<Vec<_>>(), Unpublished::Missing).await?)
    }
}
