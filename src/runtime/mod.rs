//! The ground of every process: supervised tasks, signs of life, and time.

mod clock;
mod compute;
mod pace;
mod progress;
mod supervise;
mod tick;

pub use self::{
    clock::Clock,
    compute::compute,
    pace::LogPace,
    progress::{Beat, Progress},
    supervise::{LastSaid, Loop, LoopEnd, LoopError, Supervisor, pauses},
    tick::{tick, tick_after},
};
