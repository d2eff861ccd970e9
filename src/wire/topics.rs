//! Topics: where a reader begins, and messages converted to and from `model`.

use std::time::Duration;

use super::{
    pb,
    time::{from_rfc_3339, read_duration, timestamp},
};
use crate::model::{
    ECHO, NewRecord, PublishStatus, Published, PutTopic, ReadFrom, ReadTopic, TopicPage,
    TopicRecord, TopicView, shorten,
};

impl TryFrom<pb::PutTopicRequest> for PutTopic {
    type Error = String;

    fn try_from(request: pb::PutTopicRequest) -> Result<Self, String> {
        let age = request
            .retention_age
            .map(|age| read_duration("retention_age", age));
        Ok(Self {
            partitions: request.partitions,
            retention_age: age.transpose()?,
            retention_records: request.retention_records,
            retention_bytes: request.retention_bytes,
            attached: request.attached,
        })
    }
}

impl From<TopicView> for pb::Topic {
    fn from(view: TopicView) -> Self {
        let text = |offset: Option<crate::model::Offset>| {
            offset.map(|offset| offset.to_string()).unwrap_or_default()
        };
        let offsets = view.offsets.into_iter().map(|of| pb::PartitionOffsets {
            partition: of.partition,
            first: text(of.first),
            last: text(of.last),
        });
        Self {
            name: view.name,
            partitions: view.partitions,
            retention_age: view.retention_age.try_into().ok(),
            retention_records: view.retention_records,
            retention_bytes: view.retention_bytes,
            created_at: Some(timestamp(view.created_at)),
            offsets: offsets.collect(),
            attached: view.attached,
        }
    }
}

impl From<pb::NewRecord> for NewRecord {
    fn from(record: pb::NewRecord) -> Self {
        let attributes = record.attributes.into_iter();
        let attributes = attributes.map(|attribute| (attribute.name, attribute.value));
        Self::of_log(record.value, record.key, attributes.collect(), record.id)
    }
}

impl From<Published> for pb::PublishResult {
    fn from(published: Published) -> Self {
        let status = match published.status {
            PublishStatus::Stored => pb::PublishStatus::Stored,
            PublishStatus::Rejected => pb::PublishStatus::Rejected,
            PublishStatus::TryLater => pb::PublishStatus::TryLater,
        };
        Self {
            status: status.into(),
            partition: published.partition.unwrap_or(0),
            offset: published
                .offset
                .map(|offset| offset.to_string())
                .unwrap_or_default(),
            error: published.error,
        }
    }
}

impl TryFrom<pb::ReadTopicRequest> for ReadTopic {
    type Error = String;

    fn try_from(request: pb::ReadTopicRequest) -> Result<Self, String> {
        let wait = request.wait.map(|wait| read_duration("wait", wait));
        Ok(Self {
            from: read_from(&request.from)?,
            partition: request.partition,
            limit: request.limit,
            wait: wait.transpose()?.unwrap_or(Duration::ZERO),
        })
    }
}

impl TryFrom<pb::FollowTopicRequest> for ReadTopic {
    type Error = String;

    fn try_from(request: pb::FollowTopicRequest) -> Result<Self, String> {
        Ok(Self {
            from: read_from(&request.from)?,
            partition: request.partition,
            limit: 0,
            wait: Duration::ZERO,
        })
    }
}

impl From<TopicRecord> for pb::TopicRecord {
    fn from(read: TopicRecord) -> Self {
        let attributes = read.record.marked_attributes().into_iter();
        Self {
            partition: read.partition,
            offset: read.offset.to_string(),
            published_at: Some(timestamp(read.published_unix_ms)),
            value: read.record.value,
            key: read.record.key,
            attributes: attributes
                .map(|(name, value)| pb::Attribute { name, value })
                .collect(),
            id: read.record.id,
        }
    }
}

impl From<TopicPage> for pb::ReadTopicResponse {
    fn from(page: TopicPage) -> Self {
        Self {
            records: page.records.into_iter().map(Into::into).collect(),
            next: page.next,
        }
    }
}

/// Reads the place where a reader of a topic begins.
pub fn read_from(text: &str) -> Result<ReadFrom, String> {
    read_place("from", text)
}

/// Reads a place in a topic, which the field `what` gives.
pub fn read_place(what: &str, text: &str) -> Result<ReadFrom, String> {
    let wrong = || {
        let text = shorten(text, ECHO);
        format!(
            "{what} {text:?} is no place; write 0 (the first record), $ (the next), an offset, \"next\" of an answer, \
             a time (2030-01-31T12:00:00Z) or -1h"
        )
    };
    match text {
        "" | "0" => return Ok(ReadFrom::First),
        "$" => return Ok(ReadFrom::Next),
        _ => {}
    }
    if let Some(ago) = text.strip_prefix('-') {
        let ago = humantime::parse_duration(ago).map_err(|_| wrong())?;
        return Ok(ReadFrom::Ago(ago));
    }
    if let Some(at) = from_rfc_3339(text) {
        return Ok(ReadFrom::At(at));
    }
    if let Ok(offset) = text.parse() {
        return Ok(ReadFrom::After(offset));
    }
    let mut each = Vec::new();
    for part in text.split(',') {
        let (partition, offset) = part.split_once(':').ok_or_else(wrong)?;
        let partition = partition.parse().map_err(|_| wrong())?;
        let offset = offset.parse().map_err(|_| wrong())?;
        each.push((partition, offset));
    }
    Ok(ReadFrom::AfterEach(each))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Offset;

    #[test]
    fn a_text_that_was_read_can_be_published_again() {
        let record = NewRecord {
            value: "7".into(),
            attributes: vec![("a".to_owned(), "b".to_owned())],
            is_text: true,
            ..NewRecord::default()
        };
        let read = pb::TopicRecord::from(TopicRecord {
            partition: 0,
            offset: Offset::default(),
            published_unix_ms: 0,
            record: record.clone(),
        });
        let again = NewRecord::from(pb::NewRecord {
            value: read.value,
            key: read.key,
            attributes: read.attributes,
            id: read.id,
        });
        assert_eq!(again.mistake(), None);
        assert_eq!(again, record);
    }

    #[test]
    fn a_place_is_read_in_each_of_its_forms() {
        let offset = |major, minor| Offset { major, minor };
        let read = read_from;
        assert_eq!(read("0"), Ok(ReadFrom::First));
        assert_eq!(read("$"), Ok(ReadFrom::Next));
        assert_eq!(read("17-2"), Ok(ReadFrom::After(offset(17, 2))));
        assert_eq!(
            read("0:17-2,3:4-0"),
            Ok(ReadFrom::AfterEach(vec![
                (0, offset(17, 2)),
                (3, offset(4, 0))
            ]))
        );
        assert_eq!(read("1970-01-01T00:00:01Z"), Ok(ReadFrom::At(1000)));
        assert_eq!(read("-1h"), Ok(ReadFrom::Ago(Duration::from_secs(3600))));
        for wrong in ["x", "-x", "1:2:3", "0:"] {
            let said = read(wrong).unwrap_err();
            assert!(said.starts_with(&format!("from {wrong:?} is no place")));
        }
    }
}
