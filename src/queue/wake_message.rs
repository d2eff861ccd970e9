//! The message that wakes the callers who wait for a queue, on its way through Redis.

use std::fmt;

use crate::model::{InvalidName, QueueName};

/// A message that a queue has something to claim.
///
/// The message names the queue, and the process that it is not for, because that one has woken its
/// callers already: `queue`, `queue process`, and with a task that waits for its time `queue - due`
/// or `queue process due`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WakeMessage {
    pub(super) queue: QueueName,
    pub(super) not_for: Option<String>,
    /// A task waits for its time, and the watchdog does not know of it yet.
    pub(super) is_due: bool,
}

impl WakeMessage {
    pub(super) fn read(message: &str) -> Result<Self, InvalidName> {
        let mut words = message.split(' ');
        let mut next = || words.next().unwrap_or_default();
        let queue = next();
        let process = next();
        let due = next();
        let not_for = (!["", "-"].contains(&process)).then(|| process.to_owned());
        Ok(Self {
            queue: QueueName::new(queue)?,
            not_for,
            is_due: due == "due",
        })
    }
}

impl fmt::Display for WakeMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            queue,
            not_for,
            is_due,
        } = self;
        match (not_for, is_due) {
            (None, false) => write!(f, "{queue}"),
            (Some(process), false) => write!(f, "{queue} {process}"),
            (process, true) => write!(f, "{queue} {} due", process.as_deref().unwrap_or("-")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_whom_it_is_for_and_what_is_due() {
        for (text, not_for, is_due) in [
            ("q", None, false),
            ("q me", Some("me"), false),
            ("q - due", None, true),
            ("q me due", Some("me"), true),
        ] {
            let wake = WakeMessage {
                queue: QueueName::new("q").unwrap(),
                not_for: not_for.map(str::to_owned),
                is_due,
            };
            assert_eq!(
                (wake.to_string(), WakeMessage::read(text)),
                (text.to_owned(), Ok(wake))
            );
        }
        assert!(WakeMessage::read("").is_err());
    }
}
