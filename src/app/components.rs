//! The pipelines of a round, one row each.

use std::sync::Arc;

use crate::{
    bus::Bus,
    config::{Pipeline, Settings},
    coordination::Coordination,
    dedup::Filter,
    pipelines::{discovery, fanout, outbox::Outbox, tasks, watchdog},
    queue::Queue,
    runtime::Supervisor,
    store::Store,
};

/// The boundaries of a round, open and checked.
pub(super) struct Context {
    pub(super) settings: Arc<Settings>,
    pub(super) store: Arc<dyn Store>,
    pub(super) bus: Arc<dyn Bus>,
    pub(super) queue: Queue,
    pub(super) coordination: Coordination,
    pub(super) outbox: Outbox,
    pub(super) filter: Filter,
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
    Component {
        pipeline: Pipeline::Watchdog,
        needs: &[],
        start: |cx, supervisor, _| {
            let (outbox, filter, queue) = (cx.outbox.clone(), cx.filter.clone(), cx.queue.clone());
            watchdog::start(outbox, filter, queue, cx.coordination.clone(), &cx.settings, supervisor);
        },
    },
    Component {
        pipeline: Pipeline::Fanout,
        needs: &[],
        start: |cx, supervisor, _| {
            fanout::start(cx.outbox.clone(), cx.queue.clone(), cx.coordination.clone(), &cx.settings, supervisor);
        },
    },
    Component {
        pipeline: Pipeline::Discovery,
        needs: &[Need::CheckedFilter],
        start: |cx, supervisor, handles| {
            let handle = discovery::start(cx.outbox.clone(), cx.filter.clone(), &cx.settings, supervisor);
            handles.discovery = Some(handle);
        },
    },
    Component {
        pipeline: Pipeline::Tasks,
        needs: &[],
        start: |cx, supervisor, handles| {
            let (queue, store, bus) = (cx.queue.clone(), Arc::clone(&cx.store), Arc::clone(&cx.bus));
            handles.tasks = Some(tasks::start(queue, store, bus, &cx.settings, supervisor));
        },
    },
];

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
