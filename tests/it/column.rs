//! taskd's own backends.

use crate::support::daemon::Daemon;

pub(crate) async fn start(config: &str, args: &[&str]) -> Daemon {
    Daemon::start(config, args).await
}
