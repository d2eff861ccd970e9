//! Logs refused calls: who calls without permission, and which client still sends a token that was
//! revoked.

use std::time::{Duration, Instant};

use axum::http::StatusCode;

use crate::{
    api::shorten,
    model::{Access, Client},
    runtime::LogPace,
};

/// Each kind of refusal has a limit of its own, so that a busy client does not hide a stranger.
static WITHOUT_TOKEN: LogPace = LogPace::new(BURST, EVERY);
static WITHOUT_RIGHT: LogPace = LogPace::new(BURST, EVERY);
static TOO_MANY: LogPace = LogPace::new(BURST, EVERY);

const BURST: u32 = 10;
const EVERY: Duration = Duration::from_secs(6);

/// The most bytes of a reason in the log.
const REASON: usize = 300;

/// Logs a call with this answer if it is a refusal (401, 403 or 429) and not too many of them have
/// been logged.
pub(super) fn log(
    status: StatusCode,
    client: &Client,
    access: Option<&Access>,
    route: &str,
    why: &str,
) {
    let pace = match status {
        StatusCode::UNAUTHORIZED => &WITHOUT_TOKEN,
        StatusCode::FORBIDDEN => &WITHOUT_RIGHT,
        StatusCode::TOO_MANY_REQUESTS => &TOO_MANY,
        _ => return,
    };
    let Some(left_out) = pace.admit(Instant::now()) else {
        return;
    };
    let peer = client
        .peer
        .map_or_else(|| "an unknown address".to_owned(), |peer| peer.to_string());
    let token = match access.and_then(Access::token) {
        Some(token) => format!(" with the token {:?}", token.name),
        None => String::new(),
    };
    let others = match left_out {
        0 => String::new(),
        others => format!(" (and {others} more such calls since the line before)"),
    };
    let status = status.as_u16();
    let why = shorten(why, REASON);
    tracing::info!(%route, %peer, status, "refused {route} from {peer}{token}: {why}{others}");
}
