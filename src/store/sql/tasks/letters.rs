//! Dead letters: how they are stored, and how a dead task is sent again.
//!
//! A dead task gets its letter in the transaction in which it dies. The letter is removed with the
//! task, or when the task is sent again. A transaction locks tasks first, then their letters.

use bytes::Bytes;

use crate::{
    model::{DeadLetter, LetterId, LetterKind, QueueName},
    store::{
        Result,
        sql::{
            session::Session,
            statement::{Statement, pieces},
        },
    },
    wire,
};

/// A row of `letters` to insert.
#[derive(Clone)]
pub(crate) struct NewLetter {
    id: LetterId,
    queue: String,
    kind: LetterKind,
    at_ms: i64,
    summary: Bytes,
    content: Bytes,
}

impl From<&DeadLetter> for NewLetter {
    fn from(letter: &DeadLetter) -> Self {
        let kind = letter.kind();
        let mut brief = letter.clone();
        brief.value.clear();
        if let Some(task) = &mut brief.task {
            task.payload.clear();
            task.headers.clear();
        }
        // A discovered task may have an invalid queue name.
        let queue = QueueName::new(&letter.queue)
            .map_or_else(|_| String::new(), |queue| queue.as_str().to_owned());
        Self {
            id: letter.id(),
            queue,
            kind,
            at_ms: letter.at_unix_ms,
            summary: wire::dead_letter(&brief),
            content: if kind == LetterKind::Task {
                Bytes::new()
            } else {
                wire::dead_letter(letter)
            },
        }
    }
}

/// Adds letters. One that already exists stays unchanged, except that the letter of a task is
/// replaced, because the task has died again.
pub(crate) async fn add<S: Session>(session: &mut S, letters: &[NewLetter]) -> Result<()> {
    const INSERT: &str = "INSERT INTO letters (id, queue, kind, at_ms, summary, content)";
    let mut letters: Vec<&NewLetter> = letters.iter().collect();
    letters.sort_unstable_by_key(|letter| letter.id);
    let (tasks, others): (Vec<_>, Vec<_>) = letters
        .into_iter()
        .partition(|letter| letter.kind == LetterKind::Task);
    for (letters, suffix) in [
        (tasks, S::replace("id", &["at_ms", "summary"])),
        (others, S::keep_first("kind")),
    ] {
        for piece in pieces(&letters, |letter| {
            letter.summary.len() + letter.content.len()
        }) {
            let rows = piece.iter().map(|letter| {
                let NewLetter {
                    id,
                    queue,
                    kind,
                    at_ms,
                    summary,
                    content,
                } = letter;
                let (summary, content) = (&summary[..], &content[..]);
                [
                    id.into(),
                    queue.as_str().into(),
                    (*kind).into(),
                    (*at_ms).into(),
                    summary.into(),
                    content.into(),
                ]
            });
            session
                .execute(Statement::new(INSERT).values(rows).sql(&suffix))
                .await?;
        }
    }
    Ok(())
}
