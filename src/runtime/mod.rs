//! The ground of every process: supervised tasks, signs of life, and time.

mod clock;
mod compute;
mod progress;
mod supervise;
mod tick;

pub use self::{
    clock::Clock,
    compute::compute,
    progress::{Beat, Progress},
    supervise::{LastSaid, Loop, LoopEnd, LoopError, Supervisor, pauses},
    tick::{tick, tick_after},
};
