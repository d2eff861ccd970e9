//! Topologies: converts `model` to messages.

use super::{
    pb,
    time::{duration, timestamp},
};
use crate::model::{EdgeView, FeedCounts, FeedView, StageView, TopologyView};

impl From<TopologyView> for pb::Topology {
    fn from(view: TopologyView) -> Self {
        Self {
            name: view.name,
            version: view.version,
            applied_by: view.applied_by,
            applied_at: Some(timestamp(view.applied_at)),
            text: view.text,
            on_dead: pb::TreeOnDead::from(view.on_dead).into(),
            timeout: view.timeout.and_then(duration),
            then: view.then,
            stages: view.stages.into_iter().map(Into::into).collect(),
            error: view.error,
            max_open: view.max_open,
            open: view.open,
            feeds: view.feeds.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<StageView> for pb::TopologyStage {
    fn from(stage: StageView) -> Self {
        Self {
            name: stage.name,
            queue: stage.queue,
            start: stage.start,
            lease: duration(stage.lease),
            max_attempts: stage.max_attempts,
            priority: pb::Priority::from(stage.priority).into(),
            edges: stage.edges.into_iter().map(Into::into).collect(),
            join: stage.join,
            topic: stage.topic,
        }
    }
}

impl From<FeedView> for pb::TopologyFeed {
    fn from(feed: FeedView) -> Self {
        let FeedCounts {
            trees,
            duplicates,
            refused,
            acknowledged,
        } = feed.counts;
        Self {
            name: feed.name,
            r#type: feed.kind,
            reads: feed.reads,
            into: feed.into,
            ack: feed.ack.as_str().to_owned(),
            trees,
            duplicates,
            refused,
            acknowledged,
            acks_pending: feed.acks_pending,
            held: feed.held,
        }
    }
}

impl From<EdgeView> for pb::TopologyEdge {
    fn from(edge: EdgeView) -> Self {
        Self {
            port: edge.port,
            to: edge.to,
            r#match: edge.matching,
        }
    }
}
