//! Lists of tasks: converts messages to and from `model`.

use super::{pb, task_status, time::unix_ms};
use crate::model::{QueueName, TaskFilter, TaskList, TaskPages, WorkerName};

impl TryFrom<pb::TaskFilter> for TaskFilter {
    type Error = String;

    fn try_from(filter: pb::TaskFilter) -> Result<Self, String> {
        let pb::TaskFilter {
            queue,
            statuses,
            key,
            key_prefix,
            headers,
            worker,
            since,
            until,
            reason,
            as_of,
            tree,
        } = filter;
        let queue = (!queue.is_empty())
            .then(|| QueueName::new(&queue))
            .transpose();
        let worker = (!worker.is_empty())
            .then(|| WorkerName::new(&worker))
            .transpose();
        let tree = (!tree.is_empty())
            .then(|| tree.parse())
            .transpose()
            .map_err(|_| "tree is not the id of a tree".to_owned())?;
        let mut distinct = Vec::new();
        for number in statuses {
            let status =
                task_status(number).ok_or_else(|| format!("status {number} is unknown"))?;
            status.add_to(&mut distinct);
        }
        Ok(Self {
            queue: queue.map_err(|error| error.to_string())?,
            statuses: distinct,
            key: (!key.is_empty()).then_some(key),
            key_prefix,
            headers: headers.into_iter().collect(),
            worker: worker.map_err(|error| error.to_string())?,
            since_unix_ms: since.map(unix_ms),
            until_unix_ms: until.map(unix_ms),
            reason,
            as_of_unix_ms: as_of.map(unix_ms),
            tree,
        })
    }
}

impl TryFrom<pb::ListTasksRequest> for TaskPages {
    type Error = String;

    fn try_from(request: pb::ListTasksRequest) -> Result<Self, String> {
        let pb::ListTasksRequest {
            filter,
            limit,
            cursor,
        } = request;
        let after = if cursor.is_empty() {
            None
        } else {
            Some(cursor.parse()?)
        };
        Ok(Self {
            filter: filter.unwrap_or_default().try_into()?,
            limit,
            after,
        })
    }
}

impl From<TaskList> for pb::ListTasksResponse {
    fn from(list: TaskList) -> Self {
        Self {
            tasks: list.tasks.into_iter().map(Into::into).collect(),
            cursor: list.next.map(|next| next.to_string()).unwrap_or_default(),
            looked_at: list.looked_at,
            partial: list.partial,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::TaskStatus;

    #[test]
    fn a_filter_is_read_and_a_wrong_one_is_named() {
        let filter = pb::TaskFilter {
            queue: "q".into(),
            statuses: [pb::TaskStatus::Dead.into(), pb::TaskStatus::Queued.into()].repeat(2),
            key: "k".into(),
            ..Default::default()
        };
        let read = TaskFilter::try_from(filter.clone()).unwrap();
        assert_eq!(
            (read.statuses, read.key),
            (vec![TaskStatus::Dead, TaskStatus::Queued], Some("k".into()))
        );
        let wrong = |filter: pb::TaskFilter| TaskFilter::try_from(filter).unwrap_err();
        assert_eq!(
            wrong(pb::TaskFilter {
                statuses: vec![9],
                ..filter.clone()
            }),
            "status 9 is unknown"
        );
        assert!(
            wrong(pb::TaskFilter {
                queue: "a b".into(),
                ..filter
            })
            .contains("contains ' '")
        );
        let cursor = pb::ListTasksRequest {
            cursor: "x".into(),
            ..Default::default()
        };
        assert_eq!(
            TaskPages::try_from(cursor).unwrap_err(),
            "the cursor is not one of an earlier answer"
        );
    }
}
