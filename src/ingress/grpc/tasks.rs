//! The service `Tasks`: leases, reports and sessions.

use prost::Message as _;
use tonic::{Request, Response, Status, Streaming};

use super::{
    super::{net::budget::Share, net::delivery::Deliveries},
    Service, open, results,
    stream::{self, Frames},
};
use crate::{
    model::{Caller, GetTasks, OpenSession, WantTasks},
    pipelines::tasks::{Leases, SharedTasks},
    queue::Delivery,
    telemetry::metrics,
    wire::pb::{self, tasks_server::Tasks},
};

/// The largest answer that clients accept by default.
const TAKEN_BY_DEFAULT: usize = 4 << 20;

#[tonic::async_trait]
impl Tasks for Service {
    async fn get_tasks(
        &self,
        request: Request<pb::GetTasksRequest>,
    ) -> Result<Response<pb::GetTasksResponse>, Status> {
        give_room_back(&request);
        let (caller, request) = open(request);
        let is_default = request.max_bytes == 0;
        let Leases { tasks, deliveries } =
            self.0.api.get(&caller, GetTasks::try_from(request)).await?;
        self.leased(
            &caller,
            pb::GetTasksResponse {
                tasks: results(tasks),
            },
            deliveries,
            is_default,
        )
    }

    async fn complete_tasks(
        &self,
        request: Request<pb::CompleteTasksRequest>,
    ) -> Result<Response<pb::CompleteTasksResponse>, Status> {
        let (caller, mut request) = open(request);
        let Some(next) = request.next.take() else {
            let answers = self.0.api.complete(&caller, request.into()).await?;
            return Ok(Response::new(pb::CompleteTasksResponse {
                results: results(answers),
                tasks: Vec::new(),
            }));
        };
        let is_default = next.max_bytes == 0;
        let next = GetTasks::try_from(next);
        let (answers, Leases { tasks, deliveries }) = self
            .0
            .api
            .complete_and_get(&caller, request.into(), next)
            .await?;
        let plain = pb::CompleteTasksResponse {
            results: results(answers),
            tasks: Vec::new(),
        };
        if tasks.is_empty() {
            return Ok(Response::new(plain));
        }
        let answer = pb::CompleteTasksResponse {
            tasks: results(tasks),
            ..plain.clone()
        };
        // If there is no room for the tasks, their leases go back. The reports are done in any
        // case.
        self.leased(&caller, answer, deliveries, is_default)
            .or_else(|_no_room| Ok(Response::new(plain)))
    }

    async fn reject_tasks(
        &self,
        request: Request<pb::RejectTasksRequest>,
    ) -> Result<Response<pb::RejectTasksResponse>, Status> {
        let (caller, request) = open(request);
        let answers = self.0.api.reject(&caller, request.into()).await?;
        Ok(Response::new(pb::RejectTasksResponse {
            results: results(answers),
        }))
    }

    async fn extend_tasks(
        &self,
        request: Request<pb::ExtendTasksRequest>,
    ) -> Result<Response<pb::ExtendTasksResponse>, Status> {
        let (caller, request) = open(request);
        let answers = self.0.api.extend(&caller, request.into()).await?;
        Ok(Response::new(pb::ExtendTasksResponse {
            results: results(answers),
        }))
    }

    type StreamTasksStream = Frames;

    async fn stream_tasks(
        &self,
        request: Request<Streaming<pb::WorkerFrame>>,
    ) -> Result<Response<Frames>, Status> {
        stream::serve(&self.0, request)
    }

    async fn open_session(
        &self,
        request: Request<pb::OpenSessionRequest>,
    ) -> Result<Response<pb::OpenSessionResponse>, Status> {
        let (caller, request) = open(request);
        Ok(Response::new(
            self.0
                .api
                .open_session(&caller, OpenSession::try_from(request))
                .await?
                .into(),
        ))
    }

    async fn want_tasks(
        &self,
        request: Request<pb::WantTasksRequest>,
    ) -> Result<Response<pb::WantTasksResponse>, Status> {
        give_room_back(&request);
        let (caller, request) = open(request);
        let room = |bytes| {
            self.0
                .budget
                .answer(&caller.access, bytes)
                .map_err(|no_room| no_room.to_string())
        };
        let (next, room) = self
            .0
            .api
            .want_tasks(&caller, WantTasks::try_from(request), room)
            .await?;
        let SharedTasks {
            leases: Leases { tasks, deliveries },
            granted,
            pending,
        } = next;
        let (tasks, demand, in_hand) = (results(tasks), pending.demand, pending.in_hand);
        let mut response = Response::new(pb::WantTasksResponse {
            tasks,
            granted,
            demand,
            in_hand,
        });
        if let Some(room) = room {
            // The session book has the tasks already, so the answer must go out.
            room.become_answer(response.get_ref().encoded_len());
            response.extensions_mut().insert(room);
        }
        response
            .extensions_mut()
            .insert(Deliveries::from(deliveries));
        Ok(response)
    }

    async fn surrender_tasks(
        &self,
        request: Request<pb::SurrenderTasksRequest>,
    ) -> Result<Response<pb::SurrenderTasksResponse>, Status> {
        let (caller, request) = open(request);
        let (surrendered, in_hand) = self.0.api.surrender_tasks(&caller, request.into()).await?;
        Ok(Response::new(pb::SurrenderTasksResponse {
            surrendered,
            in_hand,
        }))
    }

    async fn get_pending_count(
        &self,
        request: Request<pb::GetPendingCountRequest>,
    ) -> Result<Response<pb::GetPendingCountResponse>, Status> {
        let (caller, request) = open(request);
        Ok(Response::new(
            self.0
                .api
                .pending_count(&caller, request.into())
                .await?
                .into(),
        ))
    }

    async fn report_tasks(
        &self,
        request: Request<pb::ReportTasksRequest>,
    ) -> Result<Response<pb::ReportTasksResponse>, Status> {
        let (caller, request) = open(request);
        Ok(Response::new(
            self.0
                .api
                .report_tasks(&caller, request.into())
                .await?
                .into(),
        ))
    }

    async fn close_session(
        &self,
        request: Request<pb::CloseSessionRequest>,
    ) -> Result<Response<pb::CloseSessionResponse>, Status> {
        let (caller, request) = open(request);
        Ok(Response::new(
            self.0
                .api
                .close_session(&caller, request.into())
                .await?
                .into(),
        ))
    }
}

/// Gives back the memory of a call that may wait: its decoded message contains only names.
fn give_room_back<T>(request: &Request<T>) {
    request
        .extensions()
        .get::<Share>()
        .expect("each request has a share")
        .become_answer(0);
}

impl Service {
    /// Makes an answer with leases, which the connection confirms or gives back.
    fn leased<T: prost::Message>(
        &self,
        caller: &Caller,
        answer: T,
        deliveries: Vec<Delivery>,
        is_default: bool,
    ) -> Result<Response<T>, Status> {
        let bytes = answer.encoded_len();
        let mut response = self.within(caller, answer)?;
        if is_default && bytes > TAKEN_BY_DEFAULT {
            metrics::grpc_oversized_answer();
        }
        response
            .extensions_mut()
            .insert(Deliveries::from(deliveries));
        Ok(response)
    }
}
