//! The pages: a file each, with structs for its templates and the handlers of its routes.

mod confirm;
pub(super) mod dead;
mod equal;
pub(super) mod lists;
pub(super) mod new_bulk;
pub(super) mod overview;
pub(super) mod queue;
mod rows;
pub(super) mod task;
pub(super) mod task_acts;
pub(super) mod tasks;
pub(super) mod trees;
