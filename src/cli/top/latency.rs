//! The latencies of a process's calls since the previous snapshot, from its metrics.

use std::{collections::BTreeMap, time::Duration};

/// The latency histograms: that of inserts, and that of the workers' calls.
const INSERT: &str = "taskd_discovery_insert_duration_seconds_bucket{";
const WORKERS: &str = "taskd_tasks_call_duration_seconds_bucket{";
/// The calls, in display order.
pub(super) const CALLS: [&str; 5] = ["insert", "get", "complete", "reject", "extend"];

/// Histograms in cumulative counts: by call, then by the bucket's upper bound in microseconds. The
/// last bound is `u64::MAX`.
#[derive(Clone, Debug, Default)]
pub(super) struct Calls(BTreeMap<&'static str, BTreeMap<u64, u64>>);

/// The latencies of one call between two snapshots.
#[derive(Debug, PartialEq)]
pub(super) struct Latency {
    pub(super) calls: u64,
    /// `None` if it exceeds the highest bound of the histogram.
    pub(super) median: Option<Duration>,
    pub(super) p99: Option<Duration>,
}

impl Calls {
    /// Parses Prometheus metrics, ignoring everything else.
    pub(super) fn read(text: &str) -> Self {
        let mut calls = Self::default();
        for line in text.lines() {
            let Some((name, labels)) = named(line) else {
                continue;
            };
            let bound = labels
                .split("le=\"")
                .nth(1)
                .and_then(|rest| rest.split('"').next());
            let count = line.rsplit(' ').next().and_then(|count| count.parse().ok());
            let (Some(bound), Some(count)) = (bound.and_then(micros), count) else {
                continue;
            };
            // A histogram with further labels has the same bound several times.
            let counted: u64 = count;
            *calls.0.entry(name).or_default().entry(bound).or_default() += counted;
        }
        calls
    }

    /// The calls since an earlier snapshot; `None` if there were none.
    pub(super) fn since(&self, before: Option<&Self>, name: &str) -> Option<Latency> {
        let now = self.0.get(name)?;
        let was = before.and_then(|before| before.0.get(name));
        let more = |bound: &u64, count: &u64| {
            count.saturating_sub(
                was.and_then(|was| was.get(bound))
                    .copied()
                    .unwrap_or_default(),
            )
        };
        let counts: Vec<(u64, u64)> = now
            .iter()
            .map(|(bound, count)| (*bound, more(bound, count)))
            .collect();
        let calls = counts
            .last()
            .map(|(_, count)| *count)
            .filter(|calls| *calls > 0)?;
        let quantile = |share: f64| {
            let rank = ((calls as f64 * share).ceil() as u64).max(1);
            let (bound, _) = counts.iter().find(|(_, count)| *count >= rank)?;
            (*bound != u64::MAX).then(|| Duration::from_micros(*bound))
        };
        Some(Latency {
            calls,
            median: quantile(0.5),
            p99: quantile(0.99),
        })
    }
}

/// Parses a line of a bucket: which call it is, and its labels.
fn named(line: &str) -> Option<(&'static str, &str)> {
    if let Some(labels) = line.strip_prefix(INSERT) {
        return Some((CALLS[0], labels));
    }
    let labels = line.strip_prefix(WORKERS)?;
    let name = CALLS
        .into_iter()
        .find(|name| labels.contains(&format!("method=\"{name}\"")))?;
    Some((name, labels))
}

fn micros(bound: &str) -> Option<u64> {
    if bound == "+Inf" {
        return Some(u64::MAX);
    }
    let seconds: f64 = bound.parse().ok()?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .and_then(|bound| u64::try_from(bound.as_micros()).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(counts: [u64; 3]) -> String {
        let bucket =
            |bound: &str, count| format!("{WORKERS}method=\"get\",le=\"{bound}\"}} {count}\n");
        let [low, high, all] = counts;
        format!(
            "# TYPE x histogram\n{}{}{}other 1\n",
            bucket("0.001", low),
            bucket("0.25", high),
            bucket("+Inf", all)
        )
    }

    #[test]
    fn a_latency_is_that_of_the_calls_between_two_looks() {
        let before = Calls::read(&text([100, 100, 100]));
        let now = Calls::read(&text([160, 198, 200]));
        let latency = now.since(Some(&before), "get").unwrap();
        let millis = |millis| Some(Duration::from_millis(millis));
        assert_eq!(
            latency,
            Latency {
                calls: 100,
                median: millis(1),
                p99: None
            }
        );
        assert_eq!(now.since(None, "get").unwrap().p99, millis(250));
        assert_eq!(now.since(Some(&now), "get"), None, "no calls meanwhile");
        assert_eq!(now.since(None, "insert"), None);
        // A restarted process counts from zero.
        assert_eq!(before.since(Some(&now), "get"), None);
    }

    #[test]
    fn what_is_no_bucket_is_left_out() {
        for text in [
            "",
            "\n\n",
            INSERT,
            "taskd_discovery_insert_duration_seconds_bucket{le=\"x\"} y",
            "{le=\"",
        ] {
            assert!(Calls::read(text).0.is_empty(), "{text:?}");
        }
    }
}
