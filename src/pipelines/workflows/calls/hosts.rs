//! The hosts that are called: none may hold up the others.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use url::Url;

use crate::outbound::{Breaker, Turned};

/// How many requests a host gets at the same time, and all hosts together. A host also gets no more
/// than half of the places that are left, so that slow ones leave some to others.
const AT_ONCE: usize = 16;
pub(super) const ALL_AT_ONCE: usize = 128;
/// After so many failures in a row a host is not called for a moment.
const FAILURES: u32 = 5;
const PAUSE: Duration = Duration::from_secs(5);
/// How many hosts are known at most while no request is under way to them.
const MOST: usize = 1_000;
/// Bounds of how long a request is put off.
const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(30);
/// How long a request takes, before any was seen.
const FIRST_GUESS: Duration = Duration::from_millis(100);

/// The hosts that were called lately. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Hosts {
    by_name: Arc<Mutex<HashMap<String, Arc<Host>>>>,
    /// How many requests are under way.
    under_way: Arc<AtomicUsize>,
}

pub(super) struct Host {
    name: String,
    pub(super) breaker: Breaker,
    pace: Mutex<Pace>,
    of_all: Arc<AtomicUsize>,
}

/// How long requests take, and from when on there is room for one more.
struct Pace {
    under_way: usize,
    usual: Duration,
    /// When a request began or ended.
    moved: Instant,
    next: Instant,
}

/// A request under way.
pub(super) struct Place<'a> {
    host: &'a Host,
    since: Instant,
    is_sent: bool,
}

impl Hosts {
    pub(super) fn of(&self, url: &Url) -> Arc<Host> {
        let name = url.origin().ascii_serialization();
        let mut hosts = self.by_name.lock();
        if hosts.len() >= MOST && !hosts.contains_key(&name) {
            hosts.retain(|_, host| Arc::strong_count(host) > 1);
        }
        let host = hosts.entry(name).or_insert_with_key(|name| {
            Arc::new(Host {
                name: name.clone(),
                breaker: Breaker::new(FAILURES, PAUSE),
                of_all: Arc::clone(&self.under_way),
                pace: Mutex::new(Pace {
                    under_way: 0,
                    usual: FIRST_GUESS,
                    moved: Instant::now(),
                    next: Instant::now(),
                }),
            })
        });
        Arc::clone(host)
    }
}

impl Host {
    /// Room for a request, if there is some.
    pub(super) fn place(&self) -> Option<Place<'_>> {
        let mut pace = self.pace.lock();
        let left = ALL_AT_ONCE.saturating_sub(self.of_all.load(Ordering::Relaxed));
        if pace.under_way >= AT_ONCE.min(left / 2).max(1) {
            return None;
        }
        self.of_all.fetch_add(1, Ordering::Relaxed);
        pace.under_way += 1;
        pace.moved = Instant::now();
        Some(Place {
            host: self,
            since: pace.moved,
            is_sent: false,
        })
    }

    /// How long to put off a request for which there is no room. Those that wait come one after
    /// another, as fast as the host answers.
    pub(super) fn later(&self) -> Duration {
        let now = Instant::now();
        let mut pace = self.pace.lock();
        // Those under way take at least this long.
        let takes = pace.usual.max(now - pace.moved);
        let each = takes / u32::try_from(pace.under_way.max(1)).unwrap_or(1);
        pace.next = (pace.next.max(now) + each).min(now + LONGEST);
        (pace.next - now).max(SHORTEST)
    }

    /// Logs that the host is away, or works again.
    pub(super) fn turned(&self, turned: Option<Turned>, why: &str) {
        match turned {
            None => {}
            Some(Turned::Opened) => tracing::warn!(
                "requests of workflows to {} fail, so none is sent for a moment: {why}",
                self.name
            ),
            Some(Turned::Closed) => {
                tracing::info!("requests of workflows to {} work again", self.name);
            }
        }
    }
}

impl Place<'_> {
    /// The request of this place goes out, so the time that it takes counts.
    pub(super) fn sent(&mut self) {
        self.is_sent = true;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut pace = self.host.pace.lock();
        if self.is_sent {
            pace.usual = (pace.usual * 7 + self.since.elapsed()) / 8;
        }
        pace.moved = Instant::now();
        pace.under_way -= 1;
        self.host.of_all.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_beyond_the_room_of_a_host_wait_one_after_another() {
        let hosts = Hosts::default();
        let url = |text: &str| Url::parse(text).unwrap();
        let slow = hosts.of(&url("http://slow/a"));
        let places: Vec<_> = (0..=AT_ONCE).filter_map(|_| slow.place()).collect();
        assert_eq!(places.len(), AT_ONCE);
        let again = hosts.of(&url("http://slow:80/b"));
        assert!(again.place().is_none());
        assert!(hosts.of(&url("http://other/")).place().is_some());
        let waits: Vec<_> = (0..100).map(|_| again.later()).collect();
        assert!(waits[99] > waits[0] && waits[99] <= LONGEST, "{waits:?}");
        drop(places);
        assert!(again.place().is_some());
    }

    #[test]
    fn slow_hosts_leave_places_to_others() {
        let hosts = Hosts::default();
        let slow: Vec<_> = (0..9)
            .map(|n| hosts.of(&Url::parse(&format!("http://slow{n}/")).unwrap()))
            .collect();
        let all = slow
            .iter()
            .flat_map(|host| (0..100).map_while(|_| host.place()));
        let all: Vec<_> = all.collect();
        assert!(all.len() < ALL_AT_ONCE, "{}", all.len());
        assert!(slow.iter().all(|host| host.pace.lock().under_way > 0));
        let other = hosts.of(&Url::parse("http://other/").unwrap());
        assert!(other.place().is_some());
    }
}
