//! The programs of executions that were stepped lately.

use std::{collections::HashMap, sync::Arc};

use super::error::Failure;
use crate::{
    model::WorkflowVersion,
    store::Store,
    workflow::{expression::with_stack, program::Program},
};

/// How many programs are kept at most.
const MOST: usize = 256;

/// Programs by the hashes that executions are pinned to.
#[derive(Default)]
pub(super) struct Programs(HashMap<String, Arc<Program>>);

impl Programs {
    /// Returns the program of an execution. The inner error says why there is none.
    pub(super) async fn get(
        &mut self,
        store: &dyn Store,
        workflow: &WorkflowVersion,
        hash: &str,
    ) -> Result<Result<Arc<Program>, String>, Failure> {
        if let Some(known) = self.0.get(hash) {
            return Ok(Ok(Arc::clone(known)));
        }
        let Some(stored) = store.definition(workflow).await? else {
            return Ok(Err(format!("there is no definition of {workflow}")));
        };
        let compiling = tokio::task::spawn_blocking(move || {
            with_stack(|| Program::of_stored(&stored.text, &stored.documents))
        });
        let no_thread = |why: String| Failure::Stack(why);
        let compiled = compiling
            .await
            .map_err(|error| no_thread(error.to_string()))?;
        let program = match compiled.map_err(|error| no_thread(error.to_string()))? {
            Ok(program) if program.hash == hash => Arc::new(program),
            Ok(_) => {
                return Ok(Err(format!("{workflow} has another hash than {hash}")));
            }
            Err(why) => return Ok(Err(format!("cannot read {workflow}: {why}"))),
        };
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.insert(hash.to_owned(), Arc::clone(&program));
        Ok(Ok(program))
    }
}
