//! The task of a step.

use std::collections::HashMap;

use bytes::Bytes;

use crate::{
    model::{Encoding, ExecutionId, HTTP_QUEUE, LimitBy, NewTask, TaskId, validate},
    pipelines::{context::Context, publishing},
    store::NewRow,
    workflow::machine::{Step, StepKey},
};

/// The headers of the task of a step.
const OF_EXECUTION: &str = "taskd-execution";
const OF_PATH: &str = "taskd-path";
/// Names the work: a task that is delivered again has the same key, a retry of the workflow another.
pub(super) const OF_KEY: &str = "taskd-key";
/// The most bytes of these headers.
const HEADERS_BYTES: usize = 64 << 10;

/// The id of the task of a step that was issued at this time.
pub(super) fn task_id(execution: ExecutionId, key: &StepKey, at_unix_ms: i64) -> TaskId {
    let StepKey {
        path,
        round,
        attempt,
    } = key;
    let parts: [&[u8]; 5] = [
        b"step",
        execution.as_bytes(),
        path.as_bytes(),
        &round.to_be_bytes(),
        &attempt.to_be_bytes(),
    ];
    TaskId::derived_from(&parts, at_unix_ms)
}

/// Makes the row of a step, or says why its task is invalid.
pub(super) fn row(
    context: &Context,
    execution: ExecutionId,
    traceparent: &str,
    id: TaskId,
    step: Step,
    now_unix_ms: i64,
) -> Result<NewRow, String> {
    let Step {
        key,
        queue,
        options,
        payload,
    } = step;
    let settings = &context.settings;
    let payload = Bytes::from(payload.to_string());
    // What queues of users have does not fit requests.
    let is_call = queue.as_str() == HTTP_QUEUE;
    if !is_call
        && let Some(schema) = settings.payload_schema(queue.as_str())
        && let Some(misfit) = schema.misfit(&payload, Encoding::Json)
    {
        return Err(misfit.says);
    }
    let step = format!("{execution}/{key}");
    let headers = HashMap::from([
        (OF_EXECUTION.to_owned(), execution.to_string()),
        (OF_PATH.to_owned(), key.path),
        (OF_KEY.to_owned(), step.clone()),
    ]);
    let task = NewTask {
        id: Some(id),
        queue: queue.as_str().to_owned(),
        key: step.into(),
        payload,
        payload_encoding: Encoding::Json,
        replicas: if is_call { Some(1) } else { options.replicas },
        priority: options.priority,
        finish_within: options.finish_within,
        lease_duration: options.lease,
        max_attempts: options.max_attempts,
        backoff: options.backoff,
        headers,
        traceparent: traceparent.to_owned(),
        ..NewTask::default()
    };
    let mut rules = settings.task_rules(queue.as_str()).for_step();
    // The path of a task that is deep in others is long, and stands in two of them.
    rules.max_headers_bytes = rules.max_headers_bytes.max(HEADERS_BYTES);
    if is_call {
        rules.limit_by = LimitBy::Nothing;
    }
    let row = validate::task_row(task, id, &rules, context.partitions(), now_unix_ms)?;
    // A step is never refused for the number of queues, but its queue counts.
    let most = settings.discovery.max_queues;
    let occupancy = &context.occupancy;
    if occupancy
        .lets_in_discovered(&queue, most, &settings.queues)
        .is_err()
    {
        tracing::debug!("a step goes to queue {queue}, which is new and beyond max_queues");
    }
    Ok(publishing::new_row(row, &context.gates, settings))
}
