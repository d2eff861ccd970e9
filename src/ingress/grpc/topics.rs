//! The service `Topics`: topics, the records that are published to them and read, and the
//! subscriptions that turn these into tasks.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, stream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{Service, open, results};
use crate::{
    api::{Api, Reading},
    model::{Caller, NewRecord, PutSubscription, PutTopic, ReadTopic, SeekTo, TopicPage},
    wire::{
        pb::{self, topics_server::Topics},
        topics::read_from,
    },
};

/// How long a follower waits for records at a time. It notices in between that taskd stops.
const WAIT: Duration = Duration::from_secs(15);

/// The records that a follower gets.
type Followed = Pin<Box<dyn Stream<Item = Result<pb::FollowTopicResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Topics for Service {
    async fn list_topics(
        &self,
        request: Request<pb::ListTopicsRequest>,
    ) -> Result<Response<pb::ListTopicsResponse>, Status> {
        let (caller, _) = open(request);
        let topics = results(self.0.api.topics(&caller).await?);
        self.within(&caller, pb::ListTopicsResponse { topics })
    }

    async fn put_topic(
        &self,
        request: Request<pb::PutTopicRequest>,
    ) -> Result<Response<pb::Topic>, Status> {
        let (caller, request) = open(request);
        let name = request.topic.clone();
        let put = PutTopic::try_from(request).map_err(Status::invalid_argument)?;
        let topic = self.0.api.put_topic(&caller, &name, &put).await?;
        Ok(Response::new(topic.into()))
    }

    async fn get_topic(
        &self,
        request: Request<pb::GetTopicRequest>,
    ) -> Result<Response<pb::Topic>, Status> {
        let (caller, request) = open(request);
        let topic = self.0.api.topic(&caller, &request.topic).await?;
        self.within(&caller, topic.into())
    }

    async fn delete_topic(
        &self,
        request: Request<pb::DeleteTopicRequest>,
    ) -> Result<Response<pb::DeleteTopicResponse>, Status> {
        let (caller, request) = open(request);
        self.0.api.delete_topic(&caller, &request.topic).await?;
        Ok(Response::new(pb::DeleteTopicResponse {}))
    }

    async fn publish(
        &self,
        request: Request<pb::PublishRequest>,
    ) -> Result<Response<pb::PublishResponse>, Status> {
        let (caller, request) = open(request);
        let records = request.records.into_iter().map(NewRecord::from).map(Ok);
        let publish = self.0.api.publish(
            &caller,
            &request.topic,
            records.collect(),
            self.0.api.turn(),
        );
        let results = results(publish.await?);
        Ok(Response::new(pb::PublishResponse { results }))
    }

    async fn read_topic(
        &self,
        request: Request<pb::ReadTopicRequest>,
    ) -> Result<Response<pb::ReadTopicResponse>, Status> {
        let (caller, request) = open(request);
        let name = request.topic.clone();
        let read = ReadTopic::try_from(request).map_err(Status::invalid_argument)?;
        let page = self.0.api.read_topic(&caller, &name, &read).await?;
        self.within(&caller, page.into())
    }

    async fn explain_record(
        &self,
        request: Request<pb::ExplainRecordRequest>,
    ) -> Result<Response<pb::RecordExplanation>, Status> {
        let (caller, request) = open(request);
        let pb::ExplainRecordRequest {
            topic,
            partition,
            offset,
        } = request;
        let explain = self
            .0
            .api
            .explain_record(&caller, &topic, partition, &offset);
        self.within(&caller, explain.await?.into())
    }

    async fn list_subscriptions(
        &self,
        request: Request<pb::ListSubscriptionsRequest>,
    ) -> Result<Response<pb::ListSubscriptionsResponse>, Status> {
        let (caller, _) = open(request);
        let subscriptions = results(self.0.api.subscriptions(&caller).await?);
        self.within(&caller, pb::ListSubscriptionsResponse { subscriptions })
    }

    async fn put_subscription(
        &self,
        request: Request<pb::PutSubscriptionRequest>,
    ) -> Result<Response<pb::Subscription>, Status> {
        let (caller, request) = open(request);
        let name = request.subscription.clone();
        let put = PutSubscription::try_from(request).map_err(Status::invalid_argument)?;
        let subscription = self.0.api.put_subscription(&caller, &name, &put).await?;
        Ok(Response::new(subscription.into()))
    }

    async fn get_subscription(
        &self,
        request: Request<pb::GetSubscriptionRequest>,
    ) -> Result<Response<pb::Subscription>, Status> {
        let (caller, request) = open(request);
        let subscription = self.0.api.subscription(&caller, &request.subscription);
        self.within(&caller, subscription.await?.into())
    }

    async fn delete_subscription(
        &self,
        request: Request<pb::DeleteSubscriptionRequest>,
    ) -> Result<Response<pb::DeleteSubscriptionResponse>, Status> {
        let (caller, request) = open(request);
        let delete = self
            .0
            .api
            .delete_subscription(&caller, &request.subscription);
        delete.await?;
        Ok(Response::new(pb::DeleteSubscriptionResponse {}))
    }

    async fn seek(
        &self,
        request: Request<pb::SeekRequest>,
    ) -> Result<Response<pb::Subscription>, Status> {
        let (caller, request) = open(request);
        let to = SeekTo {
            place: request.to,
            cancels: request.cancel,
        };
        let sought = self.0.api.seek(&caller, &request.subscription, &to);
        Ok(Response::new(sought.await?.into()))
    }

    type FollowTopicStream = Followed;

    async fn follow_topic(
        &self,
        request: Request<pb::FollowTopicRequest>,
    ) -> Result<Response<Followed>, Status> {
        let (caller, request) = open(request);
        let name = request.topic.clone();
        let mut request = ReadTopic::try_from(request).map_err(Status::invalid_argument)?;
        let mut reading = Reading::default();
        let first = self.0.api.read_on(&caller, &name, &request, &mut reading);
        let first = first.await?;
        request.wait = WAIT;
        let follower = Follower {
            api: Arc::clone(&self.0.api),
            caller,
            name,
            request,
            reading,
            page: Some(first),
            stop: self.0.stop.clone(),
        };
        let pages = stream::unfold(Some(follower), async |follower| {
            let mut follower = follower?;
            Some(match follower.next().await {
                Ok(page) => (Ok(page), Some(follower)),
                Err(end) => (Err(end), None),
            })
        });
        Ok(Response::new(Box::pin(pages)))
    }
}

struct Follower {
    api: Arc<Api>,
    caller: Caller,
    name: String,
    request: ReadTopic,
    reading: Reading,
    /// The first page, until it is sent.
    page: Option<TopicPage>,
    stop: CancellationToken,
}

impl Follower {
    /// Waits for the next records. The error is the end of the stream.
    async fn next(&mut self) -> Result<pb::FollowTopicResponse, Status> {
        loop {
            let page = match self.page.take() {
                Some(page) => page,
                None if self.stop.is_cancelled() => {
                    return Err(Status::unavailable(
                        "taskd stops; go on elsewhere from `next` of the last answer",
                    ));
                }
                None => {
                    let read = self.api.read_on(
                        &self.caller,
                        &self.name,
                        &self.request,
                        &mut self.reading,
                    );
                    read.await?
                }
            };
            self.request.from = read_from(&page.next).map_err(Status::internal)?;
            if !page.records.is_empty() {
                return Ok(pb::FollowTopicResponse {
                    records: results(page.records),
                    next: page.next,
                });
            }
        }
    }
}
