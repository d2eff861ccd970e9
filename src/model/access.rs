//! Access: who calls, what the caller may do, and on which queues.

use std::{
    fmt,
    num::NonZeroU32,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::{QueueName, Rfc3339, TaskId, WorkerName, now_unix_ms, rfc_3339};

/// A permission for a group of operations. SQL stores the discriminants, which are bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Role {
    /// Insert tasks.
    Insert = 1,
    /// Get, complete, reject and extend tasks, and report discovered ones.
    Work = 2,
    /// Read tasks, results, queues and metrics.
    Read = 4,
    /// Everything.
    Admin = 8,
}

impl Role {
    pub const ALL: [Self; 4] = [Self::Insert, Self::Work, Self::Read, Self::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Work => "work",
            Self::Read => "read",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The roles of a token. A token has at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles(u8);

impl Roles {
    /// Reads roles from their bits in SQL. Bits that only a later taskd knows grant nothing.
    pub fn from_bits(bits: i64) -> Self {
        Self(u8::try_from(bits & 0xff).unwrap_or(0))
    }

    pub fn bits(self) -> u32 {
        self.0.into()
    }

    /// True if the role is in the list. For an admin, true for every role.
    pub fn include(self, role: Role) -> bool {
        self.0 & (role as u8 | Role::Admin as u8) != 0
    }
}

/// Parses a comma-separated list.
impl FromStr for Roles {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut bits = 0;
        for name in text.split(',').map(str::trim) {
            let role = Role::ALL
                .into_iter()
                .find(|role| role.as_str() == name)
                .ok_or_else(|| {
                    format!(
                        "unknown role {name:?}; expected {}",
                        Role::ALL.map(Role::as_str).join(", ")
                    )
                })?;
            bits |= role as u8;
        }
        Ok(Self(bits))
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = Role::ALL
            .into_iter()
            .filter(|role| self.0 & *role as u8 != 0)
            .map(Role::as_str)
            .collect();
        f.write_str(&names.join(","))
    }
}

/// The queues that a token may access: names, or prefixes followed by a star. An empty scope
/// includes every queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scope(Vec<String>);

impl Scope {
    pub fn is_everything(&self) -> bool {
        self.0.is_empty() || self.0.iter().any(|part| part == "*")
    }

    /// The names, and the prefixes with their stars. A scope that includes every queue has a star.
    pub fn parts(&self) -> Vec<&str> {
        if self.is_everything() {
            return vec!["*"];
        }
        self.0.iter().map(String::as_str).collect()
    }

    pub fn includes(&self, queue: &str) -> bool {
        let is_in = |part: &String| match part.strip_suffix('*') {
            Some(beginning) => queue.starts_with(beginning),
            None => queue == part,
        };
        self.is_everything() || self.0.iter().any(is_in)
    }
}

/// Parses a comma-separated list.
impl FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty());
        let part = |part: &str| {
            let name = part.strip_suffix('*').unwrap_or(part);
            // A star alone means every queue.
            QueueName::new(if name.is_empty() { "any" } else { name })
                .map_err(|error| error.to_string())?;
            Ok(part.to_owned())
        };
        parts.map(part).collect::<Result<_, String>>().map(Self)
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

/// An access token, without its secret, which only its owner has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessToken {
    /// The name of the token: 1 to 64 characters, unique.
    pub name: String,
    pub roles: Roles,
    pub scope: Scope,
    /// The only worker name with which the token may be used, or `None` for any.
    pub worker: Option<WorkerName>,
    /// The rate limit in each process, or `None` for no limit.
    pub calls_per_second: Option<NonZeroU32>,
    pub created_unix_ms: i64,
    /// `None` if the token never expires.
    pub expires_unix_ms: Option<i64>,
}

impl AccessToken {
    pub fn has_expired(&self, now_unix_ms: i64) -> bool {
        self.expires_unix_ms.is_some_and(|at| at <= now_unix_ms)
    }
}

/// The secret of a new token, in the form in which its owner sends it.
pub struct Secret(String);

/// The prefix of each secret, by which people and secret scanners recognise it.
const BEGINNING: &str = "taskd_";

impl Secret {
    /// Creates a secret from 256 random bits of the operating system. Its hash needs no salt,
    /// because nobody can guess that many bits.
    pub fn new() -> Result<Self, getrandom::Error> {
        let mut random = [0; 32];
        getrandom::fill(&mut random)?;
        Ok(Self(format!(
            "{BEGINNING}{}",
            BASE64_URL_SAFE_NO_PAD.encode(random)
        )))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn hash(&self) -> SecretHash {
        SecretHash::of(&self.0)
    }
}

/// The SHA-256 hash of a secret. taskd stores nothing else of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SecretHash(pub [u8; 32]);

impl SecretHash {
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret).into())
    }
}

/// What a caller may do.
#[derive(Clone, Debug, Default)]
pub enum Access {
    /// Everything, because this taskd does not use tokens.
    #[default]
    Open,
    ByToken(SecretHash, Arc<AccessToken>),
}

impl Access {
    /// The token that limits the access, or `None` if the access is not limited.
    pub fn token(&self) -> Option<&AccessToken> {
        match self {
            Self::Open => None,
            Self::ByToken(_, token) => Some(token),
        }
    }

    /// The hash of the token, or `None` if there is no token.
    pub fn hash(&self) -> Option<SecretHash> {
        match self {
            Self::Open => None,
            Self::ByToken(hash, _) => Some(*hash),
        }
    }

    /// The token, if it is restricted to some queues or to one worker. Such a token gets at most
    /// half of the resources that all callers share: see [`Shares`](super::Shares).
    pub fn restricted(&self) -> Option<SecretHash> {
        match self {
            Self::ByToken(hash, token)
                if token.worker.is_some() || !token.scope.is_everything() =>
            {
                Some(*hash)
            }
            _ => None,
        }
    }

    pub fn reaches(&self, queue: &str) -> bool {
        self.token().is_none_or(|token| token.scope.includes(queue))
    }

    pub fn reaches_everything(&self) -> bool {
        self.token().is_none_or(|token| token.scope.is_everything())
    }
}

/// An operator's recorded action.
#[derive(Clone, Debug, JsonSchema, PartialEq, Eq, Serialize)]
pub struct Act {
    // A UUIDv7, so that acts sort by their time.
    #[serde(flatten, serialize_with = "with_time")]
    #[schemars(with = "IdWithTime")]
    pub id: Uuid,
    pub who: String,
    // For example `create token`.
    pub what: String,
    #[serde(rename = "on")]
    pub target: String,
}

#[derive(JsonSchema, Serialize)]
struct IdWithTime {
    id: Uuid,
    #[serde(rename = "at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    at_unix_ms: i64,
}

fn with_time<S: Serializer>(id: &Uuid, serializer: S) -> Result<S::Ok, S::Error> {
    IdWithTime {
        id: *id,
        at_unix_ms: TaskId(*id).created_unix_ms(),
    }
    .serialize(serializer)
}

impl Act {
    /// The maximum length of each part, in characters. Longer parts are truncated.
    const LONGEST: [usize; 3] = [255, 64, 1024];

    /// An act at the present time of this machine's clock, for a command that has no other clock.
    pub fn new(who: &str, what: &str, target: &str) -> Self {
        Self::at_time(now_unix_ms(), who, what, target)
    }

    /// An act at `unix_ms`, which is a time of the clock that all processes share.
    pub fn at_time(unix_ms: i64, who: &str, what: &str, target: &str) -> Self {
        let [who, what, target] = [(who, 0), (what, 1), (target, 2)]
            .map(|(text, part)| text.chars().take(Self::LONGEST[part]).collect::<String>());
        // Acts in the same millisecond keep their order within a process.
        static PLACE: AtomicUsize = AtomicUsize::new(0);
        let place = PLACE.fetch_add(1, Ordering::Relaxed);
        Self {
            id: TaskId::at(unix_ms, place).0,
            who,
            what,
            target,
        }
    }

    pub fn at_unix_ms(&self) -> i64 {
        TaskId(self.id).created_unix_ms()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admin_has_all_roles_and_no_other_role_has_another() {
        for role in Role::ALL {
            let roles: Roles = role.as_str().parse().unwrap();
            for other in Role::ALL {
                assert_eq!(
                    roles.include(other),
                    role == other || role == Role::Admin,
                    "{role} for {other}"
                );
            }
        }
        let both: Roles = "work, insert".parse().unwrap();
        assert_eq!(both.to_string(), "insert,work");
        assert_eq!(Roles::from_bits(both.bits().into()), both);
        assert_eq!(
            "root".parse::<Roles>().unwrap_err(),
            "unknown role \"root\"; expected insert, work, read, admin"
        );
        assert!("".parse::<Roles>().is_err());
    }

    #[test]
    fn a_scope_is_names_and_beginnings() {
        let scope: Scope = "crawl, acme.*".parse().unwrap();
        for (queue, want) in [
            ("crawl", true),
            ("crawl2", false),
            ("acme.a", true),
            ("acme.", true),
            ("acme", false),
        ] {
            assert_eq!(scope.includes(queue), want, "{queue}");
        }
        assert!(Scope::default().includes("x") && "*".parse::<Scope>().unwrap().includes("x"));
        assert_eq!(scope.to_string().parse::<Scope>().unwrap(), scope);
        assert!("a b".parse::<Scope>().is_err() && "a*b".parse::<Scope>().is_err());
    }

    #[test]
    fn a_secret_is_new_each_time_and_hides_in_its_hash() {
        let [one, two] = [Secret::new().unwrap(), Secret::new().unwrap()];
        assert!(one.as_str().starts_with(BEGINNING) && one.as_str().len() == 49);
        assert!(one.hash() != two.hash());
        assert_eq!(one.hash(), SecretHash::of(one.as_str()));
    }
}
