//! The backoff of a task: the waits between its attempts, and the time after which it gets no more
//! attempts.

use std::time::Duration;

/// How the wait grows from failure to failure. SQL and Redis store the discriminants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum BackoffKind {
    /// The waits configured for the queue.
    #[default]
    Queue = 0,
    Constant = 1,
    Linear = 2,
    Exponential = 3,
}

impl BackoffKind {
    /// The kinds that an insert may choose.
    pub const OWN: [Self; 3] = [Self::Constant, Self::Linear, Self::Exponential];

    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Constant => "constant",
            Self::Linear => "linear",
            Self::Exponential => "exponential",
        }
    }
}

/// The backoff of a task to insert, not validated yet.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NewBackoff {
    pub kind: BackoffKind,
    /// The wait after the first failure.
    pub initial: Option<Duration>,
    /// The maximum wait. `None` means one day.
    pub maximum: Option<Duration>,
    /// The fraction by which a wait may randomly be longer or shorter. `None` means a fifth.
    pub jitter: Option<f64>,
    /// The task dies if its next attempt would begin later than this after the time when the task
    /// was first due.
    pub give_up_after: Option<Duration>,
}

/// The backoff of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    pub kind: BackoffKind,
    pub initial_ms: u32,
    pub maximum_ms: u32,
    pub jitter_percent: u8,
    /// 0 for no time limit.
    pub give_up_after_ms: u64,
}

/// The maximum wait, the same as for a queue's backoff.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
const LONGEST_GIVE_UP: Duration = Duration::from_secs(3650 * 24 * 3600);
const JITTER: f64 = 0.2;

/// The length of [`Backoff::packed`], in bytes.
pub const BACKOFF_BYTES: usize = 18;

impl Backoff {
    /// Validates a backoff. Returns `None` if the task uses the queue's backoff.
    pub(super) fn new(new: &NewBackoff) -> Result<Option<Self>, String> {
        let ms = |what: &str, wait: Duration| {
            let fits = u32::try_from(wait.as_millis())
                .ok()
                .filter(|_| wait <= LONGEST);
            fits.ok_or_else(|| {
                format!(
                    "backoff.{what} is {}; at most 1day",
                    humantime::format_duration(wait)
                )
            })
        };
        let give_up_after_ms = match new.give_up_after {
            None => 0,
            Some(after) if after < Duration::from_millis(1) || after > LONGEST_GIVE_UP => {
                let after = humantime::format_duration(after);
                return Err(format!(
                    "backoff.give_up_after is {after}; must be 1ms to 3650days"
                ));
            }
            Some(after) => u64::try_from(after.as_millis()).unwrap_or(u64::MAX),
        };
        let mut initial_ms = 0;
        let mut maximum_ms = 0;
        let mut jitter_percent = 0;
        if new.kind == BackoffKind::Queue {
            if new.initial.is_some() || new.maximum.is_some() || new.jitter.is_some() {
                return Err("backoff has no kind; expected constant, linear or exponential".into());
            }
            if give_up_after_ms == 0 {
                return Ok(None);
            }
        } else {
            let initial = new
                .initial
                .ok_or("backoff.initial is missing: the wait after the first failure")?;
            initial_ms = ms("initial", initial)?;
            maximum_ms = ms("maximum", new.maximum.unwrap_or(LONGEST))?;
            if maximum_ms < initial_ms {
                return Err("backoff.maximum is shorter than backoff.initial".into());
            }
            let jitter = new.jitter.unwrap_or(JITTER);
            if !(0.0..=1.0).contains(&jitter) {
                return Err(format!("backoff.jitter is {jitter}; must be 0 to 1"));
            }
            jitter_percent = (jitter * 100.0).round() as u8;
        }
        Ok(Some(Self {
            kind: new.kind,
            initial_ms,
            maximum_ms,
            jitter_percent,
            give_up_after_ms,
        }))
    }

    /// The time at which a task that was first due at `first_due_unix_ms` gives up. 0 means never.
    pub fn gives_up_unix_ms(&self, first_due_unix_ms: i64) -> u64 {
        match self.give_up_after_ms {
            0 => 0,
            after => first_due_unix_ms
                .max(0)
                .unsigned_abs()
                .saturating_add(after),
        }
    }

    /// The stored form: kind, initial and maximum wait in milliseconds, jitter in percent, `limit`.
    /// In SQL, `limit` is the duration `give_up_after_ms`; in the task's body in Redis, it is the
    /// time at which the task gives up. Lua reads this form with `struct.unpack`.
    pub fn packed(&self, limit: u64) -> [u8; BACKOFF_BYTES] {
        let mut bytes = [0; BACKOFF_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1..5].copy_from_slice(&self.initial_ms.to_be_bytes());
        bytes[5..9].copy_from_slice(&self.maximum_ms.to_be_bytes());
        bytes[9] = self.jitter_percent;
        bytes[10..].copy_from_slice(&limit.to_be_bytes());
        bytes
    }

    /// Reads the form stored in SQL. Returns `Err` if the bytes are not a backoff.
    pub fn unpacked(bytes: &[u8]) -> Result<Self, String> {
        let wrong = || format!("a backoff of {} bytes", bytes.len());
        let [kind, a, b, c, d, e, f, g, h, jitter_percent, ref limit @ ..] = *bytes else {
            return Err(wrong());
        };
        let kind = match kind {
            0 => BackoffKind::Queue,
            1 => BackoffKind::Constant,
            2 => BackoffKind::Linear,
            3 => BackoffKind::Exponential,
            other => return Err(format!("a backoff of kind {other}")),
        };
        Ok(Self {
            kind,
            initial_ms: u32::from_be_bytes([a, b, c, d]),
            maximum_ms: u32::from_be_bytes([e, f, g, h]),
            jitter_percent,
            give_up_after_ms: u64::from_be_bytes(limit[..].try_into().map_err(|_| wrong())?),
        })
    }
}

/// Converts a stored backoff to the form that an insert takes.
impl From<Backoff> for NewBackoff {
    fn from(backoff: Backoff) -> Self {
        let own = backoff.kind != BackoffKind::Queue;
        let ms = |ms: u32| own.then(|| Duration::from_millis(ms.into()));
        let give_up = backoff.give_up_after_ms;
        Self {
            kind: backoff.kind,
            initial: ms(backoff.initial_ms),
            maximum: ms(backoff.maximum_ms),
            jitter: own.then(|| f64::from(backoff.jitter_percent) / 100.0),
            give_up_after: (give_up > 0).then(|| Duration::from_millis(give_up)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(kind: BackoffKind) -> NewBackoff {
        let s = |s| Some(Duration::from_secs(s));
        NewBackoff {
            kind,
            initial: s(1),
            maximum: s(60),
            jitter: Some(0.0),
            give_up_after: s(3600),
        }
    }

    #[test]
    fn a_backoff_survives_sql_and_the_way_back_to_an_insert() {
        let only_limit = NewBackoff {
            give_up_after: Some(Duration::from_secs(9)),
            ..Default::default()
        };
        for given in BackoffKind::OWN.map(new).into_iter().chain([only_limit]) {
            let backoff = Backoff::new(&given).unwrap().unwrap();
            assert_eq!(
                Backoff::unpacked(&backoff.packed(backoff.give_up_after_ms)),
                Ok(backoff)
            );
            assert_eq!(NewBackoff::from(backoff), given);
        }
        let short = NewBackoff {
            maximum: None,
            jitter: None,
            give_up_after: None,
            ..new(BackoffKind::Linear)
        };
        let backoff = Backoff::new(&short).unwrap().unwrap();
        assert_eq!(
            (backoff.maximum_ms, backoff.jitter_percent),
            (24 * 3600 * 1000, 20)
        );
        assert_eq!(
            (backoff.gives_up_unix_ms(5), backoff.give_up_after_ms),
            (0, 0)
        );
        assert_eq!(Backoff::new(&NewBackoff::default()), Ok(None));
        for bytes in [&[1; 17][..], &[1; 19], &[4; 18], &[]] {
            Backoff::unpacked(bytes).unwrap_err();
        }
    }

    #[test]
    fn a_wrong_backoff_is_named() {
        let s = |s| Some(Duration::from_secs(s));
        let own = || new(BackoffKind::Exponential);
        let cases = [
            (
                NewBackoff {
                    kind: BackoffKind::Queue,
                    ..own()
                },
                "backoff has no kind; expected constant, linear or",
            ),
            (
                NewBackoff {
                    initial: None,
                    ..own()
                },
                "backoff.initial is missing",
            ),
            (
                NewBackoff {
                    initial: s(86_401),
                    ..own()
                },
                "backoff.initial is 1day 1s; at most 1day",
            ),
            (
                NewBackoff {
                    maximum: s(86_401),
                    ..own()
                },
                "backoff.maximum is 1day 1s; at most 1day",
            ),
            (
                NewBackoff {
                    initial: s(61),
                    ..own()
                },
                "backoff.maximum is shorter than backoff.initial",
            ),
            (
                NewBackoff {
                    jitter: Some(1.5),
                    ..own()
                },
                "backoff.jitter is 1.5; must be 0 to 1",
            ),
            (
                NewBackoff {
                    jitter: Some(f64::NAN),
                    ..own()
                },
                "backoff.jitter is NaN",
            ),
            (
                NewBackoff {
                    give_up_after: s(0),
                    ..own()
                },
                "backoff.give_up_after is 0s; must be 1ms to 3650days",
            ),
        ];
        for (wrong, want) in cases {
            let error = Backoff::new(&wrong).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
