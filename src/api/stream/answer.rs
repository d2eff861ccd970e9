//! The frames of a worker, and their answers.
//!
//! The claim for the `want` of a frame goes to Redis with its reports where there is room for both,
//! so that they share one sync of the disk. The worker does not see that: tasks for it wait for the
//! answer.

use std::sync::{Arc, atomic::Ordering};

use futures::FutureExt;

use super::{
    frames::{Answered, Room, StreamEnd},
    serve::Streaming,
};
use crate::{
    api::Error,
    model::{FrameAnswer, TaskdFrame, WorkerFrame},
    pipelines::tasks::Reports,
};

impl<'a> Streaming<'a> {
    /// Takes what a frame says. Its room is free again when its reports are answered.
    pub(super) fn take(&mut self, frame: WorkerFrame, room: Room) -> Result<(), StreamEnd> {
        let max = self.tasks.max_items();
        if frame.items() > max {
            return Err(StreamEnd::Wrong(format!(
                "{} items in one frame; at most {max}",
                frame.items()
            )));
        }
        self.tasks
            .few_ids("started", &frame.started)
            .map_err(Error::from)?;
        self.attached.started(&frame.started);
        let mut answer = FrameAnswer {
            number: frame.number,
            ..FrameAnswer::default()
        };
        if frame.surrender {
            answer.surrendered = self.surrender();
        }
        let want = frame.want;
        let surrenders = self.surrenders.load(Ordering::Relaxed);
        if frame.items() == 0 {
            let is_asked = frame.number != 0;
            match self.tasks.want(self.attached, want) {
                Some(early) if is_asked => {
                    // The worker knows of it when the answer is sent, and tasks may wait for an
                    // earlier one.
                    self.untold.fetch_add(early, Ordering::Relaxed);
                    let answered = Answered {
                        answer,
                        want: 0,
                        early,
                        surrenders,
                        is_asked,
                        reports: 0,
                    };
                    self.answers.push(async move { Ok(answered) }.boxed());
                }
                Some(_) => {}
                None => self.want_more(Answered {
                    answer,
                    want,
                    early: 0,
                    surrenders,
                    is_asked,
                    reports: 0,
                }),
            }
            return Ok(());
        }
        let early = self.tasks.want_whole(self.attached, want);
        self.untold.fetch_add(early, Ordering::Relaxed);
        let want = want - early;
        let api = self.api;
        let caller = self.caller;
        let attached = self.attached;
        let noted = Reports::of(&frame.completions, &frame.rejections, &frame.extensions);
        let reports = self.reporting.begin(noted.ids());
        let report = async move {
            let _room = room;
            let answer = api
                .report_frame(caller, attached, frame, noted, answer)
                .await?;
            Ok(Answered {
                answer,
                want,
                early,
                surrenders,
                is_asked: true,
                reports,
            })
        };
        self.answers.push(report.boxed());
        Ok(())
    }

    /// Sends the answer to a frame. A `want` that found no room before counts from now on: the
    /// tasks that the frame reported have made room.
    pub(super) async fn answer(&mut self, answered: Answered) -> Result<(), StreamEnd> {
        let Answered {
            mut answer,
            want,
            early,
            surrenders,
            is_asked,
            reports,
        } = answered;
        if surrenders == self.surrenders.load(Ordering::Relaxed) {
            self.is_late &= self.untold.fetch_sub(early, Ordering::Relaxed) > early;
            answer.granted += early;
            if want > 0 {
                match self.tasks.want(self.attached, want) {
                    Some(granted) => answer.granted += granted,
                    None => {
                        self.want_more(Answered {
                            answer,
                            want,
                            early: 0,
                            surrenders,
                            is_asked,
                            reports,
                        });
                        return Ok(());
                    }
                }
            }
        }
        if !is_asked {
            return Ok(());
        }
        self.send(TaskdFrame {
            answer: Some(answer),
            ..self.frame()
        })
        .await?;
        self.reporting.end(reports);
        Ok(())
    }

    /// Asks other processes for a part of the worker's cap, before the answer to a frame.
    fn want_more(&self, answered: Answered) {
        let tasks = self.tasks;
        let attached = self.attached;
        let surrenders = Arc::clone(&self.surrenders);
        let more = async move {
            let Answered {
                mut answer,
                want,
                surrenders: then,
                is_asked,
                reports,
                ..
            } = answered;
            let still = || surrenders.load(Ordering::Relaxed) == then;
            answer.granted += tasks.want_more(attached, want, still).await;
            Ok(Answered {
                answer,
                want: 0,
                early: 0,
                surrenders: then,
                is_asked,
                reports,
            })
        };
        self.answers.push(more.boxed());
    }

    /// Sets the demand to 0; answers what the worker knew of it. No task may come behind the
    /// answer.
    pub(super) fn surrender(&mut self) -> u32 {
        self.surrenders.fetch_add(1, Ordering::Relaxed);
        // Their leases go back.
        self.claim = None;
        self.held = None;
        self.is_late = false;
        self.attached
            .surrender()
            .saturating_sub(self.untold.swap(0, Ordering::Relaxed))
    }
}
