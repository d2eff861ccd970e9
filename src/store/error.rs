//! Errors of the store, by what a caller can do about them.

use std::{io, time::Duration};

use crate::runtime::LoopError;

/// The error of a database's library.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server is away or busy, or this call lost a deadlock: the same call may succeed later.
    #[error("{0}")]
    Transient(#[source] Cause),
    /// All attempts within the time for retries failed: the same call may succeed later.
    #[error("gave up after {} s: {cause}", after.as_secs())]
    GaveUp {
        after: Duration,
        #[source]
        cause: Cause,
    },
    /// The pool had no connection to give, although the server accepts new ones.
    #[error("all {connections} connections to the database have been in use for {} s; {hint}", waited.as_secs())]
    Busy {
        connections: u32,
        waited: Duration,
        hint: &'static str,
    },
    /// The device or the database has no room left.
    #[error("the database is full: {0}")]
    Full(#[source] Cause),
    /// The content of a row is at fault: the same call fails again, and one without that row
    /// succeeds.
    #[error("{0}")]
    Refused(#[source] Cause),
    /// The database contains what taskd never stores. It is a refusal: calls without that row
    /// succeed.
    #[error("the database contains {what}")]
    Corrupt { what: String },
    /// A certificate is not trusted: the server's or taskd's.
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
    /// A newer taskd has migrated the database, and its schema needs a taskd that knows it.
    #[error(
        "the database has schema {schema}, which needs a taskd that knows schema {needs} or later; \
         this one knows {knows}"
    )]
    TooNew { schema: i64, needs: i64, knows: i64 },
    /// Another process has held the lock of the migrations for as long as a start waits for it.
    #[error("another process migrates the database")]
    Migrating,
    #[error("cannot migrate the database: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
}

impl Error {
    /// Nothing answered in time.
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

    /// True if the content of a row is at fault.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::Corrupt { .. })
    }
}

impl LoopError for Error {}

pub type Result<T, E = Error> = std::result::Result<T, E>;
