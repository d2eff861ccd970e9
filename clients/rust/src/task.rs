//! A task in the hands of a worker.

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

/// A task that this worker has a lease on, with its payload as `P`.
#[derive(Clone, Debug)]
pub struct Task<P = Bytes> {
    /// The payload, as the insert gave it.
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
    /// `Err`: the payload is of another kind.
    pub(crate) fn new(info: Arc<TaskInfo>, payload: Bytes) -> Result<Self, String> {
        Ok(Self {
            payload: P::from_payload(payload)?,
            info,
        })
    }
}

impl TaskInfo {
    /// The leased task, and its payload.
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

    /// taskd's name for the task.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The queue of the task.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// The key of the task, with marks in place of what is not UTF-8.
    pub fn key(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.key)
    }

    /// The key of the task, byte for byte.
    pub fn key_bytes(&self) -> &Bytes {
        &self.key
    }

    /// The headers that the insert gave.
    pub fn headers(&self) -> &HashMap<String, String> {
        &self.headers
    }

    /// The W3C trace context for the spans of the worker.
    pub fn traceparent(&self) -> &str {
        &self.traceparent
    }

    /// 1 for the first attempt.
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

    /// True if nobody waits for this work any more: an operator cancelled the task, its lease is
    /// lost, it took too long, or the worker stops. The handler is dropped then; a thread that it
    /// started asks here.
    pub fn is_cancelled(&self) -> bool {
        *self.is_cancelled.borrow()
    }

    /// Waits until [`Self::is_cancelled`]: for tasks of tokio that the handler started.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut is_cancelled = self.is_cancelled.subscribe();
        async move {
            if is_cancelled
                .wait_for(|is_cancelled| *is_cancelled)
                .await
                .is_err()
            {
                // The handler has ended by itself.
                pending().await
            }
        }
    }
}

/// Says that a task is cancelled, if its handler is dropped before its end.
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

/// A payload in the form that a handler takes. A task whose payload has another form is rejected
/// for good.
pub trait FromPayload: Sized + Send + 'static {
    /// Reads it; the error says what is wrong.
    fn from_payload(payload: Bytes) -> Result<Self, String>;
}

impl FromPayload for Bytes {
    fn from_payload(payload: Bytes) -> Result<Self, String> {
        Ok(payload)
    }
}

/// The payload does not matter.
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

/// `None` for a task without payload.
impl<T: FromPayload> FromPayload for Option<T> {
    fn from_payload(payload: Bytes) -> Result<Self, String> {
        if payload.is_empty() {
            return Ok(None);
        }
        T::from_payload(payload).map(Some)
    }
}

/// A payload in JSON, read by serde.
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
