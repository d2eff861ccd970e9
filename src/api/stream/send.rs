//! The way of frames to the connection of a stream.

use std::{pin::pin, time::Instant};

use futures::StreamExt;
use tokio::time::sleep;

use super::{
    frames::{Sent, StreamEnd},
    report::OptionFuture,
    serve::{LAST_WORDS, Streaming, TICK},
};
use crate::model::TaskdFrame;

impl Streaming<'_> {
    pub(super) async fn send(&mut self, frame: TaskdFrame) -> Result<(), StreamEnd> {
        self.send_all(Box::new(Sent {
            frame,
            deliveries: Vec::new(),
            room: None,
            _place: None,
        }))
        .await
    }

    /// Waits for a worker that is slow to read. Its connection ends after a while; an end of the
    /// session or of its token counts before. Its leases are kept meanwhile.
    pub(super) async fn send_all(&mut self, sent: Box<Sent>) -> Result<(), StreamEnd> {
        if let Ok(place) = self.out.try_reserve() {
            place.send(sent);
            self.spoke = Instant::now();
            return Ok(());
        }
        // Nobody would ask a claim that waits for tasks, and a wake that it gets would reach no
        // other worker. Leases that wait for an answer go back.
        self.claim = None;
        self.held = None;
        let api = self.api;
        let attached = self.attached;
        let out = self.out.clone();
        let began = Instant::now();
        let mut stopped = pin!(async {
            api.stop.cancelled().await;
            sleep(LAST_WORDS).await;
        });
        loop {
            tokio::select! {
                biased;
                cut = attached.cut() => return Err(cut.into()),
                place = out.reserve() => {
                    place.map_err(|_| StreamEnd::Broken)?.send(sent);
                    break;
                }
                () = &mut stopped => return Err(StreamEnd::Stopping),
                // Reports go on: one that is not asked would keep what it has of the database.
                Some(answered) = self.answers.next() => self.answered.push_back(answered),
                Some(()) = OptionFuture(&mut self.keeping) => self.keeping = None,
                () = sleep(TICK) => self.look()?,
            }
        }
        // Nobody has read the worker's frames meanwhile.
        self.heard += began.elapsed();
        self.spoke = Instant::now();
        Ok(())
    }
}
