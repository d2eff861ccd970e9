//! Requests about limit keys.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;

use super::{Unread, object, query, text::Time};
use crate::model;

/// Own limits of a limit key. They replace those that it had; what is absent is as the queue's.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "an object with at_a_time, pace, burst or hold"
)]
pub(in crate::ingress) struct SetLimits {
    /// 0 to 1,000; 0: nothing starts.
    at_a_time: Option<u32>,
    /// Starts within a time: `10/1m`.
    pace: String,
    /// Starts that may come at once after a pause.
    burst: Option<u32>,
    /// Nothing starts for this long; `0s` ends a hold.
    hold: Option<Time>,
}

pub(in crate::ingress) fn set(
    queue: &str,
    limit_key: &str,
    body: &Bytes,
) -> Result<model::SetLimits, Unread> {
    let SetLimits {
        at_a_time,
        pace,
        burst,
        hold,
    } = object(body)?;
    Ok(model::SetLimits {
        queue: queue.to_owned(),
        limit_key: limit_key.to_owned(),
        at_a_time,
        pace,
        burst,
        hold: hold.map(|hold| hold.0),
    })
}

/// Reads which limit keys to list.
pub(in crate::ingress) fn pages(queue: &str, text: &str) -> Result<model::LimitKeyPages, Unread> {
    let mut pages = model::LimitKeyPages {
        queue: queue.to_owned(),
        state: String::new(),
        limit: 0,
        cursor: String::new(),
    };
    for (name, value) in query::parameters(text).map_err(Unread::Invalid)? {
        match &*name {
            "state" => pages.state = value,
            "cursor" => pages.cursor = value,
            "limit" => {
                let not_a_number = || Unread::Invalid(query::not_a_number(&name, &value));
                pages.limit = value.parse().map_err(|_| not_a_number())?;
            }
            // The route has refused all other parameters.
            _ => {}
        }
    }
    Ok(pages)
}
