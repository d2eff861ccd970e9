//! Admission of new tasks: which queues are full, which names there are, how many unfinished tasks
//! each has.
//!
//! Each process keeps its own copy. [`QueueSync`] reads it from SQL, so a decision may be half a
//! second old. [`LimitSync`] does the same for own limits of limit keys, which the shards in Redis
//! have to know.

mod gates;
mod occupancy;
mod open_trees;
mod own_limits;
mod sync;
mod topologies;

pub use self::{
    gates::{Gates, Shortage},
    occupancy::{NoName, Occupancy, OccupancyPermit},
    open_trees::{OpenPermit, OpenTrees},
    own_limits::LimitSync,
    sync::QueueSync,
    topologies::{KnownTopologies, Stages},
};
