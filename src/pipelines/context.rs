//! The context of the pipelines.

use std::sync::Arc;

use super::{
    admission::{Gates, Occupancy},
    publishing::{DeadLetters, Publisher},
    shortcut::Shortcut,
};
use crate::{
    bus::Bus, config::Settings, coordination::Coordination, dedup::Filter, queue::Queue,
    runtime::Clock, store::Store,
};

/// The boundaries of a round, open and checked, and what the pipelines share. Cheap to clone.
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
    pub clock: Clock,
}
