//! Inserts tasks as JSON lines over HTTP.

use std::{fmt::Write as _, sync::Arc};

use anyhow::ensure;
use bytes::Bytes;
use futures::future;

use crate::daemon::Daemon;

pub(crate) const CONNECTIONS: usize = 4;
pub(crate) const QUEUE: &str = "bench";
/// One of this many tasks needs two workers.
pub(crate) const FOR_TWO: usize = 10;
/// Settings with which no task is parked, no lease expires, and the fanout looks up no tasks.
pub(crate) const CONFIG: &str =
    "grace = \"10m\"\n[queues.default]\nhigh_water_tasks = 1000000\nlease = \"10m\"\n";
pub(crate) const PAYLOAD: &str = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\
                                  xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx";

pub(crate) fn key(number: usize) -> String {
    format!("https://www.example.org/pages/{number:012}")
}

/// Inserts tasks as lines, over all connections at once. Fails unless each is answered with
/// `wanted`.
pub(crate) async fn insert(
    daemon: &Daemon,
    queue: &str,
    count: usize,
    wanted: &str,
) -> anyhow::Result<()> {
    let status = Arc::<str>::from(format!("{{\"status\":\"{wanted}\""));
    let each = count.div_ceil(CONNECTIONS);
    let parts = (0..count)
        .step_by(each)
        .map(|first| first..count.min(first + each));
    let parts: Vec<_> = parts
        .map(|numbers| (numbers.len(), lines(queue, numbers)))
        .collect();
    let calls = parts.into_iter().map(|(sent, lines)| {
        let status = Arc::clone(&status);
        async move {
            let mut answered = 0;
            let read = |line: &str| {
                ensure!(line.starts_with(&*status), "a line was answered {line}");
                answered += 1;
                Ok(())
            };
            daemon.insert_lines(lines, read).await?;
            ensure!(answered == sent, "{answered} of {sent} lines were answered");
            Ok(())
        }
    });
    future::try_join_all(calls).await.map(drop)
}

fn lines(queue: &str, numbers: std::ops::Range<usize>) -> Bytes {
    let mut text = String::with_capacity(numbers.len() * 240);
    for number in numbers {
        let (key, replicas) = (key(number), 1 + usize::from(number % FOR_TWO == 0));
        let task = format_args!(
            r#"{{"queue":"{queue}","key":"{key}","replicas":{replicas},"payload":"{PAYLOAD}"}}"#
        );
        writeln!(text, "{task}").expect("a String takes everything");
    }
    text.into()
}
