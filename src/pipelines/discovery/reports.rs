//! The reports in some records of `task-results`, as SQL settles them.

use super::{
    origin::{Origin, alone},
    room::{Unstored, discovered},
    traced::Discoveries,
    trees,
};
use crate::{
    bus::Message,
    model::{
        Completed, Died, DiscoveredTask, FailedAttempt, KeyHash, QueueName, Report, RowTree,
        TaskId, TaskRow, TraceContext, Way, What, WorkerName, validate,
    },
    pipelines::{context::Context, publishing},
    store::Settlement,
    telemetry::metrics::Lettered,
    wire,
};

/// The contents of some records, in their order.
#[derive(Default)]
pub(super) struct Reports<'m> {
    pub(super) settlements: Vec<Settlement>,
    /// One per settlement.
    pub(super) origins: Vec<Origin<'m>>,
    /// Discovered tasks that are not valid any more.
    pub(super) unstored: Vec<Unstored>,
    pub(super) discoveries: Discoveries,
    /// Attempts that failed, for the histories.
    pub(super) failures: Vec<FailedAttempt>,
    /// Records and single reports that cannot be read, and why.
    pub(super) poison: Vec<(Message, String)>,
}

impl<'m> Reports<'m> {
    pub(super) fn read(context: &Context, messages: &'m [Message]) -> Self {
        let mut reports = Self::default();
        for message in messages {
            match wire::read_reports(&message.value) {
                Ok(batch) => {
                    reports.failures.extend(batch.failures);
                    for (index, report) in batch.reports.into_iter().enumerate() {
                        if let Err(reason) =
                            report.and_then(|report| reports.add(context, report, message, index))
                        {
                            reports.poison.push((alone(message, index), reason));
                        }
                    }
                }
                Err(reason) => reports.poison.push((message.clone(), reason)),
            }
        }
        reports
    }

    pub(super) fn have_discovered(&self) -> bool {
        !self.unstored.is_empty()
            || self
                .settlements
                .iter()
                .any(|report| !discovered(report).is_empty())
    }

    fn add(
        &mut self,
        context: &Context,
        report: Report,
        message: &'m Message,
        index: usize,
    ) -> Result<(), String> {
        let Report {
            id,
            at_unix_ms,
            what,
        } = report;
        let mut trace = None;
        let settlement = match what {
            What::Completed(done) => {
                trace = TraceContext::sampled(&done.traceparent);
                self.completed(context, id, done, at_unix_ms, trace)?
            }
            What::Died(Died {
                reason,
                attempts,
                history,
                epoch,
            }) => Settlement::Died {
                id,
                reason,
                attempts,
                history,
                epoch: Some(epoch),
                at_unix_ms,
            },
        };
        self.settlements.push(settlement);
        self.origins.push(Origin {
            message,
            index,
            trace,
        });
        Ok(())
    }

    fn completed(
        &mut self,
        context: &Context,
        id: TaskId,
        done: Completed,
        at_unix_ms: i64,
        trace: Option<TraceContext>,
    ) -> Result<Settlement, String> {
        WorkerName::new(&done.worker).map_err(|error| error.to_string())?;
        let Completed {
            worker,
            result,
            result_encoding: encoding,
            attempt,
            lease,
            leased_unix_ms,
            discovered,
            joining,
            ..
        } = done;
        let joining = joining.map(|joining| *joining).unwrap_or_default();
        let ways = &joining.ways;
        let rows = discovered
            .into_iter()
            .enumerate()
            .filter_map(|(index, task)| {
                let index = u32::try_from(index).ok()?;
                self.row(
                    context,
                    task,
                    id,
                    TaskId::derived(id, &worker, index, at_unix_ms),
                    trace,
                )
                .map(|mut row| {
                    let way = ways.get(index as usize).copied().unwrap_or_default();
                    if way != Way::default() {
                        row.tree = Some(Box::new(RowTree::Sent(way)));
                    }
                    row
                })
            });
        let discovered = rows
            .map(|row| publishing::new_row(row, &context.gates, &context.settings))
            .collect();
        let joining = trees::joining(
            &context.settings,
            context.partitions(),
            joining,
            id,
            at_unix_ms,
        )?;
        Ok(Settlement::Completed {
            id,
            worker,
            lease,
            result,
            encoding,
            attempt,
            leased_unix_ms,
            at_unix_ms,
            discovered,
            joining,
        })
    }

    /// Makes a row of a discovered task; an invalid one becomes a dead letter. The completion
    /// counted nevertheless. Its answer named the invalid task, unless settings have changed since
    /// or a later version wrote the report.
    fn row(
        &mut self,
        context: &Context,
        task: DiscoveredTask,
        parent: TaskId,
        id: TaskId,
        trace: Option<TraceContext>,
    ) -> Option<TaskRow> {
        let (task, values, reason) = match task {
            Ok(mut task) => {
                // The ids of discovered tasks make their reports repeatable.
                task.idempotency_key.clear();
                // They are in the tree of their parent.
                task.tree = None;
                let rules = context.settings.task_rules(&task.queue).for_accepted();
                match validate::check(&task, &rules, context.clock.now_unix_ms()) {
                    Ok(checked) => {
                        self.discoveries.begin(
                            id,
                            &mut task,
                            trace,
                            context.settings.traces.discovered,
                        );
                        return Some(checked.row(task, id, context.partitions()));
                    }
                    Err(reason) => (task, None, reason),
                }
            }
            Err(unreadable) => (unreadable.task, Some(unreadable.values), unreadable.reason),
        };
        let key = QueueName::new(&task.queue)
            .ok()
            .filter(|_| !task.key.is_empty());
        let key = key.map(|queue| (queue.clone(), KeyHash::new(&queue, &task.key)));
        self.unstored.push(Unstored {
            parent,
            task,
            values,
            key,
            why: Lettered::Invalid,
            reason,
            logged: None,
        });
        None
    }
}
