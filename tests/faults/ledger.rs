//! Records the calls of the inserter and the workers with their answers, and checks those promises
//! of taskd that can be checked immediately.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Mutex, MutexGuard},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use crate::{
    crowd::limit_key,
    executions::Executions,
    records::Records,
    topologies::Topologies,
    world::{LEASE_MS, LIMIT_AT_A_TIME, LIMIT_GAP_MS},
};

/// Queue and key.
pub(crate) type Key = (String, String);

/// A task that a worker received.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    pub(crate) id: String,
    pub(crate) token: String,
    pub(crate) key: Key,
    pub(crate) replicas: usize,
    pub(crate) expires_ms: u128,
    /// The tasks that its completion discovers; the same each time it is repeated.
    pub(crate) children: Vec<Key>,
}

/// By how much a process may misjudge Redis's clock: half of the time that a slow answer takes.
const CLOCK_ERROR_MS: u128 = 300;

impl Lease {
    pub(crate) fn result(&self, worker: &str) -> String {
        format!("{worker} {}", self.token)
    }
}

/// One lease of a task, as its worker sees it.
pub(crate) struct Grant {
    pub(crate) worker: String,
    pub(crate) children: Vec<Key>,
    expires_ms: u128,
    /// The worker has sent something that may have ended the lease.
    ended: bool,
    rejected: bool,
    pub(crate) sent: usize,
    /// The number of losses of Redis data before its first completion was sent.
    first_sent: Option<usize>,
    /// The number of losses of Redis data before the completion that was answered with OK.
    pub(crate) ok: Option<usize>,
    pub(crate) refused: bool,
}

/// A task, as its workers saw it.
#[derive(Default)]
pub(crate) struct Seen {
    /// By lease token.
    pub(crate) grants: HashMap<String, Grant>,
    /// The workers that were answered with OK since the last loss of Redis data.
    credited: BTreeSet<String>,
}

#[derive(Default)]
pub(crate) struct Insert {
    pub(crate) sent: usize,
    pub(crate) created: usize,
    /// The ids in all answers.
    pub(crate) ids: BTreeSet<String>,
}

#[derive(Default)]
pub(crate) struct Book {
    pub(crate) inserts: BTreeMap<Key, Insert>,
    /// The earliest time at which each task may be delivered, by task id.
    due_ms: HashMap<String, u128>,
    /// By task id.
    pub(crate) tasks: HashMap<String, Seen>,
    /// The tasks of each limit key that a worker received, and when their leases began.
    limited: HashMap<String, (BTreeSet<String>, BTreeSet<u128>)>,
    /// How often Redis has lost data that it had acknowledged.
    pub(crate) losses: usize,
    pub(crate) completed: usize,
    /// Tasks that arrived on streams.
    pub(crate) pushed: usize,
    /// When the latest request that was answered with OK was sent.
    pub(crate) last_ok: Option<Instant>,
    pub(crate) refused: BTreeMap<String, usize>,
    pub(crate) lies: usize,
    pub(crate) records: Records,
    pub(crate) executions: Executions,
    pub(crate) topologies: Topologies,
    pub(crate) violations: Vec<String>,
}

/// The shared book, with a lock.
#[derive(Default)]
pub(crate) struct Ledger(Mutex<Book>);

/// When a request was sent, and how many losses of Redis data preceded it.
#[derive(Clone, Copy)]
pub(crate) struct Sent {
    at: Instant,
    pub(crate) life: usize,
}

impl Ledger {
    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap()
    }

    pub(crate) fn sending(&self) -> Sent {
        Sent {
            at: Instant::now(),
            life: self.book().losses,
        }
    }

    /// Records that Redis loses, or has just lost, data that it had acknowledged: previous leases
    /// and credits no longer count.
    pub(crate) fn redis_loses(&self) {
        let mut book = self.book();
        book.losses += 1;
        for (_, starts) in book.limited.values_mut() {
            starts.clear();
        }
        for seen in book.tasks.values_mut() {
            seen.credited.clear();
            seen.grants
                .values_mut()
                .for_each(|grant| grant.ended = true);
        }
    }

    pub(crate) fn completed(&self) -> usize {
        self.book().completed
    }

    // --- inserts

    pub(crate) fn inserting(&self, keys: &[Key]) {
        let mut book = self.book();
        for key in keys {
            book.inserts.entry(key.clone()).or_default().sent += 1;
        }
    }

    pub(crate) fn inserted(&self, key: &Key, status: &str, id: &str) {
        let mut book = self.book();
        let insert = book.inserts.get_mut(key).unwrap();
        match status {
            "CREATED" => insert.created += 1,
            "DUPLICATE" => {}
            _ => return,
        }
        insert.ids.insert(id.to_owned());
        let wrong = insert.created > 1 || insert.ids.len() > 1;
        if wrong {
            let what = format!(
                "{key:?} was created {} times, with ids {:?}",
                insert.created, insert.ids
            );
            book.violations.push(what);
        }
    }

    /// The keys that no answer has confirmed as stored.
    pub(crate) fn unanswered(&self) -> Vec<Key> {
        let book = self.book();
        book.inserts
            .iter()
            .filter(|(_, insert)| insert.ids.is_empty())
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// Records that a new task may not be delivered before this time.
    pub(crate) fn waits(&self, id: &str, due_ms: u128) {
        self.book().due_ms.insert(id.to_owned(), due_ms);
    }

    // --- workers

    /// Records that a worker received a task, and checks that it may.
    pub(crate) fn leased(&self, worker: &str, lease: &Lease, sent: Sent) {
        let mut book = self.book();
        let same_life = book.losses == sent.life;
        let now = now_ms();
        // Decided by Redis's clock, which is that of this machine, however wrong the processes'
        // clocks are.
        let early = book
            .due_ms
            .get(&lease.id)
            .and_then(|due| due.checked_sub(now + CLOCK_ERROR_MS));
        let mut wrong = Vec::new();
        if same_life && lease.expires_ms > now {
            wrong.extend(book.over_its_limits(lease, now));
        }
        let seen = book.tasks.entry(lease.id.clone()).or_default();
        // If the lease expired before it arrived, nothing can be concluded.
        if same_life && lease.expires_ms > now {
            let held: Vec<_> = seen
                .grants
                .values()
                .filter(|grant| !grant.ended && grant.expires_ms > now)
                .collect();
            if seen.credited.contains(worker) {
                wrong.push("although it has completed it");
            }
            if held.iter().any(|grant| grant.worker == worker) {
                wrong.push("although it holds it");
            }
            if held.len() + seen.credited.len() + 1 > lease.replicas {
                wrong.push("although NUM others hold or have completed it");
            }
        }
        let (worker, children) = (worker.to_owned(), lease.children.clone());
        let grant = Grant {
            expires_ms: lease.expires_ms,
            ended: !same_life,
            rejected: false,
            sent: 0,
            first_sent: None,
            ok: None,
            refused: false,
            worker,
            children,
        };
        let what = wrong.into_iter().map(|why| {
            format!(
                "{} was given {} {:?} {why}",
                grant.worker, lease.id, lease.key
            )
        });
        let mut what: Vec<_> = what.collect();
        seen.grants.insert(lease.token.clone(), grant);
        if let Some(early) = early {
            what.push(format!(
                "{} {:?} was handed out {early} ms before its time",
                lease.id, lease.key
            ));
        }
        book.violations.extend(what);
    }

    pub(crate) fn extended(&self, lease: &Lease, until_ms: u128) {
        let mut book = self.book();
        let grant = book
            .tasks
            .get_mut(&lease.id)
            .and_then(|seen| seen.grants.get_mut(&lease.token));
        if let Some(grant) = grant {
            grant.expires_ms = until_ms;
        }
    }

    /// Records that a session of the worker ends, or continues with only these tasks: taskd may
    /// take back all others.
    pub(crate) fn lets_go(&self, worker: &str, keeps: &[String]) {
        let mut book = self.book();
        let others = book.tasks.iter_mut().filter(|(id, _)| !keeps.contains(id));
        let grants = others.flat_map(|(_, seen)| seen.grants.values_mut());
        grants
            .filter(|grant| grant.worker == worker)
            .for_each(|grant| grant.ended = true);
    }

    /// Records a broken promise.
    pub(crate) fn broken(&self, what: String) {
        self.book().violations.push(what);
    }

    /// Records that the holder is about to complete or reject its tasks.
    pub(crate) fn ending(&self, leases: &[Lease], completes: bool) {
        let mut book = self.book();
        let life = book.losses;
        for lease in leases {
            let grant = book
                .tasks
                .get_mut(&lease.id)
                .and_then(|seen| seen.grants.get_mut(&lease.token))
                .unwrap();
            grant.ended = true;
            if completes {
                grant.sent += 1;
                grant.first_sent.get_or_insert(life);
            }
        }
    }

    pub(crate) fn rejected(&self, lease: &Lease, status: &str, sent: Sent) {
        let mut book = self.book();
        let same_life = book.losses == sent.life;
        let grant = book
            .tasks
            .get_mut(&lease.id)
            .and_then(|seen| seen.grants.get_mut(&lease.token))
            .unwrap();
        grant.rejected |= status == "OK" && same_life;
    }

    /// Records the answer to the holder's own completion, and checks it.
    pub(crate) fn answered(&self, lease: &Lease, status: &str, sent: Sent) {
        let mut book = self.book();
        let life = book.losses;
        *book.refused.entry(status.to_owned()).or_default() += 1;
        let seen = book.tasks.get_mut(&lease.id).unwrap();
        let grant = seen.grants.get_mut(&lease.token).unwrap();
        let worker = grant.worker.clone();
        let (mut wrong, mut new) = (Vec::new(), false);
        if status == "OK" {
            if grant.refused {
                wrong.push("OK after LEASE_LOST".to_owned());
            }
            if grant.rejected {
                wrong.push("OK after it had rejected it".to_owned());
            }
            new = grant.ok.is_none();
            if sent.life == life {
                grant.ok = Some(life);
                let credits_of_worker = seen
                    .grants
                    .values()
                    .filter(|g| g.worker == worker && g.ok == Some(life))
                    .count();
                seen.credited.insert(worker.clone());
                if credits_of_worker > 1 {
                    wrong.push("OK for two grants".to_owned());
                }
                if seen.credited.len() > lease.replicas {
                    wrong.push(format!("OK as one of {:?}", seen.credited));
                }
            } else {
                grant.ok.get_or_insert(sent.life);
            }
        } else if sent.life == life {
            // UNKNOWN_TASK can follow OK, because the record is removed after the grace time.
            // TRY_LATER says nothing about the task: its shard, or SQL, did not answer, while
            // another shard of the same call did.
            if grant.ok == Some(life) && !["UNKNOWN_TASK", "TRY_LATER"].contains(&status) {
                wrong.push(format!("{status} after OK"));
            }
            // If Redis lost a completion that it had accepted, SQL still receives it over the bus,
            // possibly after this answer.
            grant.refused |= status == "LEASE_LOST" && grant.first_sent == Some(life);
        }
        let what = wrong
            .into_iter()
            .map(|why| format!("{worker} was answered {why}: {} {:?}", lease.id, lease.key));
        let what: Vec<_> = what.collect();
        if new {
            book.completed += 1;
        }
        if status == "OK" {
            book.last_ok = book.last_ok.max(Some(sent.at));
        }
        book.violations.extend(what);
    }

    /// Records the answer to a completion that must not count.
    pub(crate) fn lied(&self, lie: &str, status: &str) {
        let mut book = self.book();
        book.lies += 1;
        if status == "OK" {
            book.violations
                .push(format!("a lie was answered OK: {lie}"));
        }
    }
}

impl Book {
    /// What is wrong with a lease that begins now, by the limits of its limit key.
    fn over_its_limits(&mut self, lease: &Lease, now: u128) -> Vec<&'static str> {
        let Some(limit_key) = limit_key(&lease.key) else {
            return Vec::new();
        };
        let (tasks, starts) = self.limited.entry(limit_key).or_default();
        tasks.insert(lease.id.clone());
        let grants = tasks
            .iter()
            .filter_map(|id| self.tasks.get(id))
            .flat_map(|seen| seen.grants.values());
        let held = grants.filter(|grant| !grant.ended && grant.expires_ms > now);
        let mut wrong = Vec::new();
        if held.count() >= LIMIT_AT_A_TIME {
            wrong.push("although as many of its limit key as may be are leased");
        }
        let start = lease.expires_ms.saturating_sub(LEASE_MS);
        let grace = LIMIT_GAP_MS - CLOCK_ERROR_MS;
        let mut near = starts.range(start.saturating_sub(grace - 1)..start + grace);
        if near.next().is_some() {
            wrong.push("although another one of its limit key started just before");
        }
        starts.insert(start);
        wrong
    }
}

pub(crate) fn now_ms() -> u128 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_millis()
}
