//! The stream of a session: frames of the worker come in, frames of taskd go out.
//!
//! [`Api::stream`] opens the session and ends it, [`session_stream`] runs it in between.

mod frames;
mod report;
mod session_stream;

use std::time::Duration;

use futures::{Stream, StreamExt};
use tokio::{sync::mpsc, time::timeout};

pub use self::frames::{BytesPermit, OutgoingFrame, ReceivedFrame, ReserveBytes, StreamEnd};
pub(super) use self::report::answers;
use self::session_stream::SessionStream;
use super::{access, error::Error, handle::Api};
use crate::{
    model::{Caller, SessionOpened, TaskdFrame},
    pipelines::tasks::heartbeat,
    telemetry::metrics::SessionEnd,
};

/// How long to wait for the first frame.
const OPEN_WITHIN: Duration = Duration::from_secs(30);
/// How long opening may wait for Redis before the session opens without demand. Workers give up
/// after ten seconds.
const OPENED_WITHIN: Duration = Duration::from_secs(3);

impl Api {
    /// Runs a stream in a task of its own, next to its connection. The process waits for it when it
    /// stops.
    pub fn spawn_stream(
        &self,
        stream: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Error> {
        self.tasks()?.spawn_stream(stream);
        Ok(())
    }

    /// Serves a stream until one side ends it. Returns `Ok` if the worker closed it.
    pub async fn stream(
        &self,
        caller: Caller,
        mut frames: impl Stream<Item = Result<ReceivedFrame, ()>> + Unpin + Send,
        out: mpsc::Sender<Box<OutgoingFrame>>,
        reserve: ReserveBytes,
    ) -> Result<(), StreamEnd> {
        let tasks = self.tasks()?;
        let first = tokio::select! {
            first = timeout(OPEN_WITHIN, frames.next()) => first.map_err(|_| StreamEnd::Silent(OPEN_WITHIN))?,
            () = self.stop.cancelled() => return Err(StreamEnd::Stopping),
            () = out.closed() => return Err(StreamEnd::Broken),
        };
        let Some(Ok(ReceivedFrame { mut frame, permit })) = first else {
            return Err(StreamEnd::Broken);
        };
        let open = frame
            .open
            .take()
            .ok_or_else(|| StreamEnd::Wrong("the first frame must have open".into()))?;
        let mut open = open.map_err(StreamEnd::Wrong)?;
        access::authorize_open(&caller, &mut open)?;
        tasks
            .few_ids("holding", &open.holding)
            .map_err(Error::from)?;
        access::reaches_session(&caller, &tasks.queues_to_go_on(&open))?;
        let queues = open.queues.iter().map(String::as_str);
        let heard = self.workers.hear(&caller, &open.worker, queues);
        let want = open.want;
        let extends_leases = open.keep_leases;
        let takes_over = open.takeover;
        let opened = tasks
            .open_session(&open, &caller.access, access::is_one_worker(&caller))
            .map_err(Error::from)?;
        let attached = opened.attached;
        let resumed = opened.resumed;
        let opening = async {
            if takes_over {
                tasks.take_over_by(&attached).await;
            }
            match tasks.want(&attached, want) {
                Some(granted) => granted,
                None => tasks.want_more(&attached, want, || true).await,
            }
        };
        let granted = tokio::select! {
            granted = timeout(OPENED_WITHIN, opening) => granted.unwrap_or(0),
            cut = attached.cut() => return Err(cut.into()),
            () = out.closed() => return Err(StreamEnd::Broken),
            // The loop of the stream notices the stop at once and tells the worker.
            () = self.stop.cancelled() => 0,
        };
        let timeout = attached.timeout();
        let demand = attached.demand();
        let heartbeat = heartbeat(timeout);
        let max_tasks = tasks.most_session_tasks();
        let session = attached.session();
        let opened = Some(SessionOpened {
            session,
            resumed,
            granted,
            max_tasks,
            heartbeat,
            timeout,
        });
        let mut stream = SessionStream::new(
            self,
            tasks,
            &caller,
            &attached,
            out,
            reserve,
            extends_leases,
        );
        stream.heard = heard;
        stream
            .send(TaskdFrame {
                opened,
                demand,
                ..TaskdFrame::default()
            })
            .await?;
        // The first frame may also carry reports.
        let closes = stream.receive(frame, permit)?;
        let end = if closes {
            stream.send_open_answers().await
        } else {
            stream.run(&mut frames).await
        };
        stream.release_claim().await;
        drop(stream);
        let why = match &end {
            Ok(()) => SessionEnd::Closed,
            Err(StreamEnd::Silent(_)) => SessionEnd::Silent,
            Err(StreamEnd::Refused(Error::Denied(_))) => SessionEnd::Denied,
            // The session stays open until its time-out.
            Err(StreamEnd::HalfClosed) => return Ok(()),
            Err(_) => return end,
        };
        tasks.end_attached(&attached, why).await;
        end
    }
}
