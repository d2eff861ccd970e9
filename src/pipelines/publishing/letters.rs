//! Dead letters: records and tasks that taskd gives up. They are kept in SQL and sent to a topic
//! for people to read.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use super::{Error, PUBLISH_BYTES, reporting::Reporting};
use crate::{
    bus::{self, Bus, Log, LogRecord, Logs, Topic},
    model::{DeadLetter, MAX_RECORD_BYTES},
    runtime::Clock,
    store::{self, Operators},
    telemetry::metrics,
    wire,
};

/// A part that a letter may leave out, and how to remove it.
type Shorten = (&'static str, fn(&mut DeadLetter));

/// The parts that a letter leaves out, one after the other, until it is small enough for the bus.
const SHORTER: [Shorten; 3] = [
    ("without its payload", |letter| {
        letter.value.clear();
        if let Some(task) = &mut letter.task {
            task.payload.clear();
        }
    }),
    ("without its history", |letter| letter.history.clear()),
    ("without its headers", |letter| {
        if let Some(task) = &mut letter.task {
            task.headers.clear();
        }
    }),
];

/// How long a caller waits for the topic if SQL has its letters.
const SOON: Duration = Duration::from_secs(5);

/// Keeps letters in SQL and sends them to `dead-letters`, with everything that is needed to insert
/// a task again.
#[derive(Clone)]
pub struct DeadLetters {
    store: Arc<dyn Operators>,
    logs: Arc<dyn Logs>,
    topic: Arc<Reporting>,
    clock: Clock,
}

impl DeadLetters {
    pub fn new(store: Arc<dyn Operators>, bus: &dyn Bus, clock: Clock) -> Self {
        Self {
            store,
            logs: bus.logs(),
            topic: Arc::new(Reporting::new(Log::DEAD_LETTERS)),
            clock,
        }
    }

    /// Keeps and sends letters. If the process is killed in between, some are sent again; SQL keeps
    /// each once. After an error, send them again. If the topic has refused for long, letters that
    /// SQL has are not sent.
    pub async fn send(&self, letters: Vec<DeadLetter>) -> Result<(), Error> {
        match self.keep_new(&letters).await? {
            true => {
                self.topic
                    .publish(letters.len(), self.publish(letters))
                    .await?
            }
            false => self.publish(letters).await?,
        }
        Ok(())
    }

    /// Does the same for a caller that waits, and that does not send letters again which SQL has.
    /// For these it does not matter whether the topic accepts them, or answers soon.
    pub async fn send_once(&self, letters: Vec<DeadLetter>) -> Result<(), Error> {
        if !self.keep_new(&letters).await? {
            return Ok(self.publish(letters).await?);
        }
        let count = letters.len();
        let topic = Log::DEAD_LETTERS.name;
        let late = |_| {
            Err(bus::Error::Publish {
                topic: topic.clone(),
                cause: format!("no answer within {SOON:?}").into(),
            })
        };
        let publish = async {
            timeout(SOON, self.publish(letters))
                .await
                .unwrap_or_else(late)
        };
        if let Err(error) = self.topic.publish(count, publish).await {
            tracing::debug!("SQL has {count} letters that {topic} did not take: {error}");
            metrics::reports_left_out(&topic, count);
        }
        Ok(())
    }

    /// Keeps the letters that SQL may not have. Returns whether it has all of them then.
    async fn keep_new(&self, letters: &[DeadLetter]) -> store::Result<bool> {
        // A task that died got its letter in the transaction in which it died.
        let others = letters.iter().filter(|letter| letter.task_id.is_none());
        self.keep(others.cloned().collect()).await
    }

    /// Keeps letters in SQL. Returns whether it has all of them.
    async fn keep(&self, letters: Vec<DeadLetter>) -> store::Result<bool> {
        if letters.is_empty() {
            return Ok(true);
        }
        match self.store.keep_letters(&letters).await {
            Err(error) if error.is_refusal() => {}
            kept => return kept.map(|()| true),
        }
        let mut has_all = true;
        for letter in letters {
            match self.store.keep_letters(std::slice::from_ref(&letter)).await {
                // Only the topic will have this letter.
                Err(error) if error.is_refusal() => {
                    tracing::warn!("SQL does not keep a dead letter: {error}");
                    has_all = false;
                }
                kept => kept?,
            }
        }
        Ok(has_all)
    }

    async fn publish(&self, letters: Vec<DeadLetter>) -> bus::Result<()> {
        let mut records = Vec::new();
        let mut some = Vec::new();
        let mut bytes = 0;
        let count = letters.len();
        for (n, letter) in letters.into_iter().enumerate() {
            let value = wire::dead_letter(&letter);
            bytes += value.len();
            records.push(LogRecord {
                value,
                ..LogRecord::default()
            });
            some.push(letter);
            if bytes < PUBLISH_BYTES && n + 1 < count {
                continue;
            }
            match self.logs.append(&Log::DEAD_LETTERS, &records).await {
                Ok(_) => {}
                // One letter is too large: send each by itself, shortened if necessary.
                Err(bus::Error::TooLarge { .. }) => {
                    for letter in std::mem::take(&mut some) {
                        self.send_one(letter).await?;
                    }
                }
                Err(error) => return Err(error),
            }
            bytes = 0;
            records = Vec::new();
            some = Vec::new();
        }
        Ok(())
    }

    /// Sends one letter, shortened as far as the bus requires.
    async fn send_one(&self, mut letter: DeadLetter) -> bus::Result<()> {
        let mut shorter = SHORTER.iter();
        let reason = letter.reason.clone();
        loop {
            let record = LogRecord {
                value: wire::dead_letter(&letter),
                ..LogRecord::default()
            };
            match self.logs.append(&Log::DEAD_LETTERS, &[record]).await {
                Err(error @ bus::Error::TooLarge { .. }) => {
                    let Some((without, shorten)) = shorter.next() else {
                        return Err(error);
                    };
                    shorten(&mut letter);
                    letter.reason = format!("{reason} ({without}: too large for this topic)");
                }
                sent => {
                    sent?;
                    return Ok(());
                }
            }
        }
    }

    /// Sends records that cannot be handled as dead letters, so that they do not hold up the
    /// records after them.
    pub async fn bury(&self, topic: Topic, poison: &[(bus::Message, String)]) -> Result<(), Error> {
        let letter = |(message, reason): &(bus::Message, String)| {
            tracing::warn!(%topic, partition = message.partition, offset = %message.offset, "poison: {reason}");
            DeadLetter {
                reason: reason.clone(),
                at_unix_ms: self.clock.now_unix_ms(),
                topic: topic.as_str().to_owned(),
                partition: message.partition,
                offset: message.offset.to_string(),
                value: message
                    .value
                    .slice(..message.value.len().min(MAX_RECORD_BYTES)),
                ..Default::default()
            }
        };
        self.send(poison.iter().map(letter).collect()).await
    }
}
