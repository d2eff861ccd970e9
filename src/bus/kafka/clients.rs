//! The clients that the bus and the logs of a process share.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use rdkafka::{
    admin::AdminClient,
    consumer::BaseConsumer,
    error::KafkaError,
    producer::{FutureProducer, Producer},
};

use super::{
    calls::{Failure, blocking, offset, watermarks},
    configs::ClientConfigs,
    detached::Detached,
    events::ClientEvents,
};
use crate::{bus::Topic, model::Offset};

pub(super) struct Clients {
    pub(super) configs: ClientConfigs,
    pub(super) events: ClientEvents,
    pub(super) producer: Mutex<Detached<FutureProducer<ClientEvents>>>,
    pub(super) admin: Detached<AdminClient<ClientEvents>>,
    /// Clients that only read committed offsets, created on the first request for a topic. They
    /// never join a group.
    pub(super) observers: Detached<Mutex<HashMap<Topic, Arc<BaseConsumer<ClientEvents>>>>>,
}

impl Clients {
    pub(super) fn producer(&self) -> FutureProducer<ClientEvents> {
        (**self.producer.lock()).clone()
    }

    /// Replaces the producer after a fatal error, because it would reject all records from then on.
    pub(super) fn replace_producer_if_broken(&self) {
        let mut producer = self.producer.lock();
        if let Some((code, reason)) = producer.client().fatal_error() {
            tracing::warn!("the kafka producer is replaced after {code}: {reason}");
            match self.configs.producer(&self.events) {
                Ok(new) => *producer = Detached::new(new),
                Err(error) => tracing::error!("no new kafka producer: {error}"),
            }
        }
    }

    /// Returns the first and the last offset of each partition; `None`: it is empty, also because
    /// of retention.
    pub(super) async fn extents(
        &self,
        name: String,
        partitions: u32,
    ) -> Result<Vec<Option<(Offset, Offset)>>, Failure> {
        let producer = self.producer();
        let extent = move |partition| {
            let (low, high) = watermarks(producer.client(), &name, partition)?;
            Ok(offset(low).zip(offset(high - 1)).filter(|_| low < high))
        };
        blocking(move || {
            (0..partitions)
                .map(extent)
                .collect::<Result<_, KafkaError>>()
        })
        .await
    }
}
