//! The lines with which a command names the tasks that it discovered.

use bytes::Bytes;
use taskd_client::NewTask;

use crate::{ingress::json, wire::pb};

/// taskd takes as many of one completion.
const MOST: usize = 10_000;

/// Reads lines: each is a key of `queue`, or a task in JSON. The error is the first wrong line.
pub(super) fn read<'a>(lines: impl Iterator<Item = &'a [u8]>, queue: &str) -> Result<Vec<NewTask>, String> {
    let mut tasks = Vec::new();
    for (number, line) in lines.enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        if tasks.len() == MOST {
            return Err(format!("it discovered more than {MOST} tasks"));
        }
        tasks.push(task(line, queue).map_err(|why| format!("discovered line {}: {why}", number + 1))?);
    }
    Ok(tasks)
}

fn task(line: &[u8], queue: &str) -> Result<NewTask, String> {
    if !line.starts_with(b"{") {
        return Ok(NewTask::new(queue, line.to_vec()));
    }
    let mut task: pb::NewTask = json::insert::new_task(&Bytes::copy_from_slice(line))?.into();
    if task.queue.is_empty() {
        task.queue = queue.to_owned();
    }
    Ok(task.into())
}

/// The result, and the lines that begin with `prefix`, without it.
pub(super) fn split<'a>(stdout: &'a [u8], prefix: Option<&str>) -> (Vec<u8>, Vec<&'a [u8]>) {
    let Some(prefix) = prefix else { return (stdout.to_vec(), Vec::new()) };
    let (mut result, mut found) = (Vec::with_capacity(stdout.len()), Vec::new());
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
    fn lines_are_keys_or_tasks() {
        let lines = [&b"http://a/"[..], b"", b"b\r", br#"{"queue":"other","key":"c"}"#, br#"{"key":"d"}"#];
        let tasks = read(lines.into_iter(), "q").unwrap();
        let want = [("q", "http://a/"), ("q", "b"), ("other", "c"), ("q", "d")];
        assert_eq!(tasks, want.map(|(queue, key)| NewTask::new(queue, key)));
        let wrong = read([&b"a"[..], b"{]"].into_iter(), "q").unwrap_err();
        assert!(wrong.starts_with("discovered line 2: "), "{wrong}");
    }

    #[test]
    fn a_prefix_takes_lines_out_of_the_result() {
        let (result, found) = split(b"one\nNEW a\ntwo\nNEW b", Some("NEW "));
        assert_eq!((result.as_slice(), found), (&b"one\ntwo\n"[..], vec![&b"a"[..], b"b"]));
        assert_eq!(split(b"NEW a\n", None).0, b"NEW a\n");
    }
}
