//! The discovered tasks that do not fit into a completion: the worker inserts them before it
//! reports the task.

use std::time::Duration;

use backon::BackoffBuilder as _;
use prost::Message as _;
use tokio::time::sleep;

use crate::{
    client::{Client, Inserted, InsertedAs, WAITS},
    event::{Event, Tell},
    new_task::NewTask,
    outcome::{Done, Failure},
    pb,
    task::TaskInfo,
};

/// The most tasks that a completion may discover.
const MOST_DISCOVERED: usize = 10_000;
/// The most bytes of discovered tasks in a completion. taskd accepts 8 MiB, including the result.
const MOST_BYTES: usize = 2 << 20;
/// The most tasks per call of [`Client::insert`]. If it gives up because taskd is unreachable, all
/// of them are inserted again.
const AT_ONCE: usize = 5000;

/// Inserts the discovered tasks that do not fit into a completion.
pub(crate) struct Surplus {
    client: Client,
    tell: Tell,
}

impl Surplus {
    pub(crate) fn new(client: Client, tell: Tell) -> Self {
        Self { client, tell }
    }

    /// Inserts the discovered tasks that do not fit into the completion of `task`. If the attempt
    /// fails after this, nothing is lost: the next one inserts the same tasks, as duplicates.
    ///
    /// Retries for as long as taskd is unreachable. When the lease ends, the worker drops the
    /// handler and with it this call.
    pub(crate) async fn insert(&self, task: &TaskInfo, mut done: Done) -> Result<Done, Failure> {
        let surplus = take_surplus(&mut done.discovered);
        if surplus.is_empty() {
            return Ok(done);
        }
        let surplus = in_trace(surplus, task.traceparent());
        let mut rejected = 0;
        let mut first = String::new();
        for part in surplus.chunks(AT_ONCE) {
            for inserted in self.insert_part(part).await? {
                if inserted.status == InsertedAs::Rejected {
                    if rejected == 0 {
                        first = inserted.note;
                    }
                    rejected += 1;
                }
            }
        }
        if rejected > 0 {
            let reason = match rejected {
                1 => format!("1 discovered task is not stored: {first}"),
                _ => format!("{rejected} discovered tasks are not stored; the first: {first}"),
            };
            (self.tell)(Event::NotStored {
                task,
                reason: &reason,
            });
        }
        Ok(done)
    }

    async fn insert_part(&self, part: &[NewTask]) -> Result<Vec<Inserted>, Failure> {
        let mut waits = WAITS.build();
        loop {
            match self.client.insert(part.to_vec()).await {
                Ok(inserted) => return Ok(inserted),
                Err(error) if error.may_pass() => (self.tell)(Event::Away(&error)),
                // Another attempt would discover as many.
                Err(error) => {
                    let why =
                        "it discovered more tasks than a completion has, and taskd takes no insert of them".to_owned();
                    return Err(Failure::new(format!("{why}: {error}")).never_again());
                }
            }
            sleep(waits.next().unwrap_or(Duration::from_secs(1))).await;
        }
    }
}

/// Puts the tasks into the trace of the task whose handler discovered them, as taskd does with
/// those in a completion.
fn in_trace(tasks: Vec<pb::NewTask>, traceparent: &str) -> Vec<NewTask> {
    let mut all = Vec::with_capacity(tasks.len());
    for mut task in tasks {
        if task.traceparent.is_empty() {
            traceparent.clone_into(&mut task.traceparent);
        }
        all.push(NewTask(task));
    }
    all
}

/// Removes the tasks that do not fit from `discovered`, and returns them. An output of a stage stays:
/// only taskd knows its queue, and refuses a completion with too many of them.
fn take_surplus(discovered: &mut Vec<pb::NewTask>) -> Vec<pb::NewTask> {
    let mut bytes = 0;
    let mut count = 0;
    let is_surplus = |task: &mut pb::NewTask| {
        // Including the field's tag and length in the completion.
        bytes += task.encoded_len() + 8;
        count += 1;
        let fits = bytes <= MOST_BYTES && count <= MOST_DISCOVERED;
        !fits && task.port.is_empty()
    };
    discovered.extract_if(.., is_surplus).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_keeps_what_fits() {
        let task = |bytes: usize| pb::NewTask {
            key: vec![b'k'; bytes].into(),
            ..Default::default()
        };
        let split = |bytes: &[usize]| {
            let mut discovered: Vec<_> = bytes.iter().map(|bytes| task(*bytes)).collect();
            let surplus = take_surplus(&mut discovered);
            (discovered.len(), surplus.len())
        };
        assert_eq!(split(&[]), (0, 0));
        assert_eq!(split(&[1; 10_000]), (10_000, 0));
        assert_eq!(split(&[1; 20_001]), (10_000, 10_001));
        assert_eq!(split(&[1 << 20, 1 << 19, 1 << 19, 1]), (2, 2));
        assert_eq!(
            split(&[3 << 20]),
            (0, 1),
            "a single task that is too large for it goes alone"
        );
    }
}
