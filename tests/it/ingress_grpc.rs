//! The gRPC API over a real socket, as far as it answers by itself.

use axum::http::Request;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use taskd::{
    ingress::{self, State},
    wire::pb::{self, discovery_client::DiscoveryClient, tasks_client::TasksClient},
};
use tokio::{net::TcpStream, task::JoinHandle};
use tonic::{Code, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest,
};

use crate::{
    ingress_http::idle_state,
    support::{PATIENCE, daemon::Daemon, until},
};

pub(crate) async fn start(
    state: State,
) -> (
    Channel,
    JoinHandle<Result<(), tonic_reflection::server::Error>>,
) {
    let listener = ingress::bind(([127, 0, 0, 1], 0).into(), "grpc")
        .await
        .unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(ingress::grpc::serve(listener, state));
    (
        Channel::from_shared(url)
            .unwrap()
            .timeout(PATIENCE)
            .connect()
            .await
            .unwrap(),
        server,
    )
}

#[tokio::test]
async fn a_process_without_the_pipeline_says_so_and_is_not_healthy_for_it() {
    let (channel, _server) = start(idle_state(|_| {})).await;
    let tasks = vec![pb::NewTask {
        queue: "q".into(),
        key: "k".into(),
        ..Default::default()
    }];
    let mut client = DiscoveryClient::new(channel.clone());
    let status = client
        .insert_tasks(pb::InsertTasksRequest {
            tasks,
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (
            Code::Unavailable,
            "this process does not run the pipeline discovery"
        )
    );
    let status = TasksClient::new(channel.clone())
        .get_tasks(pb::GetTasksRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (
            Code::Unavailable,
            "this process does not run the pipeline tasks"
        )
    );
    // Another process would judge these.
    let wait = Some(prost_types::Duration {
        seconds: -1,
        nanos: 0,
    });
    let wrong = pb::GetTasksRequest {
        wait,
        ..Default::default()
    };
    let status = TasksClient::new(channel.clone())
        .get_tasks(wrong)
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let completions = vec![pb::Completion {
        result_encoding: 9,
        ..Default::default()
    }];
    let wrong = pb::CompleteTasksRequest {
        worker: "w".into(),
        completions,
        next: None,
    };
    let status = TasksClient::new(channel.clone())
        .complete_tasks(wrong)
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);

    let mut health = HealthClient::new(channel);
    for (service, want) in [
        ("", ServingStatus::Serving),
        ("taskd.v1.Tasks", ServingStatus::NotServing),
    ] {
        let answer = health
            .check(HealthCheckRequest {
                service: service.into(),
            })
            .await
            .unwrap();
        assert_eq!(answer.into_inner().status(), want, "{service:?}");
    }
}

#[tokio::test]
async fn wrong_requests_are_invalid_arguments() {
    let (channel, _server) = start(idle_state(|settings| settings.discovery.buffer = 1)).await;
    let mut client = DiscoveryClient::new(channel);
    let status = client
        .get_task(pb::GetTaskRequest { id: "42".into() })
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(
        status.message().starts_with("\"42\" is not a task id"),
        "{}",
        status.message()
    );
    let tasks = vec![pb::NewTask::default(); 2];
    let status = client
        .insert_tasks(pb::InsertTasksRequest {
            tasks,
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn an_insert_into_a_full_queue_is_told_to_try_later() {
    let daemon = Daemon::start("[queues.q]\nmax_unfinished = 1", &[]).await;
    let mut client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let mut insert = async |key: &'static str| {
        let task = pb::NewTask {
            queue: "q".into(),
            key: key.into(),
            ..Default::default()
        };
        client
            .insert_tasks(pb::InsertTasksRequest {
                tasks: vec![task],
                ..Default::default()
            })
            .await
    };
    insert("first").await.unwrap();
    // The count may be one of a moment before.
    until("the queue is known to be full", async || {
        insert("first").await.is_err()
    })
    .await;
    let status = insert("second").await.unwrap_err();
    let why = "queue q has 1 unfinished tasks, its max_unfinished; try again later";
    assert_eq!(
        (status.code(), status.message()),
        (Code::ResourceExhausted, why)
    );
}

#[tokio::test]
async fn reflection_answers_programs_that_know_only_its_older_version() {
    use tonic_reflection::pb::v1alpha::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let (channel, _server) = start(idle_state(|_| {})).await;
    let question = MessageRequest::ListServices(String::new());
    let question = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(question),
    };
    let questions = futures::stream::iter([question]);
    let answer = ServerReflectionClient::new(channel)
        .server_reflection_info(questions)
        .await
        .unwrap();
    let answer = answer.into_inner().message().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(listed)) = answer.message_response else {
        panic!("{answer:?}")
    };
    let names: Vec<_> = listed
        .service
        .iter()
        .map(|service| service.name.as_str())
        .collect();
    for name in [
        "taskd.v1.Discovery",
        "taskd.v1.Tasks",
        "taskd.v1.Topics",
        "taskd.v1.Operator",
        "grpc.health.v1.Health",
    ] {
        assert!(names.contains(&name), "{names:?}");
    }
}

#[tokio::test]
async fn reflection_is_within_the_budget_of_all_requests() {
    // A question that is refused ends the stream.
    for (budget, want) in [(0, false), (64 << 10, true)] {
        let (channel, _server) = start(idle_state(|settings| {
            settings.limits.request_budget = budget
        }))
        .await;
        let question = MessageRequest::ListServices(String::new());
        let question = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(question),
        };
        let questions = futures::stream::iter([question]);
        let answer = ServerReflectionClient::new(channel)
            .server_reflection_info(questions)
            .await;
        let first = match answer {
            Ok(mut answers) => answers.get_mut().message().await,
            Err(status) => Err(status),
        };
        assert_eq!(first.is_ok_and(|answer| answer.is_some()), want, "{budget}");
    }
}

#[tokio::test]
async fn a_stop_ends_the_server_by_itself() {
    let state = idle_state(|_| {});
    let (_channel, server) = start(state.clone()).await;
    state.stop.cancel();
    tokio::time::timeout(PATIENCE, server)
        .await
        .expect("the server ends by itself")
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_page_in_a_browser_cannot_call_without_asking() {
    let daemon = Daemon::start("", &[]).await;
    let stream = TcpStream::connect(("127.0.0.1", daemon.grpc_port()))
        .await
        .unwrap();
    let (mut client, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    for (kind, status) in [("text/plain", 415), ("application/grpc", 200)] {
        let request = Request::post(format!("{}/taskd.v1.Discovery/InsertTasks", daemon.grpc()));
        let request = request
            .header("content-type", kind)
            .body("\0\0\0\0\0".to_owned())
            .unwrap();
        assert_eq!(
            client.send_request(request).await.unwrap().status(),
            status,
            "{kind}"
        );
    }
}
