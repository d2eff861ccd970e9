//! The composition root.

use crate::config::Settings;

pub async fn run(_settings: Settings) -> anyhow::Result<()> {
    anyhow::bail!("not built yet")
}

pub async fn migrate(_settings: Settings) -> anyhow::Result<()> {
    anyhow::bail!("not built yet")
}
