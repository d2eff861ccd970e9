//! The command line of `taskd load`.

use clap::Args;

use crate::{
    cli::client::Server,
    config::{ByteSize, Time},
};

/// The largest payload: half of the size of a call that taskd accepts by default.
const MOST_PAYLOAD: ByteSize = ByteSize(16 << 20);

/// Send made-up work to a taskd, work on it, and count what becomes of it
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd load                                      1,000 tasks a second for 10 s, 200 workers
  taskd load --rate 5000 --duration 1m --workers 500
  taskd load --duplicates 50% --failing 10% --dying 1% --slow 5%
  taskd load --json | jq '{wrong, latency_ms}'

Of the tasks, the share --duplicates has the key of an earlier one; --failing is rejected at its first attempt; \
--dying is rejected for good; --slow takes --slow-time. Their order is the same each time.

The tasks go into a queue of their own, load-…, and stay there as finished tasks until taskd's retention removes \
them; those that die have dead letters. The workers are in this process, each with a name and calls of its own.

It ends when each task has ended, and then compares its own count with the books of the queue in SQL.
Exit code: 0 if all counts are as asked for, 1 if not, 2 for a wrong command line or a taskd that cannot be reached.")]
pub struct Load {
    /// Tasks a second
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(super) rate: u32,

    /// How long tasks come
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub(super) duration: Time,

    /// Workers in this process
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=5000))]
    pub(super) workers: u16,

    /// Tasks of one worker at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) concurrency: u16,

    /// How soon a worker gets the tasks that another one lost, or that were on their way when taskd
    /// was killed
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub(super) lease: Time,

    /// Share of tasks whose key came before
    #[arg(long, value_name = "SHARE", default_value = "10%", value_parser = share)]
    pub(super) duplicates: u32,

    /// Share of tasks whose first attempt fails
    #[arg(long, value_name = "SHARE", default_value = "5%", value_parser = share)]
    pub(super) failing: u32,

    /// Share of tasks that fail for good
    #[arg(long, value_name = "SHARE", default_value = "1%", value_parser = share)]
    pub(super) dying: u32,

    /// Share of tasks that take long
    #[arg(long, value_name = "SHARE", default_value = "2%", value_parser = share)]
    pub(super) slow: u32,

    /// How long these take
    #[arg(long, value_name = "TIME", default_value = "200ms")]
    pub(super) slow_time: Time,

    /// Payload of a task
    #[arg(long, value_name = "SIZE", default_value = "100", value_parser = payload)]
    pub(super) payload: ByteSize,

    /// How long to go on while nothing ends
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub(super) give_up_after: Time,

    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(super) json: bool,

    #[command(flatten)]
    pub(super) server: Server,
}

fn payload(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse()?;
    if size.0 > MOST_PAYLOAD.0 {
        return Err(format!("must be at most {MOST_PAYLOAD}"));
    }
    Ok(size)
}

/// Parses `10%` or `0.5%` into tenths of a percent.
fn share(text: &str) -> Result<u32, String> {
    let wrong = || format!("{text:?} is no share; write 10% or 0.5%");
    let percent: f64 = text
        .strip_suffix('%')
        .unwrap_or(text)
        .trim()
        .parse()
        .map_err(|_| wrong())?;
    if !(0.0..=100.0).contains(&percent) {
        return Err(wrong());
    }
    Ok((percent * 10.0).round() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_percentage() {
        assert_eq!(
            ["10%", "0.5%", "100"].map(share),
            [Ok(100), Ok(5), Ok(1000)]
        );
        assert!(
            ["101%", "x", "NaN%"]
                .iter()
                .all(|text| share(text).is_err())
        );
    }
}
