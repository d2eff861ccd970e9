//! Feeds of topologies.

use metrics::{Unit, counter, describe_counter, describe_gauge, gauge};

pub const FEED_RECORDS: &str = "taskd_feed_records_total";
pub const FEED_ACKS_PENDING: &str = "taskd_feed_acks_pending";
pub const FEED_BEHIND: &str = "taskd_feed_behind_records";
pub const FEED_HELD: &str = "taskd_feed_held";

pub(super) fn describe() {
    describe_counter!(
        FEED_RECORDS,
        Unit::Count,
        "Records of feeds outside of taskd, by what became of them"
    );
    describe_gauge!(
        FEED_ACKS_PENDING,
        Unit::Count,
        "Records that the source may forget, and has not yet"
    );
    describe_gauge!(
        FEED_BEHIND,
        Unit::Count,
        "Records that a feed has not read yet"
    );
    describe_gauge!(
        FEED_HELD,
        Unit::Count,
        "1 while a feed reads nothing, by why"
    );
}

/// What becomes of a record of a feed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedResult {
    Tree,
    Duplicate,
    Refused,
    Acknowledged,
}

/// Why a feed reads nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedHold {
    /// The source is away, or refuses to be read.
    Source,
    /// The source takes no acknowledgements.
    Acks,
    MaxOpen,
    QueueFull,
    /// Redis has little memory left.
    Memory,
    /// The records cannot be stored.
    Store,
}

impl FeedHold {
    pub const ALL: [Self; 6] = [
        Self::Source,
        Self::Acks,
        Self::MaxOpen,
        Self::QueueFull,
        Self::Memory,
        Self::Store,
    ];

    fn as_str(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Acks => "acks",
            Self::MaxOpen => "max_open",
            Self::QueueFull => "queue_full",
            Self::Memory => "memory",
            Self::Store => "store",
        }
    }
}

/// This became of records of a feed.
pub fn feed_records(feed: &str, result: FeedResult, count: u64) {
    if count == 0 {
        return;
    }
    let result = match result {
        FeedResult::Tree => "tree",
        FeedResult::Duplicate => "duplicate",
        FeedResult::Refused => "refused",
        FeedResult::Acknowledged => "acknowledged",
    };
    counter!(FEED_RECORDS, "feed" => feed.to_owned(), "result" => result).increment(count);
}

/// A feed has this many records to acknowledge, and this many that are not read yet.
pub fn feed_left(feed: &str, acks_pending: u64, behind: Option<u64>) {
    gauge!(FEED_ACKS_PENDING, "feed" => feed.to_owned()).set(acks_pending as f64);
    if let Some(behind) = behind {
        gauge!(FEED_BEHIND, "feed" => feed.to_owned()).set(behind as f64);
    }
}

/// A feed reads nothing for this reason, or reads.
pub fn feed_held(feed: &str, held: Option<FeedHold>) {
    for hold in FeedHold::ALL {
        let is_held = held == Some(hold);
        gauge!(FEED_HELD, "feed" => feed.to_owned(), "reason" => hold.as_str())
            .set(f64::from(u8::from(is_held)));
    }
}
