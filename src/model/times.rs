//! The times of a task to insert: when its first attempt may begin, and by when it must have its
//! NUM completions.

use std::time::{Duration, UNIX_EPOCH};

use super::{NewTask, millis};

/// The end of the year 9999, the last one that RFC 3339 can represent.
const LAST_UNIX_MS: i64 = 253_402_300_799_999;
/// The maximum `finish_within`.
const LONGEST: Duration = Duration::from_secs(3650 * 24 * 3600);

/// The times of a validated task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Times {
    /// The time of the first claim. 0 means immediately.
    pub(super) not_before_unix_ms: i64,
    /// 0 if the task has no deadline.
    pub(super) deadline_unix_ms: i64,
}

impl Times {
    /// Validates the times of a task. With `is_accepted`, somebody was already told that the task
    /// is valid, so its deadline may have passed since then.
    ///
    /// The deadline may also have passed if the task has an idempotency key, because it may be a
    /// repeated insert of a stored task, which only SQL knows. If it is not, it is stored now and
    /// dies at once.
    pub(super) fn new(task: &NewTask, is_accepted: bool, now_unix_ms: i64) -> Result<Self, String> {
        let not_before_unix_ms = not_before(task, now_unix_ms)?;
        let deadline_unix_ms = deadline(task, now_unix_ms)?;
        if deadline_unix_ms > 0 && !is_accepted {
            let may_be_repeat = !task.idempotency_key.is_empty();
            if deadline_unix_ms <= now_unix_ms && !may_be_repeat {
                return Err(deadline_passed(deadline_unix_ms));
            }
            // The insert may be repeated, in which case `delay` is counted from a later time than
            // before.
            if deadline_unix_ms <= not_before_unix_ms && !(may_be_repeat && task.delay.is_some()) {
                let deadline = rfc_3339(deadline_unix_ms);
                return Err(format!(
                    "the deadline {deadline} is before the first attempt (delay or not_before)"
                ));
            }
        }
        Ok(Self {
            not_before_unix_ms,
            deadline_unix_ms,
        })
    }
}

/// The reason why a task with this deadline is dead or was not stored.
pub fn deadline_passed(deadline_unix_ms: i64) -> String {
    format!("the deadline of {} passed", rfc_3339(deadline_unix_ms))
}

fn not_before(task: &NewTask, now_unix_ms: i64) -> Result<i64, String> {
    let at = match (task.delay, task.not_before_unix_ms) {
        (Some(_), Some(_)) => return Err("delay and not_before are both given; use one".into()),
        (Some(delay), None) => now_unix_ms.saturating_add(millis(delay)),
        (None, at) => at.unwrap_or(0),
    };
    if at <= now_unix_ms {
        return Ok(0);
    }
    if at > LAST_UNIX_MS {
        return Err("delay or not_before is too far in the future: year 9999 is the last".into());
    }
    Ok(at)
}

fn deadline(task: &NewTask, now_unix_ms: i64) -> Result<i64, String> {
    match (task.finish_within, task.deadline_unix_ms) {
        (None, None) => Ok(0),
        (Some(_), Some(_)) => Err("deadline and finish_within are both given; use one".into()),
        (Some(within), None) if within < Duration::from_millis(1) || within > LONGEST => {
            Err(format!(
                "finish_within is {}; must be 1ms to 3650days",
                humantime::format_duration(within)
            ))
        }
        (Some(within), None) => Ok(now_unix_ms.saturating_add(millis(within))),
        (None, Some(at)) if at > LAST_UNIX_MS => {
            Err("deadline is too far in the future: year 9999 is the last".into())
        }
        // 0 would mean that there is no deadline.
        (None, Some(at)) => Ok(at.max(1)),
    }
}

/// `1970-01-01T00:00:01.500Z`
fn rfc_3339(unix_ms: i64) -> String {
    let since = Duration::from_millis(unix_ms.clamp(0, LAST_UNIX_MS).unsigned_abs());
    humantime::format_rfc3339_millis(UNIX_EPOCH + since).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_000_000;

    fn times(task: NewTask) -> Result<(i64, i64), String> {
        Times::new(&task, false, NOW)
            .map(|times| (times.not_before_unix_ms, times.deadline_unix_ms))
    }

    #[test]
    fn a_deadline_is_a_time_or_a_duration_from_the_insert() {
        let within = |ms| NewTask {
            finish_within: Some(Duration::from_millis(ms)),
            ..Default::default()
        };
        let at = |deadline_unix_ms| NewTask {
            deadline_unix_ms: Some(deadline_unix_ms),
            ..Default::default()
        };
        assert_eq!(times(NewTask::default()), Ok((0, 0)));
        assert_eq!(times(within(1)), Ok((0, NOW + 1)));
        assert_eq!(times(at(NOW + 1)), Ok((0, NOW + 1)));
        let later = NewTask {
            delay: Some(Duration::from_secs(1)),
            ..at(NOW + 1001)
        };
        assert_eq!(times(later), Ok((NOW + 1000, NOW + 1001)));
        let error = times(within(0)).unwrap_err();
        assert_eq!(error, "finish_within is 0s; must be 1ms to 3650days");
        for (task, want) in [
            (
                NewTask {
                    deadline_unix_ms: Some(1),
                    ..within(1)
                },
                "deadline and finish_within are both given; use one",
            ),
            (within(3650 * 24 * 3_600_000 + 1), "must be 1ms to 3650days"),
            (at(NOW), "the deadline of 1970-01-01T00:16:40.000Z passed"),
            (at(0), "the deadline of 1970-01-01T00:00:00.001Z passed"),
            (
                at(LAST_UNIX_MS + 1),
                "deadline is too far in the future: year 9999 is the last",
            ),
            (
                NewTask {
                    delay: Some(Duration::from_secs(1)),
                    ..within(1000)
                },
                "is before the first attempt",
            ),
        ] {
            let error = times(task).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }

    #[test]
    fn a_task_that_was_accepted_may_come_behind_its_deadline() {
        let task = NewTask {
            deadline_unix_ms: Some(NOW - 1),
            delay: Some(Duration::from_secs(1)),
            ..Default::default()
        };
        let times = Times {
            not_before_unix_ms: NOW + 1000,
            deadline_unix_ms: NOW - 1,
        };
        assert_eq!(Times::new(&task, true, NOW), Ok(times));
        let repeated = NewTask {
            idempotency_key: "i".into(),
            ..task.clone()
        };
        assert_eq!(Times::new(&repeated, false, NOW), Ok(times));
        let never_valid = NewTask {
            delay: None,
            not_before_unix_ms: Some(NOW + 1),
            ..repeated
        };
        let error = Times::new(&never_valid, false, NOW).unwrap_err();
        assert!(error.contains("is before the first attempt"), "{error}");
        assert!(rfc_3339(i64::MAX).starts_with("9999-12-31T23:59:59"));
    }
}
