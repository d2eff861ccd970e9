//! A worker that uses a stream.

use std::time::Duration;

use taskd::wire::pb::{self, ItemStatus, tasks_client::TasksClient};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming, transport::Channel};

const LONG: Duration = super::PATIENCE;

pub(crate) struct Worker {
    pub(crate) to: mpsc::Sender<pb::WorkerFrame>,
    pub(crate) from: Streaming<pb::TaskdFrame>,
    pub(crate) opened: pb::SessionOpened,
    number: u64,
    pub(crate) ended: Vec<pb::ItemResult>,
    /// Tasks that arrived while the worker waited for something else.
    pub(crate) tasks: Vec<pb::LeasedTask>,
    pub(crate) demand: u32,
    /// taskd is about to end the stream, and sends no more tasks.
    pub(crate) closing: bool,
}

pub(crate) fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

pub(crate) fn opening(worker: &str, want: u32) -> pb::OpenSession {
    let tells_started = true;
    pb::OpenSession {
        worker: worker.into(),
        queues: vec!["q".into()],
        want,
        tells_started,
        ..Default::default()
    }
}

/// Opens a session that does not time out, even on a slow machine.
pub(crate) fn long_opening(worker: &str, want: u32) -> pb::OpenSession {
    pb::OpenSession {
        timeout: seconds(600),
        ..opening(worker, want)
    }
}

pub(crate) async fn channel(port: u16) -> Channel {
    try_channel(port).await.unwrap()
}

/// Like [`channel`], but fails if taskd cannot be reached.
pub(crate) async fn try_channel(port: u16) -> Result<Channel, Status> {
    let endpoint = Channel::from_shared(format!("http://127.0.0.1:{port}"))
        .unwrap()
        .timeout(LONG);
    endpoint
        .connect()
        .await
        .map_err(|error| Status::unavailable(error.to_string()))
}

impl Worker {
    pub(crate) async fn open(port: u16, open: pb::OpenSession) -> Result<Self, Status> {
        Self::open_with(port, open, None).await
    }

    pub(crate) async fn open_with(
        port: u16,
        open: pb::OpenSession,
        token: Option<&str>,
    ) -> Result<Self, Status> {
        Self::open_on(channel(port).await, open, token).await
    }

    /// Like [`Self::open`], on a connection that others may share.
    pub(crate) async fn open_on(
        channel: Channel,
        open: pb::OpenSession,
        token: Option<&str>,
    ) -> Result<Self, Status> {
        let mut client = TasksClient::new(channel);
        let (to, frames) = mpsc::channel(100);
        to.send(pb::WorkerFrame {
            open: Some(open),
            ..Default::default()
        })
        .await
        .unwrap();
        let mut request = Request::new(ReceiverStream::new(frames));
        if let Some(token) = token {
            request
                .metadata_mut()
                .insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        let mut from = client.stream_tasks(request).await?.into_inner();
        let first = timeout(LONG, from.message())
            .await
            .unwrap()?
            .ok_or_else(has_ended)?;
        let (opened, demand) = (first.opened.expect("opened"), first.demand);
        Ok(Self {
            to,
            from,
            opened,
            number: 0,
            ended: Vec::new(),
            tasks: Vec::new(),
            demand,
            closing: false,
        })
    }

    pub(crate) async fn send(&self, frame: pb::WorkerFrame) {
        self.to.send(frame).await.unwrap();
    }

    /// Reads a frame; returns `Ok(None)` if the stream has ended without an error.
    pub(crate) async fn read(&mut self) -> Result<Option<pb::TaskdFrame>, Status> {
        let frame = timeout(LONG, self.from.message())
            .await
            .expect("a frame in time")?;
        if let Some(frame) = &frame {
            self.demand = frame.demand;
            self.closing |= frame.closing.is_some();
            self.tasks.extend(frame.tasks.clone());
            self.ended.extend(frame.ended.clone());
        }
        Ok(frame)
    }

    /// Waits until `count` tasks have arrived.
    pub(crate) async fn tasks(&mut self, count: usize) -> Vec<pb::LeasedTask> {
        while self.tasks.len() < count {
            self.read().await.unwrap().expect("the stream goes on");
        }
        self.tasks.drain(..count).collect()
    }

    /// Sends a frame and waits for its answer.
    pub(crate) async fn ask(&mut self, frame: pb::WorkerFrame) -> Result<pb::FrameAnswer, Status> {
        self.number += 1;
        let number = self.number;
        self.to
            .send(pb::WorkerFrame { number, ..frame })
            .await
            .map_err(|_| has_ended())?;
        loop {
            let frame = self.read().await?.ok_or_else(has_ended)?;
            if let Some(answer) = frame.answer {
                assert_eq!(answer.number, number);
                return Ok(answer);
            }
        }
    }

    pub(crate) async fn complete(
        &mut self,
        tasks: &[pb::LeasedTask],
        want: u32,
    ) -> Vec<ItemStatus> {
        let completions = tasks.iter().map(completion).collect();
        let answer = self
            .ask(pb::WorkerFrame {
                completions,
                want,
                ..Default::default()
            })
            .await
            .unwrap();
        answer
            .completions
            .iter()
            .map(pb::ItemResult::status)
            .collect()
    }

    /// Like [`Self::complete`], for a test that has already sent frames numbered up to `number`.
    pub(crate) async fn complete_from(
        &mut self,
        number: u64,
        tasks: &[pb::LeasedTask],
    ) -> Vec<ItemStatus> {
        self.number = number;
        self.complete(tasks, 0).await
    }

    pub(crate) async fn start(&mut self, tasks: &[pb::LeasedTask]) {
        let started = tasks.iter().map(|task| task.id.clone()).collect();
        self.ask(pb::WorkerFrame {
            started,
            ..Default::default()
        })
        .await
        .unwrap();
    }

    /// Reads until the stream ends.
    pub(crate) async fn end(mut self) -> Result<(), Status> {
        while self.read().await?.is_some() {}
        Ok(())
    }

    pub(crate) async fn close(self) {
        self.send(pb::WorkerFrame {
            close: true,
            ..Default::default()
        })
        .await;
        self.end().await.unwrap();
    }
}

fn has_ended() -> Status {
    Status::unavailable("the stream has ended")
}

pub(crate) fn completion(task: &pb::LeasedTask) -> pb::Completion {
    pb::Completion {
        id: task.id.clone(),
        lease_token: task.lease_token.clone(),
        ..Default::default()
    }
}
