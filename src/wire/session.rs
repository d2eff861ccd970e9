//! Sessions, with and without a stream: converts messages to and from `model`.

use std::time::Duration;

use super::{
    pb,
    time::{duration, read_duration},
};
use crate::model::{
    Batch, FrameAnswer, OpenSession, Pending, ReportTasks, SessionCall, SessionClosed,
    SessionClosing, SessionOpened, TaskdFrame, TasksReported, WantTasks, WorkerFrame,
};

macro_rules! open_session {
    ($request:ident, $open:ident => $keep_leases:expr) => {
        impl TryFrom<pb::$request> for OpenSession {
            type Error = String;

            fn try_from($open: pb::$request) -> Result<Self, String> {
                let lease_duration = $open
                    .lease_duration
                    .map(|lease| read_duration("lease_duration", lease));
                Ok(Self {
                    timeout: $open
                        .timeout
                        .map(|timeout| read_duration("timeout", timeout))
                        .transpose()?,
                    lease_duration: lease_duration.transpose()?,
                    worker: $open.worker,
                    queues: $open.queues,
                    want: $open.want,
                    session: $open.session,
                    holding: $open.holding,
                    takeover: $open.takeover,
                    tells_started: $open.tells_started,
                    keep_leases: $keep_leases,
                    max_bytes: $open.max_bytes,
                    weights: $open.weights,
                })
            }
        }
    };
}
open_session!(OpenSession, open => open.keep_leases);
open_session!(OpenSessionRequest, open => false);

impl From<pb::WorkerFrame> for WorkerFrame {
    fn from(frame: pb::WorkerFrame) -> Self {
        let pb::WorkerFrame {
            open,
            number,
            completions,
            rejections,
            extensions,
            started,
            surrender,
            want,
            close,
        } = frame;
        let open = open.map(OpenSession::try_from);
        let report = pb::ReportTasksRequest {
            completions,
            rejections,
            extensions,
            started,
            ..Default::default()
        };
        let ReportTasks {
            call: _,
            completions,
            rejections,
            extensions,
            started,
        } = report.into();
        Self {
            open,
            number,
            completions,
            rejections,
            extensions,
            started,
            surrender,
            want,
            close,
        }
    }
}

impl TryFrom<pb::WantTasksRequest> for WantTasks {
    type Error = String;

    fn try_from(want: pb::WantTasksRequest) -> Result<Self, String> {
        let wait = want
            .wait
            .map(|wait| read_duration("wait", wait))
            .transpose()?
            .unwrap_or(Duration::ZERO);
        Ok(Self {
            call: SessionCall {
                worker: want.worker,
                session: want.session,
            },
            want: want.want,
            wait,
        })
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
        let pb::ReportTasksRequest {
            worker,
            session,
            completions,
            rejections,
            extensions,
            started,
        } = report;
        let nobody = String::new;
        Self {
            call: SessionCall { worker, session },
            completions: Batch::from(pb::CompleteTasksRequest {
                worker: nobody(),
                completions,
                next: None,
            })
            .items,
            rejections: Batch::from(pb::RejectTasksRequest {
                worker: nobody(),
                rejections,
            })
            .items,
            extensions: Batch::from(pb::ExtendTasksRequest {
                worker: nobody(),
                extensions,
            })
            .items,
            started,
        }
    }
}

impl From<TaskdFrame> for pb::TaskdFrame {
    fn from(frame: TaskdFrame) -> Self {
        Self {
            opened: frame.opened.map(Into::into),
            tasks: frame.tasks.into_iter().map(Into::into).collect(),
            answer: frame.answer.map(Into::into),
            ended: frame.ended.into_iter().map(Into::into).collect(),
            closing: frame.closing.map(Into::into),
            demand: frame.demand,
        }
    }
}

impl From<SessionOpened> for pb::SessionOpened {
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

impl From<SessionOpened> for pb::OpenSessionResponse {
    fn from(opened: SessionOpened) -> Self {
        let pb::SessionOpened {
            session,
            resumed,
            granted,
            max_tasks,
            heartbeat,
            timeout,
        } = opened.into();
        Self {
            session,
            resumed,
            granted,
            max_tasks,
            heartbeat,
            timeout,
        }
    }
}

impl From<FrameAnswer> for pb::FrameAnswer {
    fn from(answer: FrameAnswer) -> Self {
        Self {
            number: answer.number,
            completions: answer.completions.into_iter().map(Into::into).collect(),
            rejections: answer.rejections.into_iter().map(Into::into).collect(),
            extensions: answer.extensions.into_iter().map(Into::into).collect(),
            granted: answer.granted,
            surrendered: answer.surrendered,
        }
    }
}

impl From<SessionClosing> for pb::SessionClosing {
    fn from(closing: SessionClosing) -> Self {
        Self {
            reason: closing.reason,
            within: duration(closing.within),
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
