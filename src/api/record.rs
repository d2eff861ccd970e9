//! What became of a record of a topic: in each subscription its task, or why it has none.

use std::collections::BTreeMap;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use tracing::Instrument as _;

use super::{
    access::reaches,
    error::Error,
    handle::{Api, span},
    reader::Reader,
    subscriptions::may_see,
};
use crate::{
    bus::{Log, LogMessage},
    model::{
        Caller, DeadLetter, ECHO, KeyHash, Offset, Position, PositionKey, RecordExplanation,
        RecordFate, RecordOfSubscription, Subscription, TaskId, Topic, record_task_id, shorten,
    },
    pipelines::discovery::record_task,
};

/// How many subscriptions are asked about at once.
const AT_ONCE: usize = 8;

/// A record that somebody asks about.
struct Asked {
    topic: Topic,
    partition: u32,
    offset: Offset,
    /// `None`: the topic does not have it any more.
    message: Option<LogMessage>,
}

impl Api {
    /// Says what became of a record in each subscription that the caller reaches.
    pub async fn explain_record(
        &self,
        caller: &Caller,
        topic: &str,
        partition: u32,
        offset: &str,
    ) -> Result<RecordExplanation, Error> {
        let query = self.query()?;
        let explain = async {
            reaches(caller, topic)?;
            let offset: Offset = offset.parse().map_err(|_| {
                let offset = shorten(offset, ECHO);
                Error::Invalid(format!(
                    "offset {offset:?} is none; write the offset of a record, for example 1764000000123-0"
                ))
            })?;
            let topic = query.topic_of(caller, topic).await?;
            let asked = query.asked(topic, partition, offset).await?;
            query.explain_record(caller, &asked).await
        };
        explain.instrument(span("explain_record", caller)).await
    }
}

impl Reader {
    async fn asked(&self, topic: Topic, partition: u32, offset: Offset) -> Result<Asked, Error> {
        let partitions = topic.settings.partitions;
        if partition >= partitions {
            return Err(Error::Invalid(format!(
                "there is no partition {partition}: topic {} has {partitions}, counted from 0",
                topic.name
            )));
        }
        let logs = self.bus.logs();
        let log = Log::from(&topic);
        let read = logs.read(&log, partition, before(offset), 1).await?;
        let message = read.into_iter().find(|one| one.offset == offset);
        if message.is_none() {
            let end = logs.end(&log, partition).await?;
            if end.is_none_or(|end| end < offset) {
                return Err(Error::Invalid(format!(
                    "partition {partition} of topic {} has no record {offset} yet",
                    topic.name
                )));
            }
            let first = logs.first(&log).await?;
            let first = first.into_iter().nth(partition as usize).flatten();
            if first.is_some_and(|first| first < offset) {
                return Err(Error::Invalid(format!(
                    "partition {partition} of topic {} never had a record {offset}: it has others before and after it",
                    topic.name
                )));
            }
        }
        Ok(Asked {
            topic,
            partition,
            offset,
            message,
        })
    }

    async fn explain_record(
        &self,
        caller: &Caller,
        asked: &Asked,
    ) -> Result<RecordExplanation, Error> {
        let mut subscriptions = self.store().subscriptions().await?;
        subscriptions.retain(|one| one.topics.includes(&asked.topic.name) && may_see(caller, one));
        let positions = self.store().positions(None).await?;
        let positions: BTreeMap<&PositionKey, &Position> = positions
            .iter()
            .map(|position| (&position.key, position))
            .collect();
        let mut fates = Vec::with_capacity(subscriptions.len());
        for subscription in &subscriptions {
            let key = PositionKey {
                subscription: subscription.name.clone(),
                topic: asked.topic.name.clone(),
                partition: asked.partition,
            };
            let position = positions.get(&key).copied();
            fates.push(self.fate(subscription, position, asked));
        }
        let subscriptions = stream::iter(fates).buffered(AT_ONCE).try_collect().await?;
        let message = asked.message.as_ref();
        Ok(RecordExplanation {
            topic: asked.topic.name.to_string(),
            partition: asked.partition,
            offset: asked.offset.to_string(),
            published_unix_ms: message.map(|message| message.published_unix_ms),
            subscriptions,
        })
    }

    /// What became of a record in a subscription.
    async fn fate(
        &self,
        subscription: &Subscription,
        position: Option<&Position>,
        asked: &Asked,
    ) -> Result<RecordOfSubscription, Error> {
        let of = |fate: RecordFate, says: String| RecordOfSubscription {
            subscription: subscription.name.to_string(),
            queue: subscription.queue.to_string(),
            fate,
            task: None,
            status: None,
            letter: None,
            says,
        };
        let replay = position.map_or(0, |position| position.up_to.replay);
        let is_read = position.is_some_and(|position| position.up_to.after >= Some(asked.offset));
        if let Some((id, says, status)) = self.task_of(subscription, replay, asked).await? {
            return Ok(RecordOfSubscription {
                task: Some(id),
                status: Some(status),
                ..of(RecordFate::Task, says)
            });
        }
        let Some(message) = &asked.message else {
            return Ok(match is_read {
                false => of(
                    RecordFate::Skipped,
                    "retention deleted it before it was read".to_owned(),
                ),
                true => of(
                    RecordFate::NoTask,
                    "it has no task any more, and the topic does not have the record".to_owned(),
                ),
            });
        };
        if !is_read {
            return Ok(of(RecordFate::Behind, "it is not read yet".to_owned()));
        }
        let record = &message.record;
        if !subscription
            .matching
            .matches(&record.key, &record.attributes)
        {
            return Ok(of(RecordFate::Filtered, "`match` leaves it out".to_owned()));
        }
        let (_, task) = record_task(subscription, replay, &asked.topic.name, message);
        let letter = DeadLetter {
            queue: task.queue.clone(),
            task: Some(task),
            ..DeadLetter::default()
        };
        if let Some(letter) = self.store().letter(letter.id()).await? {
            return Ok(RecordOfSubscription {
                letter: Some(letter.id),
                ..of(RecordFate::Refused, letter.letter.reason)
            });
        }
        let is_older = message.published_unix_ms < subscription.created_unix_ms;
        let says = if replay > 0 {
            "it has no task since the subscription was sent to another place"
        } else if is_older {
            "the subscription began after it"
        } else {
            "it has no task any more, or the subscription had another queue then"
        };
        Ok(of(RecordFate::NoTask, says.to_owned()))
    }

    /// The task of a record, if there is one: its id, where it is in words, and its status.
    async fn task_of(
        &self,
        subscription: &Subscription,
        replay: u64,
        asked: &Asked,
    ) -> Result<Option<(TaskId, String, crate::model::TaskStatus)>, Error> {
        let topic = &asked.topic.name;
        let id = match &asked.message {
            Some(message) => {
                let (id, task) = record_task(subscription, replay, topic, message);
                match task.id {
                    Some(_) => id,
                    // Records with an id share the task of the first one.
                    None => {
                        let key = KeyHash::new(&subscription.queue, &task.key);
                        let owners = self.store().key_owners(&[key]).await?;
                        let Some((_, owner, _)) = owners.into_iter().next() else {
                            return Ok(None);
                        };
                        owner
                    }
                }
            }
            // Offsets of Kafka do not say when the record was published, so the id is not known.
            None if self.bus.has_other_readers() => return Ok(None),
            None => {
                let published = i64::try_from(asked.offset.major).unwrap_or(i64::MAX);
                let (partition, offset) = (asked.partition, asked.offset);
                record_task_id(subscription, replay, topic, partition, offset, published)
            }
        };
        let Some(explained) = self.explain(id, None, None).await? else {
            return Ok(None);
        };
        Ok(Some((id, explained.says, explained.task.status)))
    }
}

/// The place before an offset.
fn before(offset: Offset) -> Option<Offset> {
    if let Some(minor) = offset.minor.checked_sub(1) {
        return Some(Offset { minor, ..offset });
    }
    let major = offset.major.checked_sub(1)?;
    Some(Offset {
        major,
        minor: u64::MAX,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_begins_after_the_place_before_a_record() {
        let offset = |major, minor| Offset { major, minor };
        assert_eq!(before(offset(5, 1)), Some(offset(5, 0)));
        assert_eq!(before(offset(5, 0)), Some(offset(4, u64::MAX)));
        assert_eq!(before(offset(0, 0)), None);
    }
}
