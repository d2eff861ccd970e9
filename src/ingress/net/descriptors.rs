//! File descriptors: limits the connections of clients, so that some are left for Redis, SQL, the
//! bus and files.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::config::Settings;

/// Descriptors reserved for Redis, Kafka, files and connections beyond the limit.
const RESERVE: u64 = 200;
/// The fewest connections of a listener, however few descriptors there are.
const AT_LEAST: usize = 16;

/// Raises the limit to the highest that this process may set. The usual 1,024 is meant for programs
/// that use `select`.
pub fn raise_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_soft, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard).map(|()| hard));
    match raised {
        Ok(limit) => tracing::debug!("up to {limit} file descriptors"),
        Err(error) => tracing::warn!("cannot raise the limit of file descriptors: {error}"),
    }
}

/// The most connections of each of the two listeners.
pub(in crate::ingress) fn for_each_listener(settings: &Settings) -> usize {
    let wanted = settings.limits.max_connections;
    let Ok((limit, _hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return wanted;
    };
    let rest = limit.saturating_sub(RESERVE + u64::from(settings.database_pool)) / 2;
    wanted
        .min(usize::try_from(rest).unwrap_or(usize::MAX))
        .max(AT_LEAST)
}
