//! `taskd partitions`: gives the topics more partitions.

use anyhow::bail;
use tokio_util::sync::CancellationToken;

use super::connect;
use crate::{
    bus::Topic,
    config::Settings,
    embedded::{DataDir, RedisServer},
};

const RAISED: [Topic; 2] = [Topic::Pipeline, Topic::TaskResults];

/// Raises the topics that taskd reads to `partitions`. Returns how many they had. Running processes
/// notice the change and start over.
pub async fn raise(settings: Settings, partitions: u32) -> anyhow::Result<String> {
    connect::check(&settings)?;
    let mut redis = None;
    let mut server = None;
    if settings.bus_url.is_none() {
        let url = match &settings.redis_url {
            Some(url) => url.as_str().to_owned(),
            None => {
                super::must_have_run(&settings)?;
                let data = DataDir::lock(&settings.data_dir)?;
                let started = RedisServer::start_with(&data, settings.redis.max_memory).await?;
                server.insert(started).url().to_owned()
            }
        };
        redis = Some(connect::redis(&url, &settings).await?);
    }
    // With a wrong prefix, opening the bus would create topics and raise those.
    let names = RAISED.map(Topic::as_str);
    if let Some(topic) = connect::missing_topics(&settings, redis.as_ref(), &names)
        .await?
        .first()
    {
        let place = match (&settings.bus_url, &settings.redis_url) {
            (Some(_), _) => "bus_url",
            (None, Some(_)) => "redis_url, redis_prefix",
            (None, None) => "data_dir",
        };
        bail!(
            "there is no topic {}{topic}: {place} and topic_prefix must be those of a taskd that has run",
            settings.topic_prefix
        );
    }
    let bus = connect::bus(&settings, redis.as_ref(), "partitions").await?;
    let topics = RAISED.map(|topic| (topic, bus.partitions(topic)));
    for (topic, found) in topics {
        if found > partitions {
            bail!(
                "{topic} has {found} partitions, and there is no way back: unread tasks would go with them"
            );
        }
    }
    for (topic, found) in topics {
        if found < partitions {
            bus.raise_partitions(topic, partitions).await?;
        }
    }
    bus.close().await;
    if let Some(server) = server {
        let now = CancellationToken::new();
        now.cancel();
        server.supervise(now).await;
    }
    let raised =
        topics.map(|(topic, found)| format!("{topic}: {found} -> {partitions} partitions"));
    Ok(raised.join("\n"))
}
