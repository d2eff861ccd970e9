//! Redis, the database and the bus: whether they answer, round trips, memory and retries.

use std::time::Duration;

use ::metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

pub const SERVER_UP: &str = "taskd_server_up";
pub const SERVER_OUTAGES: &str = "taskd_server_outages_total";
pub const REDIS_UNSAFE: &str = "taskd_redis_unsafe_settings";
pub const REDIS_USED: &str = "taskd_redis_memory_used_bytes";
pub const REDIS_LIMIT: &str = "taskd_redis_memory_limit_bytes";
pub const SCRIPT_DURATION: &str = "taskd_redis_script_duration_seconds";
pub const SCRIPT_BATCH_SIZE: &str = "taskd_redis_script_batch_size_items";
pub const SQL_DURATION: &str = "taskd_sql_operation_duration_seconds";
pub const SQL_RETRIES: &str = "taskd_sql_operation_retries_total";
pub const SQLITE_LOG: &str = "taskd_sqlite_log_bytes";

pub(super) fn describe() {
    describe_gauge!(
        SERVER_UP,
        Unit::Count,
        "1 while the server answers, else 0; database, redis or bus (Kafka)"
    );
    describe_counter!(
        SERVER_OUTAGES,
        Unit::Count,
        "How often a server went away, by server"
    );
    describe_gauge!(
        REDIS_UNSAFE,
        Unit::Count,
        "1 while a setting of a Redis server breaks taskd's promises, by server and setting"
    );
    describe_gauge!(
        REDIS_USED,
        Unit::Bytes,
        "Memory that counts for the limit, by server"
    );
    describe_gauge!(
        REDIS_LIMIT,
        Unit::Bytes,
        "maxmemory or redis_max_memory, by server; 0 is none. At 80 % inserts are refused"
    );
    describe_histogram!(
        SCRIPT_DURATION,
        Unit::Seconds,
        "Round trips of Redis scripts, by script"
    );
    describe_histogram!(
        SCRIPT_BATCH_SIZE,
        Unit::Count,
        "Items combined into one script call, by script"
    );
    describe_histogram!(
        SQL_DURATION,
        Unit::Seconds,
        "Operations of the store, by operation, retries included"
    );
    describe_counter!(
        SQL_RETRIES,
        Unit::Count,
        "Retries of operations of the store, by operation"
    );
    describe_gauge!(
        SQLITE_LOG,
        Unit::Bytes,
        "What SQLite's log has and its file has not"
    );
}

/// A script was called once for the combined items of its callers.
pub fn redis_script(script: &'static str, items: usize, elapsed: Duration) {
    histogram!(SCRIPT_DURATION, "script" => script).record(elapsed);
    histogram!(SCRIPT_BATCH_SIZE, "script" => script).record(items as f64);
}

/// Whether a server answered the last time that this process asked it.
pub fn server_is_up(server: &'static str, is_up: bool) {
    gauge!(SERVER_UP, "server" => server).set(if is_up { 1.0 } else { 0.0 });
}

/// A server stopped answering.
pub fn server_went_away(server: &'static str) {
    counter!(SERVER_OUTAGES, "server" => server).increment(1);
}

/// Whether a setting of a Redis server breaks taskd's promises.
pub fn unsafe_setting(server: &str, setting: &'static str, is_unsafe: bool) {
    gauge!(REDIS_UNSAFE, "server" => server.to_owned(), "setting" => setting).set(if is_unsafe {
        1.0
    } else {
        0.0
    });
}

/// The memory of a Redis server, and its limit (0: none).
pub fn redis_memory(server: &str, used: u64, limit: u64) {
    gauge!(REDIS_USED, "server" => server.to_owned()).set(used as f64);
    gauge!(REDIS_LIMIT, "server" => server.to_owned()).set(limit as f64);
}

/// An operation on the database ended, with all its retries.
pub fn sql_operation(operation: &'static str, elapsed: Duration) {
    histogram!(SQL_DURATION, "operation" => operation).record(elapsed);
}

/// An operation on the database is repeated.
pub fn sql_retry(operation: &'static str) {
    counter!(SQL_RETRIES, "operation" => operation).increment(1);
}

/// Shows how many bytes of SQLite's log are not in its file yet.
pub fn sqlite_log(bytes: i64) {
    gauge!(SQLITE_LOG).set(bytes as f64);
}
