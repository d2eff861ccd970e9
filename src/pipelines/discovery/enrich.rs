//! Sends new tasks to the endpoints of their queues before they are stored.
//!
//! Only tasks whose keys neither the filter nor SQL knows are sent. So a duplicate costs no call,
//! and an insert that is repeated is not enriched again.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    error::Failure,
    room::{self, Unstored},
};
use crate::{
    enrichment::{Change, Enrichment, Verdict},
    model::{
        NewTask, PayloadSchema, QueueName, TaskRow,
        validate::{self, NOT_ENRICHED},
    },
    pipelines::context::Context,
    store::Settlement,
    telemetry::metrics::Lettered,
};

/// Enriches the rows that are new. Returns the rejected ones by index, each with the reason.
///
/// Subtracts the time of the calls from `left`.
pub(super) async fn enrich(
    context: &Context,
    enrichment: &Enrichment,
    rows: &mut [&mut TaskRow],
    left: &mut Duration,
) -> Result<HashMap<usize, String>, Failure> {
    let mut rejected = HashMap::new();
    let places = (0..rows.len()).filter(|place| enrichment.is_for(&rows[*place].queue));
    let keys: Vec<_> = places
        .clone()
        .map(|place| (rows[place].queue.clone(), rows[place].key_hash))
        .collect();
    if keys.is_empty() {
        return Ok(rejected);
    }
    // Only the first row of each new key.
    let mut known: HashSet<_> = room::known(context, &keys).await?;
    let mut by_queue: BTreeMap<QueueName, Vec<usize>> = BTreeMap::new();
    for place in places.filter(|place| known.insert(rows[*place].key_hash)) {
        by_queue
            .entry(rows[place].queue.clone())
            .or_default()
            .push(place);
    }
    let began = Instant::now();
    let now = context.clock.now_unix_ms();
    let deadline = began + *left;
    for (queue, places) in by_queue {
        let asked: Vec<&TaskRow> = places.iter().map(|place| &*rows[*place]).collect();
        let check = |row: &TaskRow, change: &Change| check(context, row, change, now);
        let verdicts = enrichment.verdicts(&queue, &asked, &check, deadline).await;
        for (place, verdict) in places.into_iter().zip(verdicts) {
            match verdict {
                Some(Verdict::Change(change)) => apply(change, rows[place]),
                Some(Verdict::Reject(reason)) => {
                    rejected.insert(
                        place,
                        format!("the queue's enrichment rejected the task: {reason}"),
                    );
                }
                None => mark(rows[place]),
            }
        }
    }
    *left = left.saturating_sub(began.elapsed());
    Ok(rejected)
}

/// Enriches the discovered tasks that are new. Removes the rejected ones from the reports and
/// returns them.
pub(super) async fn enrich_discovered(
    context: &Context,
    enrichment: &Enrichment,
    reports: &mut [Settlement],
) -> Result<Vec<Unstored>, Failure> {
    if enrichment.is_off() {
        return Ok(Vec::new());
    }
    let mut rows = Vec::new();
    for report in &mut *reports {
        if let Settlement::Completed { discovered, .. } = report {
            rows.extend(discovered.iter_mut().map(|row| &mut row.task));
        }
    }
    let mut rejected = enrich(context, enrichment, &mut rows, &mut enrichment.time()).await?;
    if rejected.is_empty() {
        return Ok(Vec::new());
    }
    let mut unstored = Vec::with_capacity(rejected.len());
    let mut places = 0..;
    let mut gone = HashSet::new();
    for report in reports {
        if let Settlement::Completed { id, discovered, .. } = report {
            discovered.retain(|row| {
                match places.next().and_then(|place| rejected.remove(&place)) {
                    Some(reason) => {
                        gone.insert(row.task.key_hash);
                        unstored.push(Unstored::of_row(
                            *id,
                            &row.task,
                            Lettered::Enrichment,
                            reason,
                        ));
                        false
                    }
                    // Other reports may have discovered the rejected task, too.
                    None => !gone.contains(&row.task.key_hash),
                }
            });
        }
    }
    Ok(unstored)
}

/// Checks that the task, with the endpoint's change, is as valid as any other. Returns the schema
/// that its new payload must match.
fn check(
    context: &Context,
    row: &TaskRow,
    change: &Change,
    now_unix_ms: i64,
) -> Result<Option<PayloadSchema>, String> {
    let queue = row.queue.as_str();
    let mut task = NewTask::from(row);
    task.headers.extend(change.headers.clone());
    if let Some((payload, encoding)) = &change.payload {
        task.payload = payload.clone();
        task.payload_encoding = *encoding;
    }
    // The rules for accepted tasks allow a past deadline: if it passes during the call, the
    // endpoint is not at fault.
    validate::check(
        &task,
        &context.settings.task_rules(queue).for_accepted(),
        now_unix_ms,
    )?;
    Ok(context.settings.payload_schema(queue).cloned())
}

fn apply(change: Change, row: &mut TaskRow) {
    let Change {
        mut headers,
        priority,
        payload,
    } = change;
    // A task that was sent again may still have this header from its first insert.
    row.headers
        .retain(|(name, _)| name != NOT_ENRICHED.0 && !headers.contains_key(name));
    row.headers.extend(headers.drain());
    row.headers.sort();
    row.priority = priority.unwrap_or(row.priority);
    if let Some((payload, encoding)) = payload {
        row.payload = payload;
        row.payload_encoding = encoding;
    }
}

/// Marks in the headers that the task was not enriched.
fn mark(row: &mut TaskRow) {
    row.headers.retain(|(name, _)| name != NOT_ENRICHED.0);
    row.headers
        .push((NOT_ENRICHED.0.to_owned(), NOT_ENRICHED.1.to_owned()));
    row.headers.sort();
}
