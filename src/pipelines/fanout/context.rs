//! The context of the fanout.

use std::sync::Arc;

use crate::{
    bus::Bus,
    config::Settings,
    coordination::Coordination,
    pipelines::{admission::Gates, publishing::DeadLetters, shortcut::Shortcut},
    queue::Enqueuer,
    runtime::Clock,
    store::Store,
};

/// Everything that the fanout uses.
#[derive(Clone)]
pub struct Context {
    pub store: Arc<dyn Store>,
    pub bus: Arc<dyn Bus>,
    pub queue: Enqueuer,
    pub coordination: Coordination,
    pub letters: DeadLetters,
    pub gates: Gates,
    pub shortcut: Option<Shortcut>,
    pub clock: Clock,
    pub settings: Arc<Settings>,
}

/// The reader. Each of its steps has a file.
pub(super) struct Fanout(pub(super) Context);

/// Shards that are called at a time.
pub(super) const AT_ONCE: usize = 64;
