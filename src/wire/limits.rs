//! Limit keys: converts messages to and from `model`.

use super::{
    pb,
    time::{read_duration, timestamp},
};
use crate::model::{LimitKeyPage, LimitKeyPages, LimitKeyView, OwnLimitsView, SetLimits};

impl From<pb::ListLimitsRequest> for LimitKeyPages {
    fn from(request: pb::ListLimitsRequest) -> Self {
        let pb::ListLimitsRequest {
            queue,
            state,
            limit,
            cursor,
        } = request;
        Self {
            queue,
            state,
            limit,
            cursor,
        }
    }
}

impl TryFrom<pb::SetLimitRequest> for SetLimits {
    type Error = String;

    fn try_from(request: pb::SetLimitRequest) -> Result<Self, String> {
        let pb::SetLimitRequest {
            queue,
            limit_key,
            at_a_time,
            pace,
            burst,
            hold,
        } = request;
        let hold = hold.map(|hold| read_duration("hold", hold));
        Ok(Self {
            queue,
            limit_key,
            at_a_time,
            pace,
            burst,
            hold: hold.transpose()?,
        })
    }
}

impl From<LimitKeyView> for pb::LimitKey {
    fn from(view: LimitKeyView) -> Self {
        Self {
            queue: view.queue.as_str().to_owned(),
            limit_key: view.limit_key,
            running: view.running,
            waiting: view.waiting,
            at_a_time: view.at_a_time,
            pace_ms: view.pace_ms,
            burst: view.burst,
            next_start_at: view.next_start_unix_ms.map(timestamp),
            held_until: view.held_until_unix_ms.map(timestamp),
            own: view.own.map(Into::into),
        }
    }
}

impl From<OwnLimitsView> for pb::OwnLimits {
    fn from(own: OwnLimitsView) -> Self {
        Self {
            at_a_time: own.at_a_time,
            pace: own.pace.map(|pace| pace.to_string()).unwrap_or_default(),
            burst: own.burst,
            hold_until: own.hold_until_unix_ms.map(timestamp),
            at: Some(timestamp(own.at_unix_ms)),
            who: own.who,
        }
    }
}

impl From<LimitKeyPage> for pb::ListLimitsResponse {
    fn from(page: LimitKeyPage) -> Self {
        Self {
            limits: page.limits.into_iter().map(Into::into).collect(),
            cursor: page.cursor.unwrap_or_default(),
        }
    }
}
