//! Dead letters: what taskd could not deal with goes to a topic, with all that sends it again.

use prost::Message;

use super::{Error, Outbox, PUBLISH_BYTES};
use crate::{
    bus::{self, Record, Topic},
    model::MAX_RECORD_BYTES,
    wire::pb,
};

/// The part that is left out, and how.
type Shorten = (&'static str, fn(&mut pb::DeadLetter));

/// The parts that a letter leaves out, one after the other, until the bus takes it.
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

impl Outbox {
    /// Sends letters. Killed in between, some are sent again.
    pub async fn send_letters(&self, letters: Vec<pb::DeadLetter>) -> Result<(), Error> {
        let (mut records, mut some, mut bytes) = (Vec::new(), Vec::new(), 0);
        let count = letters.len();
        for (n, letter) in letters.into_iter().enumerate() {
            let value = letter.encode_to_vec();
            bytes += value.len();
            records.push(Record { partition: 0, value: value.into() });
            some.push(letter);
            if bytes < PUBLISH_BYTES && n + 1 < count {
                continue;
            }
            match self.bus.publish(Topic::DeadLetters, &records).await {
                Ok(_) => {}
                // One is at fault: each alone, as long as it is or shorter.
                Err(bus::Error::TooLarge { .. }) => {
                    for letter in std::mem::take(&mut some) {
                        self.send_letter(letter).await?;
                    }
                }
                Err(error) => return Err(error.into()),
            }
            (bytes, records, some) = (0, Vec::new(), Vec::new());
        }
        Ok(())
    }

    /// One that is larger than the bus takes names the task instead of carrying it.
    async fn send_letter(&self, mut letter: pb::DeadLetter) -> Result<(), Error> {
        let (mut shorter, reason) = (SHORTER.iter(), letter.reason.clone());
        loop {
            let record = Record { partition: 0, value: letter.encode_to_vec().into() };
            match self.bus.publish(Topic::DeadLetters, &[record]).await {
                Err(error @ bus::Error::TooLarge { .. }) => {
                    let Some((without, shorten)) = shorter.next() else { return Err(error.into()) };
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

    /// Sends what could not be decoded, so that the ones behind it flow on.
    pub async fn bury(&self, topic: Topic, poison: &[(bus::Message, String)]) -> Result<(), Error> {
        let letter = |(message, reason): &(bus::Message, String)| {
            tracing::warn!(%topic, partition = message.partition, offset = %message.offset, "poison: {reason}");
            pb::DeadLetter {
                reason: reason.clone(),
                at_unix_ms: self.clock.now_unix_ms(),
                topic: topic.as_str().to_owned(),
                partition: message.partition,
                offset: message.offset.to_string(),
                value: message.value.slice(..message.value.len().min(MAX_RECORD_BYTES)),
                ..Default::default()
            }
        };
        self.send_letters(poison.iter().map(letter).collect()).await
    }
}
