//! Joins in reports: converts between `model` and records.

use super::{call::discovered_task, pb};
use crate::model::{Encoding, Joining, NewJoin, Part, Way};

/// Moves what a completion says of joins into its record.
pub(super) fn write(joining: Option<Box<Joining<NewJoin>>>, done: &mut pb::Completed) {
    let Some(joining) = joining else {
        return;
    };
    done.ways = joining.ways.into_iter().map(Way::number).collect();
    done.joins = joining.joins.into_iter().map(Into::into).collect();
    done.parts = joining.parts.into_iter().map(Into::into).collect();
}

/// Takes what a record says of joins out of it.
pub(super) fn read(done: &mut pb::Completed) -> Result<Option<Box<Joining<NewJoin>>>, String> {
    if done.ways.is_empty() && done.joins.is_empty() && done.parts.is_empty() {
        return Ok(None);
    }
    let joins = std::mem::take(&mut done.joins);
    let parts = std::mem::take(&mut done.parts);
    Ok(Some(Box::new(Joining {
        ways: done.ways.drain(..).map(Way::from_number).collect(),
        joins: joins.into_iter().map(new_join).collect::<Result<_, _>>()?,
        parts: parts.into_iter().map(Into::into).collect(),
    })))
}

fn new_join(join: pb::NewJoin) -> Result<NewJoin, String> {
    let task = discovered_task(join.task.unwrap_or_default()).map_err(|task| task.reason)?;
    Ok(NewJoin {
        task,
        from: join.from,
    })
}

impl From<NewJoin> for pb::NewJoin {
    fn from(join: NewJoin) -> Self {
        Self {
            task: Some(join.task.into()),
            from: join.from,
        }
    }
}

impl From<Part> for pb::Part {
    fn from(part: Part) -> Self {
        Self {
            way: part.way.number(),
            index: part.index,
            stage: part.stage,
            port: part.port,
            key: part.key,
            payload: part.payload,
            encoding: pb::Encoding::from(part.encoding).into(),
            join: part.join,
        }
    }
}

impl From<pb::Part> for Part {
    fn from(part: pb::Part) -> Self {
        Self {
            way: Way::from_number(part.way),
            index: part.index,
            stage: part.stage,
            port: part.port,
            key: part.key,
            payload: part.payload,
            encoding: Encoding::from_number(part.encoding.into()),
            join: part.join,
        }
    }
}
