//! The loop that notices a changed number of partitions, or a deleted topic.

use std::{sync::Arc, time::Duration};

use super::{Bus, Result};
use crate::runtime::{Loop, Supervisor};

const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Ends the round when the topics differ from those that this process knows, because it has no
/// readers for new partitions.
pub fn watch_partitions(bus: Arc<dyn Bus>, supervisor: &Supervisor) {
    supervisor.spawn_loop("partitions", bus, watch);
}

async fn watch(bus: Arc<dyn Bus>, cx: Loop) -> Result<()> {
    loop {
        bus.check_partitions().await?;
        cx.beat();
        if cx
            .stop
            .run_until_cancelled(cx.idle(tokio::time::sleep(LOOK_EVERY)))
            .await
            .is_none()
        {
            return Ok(());
        }
    }
}
