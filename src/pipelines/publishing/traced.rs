//! The span `publish`: a stored task goes onto the bus.

use std::collections::BTreeMap;

use crate::{
    bus,
    model::{Offset, TaskRow, TraceContext},
    store::Turn,
    telemetry::traces::{Begun, Hop},
};

/// The sampled rows of a batch, by index. Most batches have none.
pub(super) struct Publishes(BTreeMap<usize, Publish>);

/// One row that is being published.
struct Publish {
    /// `None` if this process exports no spans and only passes the context on.
    begun: Option<Begun>,
    context: TraceContext,
}

impl Publishes {
    pub(super) fn begin(rows: &[(&TaskRow, Turn)]) -> Self {
        let publish = |(place, (row, _)): (usize, &(&TaskRow, Turn))| {
            let context = TraceContext::sampled(&row.traceparent)?;
            let begun = Begun::child_of(&row.traceparent);
            Some((
                place,
                Publish {
                    begun,
                    context: begun.map_or(context, |begun| begun.context()),
                },
            ))
        };
        Self(rows.iter().enumerate().filter_map(publish).collect())
    }

    /// Returns the parent context for what follows, if the row at this index is sampled.
    pub(super) fn context(&self, place: usize) -> Option<TraceContext> {
        self.0.get(&place).map(|publish| publish.context)
    }

    /// Returns the contexts as headers, for a bus whose records have them.
    pub(super) fn headers(&self) -> BTreeMap<usize, String> {
        self.0
            .iter()
            .map(|(place, publish)| (*place, publish.context.to_string()))
            .collect()
    }

    pub(super) fn end(self, rows: &[(&TaskRow, Turn)], published: &bus::Result<Vec<Offset>>) {
        for (place, Publish { begun, .. }) in self.0 {
            let (Some(begun), (row, _)) = (begun, &rows[place]) else {
                continue;
            };
            match published {
                Ok(_) => begun.end(Hop::Publish, row.id, &row.queue, "published", String::new()),
                Err(error) => begun.end(
                    Hop::Publish,
                    row.id,
                    &row.queue,
                    "failed",
                    error.to_string(),
                ),
            }
        }
    }
}
