//! Reads what callers of this process wait for.
//!
//! SQL alone says when a tree or an execution has ended. However many callers wait, a process reads
//! each of them once in a while, and several in one statement.

use std::time::Duration;

use super::reader::Reader;
use crate::runtime::{Loop, Supervisor};

/// How often what is watched is read.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How many are read at a time.
const AT_ONCE: usize = 256;

impl Reader {
    /// Reads what the callers of this process watch, until the stop.
    pub fn read_for_watchers(&self, supervisor: &Supervisor) {
        supervisor.spawn_loop("read-watched", self.clone(), |reader, cx| async move {
            reader.read_watched(&cx).await
        });
    }

    async fn read_watched(&self, cx: &Loop) {
        loop {
            let trees = self.tree_watches.watched();
            let executions = self.execution_watches.watched();
            if trees.is_empty() && executions.is_empty() {
                let begun = async {
                    tokio::select! {
                        () = self.tree_watches.begun() => {}
                        () = self.execution_watches.begun() => {}
                    }
                };
                tokio::select! {
                    () = cx.idle(begun) => {}
                    () = cx.stop.cancelled() => return,
                }
                continue;
            }
            // What cannot be read now is read the next time.
            for ids in trees.chunks(AT_ONCE) {
                match self.store().trees_by_id(ids).await {
                    Ok(read) => {
                        let read = read.into_iter().map(|tree| (tree.id, tree));
                        self.tree_watches.tell(ids, read);
                    }
                    Err(error) => {
                        tracing::debug!("cannot read {} trees that are watched: {error}", ids.len())
                    }
                }
                cx.beat();
            }
            for ids in executions.chunks(AT_ONCE) {
                match self.store().executions_by_id(ids).await {
                    Ok(read) => {
                        let read = read.into_iter().map(|one| (one.id, one.status));
                        self.execution_watches.tell(ids, read);
                    }
                    Err(error) => tracing::debug!(
                        "cannot read {} executions that are watched: {error}",
                        ids.len()
                    ),
                }
                cx.beat();
            }
            if !cx.pause(LOOK_EVERY).await {
                return;
            }
        }
    }
}
