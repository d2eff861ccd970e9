//! The frames of sessions: messages to and from `model`.

use super::{
    pb,
    time::{duration, read_duration},
};
use crate::model::{Batch, FrameAnswer, OpenSession, SessionClosing, SessionOpened, TaskdFrame, WorkerFrame};

impl TryFrom<pb::OpenSession> for OpenSession {
    type Error = String;

    fn try_from(open: pb::OpenSession) -> Result<Self, String> {
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
            keep_leases: open.keep_leases,
            max_bytes: open.max_bytes,
        })
    }
}

impl From<pb::WorkerFrame> for WorkerFrame {
    fn from(frame: pb::WorkerFrame) -> Self {
        let (completions, rejections, extensions) = (frame.completions, frame.rejections, frame.extensions);
        let worker = String::new;
        Self {
            open: frame.open.map(OpenSession::try_from),
            number: frame.number,
            completions: Batch::from(pb::CompleteTasksRequest { worker: worker(), completions, next: None }).items,
            rejections: Batch::from(pb::RejectTasksRequest { worker: worker(), rejections }).items,
            extensions: Batch::from(pb::ExtendTasksRequest { worker: worker(), extensions }).items,
            started: frame.started,
            surrender: frame.surrender,
            want: frame.want,
            close: frame.close,
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
        Self { reason: closing.reason, within: duration(closing.within) }
    }
}
