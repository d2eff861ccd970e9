//! The stream of a session: frames of a worker in, frames of taskd out.

mod report;
mod serve;

use std::{any::Any, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    time::timeout,
};

use self::serve::Streaming;
use super::{
    access::{self, Denied},
    error::Error,
    handle::Api,
};
use crate::{
    model::{Caller, GetTasks, OpenSession, SessionOpened, TaskdFrame, WorkerFrame},
    pipelines::tasks::{Cut, heartbeat},
    queue::Delivery,
    telemetry::metrics::SessionEnd,
};

/// How long the first frame may take.
const OPEN_WITHIN: Duration = Duration::from_secs(30);

/// Room for bytes in hand; dropped, it is free again.
pub type Room = Box<dyn Any + Send>;

/// A worker's frame, with the room that it takes.
pub struct Received {
    pub frame: WorkerFrame,
    pub room: Room,
}

/// A frame on its way to the worker, with the leases that it carries.
pub struct Sent {
    pub frame: TaskdFrame,
    pub deliveries: Vec<Delivery>,
    pub room: Option<Room>,
    /// Held by the one frame with tasks that may wait.
    _place: Option<OwnedSemaphorePermit>,
}

/// The end of a stream that did not end well.
#[derive(Debug, thiserror::Error)]
pub enum StreamEnd {
    #[error("{0}")]
    Wrong(String),
    #[error(transparent)]
    Denied(#[from] Denied),
    #[error(transparent)]
    Refused(#[from] Error),
    #[error("no frame came for {0:?}: the session is over")]
    Silent(Duration),
    #[error("this process stops: go on with the session at another one")]
    Stopping,
    /// The stream went well, and the session stays for its time-out.
    #[error("the worker closed its side")]
    HalfClosed,
    #[error("another session of this worker took over")]
    TakenOver,
    #[error("the session goes on on another stream")]
    Displaced,
    /// The client is gone, or its frames cannot be read; the connection knows why.
    #[error("the stream broke")]
    Broken,
}

impl From<Cut> for StreamEnd {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::Displaced => Self::Displaced,
            Cut::Ended(_) => Self::TakenOver,
        }
    }
}

/// Finds room for an answer of so many bytes.
pub type FindRoom = Arc<dyn Fn(usize) -> Result<Room, String> + Send + Sync>;

impl Api {
    /// Runs a stream beside its connection. A stop of the process waits for it.
    pub fn spawn_stream(&self, stream: impl Future<Output = ()> + Send + 'static) -> Result<(), Error> {
        self.tasks()?.spawn_stream(stream);
        Ok(())
    }

    /// Serves a stream until one side ends it. `Ok`: the worker closed it.
    pub async fn stream(
        &self,
        caller: Caller,
        mut frames: impl Stream<Item = Result<Received, ()>> + Unpin + Send,
        out: mpsc::Sender<Sent>,
        room: FindRoom,
    ) -> Result<(), StreamEnd> {
        let tasks = self.tasks()?;
        let first = timeout(OPEN_WITHIN, frames.next()).await.map_err(|_| StreamEnd::Silent(OPEN_WITHIN))?;
        let Some(Ok(Received { mut frame, room: _ })) = first else { return Err(StreamEnd::Broken) };
        let open = frame.open.take().ok_or_else(|| StreamEnd::Wrong("the first frame must have open".into()))?;
        let open = self.admitted(&caller, open.map_err(StreamEnd::Wrong)?)?;
        let (want, keeps) = (open.want, open.keep_leases);
        let opened = tasks.open_session(open).await.map_err(Error::from)?;
        let (attached, resumed) = (opened.attached, opened.resumed);
        let granted = tasks.want(&attached, want);
        let (timeout, demand) = (attached.timeout(), attached.demand());
        let heartbeat = heartbeat(timeout);
        let max_tasks = tasks.most_session_tasks();
        let session = attached.session();
        let opened = Some(SessionOpened { session, resumed, granted, max_tasks, heartbeat, timeout });
        let mut stream = Streaming::new(self, tasks, &caller, &attached, out, room, keeps);
        stream.send(TaskdFrame { opened, demand, ..TaskdFrame::default() }).await?;
        // The rest of the first frame counts as well.
        stream.take(frame)?;
        let end = stream.run(&mut frames).await;
        drop(stream);
        let why = match &end {
            Ok(()) => SessionEnd::Closed,
            Err(StreamEnd::Silent(_)) => SessionEnd::Silent,
            Err(StreamEnd::Denied(_)) => SessionEnd::Denied,
            // The session stays for its time-out.
            Err(StreamEnd::HalfClosed) => return Ok(()),
            Err(_) => return end,
        };
        tasks.end_attached(&attached, why).await;
        end
    }

    /// Checks that the caller may open such a session.
    fn admitted(&self, caller: &Caller, mut open: OpenSession) -> Result<OpenSession, Denied> {
        let (worker, queues) = (std::mem::take(&mut open.worker), open.queues.clone());
        let mut get = GetTasks { worker, queues, ..GetTasks::default() };
        access::may_get(caller, &mut get)?;
        open.worker = get.worker;
        Ok(open)
    }
}
