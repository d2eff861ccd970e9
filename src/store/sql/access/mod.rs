//! Access tokens, the acts of operators, and the Redis that holds the tasks of the database.

pub(crate) mod holder;
pub(crate) mod tokens;
