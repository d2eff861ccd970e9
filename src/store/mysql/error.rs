//! Errors of the server, grouped by what a caller can do.

use std::{io, sync::Arc};

use sqlx::{error::DatabaseError, mysql::MySqlDatabaseError};

use crate::store::{Cause, Error};

/// Errors of MySQL and MariaDB after which a retry of the same statement may succeed.
const TRANSIENT: &[u16] = &[
    1020, // the record has changed since it was read (MariaDB)
    1040, // too many connections
    1047, // a node that is not ready yet (Galera)
    1053, // server shutdown in progress
    1077, // normal shutdown
    1079, // shutdown complete
    1158, // network errors
    1159, 1160, 1161, //
    1184, // aborted connection
    1203, // the user has too many connections
    1205, // lock wait timeout
    1213, // deadlock
    1290, // read only: the primary has moved
    1317, // query interrupted
    1412, // the table's definition has changed
    1615, // a prepared statement must be prepared again
    1836, // read only mode
    1927, // connection killed (MariaDB)
    1969, // statement took too long (MariaDB)
    2006, 2013, // a proxy has lost the server
    3024, // statement took too long (MySQL)
    4031, // disconnected for being idle
];

/// Disk full, table full.
const FULL: &[u16] = &[1021, 1114];

/// A file cannot be written, or the storage engine failed. The message contains the error of the
/// operating system.
const FAILED: &[u16] = &[1026, 1030];

/// The content of a row is invalid. A missing table or privilege is not included, because no row
/// causes it.
const REFUSED: &[u16] = &[
    1048, // null
    1062, // duplicate key
    1118, // row too large
    1153, // packet too large
    1264, // out of range
    1292, 1366, // no such value
    1406, // too long
    1644, // a trigger refuses it
    3819, 4025, // check constraint (MySQL, MariaDB)
];

/// The object that a migration creates already exists: a table, a column, an index, a row.
const EXISTS: &[u16] = &[1050, 1060, 1061, 1062];

/// The server does not accept writes at the moment. After a failover, a connection may stay with
/// the old primary for as long as it lives.
const NOT_PRIMARY: &[u16] = &[1047, 1290, 1836];

pub(super) fn error(error: sqlx::Error) -> Error {
    kind(&error)(error.into())
}

/// An error that is returned to several callers.
pub(super) fn shared(error: Arc<sqlx::Error>) -> Error {
    kind(&error)(error.into())
}

fn kind(error: &sqlx::Error) -> fn(Cause) -> Error {
    use sqlx::Error::{Database, Io, Tls};
    match error {
        error if is_transient(error) => Error::Transient,
        Io(_) | Tls(_) => Error::Tls,
        Database(database) => match number(&**database) {
            Some(number) if is_full(number, database.message()) => Error::Full,
            Some(number) if REFUSED.contains(&number) => Error::Refused,
            _ => Error::Other,
        },
        _ => Error::Other,
    }
}

pub(super) fn is_transient(error: &sqlx::Error) -> bool {
    use sqlx::Error::{Database, Io, PoolTimedOut, Protocol, WorkerCrashed};
    match error {
        // rustls reports an untrusted certificate with this kind.
        Io(cause) => cause.kind() != io::ErrorKind::InvalidData,
        Protocol(_) | PoolTimedOut | WorkerCrashed => true,
        Database(database) => number(&**database).is_some_and(|number| TRANSIENT.contains(&number)),
        _ => false,
    }
}

fn is_full(number: u16, message: &str) -> bool {
    // ENOSPC. MySQL writes `errno 28` and MariaDB `errno: 28`. Both write `error 28` if the storage
    // engine failed.
    let is_out_of_space = ["error 28 ", "errno 28 ", "errno: 28 "]
        .iter()
        .any(|words| message.contains(words));
    FULL.contains(&number) || FAILED.contains(&number) && is_out_of_space
}

/// The server's error number. `DatabaseError::code` returns the less specific SQLSTATE.
fn number(error: &dyn DatabaseError) -> Option<u16> {
    error
        .try_downcast_ref::<MySqlDatabaseError>()
        .map(MySqlDatabaseError::number)
}

/// True if a statement of a migration failed only because it has already been executed.
pub(super) fn is_there_already(error: &Error) -> bool {
    is_one_of(EXISTS, error)
}

/// True if another server may accept what this one refused.
pub(super) fn is_not_primary(error: &Error) -> bool {
    is_one_of(NOT_PRIMARY, error)
}

fn is_one_of(numbers: &[u16], error: &Error) -> bool {
    let (Error::Transient(cause) | Error::Refused(cause) | Error::Other(cause)) = error else {
        return false;
    };
    let cause = cause
        .downcast_ref::<sqlx::Error>()
        .and_then(sqlx::Error::as_database_error);
    cause
        .and_then(number)
        .is_some_and(|number| numbers.contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_known_by_the_number_or_by_the_error_of_the_system() {
        for (number, message, want) in [
            (
                1021,
                "Disk full (/tmp/x); waiting for someone to free some space...",
                true,
            ),
            (1114, "The table 'tasks' is full", true),
            (
                1030,
                "Got error 28 \"No space left on device\" from storage engine InnoDB",
                true,
            ),
            (1030, "Got error 28 from storage engine", true),
            (
                1026,
                "Error writing file './x' (errno: 28 \"No space left on device\")",
                true,
            ),
            (
                1026,
                "Error writing file './x' (OS errno 28 - No space left on device)",
                true,
            ),
            (
                1026,
                "Error writing file './x' (errno: 5 \"Input/output error\")",
                false,
            ),
            (1030, "Got error 280 from storage engine", false),
            (1064, "You have an error 28 ", false),
        ] {
            assert_eq!(is_full(number, message), want, "{number} {message}");
        }
    }
}
