//! The operations, one function each. Every protocol calls them; spans and metrics are added here,
//! once.

mod access;
mod books;
mod books_snapshot;
mod bulk;
mod changes;
mod drained;
mod error;
mod explain;
mod facts;
mod fsck;
mod handle;
mod heard;
mod history;
mod insert;
mod items;
mod known_keys;
mod ledger;
mod letters;
mod limits;
mod pauses;
mod query;
mod reader;
mod search;
mod sessions;
mod settled;
mod stream;
mod tasks;
mod waiting;
mod waits;
mod watch;
mod watching;
mod workers;

pub use self::{
    access::{Authentication, Denied, TokenSync},
    error::{Error, Kind},
    handle::Api,
    heard::HeardWorkers,
    known_keys::KnownKeys,
    ledger::Ledger,
    reader::Reader,
    settled::SettledReports,
    stream::{BytesPermit, OutgoingFrame, ReceivedFrame, ReserveBytes, StreamEnd},
    waits::{Wait, Waits},
    watch::Watching,
};
pub(crate) use crate::model::{ECHO, shorten};
