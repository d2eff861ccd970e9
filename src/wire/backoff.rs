//! The backoff of a task, in requests and in the body in Redis.

use bytes::{BufMut, BytesMut};
use prost::Message;

use super::{
    pb,
    time::{duration, read_duration},
};
use crate::model::{Backoff, BackoffKind, NewBackoff};

/// Reads the backoff of a task to insert.
pub(super) fn read(backoff: pb::Backoff) -> Result<NewBackoff, String> {
    let kind = match pb::BackoffKind::try_from(backoff.kind) {
        Ok(pb::BackoffKind::Unspecified) => BackoffKind::Queue,
        Ok(pb::BackoffKind::Constant) => BackoffKind::Constant,
        Ok(pb::BackoffKind::Linear) => BackoffKind::Linear,
        Ok(pb::BackoffKind::Exponential) => BackoffKind::Exponential,
        Err(_) => {
            return Err(format!(
                "backoff.kind {} is unknown; expected CONSTANT, LINEAR or EXPONENTIAL",
                backoff.kind
            ));
        }
    };
    let time = |what: &str, wait: Option<prost_types::Duration>| {
        wait.map(|wait| read_duration(&format!("backoff.{what}"), wait))
            .transpose()
    };
    Ok(NewBackoff {
        kind,
        initial: time("initial", backoff.initial)?,
        maximum: time("maximum", backoff.maximum)?,
        jitter: backoff.jitter,
        give_up_after: time("give_up_after", backoff.give_up_after)?,
    })
}

impl From<NewBackoff> for pb::Backoff {
    fn from(backoff: NewBackoff) -> Self {
        let kind = match backoff.kind {
            BackoffKind::Queue => pb::BackoffKind::Unspecified,
            BackoffKind::Constant => pb::BackoffKind::Constant,
            BackoffKind::Linear => pb::BackoffKind::Linear,
            BackoffKind::Exponential => pb::BackoffKind::Exponential,
        };
        Self {
            kind: kind.into(),
            initial: backoff.initial.and_then(duration),
            maximum: backoff.maximum.and_then(duration),
            jitter: backoff.jitter,
            give_up_after: backoff.give_up_after.and_then(duration),
        }
    }
}

/// Encodes a body with its backoff and deadline in front of the other fields, where scripts and
/// claims look for them. Most tasks have neither.
///
/// The time limit of the backoff counts from the time at which the task may first be claimed.
pub(super) fn put_before(
    body: &pb::TaskBody,
    backoff: Option<Backoff>,
    first_due_unix_ms: i64,
    deadline_unix_ms: i64,
) -> Vec<u8> {
    if backoff.is_none() && deadline_unix_ms == 0 {
        return body.encode_to_vec();
    }
    let packed = backoff.map(|backoff| {
        backoff
            .packed(backoff.gives_up_unix_ms(first_due_unix_ms))
            .to_vec()
    });
    let first = pb::TaskBody {
        backoff: packed.unwrap_or_default().into(),
        deadline_unix_ms,
        ..Default::default()
    };
    let mut bytes = BytesMut::with_capacity(first.encoded_len() + body.encoded_len());
    bytes.put_slice(&first.encode_to_vec());
    bytes.put_slice(&body.encode_to_vec());
    bytes.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_without_a_backoff_has_no_byte_more() {
        let body = pb::TaskBody {
            key: "k".into(),
            replicas: 1,
            ..Default::default()
        };
        assert_eq!(put_before(&body, None, 1_000, 0), body.encode_to_vec());
    }

    #[test]
    fn the_scripts_find_a_backoff_before_everything_else() {
        let kind = BackoffKind::Linear;
        let give_up_after_ms = 3_000;
        let backoff = Backoff {
            kind,
            initial_ms: 1_000,
            maximum_ms: 2_000,
            jitter_percent: 50,
            give_up_after_ms,
        };
        let body = pb::TaskBody {
            key: "k".into(),
            replicas: 1,
            ..Default::default()
        };
        let bytes = put_before(&body, Some(backoff), 1_000, 0);
        let expected: [&[u8]; 6] = [
            &[0x7a, 18, 2],
            &[0, 0, 3, 232],
            &[0, 0, 7, 208],
            &[50],
            &4_000_u64.to_be_bytes(),
            &body.encode_to_vec(),
        ];
        assert_eq!(bytes, expected.concat());
        let read = pb::TaskBody::decode(&bytes[..]).unwrap();
        assert_eq!(
            (&read.key, read.replicas, read.backoff.len()),
            (&body.key, 1, 18)
        );
        let new = NewBackoff::from(backoff);
        assert_eq!(super::read(new.into()), Ok(new));
        let wrong = super::read(pb::Backoff {
            kind: 9,
            ..Default::default()
        })
        .unwrap_err();
        assert_eq!(
            wrong,
            "backoff.kind 9 is unknown; expected CONSTANT, LINEAR or EXPONENTIAL"
        );
    }
}
