//! Subscriptions: converts messages to and from `model`.

use super::{pb, time::timestamp};
use crate::model::{
    OnDead, PositionView, PutSubscription, ReadCounts, RecordExplanation, RecordFate,
    RecordOfSubscription, SequenceBy, SubscriptionView,
};

impl TryFrom<pb::PutSubscriptionRequest> for PutSubscription {
    type Error = String;

    fn try_from(request: pb::PutSubscriptionRequest) -> Result<Self, String> {
        let sequence = request.sequence.map(|text| {
            let sequence: Result<SequenceBy, String> = text.parse();
            sequence.map_err(|error| format!("sequence: {error}"))
        });
        let on_dead = request.on_dead.map(|text| {
            let on_dead: Result<OnDead, String> = text.parse();
            on_dead.map_err(|error| format!("on_dead: {error}"))
        });
        let matching = request.match_json.map(|text| {
            serde_json::from_str(&text).map_err(|error| format!("match_json is not JSON: {error}"))
        });
        Ok(Self {
            topic: request.topic,
            queue: request.queue,
            start: request.start,
            matching: matching.transpose()?,
            sequence: sequence.transpose()?,
            on_dead: on_dead.transpose()?,
        })
    }
}

impl From<SubscriptionView> for pb::Subscription {
    fn from(view: SubscriptionView) -> Self {
        Self {
            name: view.name,
            topic: view.topic,
            queue: view.queue,
            start: view.start,
            match_json: view.matching.to_string(),
            sequence: view.sequence.as_str().to_owned(),
            on_dead: view.on_dead.as_str().to_owned(),
            created_at: Some(timestamp(view.created_at)),
            behind: view.behind,
            oldest_seconds: view.oldest_seconds,
            waiting: view.waiting,
            leased: view.leased,
            done: view.done,
            dead: view.dead,
            tasks: view.tasks,
            counts: Some(view.counts.into()),
            positions: view.positions.into_iter().map(Into::into).collect(),
            bulk: view.bulk.map(|id| id.to_string()).unwrap_or_default(),
        }
    }
}

impl From<ReadCounts> for pb::ReadCounts {
    fn from(counts: ReadCounts) -> Self {
        let ReadCounts {
            read,
            duplicates,
            filtered,
            refused,
            skipped,
        } = counts;
        Self {
            read,
            duplicates,
            filtered,
            refused,
            skipped,
        }
    }
}

impl From<PositionView> for pb::SubscriptionPosition {
    fn from(position: PositionView) -> Self {
        Self {
            topic: position.topic,
            partition: position.partition,
            offset: position.offset.unwrap_or_default(),
            replay: position.replay,
            behind: position.behind,
            counts: Some(position.counts.into()),
        }
    }
}

impl From<RecordExplanation> for pb::RecordExplanation {
    fn from(explanation: RecordExplanation) -> Self {
        let subscriptions = explanation.subscriptions.into_iter();
        Self {
            topic: explanation.topic,
            partition: explanation.partition,
            offset: explanation.offset,
            published_at: explanation.published_unix_ms.map(timestamp),
            subscriptions: subscriptions.map(Into::into).collect(),
        }
    }
}

impl From<RecordOfSubscription> for pb::RecordOfSubscription {
    fn from(of: RecordOfSubscription) -> Self {
        let status = of.status.map(|status| pb::TaskStatus::from(status).into());
        Self {
            subscription: of.subscription,
            queue: of.queue,
            fate: pb::RecordFate::from(of.fate).into(),
            task: of.task.map(|id| id.to_string()).unwrap_or_default(),
            status: status.unwrap_or_default(),
            letter: of.letter.map(|id| id.to_string()).unwrap_or_default(),
            says: of.says,
        }
    }
}

impl From<RecordFate> for pb::RecordFate {
    fn from(fate: RecordFate) -> Self {
        match fate {
            RecordFate::Task => Self::Task,
            RecordFate::Filtered => Self::Filtered,
            RecordFate::Refused => Self::Refused,
            RecordFate::Behind => Self::Behind,
            RecordFate::Skipped => Self::Skipped,
            RecordFate::NoTask => Self::NoTask,
        }
    }
}
