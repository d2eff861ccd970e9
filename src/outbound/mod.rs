//! HTTP requests to servers that are not taskd's own: those that enrich tasks, and those that
//! workflows call.
//!
//! The endpoint of an enrichment is chosen by the operator. What a workflow calls is not, so its
//! requests reach private addresses only where the settings allow it. The check is about the
//! address that is connected to, so a name that changes its address gains nothing.

mod breaker;
mod calls;
mod client;
mod reach;

pub use self::{
    breaker::{Breaker, Permit, Turned, WINDOW},
    calls::{Answer, Authorization, Outbound, Outgoing},
    client::{Client, Failure, USER_AGENT, body},
    reach::Reach,
};
