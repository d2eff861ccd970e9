//! Discovery: from the insert API, from `task-results` and from topics (`feeds`) to new tasks in SQL
//! and on the bus.
//!
//! filter → one SQL transaction (new tasks and their batch, results, statuses) → publish → mark the
//! filter → commit the input. A separate loop marks the published tasks in SQL, a little later.
//! Each effect may be repeated. An insert's caller is answered after the SQL commit. Crash windows:
//!
//! - Before the SQL commit: nothing has happened. The caller has no answer, or the report is
//!   delivered again.
//! - After the SQL commit, before the publish or its mark: the watchdog publishes the batch
//!   (again).
//! - Before the filter's mark, which comes up to 20 ms later: SQL answers "duplicate" instead of
//!   the filter.
//! - Before the input's commit: the report is delivered again and recognised (`Settled::repeated`).
//!   Its letters to `dead-letters` are sent again. SQL keeps each failed attempt only once.

mod announce;
mod batch;
mod enrich;
mod error;
mod fallback;
mod feeds;
mod history;
mod insert;
mod latency;
mod learnt;
mod origin;
mod reports;
mod results;
mod room;
mod schema;
mod seen;
mod sources;
mod steps;
mod traced;
mod trees;
mod turned_away;

use self::turned_away::Tally;
pub use self::{
    announce::new_tasks as announce_new_tasks,
    error::{Error, Failure, Unavailable},
    fallback::check as check_filter,
    feeds::record_task,
    insert::Handle,
    trees::{joining, tree_settings},
};
use crate::{enrichment::Enrichment, pipelines::context::Context, runtime::Supervisor};

/// Starts the pipeline. The handle is its insert side.
pub fn start(context: &Context, supervisor: &Supervisor) -> Handle {
    fallback::start(context, supervisor);
    context.start_marking(supervisor);
    let tally = Tally::new(context.occupancy.clone());
    tally.keep(context.store.clone(), supervisor);
    let to_mark = context.start_marking_published("discovery/mark-published", supervisor);
    let enrichment = Enrichment::new(&context.settings);
    results::start(
        context,
        &enrichment,
        to_mark.clone(),
        tally.clone(),
        supervisor,
    );
    let handle = insert::start(context.clone(), enrichment, to_mark, tally, supervisor);
    feeds::start(context, &handle, supervisor);
    sources::start(context, &handle, supervisor);
    handle
}
