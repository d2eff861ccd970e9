//! Converts columns to the types of the model.

use bytes::Bytes;

use crate::model::{
    Backoff, Encoding, ExecutionId, KeyHash, OnDead, Priority, QueueName, Sequence, StoredStatus,
    TaskId, TaskRow,
};
use crate::store::{Error, Result, TaskDetail};

/// The columns that [`TaskColumns`] reads.
pub(super) const TASK_COLUMNS: &str = "id, key_hash, tasks.queue, shard, task_key, payload, payload_encoding, \
     replicas, tasks.priority, max_attempts, lease_ms, not_before_ms, headers, traceparent, created_ms, \
     backoff, COALESCE(deadline_ms, 0) AS deadline, COALESCE(limit_key, '') AS limit_key, \
     COALESCE(sequence, '') AS sequence, COALESCE(on_dead, 0) AS on_dead";

/// Declares a struct that can be read from rows of both databases: a field from the column with its
/// name, a `#[flatten]` field from the whole row. sqlx's derive would compile sqlx a second time.
macro_rules! columns {
    (
        $(#[$attribute:meta])*
        $vis:vis struct $columns:ident {
            $(#[flatten] $part_vis:vis $part:ident: $of:ty,)?
            $($field_vis:vis $field:ident: $type:ty,)+
        }
    ) => {
        $(#[$attribute])*
        $vis struct $columns {
            $($part_vis $part: $of,)?
            $($field_vis $field: $type,)+
        }

        impl<'r> sqlx::FromRow<'r, sqlx::mysql::MySqlRow> for $columns {
            fn from_row(row: &'r sqlx::mysql::MySqlRow) -> sqlx::Result<Self> {
                Ok(Self {
                    $($part: sqlx::FromRow::from_row(row)?,)?
                    $($field: sqlx::Row::try_get(row, stringify!($field))?,)+
                })
            }
        }

        impl $crate::store::sql::FromRow for $columns {
            fn names(names: &mut Vec<&'static str>) {
                $(<$of as $crate::store::sql::FromRow>::names(names);)?
                names.extend([$(stringify!($field)),+]);
            }

            fn from_row(row: &rusqlite::Row<'_>, places: &mut std::slice::Iter<'_, usize>) -> rusqlite::Result<Self> {
                Ok(Self {
                    $($part: $crate::store::sql::FromRow::from_row(row, places)?,)?
                    $($field: $crate::store::sql::columns::next(row, places)?,)+
                })
            }
        }
    };
}
pub(super) use columns;

columns! {
    pub struct TaskColumns {
        id: Vec<u8>,
        key_hash: Vec<u8>,
        queue: String,
        shard: i64,
        task_key: Vec<u8>,
        payload: Vec<u8>,
        payload_encoding: i64,
        replicas: i64,
        priority: i64,
        max_attempts: i64,
        lease_ms: i64,
        not_before_ms: i64,
        headers: String,
        traceparent: String,
        created_ms: i64,
        backoff: Vec<u8>,
        deadline: i64,
        limit_key: String,
        sequence: String,
        on_dead: i64,
    }
}

impl TryFrom<TaskColumns> for TaskRow {
    type Error = Error;

    fn try_from(columns: TaskColumns) -> Result<Self> {
        Ok(Self {
            id: task_id(&columns.id)?,
            queue: queue_name(&columns.queue)?,
            partition: number(columns.shard)?,
            key: columns.task_key.into(),
            key_hash: key_hash(&columns.key_hash)?,
            payload: Bytes::from(columns.payload),
            payload_encoding: Encoding::from_number(columns.payload_encoding),
            replicas: number(columns.replicas)?,
            priority: Priority::from_number(columns.priority),
            max_attempts: number(columns.max_attempts)?,
            lease_ms: number(columns.lease_ms)?,
            not_before_unix_ms: columns.not_before_ms,
            headers: serde_json::from_str(&columns.headers)
                .map_err(|e| corrupt(format!("headers: {e}")))?,
            traceparent: columns.traceparent,
            created_unix_ms: columns.created_ms,
            backoff: match &columns.backoff[..] {
                [] => None,
                bytes => Some(Backoff::unpacked(bytes).map_err(corrupt)?),
            },
            deadline_unix_ms: columns.deadline,
            limit_key: columns.limit_key,
            sequence: sequence(columns.sequence, columns.on_dead)?,
            idempotency: None,
            tree: None,
            execution: None,
        })
    }
}

columns! {
    pub(super) struct TaskDetailColumns {
        #[flatten]
        task: TaskColumns,
        status: i64,
        completed: i64,
        attempts: i64,
        reason: String,
        epoch: i64,
        updated_ms: i64,
        unpublished: i64,
        in_tree: Option<Vec<u8>>,
    }
}

impl TryFrom<TaskDetailColumns> for TaskDetail {
    type Error = Error;

    fn try_from(columns: TaskDetailColumns) -> Result<Self> {
        Ok(Self {
            task: columns.task.try_into()?,
            status: status(columns.status)?,
            completed: number(columns.completed)?,
            attempts: number(columns.attempts)?,
            reason: columns.reason,
            epoch: number(columns.epoch)?,
            updated_unix_ms: columns.updated_ms,
            unpublished: columns.unpublished != 0,
            tree: tree_of(columns.in_tree.as_deref())?,
        })
    }
}

/// The sequence of a task with these columns. An empty name means that it has none.
pub(super) fn sequence(name: String, on_dead_number: i64) -> Result<Option<Sequence>> {
    if name.is_empty() {
        return Ok(None);
    }
    let on_dead = on_dead(on_dead_number)?;
    Ok(Some(Sequence { name, on_dead }))
}

pub(super) fn on_dead(number: i64) -> Result<OnDead> {
    [OnDead::Next, OnDead::Hold]
        .into_iter()
        .find(|known| *known as i64 == number)
        .ok_or_else(|| corrupt(format!("on_dead {number}")))
}

/// The text form of headers in the database.
pub(super) fn headers_text(headers: &[(String, String)]) -> String {
    serde_json::to_string(headers).expect("pairs of strings are always JSON")
}

pub(super) fn task_id(bytes: &[u8]) -> Result<TaskId> {
    TaskId::from_slice(bytes).ok_or_else(|| corrupt(format!("a task id of {} bytes", bytes.len())))
}

pub(super) fn execution_id(bytes: &[u8]) -> Result<ExecutionId> {
    ExecutionId::from_slice(bytes)
        .ok_or_else(|| corrupt(format!("the id of an execution of {} bytes", bytes.len())))
}

/// Reads rows that consist only of an id.
pub(super) fn task_ids(rows: Vec<(Vec<u8>,)>) -> Result<Vec<TaskId>> {
    rows.iter().map(|(id,)| task_id(id)).collect()
}

/// Reads the tree of a task. The column is NULL or empty if the task is in none, and may have a subtree
/// behind the tree.
pub(super) fn tree_of(column: Option<&[u8]>) -> Result<Option<TaskId>> {
    column
        .filter(|bytes| !bytes.is_empty())
        .map(|bytes| task_id(bytes.get(..16).unwrap_or(bytes)))
        .transpose()
}

pub(super) fn key_hash(bytes: &[u8]) -> Result<KeyHash> {
    let hash = bytes
        .try_into()
        .map_err(|_| corrupt(format!("a key hash of {} bytes", bytes.len())))?;
    Ok(KeyHash(hash))
}

pub(super) fn queue_name(text: &str) -> Result<QueueName> {
    QueueName::new(text).map_err(|e| corrupt(e.to_string()))
}

/// Reads a worker's name. It is stored as bytes, because databases compare text in different ways.
pub(super) fn worker_name(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|e| corrupt(format!("a worker's name: {e}")))
}

pub(super) fn status(number: i64) -> Result<StoredStatus> {
    StoredStatus::from_number(number).ok_or_else(|| corrupt(format!("status {number}")))
}

/// Reads a number that was stored from an unsigned one.
pub(super) fn number<T: TryFrom<i64>>(number: i64) -> Result<T> {
    T::try_from(number).map_err(|_| corrupt(format!("the number {number}")))
}

/// The error for data that taskd never stores.
pub(super) fn corrupt(what: impl Into<String>) -> Error {
    Error::Corrupt { what: what.into() }
}
