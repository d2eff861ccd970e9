//! Limits how many requests go to one host at a time, and how quickly they follow each other.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Mutex as Turns, OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep_until},
};

/// Above this number, hosts without a request are forgotten.
const MOST_HOSTS: usize = 4096;

pub(super) struct Gates {
    per_host: usize,
    delay: Duration,
    hosts: Mutex<HashMap<String, Arc<Host>>>,
}

struct Host {
    places: Arc<Semaphore>,
    /// When the next request may start. The request whose turn it is holds the lock until then.
    next: Turns<Instant>,
}

impl Gates {
    pub(super) fn new(per_host: usize, delay: Duration) -> Self {
        Self {
            per_host,
            delay,
            hosts: Mutex::default(),
        }
    }

    /// Waits for a permit to request the host. Dropping the permit frees it for the next request.
    pub(super) async fn enter(&self, host: &str) -> Option<OwnedSemaphorePermit> {
        let host = self.host(host);
        // The semaphore is never closed.
        let place = host.places.clone().acquire_owned().await.ok();
        let mut next = host.next.lock().await;
        sleep_until(*next).await;
        *next = Instant::now() + self.delay;
        place
    }

    fn host(&self, name: &str) -> Arc<Host> {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if hosts.len() >= MOST_HOSTS {
            let now = Instant::now();
            let is_ahead = |host: &Host| host.next.try_lock().is_ok_and(|next| *next > now);
            hosts.retain(|_, host| Arc::strong_count(host) > 1 || is_ahead(host));
        }
        let new = || Host {
            places: Arc::new(Semaphore::new(self.per_host)),
            next: Instant::now().into(),
        };
        hosts
            .entry(name.to_owned())
            .or_insert_with(|| Arc::new(new()))
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_host_has_places_and_a_pace() {
        let gates = Gates::new(1, Duration::ZERO);
        let first = gates.enter("a").await;
        drop(gates.enter("b").await);
        assert!(
            gates.enter("a").now_or_never().is_none(),
            "the place is taken"
        );
        drop(first);
        drop(gates.enter("a").await);
        let gates = Gates::new(2, Duration::from_secs(3600));
        drop(gates.enter("a").await);
        assert!(
            gates.enter("a").now_or_never().is_none(),
            "there is a place, and it is too early"
        );
    }

    #[tokio::test]
    async fn a_turn_that_nobody_used_delays_no_other() {
        let gates = Gates::new(2, Duration::from_secs(3600));
        drop(gates.enter("a").await);
        let next = || *gates.host("a").next.try_lock().unwrap();
        let before = next();
        assert!(gates.enter("a").now_or_never().is_none(), "it is too early");
        assert_eq!(next(), before);
    }
}
