//! Topics of users.

use ::metrics::{Unit, counter, describe_counter, describe_gauge, gauge};

use crate::model::{PublishStatus, ReadCounts};

pub const TOPIC_PUBLISHED: &str = "taskd_topic_published_records_total";

pub const SUBSCRIPTION_RECORDS: &str = "taskd_subscription_records_total";
pub const SUBSCRIPTION_BEHIND: &str = "taskd_subscription_behind_records";
pub const SUBSCRIPTION_OLDEST: &str = "taskd_subscription_oldest_seconds";

pub(super) fn describe() {
    describe_counter!(
        SUBSCRIPTION_RECORDS,
        Unit::Count,
        "Records of topics, by subscription and by what became of them"
    );
    describe_gauge!(
        SUBSCRIPTION_BEHIND,
        Unit::Count,
        "Records that a subscription has not read yet, as the feeder counted them a moment ago"
    );
    describe_gauge!(
        SUBSCRIPTION_OLDEST,
        Unit::Seconds,
        "How long ago the oldest record was published that a subscription has not read yet"
    );
    describe_counter!(
        TOPIC_PUBLISHED,
        Unit::Count,
        "Records that somebody published to a topic, by result"
    );
}

/// A call has published this many records with this result.
pub fn topic_published(topic: &str, status: PublishStatus, count: usize) {
    if count == 0 {
        return;
    }
    let result = match status {
        PublishStatus::Stored => "stored",
        PublishStatus::Rejected => "rejected",
        PublishStatus::TryLater => "try_later",
    };
    counter!(TOPIC_PUBLISHED, "topic" => topic.to_owned(), "result" => result)
        .increment(count as u64);
}

/// A subscription has read a page, of which this became.
pub fn subscription_read(subscription: &str, counts: &ReadCounts) {
    let others = counts.duplicates + counts.filtered + counts.refused;
    for (result, count) in [
        ("task", counts.read.saturating_sub(others)),
        ("duplicate", counts.duplicates),
        ("filtered", counts.filtered),
        ("refused", counts.refused),
        ("skipped", counts.skipped),
    ] {
        if count > 0 {
            counter!(SUBSCRIPTION_RECORDS, "subscription" => subscription.to_owned(), "result" => result)
                .increment(count);
        }
    }
}

/// A subscription has this many records left to read, the oldest of this age.
pub fn subscription_left(subscription: &str, records: u64, oldest_seconds: i64) {
    gauge!(SUBSCRIPTION_BEHIND, "subscription" => subscription.to_owned()).set(records as f64);
    gauge!(SUBSCRIPTION_OLDEST, "subscription" => subscription.to_owned())
        .set(oldest_seconds as f64);
}
