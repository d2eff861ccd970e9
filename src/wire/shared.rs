//! Calls of sessions without streams: messages to and from `model`.

use std::time::Duration;

use super::{
    pb,
    time::{duration, read_duration},
};
use crate::model::{
    Batch, OpenSession, Pending, ReportTasks, SessionCall, SessionClosed, SessionOpened, TasksReported, WantTasks,
};

impl TryFrom<pb::OpenSessionRequest> for OpenSession {
    type Error = String;

    fn try_from(open: pb::OpenSessionRequest) -> Result<Self, String> {
        Ok(Self {
            timeout: open.timeout.map(|timeout| read_duration("timeout", timeout)).transpose()?,
            lease_duration: open.lease_duration.map(|lease| read_duration("lease_duration", lease)).transpose()?,
            worker: open.worker,
            queues: open.queues,
            want: open.want,
            session: open.session,
            holding: open.holding,
            takeover: open.takeover,
            tells_started: open.tells_started,
            keep_leases: false,
            max_bytes: open.max_bytes,
        })
    }
}

impl TryFrom<pb::WantTasksRequest> for WantTasks {
    type Error = String;

    fn try_from(want: pb::WantTasksRequest) -> Result<Self, String> {
        let wait = want.wait.map(|wait| read_duration("wait", wait)).transpose()?.unwrap_or(Duration::ZERO);
        Ok(Self { call: SessionCall { worker: want.worker, session: want.session }, want: want.want, wait })
    }
}

macro_rules! session_call {
    ($($request:ident)*) => {$(
        impl From<pb::$request> for SessionCall {
            fn from(pb::$request { worker, session }: pb::$request) -> Self {
                Self { worker, session }
            }
        }
    )*};
}
session_call!(SurrenderTasksRequest GetPendingCountRequest CloseSessionRequest);

impl From<pb::ReportTasksRequest> for ReportTasks {
    fn from(report: pb::ReportTasksRequest) -> Self {
        let pb::ReportTasksRequest { worker, session, completions, rejections, extensions, started } = report;
        let nobody = String::new;
        Self {
            call: SessionCall { worker, session },
            completions: Batch::from(pb::CompleteTasksRequest { worker: nobody(), completions, next: None }).items,
            rejections: Batch::from(pb::RejectTasksRequest { worker: nobody(), rejections }).items,
            extensions: Batch::from(pb::ExtendTasksRequest { worker: nobody(), extensions }).items,
            started,
        }
    }
}

impl From<SessionOpened> for pb::OpenSessionResponse {
    fn from(opened: SessionOpened) -> Self {
        Self {
            session: opened.session,
            resumed: opened.resumed,
            granted: opened.granted,
            max_tasks: opened.max_tasks,
            heartbeat: duration(opened.heartbeat),
            timeout: duration(opened.timeout),
        }
    }
}

impl From<Pending> for pb::GetPendingCountResponse {
    fn from(Pending { demand, in_hand }: Pending) -> Self {
        Self { demand, in_hand }
    }
}

impl From<TasksReported> for pb::ReportTasksResponse {
    fn from(reported: TasksReported) -> Self {
        Self {
            completions: reported.completions.into_iter().map(Into::into).collect(),
            rejections: reported.rejections.into_iter().map(Into::into).collect(),
            extensions: reported.extensions.into_iter().map(Into::into).collect(),
            counted: reported.counted,
            demand: reported.pending.demand,
            in_hand: reported.pending.in_hand,
        }
    }
}

impl From<SessionClosed> for pb::CloseSessionResponse {
    fn from(SessionClosed { offered, failed }: SessionClosed) -> Self {
        Self { offered, failed }
    }
}
