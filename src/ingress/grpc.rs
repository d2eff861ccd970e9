//! The gRPC API: the proto's services as they are, with reflection and health.

use std::time::Duration;

use tokio::net::TcpListener;
use tonic::{
    Request, Response, Status,
    service::Routes,
    transport::{Server, server::TcpIncoming},
};
use tonic_health::{ServingStatus, server::HealthReporter};

use super::{State, check_insert_size, not_run_here};
use crate::{
    discovery,
    model::TaskId,
    pb::{
        self,
        discovery_server::{Discovery, DiscoveryServer},
        tasks_server::{Tasks, TasksServer},
    },
    reading, tasks,
};

/// A client that does not answer a ping in time has gone, and its waiting calls end with it.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Calls of one connection at a time: it bounds what one client can make us hold.
const STREAMS_PER_CONNECTION: u32 = 1024;

/// Serves until `state.stop`, then until the calls in hand are answered.
pub async fn serve(listener: TcpListener, state: State) -> anyhow::Result<()> {
    let stop = state.stop.clone();
    let (routes, health) = routes(&state).await?;
    let stopped = async move {
        stop.cancelled().await;
        // Load balancers look elsewhere while the last calls are answered.
        set_health(&health, &[DISCOVERY, TASKS, WHOLE], ServingStatus::NotServing).await;
    };
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(PING_EVERY));
    Server::builder()
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
        .max_concurrent_streams(STREAMS_PER_CONNECTION)
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming, stopped)
        .await?;
    Ok(())
}

const DISCOVERY: &str = "taskd.v1.Discovery";
const TASKS: &str = "taskd.v1.Tasks";
/// The health of the server as a whole.
const WHOLE: &str = "";

/// The services. Those whose pipeline this process does not run are there too: they say so, and are not healthy.
pub async fn routes(state: &State) -> anyhow::Result<(Routes, HealthReporter)> {
    let (reporter, health) = tonic_health::server::health_reporter();
    for (service, runs) in [(DISCOVERY, state.discovery.is_some()), (TASKS, state.tasks.is_some()), (WHOLE, true)] {
        let status = if runs { ServingStatus::Serving } else { ServingStatus::NotServing };
        set_health(&reporter, &[service], status).await;
    }
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(pb::DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let max = state.settings.limits.max_request_bytes;
    let routes = Routes::new(DiscoveryServer::new(Service(state.clone())).max_decoding_message_size(max))
        .add_service(TasksServer::new(Service(state.clone())).max_decoding_message_size(max))
        .add_service(health)
        .add_service(reflection);
    Ok((routes, reporter))
}

async fn set_health(reporter: &HealthReporter, services: &[&str], status: ServingStatus) {
    for service in services {
        reporter.set_service_status(service, status).await;
    }
}

struct Service(State);

impl Service {
    fn tasks(&self) -> Result<&tasks::Handle, Status> {
        self.0.tasks.as_ref().ok_or_else(|| Status::unavailable(not_run_here("tasks")))
    }
}

#[tonic::async_trait]
impl Discovery for Service {
    async fn insert_tasks(
        &self,
        request: Request<pb::InsertTasksRequest>,
    ) -> Result<Response<pb::InsertTasksResponse>, Status> {
        let tasks = request.into_inner().tasks;
        check_insert_size(tasks.len(), &self.0.settings).map_err(Status::invalid_argument)?;
        let Some(discovery) = &self.0.discovery else { return Err(Status::unavailable(not_run_here("discovery"))) };
        let results = if tasks.is_empty() { Vec::new() } else { discovery.insert(tasks).await? };
        Ok(Response::new(pb::InsertTasksResponse { results }))
    }

    async fn get_task(&self, request: Request<pb::GetTaskRequest>) -> Result<Response<pb::Task>, Status> {
        let text = request.into_inner().id;
        let wrong = |_| {
            Status::invalid_argument(format!("{text:?} is not a task id; ids are UUIDs, as an insert answers them"))
        };
        let id: TaskId = text.parse().map_err(wrong)?;
        let Some(reading) = &self.0.reading else {
            return Err(Status::unavailable(not_run_here("discovery or tasks")));
        };
        let task = reading.task(id).await?;
        task.map(Response::new).ok_or_else(|| {
            Status::not_found(format!("there is no task {id}, or it finished so long ago that it was removed"))
        })
    }
}

#[tonic::async_trait]
impl Tasks for Service {
    async fn get_tasks(&self, request: Request<pb::GetTasksRequest>) -> Result<Response<pb::GetTasksResponse>, Status> {
        // A stop ends the wait: dropping the call gives back what it got.
        let leased = self.0.stop.run_until_cancelled(self.tasks()?.get(request.into_inner())).await;
        Ok(Response::new(leased.unwrap_or_else(|| Ok(tasks::Answer::default()))?.deliver()))
    }

    async fn complete_tasks(
        &self,
        request: Request<pb::CompleteTasksRequest>,
    ) -> Result<Response<pb::CompleteTasksResponse>, Status> {
        Ok(Response::new(self.tasks()?.complete(request.into_inner()).await?))
    }

    async fn reject_tasks(
        &self,
        request: Request<pb::RejectTasksRequest>,
    ) -> Result<Response<pb::RejectTasksResponse>, Status> {
        Ok(Response::new(self.tasks()?.reject(request.into_inner()).await?))
    }

    async fn extend_tasks(
        &self,
        request: Request<pb::ExtendTasksRequest>,
    ) -> Result<Response<pb::ExtendTasksResponse>, Status> {
        Ok(Response::new(self.tasks()?.extend(request.into_inner()).await?))
    }
}

impl From<discovery::Error> for Status {
    fn from(error: discovery::Error) -> Self {
        match error {
            discovery::Error::Busy(_) => Self::resource_exhausted(error.to_string()),
            discovery::Error::Unavailable(_) => Self::unavailable(error.to_string()),
        }
    }
}

impl From<tasks::Error> for Status {
    fn from(error: tasks::Error) -> Self {
        match error {
            tasks::Error::Invalid(_) => Self::invalid_argument(error.to_string()),
            tasks::Error::Unavailable(_) => Self::unavailable(error.to_string()),
        }
    }
}

impl From<reading::Unavailable> for Status {
    fn from(error: reading::Unavailable) -> Self {
        Self::unavailable(error.to_string())
    }
}
