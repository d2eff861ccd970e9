//! Checks whether the queues of a worker are drained, for `--exit-when-idle`.

use std::time::Duration;

use tokio::sync::Mutex;
use tonic::Code;

use crate::cli::{
    client::{Server, Taskd, is_transient, said},
    wait::are_drained,
};

/// How long each call waits for the queues to become drained.
const WAIT: Duration = Duration::from_secs(1);

pub(super) struct Drained<'a> {
    server: &'a Server,
    queues: &'a [String],
    /// The connection of the last successful call.
    taskd: Mutex<Option<Taskd>>,
}

impl<'a> Drained<'a> {
    pub(super) fn new(server: &'a Server, queues: &'a [String]) -> Self {
        Self {
            server,
            queues,
            taskd: Mutex::default(),
        }
    }

    /// Fails if asking can never succeed.
    pub(super) async fn may_ask(&self) -> anyhow::Result<()> {
        let taskd = self.server.connect().await?;
        let Err(status) = are_drained(&taskd, self.queues, Duration::ZERO).await else {
            return Ok(());
        };
        if status.code() == Code::PermissionDenied {
            anyhow::bail!(
                "{}; --exit-when-idle asks whether the queue is drained: give the token the role read, too",
                said(&status)
            );
        }
        anyhow::ensure!(is_transient(&status), "{}", said(&status));
        Ok(())
    }

    /// Returns whether the queues are drained, after waiting a short time for that. The error says
    /// why taskd did not answer.
    pub(super) async fn ask(&self) -> Result<bool, String> {
        let mut connection = self.taskd.lock().await;
        let taskd = match connection.take() {
            Some(taskd) => taskd,
            None => {
                // Without the patience of a start: the caller counts how long taskd is away.
                let connected = self.server.connect_once().await;
                connected.map_err(|error| format!("{error:#}"))?
            }
        };
        let drained = are_drained(&taskd, self.queues, WAIT).await;
        let drained = drained.map_err(|status| said(&status))?;
        *connection = Some(taskd);
        Ok(drained)
    }
}
