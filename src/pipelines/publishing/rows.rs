//! Decides who publishes a new task, and when.

use crate::{
    config::Settings,
    model::{TaskRow, millis},
    pipelines::admission::Gates,
    store::{NewRow, Turn, Unpublished},
};

/// Makes the row to store, with the reason why the task is not on the bus yet.
pub fn new_row(task: TaskRow, gates: &Gates, settings: &Settings) -> NewRow {
    let publish_at = publish_at(&task, settings);
    let (unpublished, due_unix_ms) = if publish_at > task.created_unix_ms {
        (Unpublished::Scheduled, publish_at)
    } else if gates.is_closed(&task.queue) {
        (Unpublished::Parked, 0)
    } else if gates.is_crowded(&task) {
        (Unpublished::Crowded, 0)
    } else {
        (
            Unpublished::Fresh,
            task.created_unix_ms + millis(settings.watchdog.republish_after),
        )
    };
    NewRow {
        task,
        unpublished,
        due_unix_ms,
    }
}

/// Returns whether the process that stored the row publishes it at once.
///
/// The gate may have moved since [`new_row`] checked it. If then nobody publishes the row, the
/// watchdog does. A row of a batch goes out even if its limit key has become crowded meanwhile.
pub fn goes_out_now(task: &TaskRow, turn: Turn, gates: &Gates, settings: &Settings) -> bool {
    publish_at(task, settings) <= task.created_unix_ms
        && !gates.is_closed(&task.queue)
        && (turn.is_batch() || !gates.is_crowded(task))
}

/// Returns from when on the task may go to the bus. A task that is due beyond the horizon stays in
/// SQL until then.
pub(super) fn publish_at(task: &TaskRow, settings: &Settings) -> i64 {
    task.not_before_unix_ms - millis(settings.watchdog.horizon)
}
