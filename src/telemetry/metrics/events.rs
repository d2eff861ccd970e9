//! Watchers of tasks, and the events that they get.

use ::metrics::{Unit, counter, describe_counter, describe_gauge, gauge};

use super::label::label;

pub const EVENTS_WATCHERS: &str = "taskd_events_watchers";
pub const EVENTS_SENT: &str = "taskd_events_sent_total";
pub const EVENTS_DROPPED: &str = "taskd_events_dropped_total";
pub const EVENTS_PUBLISHED: &str = "taskd_events_published_total";
pub const EVENTS_FAILED: &str = "taskd_events_failed_publishes_total";
pub const EVENTS_ENDED: &str = "taskd_events_ended_watches_total";

label! {
    /// Why a watch ended.
    WatchOver {
        Final = "final",
        Left = "left",
        Stopping = "stopping",
        Unauthenticated = "unauthenticated",
        TooSlow = "too_slow",
    }
}

pub(super) fn describe() {
    describe_gauge!(
        EVENTS_WATCHERS,
        Unit::Count,
        "Calls that watch tasks or wait for their ends"
    );
    describe_counter!(
        EVENTS_SENT,
        Unit::Count,
        "Events sent to those who watch tasks and queues"
    );
    describe_counter!(
        EVENTS_DROPPED,
        Unit::Count,
        "Announcements of status changes that found no room, or no Redis"
    );
    describe_counter!(
        EVENTS_PUBLISHED,
        Unit::Count,
        "Events published to topic events"
    );
    describe_counter!(
        EVENTS_FAILED,
        Unit::Count,
        "Times that topic events did not take what SQL keeps for it"
    );
    describe_counter!(EVENTS_ENDED, Unit::Count, "Watches that ended, by reason");
}

/// The number of calls that watch tasks has changed.
pub fn watchers(count: usize) {
    gauge!(EVENTS_WATCHERS).set(count as f64);
}

/// An event went to a watcher.
pub fn event_sent() {
    counter!(EVENTS_SENT).increment(1);
}

/// Notifications of status changes were lost.
pub fn events_dropped(count: usize) {
    counter!(EVENTS_DROPPED).increment(count as u64);
}

/// Events were published to topic `events`.
pub fn events_published(count: usize) {
    counter!(EVENTS_PUBLISHED).increment(count as u64);
}

/// Events could not be published. SQL keeps them.
pub fn events_publish_failed() {
    counter!(EVENTS_FAILED).increment(1);
}

/// A watch ended.
pub fn watch_ended(why: WatchOver) {
    counter!(EVENTS_ENDED, "reason" => why.as_str()).increment(1);
}
