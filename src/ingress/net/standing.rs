//! The connections of a listener, and whether a call was accepted on each.
//!
//! A connection without an accepted call belongs to a stranger: it is closed after a short time, or
//! earlier if the listener is full and needs its place. Every other connection belongs to the token
//! of its last accepted call, and a restricted token holds at most half of all connections. So
//! neither strangers nor a single tenant can keep out everybody else.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::model::{Access, NoShare, Share, Shares};

/// How often a full listener checks for connections whose token was revoked.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// True while the token of this access is valid.
pub(in crate::ingress) type IsValid = Arc<dyn Fn(&Access) -> bool + Send + Sync>;

/// The connections of one listener. Cheap to clone.
#[derive(Clone)]
pub(in crate::ingress) struct Connections(Arc<Inner>);

struct Inner {
    places: Shares,
    is_valid: IsValid,
    lists: Mutex<Lists>,
}

/// The connections with a place, by their numbers, so that the oldest comes first. Each is in one
/// of the lists.
#[derive(Default)]
struct Lists {
    next: u64,
    /// Strangers that were told to end. They are the first to lose their places.
    leaving: BTreeMap<u64, Standing>,
    strangers: BTreeMap<u64, Standing>,
    known: BTreeMap<u64, Standing>,
    looked: Option<Instant>,
}

/// The state of one connection: its place, and the access of its last accepted call. Cheap to
/// clone.
#[derive(Clone)]
pub(in crate::ingress) struct Standing(Arc<OfConnection>);

struct OfConnection {
    /// `None` for a connection beyond the limit.
    connections: Option<Connections>,
    number: u64,
    since: Instant,
    state: Mutex<State>,
    make_way: CancellationToken,
    ending: CancellationToken,
}

struct State {
    /// `None` if another connection has taken the place.
    place: Option<Share>,
    /// The access of the last accepted call.
    access: Option<Access>,
}

/// The place of a connection. Dropping it frees the place, even if a request of the connection is
/// still in progress.
pub(in crate::ingress) struct Place(Standing);

impl Connections {
    pub(in crate::ingress) fn new(most: usize, is_valid: IsValid) -> Self {
        Self(Arc::new(Inner {
            places: Shares::new(most),
            is_valid,
            lists: Mutex::default(),
        }))
    }

    /// Admits a new connection. If no place is free, it takes the place of the oldest stranger.
    ///
    /// Returns the place, and whether another connection lost it. `None` if there is no stranger.
    pub(in crate::ingress) fn admit(&self) -> Option<(Place, bool)> {
        if let Ok(place) = self.0.places.take(&Access::Open, 1) {
            return Some((self.add(place), false));
        }
        let place = self.oldest_place()?;
        Some((self.add(place), true))
    }

    fn add(&self, place: Share) -> Place {
        let mut lists = self.0.lists.lock();
        lists.next += 1;
        let number = lists.next;
        let standing = Standing::new(Some(self.clone()), number, Some(place));
        lists.strangers.insert(number, standing.clone());
        Place(standing)
    }

    /// Takes the place of the oldest stranger, or of the oldest connection whose token is no longer
    /// valid.
    fn oldest_place(&self) -> Option<Share> {
        loop {
            let oldest = {
                let mut lists = self.0.lists.lock();
                let stranger = lists
                    .leaving
                    .pop_first()
                    .or_else(|| lists.strangers.pop_first());
                stranger.map(|(_, standing)| standing)
            };
            let Some(oldest) = oldest else {
                if !self.forget_invalid() {
                    return None;
                }
                continue;
            };
            let mut state = oldest.0.state.lock();
            // A call may have been accepted meanwhile.
            if state.access.is_none()
                && let Some(mut place) = state.place.take()
            {
                oldest.0.make_way.cancel();
                // The newcomer is a stranger, too.
                place.pass_to(&Access::Open).ok()?;
                return Some(place);
            }
        }
    }

    /// Turns the connections whose token is no longer valid into strangers. Returns whether there
    /// were any; false without a check if the last one was less than [`LOOK_EVERY`] ago.
    fn forget_invalid(&self) -> bool {
        let known: Vec<Standing> = {
            let mut lists = self.0.lists.lock();
            if lists
                .looked
                .is_some_and(|looked| looked.elapsed() < LOOK_EVERY)
            {
                return false;
            }
            lists.looked = Some(Instant::now());
            lists.known.values().cloned().collect()
        };
        let mut found = false;
        for standing in known {
            let mut state = standing.0.state.lock();
            if state
                .access
                .as_ref()
                .is_some_and(|access| !(self.0.is_valid)(access))
            {
                state.access = None;
                self.0.lists.lock().move_to_strangers(&standing);
                found = true;
            }
        }
        found
    }

    /// When the oldest stranger arrived, without those that were already told to end.
    pub(in crate::ingress) fn oldest_stranger(&self) -> Option<Instant> {
        self.0
            .lists
            .lock()
            .strangers
            .values()
            .next()
            .map(|standing| standing.0.since)
    }

    /// Tells the strangers that have been connected for `stay` to end.
    pub(in crate::ingress) fn end_strangers(&self, stay: Duration) {
        let mut lists = self.0.lists.lock();
        while let Some(oldest) = lists.strangers.first_entry()
            && oldest.get().0.since.elapsed() >= stay
        {
            let (number, standing) = oldest.remove_entry();
            standing.0.ending.cancel();
            lists.leaving.insert(number, standing);
        }
    }
}

impl Lists {
    fn remove(&mut self, number: u64) {
        self.leaving.remove(&number);
        self.strangers.remove(&number);
        self.known.remove(&number);
    }

    fn move_to_known(&mut self, standing: &Standing) {
        self.remove(standing.0.number);
        self.known.insert(standing.0.number, standing.clone());
    }

    fn move_to_strangers(&mut self, standing: &Standing) {
        // A connection that has ended meanwhile is in no list.
        if self.known.remove(&standing.0.number).is_some() {
            self.strangers.insert(standing.0.number, standing.clone());
        }
    }
}

impl Standing {
    fn new(connections: Option<Connections>, number: u64, place: Option<Share>) -> Self {
        Self(Arc::new(OfConnection {
            connections,
            number,
            since: Instant::now(),
            state: Mutex::new(State {
                place,
                access: None,
            }),
            make_way: CancellationToken::new(),
            ending: CancellationToken::new(),
        }))
    }

    /// The standing of a connection beyond the limit.
    pub(in crate::ingress) fn without_place() -> Self {
        Self::new(None, 0, None)
    }

    /// Records an accepted call. Returns an error if its token already holds half of all
    /// connections: the call has to be refused, and the connection ends if it has had no other
    /// accepted call.
    pub(in crate::ingress) fn called_by(&self, access: &Access) -> Result<(), NoShare> {
        let mut state = self.0.state.lock();
        if let Some(before) = &state.access
            && before.restricted() == access.restricted()
        {
            // It may be another token, if neither is restricted.
            if access.hash() != before.hash() {
                state.access = Some(access.clone());
            }
            return Ok(());
        }
        // A connection without a place ends soon.
        let (Some(connections), Some(place)) = (&self.0.connections, &mut state.place) else {
            return Ok(());
        };
        if let Err(no_share) = place.pass_to(access) {
            if state.access.is_none() {
                self.0.ending.cancel();
            }
            return Err(no_share);
        }
        if state.access.replace(access.clone()).is_none() {
            connections.0.lists.lock().move_to_known(self);
        }
        Ok(())
    }

    /// Waits until the connection is told to end, which it does after answering the requests in
    /// progress.
    pub(in crate::ingress) async fn wait_for_end(&self) {
        self.0.ending.cancelled().await;
    }

    /// Waits until another connection has taken the place of this one.
    pub(in crate::ingress) async fn makes_way(&self) {
        self.0.make_way.cancelled().await;
    }
}

impl Place {
    pub(in crate::ingress) fn standing(&self) -> &Standing {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let of_connection = &self.0.0;
        drop(of_connection.state.lock().place.take());
        if let Some(connections) = &of_connection.connections {
            connections.0.lists.lock().remove(of_connection.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::model::{AccessToken, Scope, Secret};

    fn token(queues: &str) -> Access {
        let token = AccessToken {
            name: queues.to_owned(),
            roles: "insert".parse().unwrap(),
            scope: queues.parse::<Scope>().unwrap(),
            worker: None,
            calls_per_second: None,
            created_unix_ms: 0,
            expires_unix_ms: None,
        };
        Access::ByToken(Secret::new().unwrap().hash(), Arc::new(token))
    }

    fn connections(most: usize) -> Connections {
        Connections::new(most, Arc::new(|_| true))
    }

    fn has_ended(place: &Place) -> bool {
        place.standing().0.make_way.is_cancelled()
    }

    #[test]
    fn strangers_make_way_oldest_first_and_known_clients_stay() {
        let connections = connections(3);
        let places: Vec<Place> = (0..3).map(|_| connections.admit().unwrap().0).collect();
        places[0].standing().called_by(&Access::Open).unwrap();
        let (fourth, made_way) = connections.admit().unwrap();
        assert!(made_way);
        assert_eq!(
            places.iter().map(has_ended).collect::<Vec<_>>(),
            [false, true, false]
        );
        places[2].standing().called_by(&token("*")).unwrap();
        fourth.standing().called_by(&token("a")).unwrap();
        assert!(connections.admit().is_none(), "all have had a call");
        drop(places);
        assert_eq!(connections.0.places.held(), 1);
        drop(fourth);
        let lists = connections.0.lists.lock();
        assert!(
            lists.strangers.is_empty()
                && lists.known.is_empty()
                && connections.0.places.held() == 0
        );
    }

    #[test]
    fn a_restricted_token_holds_half_of_the_connections() {
        let connections = connections(4);
        let places: Vec<Place> = (0..4).map(|_| connections.admit().unwrap().0).collect();
        let (mine, other) = (token("a.*"), token("b.*"));
        for place in &places[..2] {
            place.standing().called_by(&mine).unwrap();
        }
        assert_eq!(
            places[2].standing().called_by(&mine),
            Err(NoShare::OfToken(2))
        );
        assert!(places[2].standing().0.ending.is_cancelled());
        // A connection belongs to the token of its last accepted call.
        places[0].standing().called_by(&other).unwrap();
        assert!(
            places[1].standing().called_by(&other).is_ok()
                && places[0].standing().called_by(&mine).is_ok()
        );
        assert_eq!(places[3].standing().called_by(&mine), Ok(()));
        assert_eq!(
            places[1].standing().called_by(&mine),
            Err(NoShare::OfToken(2))
        );
        assert!(
            !places[1].standing().0.ending.is_cancelled(),
            "another token has called on it"
        );
    }

    #[test]
    fn connections_of_a_revoked_token_make_way() {
        let is_valid = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&is_valid);
        let connections = Connections::new(1, Arc::new(move |_| asked.load(Ordering::Relaxed)));
        let (place, _) = connections.admit().unwrap();
        place.standing().called_by(&token("*")).unwrap();
        assert!(connections.admit().is_none());
        is_valid.store(false, Ordering::Relaxed);
        connections.0.lists.lock().looked = None;
        assert!(connections.admit().is_some() && has_ended(&place));
    }

    #[test]
    fn strangers_end_after_a_while() {
        let connections = connections(2);
        let (stranger, _) = connections.admit().unwrap();
        let (known, _) = connections.admit().unwrap();
        known.standing().called_by(&Access::Open).unwrap();
        connections.end_strangers(Duration::from_secs(3600));
        assert!(
            !stranger.standing().0.ending.is_cancelled() && connections.oldest_stranger().is_some()
        );
        connections.end_strangers(Duration::ZERO);
        assert!(
            stranger.standing().0.ending.is_cancelled()
                && !known.standing().0.ending.is_cancelled()
        );
        assert!(connections.oldest_stranger().is_none(), "it was told");
        assert!(
            connections.admit().is_some() && has_ended(&stranger),
            "it makes way nevertheless"
        );
    }
}
