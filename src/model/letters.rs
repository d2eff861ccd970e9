//! Dead letters: what taskd gave up on, how an operator finds it, and what can be done with it.

use std::{collections::BTreeMap, fmt, str::FromStr};

use bytes::Bytes;
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::{Failure, LetterId, NewTask, QueueName, RecordedValues, Rfc3339, TaskId, rfc_3339};

/// A record or a task that taskd gave up on, kept for people.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeadLetter {
    pub reason: String,
    pub at_unix_ms: i64,
    /// `None` for a record, and for a task that was not stored.
    pub task_id: Option<TaskId>,
    pub queue: String,
    pub attempts: u32,
    /// Where a record was: topic, partition and offset.
    pub topic: String,
    pub partition: u32,
    pub offset: String,
    /// The content of a record.
    pub value: Bytes,
    /// The task, in the form that an insert takes.
    pub task: Option<NewTask>,
    /// The values of an unreadable task, which override those of `task`.
    pub values: Option<RecordedValues>,
    /// The failures of a dead task.
    pub history: Vec<Failure>,
    /// The parent of a discovered task that was not stored.
    pub parent_id: Option<TaskId>,
    /// The tree in which the task was discovered. SQL finds it when it stores the letter.
    pub tree: Option<TaskId>,
    /// Parts of `task` were left out, so it differs from the task that was sent.
    pub incomplete: bool,
}

/// The subject of a letter. SQL and protobuf store the discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum LetterKind {
    /// A task that failed for good.
    Task = 1,
    /// A discovered task that was not stored.
    Discovered = 2,
    /// A record that cannot be processed.
    Record = 3,
    /// A task that an insert did not accept.
    Refused = 4,
}

impl LetterKind {
    pub const ALL: [Self; 4] = [Self::Task, Self::Discovered, Self::Record, Self::Refused];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Task => "task",
            Self::Discovered => "discovered",
            Self::Record => "record",
            Self::Refused => "refused",
        }
    }

    pub fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as i64 == number)
    }
}

impl FromStr for LetterKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.as_str() == name)
            .ok_or_else(|| {
                format!(
                    "unknown kind {name:?}; expected {}",
                    Self::ALL.map(Self::as_str).join(", ")
                )
            })
    }
}

impl DeadLetter {
    pub fn kind(&self) -> LetterKind {
        match (self.task_id, self.parent_id) {
            (Some(_), _) => LetterKind::Task,
            (None, Some(_)) => LetterKind::Discovered,
            (None, None) if self.topic.is_empty() => LetterKind::Refused,
            (None, None) => LetterKind::Record,
        }
    }

    /// The letter's id. A letter that is written twice keeps its id.
    pub fn id(&self) -> LetterId {
        if let Some(id) = self.task_id {
            return id;
        }
        let mut hash = Sha256::new().chain_update([self.kind() as u8]);
        let mut add = |part: &[u8]| {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        };
        add(self.parent_id.as_ref().map_or(&[], |id| &id.as_bytes()[..]));
        add(self.queue.as_bytes());
        add(self.topic.as_bytes());
        add(&self.partition.to_be_bytes());
        add(self.offset.as_bytes());
        add(&self.value);
        if let Some(task) = &self.task {
            add(&task.key);
            add(&task.payload);
            if let Some(id) = &task.id {
                add(id.as_bytes());
            }
        }
        let hash: [u8; 32] = hash.finalize().into();
        let mut id = [0; 16];
        id.copy_from_slice(&hash[..16]);
        TaskId(Uuid::from_bytes(id))
    }
}

/// A letter with its id and kind, as readers see it.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredLetter {
    pub id: LetterId,
    pub kind: LetterKind,
    pub letter: DeadLetter,
}

/// Which letters to choose. `None` and an empty text match all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LetterFilter {
    pub queue: Option<QueueName>,
    pub kind: Option<LetterKind>,
    pub since_unix_ms: Option<i64>,
    pub until_unix_ms: Option<i64>,
    /// The prefix of the reason. SQL has no index for it, so it requires a queue.
    pub reason: String,
}

impl LetterFilter {
    pub fn check(&self) -> Result<(), String> {
        match !self.reason.is_empty() && self.queue.is_none() {
            true => Err("a filter by reason needs a queue".into()),
            false => Ok(()),
        }
    }
}

/// A position in the list of letters, which is sorted newest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LetterCursor {
    pub at_unix_ms: i64,
    pub id: LetterId,
}

impl fmt::Display for LetterCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}", self.at_unix_ms, self.id)
    }
}

impl Serialize for LetterCursor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for LetterCursor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once('_')
            .and_then(|(at, id)| Some((at.parse().ok()?, id.parse().ok()?)));
        let (at_unix_ms, id) = parts.ok_or("the cursor is not one of an earlier answer")?;
        Ok(Self { at_unix_ms, id })
    }
}

/// A page of the letters that match a filter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LetterPages {
    pub filter: LetterFilter,
    /// How many letters to read. 0 means the operation's default.
    pub limit: u32,
    /// Where the page begins, or `None` for the newest letter.
    pub after: Option<LetterCursor>,
}

/// Letters, and where the next page begins.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LetterPage {
    pub letters: Vec<StoredLetter>,
    pub next: Option<LetterCursor>,
}

/// The reasons of letters, with runs of digits folded.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Serialize)]
pub struct LetterReasons {
    /// The most frequent first.
    pub reasons: Vec<LetterReason>,
    /// The number of letters that were counted: the newest ones.
    pub looked_at: u64,
    /// There are older letters, which were not counted.
    pub at_least: bool,
}

/// A reason that letters have in common.
#[derive(Clone, Debug, JsonSchema, PartialEq, Serialize)]
pub struct LetterReason {
    /// Each run of digits is `#`, and a long reason is cut.
    pub reason: String,
    /// The beginning that all these reasons share, for a filter.
    pub prefix: String,
    pub count: u64,
    #[serde(rename = "first_at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub first_unix_ms: i64,
    #[serde(rename = "last_at", serialize_with = "rfc_3339")]
    #[schemars(with = "Rfc3339")]
    pub last_unix_ms: i64,
    /// The workers that failed last at most of these, at most three.
    pub workers: Vec<String>,
    #[serde(skip)]
    #[schemars(skip)]
    by_worker: BTreeMap<String, u64>,
}

impl LetterReason {
    /// How many workers are named.
    const MOST_WORKERS: usize = 3;

    fn count_worker(&mut self, letter: &DeadLetter) {
        if let Some(failure) = letter.history.last().filter(|last| !last.worker.is_empty()) {
            *self.by_worker.entry(failure.worker.clone()).or_default() += 1;
        }
    }

    fn name_workers(&mut self) {
        let by_worker = std::mem::take(&mut self.by_worker);
        let mut workers: Vec<(String, u64)> = by_worker.into_iter().collect();
        workers.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        workers.truncate(Self::MOST_WORKERS);
        self.workers = workers.into_iter().map(|(worker, _)| worker).collect();
    }
}

impl LetterReasons {
    /// The most characters of a reason that are compared.
    const COMPARED: usize = 200;
    /// The most reasons of an answer.
    pub const MOST: usize = 100;

    /// Counts letters, which come newest first.
    pub fn count(&mut self, letters: &[StoredLetter]) {
        for StoredLetter { letter, .. } in letters {
            self.looked_at += 1;
            let (reason, prefix) = folded(&letter.reason);
            let has_room = self.reasons.len() < 10 * Self::MOST;
            match self.reasons.iter_mut().find(|known| known.reason == reason) {
                Some(known) => {
                    known.count += 1;
                    known.first_unix_ms = known.first_unix_ms.min(letter.at_unix_ms);
                    known.last_unix_ms = known.last_unix_ms.max(letter.at_unix_ms);
                    known.count_worker(letter);
                }
                // Further reasons are rare, or all letters have different ones.
                None if !has_room => {}
                None => {
                    let mut new = LetterReason {
                        reason,
                        prefix,
                        count: 1,
                        first_unix_ms: letter.at_unix_ms,
                        last_unix_ms: letter.at_unix_ms,
                        workers: Vec::new(),
                        by_worker: BTreeMap::new(),
                    };
                    new.count_worker(letter);
                    self.reasons.push(new);
                }
            }
        }
    }

    /// Sorts the reasons, and keeps the most frequent ones.
    pub fn finish(&mut self) {
        self.reasons
            .sort_by(|a, b| (b.count, &a.reason).cmp(&(a.count, &b.reason)));
        self.reasons.truncate(Self::MOST);
        self.reasons.iter_mut().for_each(LetterReason::name_workers);
    }
}

/// A reason whose runs of digits are `#`, and what stands before the first of them.
fn folded(reason: &str) -> (String, String) {
    let mut text = String::new();
    let mut prefix = String::new();
    let mut has_digit = false;
    for c in reason.chars().take(LetterReasons::COMPARED) {
        if !c.is_ascii_digit() {
            text.push(c);
            if !has_digit {
                prefix.push(c);
            }
            continue;
        }
        if !text.ends_with('#') {
            text.push('#');
        }
        has_digit = true;
    }
    (text, prefix)
}

/// The letters that a call is to change.
#[derive(Clone, Debug, PartialEq)]
pub enum ChosenLetters {
    Ids(Vec<LetterId>),
    Pages(LetterPages),
}

impl ChosenLetters {
    /// Chooses letters by ids or by a filter. Returns an error if both or neither are given.
    pub fn new(ids: Vec<String>, pages: Option<LetterPages>) -> Result<Self, String> {
        match pages {
            Some(_) if !ids.is_empty() => Err("ids and a filter are both given; use one".into()),
            Some(pages) => Ok(Self::Pages(pages)),
            None if ids.is_empty() => Err("name letters by ids or by a filter".into()),
            None => {
                let read = |(at, id): (usize, &String)| {
                    let beginning: String = id.chars().take(100).collect();
                    id.parse()
                        .map_err(|_| format!("ids[{at}]: {beginning:?} is not a letter's id"))
                };
                Ok(Self::Ids(
                    ids.iter().enumerate().map(read).collect::<Result<_, _>>()?,
                ))
            }
        }
    }
}

/// A request to send letters again, or to purge them.
#[derive(Clone, Debug, PartialEq)]
pub struct ChangeLetters {
    pub chosen: ChosenLetters,
    /// Only count the letters.
    pub dry_run: bool,
    /// The caller confirms the change, which is required for a filter.
    pub yes: bool,
}

/// The outcome of a change of letters.
#[derive(Clone, Debug, Default, JsonSchema, PartialEq, Serialize)]
pub struct LettersChanged {
    pub matched: u64,
    pub changed: u64,
    // The letters that were not changed, each with the reason.
    #[serde(serialize_with = "not_changed")]
    #[schemars(with = "Vec<LetterNotChanged<'_>>")]
    pub failed: Vec<(LetterId, String)>,
    #[serde(rename = "cursor", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub next: Option<LetterCursor>,
}

/// A letter that was not changed.
#[derive(JsonSchema, Serialize)]
struct LetterNotChanged<'a> {
    #[schemars(with = "String")]
    id: LetterId,
    error: &'a str,
}

fn not_changed<S: Serializer>(
    failed: &[(LetterId, String)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(
        failed
            .iter()
            .map(|(id, error)| LetterNotChanged { id: *id, error }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_letter_has_one_id_and_another_letter_another() {
        let refused = |queue: &str, key: &'static [u8]| DeadLetter {
            queue: queue.into(),
            task: Some(NewTask {
                queue: queue.into(),
                key: key.into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let record = DeadLetter {
            topic: "pipeline".into(),
            offset: "1-0".into(),
            ..Default::default()
        };
        let ids = [
            refused("q", b"k"),
            refused("q", b"l"),
            refused("qk", b""),
            record.clone(),
        ]
        .map(|one| one.id());
        assert!((0..4).all(|i| (0..i).all(|j| ids[i] != ids[j])), "{ids:?}");
        assert_eq!(
            DeadLetter {
                reason: "other".into(),
                at_unix_ms: 7,
                ..record.clone()
            }
            .id(),
            ids[3]
        );
        assert_eq!(
            DeadLetter {
                task_id: Some(ids[0]),
                ..record
            }
            .id(),
            ids[0]
        );
    }

    #[test]
    fn reasons_are_counted_with_their_digits_folded() {
        let letter = |reason: &str, at_unix_ms| StoredLetter {
            id: TaskId::new(),
            kind: LetterKind::Task,
            letter: DeadLetter {
                reason: reason.into(),
                at_unix_ms,
                history: vec![Failure {
                    at_unix_ms,
                    worker: format!("w{}", at_unix_ms % 3),
                    reason: String::new(),
                }],
                ..Default::default()
            },
        };
        let mut reasons = LetterReasons::default();
        reasons.count(&[
            letter("gone", 9),
            letter("took longer than 12 s", 8),
            letter("took longer than 5 s", 3),
        ]);
        reasons.finish();
        let first = LetterReason {
            reason: "took longer than # s".into(),
            prefix: "took longer than ".into(),
            count: 2,
            first_unix_ms: 3,
            last_unix_ms: 8,
            workers: vec!["w0".into(), "w2".into()],
            by_worker: BTreeMap::new(),
        };
        assert_eq!((&reasons.reasons[0], reasons.looked_at), (&first, 3));
        assert_eq!(reasons.reasons[1].prefix, "gone");
        let long = "é".repeat(500);
        assert_eq!(folded(&long).0.chars().count(), 200);
        assert_eq!(folded(""), (String::new(), String::new()));
    }

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        let cursor = LetterCursor {
            at_unix_ms: 17,
            id: TaskId::new(),
        };
        assert_eq!(cursor.to_string().parse(), Ok(cursor));
        assert!("17".parse::<LetterCursor>().is_err() && "x_y".parse::<LetterCursor>().is_err());
    }
}
