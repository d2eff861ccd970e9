//! More partitions later: raised by a command, noticed by the processes that run.

use std::{sync::Arc, time::Duration};

use anyhow::bail;
use tokio_util::sync::CancellationToken;

use super::{check, connect_redis, open_bus};
use crate::{
    bus::{Bus, Topic},
    config::Settings,
    embedded::{DataDir, RedisServer},
    runtime::Supervisor,
};

/// How often a process looks for partitions that were added.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// More partitions for the topics that taskd reads. Processes that run notice it, and go on with them.
pub async fn raise(settings: Settings, partitions: u32) -> anyhow::Result<()> {
    check(&settings)?;
    let (mut redis, mut server) = (None, None);
    if settings.bus_url.is_none() {
        let url = match &settings.redis_url {
            Some(url) => url.as_str().to_owned(),
            None => {
                let data = DataDir::lock(&settings.data_dir)?;
                let started = RedisServer::start_with(&data, settings.redis.max_memory).await?;
                server.insert(started).url().to_owned()
            }
        };
        redis = Some(connect_redis(&url, &settings).await?);
    }
    let bus = open_bus(&settings, redis.as_ref(), "partitions").await?;
    let topics = [Topic::Pipeline, Topic::TaskResults].map(|topic| (topic, bus.partitions(topic)));
    for (topic, found) in topics {
        if found > partitions {
            bail!("{topic} has {found} partitions, and there is no way back: unread tasks would go with them");
        }
    }
    for (topic, found) in topics {
        if found < partitions {
            bus.raise_partitions(topic, partitions).await?;
        }
        println!("{topic}: {found} -> {partitions} partitions");
    }
    bus.close().await;
    if let Some(server) = server {
        let now = CancellationToken::new();
        now.cancel();
        server.supervise(now).await;
    }
    Ok(())
}

/// Nobody reads, in this process, partitions that are younger than it.
pub(super) fn watch(bus: Arc<dyn Bus>, supervisor: &Supervisor) {
    let (beat, stop) = (Arc::new(supervisor.progress().register("partitions")), supervisor.stop_token());
    supervisor.spawn("partitions", move || {
        let (bus, beat, stop) = (Arc::clone(&bus), Arc::clone(&beat), stop.clone());
        async move {
            loop {
                bus.check_partitions().await?;
                beat.beat();
                if stop.run_until_cancelled(beat.idle(tokio::time::sleep(LOOK_EVERY))).await.is_none() {
                    return Ok(());
                }
            }
        }
    });
}
