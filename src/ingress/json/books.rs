//! The books of the queues.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::{Unread, query, text::Instant};
use crate::model::{self, BooksState, QueueName, to_rfc_3339};

/// Reads the query: `queue=…`, or nothing.
pub(in crate::ingress) fn queue_of_query(text: &str) -> Result<String, Unread> {
    let parameters = query::parameters(text).map_err(Unread::Invalid)?;
    Ok(parameters
        .into_iter()
        .find(|(name, _)| name == "queue")
        .map(|(_, queue)| queue)
        .unwrap_or_default())
}

/// The tasks that came in and went out, and the place of the rest, by queue.
#[derive(JsonSchema, Serialize)]
pub(in crate::ingress) struct Books<'a> {
    #[schemars(with = "Instant")]
    at: String,
    /// Left out if the caller's token does not reach all queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    bus: Option<Bus>,
    rejected_elsewhere: u64,
    queues: Vec<QueueBooks<'a>>,
}

#[derive(JsonSchema, Serialize)]
#[schemars(rename = "BooksBus")]
struct Bus {
    pipeline: u64,
    task_results: u64,
}

#[derive(JsonSchema, Serialize)]
struct QueueBooks<'a> {
    #[schemars(with = "QueueName")]
    queue: &'a str,
    state: BooksState,
    #[serde(rename = "in")]
    came_in: In,
    out: Out,
    held: Held<'a>,
}

#[derive(JsonSchema, Serialize)]
#[schemars(rename = "BooksIn")]
struct In {
    stored: u64,
    duplicates: u64,
    rejected: u64,
}

#[derive(JsonSchema, Serialize)]
#[schemars(rename = "BooksOut")]
struct Out {
    completed: u64,
    dead: u64,
    cancelled: u64,
}

#[derive(JsonSchema, Serialize)]
#[schemars(rename = "BooksHeld")]
struct Held<'a> {
    total: u64,
    sql: Sql,
    between: i64,
    redis: Redis<'a>,
}

#[derive(JsonSchema, Serialize)]
#[schemars(rename = "BooksSql")]
struct Sql {
    fresh: u64,
    parked: u64,
    crowded: u64,
    /// Behind others of their sequences.
    behind: u64,
    scheduled: u64,
    missing: u64,
}

#[derive(JsonSchema, Serialize)]
#[schemars(rename = "BooksRedis")]
struct Redis<'a> {
    live: u64,
    waiting: u64,
    #[serde(skip_serializing_if = "is_zero")]
    behind_limits: u64,
    assigned: u64,
    delayed: u64,
    leases: u64,
    lanes: &'a BTreeMap<&'static str, u64>,
    reports: u64,
    #[serde(skip_serializing_if = "is_zero")]
    lost_shards: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl<'a> From<&'a model::Books> for Books<'a> {
    fn from(books: &'a model::Books) -> Self {
        Self {
            at: to_rfc_3339(books.at_unix_ms),
            bus: books.bus.map(|bus| Bus {
                pipeline: bus.pipeline,
                task_results: bus.task_results,
            }),
            rejected_elsewhere: books.rejected_elsewhere,
            queues: books.queues.iter().map(Into::into).collect(),
        }
    }
}

impl<'a> From<&'a model::QueueBooks> for QueueBooks<'a> {
    fn from(of: &'a model::QueueBooks) -> Self {
        let held = &of.held;
        Self {
            queue: of.queue.as_str(),
            state: of.state,
            came_in: In {
                stored: of.stored(),
                duplicates: of.duplicates,
                rejected: of.rejected,
            },
            out: Out {
                completed: of.completed,
                dead: of.dead,
                cancelled: of.cancelled,
            },
            held: Held {
                total: held.total,
                sql: Sql {
                    fresh: held.fresh,
                    parked: held.parked,
                    crowded: held.crowded,
                    behind: held.behind,
                    scheduled: held.scheduled,
                    missing: held.missing,
                },
                between: held.between,
                redis: Redis {
                    live: held.live(),
                    waiting: held.waiting,
                    behind_limits: held.behind_limits,
                    assigned: held.assigned,
                    delayed: held.delayed,
                    leases: held.leases,
                    lanes: &held.lanes,
                    reports: held.reports,
                    lost_shards: held.lost_shards,
                },
            },
        }
    }
}
