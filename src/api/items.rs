//! Calls with many items. Those that cannot be read are answered at once, the others by the
//! operation.

use std::collections::BTreeSet;

use super::error::Error;
use crate::{
    model::{ECHO, ItemAnswer, TaskId, shorten},
    pipelines::changing::MOST,
};

/// Separates items that can be read from those that have an answer already. The second list has a
/// place per item: its answer, or `None`, which [`merge`] replaces by the operation's answer.
pub(super) fn split<T, A>(items: Vec<Result<T, A>>) -> (Vec<T>, Vec<Option<A>>) {
    let mut readable = Vec::with_capacity(items.len());
    let mut note = |item| match item {
        Ok(item) => {
            readable.push(item);
            None
        }
        Err(answer) => Some(answer),
    };
    let known = items.into_iter().map(&mut note).collect();
    (readable, known)
}

pub(super) fn merge<A>(known: Vec<Option<A>>, answers: Vec<A>) -> Vec<A> {
    let mut answers = answers.into_iter();
    known
        .into_iter()
        .filter_map(|known| known.or_else(|| answers.next()))
        .collect()
}

/// Tasks that a call names by their ids.
pub(super) struct Named {
    named: Vec<(String, TaskId)>,
    known: Vec<Option<ItemAnswer>>,
}

impl Named {
    pub(super) fn new(ids: Vec<String>) -> Result<Self, Error> {
        if ids.len() > MOST {
            return Err(Error::Invalid(format!(
                "{} ids in one call; at most {MOST}",
                ids.len()
            )));
        }
        let parse = |id: String| match id.parse::<TaskId>() {
            Ok(task) => Ok((id, task)),
            Err(_) => {
                let id = shorten(&id, ECHO).into_owned();
                let error =
                    format!("{id:?} is not a task id; ids are UUIDs, as an insert answers them");
                Err(ItemAnswer::invalid(id, error))
            }
        };
        let (named, known) = split(ids.into_iter().map(parse).collect());
        Ok(Self { named, known })
    }

    /// The tasks, each of them once.
    pub(super) fn tasks(&self) -> Vec<TaskId> {
        let tasks: BTreeSet<TaskId> = self.named.iter().map(|(_, task)| *task).collect();
        tasks.into_iter().collect()
    }

    /// Returns the answers to all ids, in order. Text that is not an id has its answer already.
    pub(super) fn answer(self, answer: impl Fn(String, TaskId) -> ItemAnswer) -> Vec<ItemAnswer> {
        merge(
            self.known,
            self.named
                .into_iter()
                .map(|(id, task)| answer(id, task))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_the_order_of_the_items() {
        let (readable, known) = split(vec![Ok("a"), Err(2), Ok("c"), Err(4)]);
        assert_eq!(readable, ["a", "c"]);
        assert_eq!(merge(known, vec![1, 3]), [1, 2, 3, 4]);
    }
}
