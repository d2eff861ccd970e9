//! The phases insert and duplicates: many callers insert tasks; in the phase duplicates, nine of
//! ten are known.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinSet;

use super::{
    args::{Phase, Work},
    progress,
    report::Report,
    run::Run,
    work::{Inserted, Tasks, insert},
};
use crate::wire::pb::discovery_client::DiscoveryClient;

/// If the counts do not change for this long, the remaining tasks are considered to wait in SQL
/// until the queue has capacity.
pub(super) const SETTLE: Duration = Duration::from_secs(10);

/// Which tasks a phase inserts, in order.
#[derive(Clone, Copy)]
pub(super) enum Plan {
    /// New tasks, numbered from this number.
    From(u32),
    /// Every tenth task is new; the others are those of `From(0)`.
    Known,
}

impl Plan {
    fn number(self, place: u32, tasks: u32) -> u32 {
        match self {
            Self::Known if place % 10 == 9 => tasks + place / 10,
            Self::Known => place,
            Self::From(first) => first + place,
        }
    }

    /// How many of `tasks` tasks are new.
    pub(super) fn new_tasks(self, tasks: u32) -> u32 {
        match self {
            Self::From(_) => tasks,
            Self::Known => tasks / 10,
        }
    }
}

/// Inserts new tasks, and waits until all of them can be claimed.
pub(super) async fn new(run: &mut Run<'_>, work: &Work, tasks: &Tasks) -> anyhow::Result<()> {
    let (before, began) = (run.server.usage().await, Instant::now());
    let inserted = insert_all(run, work, tasks, Plan::From(0)).await?;
    let Run { server, report, .. } = run;
    report.rate(Phase::Insert, "accepted", work.tasks, began.elapsed(), None);
    check(&inserted, work.tasks, Plan::From(0), report);
    let total = u64::from(work.tasks);
    let claimable = server
        .wait_for(&tasks.queues, SETTLE, |counts| counts.waiting == total)
        .await?;
    let Some(claimable) = claimable else {
        let counts = server.counts(&tasks.queues).await?;
        report.note(format!(
            "only {} of {total} tasks could be claimed, {} waited in SQL: --tasks is above high_water_tasks of that \
             taskd",
            counts.waiting, counts.pending
        ));
        return Ok(());
    };
    let used = server.usage().await.since(before);
    report.rate(
        Phase::Insert,
        "claimable",
        work.tasks,
        claimable - began,
        Some(used),
    );
    Ok(())
}

/// Inserts the tasks again, with one new task in every ten.
pub(super) async fn known(run: &mut Run<'_>, work: &Work, tasks: &Tasks) -> anyhow::Result<()> {
    let (before, began) = (run.server.usage().await, Instant::now());
    let inserted = insert_all(run, work, tasks, Plan::Known).await?;
    let took = began.elapsed();
    let used = run.server.usage().await.since(before);
    run.report
        .rate(Phase::Duplicates, "answered", work.tasks, took, Some(used));
    check(&inserted, work.tasks, Plan::Known, run.report);
    Ok(())
}

/// Inserts the tasks of a plan, with the number of concurrent callers in `work`.
pub(super) async fn insert_all(
    run: &Run<'_>,
    work: &Work,
    tasks: &Tasks,
    plan: Plan,
) -> anyhow::Result<Inserted> {
    let (total, batch) = (work.tasks, u32::from(work.batch));
    let next = Arc::new(AtomicU32::new(0));
    let mut callers = JoinSet::new();
    for caller in 0..usize::from(work.concurrency) {
        let client = DiscoveryClient::new(run.server.channel(caller));
        let (next, tasks, bar) = (Arc::clone(&next), tasks.clone(), run.bar.clone());
        callers.spawn(async move {
            let mut all = Inserted::default();
            loop {
                let first = next.fetch_add(batch, Ordering::Relaxed);
                if first >= total {
                    return anyhow::Ok(all);
                }
                let places = first..total.min(first + batch);
                let numbers: Vec<u32> = places.map(|place| plan.number(place, total)).collect();
                let count = numbers.len() as u64;
                all.add(insert(client.clone(), &tasks, numbers).await?);
                bar.inc(count);
            }
        });
    }
    let mut all = Inserted::default();
    while let Some(inserted) =
        progress::next_moving(&mut callers, run.bar, work.give_up_after.0).await?
    {
        all.add(inserted?);
    }
    Ok(all)
}

/// Checks the answers against the plan.
fn check(inserted: &Inserted, tasks: u32, plan: Plan, report: &mut Report) {
    report.totals.repeated_calls += u64::from(inserted.repeated);
    let expected = plan.new_tasks(tasks);
    let is_new = |number: &u32| matches!(plan, Plan::From(_)) || *number >= tasks;
    let again = inserted.new.iter().filter(|number| !is_new(number)).count();
    if again > 0 {
        report.wrong(format!("insert: {again} known tasks were answered CREATED"));
    }
    let new = inserted.new.len() - again;
    // A call whose answer was lost may have stored its tasks, so its retry sees duplicates.
    if new < expected as usize && inserted.errors == 0 {
        report.wrong(format!(
            "insert: {} of {expected} new tasks were answered DUPLICATE",
            expected as usize - new
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_ten_is_new_and_no_number_is_left_out() {
        let numbers: Vec<u32> = (0..20).map(|place| Plan::Known.number(place, 20)).collect();
        let (known, new): (Vec<u32>, Vec<u32>) =
            numbers.into_iter().partition(|number| *number < 20);
        assert_eq!(known.len(), 18);
        assert_eq!(new, [20, 21]);
        assert_eq!(Plan::Known.new_tasks(20), 2);
    }
}
