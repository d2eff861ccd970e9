//! The calls of sessions without streams.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{
    super::tally::{MAX_QUEUES, Tally},
    AtMost, Unread,
    large::Entry,
    object,
    text::Time,
    weights,
    work::{self, Completion, Extension, LeasedTask, MAX_ITEMS, Rejection},
};
use crate::{
    model::{self, Pending, QueueName},
    pipelines::tasks,
};

/// The most ids of tasks in a request: what a session may have in hand.
const MAX_IDS: usize = 100_000;

/// A worker's request for a session.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with worker and queues")]
pub(in crate::ingress) struct OpenSession {
    /// The worker's name. It may be left out only with a token for one worker.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    #[schemars(with = "AtMost<QueueName, MAX_QUEUES>", extend("minItems" = 1))]
    queues: AtMost<String, MAX_QUEUES>,
    /// The first demand.
    #[serde(default)]
    want: u32,
    /// The session to resume.
    #[serde(default)]
    session: String,
    /// If a session is resumed: ids of the tasks that the worker has. Others go back at no cost.
    #[serde(default)]
    #[schemars(with = "AtMost<String, MAX_IDS>")]
    holding: AtMost<String, MAX_IDS>,
    /// Ends the other sessions of the worker.
    #[serde(default)]
    takeover: bool,
    /// True if the worker reports each task that it starts. Otherwise each task that was sent
    /// counts as started.
    #[serde(default)]
    tells_started: bool,
    /// The session ends after this long without a call: `2s` to `10m`; by default `15s`.
    timeout: Option<Time>,
    lease_duration: Option<Time>,
    #[serde(default)]
    /// The approximate size of an answer; 0 means 3.5 MiB.
    max_bytes: u64,
    /// How the queues share the tasks, as of a call that gets tasks.
    #[serde(default, deserialize_with = "weights")]
    #[schemars(extend("maxProperties" = MAX_QUEUES))]
    weights: HashMap<String, u32>,
}

/// A request for tasks of a session.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with worker and session")]
pub(in crate::ingress) struct WantTasks {
    /// The worker's name. It may be left out only with a token for one worker.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    session: String,
    /// Adds to the demand. Each task takes 1 from it.
    #[serde(default)]
    want: u32,
    /// How long to wait for the first task.
    wait: Option<Time>,
}

/// Names a session.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with worker and session")]
pub(in crate::ingress) struct SessionCall {
    /// The worker's name. It may be left out only with a token for one worker.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    session: String,
}

/// A report of tasks of a session.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with worker and session")]
pub(in crate::ingress) struct ReportTasks<'a> {
    /// The worker's name. It may be left out only with a token for one worker.
    #[serde(default)]
    #[schemars(length(max = 128))]
    worker: String,
    session: String,
    #[serde(borrow, default)]
    #[schemars(with = "AtMost<Completion<'a>, MAX_ITEMS>")]
    completions: AtMost<&'a RawValue, MAX_ITEMS>,
    #[serde(borrow, default)]
    #[schemars(with = "AtMost<Rejection, MAX_ITEMS>")]
    rejections: AtMost<&'a RawValue, MAX_ITEMS>,
    #[serde(borrow, default)]
    #[schemars(with = "AtMost<Extension, MAX_ITEMS>")]
    extensions: AtMost<&'a RawValue, MAX_ITEMS>,
    /// Ids of started tasks.
    #[serde(default)]
    #[schemars(with = "AtMost<String, MAX_IDS>")]
    started: AtMost<String, MAX_IDS>,
}

pub(in crate::ingress) fn open_session(body: &Bytes) -> Result<model::OpenSession, Unread> {
    let open: OpenSession = object(body)?;
    Ok(model::OpenSession {
        worker: open.worker,
        queues: open.queues.0,
        want: open.want,
        session: open.session,
        holding: open.holding.0,
        takeover: open.takeover,
        tells_started: open.tells_started,
        keep_leases: false,
        timeout: open.timeout.map(|time| time.0),
        lease_duration: open.lease_duration.map(|time| time.0),
        max_bytes: open.max_bytes,
        weights: open.weights,
    })
}

pub(in crate::ingress) fn want_tasks(body: &Bytes) -> Result<model::WantTasks, Unread> {
    let WantTasks {
        worker,
        session,
        want,
        wait,
    } = object(body)?;
    let wait = wait.map_or(Duration::ZERO, |time| time.0);
    Ok(model::WantTasks {
        call: model::SessionCall { worker, session },
        want,
        wait,
    })
}

pub(in crate::ingress) fn session_call(body: &Bytes) -> Result<model::SessionCall, Unread> {
    let SessionCall { worker, session } = object(body)?;
    Ok(model::SessionCall { worker, session })
}

pub(in crate::ingress) fn report_tasks(
    body: &Bytes,
    tally: &mut Tally<'_>,
) -> Result<model::ReportTasks, Unread> {
    let ReportTasks {
        worker,
        session,
        completions,
        rejections,
        extensions,
        started,
    } = object(body)?;
    let name = || worker.clone();
    let read = |text: &str, tally: &mut Tally<'_>| work::completion(body, text, tally);
    let completions = work::batch(name(), &completions.0, tally, read)?.items;
    let rejections = work::batch(name(), &rejections.0, tally, |text, _| {
        Ok(work::rejection(text))
    })?
    .items;
    let extensions = work::batch(name(), &extensions.0, tally, |text, _| {
        Ok(work::extension(text))
    })?
    .items;
    let call = model::SessionCall { worker, session };
    Ok(model::ReportTasks {
        call,
        completions,
        rejections,
        extensions,
        started: started.0,
    })
}

/// Tasks of a session.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct WantedTasks<'a> {
    tasks: Vec<LeasedTask<'a>>,
    /// How much was added to the demand.
    granted: u32,
    #[serde(flatten)]
    pending: Pending,
}

/// The fields of an answer before its tasks, which follow.
pub(in crate::ingress) fn before_tasks(wanted: &tasks::SharedTasks) -> Entry {
    #[derive(Serialize)]
    struct Head {
        granted: u32,
        #[serde(flatten)]
        pending: Pending,
    }
    Entry::new(&Head {
        granted: wanted.granted,
        pending: wanted.pending,
    })
}

impl<'a> From<&'a tasks::SharedTasks> for WantedTasks<'a> {
    fn from(wanted: &'a tasks::SharedTasks) -> Self {
        let tasks = wanted.leases.tasks.iter().map(LeasedTask::from).collect();
        Self {
            tasks,
            granted: wanted.granted,
            pending: wanted.pending,
        }
    }
}

/// A session without demand.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Surrendered {
    /// How much demand it had before.
    pub(in crate::ingress) surrendered: u32,
    pub(in crate::ingress) in_hand: u32,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::testing::{share, shown, tally},
        *,
    };

    #[test]
    fn a_report_has_its_parts_and_a_wrong_item_is_answered_under_its_id() {
        let body = Bytes::from_static(
            br#"{"worker":"w","session":"s","completions":[{"id":"1","lease_token":"t","reslt":1}],
                "rejections":[{"id":"2","lease_token":"t"}],"extensions":[{"id":"3","lease_token":"t","by":"1m"}],
                "started":["4"]}"#,
        );
        let report = report_tasks(&body, &mut tally(&share())).unwrap();
        assert_eq!(
            (report.items(), report.started, report.call.session.as_str()),
            (3, vec!["4".to_owned()], "s")
        );
        assert_eq!(report.completions[0].as_ref().unwrap_err().id, "1");
        let nothing = Bytes::from_static(br#"{"worker":"w","session":"s"}"#);
        assert_eq!(
            report_tasks(&nothing, &mut tally(&share()))
                .unwrap()
                .items(),
            0
        );
        let nobody = Bytes::from_static(br#"{"worker":"w"}"#);
        assert_eq!(
            session_call(&nobody).unwrap_err().to_string(),
            "missing field `session`"
        );
    }

    #[test]
    fn an_opened_session_has_its_times_as_text() {
        let (heartbeat, timeout) = (Duration::from_secs(2) / 3, Duration::from_secs(2));
        let opened = model::SessionOpened {
            session: "s".into(),
            heartbeat,
            timeout,
            ..Default::default()
        };
        let want = json!({
            "session": "s", "resumed": false, "granted": 0, "max_tasks": 0, "heartbeat": "666ms", "timeout": "2s",
        });
        assert_eq!(shown(opened), want);
    }
}
