//! Work that computes for long, off the threads that serve others.

use std::panic;

/// Computes in a thread for blocking work if `is_large`, otherwise at once.
pub async fn compute<T: Send + 'static>(is_large: bool, work: impl FnOnce() -> T + Send + 'static) -> T {
    if !is_large {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        // Nobody cancels it: a runtime that ends does not poll this any more.
        Err(error) => match error.try_into_panic() {
            Ok(panic) => panic::resume_unwind(panic),
            Err(_) => std::future::pending().await,
        },
    }
}
