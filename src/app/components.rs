//! The pipelines of a round, one row each.

use std::sync::Arc;

use crate::{
    bus::Bus,
    config::{Pipeline, Settings},
    coordination::Coordination,
    dedup::Filter,
    pipelines::{
        admission::{Gates, Occupancy},
        discovery, fanout,
        publishing::{DeadLetters, Publisher},
        shortcut::Shortcut,
        tasks, watchdog,
    },
    queue::Queue,
    runtime::{Clock, Supervisor},
    store::Store,
};

/// The boundaries of a round, open and checked, and what the pipelines share.
pub(super) struct Context {
    pub(super) settings: Arc<Settings>,
    pub(super) store: Arc<dyn Store>,
    pub(super) bus: Arc<dyn Bus>,
    pub(super) queue: Queue,
    pub(super) coordination: Coordination,
    pub(super) filter: Filter,
    pub(super) publisher: Publisher,
    pub(super) letters: DeadLetters,
    pub(super) gates: Gates,
    pub(super) shortcut: Option<Shortcut>,
    pub(super) occupancy: Occupancy,
    pub(super) clock: Clock,
}

/// A condition that holds before a pipeline starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// The filter knows no key whose task the database has lost.
    CheckedFilter,
}

/// The handles through which the ways in reach the pipelines that run here.
#[derive(Default)]
pub(super) struct Handles {
    pub(super) discovery: Option<discovery::Handle>,
    pub(super) tasks: Option<tasks::Handle>,
}

struct Component {
    pipeline: Pipeline,
    needs: &'static [Need],
    start: fn(&Context, &Supervisor, &mut Handles),
}

/// In the order in which they start.
const COMPONENTS: [Component; 4] = [
    Component { pipeline: Pipeline::Watchdog, needs: &[], start: start_watchdog },
    Component { pipeline: Pipeline::Fanout, needs: &[], start: start_fanout },
    Component { pipeline: Pipeline::Discovery, needs: &[Need::CheckedFilter], start: start_discovery },
    Component { pipeline: Pipeline::Tasks, needs: &[], start: start_tasks },
];

fn start_watchdog(cx: &Context, supervisor: &Supervisor, _: &mut Handles) {
    let context = watchdog::Context {
        store: Arc::clone(&cx.store),
        bus: Arc::clone(&cx.bus),
        queue: cx.queue.upkeep.clone(),
        coordination: cx.coordination.clone(),
        filter: cx.filter.clone(),
        publisher: cx.publisher.clone(),
        letters: cx.letters.clone(),
        gates: cx.gates.clone(),
        shortcut: cx.shortcut.clone(),
        occupancy: cx.occupancy.clone(),
        clock: cx.clock.clone(),
        settings: Arc::clone(&cx.settings),
    };
    watchdog::start(context, supervisor);
}

fn start_fanout(cx: &Context, supervisor: &Supervisor, _: &mut Handles) {
    let context = fanout::Context {
        store: Arc::clone(&cx.store),
        bus: Arc::clone(&cx.bus),
        queue: cx.queue.enqueuer.clone(),
        coordination: cx.coordination.clone(),
        letters: cx.letters.clone(),
        gates: cx.gates.clone(),
        shortcut: cx.shortcut.clone(),
        clock: cx.clock.clone(),
        settings: Arc::clone(&cx.settings),
    };
    fanout::start(context, supervisor);
}

fn start_discovery(cx: &Context, supervisor: &Supervisor, handles: &mut Handles) {
    let context = discovery::Context {
        store: Arc::clone(&cx.store),
        bus: Arc::clone(&cx.bus),
        filter: cx.filter.clone(),
        publisher: cx.publisher.clone(),
        letters: cx.letters.clone(),
        gates: cx.gates.clone(),
        shortcut: cx.shortcut.clone(),
        occupancy: cx.occupancy.clone(),
        clock: cx.clock.clone(),
        announcer: cx.queue.announcer().clone(),
        settings: Arc::clone(&cx.settings),
    };
    handles.discovery = Some(discovery::start(context, supervisor));
}

fn start_tasks(cx: &Context, supervisor: &Supervisor, handles: &mut Handles) {
    let (queue, store, bus) = (cx.queue.clone(), Arc::clone(&cx.store), Arc::clone(&cx.bus));
    handles.tasks = Some(tasks::start(queue, store, bus, &cx.settings, supervisor));
}

/// The way past the bus, where discovery and the fanout run in this process.
pub(super) fn shortcut(settings: &Arc<Settings>, bus: &dyn Bus, queue: &Queue, gates: &Gates) -> Option<Shortcut> {
    let runs = |pipeline| settings.pipelines.contains(&pipeline);
    let is_whole = runs(Pipeline::Discovery) && runs(Pipeline::Fanout);
    let shortcut = || Shortcut::new(queue.enqueuer.clone(), gates.clone(), Arc::clone(settings));
    (is_whole && !bus.has_other_readers()).then(shortcut)
}

fn chosen(settings: &Settings) -> impl Iterator<Item = &'static Component> {
    COMPONENTS.iter().filter(|component| settings.pipelines.contains(&component.pipeline))
}

/// The needs of the pipelines that the settings name.
pub(super) fn needs(settings: &Settings) -> impl Iterator<Item = Need> {
    chosen(settings).flat_map(|component| component.needs.iter().copied())
}

/// Starts the pipelines that the settings name.
pub(super) fn start(cx: &Context, supervisor: &Supervisor) -> Handles {
    let mut handles = Handles::default();
    chosen(&cx.settings).for_each(|component| (component.start)(cx, supervisor, &mut handles));
    handles
}
