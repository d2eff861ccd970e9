//! The programs of executions that were stepped lately.

use std::{collections::HashMap, sync::Arc};

use super::error::Failure;
use crate::{
    model::WorkflowVersion,
    store::{Store, StoredDefinition},
    workflow::{
        definition::{Definition, Mistake},
        expression::{self, with_stack},
        program::{Documents, Program},
    },
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
        let no_thread = |why: String| Failure::Stack(why);
        let compiling = tokio::task::spawn_blocking(move || compile(&stored)).await;
        let compiled = compiling.map_err(|error| no_thread(error.to_string()))?;
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

/// Compiles a definition. The outer error is that there is no thread for it.
fn compile(stored: &StoredDefinition) -> Result<Result<Program, String>, expression::Error> {
    let first = |mistakes: Vec<Mistake>| {
        mistakes
            .first()
            .map(ToString::to_string)
            .unwrap_or_default()
    };
    with_stack(|| {
        let documents: Documents = match stored.documents.as_str() {
            "" => Documents::new(),
            documents => serde_json::from_str(documents).map_err(|error| error.to_string())?,
        };
        let read = Definition::read(&stored.text).map_err(first)?;
        Program::compile(&read, &documents).map_err(first)
    })
}
