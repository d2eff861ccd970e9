//! Acts of operators, as the service `Operator` sends them.

use super::{pb, time::timestamp};
use crate::model::Act;

impl From<Act> for pb::Act {
    fn from(act: Act) -> Self {
        let at = Some(timestamp(act.at_unix_ms()));
        Self { id: act.id.to_string(), at, who: act.who, what: act.what, on: act.target }
    }
}
