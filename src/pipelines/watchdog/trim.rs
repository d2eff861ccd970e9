//! Removes old records that everybody has read from the bus.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{error::Error, lead::Lead};
use crate::{
    bus::{Bus, Keep, Topic},
    pipelines::context::Context,
    runtime::Loop,
    telemetry::metrics,
};

const EVERY: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub(super) struct Trim {
    bus: Arc<dyn Bus>,
    keep: Keep,
    lead: Lead,
}

impl Trim {
    pub(super) fn new(context: &Context, lead: &Lead) -> Self {
        let Context { bus, settings, .. } = context.clone();
        let keep = Keep {
            age: settings.topic_retention,
            records: settings.topic_retention_records,
        };
        Self {
            bus,
            keep,
            lead: lead.clone(),
        }
    }

    pub(super) async fn run(self, cx: Loop) -> Result<(), Error> {
        while self.lead.wait(&cx).await {
            let started = Instant::now();
            let mut failed = Ok(());
            for topic in Topic::ALL {
                match self.bus.trim(topic, self.keep).await {
                    Ok(0) => {}
                    Ok(trimmed) => {
                        tracing::debug!(%topic, "deleted {trimmed} old records of {topic}")
                    }
                    Err(error) if error.is_lost() => return Err(error.into()),
                    // The leader of this topic is away, but perhaps not those of other topics.
                    Err(error) => failed = failed.and(Err(error)),
                }
                cx.beat();
            }
            failed?;
            metrics::watchdog_step("trim", started.elapsed());
            cx.idle(cx.pause(EVERY)).await;
        }
        Ok(())
    }
}
