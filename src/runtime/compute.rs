//! CPU-bound work, off the threads that serve requests.

use std::panic;

use tokio::sync::Semaphore;

/// How many threads compute at the same time, for all callers together.
const THREADS: usize = 2;

static TURNS: Semaphore = Semaphore::const_new(THREADS);

/// Runs `quickly` right away. If work is left, runs `slowly` on a thread for blocking work, turn by
/// turn, until it is done. Both return whether the work is done.
///
/// A turn is short, so that work with many turns does not keep out the work of others.
pub async fn compute<W: Send + 'static>(
    mut work: W,
    quickly: fn(&mut W) -> bool,
    slowly: fn(&mut W) -> bool,
) -> W {
    let mut is_done = quickly(&mut work);
    while !is_done {
        let turn = TURNS.acquire().await;
        let computing = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let is_done = slowly(&mut work);
            (work, is_done)
        });
        (work, is_done) = match computing.await {
            Ok(advanced) => advanced,
            // Not a panic, so it was cancelled. Only a runtime that shuts down does that, and it
            // does not poll this future any more.
            Err(error) => match error.try_into_panic() {
                Ok(panic) => panic::resume_unwind(panic),
                Err(_) => std::future::pending().await,
            },
        };
    }
    work
}
