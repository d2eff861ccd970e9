//! The tokio task that opens the stream, serves it, and reopens it after it breaks.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use backon::BackoffBuilder as _;
use tokio::{
    sync::{mpsc, oneshot},
    task::yield_now,
    time::{Instant, sleep, sleep_until, timeout_at},
};
use tonic::Status;

use super::{
    line::Line,
    open::{OPEN_WITHIN, Open, open},
    outbox::Outbox,
    shared::{Answer, Command, Items, Report, Shared},
};
use crate::{
    client::{Client, WAITS},
    error::Error,
    event::{Event, Tell},
    pb::{self, ItemStatus},
};

/// A stream that lived this long was no failure: the retry delays start over.
const STEADY: Duration = Duration::from_secs(2);
const SHORTEST_SLEEP: Duration = Duration::from_millis(10);

pub(super) struct Actor {
    client: Client,
    opening: pb::OpenSession,
    shared: Arc<Shared>,
    commands: mpsc::UnboundedReceiver<Command>,
    tell: Tell,
    outbox: Outbox,
    /// Tasks to give back: to do so, the session continues on another stream whose opening does not
    /// list them.
    returns: Vec<Report>,
    drain: Option<Drain>,
    /// Dropped when the actor ends, which completes the close.
    close: Option<oneshot::Sender<()>>,
    is_closing: bool,
}

struct Drain {
    reply: oneshot::Sender<()>,
    /// The number of the frame that surrenders the demand, if it has been sent.
    number: Option<u64>,
}

/// Why a stream ended.
enum End {
    Closed,
    /// The session continues on another stream to the same server.
    Renew,
    /// The server is shutting down.
    Moved,
    Broke(Error),
    /// The stream was silent: its connection may be dead, so the next stream needs a new one.
    Silent(Error),
    /// One of the reports was invalid.
    Spoilt,
    Refused(Error),
}

/// The outcome of work that a command may interrupt.
enum Attended<T> {
    Done(T),
    /// The worker drains, so the session needs no stream that asks for tasks.
    Drained,
    Closed,
}

impl Actor {
    pub(super) fn new(
        client: Client,
        opening: pb::OpenSession,
        shared: Arc<Shared>,
        commands: mpsc::UnboundedReceiver<Command>,
        tell: Tell,
    ) -> Self {
        let (outbox, returns, drain, close) = (Outbox::default(), Vec::new(), None, None);
        Self {
            client,
            opening,
            shared,
            commands,
            tell,
            outbox,
            returns,
            drain,
            close,
            is_closing: false,
        }
    }

    /// Runs until the worker closes the session or taskd refuses it.
    pub(super) async fn run(mut self) {
        let (mut waits, mut pause, mut old) = (WAITS.build(), Duration::ZERO, 0);
        let client = self.client.clone();
        let servers = client.servers();
        loop {
            let (turn, address, taskd) = servers.pick();
            let (returning, request) = (self.returns.len(), self.open_session());
            let attempt = async move {
                sleep(pause).await;
                servers
                    .within(OPEN_WITHIN, turn, open(taskd, request))
                    .await
            };
            let attempt = match self.attend(attempt).await {
                Attended::Done(attempt) => attempt.map_err(|status| Error::of(&status, address)),
                Attended::Drained => continue,
                Attended::Closed => return,
            };
            let since = Instant::now();
            let end = match attempt {
                Ok(stream) => {
                    old = 0;
                    self.opened(&stream, returning);
                    let end = self.serve(Line::new(stream, address)).await;
                    self.outbox.broke();
                    end
                }
                // During a rolling update, another server may implement it.
                Err(error) if error.is_unimplemented() => {
                    old += 1;
                    if old >= servers.count() {
                        return self.go_by_polls();
                    }
                    servers.move_on(turn);
                    continue;
                }
                Err(error) => {
                    servers.move_on(turn);
                    if error.may_pass() {
                        End::Broke(error)
                    } else {
                        End::Refused(error)
                    }
                }
            };
            if since.elapsed() > STEADY {
                waits = WAITS.build();
            }
            pause = waits.next().unwrap_or(Duration::from_secs(1));
            match end {
                End::Closed => return,
                End::Renew => pause = Duration::ZERO,
                End::Moved => servers.move_on(turn),
                End::Broke(error) => (self.tell)(Event::Away(&error)),
                End::Silent(error) => {
                    servers.abandon(turn);
                    servers.move_on(turn);
                    (self.tell)(Event::Away(&error));
                }
                End::Spoilt => {}
                End::Refused(error) => return self.refuse(&error),
            }
        }
    }

    /// Builds the opening frame. It resumes the session, if there is one, and lists the held tasks
    /// except those to be given back.
    fn open_session(&self) -> pb::OpenSession {
        let returns: Vec<&str> = self
            .returns
            .iter()
            .flat_map(|report| ids(&report.items))
            .collect();
        let holding = self
            .outbox
            .holding()
            .filter(|id| !returns.contains(&id.as_str()))
            .cloned()
            .collect();
        pb::OpenSession {
            want: self.shared.target(),
            holding,
            ..self.opening.clone()
        }
    }

    /// Waits for `work`, and handles commands meanwhile. There is no stream, so no task is in
    /// flight.
    async fn attend<T>(&mut self, work: impl Future<Output = T>) -> Attended<T> {
        let mut work = pin!(work);
        loop {
            if self.is_closing {
                return Attended::Closed;
            }
            if let Some(drain) = self.drain.take() {
                drain.reply.send(()).ok();
                return Attended::Drained;
            }
            tokio::select! {
                done = &mut work => return Attended::Done(done),
                command = self.commands.recv() => match command {
                    Some(command) => self.take(command),
                    None => return Attended::Closed,
                },
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Report(report) if matches!(report.items, Items::Returns(_)) => {
                self.returns.push(report)
            }
            Command::Report(report) => self.outbox.report(report),
            Command::Drain(reply) => {
                self.drain = Some(Drain {
                    reply,
                    number: None,
                })
            }
            Command::Close(reply) => (self.close, self.is_closing) = (Some(reply), true),
        }
    }

    /// Handles the opened stream. The opening did not list the first `returning` reports of
    /// `returns`.
    fn opened(&mut self, stream: &Open, returning: usize) {
        let pb::SessionOpened {
            session, resumed, ..
        } = &stream.opened;
        self.opening.session.clone_from(session);
        let returned: Vec<Report> = self.returns.drain(..returning).collect();
        if *resumed {
            for report in returned {
                self.outbox.forget(ids(&report.items));
                let ok = |id: &str| pb::ItemResult {
                    id: id.into(),
                    status: ItemStatus::Ok.into(),
                    ..Default::default()
                };
                let results = ids(&report.items).map(ok).collect();
                report.answer(Ok(Answer::Items(results)));
            }
        } else {
            // Another process answered, or the session has ended: the leases are still alive, and
            // the worker keeps them by extending them.
            returned
                .into_iter()
                .for_each(|report| self.outbox.report_first(report));
            self.outbox.extend_all(self.opening.lease_duration);
        }
        self.outbox.demand = stream.first.demand;
    }

    async fn serve(&mut self, mut line: Line) -> End {
        let (first, to) = (
            std::mem::take(&mut line.stream.first),
            line.stream.to.clone(),
        );
        self.hear(&mut line, first);
        loop {
            if line.next.is_none() {
                line.next = self.compose(&mut line);
            }
            if line.next.is_none()
                && let Some(end) = self.leaves(&line)
            {
                return end;
            }
            let silent_at = line.heard + line.patience;
            let wake_at = self
                .outbox
                .wakes_at()
                .map_or(line.beats_at(), |at| at.min(line.beats_at()));
            // Avoid a busy loop if something other than the time keeps it from sending.
            let wake_at = wake_at.max(Instant::now() + SHORTEST_SLEEP);
            tokio::select! {
                permit = to.reserve(), if line.next.is_some() && !line.is_deaf => match (permit, line.next.take()) {
                    (Ok(permit), Some(frame)) => {
                        permit.send(frame);
                        line.spoke = Instant::now();
                    }
                    _ => line.is_deaf = true,
                },
                heard = timeout_at(silent_at, line.stream.from.message()) => match heard {
                    Ok(Ok(Some(frame))) => {
                        line.heard = Instant::now();
                        self.hear(&mut line, frame);
                    }
                    Ok(end) => return self.over(end.map(drop), &line),
                    Err(_) => return End::Silent(line.away(format!("nothing came for {:?}", line.patience))),
                },
                command = self.commands.recv() => match command {
                    Some(command) => {
                        self.take(command);
                        self.listen().await;
                    }
                    // The worker was dropped.
                    None => return End::Closed,
                },
                () = self.shared.has_room.notified() => self.listen().await,
                () = sleep_until(wake_at), if line.next.is_none() => {}
            }
        }
    }

    /// Takes the commands that the worker issues at the same moment, so that they share a frame:
    /// for example a report, and its new capacity.
    async fn listen(&mut self) {
        yield_now().await;
        while let Ok(command) = self.commands.try_recv() {
            self.take(command);
        }
    }

    /// The next frame, if there is anything to send.
    fn compose(&mut self, line: &mut Line) -> Option<pb::WorkerFrame> {
        if self.is_closing {
            // taskd answers what was sent before, and takes back the rest.
            let is_first = !std::mem::replace(&mut line.has_closed, true);
            return is_first.then(|| pb::WorkerFrame {
                close: true,
                ..Default::default()
            });
        }
        let beat = (Instant::now() >= line.beats_at()).then(pb::WorkerFrame::default);
        if line.is_ending || !self.returns.is_empty() {
            // Everything that is not sent yet goes over the next stream.
            return beat;
        }
        if let Some(drain) = &mut self.drain
            && drain.number.is_none()
        {
            let (number, frame) = self.outbox.surrender();
            drain.number = Some(number);
            return Some(frame);
        }
        self.outbox
            .next_frame(self.shared.target(), Instant::now())
            .or(beat)
    }

    /// Says whether the worker leaves the stream: it does so only after each of its frames is
    /// answered.
    fn leaves(&self, line: &Line) -> Option<End> {
        if self.is_closing || !self.outbox.is_answered() {
            return None;
        }
        if line.is_ending {
            return Some(End::Moved);
        }
        (!self.returns.is_empty()).then_some(End::Renew)
    }

    fn hear(&mut self, line: &mut Line, frame: pb::TaskdFrame) {
        let pb::TaskdFrame {
            tasks,
            answer,
            ended,
            closing,
            demand,
            ..
        } = frame;
        self.outbox.demand = demand;
        if !tasks.is_empty() {
            self.outbox.hold(&tasks);
            self.shared.arrive(tasks);
        }
        if let Some(answer) = answer {
            let number = answer.number;
            let lost = self.outbox.answered(answer, Instant::now());
            self.shared.end(lost);
            if let Some(drain) = self.drain.take_if(|drain| drain.number == Some(number)) {
                drain.reply.send(()).ok();
            }
        }
        self.shared.end(self.outbox.ended(ended));
        line.is_ending |= closing.is_some();
    }

    /// Classifies the end of a stream.
    fn over(&mut self, end: Result<(), Status>, line: &Line) -> End {
        if self.is_closing {
            return End::Closed;
        }
        if line.is_ending {
            return End::Moved;
        }
        match end.map_err(|status| Error::of(&status, &line.address)) {
            Ok(()) => End::Broke(line.away("it ended the stream".to_owned())),
            Err(error) if error.may_pass() => End::Broke(error),
            Err(error) if error.is_of_items() && self.outbox.has_open_reports() => {
                self.outbox.refuse_open(&error);
                End::Spoilt
            }
            Err(error) => End::Refused(error),
        }
    }

    /// Falls back to calls: taskd has no streams, so all waiting reports are sent by calls.
    fn go_by_polls(mut self) {
        self.shared.go_by_polls();
        self.take_rest().into_iter().for_each(Report::by_call);
    }

    /// Ends the session because taskd refuses the worker: all reports fail with this error.
    fn refuse(mut self, error: &Error) {
        self.shared.refuse(error.clone());
        self.take_rest()
            .into_iter()
            .for_each(|report| report.answer(Err(error.clone())));
    }

    /// Takes all reports, and accepts no more.
    fn take_rest(&mut self) -> Vec<Report> {
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            self.take(command);
        }
        self.outbox
            .take_all()
            .chain(self.returns.drain(..))
            .collect()
    }
}

fn ids(items: &Items) -> impl Iterator<Item = &str> {
    let returns = if let Items::Returns(all) = items {
        all.as_slice()
    } else {
        &[]
    };
    returns.iter().map(|one| &*one.id)
}
