//! Admission of new tasks: which queues are full, which names there are, how many unfinished tasks
//! each has.
//!
//! Each process keeps its own copy. [`QueueSync`] reads it from SQL, so a decision may be half a
//! second old.

mod gates;
mod occupancy;
mod sync;

pub use self::{
    gates::{Gates, Shortage},
    occupancy::{NoName, Occupancy, OccupancyPermit},
    sync::QueueSync,
};
