//! Stores failed attempts in the histories of their tasks.

use super::error::Failure;
use crate::{
    model::{AttemptState, FailedAttempt},
    pipelines::context::Context,
    telemetry::metrics::{self, Ended},
};

/// The most failed attempts in one transaction.
const AT_ONCE: usize = 1000;

/// Stores failed attempts, before the record that brought them is committed. After a crash in
/// between they are delivered again, and SQL recognises them.
///
/// Leaves out attempts that SQL refuses, because a history must not hold up the reports after it.
pub(super) async fn keep(context: &Context, failures: &[FailedAttempt]) -> Result<(), Failure> {
    if !context.settings.history {
        return Ok(());
    }
    for failures in failures.chunks(AT_ONCE) {
        match context.store.keep_failures(failures).await {
            Ok(()) => {
                let expired = failures
                    .iter()
                    .filter(|failure| failure.state == AttemptState::Expired)
                    .count();
                metrics::history_attempts(Ended::Expired, expired);
                metrics::history_attempts(Ended::Rejected, failures.len() - expired);
            }
            Err(error) if error.is_refusal() => {
                tracing::warn!(
                    "{} failed attempts are in no history: {error}",
                    failures.len()
                );
                metrics::history_attempts(Ended::Refused, failures.len());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
