//! The servers that a process needs: which of them do not answer, and which have settings that
//! break taskd's promises.
//!
//! Whoever probes a server reports here, and the log, a metric and `/readyz` show what is wrong.
//! Nothing here stops a call: one that needs only the other servers goes on.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::RwLock;

use crate::telemetry::metrics;

/// How often each server is asked whether it answers.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A server that has not answered for this long counts as away.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// A server that taskd needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Server {
    Database,
    Redis,
    /// A bus that is a server of its own. Redis Streams are part of [`Self::Redis`].
    Bus,
}

impl Server {
    /// Its name in `/readyz` and in the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Database => "database",
            Self::Redis => "redis",
            Self::Bus => "bus",
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Database => "the database",
            Self::Redis => "Redis",
            Self::Bus => "the bus",
        })
    }
}

/// A server that does not answer.
#[derive(Clone, Debug)]
pub struct AwayServer {
    pub server: Server,
    pub since: Instant,
    pub why: String,
}

/// A setting of a server with which taskd's promises do not hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnsafeSetting {
    /// `host:port`, or the path of a socket.
    pub server: String,
    pub setting: &'static str,
    /// What it means, and what to do.
    pub why: String,
}

/// What is known of the servers. Clones share it.
#[derive(Clone, Default)]
pub struct Servers(Arc<RwLock<ServerStates>>);

#[derive(Default)]
struct ServerStates {
    away: BTreeMap<Server, AwayServer>,
    unsafe_settings: Vec<UnsafeSetting>,
}

impl Servers {
    /// Records that a server answers.
    pub fn note_answer(&self, server: Server) {
        metrics::server_is_up(server.as_str(), true);
        if !self.0.read().away.contains_key(&server) {
            return;
        }
        if let Some(away) = self.0.write().away.remove(&server) {
            let millis = away.since.elapsed().as_millis();
            tracing::info!(
                server = server.as_str(),
                "{server} answers again, after {}.{} s",
                millis / 1000,
                millis % 1000 / 100
            );
        }
    }

    /// Records that a server does not answer. Only the first time is logged as a warning.
    pub fn note_silence(&self, server: Server, why: String) {
        metrics::server_is_up(server.as_str(), false);
        let mut known = self.0.write();
        if let Some(away) = known.away.get_mut(&server) {
            away.why = why;
            return;
        }
        metrics::server_went_away(server.as_str());
        tracing::warn!(
            server = server.as_str(),
            "{server} is away: {why}; what needs it waits or fails until it answers, and everything else goes on"
        );
        known.away.insert(
            server,
            AwayServer {
                server,
                since: Instant::now(),
                why,
            },
        );
    }

    /// The servers that do not answer.
    pub fn away(&self) -> Vec<AwayServer> {
        self.0.read().away.values().cloned().collect()
    }

    /// Replaces the known unsafe settings. Logs each that is new, and each that is gone.
    pub fn set_unsafe_settings(&self, mut now: Vec<UnsafeSetting>) {
        now.sort_unstable();
        if self.0.read().unsafe_settings == now {
            return;
        }
        // The lock is held until the new settings are logged, so that nobody reads them earlier.
        let mut known = self.0.write();
        let before = std::mem::replace(&mut known.unsafe_settings, now.clone());
        let is_in = |one: &UnsafeSetting, others: &[UnsafeSetting]| {
            others
                .iter()
                .any(|other| (&other.server, other.setting) == (&one.server, one.setting))
        };
        for one in &now {
            metrics::unsafe_setting(&one.server, one.setting, true);
            if !before.contains(one) {
                tracing::warn!(server = one.server, setting = one.setting, "{}", one.why);
            }
        }
        for one in before.iter().filter(|one| !is_in(one, &now)) {
            metrics::unsafe_setting(&one.server, one.setting, false);
            tracing::info!(
                server = one.server,
                "{} of redis {} is as taskd needs it again",
                one.setting,
                one.server
            );
        }
    }

    /// The settings of servers with which taskd's promises do not hold.
    pub fn unsafe_settings(&self) -> Vec<UnsafeSetting> {
        self.0.read().unsafe_settings.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_away_until_it_answers() {
        let servers = Servers::default();
        servers.note_answer(Server::Redis);
        assert!(servers.away().is_empty());
        servers.note_silence(Server::Database, "refused".into());
        servers.note_silence(Server::Redis, "silent".into());
        servers.note_silence(Server::Database, "silent, too".into());
        let away: Vec<_> = servers
            .away()
            .into_iter()
            .map(|away| (away.server, away.why))
            .collect();
        assert_eq!(
            away,
            [
                (Server::Database, "silent, too".to_owned()),
                (Server::Redis, "silent".to_owned())
            ]
        );
        servers.note_answer(Server::Database);
        assert_eq!(servers.away().len(), 1);
    }

    #[test]
    fn a_setting_is_unsafe_until_a_look_does_not_find_it() {
        let servers = Servers::default();
        let one = |server: &str| UnsafeSetting {
            server: server.into(),
            setting: "appendonly",
            why: "no".into(),
        };
        servers.set_unsafe_settings(vec![one("b"), one("a")]);
        assert_eq!(servers.unsafe_settings(), [one("a"), one("b")]);
        servers.set_unsafe_settings(vec![one("b")]);
        assert_eq!(servers.unsafe_settings(), [one("b")]);
    }
}
