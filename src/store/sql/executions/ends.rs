//! The ends of steps: the transaction that ends the task of a step adds a row to the inbox of its
//! execution.

use std::collections::BTreeMap;

use super::inbox;
use crate::{
    model::{ExecutionId, StoredStatus, TaskId},
    store::{
        Happening, InboxRow, Result,
        sql::{
            session::Session,
            tasks::step::{StatusChange, Step},
        },
    },
};

/// What a transaction does to the tasks of steps.
#[derive(Default)]
pub(crate) struct Ends(BTreeMap<(ExecutionId, TaskId), Moved>);

struct Moved {
    /// Before and after the transaction.
    from: StoredStatus,
    to: StoredStatus,
    at_unix_ms: i64,
}

impl Step for Ends {
    fn hear(&mut self, change: &StatusChange<'_>) {
        let StatusChange::Moved {
            id,
            from,
            to,
            step_of: Some((execution, at_unix_ms)),
            ..
        } = change
        else {
            return;
        };
        let moved = self.0.entry((*execution, *id)).or_insert(Moved {
            from: *from,
            to: *to,
            at_unix_ms: *at_unix_ms,
        });
        moved.to = *to;
        moved.at_unix_ms = *at_unix_ms;
    }

    async fn store<S: Session>(self, session: &mut S) -> Result<()> {
        let mut back = Vec::new();
        let mut ended = Vec::new();
        for ((execution, task), moved) in self.0 {
            if moved.from == moved.to {
                continue;
            }
            if moved.from.is_final() {
                back.push((execution, task));
            }
            if moved.to.is_final() {
                ended.push(InboxRow {
                    execution,
                    happening: Happening::StepEnded {
                        task,
                        status: moved.to,
                    },
                    at_unix_ms: moved.at_unix_ms,
                });
            }
        }
        inbox::remove_ends(session, &back).await?;
        inbox::add(session, &ended).await
    }
}
