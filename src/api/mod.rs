//! The operations, one function each. Every protocol calls them; spans and metrics are applied
//! here, once.

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
mod history;
mod insert;
mod items;
mod ledger;
mod letters;
mod pauses;
mod query;
mod reader;
mod search;
mod sessions;
mod stream;
mod tasks;
mod waiting;
mod waits;
mod watch;
mod watching;

pub use self::{
    access::{Authentication, Denied, TokenSync},
    drained::SettledReports,
    error::{Error, Kind},
    handle::Api,
    ledger::Ledger,
    reader::Reader,
    stream::{BytesPermit, OutgoingFrame, ReceivedFrame, ReserveBytes, StreamEnd},
    waits::{Wait, Waits},
    watch::Watching,
    watching::KnownKeys,
};
pub(crate) use crate::model::{ECHO, shorten};
