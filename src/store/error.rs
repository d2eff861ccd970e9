//! Errors of the store, by what a caller can do about them.

use std::{io, time::Duration};

use crate::runtime::LoopError;

/// The underlying error of a database library.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server is unavailable or busy, or this call lost a deadlock. The same call may succeed
    /// later.
    #[error("{0}")]
    Transient(#[source] Cause),
    /// All attempts within the time limit for retries failed. The same call may succeed later.
    #[error("gave up after {} s: {cause}", after.as_secs())]
    GaveUp {
        after: Duration,
        #[source]
        cause: Cause,
    },
    /// The pool had no free connection, although the server accepts new ones.
    #[error("all {connections} connections to the database have been in use for {} s; {hint}", waited.as_secs())]
    Busy {
        connections: u32,
        waited: Duration,
        hint: &'static str,
    },
    /// The device or the database has no space left.
    #[error("the database is full: {0}")]
    Full(#[source] Cause),
    /// The content of a row is invalid. The same call would fail again, but would succeed without
    /// that row.
    #[error("{0}")]
    Refused(#[source] Cause),
    /// The database contains data that taskd never stores. Counts as a refusal: calls without that
    /// row succeed.
    #[error("the database contains {what}")]
    Corrupt { what: String },
    /// The server's or taskd's certificate is not trusted.
    #[error("no TLS connection to the database: {0}; see ssl-mode and ssl-ca in its URL")]
    Tls(#[source] Cause),
    #[error("cannot read {name}, the {parameter} of the database's URL: {cause}")]
    File {
        parameter: String,
        name: String,
        #[source]
        cause: io::Error,
    },
    #[error("{0}")]
    Other(#[source] Cause),
    /// A newer taskd has migrated the database to a schema that this taskd cannot use.
    #[error(
        "the database has schema {schema}, which needs a taskd that knows schema {needs} or later; \
         this one knows {knows}"
    )]
    TooNew { schema: i64, needs: i64, knows: i64 },
    /// Another process held the migration lock for as long as a start waits for it.
    #[error("another process migrates the database")]
    Migrating,
    #[error("cannot migrate the database: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
}

impl Error {
    /// The error for a call that got no response in time.
    pub(super) fn timed_out() -> Self {
        Self::Transient(io::Error::from(io::ErrorKind::TimedOut).into())
    }

    /// True if the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Transient(_)
                | Self::GaveUp { .. }
                | Self::Busy { .. }
                | Self::Full(_)
                | Self::Migrating
        )
    }

    /// True if the content of a row is the cause.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::Corrupt { .. })
    }
}

impl LoopError for Error {}

pub type Result<T, E = Error> = std::result::Result<T, E>;
