//! Workflows: deploying, showing and deleting definitions.

use std::{cmp::Ordering, sync::Arc};

use serde_json::json;
use tracing::Instrument as _;

use super::{
    access::{is_scoped, reaches, who},
    error::Error,
    handle::{Api, span},
    query::{LISTED, bounded},
    reader::Reader,
    workflow_documents,
};
use crate::{
    config::Settings,
    model::{
        Act, Caller, ECHO, HTTP_QUEUE, NewTask, QueueName, TaskId, WorkflowList, WorkflowVersion,
        WorkflowView, shorten, validate,
    },
    store::{Deleted, KeptDefinition, ListedDefinition, StoredDefinition},
    workflow::{
        definition::{
            CallHttp, CallOpenApi, Definition, Mistake, ReadDefinition, StepOptions, Task, TaskKind,
        },
        expression::with_stack,
        program::{Documents, Program},
    },
};

/// The version that stands for the latest one.
pub(super) const LATEST: &str = "latest";
/// How many versions are read at once to find the latest.
const VERSIONS: u32 = 1_000;

impl Api {
    /// A page of the workflows that the caller reaches, by namespace, name and version as texts.
    pub async fn workflows(
        &self,
        caller: &Caller,
        namespace: &str,
        after: &str,
        limit: u32,
    ) -> Result<WorkflowList, Error> {
        let query = self.query()?;
        let limit = bounded(limit, LISTED)?;
        let after = match after {
            "" => None,
            cursor => Some(version_of_cursor(cursor)?),
        };
        let list = async {
            let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
            let store = query.store();
            let page = store
                .definitions((namespace, None), after.as_ref(), limit)
                .await?;
            let next = page.last().filter(|_| page.len() >= limit as usize);
            let next = next.map(|last| last.workflow.to_string());
            let mut workflows = Vec::with_capacity(page.len());
            for listed in page {
                if query
                    .reaches_workflow(caller, &listed.workflow, &listed.hash)
                    .await?
                {
                    workflows.push(listed_view(listed));
                }
            }
            Ok(WorkflowList { workflows, next })
        };
        list.instrument(span("workflows", caller)).await
    }

    /// One version of a workflow with its definition. The version may be `latest`.
    pub async fn workflow(
        &self,
        caller: &Caller,
        workflow: &WorkflowVersion,
    ) -> Result<WorkflowView, Error> {
        let query = self.query()?;
        let get = async {
            let (stored, queues) = query.reached_definition(caller, workflow).await?;
            Ok(view(stored, &queues))
        };
        get.instrument(span("workflow", caller)).await
    }

    /// Deploys a definition. Returns whether it is new. With `dry_run` nothing is stored.
    pub async fn deploy_workflow(
        &self,
        caller: &Caller,
        text: String,
        dry_run: bool,
    ) -> Result<(WorkflowView, bool), Error> {
        let query = self.query()?;
        let deploy = async {
            let settings = Arc::clone(&query.settings);
            let now = query.now_unix_ms();
            let checking = move || (checked(&settings, &text, now), text);
            let (read, text) = checking_thread(checking).await?;
            let read = read.map_err(Error::WrongDefinition)?;
            let documents = query.documents(caller, &read.definition, &text).await?;
            let stored_documents = match documents.is_empty() {
                true => String::new(),
                false => json!(documents).to_string(),
            };
            let compiling = move || Program::compile(&read, &documents);
            let program = checking_thread(compiling).await?;
            let program = program.map_err(Error::WrongDefinition)?;
            let queues: Vec<QueueName> = program.queues.iter().cloned().collect();
            reaches_all(caller, &queues)?;
            let workflow = WorkflowVersion {
                namespace: program.namespace,
                name: program.name,
                version: program.version,
            };
            let mut stored = StoredDefinition {
                workflow,
                hash: program.hash,
                text,
                documents: stored_documents,
                deployed_by: who(caller).to_owned(),
                deployed_unix_ms: now,
            };
            if dry_run {
                let view = view(stored, &queues);
                return Ok((
                    WorkflowView {
                        deployed_by: String::new(),
                        deployed_at: None,
                        text: String::new(),
                        ..view
                    },
                    false,
                ));
            }
            let target = stored.workflow.to_string();
            let act = Act::at_time(now, who(caller), "deploy workflow", &target);
            let is_new = match query.store().keep_definition(&stored, &act).await? {
                KeptDefinition::New => true,
                KeptDefinition::Same => {
                    let before = query.store().definition(&stored.workflow).await?;
                    stored = before.unwrap_or(stored);
                    false
                }
                KeptDefinition::Other => {
                    return Err(Error::Conflict(format!(
                        "workflow {target} is deployed with another text, and a version never changes; deploy this one \
                         under another version"
                    )));
                }
            };
            stored.text.clear();
            Ok((view(stored, &queues), is_new))
        };
        deploy.instrument(span("deploy_workflow", caller)).await
    }

    /// Deletes a version of which no execution is open.
    pub async fn delete_workflow(
        &self,
        caller: &Caller,
        workflow: &WorkflowVersion,
    ) -> Result<(), Error> {
        let query = self.query()?;
        let delete = async {
            if workflow.version == LATEST {
                let why = "name the version to delete; latest is another one tomorrow";
                return Err(Error::Invalid(why.to_owned()));
            }
            query.reached_definition(caller, workflow).await?;
            let target = workflow.to_string();
            let act = Act::at_time(query.now_unix_ms(), who(caller), "delete workflow", &target);
            match query.store().delete_definition(workflow, &act).await? {
                Deleted::Yes => Ok(()),
                Deleted::Unknown => Err(unknown(workflow)),
                Deleted::Running => Err(Error::Conflict(format!(
                    "executions of {target} run; wait for them, or cancel them"
                ))),
            }
        };
        delete.instrument(span("delete_workflow", caller)).await
    }
}

impl Reader {
    /// The documents of a definition: as they were when the same text was deployed, otherwise as
    /// they are now.
    async fn documents(
        &self,
        caller: &Caller,
        definition: &Definition,
        text: &str,
    ) -> Result<Documents, Error> {
        if definition.documents().is_empty() {
            return Ok(Documents::new());
        }
        reaches(caller, HTTP_QUEUE)?;
        let document = &definition.document;
        let workflow = WorkflowVersion {
            namespace: document.namespace.clone(),
            name: document.name.clone(),
            version: document.version.clone(),
        };
        let before = self.store().definition(&workflow).await?;
        let before = before.filter(|before| before.text == text);
        let before = before.and_then(|before| serde_json::from_str(&before.documents).ok());
        match before {
            Some(documents) => Ok(documents),
            None => {
                let fetching = workflow_documents::fetch(&self.outbound, definition);
                fetching.await.map_err(Error::WrongDefinition)
            }
        }
    }

    /// The definition of a version, which may be `latest`, if the caller reaches all of its queues.
    pub(super) async fn reached_definition(
        &self,
        caller: &Caller,
        workflow: &WorkflowVersion,
    ) -> Result<(StoredDefinition, Arc<[QueueName]>), Error> {
        let version = match workflow.version.as_str() {
            LATEST => self.latest(workflow).await?,
            _ => workflow.clone(),
        };
        let stored = self.store().definition(&version).await?;
        let stored = stored.ok_or_else(|| unknown(workflow))?;
        let queues = self.workflow_queues.of(&stored).await;
        if queues.is_none() && is_scoped(caller) {
            return Err(unknown(workflow));
        }
        let queues = queues.unwrap_or_default();
        reaches_all(caller, &queues)?;
        Ok((stored, queues))
    }

    /// The latest version, in the order of semantic versions.
    async fn latest(&self, workflow: &WorkflowVersion) -> Result<WorkflowVersion, Error> {
        let WorkflowVersion {
            namespace, name, ..
        } = workflow;
        let of = (Some(namespace.as_str()), Some(name.as_str()));
        let mut latest: Option<WorkflowVersion> = None;
        let mut after: Option<WorkflowVersion> = None;
        loop {
            let page = self
                .store()
                .definitions(of, after.as_ref(), VERSIONS)
                .await?;
            let is_last = page.len() < VERSIONS as usize;
            after = page.last().map(|last| last.workflow.clone());
            for one in page {
                let is_later = latest.as_ref().is_none_or(|latest| {
                    by_precedence(&one.workflow.version, &latest.version).is_gt()
                });
                if is_later {
                    latest = Some(one.workflow);
                }
            }
            if is_last {
                return latest.ok_or_else(|| unknown(workflow));
            }
        }
    }

    /// Whether a caller reaches all queues of a definition with this hash. One that is gone is only for
    /// callers that reach everything.
    pub(super) async fn reaches_workflow(
        &self,
        caller: &Caller,
        workflow: &WorkflowVersion,
        hash: &str,
    ) -> Result<bool, Error> {
        if !is_scoped(caller) {
            return Ok(true);
        }
        let queues = match self.workflow_queues.known(hash) {
            Some(known) => known,
            None => {
                let stored = self.store().definition(workflow).await?;
                // A version may have been deleted, and deployed again as another one.
                let Some(stored) = stored.filter(|stored| stored.hash == hash) else {
                    return Ok(false);
                };
                self.workflow_queues.of(&stored).await
            }
        };
        Ok(queues.is_some_and(|queues| does_reach(caller, &queues)))
    }
}

/// Refuses a caller that does not reach all of these queues.
fn reaches_all(caller: &Caller, queues: &[QueueName]) -> Result<(), Error> {
    for queue in queues {
        reaches(caller, queue.as_str())?;
    }
    Ok(())
}

fn does_reach(caller: &Caller, queues: &[QueueName]) -> bool {
    let mut queues = queues.iter();
    queues.all(|queue| caller.access.reaches(queue.as_str()))
}

fn unknown(workflow: &WorkflowVersion) -> Error {
    Error::NoSuchWorkflow(shorten(&workflow.to_string(), 2 * ECHO).into_owned())
}

/// Runs what may need much stack or time.
async fn checking_thread<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let failed = |why: String| Error::JustFailed(format!("cannot check a definition: {why}"));
    let ran = tokio::task::spawn_blocking(move || with_stack(run)).await;
    let ran = ran.map_err(|error| failed(error.to_string()))?;
    ran.map_err(|error| failed(error.to_string()))
}

/// Reads a definition, and checks what depends on the settings.
fn checked(
    settings: &Settings,
    text: &str,
    now_unix_ms: i64,
) -> Result<ReadDefinition, Vec<Mistake>> {
    let read = Definition::read(text)?;
    let mut mistakes = Vec::new();
    let definition = &read.definition;
    let functions = definition.use_.functions.values();
    for task in definition.do_.iter().chain(functions) {
        check_task(settings, definition, task, now_unix_ms, &mut mistakes);
    }
    match mistakes.is_empty() {
        true => Ok(read),
        false => Err(mistakes),
    }
}

fn check_task(
    settings: &Settings,
    definition: &Definition,
    task: &Task,
    now_unix_ms: i64,
    mistakes: &mut Vec<Mistake>,
) {
    let says = match &task.kind {
        TaskKind::CallHttp(CallHttp { step, .. })
        | TaskKind::CallOpenApi(CallOpenApi { step, .. }) => {
            wrong_step(settings, HTTP_QUEUE, step, now_unix_ms)
        }
        TaskKind::CallFunction(call) if !definition.use_.functions.contains_key(&call.function) => {
            let queue = call.step.queue.as_ref();
            let queue = queue.map_or(call.function.as_str(), QueueName::as_str);
            match queue {
                HTTP_QUEUE => Some(validate::queue_is_own()),
                queue => wrong_step(settings, queue, &call.step, now_unix_ms),
            }
        }
        _ => None,
    };
    if let Some(says) = says {
        mistakes.push(Mistake {
            line: task.place.line,
            column: task.place.column,
            pointer: task.place.pointer.clone(),
            says,
        });
    }
    for inner in task.inner() {
        check_task(settings, definition, inner, now_unix_ms, mistakes);
    }
}

/// What is wrong about the settings of a step.
fn wrong_step(
    settings: &Settings,
    queue: &str,
    step: &StepOptions,
    now_unix_ms: i64,
) -> Option<String> {
    let task = NewTask {
        id: Some(TaskId::at(now_unix_ms, 0)),
        queue: queue.to_owned(),
        replicas: step.replicas,
        priority: step.priority,
        finish_within: step.finish_within,
        lease_duration: step.lease,
        max_attempts: step.max_attempts,
        backoff: step.backoff,
        ..NewTask::default()
    };
    let rules = settings.task_rules(queue).for_step();
    validate::check(&task, &rules, now_unix_ms).err()
}

fn version_of_cursor(cursor: &str) -> Result<WorkflowVersion, Error> {
    let parts: Vec<&str> = cursor.split('/').collect();
    match parts[..] {
        [namespace, name, version] => Ok(WorkflowVersion {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            version: version.to_owned(),
        }),
        _ => Err(Error::Invalid(format!(
            "{:?} is not a cursor; send that of the answer before",
            shorten(cursor, ECHO)
        ))),
    }
}

fn listed_view(listed: ListedDefinition) -> WorkflowView {
    let ListedDefinition {
        workflow,
        hash,
        deployed_by,
        deployed_unix_ms,
    } = listed;
    let stored = StoredDefinition {
        workflow,
        hash,
        text: String::new(),
        documents: String::new(),
        deployed_by,
        deployed_unix_ms,
    };
    view(stored, &[])
}

fn view(stored: StoredDefinition, queues: &[QueueName]) -> WorkflowView {
    let WorkflowVersion {
        namespace,
        name,
        version,
    } = stored.workflow;
    WorkflowView {
        namespace,
        name,
        version,
        hash: stored.hash,
        queues: queues.iter().map(ToString::to_string).collect(),
        deployed_by: stored.deployed_by,
        deployed_at: Some(stored.deployed_unix_ms),
        text: stored.text,
    }
}

/// Compares two semantic versions. The part behind `+` does not count, unless all else is equal.
fn by_precedence(one: &str, other: &str) -> Ordering {
    fn numbers(core: &str) -> Vec<(usize, &str)> {
        core.split('.')
            .map(|number| (number.len(), number))
            .collect()
    }
    fn identifiers(pre: &str) -> Vec<(bool, usize, &str)> {
        pre.split('.')
            .map(
                |part| match part.bytes().all(|byte| byte.is_ascii_digit()) {
                    true => (false, part.len(), part),
                    false => (true, 0, part),
                },
            )
            .collect()
    }
    fn parts(version: &str) -> (&str, Option<&str>) {
        let version = version
            .split_once('+')
            .map_or(version, |(before, _)| before);
        match version.split_once('-') {
            Some((core, pre)) => (core, Some(pre)),
            None => (version, None),
        }
    }
    let ((core, pre), (other_core, other_pre)) = (parts(one), parts(other));
    numbers(core)
        .cmp(&numbers(other_core))
        .then_with(|| match (pre, other_pre) {
            (None, None) => Ordering::Equal,
            // A release is later than what came before it.
            (None, Some(_)) => Ordering::Greater,
            (Some(_), None) => Ordering::Less,
            (Some(pre), Some(other)) => identifiers(pre).cmp(&identifiers(other)),
        })
        .then_with(|| one.cmp(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_as_semantic_versions() {
        let versions = [
            "0.9.10",
            "1.0.0-alpha",
            "1.0.0-alpha.1",
            "1.0.0-alpha.beta",
            "1.0.0-beta.2",
            "1.0.0-beta.11",
            "1.0.0-rc.1",
            "1.0.0",
            "1.0.0+build",
            "1.2.0",
            "1.10.0",
        ];
        for (before, after) in versions.iter().zip(&versions[1..]) {
            assert_eq!(by_precedence(before, after), Ordering::Less, "{after}");
        }
    }
}
