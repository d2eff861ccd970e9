//! The existing queues, and how many unfinished tasks each has.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::RwLock;

use super::{KnownTopologies, OpenTrees};
use crate::{
    config::Queues,
    model::{QueueName, Scope},
};

/// How long a newly admitted name counts before SQL has a task of it. If there is none by then, the
/// task was not stored.
const LET_IN: Duration = Duration::from_secs(10);

/// The queue names and the numbers of unfinished tasks in the whole installation: as last read from
/// SQL, plus what this process has admitted since. Clones share it.
#[derive(Clone, Default)]
pub struct Occupancy(Arc<RwLock<QueueCounts>>, KnownTopologies, OpenTrees);

#[derive(Default)]
struct QueueCounts {
    unfinished: HashMap<QueueName, u64>,
    /// How many times the counts were read from SQL.
    readings: u64,
    /// When the oldest task that still waits in SQL was inserted.
    oldest: HashMap<QueueName, i64>,
    /// Names with unfinished tasks, with an open shard, or admitted a moment ago.
    names: HashSet<QueueName>,
    let_in: HashMap<QueueName, Instant>,
    /// The scopes of restricted tokens, which reach only some queues.
    scopes: Vec<Scope>,
    /// The number of names that a scope includes, for the scopes that somebody asked about since
    /// the last reading.
    names_of: HashMap<Scope, usize>,
}

/// The reason why a new name is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoName {
    /// The limit on names is reached.
    All,
    /// The scope of a token includes this name, and already half of the names that are allowed.
    OfScope,
}

impl QueueCounts {
    /// Returns whether the existing names in this scope are at least half of the limit `max`.
    fn has_half(&mut self, scope: &Scope, max: usize) -> bool {
        let names = &self.names;
        let count = || {
            names
                .iter()
                .filter(|name| scope.includes(name.as_str()))
                .count()
        };
        *self.names_of.entry(scope.clone()).or_insert_with(count) >= (max / 2).max(1)
    }

    fn let_in(&mut self, queue: &QueueName) {
        if self.names.insert(queue.clone()) {
            let including = self
                .names_of
                .iter_mut()
                .filter(|(scope, _)| scope.includes(queue.as_str()));
            including.for_each(|(_, count)| *count += 1);
        }
        self.let_in.insert(queue.clone(), Instant::now());
    }
}

/// Capacity that is reserved for tasks that may be new. When dropped, it returns the part of those
/// that were not.
pub struct OccupancyPermit {
    of: Occupancy,
    reading: u64,
    left: BTreeMap<QueueName, u64>,
}

impl OccupancyPermit {
    /// Keeps the capacity of one task of this queue, because it was stored as new.
    pub fn keep(&mut self, queue: &QueueName) {
        if let Some(left) = self.left.get_mut(queue) {
            *left = left.saturating_sub(1);
        }
    }
}

/// Returns what is left, unless the counts were read from SQL again since: they do not include it.
impl Drop for OccupancyPermit {
    fn drop(&mut self) {
        if self.left.values().all(|left| *left == 0) {
            return;
        }
        let mut known = self.of.0.write();
        if known.readings != self.reading {
            return;
        }
        for (queue, left) in &self.left {
            if let Some(unfinished) = known.unfinished.get_mut(queue) {
                *unfinished = unfinished.saturating_sub(*left);
            }
        }
    }
}

impl Occupancy {
    /// Takes over the counts of SQL, and the queues that have an open shard.
    pub(super) fn set_names(
        &self,
        unfinished: HashMap<QueueName, u64>,
        open: impl Iterator<Item = QueueName>,
    ) {
        let mut known = self.0.write();
        let mut names: HashSet<_> = open.chain(unfinished.keys().cloned()).collect();
        known
            .let_in
            .retain(|queue, at| at.elapsed() < LET_IN && !names.contains(queue));
        names.extend(known.let_in.keys().cloned());
        known.unfinished = unfinished;
        known.names = names;
        known.readings += 1;
        known.names_of.clear();
    }

    pub(super) fn set_oldest(&self, oldest: HashMap<QueueName, i64>) {
        self.0.write().oldest = oldest;
    }

    /// The number of unfinished tasks of each queue that has any. Half a second old at most.
    pub fn unfinished(&self) -> HashMap<QueueName, u64> {
        self.0.read().unfinished.clone()
    }

    /// The number of unfinished tasks of a queue, half a second old at most.
    pub fn unfinished_of(&self, queue: &QueueName) -> u64 {
        self.0.read().unfinished.get(queue).copied().unwrap_or(0)
    }

    /// Returns when the oldest task that waits in SQL was inserted, for each queue. At most two
    /// seconds old.
    pub fn oldest(&self) -> HashMap<QueueName, i64> {
        self.0.read().oldest.clone()
    }

    /// Whether the queue has unfinished tasks or an open shard, or was let in a moment ago.
    pub fn knows(&self, queue: &QueueName) -> bool {
        self.0.read().names.contains(queue)
    }

    /// The topologies, whose stages are always let in.
    pub fn topologies(&self) -> &KnownTopologies {
        &self.1
    }

    /// The open trees of topologies with a bound.
    pub fn open_trees(&self) -> &OpenTrees {
        &self.2
    }

    /// Whether somebody who may do everything wants a queue of this name.
    fn is_wanted(&self, queue: &QueueName, queues: &Queues) -> bool {
        queues.named.contains_key(queue) || self.1.stages().of(queue.as_str()).is_some()
    }

    /// Replaces the scopes of restricted tokens.
    pub fn set_scopes(&self, mut scopes: Vec<Scope>) {
        scopes.retain(|scope| !scope.is_everything());
        self.0.write().scopes = scopes;
    }

    /// Decides whether tasks may go to a queue of this name. A known name always passes, and so
    /// does one with settings of its own, or a stage. A new name passes if there are fewer than `max` names
    /// and, for a restricted caller, fewer than half of `max` in its scope.
    pub fn lets_in(
        &self,
        queue: &QueueName,
        max: usize,
        queues: &Queues,
        scope: Option<&Scope>,
    ) -> Result<(), NoName> {
        if self.0.read().names.contains(queue) {
            return Ok(());
        }
        let is_wanted = self.is_wanted(queue, queues);
        let mut known = self.0.write();
        if !known.names.contains(queue) && !is_wanted {
            if known.names.len() >= max {
                return Err(NoName::All);
            }
            if scope.is_some_and(|scope| known.has_half(scope, max)) {
                return Err(NoName::OfScope);
            }
        }
        known.let_in(queue);
        Ok(())
    }

    /// Does what [`Self::lets_in`] does, for a discovered task. It is no longer known whose token
    /// reported the task, so every scope of a token that includes the name counts.
    pub fn lets_in_discovered(
        &self,
        queue: &QueueName,
        max: usize,
        queues: &Queues,
    ) -> Result<(), NoName> {
        if self.0.read().names.contains(queue) {
            return Ok(());
        }
        let is_wanted = self.is_wanted(queue, queues);
        let mut known = self.0.write();
        let scopes = known.scopes.clone();
        let is_new = !known.names.contains(queue) && !is_wanted;
        let mut including = scopes.iter().filter(|scope| scope.includes(queue.as_str()));
        if is_new && including.any(|scope| known.has_half(scope, max)) {
            return Err(NoName::OfScope);
        }
        drop(known);
        self.lets_in(queue, max, queues, None)
    }

    /// Reserves capacity for this many tasks of each queue. If a queue has reached its
    /// `max_unfinished`, reserves nothing and returns that queue.
    pub fn admit(
        &self,
        tasks: BTreeMap<QueueName, u64>,
        queues: &Queues,
    ) -> Result<OccupancyPermit, QueueName> {
        let mut known = self.0.write();
        let is_full = |queue: &QueueName| {
            known
                .unfinished
                .get(queue)
                .is_some_and(|count| *count >= queues.get(queue).max_unfinished)
        };
        if let Some(full) = tasks.keys().find(|queue| is_full(queue)) {
            return Err(full.clone());
        }
        for (queue, count) in &tasks {
            *known.unfinished.entry(queue.clone()).or_default() += count;
        }
        Ok(OccupancyPermit {
            of: self.clone(),
            reading: known.readings,
            left: tasks,
        })
    }

    /// Reserves capacity for `count` tasks that may be new. If there is not enough for all,
    /// reserves nothing and returns false.
    pub fn admit_all(&self, queue: &QueueName, count: u64, queues: &Queues) -> bool {
        let mut known = self.0.write();
        let unfinished = known.unfinished.entry(queue.clone()).or_default();
        let has_room = unfinished.saturating_add(count) <= queues.get(queue).max_unfinished;
        if has_room {
            *unfinished += count;
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(name: &str) -> QueueName {
        QueueName::new(name).unwrap()
    }

    #[test]
    fn names_beyond_the_bound_are_not_let_in() {
        let occupancy = Occupancy::default();
        let mut queues = Queues::default();
        queues.named.insert(queue("named"), queues.default.clone());
        occupancy.set_names(
            [(queue("busy"), 1)].into(),
            [queue("open"), queue("busy")].into_iter(),
        );
        for name in ["busy", "open", "new", "new", "named"] {
            assert_eq!(
                occupancy.lets_in(&queue(name), 3, &queues, None),
                Ok(()),
                "{name}"
            );
        }
        assert_eq!(
            occupancy.lets_in(&queue("beyond"), 3, &queues, None),
            Err(NoName::All)
        );
        // An admitted name counts until SQL has it or its time is over. A name that is gone makes
        // room for another.
        occupancy.set_names(HashMap::new(), [queue("open")].into_iter());
        assert_eq!(
            occupancy.lets_in(&queue("beyond"), 3, &queues, None),
            Err(NoName::All)
        );
        occupancy.0.write().let_in.clear();
        occupancy.set_names([(queue("new"), 1)].into(), [queue("open")].into_iter());
        assert_eq!(
            occupancy.lets_in(&queue("beyond"), 3, &queues, None),
            Ok(())
        );
    }

    #[test]
    fn a_scope_has_half_of_the_names() {
        let occupancy = Occupancy::default();
        let mut queues = Queues::default();
        queues
            .named
            .insert(queue("a.named"), queues.default.clone());
        let scope: Scope = "a.*".parse().unwrap();
        occupancy.set_names([(queue("a.0"), 1)].into(), [queue("b.0")].into_iter());
        let lets_in = |name: &str, scope| occupancy.lets_in(&queue(name), 6, &queues, scope);
        assert_eq!(lets_in("a.1", Some(&scope)), Ok(()));
        // A name counts in the scope no matter who created it.
        assert_eq!(lets_in("a.2", None), Ok(()));
        assert_eq!(lets_in("a.3", Some(&scope)), Err(NoName::OfScope));
        for name in ["a.0", "a.2", "a.named"] {
            assert_eq!(lets_in(name, Some(&scope)), Ok(()), "{name}");
        }
        // A scope limits discovered names only if a restricted token has it.
        assert_eq!(
            occupancy.lets_in_discovered(&queue("a.3"), 7, &queues),
            Ok(())
        );
        occupancy.set_scopes(vec![
            scope.clone(),
            Scope::default(),
            "b.*".parse().unwrap(),
        ]);
        assert_eq!(
            occupancy.lets_in_discovered(&queue("a.4"), 7, &queues),
            Err(NoName::OfScope)
        );
        assert_eq!(
            occupancy.lets_in_discovered(&queue("b.1"), 7, &queues),
            Ok(())
        );
        assert_eq!(lets_in("c", None), Err(NoName::All));
        // Reading SQL again corrects the number of names.
        occupancy.0.write().let_in.clear();
        occupancy.set_names([(queue("a.0"), 1)].into(), std::iter::empty());
        assert_eq!(lets_in("a.5", Some(&scope)), Ok(()));
    }

    #[test]
    fn room_is_taken_once() {
        let occupancy = Occupancy::default();
        let mut queues = Queues::default();
        queues.default.max_unfinished = 10;
        occupancy.set_names([(queue("q"), 7)].into(), std::iter::empty());
        assert!(occupancy.admit_all(&queue("q"), 2, &queues));
        assert!(!occupancy.admit_all(&queue("q"), 2, &queues));
        assert!(occupancy.admit_all(&queue("q"), 1, &queues));
        assert!(occupancy.admit([(queue("q"), 1)].into(), &queues).is_err());
    }

    #[test]
    fn room_of_tasks_that_were_not_stored_comes_back() {
        let occupancy = Occupancy::default();
        let mut queues = Queues::default();
        queues.default.max_unfinished = 10;
        let admit = |tasks: &[(&str, u64)]| {
            occupancy.admit(
                tasks
                    .iter()
                    .map(|(name, count)| (queue(name), *count))
                    .collect(),
                &queues,
            )
        };
        let unfinished = |name: &str| occupancy.unfinished().get(&queue(name)).copied();
        let mut room = admit(&[("q", 9)]).ok().unwrap();
        assert_eq!(unfinished("q"), Some(9));
        room.keep(&queue("q"));
        drop(room);
        assert_eq!(unfinished("q"), Some(1), "eight were known before");
        // A call that is refused because of one queue reserves nothing in another.
        occupancy.set_names([(queue("full"), 10)].into(), std::iter::empty());
        assert_eq!(admit(&[("a", 5), ("full", 1)]).err(), Some(queue("full")));
        assert_eq!(unfinished("a"), None);
        // SQL was read again in between, so the permit returns nothing.
        let room = admit(&[("a", 5)]).ok().unwrap();
        occupancy.set_names([(queue("a"), 3)].into(), std::iter::empty());
        drop(room);
        assert_eq!(unfinished("a"), Some(3));
    }
}
