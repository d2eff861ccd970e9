//! A worker's stream, on which taskd sends it tasks.

use std::time::Duration;

use tokio::{sync::mpsc, time::timeout};
use tonic::{Code, Status, Streaming};

use crate::{
    cli::client::Taskd,
    wire::pb::{self, tasks_client::TasksClient},
};

/// How long a worker waits for a frame. The wait is cancelled at the end of a phase.
const WAIT: Duration = Duration::from_secs(20);
/// The session timeout: longer than any wait, so that the session needs no heartbeats.
const TIMEOUT: Option<prost_types::Duration> = Some(prost_types::Duration {
    seconds: 600,
    nanos: 0,
});

/// An open stream.
pub(super) struct Pushed {
    frames: mpsc::Sender<pb::WorkerFrame>,
    taskd: Streaming<pb::TaskdFrame>,
    number: u64,
    /// How many tasks taskd may still send.
    demand: u32,
    /// Tasks that arrived while the worker waited for something else.
    tasks: Vec<pb::LeasedTask>,
}

impl Pushed {
    pub(super) async fn open(
        client: &mut TasksClient<Taskd>,
        open: pb::OpenSession,
    ) -> Result<Self, Status> {
        let (frames, mut sent) = mpsc::channel(16);
        let sent = futures::stream::poll_fn(move |cx| sent.poll_recv(cx));
        let open = pb::OpenSession {
            timeout: TIMEOUT,
            ..open
        };
        let mut pushed = {
            let open = pb::WorkerFrame {
                open: Some(open),
                ..Default::default()
            };
            frames
                .send(open)
                .await
                .map_err(|_| Status::unavailable("the stream is closed"))?;
            let taskd = client.stream_tasks(sent).await?.into_inner();
            Self {
                frames,
                taskd,
                number: 0,
                demand: 0,
                tasks: Vec::new(),
            }
        };
        let opened = pushed
            .read()
            .await?
            .opened
            .ok_or_else(|| Status::internal("the first frame is not opened"))?;
        pushed.demand += opened.granted;
        Ok(pushed)
    }

    async fn read(&mut self) -> Result<pb::TaskdFrame, Status> {
        let mut frame = self
            .taskd
            .message()
            .await?
            .ok_or_else(|| Status::unavailable("the stream has ended"))?;
        self.demand = self
            .demand
            .saturating_sub(u32::try_from(frame.tasks.len()).unwrap_or(u32::MAX));
        self.tasks.append(&mut frame.tasks);
        self.demand += frame.answer.as_ref().map_or(0, |answer| answer.granted);
        Ok(frame)
    }

    async fn ask(&mut self, frame: pb::WorkerFrame) -> Result<pb::FrameAnswer, Status> {
        self.number += 1;
        let number = self.number;
        let frame = pb::WorkerFrame { number, ..frame };
        self.frames
            .send(frame)
            .await
            .map_err(|_| Status::unavailable("the stream is closed"))?;
        loop {
            if let Some(answer) = self
                .read()
                .await?
                .answer
                .filter(|answer| answer.number == number)
            {
                return Ok(answer);
            }
        }
    }

    /// Waits for tasks, after asking for as many as are missing up to `batch`. Returns none if none
    /// arrive for a while.
    pub(super) async fn tasks(&mut self, batch: u32) -> Result<Vec<pb::LeasedTask>, Status> {
        let in_hand = u32::try_from(self.tasks.len()).unwrap_or(u32::MAX);
        let want = batch.saturating_sub(self.demand).saturating_sub(in_hand);
        if want > 0 {
            self.ask(pb::WorkerFrame {
                want,
                ..Default::default()
            })
            .await?;
        }
        while self.tasks.is_empty() {
            match timeout(WAIT, self.read()).await {
                Ok(frame) => drop(frame?),
                Err(_) => break,
            }
        }
        Ok(std::mem::take(&mut self.tasks))
    }

    /// Reports tasks as completed, and asks for the same number of new ones.
    pub(super) async fn complete(
        &mut self,
        completions: Vec<pb::Completion>,
    ) -> Result<Vec<pb::ItemResult>, Status> {
        let want = u32::try_from(completions.len()).unwrap_or(u32::MAX);
        let answer = self
            .ask(pb::WorkerFrame {
                completions,
                want,
                ..Default::default()
            })
            .await?;
        Ok(answer.completions)
    }
}

/// True if the stream may be reopened after it ended with this status.
pub(super) fn may_open_again(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::Cancelled | Code::Aborted | Code::Unknown
    )
}
