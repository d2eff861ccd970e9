//! The way of a worker's lines to the terminal or the pipe: a thread writes them, so that the
//! worker waits for no reader.

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

/// The lines that wait for the thread. Further ones are dropped, and counted.
const MOST_WAITING: usize = 10_000;
/// How long the last lines may take.
const LAST_LINES: Duration = Duration::from_secs(5);

/// The words for the thread to write.
pub(super) enum Said {
    /// A line on stdout.
    Line(String),
    /// A line above the bar.
    Above(String),
    /// The text of the bar. The next one replaces it.
    Bar(String),
    /// The bar goes.
    Finish,
}

impl Said {
    fn is_line(&self) -> bool {
        matches!(self, Self::Line(_) | Self::Above(_))
    }
}

pub(super) struct Output {
    /// `None` behind the end.
    queue: Mutex<Option<Queue>>,
    lines: AtomicU64,
    written: Arc<AtomicU64>,
}

struct Queue {
    said: SyncSender<Said>,
    /// The thread drops the other side when it has written everything.
    done: oneshot::Receiver<()>,
}

impl Output {
    /// With a bar, or without.
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

    /// Does not block.
    pub(super) fn say(&self, said: Said) {
        if let Some(queue) = &*self.queue() {
            self.lines.fetch_add(said.is_line().into(), Relaxed);
            queue.said.try_send(said).ok();
        }
    }

    /// Waits for the last lines, but not for ever, and says on stderr how many are missing.
    pub(super) async fn end(&self) {
        let missing = self.missing(LAST_LINES).await;
        if missing > 0 {
            // Stderr may be the same terminal.
            let told = tokio::task::spawn_blocking(move || {
                say(format_args!(
                    "taskd: nobody read {missing} lines of this worker in time, so they are missing"
                ));
            });
            timeout(LAST_LINES, told).await.ok();
        }
    }

    /// How many lines are missing after the last ones had so much time.
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

/// A reader that went away is no failure: the work goes on.
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

    /// Says more lines than may wait to a writer that goes on when the sender is dropped; with the
    /// lines that it wrote.
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
