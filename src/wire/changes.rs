//! Changes of live work: messages to `model`.

use super::{pb, time::read_duration};
use crate::model::{Priority, RequeueTasks, Update};

impl TryFrom<pb::ChangeTasksRequest> for Update {
    type Error = String;

    fn try_from(request: pb::ChangeTasksRequest) -> Result<Self, String> {
        let priority = match pb::Priority::try_from(request.priority) {
            Ok(pb::Priority::Unspecified) => None,
            Ok(priority) => Some(Priority::from_number(i32::from(priority).into())),
            Err(_) => return Err(format!("priority {} is unknown", request.priority)),
        };
        Ok(Self { priority, replicas: Some(request.replicas).filter(|replicas| *replicas > 0) })
    }
}

impl TryFrom<pb::RequeueTasksRequest> for RequeueTasks {
    type Error = String;

    fn try_from(request: pb::RequeueTasksRequest) -> Result<Self, String> {
        let reserved_for = request.reserved_for.map(|time| read_duration("reserved_for", time)).transpose()?;
        Self::new(&request.to, &request.away_from, reserved_for)
    }
}
