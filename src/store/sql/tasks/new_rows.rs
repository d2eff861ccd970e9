//! The rows of new tasks.

use crate::store::{
    NewRow, Result, Turn,
    sql::{
        rows::headers_text,
        session::Session,
        statement::{Statement, Value, pieces},
    },
};

/// Inserts the rows. Returns how many were inserted, if the database reports that.
pub(super) async fn insert_rows<S: Session>(
    session: &mut S,
    candidates: &[&NewRow],
    insertion: Turn,
) -> Result<u64> {
    let mut inserted = 0;
    let era = session.era();
    for piece in pieces(candidates, |row| row.task.weight()) {
        let insert = Statement::new(S::INSERT).sql(
            " INTO tasks (id, key_hash, queue, shard, task_key, replicas, priority, max_attempts, lease_ms, \
             not_before_ms, headers, traceparent, created_ms, updated_ms, insertion, on_bus, \
             payload_encoding, payload",
        );
        // Most tasks have no backoff, deadline or limit key, and pay nothing for them.
        let more = piece.iter().any(|row| has_more(row));
        // And most are in no sequence and no tree, and steps of no execution.
        let in_sequence = piece.iter().any(|row| row.task.sequence.is_some());
        let in_tree = piece.iter().any(|row| row.task.tree.is_some());
        let are_steps = piece.iter().any(|row| row.task.execution.is_some());
        let insert = insert
            .sql(if more {
                ", backoff, deadline_ms, limit_key"
            } else {
                ""
            })
            .sql(if in_sequence {
                ", sequence, on_dead"
            } else {
                ""
            })
            .sql(if in_tree { ", tree" } else { "" })
            .sql(if are_steps { ", execution" } else { "" })
            .sql(", era)");
        let rows = piece.iter().map(|row| {
            let sequence = in_sequence.then(|| sequence_values(row));
            let tree = in_tree.then(|| tree_value(row));
            let execution = are_steps.then(|| execution_value(row));
            task_values(row, insertion)
                .into_iter()
                .chain(more.then(|| more_values(row)).into_iter().flatten())
                .chain(sequence.into_iter().flatten())
                .chain(tree)
                .chain(execution)
                .chain(era.map(Value::from))
        });
        let columns = 18
            + 3 * usize::from(more)
            + 2 * usize::from(in_sequence)
            + usize::from(in_tree)
            + usize::from(are_steps);
        let row = format!("({}, {})", vec!["?"; columns].join(", "), S::ERA);
        let insert = insert.sql(" VALUES ").rows(&row, ", ", rows);
        inserted += session.execute(insert.sql(&S::keep_first("id"))).await?;
    }
    Ok(inserted)
}

fn task_values(row: &NewRow, insertion: Turn) -> [Value<'_>; 18] {
    let task = &row.task;
    [
        (&task.id).into(),
        (&task.key_hash).into(),
        (&task.queue).into(),
        task.partition.into(),
        (&task.key[..]).into(),
        task.replicas.into(),
        task.priority.into(),
        task.max_attempts.into(),
        task.lease_ms.into(),
        task.not_before_unix_ms.into(),
        headers_text(&task.headers).into(),
        task.traceparent.as_str().into(),
        task.created_unix_ms.into(),
        task.created_unix_ms.into(),
        insertion.into(),
        row.is_batched().into(),
        task.payload_encoding.into(),
        (&task.payload[..]).into(),
    ]
}

fn has_more(row: &NewRow) -> bool {
    row.task.backoff.is_some() || row.task.deadline_unix_ms > 0 || !row.task.limit_key.is_empty()
}

/// The backoff, the deadline and the limit key.
fn more_values(row: &NewRow) -> [Value<'_>; 3] {
    let backoff = row
        .task
        .backoff
        .map(|backoff| backoff.packed(backoff.give_up_after_ms).to_vec());
    [
        backoff.unwrap_or_default().into(),
        row.task.deadline_unix_ms.into(),
        row.task.limit_key.as_str().into(),
    ]
}

/// The name of the sequence, and what a death means for it.
fn sequence_values(row: &NewRow) -> [Value<'_>; 2] {
    match &row.task.sequence {
        Some(sequence) => [
            sequence.name.as_str().into(),
            (sequence.on_dead as i64).into(),
        ],
        None => ["".into(), 0_i64.into()],
    }
}

/// The tree and the subtree behind it; empty if the row is in none, and others of its statement are.
fn tree_value(row: &NewRow) -> Value<'_> {
    let task = &row.task;
    let mut ids = Vec::new();
    if let Some(tree) = &task.tree {
        ids.extend_from_slice(tree.id(task.id).as_bytes());
        if let Some(subtree) = tree.subtree() {
            ids.extend_from_slice(subtree.as_bytes());
        }
    }
    ids.into()
}

/// The execution; empty if the row is a step of none, and others of its statement are.
fn execution_value(row: &NewRow) -> Value<'_> {
    let execution = row.task.execution.as_ref();
    execution.map_or_else(|| b"".as_slice().into(), Value::from)
}
