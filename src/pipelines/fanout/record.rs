//! The records of `pipeline`.

use prost::Message as _;

use crate::{
    bus::Message,
    model::{MAX_REPLICAS, QueueName, TaskId},
    wire::pb,
};

/// Decodes a record of `pipeline`, or says why no script could enqueue it.
pub(super) fn decode(message: &Message) -> Result<(TaskId, QueueName, pb::PipelineRecord), String> {
    let record = pb::PipelineRecord::decode(message.value.clone()).map_err(|e| e.to_string())?;
    let id = TaskId::from_slice(&record.id).ok_or("the id has not 16 bytes")?;
    let queue = QueueName::new(&record.queue).map_err(|e| e.to_string())?;
    // This process's settings may be narrower than those under which the task was stored: the widest bounds count.
    if record.replicas == 0 || record.replicas > MAX_REPLICAS {
        return Err(format!("replicas is {}; must be 1 to {MAX_REPLICAS}", record.replicas));
    }
    // The scripts make a key of the priority.
    if !(1..=3).contains(&record.priority) {
        return Err(format!("priority is {}; must be 1 to 3", record.priority));
    }
    if record.max_attempts == 0 || record.lease_ms == 0 {
        return Err(format!(
            "max_attempts is {}, lease_ms {}; must be 1 or more",
            record.max_attempts, record.lease_ms
        ));
    }
    Ok((id, queue, record))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Offset;

    #[test]
    fn what_no_script_can_enqueue_is_poison() {
        let good = || pb::PipelineRecord {
            id: vec![7; 16].into(),
            queue: "q".into(),
            replicas: 1,
            priority: 3,
            max_attempts: 1,
            lease_ms: 1,
            ..Default::default()
        };
        let decode = |record: pb::PipelineRecord| {
            let (offset, value) = (Offset { major: 1, minor: 0 }, record.encode_to_vec().into());
            decode(&Message { partition: 0, offset, value }).map(drop)
        };
        decode(good()).unwrap();
        let cases = [
            (pb::PipelineRecord { id: vec![7; 15].into(), ..good() }, "16 bytes"),
            (pb::PipelineRecord { queue: "a{b".into(), ..good() }, "contains '{'"),
            (pb::PipelineRecord { replicas: 0, ..good() }, "replicas is 0"),
            (pb::PipelineRecord { replicas: 10_001, ..good() }, "replicas is 10001; must be 1 to 10000"),
            (pb::PipelineRecord { priority: 0, ..good() }, "priority is 0; must be 1 to 3"),
            (pb::PipelineRecord { priority: 4, ..good() }, "priority is 4"),
            (pb::PipelineRecord { max_attempts: 0, ..good() }, "max_attempts is 0"),
            (pb::PipelineRecord { lease_ms: 0, ..good() }, "lease_ms 0"),
        ];
        for (record, want) in cases {
            let error = decode(record).unwrap_err();
            assert!(error.contains(want), "{error:?} should say {want:?}");
        }
    }
}
