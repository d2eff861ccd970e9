//! Stages with a topic: taskd works on their tasks itself, and publishes each as a record.
//!
//! A task is completed after its record is in the topic. After a crash in between it is published
//! again: the id of the record is that of the task, so subscriptions make no second task of it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::future::join_all;

use super::{access::reaches, error::Error, handle::Api, reader::Reader};
use crate::{
    model::{
        Caller, Completion, Encoding, GetTasks, Item, ItemAnswer, ItemStatus, LeasedTask,
        LimitReport, NewRecord, PublishStatus, Published, Rejection, TopicName, Topology, shorten,
    },
    pipelines::tasks::{Error as TasksError, Handle},
    runtime::{Loop, LoopError, Supervisor},
};

/// The worker of these stages. Each task is for one worker, so that of all processes may have one
/// name.
const WORKER: &str = "taskd";
/// How long to wait for tasks, for room in a topic, and before looking again whether there are such
/// stages.
const WAIT: Duration = Duration::from_secs(1);
/// The lease where a slow Kafka may take almost a minute to refuse a record.
const LEASE_OF_KAFKA: Duration = Duration::from_secs(120);
/// The most queues in one call.
const MOST_QUEUES: usize = 100;
/// The most tasks that are published together.
const MOST_TASKS: usize = 100;
/// A record of this size is published alone: an attached topic may have a lower limit than taskd's,
/// and would refuse all others with it.
const LARGE_BYTES: usize = 512 << 10;
/// How often a report is tried that finds no room in Redis.
const TRIES: usize = 10;
/// The most bytes of a reason.
const REASON_BYTES: usize = 1000;

impl LoopError for TasksError {}

/// Publishes tasks of stages with a topic, as long as the process runs.
pub fn publish_stages(api: &Arc<Api>, supervisor: &Supervisor) {
    if api.tasks.is_none() || api.query.is_none() {
        return;
    }
    supervisor.spawn_loop("topic stages", Arc::clone(api), |api, cx| async move {
        match (&api.tasks, &api.query) {
            (Some(tasks), Some(query)) => TopicStages { tasks, query }.run(&cx).await,
            _ => Ok(()),
        }
    });
}

struct TopicStages<'a> {
    tasks: &'a Handle,
    query: &'a Reader,
}

impl TopicStages<'_> {
    async fn run(&self, cx: &Loop) -> Result<(), TasksError> {
        let on_kafka = self.query.bus.has_other_readers();
        // The queues of each call begin after those of the last one.
        let mut first = 0;
        while !cx.is_stopped() {
            let topics = self.topics();
            if topics.is_empty() {
                cx.pause(WAIT).await;
                cx.beat();
                continue;
            }
            let some = topics.len().min(MOST_QUEUES);
            let queues = topics.keys().cycle().skip(first % topics.len()).take(some);
            let limits = &self.query.settings.limits;
            let request = GetTasks {
                worker: WORKER.to_owned(),
                queues: queues.cloned().collect(),
                max_tasks: u32::try_from(limits.max_items.min(MOST_TASKS)).unwrap_or(1),
                wait: match some == topics.len() {
                    true => WAIT,
                    // Those of the others may have tasks.
                    false => WAIT / 10,
                },
                lease_duration: on_kafka.then(|| LEASE_OF_KAFKA.min(limits.max_lease)),
                ..GetTasks::default()
            };
            first = (first + some) % topics.len();
            let leased = cx.idle(self.tasks.get(request)).await?.deliver();
            let has_room = self.publish(&topics, leased, cx).await?;
            if !has_room {
                cx.pause(WAIT).await;
            }
            cx.beat();
        }
        Ok(())
    }

    /// The topic of each such stage, by its queue.
    fn topics(&self) -> BTreeMap<String, TopicName> {
        let stages = self.tasks.stages();
        let all = stages.all().iter().flat_map(|topology| &topology.stages);
        all.filter_map(|stage| Some((stage.queue.as_str().to_owned(), stage.topic.clone()?)))
            .collect()
    }

    /// Publishes tasks, and reports what became of them. Returns false if a topic had no room.
    async fn publish(
        &self,
        topics: &BTreeMap<String, TopicName>,
        leased: Vec<LeasedTask>,
        cx: &Loop,
    ) -> Result<bool, TasksError> {
        let mut calls: BTreeMap<(&TopicName, Option<usize>), Vec<Published>> = BTreeMap::new();
        let mut places = Vec::with_capacity(leased.len());
        let mut records: BTreeMap<(&TopicName, Option<usize>), Vec<NewRecord>> = BTreeMap::new();
        let mut invalid = Vec::new();
        for (number, task) in leased.iter().enumerate() {
            let record = record(task);
            let Some(topic) = topics.get(task.token.shard.queue.as_str()) else {
                continue;
            };
            if let Some(why) = record.mistake() {
                invalid.push(item(task, rejection(&why, Refusal::Never)));
                continue;
            }
            let is_large = record.value.len() > LARGE_BYTES;
            let call = (topic, is_large.then_some(number));
            let of_call = records.entry(call).or_default();
            places.push((task, call, of_call.len()));
            of_call.push(record);
        }
        let published = records.into_iter().map(|(call, records)| async move {
            let turn = u32::try_from(call.1.unwrap_or_default()).unwrap_or_default();
            (call, self.publish_into(call.0, records, turn).await)
        });
        calls.extend(join_all(published).await);

        let mut has_room = true;
        let mut completed = Vec::new();
        let mut rejected = invalid;
        for (task, call, place) in places {
            let Some(answer) = calls.get(&call).and_then(|answers| answers.get(place)) else {
                continue;
            };
            match answer.status {
                PublishStatus::Stored => completed.push(item(task, Completion::default())),
                PublishStatus::TryLater => {
                    has_room = false;
                    rejected.push(item(task, rejection(&answer.error, Refusal::Later)));
                }
                PublishStatus::Rejected => {
                    rejected.push(item(task, rejection(&answer.error, Refusal::Failed)));
                }
            }
        }
        let completed = self.report(completed, cx, |items| self.tasks.complete(WORKER, items));
        let completed = completed.await;
        let rejected = self.report(rejected, cx, |items| self.tasks.reject(WORKER, items));
        rejected.await?;
        completed?;
        Ok(has_room)
    }

    async fn publish_into(
        &self,
        name: &TopicName,
        records: Vec<NewRecord>,
        turn: u32,
    ) -> Vec<Published> {
        let count = records.len();
        let (status, error) = match self.query.find_topic(name.as_str()).await {
            Ok(Some(topic)) => {
                let records = records.into_iter().map(Ok).collect();
                return self.query.publish(&topic, records, turn).await;
            }
            // Somebody may make it.
            Ok(None) => (PublishStatus::Rejected, format!("there is no topic {name}")),
            Err(error) => (PublishStatus::TryLater, error.to_string()),
        };
        vec![Published::failed(status, error); count]
    }

    /// Reports, and repeats what finds no room in Redis. What else is refused is in a lease that has
    /// ended: the task is published again.
    async fn report<T: Clone, F>(
        &self,
        mut items: Vec<Item<T>>,
        cx: &Loop,
        call: impl Fn(Vec<Item<T>>) -> F,
    ) -> Result<(), TasksError>
    where
        F: Future<Output = Result<Vec<ItemAnswer>, TasksError>>,
    {
        for _ in 0..TRIES {
            if items.is_empty() {
                return Ok(());
            }
            let answers = call(items.clone()).await?;
            let mut answers = answers.into_iter();
            items.retain(|_| {
                let answer = answers.next();
                answer.is_some_and(|answer| answer.status == ItemStatus::TryLater)
            });
            if !items.is_empty() && !cx.pause(WAIT).await {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// What a task's rejection means.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Refusal {
    /// There is no room, or a server is away. It costs no attempt.
    Later,
    Failed,
    /// No attempt can succeed.
    Never,
}

fn rejection(why: &str, refusal: Refusal) -> Rejection {
    let is_later = refusal == Refusal::Later;
    Rejection {
        reason: shorten(why, REASON_BYTES).into_owned(),
        retry: refusal != Refusal::Never,
        delay: is_later.then_some(WAIT),
        not_started: is_later,
        limit: LimitReport::default(),
    }
}

fn item<T>(task: &LeasedTask, report: T) -> Item<T> {
    Item {
        id: task.id.to_string(),
        lease_token: task.token.to_string(),
        report: Ok(report),
    }
}

/// The record of a task. Headers in which taskd says where the task came from are left out.
fn record(task: &LeasedTask) -> NewRecord {
    let body = &task.body;
    let own = |(name, _): &(&String, &String)| !name.starts_with("taskd-");
    let headers = body.headers.iter().filter(own);
    let mut attributes: Vec<(String, String)> = headers
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
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
