//! Which shards the loops look at: those in which something stands or has happened, and now and then the others.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::shard::Notes;

/// How long a shard in which nothing stands is left out, unless a wake or a call of this process touches it: wakes may
/// get lost.
const SLEEPS_FOR: Duration = Duration::from_secs(30);

/// A process's shards by whether its loops look at them: ten thousand empty ones cost next to nothing.
#[derive(Debug, Default)]
pub(super) struct Awake(Mutex<Lists>);

#[derive(Debug, Default)]
struct Lists {
    /// By address: a shard that was closed may come again in another life.
    awake: HashMap<usize, Arc<Notes>>,
    /// In order of time. One that was touched since is awake as well.
    asleep: VecDeque<(Instant, Arc<Notes>)>,
}

fn address(notes: &Arc<Notes>) -> usize {
    Arc::as_ptr(notes).addr()
}

impl Awake {
    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wake(&self, notes: &Arc<Notes>) {
        self.lock().awake.insert(address(notes), Arc::clone(notes));
    }

    pub(super) fn lay_down(&self, notes: &Arc<Notes>) {
        let mut lists = self.lock();
        lists.awake.remove(&address(notes));
        lists.asleep.push_back((Instant::now() + SLEEPS_FOR, Arc::clone(notes)));
    }

    /// Those to look at now. Forgets what is not `known` any more.
    pub(super) fn list(&self, known: impl Fn(&Arc<Notes>) -> bool) -> Vec<Arc<Notes>> {
        let mut lists = self.lock();
        let now = Instant::now();
        while let Some((_, notes)) = lists.asleep.pop_front_if(|(until, _)| *until <= now) {
            if notes.get_up() {
                lists.awake.insert(address(&notes), notes);
            }
        }
        lists.awake.retain(|_, notes| known(notes));
        lists.awake.values().cloned().collect()
    }
}
