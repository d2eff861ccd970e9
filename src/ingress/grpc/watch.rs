//! Watching tasks and queues over gRPC.

use std::pin::Pin;

use futures::{Stream, stream};
use tonic::Status;

use crate::{
    api::Watching,
    model::{WatchEnd, Watched},
    wire::pb,
};

/// The events of a watch.
pub(super) type Events = Pin<Box<dyn Stream<Item = Result<pb::TaskEvent, Status>> + Send>>;

/// Turns a watch into a stream. If the watch ends before the task, the last item is a status that
/// says why.
pub(super) fn events(watching: Watching) -> Events {
    Box::pin(stream::unfold(watching, async |mut watching| {
        loop {
            let next = match watching.next().await? {
                Watched::Event(event) => Ok(pb::TaskEvent {
                    key: watching.key().cloned().unwrap_or_default(),
                    ..event.into()
                }),
                Watched::Gap => Ok(pb::TaskEvent {
                    gap: true,
                    ..Default::default()
                }),
                // HTTP/2 has pings of its own.
                Watched::Beat => continue,
                Watched::End(end) => Err(status(end)),
            };
            return Some((next, watching));
        }
    }))
}

/// Why a watch ends early, as a status.
pub(super) fn status(end: WatchEnd) -> Status {
    match end {
        WatchEnd::Stopping => Status::unavailable(end.says()),
        WatchEnd::Unauthenticated => Status::unauthenticated(end.says()),
        WatchEnd::TooSlow => Status::resource_exhausted(end.says()),
    }
}
