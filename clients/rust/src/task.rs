//! A task that a worker holds.

use std::{
    borrow::Cow,
    collections::HashMap,
    future::{Future, pending},
    ops::Deref,
    sync::Arc,
};

use bytes::Bytes;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::pb::{self, Priority};

/// A task that this worker has a lease on. Its payload has the type `P`.
#[derive(Clone, Debug)]
pub struct Task<P = Bytes> {
    /// The payload as inserted.
    pub payload: P,
    info: Arc<TaskInfo>,
}

/// A leased task, apart from its payload.
#[derive(Clone, Debug)]
pub struct TaskInfo {
    id: String,
    queue: String,
    key: Bytes,
    headers: HashMap<String, String>,
    traceparent: String,
    attempt: u32,
    replicas: u32,
    priority: Priority,
    limit_key: String,
    pub(crate) lease_token: String,
    is_cancelled: watch::Sender<bool>,
}

impl<P> Deref for Task<P> {
    type Target = TaskInfo;

    fn deref(&self) -> &TaskInfo {
        &self.info
    }
}

impl<P: FromPayload> Task<P> {
    /// Fails if the payload cannot be read as a `P`.
    pub(crate) fn new(info: Arc<TaskInfo>, payload: Bytes) -> Result<Self, String> {
        Ok(Self {
            payload: P::from_payload(payload)?,
            info,
        })
    }
}

impl TaskInfo {
    /// Splits a leased task into its metadata and its payload.
    pub(crate) fn split(task: pb::LeasedTask) -> (Self, Bytes) {
        let priority = task.priority();
        let pb::LeasedTask {
            id,
            queue,
            key,
            payload,
            headers,
            traceparent,
            lease_token,
            attempt,
            replicas,
            limit_key,
            ..
        } = task;
        let is_cancelled = watch::Sender::new(false);
        (
            Self {
                id,
                queue,
                key,
                headers,
                traceparent,
                attempt,
                replicas,
                priority,
                limit_key,
                lease_token,
                is_cancelled,
            },
            payload,
        )
    }

    /// The id that taskd gave the task.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The queue of the task.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// The key of the task; invalid UTF-8 is replaced by `\u{FFFD}`.
    pub fn key(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.key)
    }

    /// The key of the task, byte for byte.
    pub fn key_bytes(&self) -> &Bytes {
        &self.key
    }

    /// The headers as inserted.
    pub fn headers(&self) -> &HashMap<String, String> {
        &self.headers
    }

    /// The W3C trace context that the worker's spans belong to.
    pub fn traceparent(&self) -> &str {
        &self.traceparent
    }

    /// The number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// How many distinct workers must complete the task.
    pub fn replicas(&self) -> u32 {
        self.replicas
    }

    /// Which tasks of the queue come first.
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// What the task shares its limits with, such as a host; empty if it has no limits.
    pub fn limit_key(&self) -> &str {
        &self.limit_key
    }

    /// True if the work is no longer needed: an operator cancelled the task, its lease is lost, it
    /// took too long, or the worker stops. The handler is dropped then; threads that it started can
    /// check this.
    pub fn is_cancelled(&self) -> bool {
        *self.is_cancelled.borrow()
    }

    /// Waits until [`Self::is_cancelled`], for tokio tasks that the handler started.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut is_cancelled = self.is_cancelled.subscribe();
        async move {
            if is_cancelled
                .wait_for(|is_cancelled| *is_cancelled)
                .await
                .is_err()
            {
                // The handler ended normally, so the task will never be cancelled.
                pending().await
            }
        }
    }
}

/// Marks the task as cancelled if its handler is dropped before it ends.
pub(crate) struct CancelOnDrop(Option<Arc<TaskInfo>>);

impl CancelOnDrop {
    pub(crate) fn new(info: Arc<TaskInfo>) -> Self {
        Self(Some(info))
    }

    pub(crate) fn ended(mut self) {
        self.0 = None;
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(info) = &self.0 {
            info.is_cancelled.send_replace(true);
        }
    }
}

/// A payload type that a handler accepts. If a task's payload cannot be read as this type, the task
/// is rejected for good.
pub trait FromPayload: Sized + Send + 'static {
    /// Parses a payload; the error says what is wrong.
    fn from_payload(payload: Bytes) -> Result<Self, String>;
}

impl FromPayload for Bytes {
    fn from_payload(payload: Bytes) -> Result<Self, String> {
        Ok(payload)
    }
}

/// Ignores the payload.
impl FromPayload for () {
    fn from_payload(_: Bytes) -> Result<Self, String> {
        Ok(())
    }
}

impl FromPayload for String {
    fn from_payload(payload: Bytes) -> Result<Self, String> {
        Self::from_utf8(payload.into()).map_err(|error| format!("the payload is no text: {error}"))
    }
}

/// `None` if the payload is empty.
impl<T: FromPayload> FromPayload for Option<T> {
    fn from_payload(payload: Bytes) -> Result<Self, String> {
        if payload.is_empty() {
            return Ok(None);
        }
        T::from_payload(payload).map(Some)
    }
}

/// A JSON payload, deserialized by serde.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned + Send + 'static> FromPayload for Json<T> {
    fn from_payload(payload: Bytes) -> Result<Self, String> {
        serde_json::from_slice(&payload)
            .map(Self)
            .map_err(|error| format!("the payload is not as expected: {error}"))
    }
}

impl<T> Deref for Json<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
