//! Finds payloads that do not match the schema of their queue.

use std::collections::HashMap;

use super::room::{Unstored, discovered};
use crate::{
    config::Settings,
    model::{Misfit, NewTask, PayloadCheck},
    runtime::compute,
    store::Settlement,
    telemetry::metrics::Lettered,
};

/// Returns the tasks whose payloads do not match, by index, each with the reason.
pub(super) async fn misfits(settings: &Settings, tasks: &[NewTask]) -> HashMap<usize, Misfit> {
    let mut check = PayloadCheck::default();
    for (place, task) in tasks.iter().enumerate() {
        // A payload that is too large is rejected for its size elsewhere.
        let fits_limit = task.payload.len() <= settings.limits.max_payload_bytes;
        if let Some(schema) = settings.payload_schema(&task.queue).filter(|_| fits_limit) {
            check.add(place, schema, &task.payload, task.payload_encoding);
        }
    }
    compute(check, PayloadCheck::advance_quickly, PayloadCheck::advance)
        .await
        .misfits()
}

/// Removes the discovered tasks whose payloads do not match from the reports, and returns them.
///
/// The tasks service checked them before it answered OK, but the schema may have changed since.
pub(super) async fn take_misfits(settings: &Settings, reports: &mut [Settlement]) -> Vec<Unstored> {
    let mut check = PayloadCheck::default();
    let rows = reports.iter().flat_map(discovered);
    for (place, row) in rows.map(|row| &row.task).enumerate() {
        if let Some(schema) = settings.payload_schema(row.queue.as_str()) {
            check.add(place, schema, &row.payload, row.payload_encoding);
        }
    }
    let mut misfits = compute(check, PayloadCheck::advance_quickly, PayloadCheck::advance)
        .await
        .misfits();
    if misfits.is_empty() {
        return Vec::new();
    }
    let mut unstored = Vec::with_capacity(misfits.len());
    let mut places = 0..;
    for report in reports {
        if let Settlement::Completed { id, discovered, .. } = report {
            discovered.retain(
                |row| match places.next().and_then(|place| misfits.remove(&place)) {
                    Some(Misfit { says, logged }) => {
                        let one = Unstored::of_row(*id, &row.task, Lettered::Invalid, says);
                        unstored.push(Unstored {
                            logged: Some(logged),
                            ..one
                        });
                        false
                    }
                    None => true,
                },
            );
        }
    }
    unstored
}
