//! Appends: one transaction stores what executions do next.
//!
//! The rows of the executions are locked first, in the order of their ids. Then come their logs and
//! timers, the tasks of their steps, and their inboxes. A transaction that ends a task adds to inboxes
//! last, and locks no execution.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use super::{inbox, rows::execution_status};
use crate::{
    config::EventQueues,
    model::{ChangeKind, ExecutionId, ExecutionStatus},
    store::{
        Append, Appended, Happening, InboxRow, Inserted, NewRow, Result, Stored, Turn,
        sql::{
            outbox::entries,
            rows::{execution_id, number},
            session::Session,
            statement::{Statement, Value, lists, pieces},
            tasks::{
                insert::{self, OldKeys},
                pending,
                steps::Steps,
                trees::Ends,
            },
        },
    },
};

/// The columns that an append changes.
const CHANGING: [&str; 6] = ["status", "seq", "batch", "input", "updated_ms", "ended_ms"];

/// An execution, locked.
struct Locked {
    status: ExecutionStatus,
    seq: u64,
    batch: Turn,
}

/// What becomes of an append.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Decision {
    Store,
    /// An earlier attempt of this call stored it, and the answer to its COMMIT was lost.
    Before,
    Lose,
}

impl Locked {
    fn decide(&self, append: &Append, batch: Turn) -> Decision {
        let stored_seq = append.seq + append.entries.len() as u64;
        if self.batch == batch && self.seq == stored_seq {
            Decision::Before
        } else if self.seq == append.seq && !self.status.is_final() {
            Decision::Store
        } else {
            Decision::Lose
        }
    }
}

/// Stores appends. Their steps become this batch, which no other call has.
pub(crate) async fn append<S: Session>(
    session: &mut S,
    appends: &[Append],
    batch: Turn,
    old_keys: &OldKeys,
    events: &Arc<EventQueues>,
) -> Result<(Stored<Appended>, Ends)> {
    let locked = lock(session, appends).await?;
    let mut taken = HashSet::new();
    let mut decisions = Vec::with_capacity(appends.len());
    for append in appends {
        let decision = match locked.get(&append.execution) {
            Some(locked) if taken.insert(append.execution) => locked.decide(append, batch),
            _ => Decision::Lose,
        };
        decisions.push(decision);
    }
    let stored: Vec<&Append> = appends
        .iter()
        .zip(&decisions)
        .filter(|(_, decision)| **decision == Decision::Store)
        .map(|(append, _)| append)
        .collect();
    write(session, &stored, batch).await?;
    add_entries(session, &stored).await?;
    for append in &stored {
        inbox::change_timers(session, &append.execution, &append.armed, &append.disarmed).await?;
    }
    let mut steps = Steps::new(events);
    let rows: Vec<&NewRow> = stored.iter().flat_map(|append| &append.steps).collect();
    let (answers, behind) = if rows.is_empty() {
        (Vec::new(), HashSet::new())
    } else {
        insert::insert(session, &rows, batch, &mut steps, old_keys, None).await?
    };
    cancel_steps(session, &stored).await?;
    change_inboxes(session, &stored).await?;
    let ends = steps.store(session).await?;
    let mut answers = answers.into_iter();
    let answer = |(append, decision): (&Append, &Decision)| match decision {
        Decision::Lose => Appended::Lost,
        Decision::Store => Appended::Yes {
            steps: answers.by_ref().take(append.steps.len()).collect(),
        },
        // The queue knows what is published again.
        Decision::Before => Appended::Yes {
            steps: vec![Inserted::New; append.steps.len()],
        },
    };
    let answers = appends.iter().zip(&decisions).map(answer).collect();
    let stored = Stored {
        answers,
        batch,
        behind,
        released: Vec::new(),
    };
    Ok((stored, ends))
}

async fn lock<S: Session>(
    session: &mut S,
    appends: &[Append],
) -> Result<BTreeMap<ExecutionId, Locked>> {
    let mut ids: Vec<ExecutionId> = appends.iter().map(|append| append.execution).collect();
    ids.sort_unstable();
    ids.dedup();
    let mut locked = BTreeMap::new();
    for ids in lists(&ids) {
        let lock = Statement::new("SELECT id, status, seq, batch FROM executions ")
            .sql(S::BY_PRIMARY_KEY)
            .sql(" WHERE id IN ")
            .list(ids)
            .sql(" ORDER BY id")
            .sql(S::FOR_UPDATE);
        for (id, status, seq, batch) in session.fetch::<(Vec<u8>, i64, i64, i64)>(lock).await? {
            let row = Locked {
                status: execution_status(status)?,
                seq: number(seq)?,
                batch: Turn(batch),
            };
            locked.insert(execution_id(&id)?, row);
        }
    }
    Ok(locked)
}

/// Writes the rows of the executions, which are locked, so that none of them is inserted.
async fn write<S: Session>(session: &mut S, appends: &[&Append], batch: Turn) -> Result<()> {
    let (with_summary, without): (Vec<&Append>, Vec<&Append>) = appends
        .iter()
        .copied()
        .partition(|append| append.summary.is_some());
    let columns_and_summary = [&CHANGING[..], &["summary"]].concat();
    for (appends, columns) in [
        (with_summary, &columns_and_summary[..]),
        (without, &CHANGING[..]),
    ] {
        for piece in pieces(&appends, |append| {
            append.summary.as_ref().map_or(0, |summary| summary.len())
        }) {
            let values = piece.iter().map(|append| row_of(append, batch));
            let write = Statement::new(
                "INSERT INTO executions (id, namespace, name, version, hash, traceparent, created_ms, status, \
                 seq, batch, input, summary, updated_ms, ended_ms)",
            );
            let write = write.values(values).sql(&S::replace("id", columns));
            session.execute(write).await?;
        }
    }
    Ok(())
}

/// The values of a row. Those of the columns that stay are not used.
fn row_of(append: &Append, batch: Turn) -> [Value<'_>; 14] {
    let summary = append.summary.as_deref().unwrap_or_default();
    let ended_ms = match append.status.is_final() {
        // 0 would mean that it is open.
        true => append.at_unix_ms.max(1),
        false => 0,
    };
    [
        (&append.execution).into(),
        "".into(),
        "".into(),
        "".into(),
        "".into(),
        "".into(),
        0_i64.into(),
        (append.status as u32).into(),
        (append.seq + append.entries.len() as u64).into(),
        batch.into(),
        b"".as_slice().into(),
        summary.into(),
        append.at_unix_ms.into(),
        ended_ms.into(),
    ]
}

async fn add_entries<S: Session>(session: &mut S, appends: &[&Append]) -> Result<()> {
    let mut entries = Vec::new();
    for append in appends {
        let numbered = append.entries.iter().zip(append.seq + 1..);
        entries.extend(numbered.map(|(entry, seq)| (&append.execution, seq, entry)));
    }
    for piece in pieces(&entries, |(_, _, entry)| entry.len()) {
        let rows = piece.iter().map(|(execution, seq, entry)| {
            [(*execution).into(), (*seq).into(), (&entry[..]).into()]
        });
        let insert =
            Statement::new(S::INSERT).sql(" INTO execution_events (execution, seq, entry)");
        session.execute(insert.values(rows)).await?;
    }
    Ok(())
}

/// Adds pending changes that cancel steps. Those of tasks that have ended are removed when somebody
/// reads them.
async fn cancel_steps<S: Session>(session: &mut S, appends: &[&Append]) -> Result<()> {
    let mut changes = Vec::new();
    for append in appends {
        let cancelled = append.cancelled.iter();
        changes.extend(cancelled.map(|task| (*task, entries::new_turn(), append.at_unix_ms)));
    }
    changes.sort_unstable_by_key(|(task, ..)| *task);
    pending::keep(session, ChangeKind::Cancel, &changes).await
}

async fn change_inboxes<S: Session>(session: &mut S, appends: &[&Append]) -> Result<()> {
    let mut consumed = Vec::new();
    let mut again = Vec::new();
    let mut ended = Vec::new();
    for append in appends {
        if append.status.is_final() {
            ended.push(append.execution);
            continue;
        }
        let happenings = append.consumed.iter();
        consumed.extend(happenings.map(|happening| (append.execution, *happening)));
        if append.goes_on {
            again.push(InboxRow {
                execution: append.execution,
                happening: Happening::GoOn,
                at_unix_ms: append.at_unix_ms,
            });
        }
    }
    inbox::consume(session, &consumed).await?;
    inbox::add(session, &again).await?;
    inbox::clear(session, &ended).await
}
