//! Parses the lines in which a command lists the tasks that it discovered.

use bytes::Bytes;
use taskd_client::NewTask;

use crate::{ingress::json, wire::pb};

/// Where a discovered task goes that does not say it.
#[derive(Clone, Copy)]
pub(super) enum Goal<'a> {
    Queue(&'a str),
    /// A port of the task's stage.
    Port(&'a str),
}

/// The tasks of the valid lines, and what is wrong with the others.
#[derive(Default)]
pub(super) struct Found {
    pub(super) tasks: Vec<NewTask>,
    wrong: usize,
    first_wrong: String,
}

impl Found {
    /// Reads lines: each is a key for `goal`, or a task in JSON. An invalid line does not affect the
    /// others.
    pub(super) fn read<'a>(lines: impl Iterator<Item = &'a [u8]>, goal: Goal<'_>) -> Self {
        let mut found = Self::default();
        for (number, line) in lines.enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                continue;
            }
            match task(line, goal) {
                Ok(task) => found.tasks.push(task),
                Err(why) => {
                    if found.wrong == 0 {
                        found.first_wrong = format!("line {}: {why}", number + 1);
                    }
                    found.wrong += 1;
                }
            }
        }
        found
    }

    /// A message about the invalid lines, if there are any.
    pub(super) fn complaint(&self) -> Option<String> {
        match self.wrong {
            0 => None,
            1 => Some(format!(
                "1 discovered task is not stored: {}",
                self.first_wrong
            )),
            wrong => Some(format!(
                "{wrong} discovered tasks are not stored; the first: {}",
                self.first_wrong
            )),
        }
    }
}

fn task(line: &[u8], goal: Goal<'_>) -> Result<NewTask, String> {
    let mut task = if line.starts_with(b"{") {
        json::insert::new_task(&Bytes::copy_from_slice(line))?.into()
    } else {
        pb::NewTask {
            key: Bytes::copy_from_slice(line),
            ..Default::default()
        }
    };
    if task.queue.is_empty() && task.port.is_empty() {
        match goal {
            Goal::Queue(queue) => queue.clone_into(&mut task.queue),
            Goal::Port(port) => port.clone_into(&mut task.port),
        }
    }
    Ok(task.into())
}

/// Splits the output into the result and the lines with `prefix`, from which it removes the prefix.
pub(super) fn split<'a>(stdout: &'a [u8], prefix: Option<&str>) -> (Vec<u8>, Vec<&'a [u8]>) {
    let Some(prefix) = prefix else {
        return (stdout.to_vec(), Vec::new());
    };
    let mut result = Vec::with_capacity(stdout.len());
    let mut found = Vec::new();
    for line in stdout.split_inclusive(|byte| *byte == b'\n') {
        match line.strip_prefix(prefix.as_bytes()) {
            Some(line) => found.push(line.strip_suffix(b"\n").unwrap_or(line)),
            None => result.extend_from_slice(line),
        }
    }
    (result, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_keys_or_tasks_and_a_wrong_one_costs_only_itself() {
        let lines = [
            &b"http://a/"[..],
            b"",
            b"{]",
            b"b\r",
            br#"{"queue":"other","key":"c"}"#,
            br#"{"key":"d"}"#,
            br#"{"port":"link","key":"e"}"#,
        ];
        let found = Found::read(lines.into_iter(), Goal::Queue("q"));
        let want = [("q", "http://a/"), ("q", "b"), ("other", "c"), ("q", "d")];
        let mut want = want.map(|(queue, key)| NewTask::new(queue, key)).to_vec();
        want.push(NewTask::output("link", "e"));
        assert_eq!(found.tasks, want);
        let said = found.complaint().unwrap();
        assert!(
            said.starts_with("1 discovered task is not stored: line 3: "),
            "{said}"
        );
        let found = Found::read([&b"{]"[..], b"{}{", b"a"].into_iter(), Goal::Queue("q"));
        let said = found.complaint().unwrap();
        assert!(
            said.starts_with("2 discovered tasks are not stored; the first: line 1: "),
            "{said}"
        );
        assert!(
            Found::read([&b"a"[..]].into_iter(), Goal::Port("out"))
                .complaint()
                .is_none()
        );
    }

    #[test]
    fn a_prefix_takes_lines_out_of_the_result() {
        let (result, found) = split(b"one\nNEW a\ntwo\nNEW b", Some("NEW "));
        assert_eq!(
            (result.as_slice(), found),
            (&b"one\ntwo\n"[..], vec![&b"a"[..], b"b"])
        );
        assert_eq!(split(b"NEW a\n", None).0, b"NEW a\n");
    }
}
