//! Access to Redis: connections, scripts, and checks at the start.

mod address;
mod check;
mod cluster;
mod connection;
mod durability;
mod error;
mod memory;
pub mod reply;
mod script;
pub mod scripts;
mod server;

pub use self::{
    connection::Connection,
    durability::{Durability, Shortfall},
    error::Error,
    memory::{Memory, Observed},
    script::{Batch, Call, OfShard, Script, ShardKey},
    server::Redis,
};
