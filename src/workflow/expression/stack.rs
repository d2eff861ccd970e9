//! Threads of our own for expressions: parsing, compiling and evaluating recurse, and need more
//! stack than the threads of the runtime have.

use std::cell::Cell;
use std::panic;
use std::thread;

use parking_lot::{Condvar, Mutex};

use super::Error;

/// The stack of a thread. Only what is used of it takes memory.
const STACK: usize = 64 << 20;

/// How much of it an evaluation may use. The rest is for what lies between two ticks.
pub(super) const USABLE: usize = 40 << 20;

/// How many threads there are at a time. Others wait.
const THREADS: usize = 4;

static FREE: Mutex<usize> = Mutex::new(THREADS);
static FREED: Condvar = Condvar::new();

thread_local! {
    static OWN: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function on a thread with enough stack for expressions, and waits for it, which blocks
/// the calling thread. Expressions that the function compiles and evaluates run on the same thread:
/// a caller who has many calls this once for all, because starting a thread takes longer than most
/// evaluations.
pub fn with_stack<T: Send>(run: impl FnOnce() -> T + Send) -> Result<T, Error> {
    if OWN.get() {
        return Ok(run());
    }
    let _permit = Permit::wait();
    let result = thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("expression".to_owned())
            .stack_size(STACK)
            .spawn_scoped(scope, || {
                OWN.set(true);
                run()
            })
            .map_err(|error| Error::Thread(error.to_string()))?;
        Ok(thread.join())
    })?;
    // A panic of the caller's own function stays a panic.
    Ok(result.unwrap_or_else(|payload| panic::resume_unwind(payload)))
}

/// The right to one of the threads.
struct Permit;

impl Permit {
    fn wait() -> Permit {
        let mut free = FREE.lock();
        FREED.wait_while(&mut free, |free| *free == 0);
        *free -= 1;
        Permit
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *FREE.lock() += 1;
        FREED.notify_one();
    }
}
