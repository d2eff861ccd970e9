//! The stream of a worker, for the half of the crowd that does not poll.

use std::time::{Duration, Instant};

use taskd::wire::pb::{self, Encoding};
use tokio::time::timeout;
use tonic::Status;

use crate::{
    crowd::PATIENCE,
    ledger::{Key, Lease, Ledger, Sent},
    support::session::{Worker, try_channel},
};

/// How long a worker waits for tasks before it does something else.
const A_WHILE: Duration = Duration::from_millis(200);
const HEARTBEAT: Duration = Duration::from_secs(1);

/// An open stream.
pub(crate) struct Pushed {
    worker: Worker,
    /// How many tasks taskd may still send.
    wanted: u32,
    /// When the demand was last zero: tasks that arrived since then were not claimed before.
    asked: Sent,
    spoke: Instant,
    tells_started: bool,
    /// Redis did not answer while the stream was opened, so taskd may ignore a demand, or serve it
    /// later.
    is_unsure: bool,
}

impl Pushed {
    pub(crate) async fn open(
        port: u16,
        open: pb::OpenSession,
        ledger: &Ledger,
    ) -> Result<Self, Status> {
        let (asked, tells_started) = (ledger.sending(), open.tells_started);
        let opening = async { Worker::open_on(try_channel(port).await?, open, None).await };
        let worker = timeout(PATIENCE, opening)
            .await
            .unwrap_or_else(|_| Err(no_answer()))?;
        let wanted = worker.opened.granted;
        Ok(Self {
            worker,
            wanted,
            asked,
            spoke: Instant::now(),
            tells_started,
            is_unsure: wanted == 0,
        })
    }

    pub(crate) fn opened(&self) -> &pb::SessionOpened {
        &self.worker.opened
    }

    async fn send(&mut self, frame: pb::WorkerFrame) -> Result<(), Status> {
        self.spoke = Instant::now();
        self.worker.to.send(frame).await.map_err(|_| ended())
    }

    /// Sends a frame and waits for its answer.
    pub(crate) async fn ask(&mut self, frame: pb::WorkerFrame) -> Result<pb::FrameAnswer, Status> {
        self.spoke = Instant::now();
        timeout(PATIENCE, self.worker.ask(frame))
            .await
            .unwrap_or_else(|_| Err(no_answer()))
    }

    /// Sends a report. It asks for tasks only if none are in flight, so that any task that arrives
    /// was claimed after this.
    pub(crate) async fn report(
        &mut self,
        mut frame: pb::WorkerFrame,
        ledger: &Ledger,
    ) -> Result<pb::FrameAnswer, Status> {
        if self.wanted > 0 {
            frame.want = 0;
        }
        let (wants, asked) = (frame.want > 0, ledger.sending());
        let answer = self.ask(frame).await?;
        if wants {
            let came = self.worker.tasks.len();
            if came > 0 {
                ledger.broken(format!(
                    "{came} tasks came before the answer that told of their demand"
                ));
            }
            (self.asked, self.wanted) = (asked, answer.granted);
        }
        Ok(answer)
    }

    /// Asks for tasks if none are in flight, and waits a short time for some. Also returns when it
    /// asked for them.
    pub(crate) async fn tasks(
        &mut self,
        most: u32,
        ledger: &Ledger,
    ) -> Result<(Vec<pb::LeasedTask>, Sent), Status> {
        if self.wanted == 0 && self.is_unsure {
            let asked = ledger.sending();
            let answer = self
                .ask(pb::WorkerFrame {
                    want: most,
                    ..Default::default()
                })
                .await?;
            (self.asked, self.wanted, self.is_unsure) =
                (asked, answer.granted, answer.granted == 0);
        } else if self.wanted == 0 {
            (self.asked, self.wanted) = (ledger.sending(), most);
            self.send(pb::WorkerFrame {
                want: most,
                ..Default::default()
            })
            .await?;
        } else if self.spoke.elapsed() > HEARTBEAT {
            self.send(pb::WorkerFrame::default()).await?;
        }
        if self.worker.tasks.is_empty()
            && let Ok(frame) = timeout(A_WHILE, self.worker.read()).await
        {
            frame?.ok_or_else(ended)?;
        }
        let tasks = std::mem::take(&mut self.worker.tasks);
        let came = u32::try_from(tasks.len()).unwrap();
        if came > self.wanted {
            ledger.broken(format!(
                "{came} tasks were sent on a stream that wanted {}",
                self.wanted
            ));
        }
        self.wanted = self.wanted.saturating_sub(came);
        if self.tells_started && came > 0 {
            let started = tasks.iter().map(|task| task.id.clone()).collect();
            self.send(pb::WorkerFrame {
                started,
                ..Default::default()
            })
            .await?;
        }
        Ok((tasks, self.asked))
    }

    /// Surrenders the demand. Tasks that arrived before the answer still count.
    pub(crate) async fn surrender(&mut self, ledger: &Ledger) -> Result<(), Status> {
        let answer = self
            .ask(pb::WorkerFrame {
                surrender: true,
                ..Default::default()
            })
            .await?;
        let came = u32::try_from(self.worker.tasks.len()).unwrap();
        // A process that stops or starts over surrenders by itself.
        if answer.surrendered + came != self.wanted && !self.worker.closing {
            let (wanted, back) = (self.wanted, answer.surrendered);
            ledger.broken(format!(
                "a stream wanted {wanted} tasks: {came} came, and {back} were surrendered"
            ));
        }
        self.wanted = came;
        Ok(())
    }

    pub(crate) async fn close(mut self) {
        if self
            .send(pb::WorkerFrame {
                close: true,
                ..Default::default()
            })
            .await
            .is_ok()
        {
            drop(timeout(PATIENCE, self.worker.end()).await);
        }
    }
}

fn no_answer() -> Status {
    Status::deadline_exceeded("no answer")
}

fn ended() -> Status {
    Status::unavailable("the stream has ended")
}

pub(crate) fn completion(lease: &Lease, worker: &str) -> pb::Completion {
    pb::Completion {
        id: lease.id.clone(),
        lease_token: lease.token.clone(),
        result: lease.result(worker).into(),
        discovered: lease.children.iter().map(discovered).collect(),
        result_encoding: Encoding::Text.into(),
        limit: None,
    }
}

fn discovered((queue, key): &Key) -> pb::NewTask {
    pb::NewTask {
        queue: queue.clone(),
        key: key.clone().into(),
        payload: key.split('/').next_back().unwrap().to_owned().into(),
        payload_encoding: Encoding::Text.into(),
        ..Default::default()
    }
}

/// The status of an item as in the HTTP API, and the new deadline of its lease.
pub(crate) fn read(result: &pb::ItemResult) -> (String, Option<u128>) {
    let status = result
        .status()
        .as_str_name()
        .trim_start_matches("ITEM_STATUS_")
        .to_owned();
    (status, result.lease_expires_at.map(unix_ms))
}

pub(crate) fn unix_ms(at: prost_types::Timestamp) -> u128 {
    u128::try_from(at.seconds).unwrap() * 1000 + u128::try_from(at.nanos).unwrap() / 1_000_000
}
