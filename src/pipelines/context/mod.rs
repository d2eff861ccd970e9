//! The context of the pipelines.

mod executions;
mod mark_published;
mod publish;

use std::sync::Arc;

pub use self::{executions::ExecutionWakes, mark_published::ToMark, publish::Patience};
use super::{
    admission::{Gates, Occupancy},
    publishing::{DeadLetters, Publisher},
    shortcut::Shortcut,
};
use crate::{
    bus::{Bus, Topic},
    config::Settings,
    coordination::Coordination,
    dedup::Filter,
    model::validate::Partitions,
    outbound::Outbound,
    queue::Queue,
    runtime::Clock,
    store::Store,
};

/// What the pipelines share in a round: the store, the bus and the queue, opened and checked, and
/// common state. Cheap to clone.
#[derive(Clone)]
pub struct Context {
    pub settings: Arc<Settings>,
    pub store: Arc<dyn Store>,
    pub bus: Arc<dyn Bus>,
    pub queue: Queue,
    pub coordination: Coordination,
    pub filter: Filter,
    pub publisher: Publisher,
    pub letters: DeadLetters,
    pub gates: Gates,
    pub shortcut: Option<Shortcut>,
    pub occupancy: Occupancy,
    pub executions: ExecutionWakes,
    pub outbound: Outbound,
    pub clock: Clock,
    /// The partitions among which tasks with limit keys are spread; 0: no queue has limits.
    pub limit_partitions: u32,
}

impl Context {
    /// The partitions of `pipeline`, for new tasks.
    pub fn partitions(&self) -> Partitions {
        let all = self.bus.partitions(Topic::Pipeline);
        let limited = match self.limit_partitions {
            0 => all,
            limited => limited,
        };
        Partitions { all, limited }
    }
}
