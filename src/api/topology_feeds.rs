//! Feeds of topologies: those of topics are subscriptions, which apply makes. They are deleted with
//! their feed.

use std::collections::{HashMap, HashSet};

use super::{
    access::reaches_everything,
    error::Error,
    handle::Api,
    known_topics::KNOWN_FOR,
    reader::Reader,
    subscriptions::{may_change, wanted},
};
use crate::{
    model::{
        Caller, FeedCounts, FeedSettings, FeedSource, PutSubscription, ReadCounts,
        SubscriptionName, Topology, TopologyView,
    },
    store::{StoredFeed, StoredTopology},
    wire::topics::read_place,
};

/// The feeds of topics, each with what its subscription must be.
fn of_topics(topology: &Topology) -> impl Iterator<Item = (&FeedSettings, PutSubscription)> {
    topology.feeds.iter().filter_map(|feed| {
        let FeedSource::Topic {
            topic,
            start,
            matching,
        } = &feed.source
        else {
            return None;
        };
        let subscription = PutSubscription {
            topic: Some(topic.as_str().to_owned()),
            queue: Some(topology.stages[feed.into].queue.as_str().to_owned()),
            start: Some(start.clone()),
            matching: Some(matching.to_json()),
            ..PutSubscription::default()
        };
        Some((feed, subscription))
    })
}

/// Refuses feeds of Redis from a caller of a scope, which says nothing about what these may reach.
pub(super) fn check_redis_feeds(caller: &Caller, topology: &Topology) -> Result<(), Error> {
    if topology.feeds.iter().any(|feed| !feed.source.is_topic()) {
        reaches_everything(caller)?;
    }
    Ok(())
}

impl Api {
    /// Refuses feeds of topics for which there can be no subscription.
    pub(super) async fn check_topic_feeds(
        &self,
        caller: &Caller,
        topology: &Topology,
    ) -> Result<(), Error> {
        let query = self.query()?;
        if of_topics(topology).next().is_none() {
            return Ok(());
        }
        let subscriptions = query.store().subscriptions().await?;
        let topics = query.store().topics().await?;
        for (feed, put) in of_topics(topology) {
            if let Some(start) = &put.start {
                let what = format!("start of feed {}:", feed.name);
                read_place(&what, start).map_err(Error::Invalid)?;
            }
            let known = subscriptions.iter().find(|known| known.name == feed.name);
            let wanted = wanted(&feed.name, &put, known, &topics, query.now_unix_ms())?;
            if let Some(known) = known {
                may_change(caller, known)?;
            }
            may_change(caller, &wanted)?;
        }
        Ok(())
    }

    /// The subscriptions of feeds that are in a topology and not in its next version. They go in the
    /// transaction that changes the topology.
    pub(super) async fn leaving_feeds(
        &self,
        caller: &Caller,
        before: Option<&StoredTopology>,
        next: Option<&Topology>,
    ) -> Result<Vec<SubscriptionName>, Error> {
        let Some(before) = before.and_then(|before| Topology::read(&before.text).ok()) else {
            return Ok(Vec::new());
        };
        let stay: HashSet<_> = next
            .into_iter()
            .flat_map(of_topics)
            .map(|(feed, put)| (&feed.name, put.topic))
            .collect();
        let leaving: Vec<_> = of_topics(&before)
            .filter(|(feed, put)| !stay.contains(&(&feed.name, put.topic.clone())))
            .collect();
        if leaving.is_empty() {
            return Ok(Vec::new());
        }
        let query = self.query()?;
        let known = query.store().subscriptions().await?;
        let topics = query.store().topics().await?;
        for (feed, put) in &leaving {
            match known.iter().find(|known| known.name == feed.name) {
                Some(known) => may_change(caller, known)?,
                // The apply of before may be about to make it, unless its topic is gone.
                None => {
                    if let Ok(new) = wanted(&feed.name, put, None, &topics, query.now_unix_ms()) {
                        may_change(caller, &new)?;
                    }
                }
            }
        }
        let names = leaving.into_iter().map(|(feed, _)| feed.name.clone());
        Ok(names.collect())
    }

    /// Makes the subscriptions of the feeds of a topology that is in force. Applying it again repeats
    /// this.
    pub(super) async fn put_topic_feeds(
        &self,
        caller: &Caller,
        topology: &Topology,
        stored: &StoredTopology,
    ) -> Result<(), Error> {
        let wanted: Vec<_> = of_topics(topology).collect();
        if !wanted.is_empty() {
            // Until the feeder knows the topology, records would open no trees.
            tokio::time::sleep(KNOWN_FOR).await;
        }
        for (feed, put) in &wanted {
            // Meanwhile the topology may have been changed or deleted.
            self.put_subscription_of(caller, feed.name.as_str(), put, Some(stored))
                .await?;
        }
        Ok(())
    }
}

impl Reader {
    /// Fills in what became of the records of feeds.
    pub(super) async fn fill_in_feeds(&self, views: &mut [TopologyView]) -> Result<(), Error> {
        if views.iter().all(|view| view.feeds.is_empty()) {
            return Ok(());
        }
        let stored = self.store().feeds().await?;
        // A feed may have read other sources before.
        let stored: HashMap<(&str, &str), &StoredFeed> = stored
            .iter()
            .map(|feed| ((feed.name.as_str(), feed.source.as_str()), feed))
            .collect();
        let mut subscriptions: HashMap<String, ReadCounts> = HashMap::new();
        for subscription in self.store().subscriptions().await? {
            subscriptions.insert(subscription.name.to_string(), ReadCounts::default());
        }
        for position in self.store().positions(None).await? {
            let name = position.key.subscription.as_str();
            if let Some(counts) = subscriptions.get_mut(name) {
                counts.add(&position.counts);
            }
        }
        for view in views {
            for feed in &mut view.feeds {
                let full_name = format!("{}.{}", view.name, feed.name);
                if feed.kind != "topic" {
                    match stored.get(&(full_name.as_str(), feed.source.as_str())) {
                        Some(stored) => {
                            feed.counts = stored.counts;
                            feed.acks_pending = stored.acks_pending;
                            feed.held.clone_from(&stored.held);
                        }
                        None => "nobody has read it yet".clone_into(&mut feed.held),
                    }
                    continue;
                }
                match subscriptions.get(&full_name) {
                    Some(counts) => {
                        let others = counts.duplicates + counts.filtered + counts.refused;
                        feed.counts = FeedCounts {
                            trees: counts.read.saturating_sub(others),
                            duplicates: counts.duplicates,
                            refused: counts.refused,
                            acknowledged: counts.read,
                        };
                    }
                    None => {
                        feed.held = format!(
                            "its subscription {full_name} is gone: apply the topology again"
                        );
                    }
                }
            }
        }
        Ok(())
    }
}
