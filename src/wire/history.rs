//! Failed attempts on their way to SQL; and tasks with their history and operators' acts, as calls
//! return them.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use super::{pb, time::timestamp};
use crate::model::{
    Act, Attempt, AttemptState, FailedAttempt, LeaseNumber, TaskFile, TaskId, WorkerName,
};

/// Encodes a failed attempt.
pub fn failed_attempt(failure: FailedAttempt) -> Bytes {
    let FailedAttempt {
        id,
        worker,
        state,
        leased_unix_ms,
        at_unix_ms,
        attempt,
        lease,
        reason,
    } = failure;
    let failure = pb::FailedAttempt {
        task_id: Bytes::copy_from_slice(id.as_bytes()),
        worker,
        state: pb::AttemptState::from(state).into(),
        leased_unix_ms,
        at_unix_ms,
        attempt,
        generation: lease.generation,
        grant: lease.grant,
        reason,
    };
    failure.encode_to_vec().into()
}

/// Adds the time to an encoded attempt, by appending the field.
pub fn failure_with_time(failure: &Bytes, at_unix_ms: i64) -> Bytes {
    let tail = pb::FailedAttempt {
        at_unix_ms,
        ..Default::default()
    };
    let mut whole = BytesMut::with_capacity(failure.len() + tail.encoded_len());
    whole.put_slice(failure);
    whole.put_slice(&tail.encode_to_vec());
    whole.freeze()
}

/// Encodes an attempt as a field of a record of `task-results`. Such frames can be concatenated,
/// and are then a part of that record.
pub fn frame_failure(failure: Bytes) -> Vec<u8> {
    pb::EncodedReportBatch {
        failures: vec![failure],
        ..Default::default()
    }
    .encode_to_vec()
}

/// Reads a failed attempt. Returns `None` if a later version wrote it or it is damaged: a history
/// may have gaps.
pub(super) fn read_failure(failure: pb::FailedAttempt) -> Option<FailedAttempt> {
    let state = AttemptState::from_number(failure.state.into());
    let state =
        state.filter(|state| matches!(state, AttemptState::Rejected | AttemptState::Expired));
    let (Some(id), Some(state)) = (TaskId::from_slice(&failure.task_id), state) else {
        tracing::warn!(
            state = failure.state,
            "a history lacks an attempt that this version cannot read"
        );
        return None;
    };
    Some(FailedAttempt {
        id,
        worker: WorkerName::new(&failure.worker)
            .map_or_else(|_| String::new(), |name| name.as_str().to_owned()),
        state,
        leased_unix_ms: failure.leased_unix_ms,
        at_unix_ms: failure.at_unix_ms,
        attempt: failure.attempt,
        lease: LeaseNumber {
            generation: failure.generation,
            grant: failure.grant,
        },
        reason: FailedAttempt::cut(&failure.reason).to_owned(),
    })
}

impl From<AttemptState> for pb::AttemptState {
    fn from(state: AttemptState) -> Self {
        match state {
            AttemptState::Leased => Self::Leased,
            AttemptState::Completed => Self::Completed,
            AttemptState::Rejected => Self::Rejected,
            AttemptState::Expired => Self::Expired,
        }
    }
}

impl From<Attempt> for pb::TaskAttempt {
    fn from(one: Attempt) -> Self {
        let Attempt {
            worker,
            state,
            from_unix_ms,
            until_unix_ms,
            expires_unix_ms,
            attempt,
            reason,
            surplus,
        } = one;
        Self {
            worker,
            state: pb::AttemptState::from(state).into(),
            from: from_unix_ms.map(timestamp),
            until: until_unix_ms.map(timestamp),
            lease_expires_at: expires_unix_ms.map(timestamp),
            attempt,
            reason,
            surplus,
        }
    }
}

impl From<Act> for pb::TaskAct {
    fn from(act: Act) -> Self {
        Self {
            id: act.id.to_string(),
            at: Some(timestamp(act.at_unix_ms())),
            who: act.who,
            what: act.what,
        }
    }
}

impl From<Act> for pb::Act {
    fn from(act: Act) -> Self {
        let at = Some(timestamp(act.at_unix_ms()));
        Self {
            id: act.id.to_string(),
            at,
            who: act.who,
            what: act.what,
            on: act.target,
        }
    }
}

impl From<TaskFile> for pb::Task {
    fn from(file: TaskFile) -> Self {
        let TaskFile {
            task,
            payload,
            payload_encoding,
            headers,
            traceparent,
            backoff,
            history,
            acts,
            results,
        } = file;
        Self {
            payload,
            payload_encoding: pb::Encoding::from(payload_encoding).into(),
            headers,
            traceparent,
            backoff: backoff.map(Into::into),
            history: history.into_iter().map(Into::into).collect(),
            acts: acts.into_iter().map(Into::into).collect(),
            results,
            ..task.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_attempt_survives_its_frame_and_gets_its_time() {
        let failure = FailedAttempt {
            id: TaskId::new(),
            worker: "w".into(),
            state: AttemptState::Rejected,
            leased_unix_ms: 5,
            at_unix_ms: 0,
            attempt: 2,
            lease: LeaseNumber {
                generation: 3,
                grant: 4,
            },
            reason: "no luck".into(),
        };
        let frames = frame_failure(failed_attempt(failure.clone())).repeat(2);
        let pb::EncodedReportBatch {
            reports, failures, ..
        } = pb::EncodedReportBatch::decode(&frames[..]).unwrap();
        assert_eq!((reports.len(), failures.len()), (0, 2));
        let whole = pb::FailedAttempt::decode(failure_with_time(&failures[1], 9)).unwrap();
        assert_eq!(
            read_failure(whole.clone()),
            Some(FailedAttempt {
                at_unix_ms: 9,
                ..failure
            })
        );
        let wrong = [
            pb::FailedAttempt {
                state: 2,
                ..whole.clone()
            },
            pb::FailedAttempt {
                state: 9,
                ..whole.clone()
            },
            pb::FailedAttempt {
                task_id: "short".into(),
                ..whole
            },
        ];
        assert!(
            wrong
                .into_iter()
                .all(|failure| read_failure(failure).is_none())
        );
    }

    #[test]
    fn the_states_of_the_model_are_those_of_the_message() {
        for state in AttemptState::ALL {
            assert_eq!(pb::AttemptState::from(state) as i32, state as i32);
        }
    }
}
