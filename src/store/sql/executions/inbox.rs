//! The rows of inboxes and the timers: what makes executions go on.

use crate::{
    model::{ExecutionId, ExecutionStatus, StoredStatus, TaskId},
    store::{
        Happening, InboxPage, InboxRow, Result, Timer,
        sql::{
            backend::Backend,
            dialect::Dialect as _,
            rows::{corrupt, execution_id, number, task_id},
            runner::Runner,
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

const START: i64 = 0;
const CANCEL: i64 = 4;
const LOOK_AGAIN: i64 = 5;
const GO_ON: i64 = 6;

/// What is no end of a step.
const OTHERS: [Happening; 4] = [
    Happening::Start,
    Happening::Cancel,
    Happening::LookAgain,
    Happening::GoOn,
];

/// The columns `task` and `happening`.
fn columns_of(happening: &Happening) -> (TaskId, i64) {
    match happening {
        Happening::Start => (TaskId::FIRST, START),
        Happening::StepEnded { task, status } => (*task, *status as i64),
        Happening::Cancel => (TaskId::FIRST, CANCEL),
        Happening::LookAgain => (TaskId::FIRST, LOOK_AGAIN),
        Happening::GoOn => (TaskId::FIRST, GO_ON),
    }
}

fn happening_of(task: TaskId, number: i64) -> Result<Happening> {
    match number {
        START => Ok(Happening::Start),
        CANCEL => Ok(Happening::Cancel),
        LOOK_AGAIN => Ok(Happening::LookAgain),
        GO_ON => Ok(Happening::GoOn),
        _ => match StoredStatus::from_number(number) {
            Some(status) => Ok(Happening::StepEnded { task, status }),
            None => Err(corrupt(format!("the happening {number}"))),
        },
    }
}

/// Adds rows. One that is there stays.
pub(crate) async fn add<S: Session>(session: &mut S, rows: &[InboxRow]) -> Result<()> {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| (row, columns_of(&row.happening)))
        .collect();
    for piece in pieces(&rows, |_| 0) {
        let values = piece.iter().map(|(row, (task, happening))| {
            [
                (&row.execution).into(),
                task.into(),
                happening.into(),
                row.at_unix_ms.into(),
            ]
        });
        let insert =
            Statement::new("INSERT INTO execution_inbox (execution, task, happening, at_ms)")
                .values(values)
                .sql(&S::keep_first("happening"));
        session.execute(insert).await?;
    }
    Ok(())
}

/// Removes rows that were consumed.
pub(crate) async fn consume<S: Session>(
    session: &mut S,
    rows: &[(ExecutionId, Happening)],
) -> Result<()> {
    let mut ends = Vec::new();
    for (execution, happening) in rows {
        if let Happening::StepEnded { task, .. } = happening {
            ends.push((*execution, *task));
        }
    }
    remove_ends(session, &ends).await?;
    for kind in OTHERS {
        let of_kind = rows.iter().filter(|(_, happening)| *happening == kind);
        let executions: Vec<ExecutionId> = of_kind.map(|(execution, _)| *execution).collect();
        let (task, number) = columns_of(&kind);
        for executions in lists(&executions) {
            let remove =
                Statement::new("DELETE FROM execution_inbox WHERE task = ? AND happening = ? ")
                    .bind(&task)
                    .bind(number)
                    .sql("AND execution IN ")
                    .list(executions);
            session.execute(remove).await?;
        }
    }
    Ok(())
}

/// Completes a statement with the condition that a row is of one of these steps.
fn of_steps<'a>(statement: Statement<'a>, steps: &'a [(ExecutionId, TaskId)]) -> Statement<'a> {
    let steps = steps
        .iter()
        .map(|(execution, task)| [execution.into(), task.into()]);
    statement
        .sql(" WHERE ")
        .rows("(execution = ? AND task = ?)", " OR ", steps)
}

/// Removes the ends of these steps.
pub(crate) async fn remove_ends<S: Session>(
    session: &mut S,
    steps: &[(ExecutionId, TaskId)],
) -> Result<()> {
    for steps in pieces(steps, |_| 0) {
        let remove = Statement::new("DELETE FROM execution_inbox");
        session.execute(of_steps(remove, steps)).await?;
    }
    Ok(())
}

/// Removes all rows and timers of these executions.
pub(crate) async fn clear<S: Session>(session: &mut S, executions: &[ExecutionId]) -> Result<()> {
    for executions in lists(executions) {
        for table in ["execution_inbox", "execution_timers"] {
            let clear = Statement::new(format!("DELETE FROM {table} WHERE execution IN "));
            session.execute(clear.list(executions)).await?;
        }
    }
    Ok(())
}

/// The tasks of those of these steps whose ends are not consumed.
pub(crate) async fn unconsumed<S: Session>(
    session: &mut S,
    steps: &[(ExecutionId, TaskId)],
) -> Result<Vec<TaskId>> {
    let mut unconsumed = Vec::new();
    for steps in pieces(steps, |_| 0) {
        let found = Statement::new("SELECT task FROM execution_inbox ").sql(S::BY_PRIMARY_KEY);
        unconsumed.extend(session.ids(of_steps(found, steps)).await?);
    }
    Ok(unconsumed)
}

/// Adds and removes timers of an execution.
pub(crate) async fn change_timers<S: Session>(
    session: &mut S,
    execution: &ExecutionId,
    armed: &[(u64, i64)],
    disarmed: &[u64],
) -> Result<()> {
    let disarmed: Vec<i64> = disarmed.iter().map(|number| number.cast_signed()).collect();
    for numbers in lists(&disarmed) {
        let remove = Statement::new("DELETE FROM execution_timers WHERE execution = ? ")
            .bind(execution)
            .sql("AND number IN ")
            .list(numbers);
        session.execute(remove).await?;
    }
    for piece in pieces(armed, |_| 0) {
        let rows = piece
            .iter()
            .map(|(number, due_ms)| [execution.into(), (*number).into(), due_ms.into()]);
        let insert = Statement::new("INSERT INTO execution_timers (execution, number, due_ms)")
            .values(rows)
            .sql(&S::replace("execution, number", &["due_ms"]));
        session.execute(insert).await?;
    }
    Ok(())
}

/// A row of an inbox, and the status of its execution, if there is one.
type InboxColumns = (Vec<u8>, Vec<u8>, i64, i64, Option<i64>);

pub(crate) async fn page<DB: Backend>(
    sql: &Runner<DB>,
    after: Option<&InboxRow>,
    without: &[ExecutionId],
    limit: u32,
) -> Result<InboxPage> {
    let start = InboxRow {
        execution: ExecutionId::FIRST,
        happening: Happening::Start,
        at_unix_ms: i64::MIN,
    };
    let after = after.unwrap_or(&start);
    let (task, happening) = columns_of(&after.happening);
    let page = Statement::new(
        "SELECT inbox.execution, inbox.task, inbox.happening, inbox.at_ms, executions.status \
         FROM execution_inbox AS inbox ",
    )
    .sql(&DB::Connection::by_index("execution_inbox_at"))
    .sql(
        " LEFT JOIN executions ON executions.id = inbox.execution WHERE inbox.at_ms >= ? \
         AND (inbox.at_ms > ? OR (inbox.execution, inbox.task, inbox.happening) > (?, ?, ?)) ",
    )
    .bind(after.at_unix_ms)
    .bind(after.at_unix_ms)
    .bind(&after.execution)
    .bind(&task)
    .bind(happening);
    let page = match without {
        [] => page,
        _ => page.sql("AND inbox.execution NOT IN ").list(without),
    };
    let page = page
        .sql(" ORDER BY inbox.at_ms, inbox.execution, inbox.task, inbox.happening LIMIT ?")
        .bind(limit);
    let found: Vec<InboxColumns> = sql.read("inbox", page).await?;
    let is_full = found.len() >= limit as usize;
    let mut page = InboxPage::default();
    let mut over = Vec::new();
    for (execution, task, happening, at_unix_ms, status) in found {
        let row = InboxRow {
            execution: execution_id(&execution)?,
            happening: happening_of(task_id(&task)?, happening)?,
            at_unix_ms,
        };
        if is_full {
            page.last = Some(row);
        }
        match status.map(ExecutionStatus::from_number) {
            Some(Some(status)) if !status.is_final() => page.rows.push(row),
            Some(Some(_)) | None => over.push((row.execution, row.happening)),
            // Left to the later taskd that knows it.
            Some(None) => {}
        }
    }
    if !over.is_empty() {
        sql.run("inbox", over, |session, over| {
            Box::pin(consume(session, over))
        })
        .await?;
    }
    Ok(page)
}

pub(crate) async fn due_timers<DB: Backend>(
    sql: &Runner<DB>,
    now_unix_ms: i64,
    after: Option<&Timer>,
    limit: u32,
) -> Result<Vec<Timer>> {
    let start = Timer {
        due_unix_ms: i64::MIN,
        execution: ExecutionId::FIRST,
        number: 0,
    };
    let after = after.unwrap_or(&start);
    let due = Statement::new("SELECT due_ms, execution, number FROM execution_timers ")
        .sql(&DB::Connection::by_index("execution_timers_due"))
        .sql(
            " WHERE due_ms >= ? AND due_ms <= ? \
             AND (due_ms > ? OR (execution, number) > (?, ?)) \
             ORDER BY due_ms, execution, number LIMIT ?",
        )
        .bind(after.due_unix_ms)
        .bind(now_unix_ms)
        .bind(after.due_unix_ms)
        .bind(&after.execution)
        .bind(after.number)
        .bind(limit);
    let mut timers = Vec::new();
    for (due_unix_ms, execution, timer) in
        sql.read::<(i64, Vec<u8>, i64)>("due_timers", due).await?
    {
        timers.push(Timer {
            due_unix_ms,
            execution: execution_id(&execution)?,
            number: number(timer)?,
        });
    }
    Ok(timers)
}
