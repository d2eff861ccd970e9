//! The requirements for a database that holds the store.

use sqlx::migrate::Migrate;

use super::session::Session;

pub trait Backend: sqlx::Database<Connection: Session + Migrate> {}
impl<DB> Backend for DB where DB: sqlx::Database<Connection: Session + Migrate> {}
