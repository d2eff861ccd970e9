//! Answers that may be large. Each reserves its part of the budget before it takes memory, and
//! keeps it until it is written.

use std::{collections::HashMap, io};

use axum::{
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::{Stream, stream};
use serde::Serialize;

use super::{
    super::{
        Budget,
        json::{
            self,
            large::{Entry, list as large_list},
            work,
        },
        net::budget::{NoRoom, Share},
        net::delivery::Deliveries,
        tally::Excess,
    },
    call::Call,
    problem::Problem,
};
use crate::{
    api,
    model::{Access, ItemAnswer, LeasedTask},
    pipelines::tasks::Leases,
};

pub(in crate::ingress) type Answer = Result<Response, Problem>;

/// An answer with more bytes of payloads or results than this is written piece by piece. In JSON
/// they may become six times as many.
pub(super) const LARGE: usize = 1 << 20;

pub(super) fn item_answers(answers: Vec<ItemAnswer>) -> Answer {
    list("results", answers)
}

/// A text that reserves memory of the budget as it grows.
struct Counted {
    text: Vec<u8>,
    room: Share,
    /// The most that an answer counts as.
    most: usize,
    counted: usize,
    no_room: Option<NoRoom>,
}

impl io::Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.text.len() + bytes.len();
        if length > self.text.capacity() {
            let capacity = length.max(2 * self.text.capacity());
            let more = capacity.min(self.most).saturating_sub(self.counted);
            if let Err(no_room) = self.room.grow(more) {
                self.no_room = Some(no_room);
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            self.counted += more;
            self.text.reserve_exact(capacity - self.text.len());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes an answer that reserves memory of the budget as it grows.
pub(super) fn within(call: &Call, answer: &impl Serialize) -> Answer {
    within_budget(&call.state.budget, &call.caller.access, answer)
}

pub(super) fn within_budget(budget: &Budget, access: &Access, answer: &impl Serialize) -> Answer {
    let room = budget.answer(access, 0).map_err(Excess::from)?;
    let mut written = Counted {
        text: Vec::new(),
        room,
        most: budget.most_of_answer(),
        counted: 0,
        no_room: None,
    };
    if let Err(error) = serde_json::to_writer(&mut written, answer) {
        return Err(written
            .no_room
            .map_or_else(|| unwritten(&error), |no_room| Excess::from(no_room).into()));
    }
    let mut response = ([(header::CONTENT_TYPE, "application/json")], written.text).into_response();
    response.extensions_mut().insert(written.room);
    Ok(response)
}

/// Makes an answer with one list, which reserves memory of the budget as it grows.
pub(super) fn list_within<T: Serialize>(
    call: &Call,
    name: &'static str,
    entries: impl IntoIterator<Item = T>,
) -> Answer {
    let entries: Vec<T> = entries.into_iter().collect();
    within(call, &HashMap::from([(name, entries)]))
}

/// Makes an object with a list that is written entry by entry while the client reads. `room` is the
/// memory of the largest page.
pub(super) fn streamed<T: Send + 'static>(
    head: Entry,
    name: &str,
    pages: impl Stream<Item = Result<Vec<T>, api::Error>> + Send + Unpin + 'static,
    entry: fn(T) -> Entry,
    room: Share,
) -> Response {
    let body = Body::from_stream(large_list(head, name, pages, entry));
    let mut response = ([(header::CONTENT_TYPE, "application/json")], body).into_response();
    response.extensions_mut().insert(room);
    response
}

/// A single page of entries that are in memory already.
pub(super) fn one_page<T: Send>(
    entries: Vec<T>,
) -> impl Stream<Item = Result<Vec<T>, api::Error>> + Send + Unpin {
    stream::iter([Ok(entries)])
}

/// Makes an answer with leases, which the connection confirms or gives back. A large one is
/// streamed, with the fields of `head` in front of the tasks; otherwise `write` makes all of it.
pub(super) fn leased(
    call: &Call,
    leased: Leases,
    head: impl FnOnce() -> Entry,
    write: impl FnOnce(&[LeasedTask]) -> Answer,
) -> Answer {
    let Leases { tasks, deliveries } = leased;
    // The memory is reserved before the JSON is made.
    let bytes = tasks.iter().map(LeasedTask::weight).sum();
    let room = call
        .state
        .budget
        .answer(&call.caller.access, bytes)
        .map_err(Excess::from)?;
    let mut answer = if bytes > LARGE {
        streamed(head(), "tasks", one_page(tasks), work::large, room)
    } else {
        let answer = write(&tasks)?;
        drop((tasks, room));
        answer
    };
    answer.extensions_mut().insert(Deliveries::from(deliveries));
    Ok(answer)
}

pub(super) fn list<T: Serialize>(
    name: &'static str,
    entries: impl IntoIterator<Item = T>,
) -> Answer {
    let text = json::list(name, entries).map_err(|error| unwritten(&error))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

fn unwritten(error: &serde_json::Error) -> Problem {
    Problem::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("cannot write the answer: {error}"),
    )
}
