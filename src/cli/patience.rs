//! The common part of the commands that ask a running taskd page by page: patience, progress, and times.

use std::time::{Duration, Instant};

use anyhow::bail;
use backon::BackoffBuilder;
use indicatif::{ProgressBar, ProgressStyle};
use tonic::{Code, Status};

use super::{
    client::{self, WAITS, is_transient},
    print::NotThere,
};
use crate::{config::Time, model::now_unix_ms, wire::time::from_rfc_3339};

/// How long to go on while taskd is away or busy.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);

/// Calls taskd until it answers, for a while. Each call may be repeated.
pub(super) async fn patiently<T>(call: impl AsyncFn() -> Result<T, Status>) -> anyhow::Result<T> {
    // A call may itself take long to fail.
    let (began, mut waits) = (Instant::now(), WAITS.build());
    loop {
        match call().await {
            Ok(answer) => return Ok(answer),
            Err(status) => match waits.next().filter(|_| is_transient(&status) && began.elapsed() < GIVE_UP_AFTER) {
                Some(wait) => tokio::time::sleep(wait).await,
                None if status.code() == Code::NotFound => bail!(NotThere(client::said(&status))),
                None => bail!("{}", client::said(&status)),
            },
        }
    }
}

/// A time, or a duration before now.
pub(super) fn time(text: &str) -> Result<i64, String> {
    if let Some(at) = from_rfc_3339(text) {
        return Ok(at);
    }
    let wrong = || format!("{text:?} is neither a time (2030-01-31T12:00:00Z) nor a duration (2h)");
    let Time(ago) = text.parse().map_err(|_| wrong())?;
    i64::try_from(ago.as_millis()).map(|ago| now_unix_ms().saturating_sub(ago)).map_err(|_| wrong())
}

/// A line of progress; it draws nothing if stderr is not a terminal.
pub(super) fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg}  {elapsed}");
    ProgressBar::new_spinner().with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()))
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
