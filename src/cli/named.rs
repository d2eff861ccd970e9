//! How the arguments of a command name a queue (QUEUE) or a task (QUEUE KEY, or its id). The hidden
//! flags --queue and --key mean the same.

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use tonic::Code;

use super::{
    client::{self, Taskd},
    patience::patiently,
    print::NotThere,
};
use crate::{
    model::TaskId,
    wire::pb::{ExplainTaskRequest, discovery_client::DiscoveryClient},
};

/// The queue that a command is about.
#[derive(Args)]
#[group(skip)]
pub(super) struct TheQueue {
    /// Name of the queue
    #[arg(value_name = "QUEUE", required_unless_present = "queue_flag")]
    queue: Option<String>,

    #[arg(
        id = "queue_flag",
        long = "queue",
        value_name = "NAME",
        conflicts_with = "queue",
        hide = true
    )]
    flag: Option<String>,
}

impl TheQueue {
    pub(super) fn name(&self) -> &str {
        self.queue
            .as_deref()
            .or(self.flag.as_deref())
            .unwrap_or_default()
    }
}

/// The queue of a command that is else about all.
#[derive(Args, Default)]
#[group(skip)]
pub(super) struct AnyQueue {
    /// Only this queue
    #[arg(value_name = "QUEUE")]
    queue: Option<String>,

    #[arg(
        id = "queue_flag",
        long = "queue",
        value_name = "NAME",
        conflicts_with = "queue",
        hide = true
    )]
    flag: Option<String>,
}

impl AnyQueue {
    pub(super) fn name(&self) -> Option<&str> {
        self.queue.as_deref().or(self.flag.as_deref())
    }
}

/// A task, or a queue.
#[derive(Args, Default)]
#[group(skip)]
pub(super) struct Named {
    /// Name of the queue; or the id of a task, without a key
    #[arg(value_name = "QUEUE|ID", required_unless_present = "queue_flag")]
    first: Option<String>,

    /// Key of the task
    #[arg(value_name = "KEY")]
    key: Option<String>,

    #[arg(id = "queue_flag", long = "queue", value_name = "NAME", hide = true)]
    queue: Option<String>,

    #[arg(id = "key_flag", long = "key", value_name = "KEY", hide = true)]
    key_of_flag: Option<String>,
}

/// What a command line names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Name {
    Id(TaskId),
    Key { queue: String, key: String },
    Queue(String),
}

impl Named {
    pub(super) fn new(
        first: Option<String>,
        key: Option<String>,
        queue: Option<String>,
        key_of_flag: Option<String>,
    ) -> Self {
        Self {
            first,
            key,
            queue,
            key_of_flag,
        }
    }

    pub(super) fn read(&self) -> anyhow::Result<Name> {
        let names: Vec<String> = self.first.iter().chain(&self.key).cloned().collect();
        let mut names = Names::read(names, self.queue.clone(), self.key_of_flag.as_slice())?;
        match (names.ids.pop(), names.queue) {
            (Some(id), _) => {
                ensure!(names.ids.is_empty(), "name one task");
                Ok(Name::Id(id))
            }
            (None, Some(queue)) => {
                let key = names.keys.pop();
                ensure!(names.keys.is_empty(), "name one task");
                Ok(match key {
                    Some(key) => Name::Key { queue, key },
                    None => Name::Queue(queue),
                })
            }
            (None, None) => bail!("name a task: QUEUE KEY, or its id"),
        }
    }

    /// Returns the task. Fails if only a queue is named.
    pub(super) fn task(&self, command: &str) -> anyhow::Result<Name> {
        let name = self.read()?;
        if let Name::Queue(queue) = &name {
            bail!(
                "{queue:?} is not the id of a task; to name it by its key: taskd {command} {queue} KEY"
            );
        }
        Ok(name)
    }
}

/// Several tasks, or a queue.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    pub(super) ids: Vec<TaskId>,
    pub(super) queue: Option<String>,
    pub(super) keys: Vec<String>,
}

impl Names {
    /// Reads `ID…`, `QUEUE`, or `QUEUE KEY…`. If a flag names the queue, all words are keys.
    pub(super) fn read(
        words: Vec<String>,
        queue: Option<String>,
        keys: &[String],
    ) -> anyhow::Result<Self> {
        let ids: Vec<TaskId> = words.iter().filter_map(|word| word.parse().ok()).collect();
        let mut words = words.into_iter();
        let has_words = words.len() > 0;
        if queue.is_none() && has_words && ids.len() == words.len() {
            ensure!(
                keys.is_empty(),
                "a key needs its queue: write QUEUE KEY, or --queue NAME --key KEY"
            );
            return Ok(Self {
                ids,
                ..Self::default()
            });
        }
        let queue = queue.or_else(|| words.next());
        ensure!(
            queue.is_some() || keys.is_empty(),
            "a key needs its queue: write QUEUE KEY, or --queue NAME --key KEY"
        );
        if let Some(id) = queue
            .as_deref()
            .filter(|name| name.parse::<TaskId>().is_ok())
        {
            let other = words.next().unwrap_or_default();
            bail!(
                "{other:?} is not the id of a task, and {id} is one: name tasks by ids, or by QUEUE KEY"
            );
        }
        Ok(Self {
            ids: Vec::new(),
            queue,
            keys: words.chain(keys.iter().cloned()).collect(),
        })
    }
}

/// Returns the id of the task with this key, or taskd's message that there is none.
pub(super) async fn id_of(
    taskd: &Taskd,
    queue: &str,
    key: &str,
) -> anyhow::Result<Result<String, String>> {
    let question = ExplainTaskRequest {
        queue: queue.to_owned(),
        key: key.as_bytes().to_vec().into(),
        ..Default::default()
    };
    let explain = async || match DiscoveryClient::new(taskd.clone())
        .explain_task(question.clone())
        .await
    {
        Ok(answer) => Ok(Ok(answer.into_inner())),
        Err(status) if status.code() == Code::NotFound => Ok(Err(client::why(&status))),
        Err(status) => Err(status),
    };
    match patiently(explain).await? {
        Ok(explanation) => Ok(Ok(explanation.task.context("the answer names no task")?.id)),
        Err(why) => Ok(Err(why)),
    }
}

/// Returns the ids of all these tasks. An error names the first key without a task.
pub(super) async fn ids_of(taskd: &Taskd, names: &Names) -> anyhow::Result<Vec<String>> {
    let mut ids: Vec<String> = names.ids.iter().map(ToString::to_string).collect();
    let queue = names.queue.as_deref().unwrap_or_default();
    for key in &names.keys {
        match id_of(taskd, queue, key).await? {
            Ok(id) => ids.push(id),
            Err(why) => bail!(NotThere(why)),
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0197a5c0-7d1e-7b3c-9a52-3f0c6f1b2a44";

    fn read(words: &[&str], queue: Option<&str>, keys: &[&str]) -> Result<Names, String> {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let keys: Vec<String> = owned(keys);
        Names::read(owned(words), queue.map(str::to_owned), &keys)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn tasks_are_named_by_ids_or_by_a_queue_and_keys() {
        let id: TaskId = ID.parse().unwrap();
        assert_eq!(read(&[ID, ID], None, &[]).unwrap().ids, [id, id]);
        for (words, queue, keys) in [
            (&["q", "a", ID][..], None, &[][..]),
            (&["a", ID], Some("q"), &[]),
            (&["q"], None, &["a", ID]),
            (&[], Some("q"), &["a", ID]),
        ] {
            let names = read(words, queue, keys).unwrap();
            assert_eq!(names.queue.as_deref(), Some("q"), "{words:?}");
            assert_eq!(names.keys, ["a", ID], "{words:?}");
        }
        let queue = read(&["q"], None, &[]).unwrap();
        assert_eq!(queue.queue.as_deref(), Some("q"));
        assert!(queue.keys.is_empty());
        assert_eq!(read(&[], None, &[]), Ok(Names::default()));
        for (words, keys, want) in [
            (&[ID, "a"][..], &[][..], "\"a\" is not the id of a task"),
            (&[ID], &["a"], "a key needs its queue"),
            (&[], &["a"], "a key needs its queue"),
        ] {
            let why = read(words, None, keys).unwrap_err();
            assert!(why.contains(want), "{why}");
        }
    }
}
