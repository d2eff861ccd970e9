//! Protobuf: every conversion between the messages of `taskd-proto` and `model`.

mod backoff;
mod body;
mod books;
mod call;
pub mod changes;
mod events;
mod explain;
mod fsck;
mod history;
mod joins;
mod letters;
mod limits;
pub mod own_topics;
mod presence;
mod queues;
mod records;
mod search;
mod session;
mod subscriptions;
pub mod time;
pub mod topics;
mod topologies;
mod trees;

pub use taskd_proto::pb;

pub use body::{
    blob_of_row, body_blob, body_values, deadline_of, is_limited, limit_hash_in, read_body,
    with_body_values, without_deadline,
};
pub use call::task_status;
pub use events::{
    event_record, insert_wait, kept_events, numbered_event, read_event_record, read_kept_events,
    read_status_changes, short_event, status_changes,
};
pub use history::{failed_attempt, failure_with_time, frame_failure};
pub use records::{
    Reports, completed_report, dead_letter, died_report, expiration, frame_report, framed_reports,
    one_report, pipeline_record, read_dead_letter, read_pipeline_record, read_reports,
    report_batch, with_time,
};
pub use trees::tree_wait;
