//! `taskd events`: opens the bus of a running taskd to read topic `events`.

use std::sync::Arc;

use anyhow::bail;

use super::{connect, must_have_run};
use crate::{
    bus::{Bus, Log, Topic},
    config::Settings,
    embedded,
};

/// Opens the bus. Fails if it has no topic `events`, so that nothing is created.
pub async fn open_events(settings: &Settings) -> anyhow::Result<Arc<dyn Bus>> {
    connect::check(settings)?;
    // Without `bus_url` the bus is in Redis.
    let mut redis = None;
    if settings.bus_url.is_none() {
        let url = match &settings.redis_url {
            Some(url) => url.as_str().to_owned(),
            None => {
                must_have_run(settings)?;
                embedded::url_of_running(&settings.data_dir)?
            }
        };
        redis = Some(connect::redis(&url, settings).await?);
    }
    // On Redis Streams the topic comes into being with its first event.
    let wanted = match &settings.bus_url {
        Some(_) => Log::EVENTS.name,
        None => Topic::Pipeline.into(),
    };
    let missing = connect::missing_topics(settings, redis.as_ref(), &[&wanted]).await?;
    if !missing.is_empty() {
        bail!(
            "there is no topic {}events: a queue needs events = true, and --redis-url, --redis-prefix, --bus-url and \
             --topic-prefix must be those of the running taskd",
            settings.topic_prefix
        );
    }
    Ok(connect::bus(settings, redis.as_ref(), "events").await?)
}
