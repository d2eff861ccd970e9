//! Watchdog: finds what ran out of time, was left over or got lost, and puts it right.
//!
//! - `leases`: expired leases and due delays, when the next one is due, at the latest every
//!   `interval`;
//! - `outbox`: rows that nobody published (`republish_after`), due scheduled rows, `parked` rows
//!   whose queue is not full any more;
//! - `crowded`: crowded rows whose limit key has few tasks left in Redis;
//! - `holds`: long holds of limit keys that SQL does not have yet;
//! - `finals`: final records that are older than `grace` and that SQL has, or whose report is lost
//!   (`lost_reports`);
//! - `changes`: changes of live work that nobody carried out;
//! - `deadlines`: tasks whose deadline has passed;
//! - `reconcile`: shards that Redis lost (`lost_shards`, `rebuild`); every `reconcile_every`
//!   compares a page of SQL with Redis;
//! - `retention`: removes tasks from SQL that finished longer ago than `retention`, letters after
//!   `letter_retention`, and failed attempts after `history_retention`;
//! - `idempotency`: removes idempotency keys from SQL whose window is over;
//! - `bulk`: changes of all tasks that match a filter, page by page;
//! - `events`: publishes the events that SQL has stored to topic `events`;
//! - `closing`: closes shards that were empty for `forget_queues_after`;
//! - `trim`: removes old records that everybody has read from the bus, once a minute;
//! - `fsck`: goes over all shards, slice by slice, and reports where SQL and Redis do not agree;
//! - `depths`: gauges, and the depths of the last hour and the last day (`depth_history`).
//!
//! One process at a time does this (`lead`).

mod bulk;
mod changes;
mod closing;
mod crowded;
mod deadlines;
mod depth_history;
mod depths;
mod error;
mod events;
mod finals;
mod fsck;
mod holds;
mod idempotency;
mod lead;
mod leases;
mod lost_reports;
mod lost_shards;
mod on_their_way;
mod outbox;
mod parked;
mod rebuild;
mod reconcile;
mod republish;
mod retention;
mod shared;
mod sweeps;
mod trim;

use std::{future::Future, sync::Arc};

pub use self::error::Error;
use self::lead::Lead;
use crate::{
    pipelines::context::Context,
    runtime::{Loop, Supervisor},
};

/// Starts the loops. Those that change something wait until this process leads.
pub fn start(context: &Context, supervisor: &Supervisor) {
    let lead = Lead::default();
    let mut loops = Loops {
        supervisor,
        names: Vec::new(),
    };
    // Held so that a shard that is being closed, which looks lost between the two steps, is not
    // brought back.
    let moves_shards = Arc::default();
    let forgets = Arc::default();
    loops.start(
        "watchdog/leases",
        leases::Leases::new(context, &lead),
        leases::Leases::run,
    );
    loops.start(
        "watchdog/outbox",
        outbox::Outbox::new(context, &lead, &forgets),
        outbox::Outbox::run,
    );
    loops.start(
        "watchdog/crowded",
        crowded::Crowded::new(context, &lead, &forgets),
        crowded::Crowded::run,
    );
    if context.limit_partitions > 0 {
        loops.start(
            "watchdog/holds",
            holds::Holds::new(context, &lead),
            holds::Holds::run,
        );
    }
    loops.start(
        "watchdog/finals",
        finals::Finals::new(context, &lead, &forgets),
        finals::Finals::run,
    );
    loops.start(
        "watchdog/changes",
        changes::Changes::new(context, &lead),
        changes::Changes::run,
    );
    loops.start(
        "watchdog/deadlines",
        deadlines::Deadlines::new(context, &lead),
        deadlines::Deadlines::run,
    );
    let reconcile = reconcile::Reconcile::new(context, &lead, &moves_shards);
    loops.start("watchdog/reconcile", reconcile, reconcile::Reconcile::run);
    let kept = &context.settings.watchdog;
    if !(kept.retention.is_zero()
        && kept.letter_retention.is_zero()
        && kept.history_retention.is_zero())
    {
        loops.start(
            "watchdog/retention",
            retention::Retention::new(context, &lead),
            retention::Retention::run,
        );
    }
    if !context.settings.watchdog.forget_queues_after.is_zero() {
        let closing = closing::Closing::new(context, &lead, &moves_shards);
        loops.start("watchdog/closing", closing, closing::Closing::run);
    }
    loops.start(
        "watchdog/fsck",
        fsck::Fsck::new(context, &lead),
        fsck::Fsck::run,
    );
    let keys = idempotency::Idempotency::new(context, &lead);
    loops.start("watchdog/idempotency", keys, idempotency::Idempotency::run);
    loops.start(
        "watchdog/events",
        events::Events::new(context, &lead),
        events::Events::run,
    );
    loops.start(
        "watchdog/bulk",
        bulk::BulkChanges::new(context, &lead),
        bulk::BulkChanges::run,
    );
    loops.start(
        "watchdog/depths",
        depths::Depths::new(context, &lead),
        depths::Depths::run,
    );
    loops.start(
        "watchdog/trim",
        trim::Trim::new(context, &lead),
        trim::Trim::run,
    );
    let names = loops.names;
    lead.keep(
        context.coordination.clone(),
        names,
        context.settings.stall_after,
        supervisor,
    );
}

/// The loops that were started: a leader steps back if one of them makes no progress.
struct Loops<'a> {
    supervisor: &'a Supervisor,
    names: Vec<&'static str>,
}

impl Loops<'_> {
    fn start<T, Fut>(&mut self, name: &'static str, of: T, run: fn(T, Loop) -> Fut)
    where
        T: Clone + Send + 'static,
        Fut: Future<Output = Result<(), Error>> + Send + 'static,
    {
        self.names.push(name);
        self.supervisor.spawn_loop(name, of, run);
    }
}
