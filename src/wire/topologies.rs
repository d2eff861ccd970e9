//! Topologies: converts `model` to messages.

use super::{
    pb,
    time::{duration, timestamp},
};
use crate::model::{EdgeView, StageView, TopologyView};

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
