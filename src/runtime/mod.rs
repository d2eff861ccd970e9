//! How the process runs its own tasks: supervision, signs of life, time.

pub mod clock;
pub mod supervise;

pub use self::{
    clock::Clock,
    supervise::{Beat, Loop, LoopError, Policy, Progress, Supervisor, in_short, pauses},
};
