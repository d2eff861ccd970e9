//! Where a task is according to SQL: in the outbox, in a batch, or on the bus.

use std::collections::BTreeSet;

use crate::{
    model::{Offset, ShardId, TaskId},
    store::{
        Place, Result, Turn, Unpublished,
        sql::{
            backend::Backend,
            outbox::{
                batches::{self, NEVER},
                entries, shards,
            },
            rows::{columns, number, queue_name},
            runner::Runner,
            statement::Statement,
        },
    },
};

columns! {
    /// A task, with its outbox row and its batch if it has them.
    struct PlaceColumns {
        queue: String,
        shard: i64,
        pub_generation: String,
        pub_major: i64,
        pub_minor: i64,
        state: Option<i64>,
        due_ms: Option<i64>,
        turn: Option<i64>,
        batch_generation: Option<String>,
        batch_due_ms: Option<i64>,
        places: Option<String>,
    }
}

const NAME: &str = "place";

pub(crate) async fn of<DB: Backend>(
    sql: &Runner<DB>,
    generation: &str,
    id: TaskId,
) -> Result<Option<Place>> {
    let statement = Statement::new(
        "SELECT tasks.queue AS queue, shard, pub_generation, pub_major, pub_minor, state, \
             outbox.due_ms AS due_ms, turn, generation AS batch_generation, batches.due_ms AS batch_due_ms, places \
         FROM tasks LEFT JOIN outbox ON task_id = id LEFT JOIN batches ON batch = insertion \
         WHERE id = ? AND status = 0",
    )
    .bind(&id);
    let found: Option<PlaceColumns> = sql.read(NAME, statement).await?.into_iter().next();
    let Some(columns) = found else {
        return Ok(None);
    };
    let shard = ShardId {
        queue: queue_name(&columns.queue)?,
        number: number(columns.shard)?,
    };
    let rebuilt = shards::rebuilt_places(sql, NAME, generation, &BTreeSet::from([&shard])).await?;
    columns
        .place(generation, rebuilt.get(&shard).copied())
        .map(Some)
}

impl PlaceColumns {
    fn place(self, generation: &str, rebuilt: Option<Offset>) -> Result<Place> {
        if let (Some(state), Some(due_ms)) = (self.state, self.due_ms) {
            let came_back = self.turn.map(Turn) != Some(Turn::FIRST);
            return Ok(Place::Off {
                why: entries::unpublished(state)?,
                due_unix_ms: due(due_ms),
                came_back,
            });
        }
        // A task without an offset of its own has that of its batch.
        if let ("", Some(""), Some(due_ms)) = (
            &*self.pub_generation,
            self.batch_generation.as_deref(),
            self.batch_due_ms,
        ) {
            let (why, due_unix_ms) = (Unpublished::Fresh, due(due_ms));
            return Ok(Place::Off {
                why,
                due_unix_ms,
                came_back: false,
            });
        }
        let own = Offset {
            major: number(self.pub_major)?,
            minor: number(self.pub_minor)?,
        };
        let own = (self.pub_generation == generation).then_some(own);
        let places = self
            .places
            .filter(|_| self.batch_generation.as_deref() == Some(generation));
        let places = places
            .map(|text| batches::places(&text))
            .transpose()?
            .unwrap_or_default();
        // If there are several offsets, the latest one applies, as in the reconciler.
        Ok(Place::On(
            own.max(places.get(&number(self.shard)?).copied())
                .max(rebuilt),
        ))
    }
}

fn due(due_ms: i64) -> Option<i64> {
    (due_ms != NEVER).then_some(due_ms)
}
