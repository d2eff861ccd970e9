//! Writes the worker's lines to the terminal or pipe. A separate thread does so, so that the worker
//! never waits for a reader.

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use indicatif::ProgressBar;
use tokio::{sync::oneshot, time::timeout};

use crate::cli::print::{print, say};

/// How many lines may wait for the thread. Further lines are dropped and counted.
const MOST_WAITING: usize = 10_000;
/// How long to wait at the end for the last lines to be written.
const LAST_LINES: Duration = Duration::from_secs(5);

/// What the thread writes.
pub(super) enum Said {
    /// A line on stdout.
    Line(String),
    /// A line above the progress bar.
    Above(String),
    /// The text of the progress bar, replaced by the next one.
    Bar(String),
    /// Removes the progress bar.
    Finish,
}

impl Said {
    fn is_line(&self) -> bool {
        matches!(self, Self::Line(_) | Self::Above(_))
    }
}

pub(super) struct Output {
    /// `None` after the end.
    queue: Mutex<Option<Queue>>,
    lines: AtomicU64,
    written: Arc<AtomicU64>,
}

struct Queue {
    said: SyncSender<Said>,
    /// Resolves when the thread has written everything and drops the sender.
    done: oneshot::Receiver<()>,
}

impl Output {
    /// Starts the thread, with or without a progress bar.
    pub(super) fn new(bar: Option<ProgressBar>) -> io::Result<Self> {
        Self::with(move |said| write(said, bar.as_ref()))
    }

    fn with(mut write: impl FnMut(Said) + Send + 'static) -> io::Result<Self> {
        let (said, queued): (_, Receiver<Said>) = sync_channel(MOST_WAITING);
        let (all_written, done) = oneshot::channel();
        let written = Arc::<AtomicU64>::default();
        let counted = written.clone();
        let write_all = move || {
            let _all_written: oneshot::Sender<()> = all_written;
            for said in queued {
                let is_line = said.is_line();
                write(said);
                counted.fetch_add(is_line.into(), Relaxed);
            }
        };
        thread::Builder::new()
            .name("output".to_owned())
            .spawn(write_all)?;
        Ok(Self {
            queue: Some(Queue { said, done }).into(),
            lines: AtomicU64::new(0),
            written,
        })
    }

    /// Queues something to write. Does not block.
    pub(super) fn say(&self, said: Said) {
        if let Some(queue) = &*self.queue() {
            self.lines.fetch_add(said.is_line().into(), Relaxed);
            queue.said.try_send(said).ok();
        }
    }

    /// Waits a limited time for the last lines, and prints on stderr how many were not written.
    pub(super) async fn end(&self) {
        let missing = self.missing(LAST_LINES).await;
        if missing > 0 {
            // Do not block here either, because stderr may be the same terminal.
            let told = tokio::task::spawn_blocking(move || {
                say(format_args!(
                    "taskd: nobody read {missing} lines of this worker in time, so they are missing"
                ));
            });
            timeout(LAST_LINES, told).await.ok();
        }
    }

    /// Waits up to `time` for the last lines; returns how many were not written.
    async fn missing(&self, time: Duration) -> u64 {
        let queue = self.queue().take();
        if let Some(Queue { said, done }) = queue {
            drop(said);
            timeout(time, done).await.ok();
        }
        self.lines.load(Relaxed) - self.written.load(Relaxed)
    }

    fn queue(&self) -> MutexGuard<'_, Option<Queue>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ignores errors: if the reader is gone, the work continues.
fn write(said: Said, bar: Option<&ProgressBar>) {
    match (said, bar) {
        (Said::Line(line), _) => drop(print(line)),
        (Said::Above(line), Some(bar)) => bar.println(line),
        (Said::Bar(text), Some(bar)) => bar.set_message(text),
        (Said::Finish, Some(bar)) => bar.finish_and_clear(),
        (Said::Above(_) | Said::Bar(_) | Said::Finish, None) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Queues more lines than the limit for a blocked writer, which continues once the sender is
    /// dropped. Also returns the lines that it has written.
    fn stalled() -> (Output, usize, mpsc::Sender<()>, Arc<Mutex<Vec<String>>>) {
        let (sender, goes_on) = mpsc::channel();
        let all = MOST_WAITING + 100;
        let written = Arc::<Mutex<Vec<String>>>::default();
        let output = Output::with({
            let written = written.clone();
            move |said| {
                goes_on.recv().ok();
                if let Said::Line(line) = said {
                    written.lock().unwrap().push(line);
                }
            }
        });
        let output = output.unwrap();
        (0..all).for_each(|number| output.say(Said::Line(number.to_string())));
        (output, all, sender, written)
    }

    #[tokio::test]
    async fn what_has_room_is_written_in_order_and_the_rest_is_counted() {
        let (output, all, sender, written) = stalled();
        drop(sender);
        let missing = usize::try_from(output.missing(PATIENCE).await).unwrap();
        let written = written.lock().unwrap();
        assert!(
            written.len() >= MOST_WAITING && written.len() + missing == all,
            "{} {missing}",
            written.len()
        );
        assert!(
            written
                .iter()
                .enumerate()
                .all(|(number, line)| *line == number.to_string())
        );
    }

    #[tokio::test]
    async fn a_reader_that_stalls_does_not_hold_up_the_end() {
        let (output, all, _sender, _) = stalled();
        assert_eq!(output.missing(Duration::ZERO).await, all as u64);
        output.say(Said::Line("behind the end".to_owned()));
        assert_eq!(output.missing(Duration::ZERO).await, all as u64);
    }
}
