//! The spans `insert` and `settle`: tasks into SQL, from callers and from reports.

use std::{collections::HashMap, time::SystemTime};

use crate::{
    config::TraceDiscovered,
    model::{InsertAnswer, InsertStatus, NewTask, QueueName, TaskId, TaskRow, TraceContext},
    store::{Inserted, NewRow, Settled, Settlement},
    telemetry::traces::{self, Begun, Hop},
};

/// The traced inserts of one call, each with its task's index. Most calls have none.
#[derive(Default)]
pub(super) struct Inserts(Vec<(usize, TaskId, QueueName, Begun)>);

impl Inserts {
    /// Makes the insert a child of the task's context, and then the insert's context that of the
    /// task.
    pub(super) fn begin(
        &mut self,
        place: usize,
        id: TaskId,
        queue: &QueueName,
        task: &mut NewTask,
    ) {
        if !traces::is_on() {
            return;
        }
        let begun = match task.traceparent.is_empty() {
            true => Begun::root(),
            false => Begun::child_of_caller(&mut task.traceparent),
        };
        if let Some(begun) = begun {
            task.traceparent = begun.context().to_string();
            self.0.push((place, id, queue.clone(), begun));
        }
    }

    /// Ends the inserts with the answers of the call.
    pub(super) fn end(mut self, answers: &[InsertAnswer]) {
        for (place, id, queue, begun) in self.0.drain(..) {
            let answer = &answers[place];
            let outcome = match answer.status {
                InsertStatus::Created => "created",
                InsertStatus::Duplicate => "duplicate",
                InsertStatus::Rejected | InsertStatus::TryLater => "refused",
            };
            // A duplicate shows the id of the other task, and is no error.
            begun.end(
                Hop::Insert,
                answer.id.unwrap_or(id),
                &queue,
                outcome,
                String::new(),
            );
        }
    }

    /// Ends the inserts of a call that stored no task.
    pub(super) fn fail(mut self, error: &impl ToString) {
        for (_, id, queue, begun) in self.0.drain(..) {
            begun.end(Hop::Insert, id, &queue, "refused", error.to_string());
        }
    }
}

/// Ends the inserts that are left, because their caller went away. Their tasks may be stored all
/// the same, with these spans as their parents.
impl Drop for Inserts {
    fn drop(&mut self) {
        for (_, id, queue, begun) in self.0.drain(..) {
            begun.end(Hop::Insert, id, &queue, "unanswered", String::new());
        }
    }
}

/// The traced inserts of the tasks that some reports discovered.
#[derive(Default)]
pub(super) struct Discoveries(HashMap<TaskId, Begun>);

impl Discoveries {
    /// Makes the insert of a discovered task a child of the context that its worker gave, or else
    /// of the work on its parent task.
    pub(super) fn begin(
        &mut self,
        id: TaskId,
        task: &mut NewTask,
        parent: Option<TraceContext>,
        discovered: TraceDiscovered,
    ) {
        if !traces::is_on() {
            return;
        }
        let begun = match (parent, discovered) {
            _ if !task.traceparent.is_empty() => Begun::child_of_caller(&mut task.traceparent),
            (Some(parent), TraceDiscovered::Child) => Some(Begun::child(parent)),
            (parent, _) => Begun::root().map(|begun| begun.linked(parent)),
        };
        if let Some(begun) = begun {
            task.traceparent = begun.context().to_string();
            self.0.insert(id, begun);
        }
    }

    /// Ends the inserts of a report's discovered tasks that were answered.
    fn end(&mut self, rows: &[NewRow], inserted: &[Inserted]) {
        if self.0.is_empty() {
            return;
        }
        for (NewRow { task, .. }, inserted) in rows.iter().zip(inserted) {
            if let Some(begun) = self.0.remove(&task.id) {
                let (id, outcome) = match inserted {
                    Inserted::New => (task.id, "created"),
                    Inserted::Duplicate { id, .. } | Inserted::Repeated { id } => {
                        (*id, "duplicate")
                    }
                    Inserted::KeyReused | Inserted::TreeClosed => (task.id, "refused"),
                };
                begun.end(Hop::Insert, id, &task.queue, outcome, String::new());
            }
        }
    }
}

/// Records the spans of settled reports that have a trace, and of the tasks that they discovered.
pub(super) fn settled(
    reports: &[Settlement],
    traces: impl Iterator<Item = Option<TraceContext>>,
    answers: &[Settled],
    discoveries: &mut Discoveries,
    since: SystemTime,
) {
    if !traces::is_on() {
        return;
    }
    for ((report, trace), settled) in reports.iter().zip(traces).zip(answers) {
        let Settlement::Completed {
            id,
            worker,
            attempt,
            discovered,
            ..
        } = report
        else {
            continue;
        };
        discoveries.end(discovered, &settled.discovered);
        if let (Some(work), Some(task)) = (trace, &settled.task) {
            let outcome = match settled {
                Settled { repeated: true, .. } => "repeated",
                Settled { surplus: true, .. } => "surplus",
                Settled {
                    status: Some(status),
                    ..
                } if status.is_final() => "completed",
                _ => "credited",
            };
            let span = Begun::child(work).since(since).ended(
                Hop::Settle,
                *id,
                &task.queue,
                outcome,
                String::new(),
            );
            traces::record(traces::Span {
                worker: Some(worker.clone()),
                attempt: Some(*attempt),
                ..span
            });
        }
    }
}

/// Records the death of a task as a child of the span that inserted it, because its last lease may
/// have ended without a report.
pub(super) fn died(row: &TaskRow, reason: &str, since: SystemTime) {
    if let Some(begun) = Begun::child_of(&row.traceparent) {
        begun
            .since(since)
            .end(Hop::Settle, row.id, &row.queue, "dead", reason.to_owned());
    }
}
