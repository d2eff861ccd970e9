//! What operators see and do: jobs, letters, changes, histories, events, books and pauses.

pub(crate) mod books;
pub(crate) mod changes;
pub(crate) mod check;
pub(crate) mod deadlines;
pub(crate) mod events;
pub(crate) mod history;
pub(crate) mod jobs;
pub(crate) mod letters;
pub(crate) mod pauses;
