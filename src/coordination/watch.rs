//! The loops of each process that watch the ownership key and follow the clock of Redis, once a
//! second.

use std::time::{Duration, Instant};

use super::{Coordination, Error, Result};
use crate::runtime::{Loop, Supervisor};

const ASK_EVERY: Duration = Duration::from_secs(1);

impl Coordination {
    /// Ends the round if Redis has lost the ownership key.
    pub fn watch_owner(&self, store_id: String, supervisor: &Supervisor) {
        supervisor.spawn_loop("owner", (self.clone(), store_id), Self::check_owner);
    }

    async fn check_owner((coordination, store_id): (Self, String), cx: Loop) -> Result<()> {
        while coordination.owner().await?.as_ref() == Some(&store_id) {
            cx.beat();
            if !cx.pause(ASK_EVERY).await {
                return Ok(());
            }
        }
        Err(Error::Disowned)
    }

    /// Makes this process's clock follow that of Redis.
    pub fn watch_clock(&self, supervisor: &Supervisor) {
        supervisor.spawn_loop("clock", self.clone(), |coordination, cx| async move {
            cx.every(ASK_EVERY, || coordination.follow_clock()).await
        });
    }

    /// Asks Redis for its time once.
    pub async fn follow_clock(&self) -> Result<()> {
        let asked = Instant::now();
        if let Some(by) = self.clock.follow(self.time().await?, asked) {
            tracing::warn!(
                "redis's clock stands {by} ms beside what this process took the time for: Redis's counts"
            );
        }
        Ok(())
    }
}
