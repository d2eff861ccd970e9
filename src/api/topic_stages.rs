//! Stages with a topic: taskd works on their tasks itself, and publishes each as a record.
//!
//! A task is completed after its record is in the topic. After a crash in between it is published
//! again: the id of the record is that of the task, so subscriptions make no second task of it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use super::{access::reaches, error::Error, handle::Api, reader::Reader};
use crate::{
    model::{
        Caller, Completion, Encoding, GetTasks, Item, LeasedTask, LimitReport, NewRecord,
        PublishStatus, Published, Rejection, Topic, TopicName, Topology,
    },
    pipelines::tasks::{Error as TasksError, Handle},
    runtime::{Loop, LoopError, Supervisor},
};

/// The worker of these stages. Each task is for one worker, so all processes may have one name.
const WORKER: &str = "taskd";
/// How long to wait for tasks, and before looking again whether there are such stages.
const WAIT: Duration = Duration::from_secs(1);
/// The most queues in one call.
const MOST_QUEUES: usize = 100;
/// The most tasks that are published together.
const MOST_TASKS: u32 = 100;

impl LoopError for TasksError {}

/// Publishes tasks of stages with a topic, as long as the process runs.
pub fn publish_stages(api: &Arc<Api>, supervisor: &Supervisor) {
    if api.tasks.is_none() || api.query.is_none() {
        return;
    }
    supervisor.spawn_loop("topic stages", Arc::clone(api), |api, cx| async move {
        match (&api.tasks, &api.query) {
            (Some(tasks), Some(query)) => publish_all(tasks, query, &cx).await,
            _ => Ok(()),
        }
    });
}

async fn publish_all(tasks: &Handle, query: &Reader, cx: &Loop) -> Result<(), TasksError> {
    // The queues of each call begin after those of the last one.
    let mut first = 0;
    loop {
        let topics = topics(tasks);
        let most = topics.len().min(MOST_QUEUES);
        if most == 0 {
            if !cx.pause(WAIT).await {
                return Ok(());
            }
            cx.beat();
            continue;
        }
        let calls = topics.len().div_ceil(MOST_QUEUES);
        let queues = topics.keys().cycle().skip(first % topics.len()).take(most);
        let request = GetTasks {
            worker: WORKER.to_owned(),
            queues: queues.cloned().collect(),
            max_tasks: MOST_TASKS,
            wait: WAIT / u32::try_from(calls).unwrap_or(u32::MAX),
            ..GetTasks::default()
        };
        first = (first + most) % topics.len();
        let leases = cx.idle(tasks.get(request)).await?;
        let leased = leases.deliver();
        if leased.is_empty() && cx.is_stopped() {
            return Ok(());
        }
        publish_leased(tasks, query, &topics, leased).await?;
        cx.beat();
    }
}

/// The topic of each such stage, by its queue.
fn topics(tasks: &Handle) -> BTreeMap<String, TopicName> {
    let stages = tasks.stages();
    let all = stages.all().iter().flat_map(|topology| &topology.stages);
    all.filter_map(|stage| Some((stage.queue.as_str().to_owned(), stage.topic.clone()?)))
        .collect()
}

async fn publish_leased(
    tasks: &Handle,
    query: &Reader,
    topics: &BTreeMap<String, TopicName>,
    leased: Vec<LeasedTask>,
) -> Result<(), TasksError> {
    let mut by_topic: BTreeMap<&TopicName, Vec<LeasedTask>> = BTreeMap::new();
    for task in leased {
        if let Some(topic) = topics.get(task.token.shard.queue.as_str()) {
            by_topic.entry(topic).or_default().push(task);
        }
    }
    let mut completed = Vec::new();
    let mut rejected = Vec::new();
    for (turn, (name, leased)) in (0..).zip(by_topic) {
        let records = leased.iter().map(|task| Ok(record(task))).collect();
        let answers = match query.stage_topic(name).await {
            Ok(topic) => query.publish(&topic, records, turn).await,
            Err(error) => {
                vec![Published::failed(PublishStatus::Rejected, error.to_string()); leased.len()]
            }
        };
        for (task, answer) in leased.iter().zip(answers) {
            match answer.status {
                PublishStatus::Stored => completed.push(item(task, Completion::default())),
                status => {
                    let rejection = Rejection {
                        reason: answer.error,
                        // Somebody may make the topic meanwhile.
                        retry: true,
                        delay: None,
                        // A full topic costs no attempt.
                        not_started: status == PublishStatus::TryLater,
                        limit: LimitReport::default(),
                    };
                    rejected.push(item(task, rejection));
                }
            }
        }
    }
    // A report is refused only if its lease has ended, and then the task is published again.
    if !completed.is_empty() {
        tasks.complete(WORKER, completed).await?;
    }
    if !rejected.is_empty() {
        tasks.reject(WORKER, rejected).await?;
    }
    Ok(())
}

fn item<T>(task: &LeasedTask, report: T) -> Item<T> {
    Item {
        id: task.id.to_string(),
        lease_token: task.token.to_string(),
        report: Ok(report),
    }
}

/// The record of a task.
fn record(task: &LeasedTask) -> NewRecord {
    let body = &task.body;
    let mut attributes: Vec<(String, String)> = body.headers.clone().into_iter().collect();
    attributes.sort();
    if !body.traceparent.is_empty() {
        attributes.push(("traceparent".to_owned(), body.traceparent.clone()));
    }
    NewRecord {
        value: body.payload.clone(),
        key: body.key.clone(),
        attributes,
        id: task.id.to_string(),
        is_text: body.payload_encoding == Encoding::Text,
    }
}

impl Api {
    /// Fails if a stage publishes into a topic that is not there, or that the caller does not reach.
    pub(super) async fn check_stage_topics(
        &self,
        caller: &Caller,
        topology: &Topology,
    ) -> Result<(), Error> {
        let query = self.query()?;
        for topic in topology.stages.iter().filter_map(|one| one.topic.as_ref()) {
            reaches(caller, topic.as_str())?;
            query.topic_of(caller, topic.as_str()).await?;
        }
        Ok(())
    }
}

impl Reader {
    async fn stage_topic(&self, name: &TopicName) -> Result<Topic, Error> {
        let found = self.find_topic(name.as_str()).await?;
        found.ok_or_else(|| Error::NoSuchTopic {
            name: name.to_string(),
            near: String::new(),
        })
    }
}
