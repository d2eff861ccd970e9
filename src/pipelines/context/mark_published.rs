//! Tells SQL a little later which tasks are on the bus, in one transaction for all batches of that
//! time.
//!
//! Nobody waits for these marks, and a transaction for each batch would make SQL wait for the disk.
//! Crash window: if the process is killed before a mark, the watchdog publishes the batches again.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Mutex, mpsc},
    time::Instant,
};

use super::Context;
use crate::{
    bus::Bus,
    runtime::{Loop, Supervisor, tick_after},
    store::{self, Published, Store},
};

/// About how many tasks are marked at once.
const MARKED_AT_ONCE: usize = 10_000;
/// The most batches that wait. Beyond that the publisher waits.
const WAITING: usize = 64;
/// At a stop, how long to wait for the last publisher.
const LAST_WITHIN: Duration = Duration::from_secs(2);

/// Batches on their way to [`mark`].
#[derive(Clone)]
pub struct ToMark(mpsc::Sender<Vec<Published>>);

impl Context {
    /// Starts the loop of this name, which marks.
    pub fn start_marking_published(&self, name: &str, supervisor: &Supervisor) -> ToMark {
        let (sender, receiver) = mpsc::channel(WAITING);
        let store = Arc::clone(&self.store);
        let bus = Arc::clone(&self.bus);
        let of = (store, bus, Arc::new(Mutex::new(receiver)));
        supervisor.spawn_loop(name, of, |(store, bus, receiver), cx| async move {
            mark(&*store, &*bus, &mut *receiver.lock().await, cx).await;
        });
        ToMark(sender)
    }
}

impl ToMark {
    pub(super) async fn add(&self, published: Vec<Published>) {
        if !published.is_empty() && self.0.send(published).await.is_err() {
            tracing::debug!("nobody marks any more: the watchdog publishes again");
        }
    }
}

/// Marks batches until the stop, and then those of publishers that end.
async fn mark(
    store: &dyn Store,
    bus: &dyn Bus,
    receiver: &mut mpsc::Receiver<Vec<Published>>,
    cx: Loop,
) {
    loop {
        let first = tokio::select! {
            biased;
            first = cx.idle(receiver.recv()) => first,
            () = cx.stop.cancelled() => tokio::time::timeout(LAST_WITHIN, receiver.recv()).await.ok().flatten(),
        };
        let Some(first) = first else { return };
        let mut batches = vec![first];
        let mut tasks = tasks_of(&batches[0]);
        let until = tick_after(Instant::now());
        while tasks < MARKED_AT_ONCE
            && let Ok(Some(next)) = tokio::time::timeout_at(until, receiver.recv()).await
        {
            tasks += tasks_of(&next);
            batches.push(next);
        }
        mark_all(store, bus.generation(), batches).await;
        cx.beat();
    }
}

fn tasks_of(published: &[Published]) -> usize {
    published.iter().map(|some| some.tasks.len()).sum()
}

async fn mark_all(store: &dyn Store, generation: &str, batches: Vec<Vec<Published>>) {
    let mut marked = store.mark_published(generation, &batches.concat()).await;
    if marked.as_ref().is_err_and(store::Error::is_refusal) {
        // One refused task is no reason to publish all the others again.
        marked = Ok(());
        for batch in batches {
            marked = marked.and(store.mark_published(generation, &batch).await);
        }
    }
    if let Err(error) = marked {
        tracing::warn!(
            "could not mark published tasks, and the watchdog publishes them again: {error}"
        );
    }
}
