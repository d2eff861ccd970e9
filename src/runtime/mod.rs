//! What every process builds on: supervised tasks, signs of life, the servers that it needs, and
//! time.

mod clock;
mod compute;
mod pace;
mod progress;
mod servers;
mod supervise;
mod tick;

pub use self::{
    clock::Clock,
    compute::compute,
    pace::LogPace,
    progress::{Beat, Progress},
    servers::{ANSWER_WITHIN, AwayServer, LOOK_EVERY, Server, Servers, UnsafeSetting},
    supervise::{LastSaid, Loop, LoopEnd, LoopError, Supervisor, pauses},
    tick::{tick, tick_after},
};
