//! Which shards the loops look at: those that are not empty or have just changed, and at times the others.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};

use crate::queue::shard::Notes;

/// How long an empty shard is left out, unless a wake or a call of this process touches it. A wake may get lost.
const SLEEPS_FOR: Duration = Duration::from_secs(30);

/// A process's shards by whether its loops look at them, so that ten thousand empty ones cost next to nothing.
#[derive(Default)]
pub(in crate::queue) struct Awake(Mutex<Lists>);

#[derive(Default)]
struct Lists {
    /// By address: a shard that was closed may come again in another generation.
    awake: HashMap<usize, Arc<Notes>>,
    /// In order of time. A shard that was touched since is awake too.
    asleep: VecDeque<(Instant, Arc<Notes>)>,
}

fn address(notes: &Arc<Notes>) -> usize {
    Arc::as_ptr(notes).addr()
}

impl Awake {
    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.0.lock()
    }

    pub(in crate::queue) fn wake(&self, notes: &Arc<Notes>) {
        self.lock().awake.insert(address(notes), Arc::clone(notes));
    }

    pub(in crate::queue) fn lay_down(&self, notes: &Arc<Notes>, now: Instant) {
        let mut lists = self.lock();
        lists.awake.remove(&address(notes));
        lists.asleep.push_back((now + SLEEPS_FOR, Arc::clone(notes)));
    }

    /// The shards to look at now. Forgets those that are no longer `known`.
    pub(in crate::queue) fn list(&self, now: Instant, known: impl Fn(&Arc<Notes>) -> bool) -> Vec<Arc<Notes>> {
        let mut lists = self.lock();
        while let Some((_, notes)) = lists.asleep.pop_front_if(|(until, _)| *until <= now) {
            if notes.get_up() {
                lists.awake.insert(address(&notes), notes);
            }
        }
        lists.awake.retain(|_, notes| known(notes));
        lists.awake.values().cloned().collect()
    }
}
