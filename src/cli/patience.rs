//! What the commands that call a running taskd share: retries, paging, a progress line, and the
//! parsing of times.

use std::time::{Duration, Instant};

use anyhow::bail;
use backon::BackoffBuilder;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use tonic::{Code, Status};

use super::{
    client::{self, WAITS, is_transient},
    print::{NONE, NotThere, print, print_one, say, say_more},
};
use crate::{config::Time, model::now_unix_ms, wire::time::from_rfc_3339};

/// How long to retry while taskd is away or busy.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);
/// The most entries of a page, not counting the extra one that shows whether the list goes on.
const AT_ONCE: u32 = 500;

/// Calls taskd, and retries for up to a minute while it is away or busy. The call must be safe to
/// repeat.
pub(super) async fn patiently<T>(call: impl AsyncFn() -> Result<T, Status>) -> anyhow::Result<T> {
    Ok(repeatedly(call).await?.0)
}

/// Like [`patiently`], but also returns true if an earlier call may have taken effect although its
/// answer was lost.
pub(super) async fn repeatedly<T>(
    call: impl AsyncFn() -> Result<T, Status>,
) -> anyhow::Result<(T, bool)> {
    // Measure the time rather than count the calls, because a call may take long to fail.
    let began = Instant::now();
    let mut waits = WAITS.build();
    let mut may_have_worked = false;
    loop {
        match call().await {
            Ok(answer) => return Ok((answer, may_have_worked)),
            Err(status) => match waits
                .next()
                .filter(|_| is_transient(&status) && began.elapsed() < GIVE_UP_AFTER)
            {
                Some(wait) => {
                    may_have_worked |= status.code() != Code::ResourceExhausted;
                    tokio::time::sleep(wait).await;
                }
                None if status.code() == Code::NotFound => bail!(NotThere(client::said(&status))),
                None => bail!("{}", client::said(&status)),
            },
        }
    }
}

/// Tells the user that some refused changes may have been made by an earlier call whose answer was
/// lost.
pub(super) fn say_perhaps_changed(refused: u64) {
    say(format_args!(
        "{refused} of these were perhaps changed by a call whose answer was lost"
    ));
}

/// Prints a list that is fetched page by page: as a line of JSON for each entry, or as one table.
/// `page` gets the size and the cursor of a page, and returns its entries and the next cursor.
pub(super) async fn pages<T>(
    limit: u64,
    as_json: bool,
    page: impl AsyncFn(u32, String) -> Result<(Vec<T>, String), Status>,
    json: impl Fn(&T) -> Value,
    table: impl FnOnce(&[T]) -> String,
) -> anyhow::Result<()> {
    let mut cursor = String::new();
    let mut left = limit;
    let mut all = Vec::new();
    let has_more = loop {
        // One extra entry shows whether the list goes on.
        let size = u32::try_from(left).unwrap_or(AT_ONCE).min(AT_ONCE) + 1;
        let (mut some, next) = patiently(async || page(size, cursor.clone()).await).await?;
        let has_more = some.len() as u64 > left;
        some.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        left -= some.len() as u64;
        if as_json {
            some.iter().try_for_each(|one| print_one(json(one)))?;
        } else {
            all.extend(some);
        }
        cursor = next;
        if cursor.is_empty() || left == 0 {
            break has_more || !cursor.is_empty();
        }
    };
    if !as_json && all.is_empty() {
        print(NONE)?;
    } else if !as_json {
        print(table(&all))?;
    }
    if has_more {
        say_more(limit, "--limit");
    }
    Ok(())
}

/// Parses an RFC 3339 time, or a duration before now, to Unix milliseconds.
pub(super) fn time(text: &str) -> Result<i64, String> {
    if let Some(at) = from_rfc_3339(text) {
        return Ok(at);
    }
    let wrong = || format!("{text:?} is neither a time (2030-01-31T12:00:00Z) nor a duration (2h)");
    let Time(ago) = text.parse().map_err(|_| wrong())?;
    i64::try_from(ago.as_millis())
        .map(|ago| now_unix_ms().saturating_sub(ago))
        .map_err(|_| wrong())
}

/// Returns a progress line, which draws nothing if stderr is not a terminal.
pub(super) fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg}  {elapsed}");
    ProgressBar::new_spinner()
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_date_or_so_long_ago() {
        assert_eq!(time("1970-01-01T00:00:01Z"), Ok(1_000));
        let before = now_unix_ms();
        let at = time("2h").unwrap() + 7_200_000;
        assert!((before..=now_unix_ms()).contains(&at), "{at}");
        assert!(time("monday").unwrap_err().contains("neither a time"));
    }
}
