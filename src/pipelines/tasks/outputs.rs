//! Outputs of stages: which queues they go to.

use std::sync::Arc;

use super::handle::Handle;
use crate::{
    model::{Completion, ECHO, FanOut, Item, LeaseToken, TaskId, shorten},
    pipelines::admission::Stages,
    runtime::compute,
};

/// Payloads of this size together are read on the thread that serves the request, because conditions
/// of edges may read them.
const QUICK_BYTES: usize = 64 << 10;
/// Payloads of this size are read in one turn on another thread.
const SLOW_BYTES: usize = 4 << 20;

/// How many bytes the outputs of a call may become: an output may have many edges.
const MOST_BYTES: usize = 64 << 20;

/// Reports whose outputs are not routed yet.
struct Routing {
    items: Vec<Item<Completion>>,
    stages: Arc<Stages>,
    next: usize,
    room: FanOut,
}

impl Handle {
    pub fn stages(&self) -> Arc<Stages> {
        self.topologies.stages()
    }

    /// Turns the outputs of tasks of stages into discovered tasks of the next stages. A report with an
    /// output that cannot go anywhere becomes invalid as a whole, while its worker is still there.
    pub(super) async fn route_outputs(
        &self,
        mut items: Vec<Item<Completion>>,
        most: usize,
    ) -> Vec<Item<Completion>> {
        let stages = self.topologies.stages();
        if stages.is_empty() {
            items.iter_mut().for_each(refuse_ports);
            return items;
        }
        let routing = Routing {
            items,
            stages,
            next: 0,
            room: FanOut {
                tasks: most,
                bytes: MOST_BYTES,
            },
        };
        let quickly = |routing: &mut Routing| routing.advance(QUICK_BYTES);
        let slowly = |routing: &mut Routing| routing.advance(SLOW_BYTES);
        // Boxed, so that calls without outputs stay small.
        Box::pin(compute(routing, quickly, slowly)).await.items
    }
}

impl Routing {
    /// Routes the outputs of reports up to this size together. Returns whether it is done.
    fn advance(&mut self, bytes: usize) -> bool {
        let mut read = 0;
        while let Some(item) = self.items.get_mut(self.next) {
            // The first one of a slow turn may be larger.
            let is_first = read == 0 && bytes == SLOW_BYTES;
            read += size(item);
            if read > bytes && !is_first {
                return false;
            }
            route(item, &self.stages, &mut self.room);
            self.next += 1;
        }
        true
    }
}

fn size(item: &Item<Completion>) -> usize {
    let Ok(report) = &item.report else {
        return 0;
    };
    let discovered = report.discovered.iter().map(|task| task.payload.len());
    report.result.len() + discovered.sum::<usize>()
}

fn route(item: &mut Item<Completion>, stages: &Stages, room: &mut FanOut) {
    let Ok(report) = &mut item.report else {
        return;
    };
    // What is wrong with id or token is answered later.
    let Ok(token) = item.lease_token.parse::<LeaseToken>() else {
        return;
    };
    let Ok(parent) = item.id.parse::<TaskId>() else {
        return;
    };
    match stages.of(token.shard.queue.as_str()) {
        None => refuse_ports(item),
        Some((topology, stage)) => {
            if let Err(error) = topology.route(stage, parent, report, room) {
                item.report = Err(error);
            }
        }
    }
}

/// Refuses outputs of a task whose queue is no stage.
fn refuse_ports(item: &mut Item<Completion>) {
    let Ok(report) = &item.report else {
        return;
    };
    let unreadable = report.unreadable.iter().map(|unreadable| &unreadable.task);
    let mut discovered = report.discovered.iter().chain(unreadable);
    if let Some(output) = discovered.find(|task| !task.port.is_empty()) {
        let port = shorten(&output.port, ECHO);
        item.report = Err(format!(
            "port {port:?}: the task's queue is no stage of a topology; name a queue, or apply the topology"
        ));
    }
}
