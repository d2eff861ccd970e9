//! The door: hosts and sites, stops, and requests that are a little wrong, by the running binary.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use taskd::{
    ingress::operations,
    wire::pb::{self, discovery_client::DiscoveryClient, tasks_client::TasksClient},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tonic::Code;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::support::{daemon::Daemon, until};

/// Sends these bytes and reads to the end of the connection.
async fn raw(daemon: &Daemon, request: &str) -> String {
    let mut client = TcpStream::connect(("127.0.0.1", daemon.http_port()))
        .await
        .unwrap();
    client.write_all(request.as_bytes()).await.unwrap();
    read_all(&mut client).await
}

async fn read_all(client: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.ok();
    String::from_utf8(answer).unwrap()
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).unwrap_or("0").parse().unwrap()
}

#[tokio::test]
async fn pages_of_other_names_and_sites_are_not_served() {
    let mut daemon = Daemon::start("allowed_hosts = \"taskd, .example.org\"", &[]).await;
    let task = json!({"queue": "q", "key": "k"}).to_string();
    let insert = |headers: &str| {
        let length = task.len();
        format!(
            "POST /v1/tasks HTTP/1.1\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n{headers}\r\n{task}"
        )
    };
    for (headers, want) in [
        (
            "host: evil.example:28600\r\norigin: http://evil.example:28600\r\n",
            421,
        ),
        (
            "host: localhost\r\nsec-fetch-site: cross-site\r\norigin: https://evil.example\r\n",
            403,
        ),
        ("host: localhost\r\norigin: https://evil.example\r\n", 403),
        ("", 400),
        ("host: localhost\r\nhost: localhost\r\n", 400),
    ] {
        let answer = raw(&daemon, &insert(headers)).await;
        assert_eq!(status(&answer), want, "{headers}: {answer}");
        assert!(answer.contains("application/problem+json"), "{answer}");
    }
    assert!(
        daemon.get("/v1/queues").await.1["queues"]
            .as_array()
            .unwrap()
            .is_empty(),
        "nothing was stored"
    );
    for host in [
        "localhost",
        "127.0.0.1",
        "[::1]:9",
        "TASKD:7600",
        "a.example.org",
    ] {
        let answer = raw(&daemon, &insert(&format!("host: {host}\r\n"))).await;
        assert_eq!(status(&answer), 200, "{host}: {answer}");
    }
    // Probes ask under any name, and those of HTTP/1.0 under none.
    let ready = async |host: &str| {
        let answer = raw(
            &daemon,
            &format!("GET /readyz HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"),
        )
        .await;
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    };
    assert_eq!(
        ready("evil.example").await,
        "{\"status\":\"ready\"}",
        "others hear no details"
    );
    for path in ["/healthz", "/readyz"] {
        let answer = raw(
            &daemon,
            &format!("GET {path} HTTP/1.1\r\nhost: lb.example\r\nconnection: close\r\n\r\n"),
        )
        .await;
        assert_eq!(status(&answer), 200, "{answer}");
        assert_eq!(
            status(&raw(&daemon, &format!("GET {path} HTTP/1.0\r\n\r\n")).await),
            200
        );
    }
    let metrics = raw(
        &daemon,
        "GET /metrics HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n",
    )
    .await;
    assert_eq!(status(&metrics), 421, "{metrics}");
    assert!(daemon.stop().await.success());
}

/// Every route refuses a parameter that it does not know, one that is given twice, and a value that
/// is not UTF-8.
#[tokio::test]
async fn no_route_ignores_a_parameter() {
    let mut daemon = Daemon::start("", &[]).await;
    let (_, document) = daemon.get("/openapi.json").await;
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    let client = crate::support::http_client();
    let mut asked = 0;
    let routes = operations().into_iter().filter(|one| one.role.is_some());
    let routes: Vec<_> = routes.filter_map(|one| one.http).collect();
    for route in &routes {
        let (method, described) = (&route.method, route.path);
        let path = described.replace("{id}", &id).replace("{queue}", "q");
        let path = path.replace("{limit_key}", "k");
        let operation = &document["paths"][described][method.as_str().to_ascii_lowercase()];
        assert!(operation.is_object(), "{method} {described}");
        let parameters = operation["parameters"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let known = parameters
            .iter()
            .filter(|one| one["in"] == "query")
            .map(|one| one["name"].as_str().unwrap());
        let known: Vec<&str> = known.collect();
        let mut queries = vec![(
            "no_such=true".to_owned(),
            "unknown parameter \"no_such\"".to_owned(),
        )];
        queries.push((
            "worker%20=x".to_owned(),
            "unknown parameter \"worker \"".to_owned(),
        ));
        for name in &known {
            queries.push((
                format!("{name}=1&{name}=2"),
                format!("the parameter \"{name}\" is given twice"),
            ));
            queries.push((format!("{name}=%ff"), "which is not UTF-8".to_owned()));
        }
        for (query, why) in queries {
            let url = format!("{}{path}?{query}", daemon.http());
            let body = json!({"filter": {"queue": "q"}, "yes": true});
            let request = client.request(method.clone(), url);
            let request = if method == "POST" {
                request.json(&body)
            } else {
                request
            };
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status(), 400, "{method} {path}?{query}");
            assert_eq!(answer.headers()["x-content-type-options"], "nosniff");
            assert_eq!(answer.headers()["cache-control"], "no-store");
            let problem: Value = answer.json().await.unwrap();
            assert!(
                problem["detail"].as_str().unwrap().contains(&why),
                "{method} {path}?{query}: {problem}"
            );
            if why.starts_with("unknown") {
                let names_known = known
                    .iter()
                    .all(|name| problem["detail"].as_str().unwrap().contains(name));
                assert!(names_known, "{method} {path} knows {known:?}: {problem}");
            }
            asked += 1;
        }
    }
    assert!(asked > 2 * routes.len() + 40, "{asked} queries");
    assert_eq!(
        daemon.queue("q").await["waiting"],
        1,
        "nothing was cancelled, and the queue is not paused"
    );
    assert!(
        daemon.get("/v1/bulk").await.1["bulk"]
            .as_array()
            .unwrap()
            .is_empty(),
        "no bulk change was started"
    );
    // Headers of tasks have names of any kind.
    let (status, list) = daemon
        .get("/v1/tasks?queue=q&header.a=1&header.b=%F0%9F%A6%80")
        .await;
    assert_eq!(status, 200, "{list}");
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_body_in_an_encoding_that_taskd_does_not_undo_is_refused() {
    let mut daemon = Daemon::start("", &[]).await;
    let task = json!({"queue": "q", "key": "k"}).to_string();
    let chunked = format!("{:x}\r\n{task}\r\n0\r\n\r\n", task.len());
    let insert = |headers: &str, body: &str| {
        format!(
            "POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
             {headers}\r\n{body}"
        )
    };
    for (encodings, want) in [
        ("transfer-encoding: gzip, chunked\r\n", 501),
        (
            "transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
            501,
        ),
        ("transfer-encoding: chunked, chunked\r\n", 400),
        (
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
            400,
        ),
    ] {
        let answer = raw(&daemon, &insert(encodings, &chunked)).await;
        assert_eq!(status(&answer), want, "{encodings}: {answer}");
    }
    let length = format!("content-length: {}\r\n", task.len());
    for encodings in [
        "content-encoding: gzip\r\n",
        "content-encoding: identity\r\ncontent-encoding: gzip\r\n",
    ] {
        let answer = raw(&daemon, &insert(&format!("{length}{encodings}"), &task)).await;
        assert_eq!(status(&answer), 415, "{encodings}: {answer}");
    }
    assert!(
        daemon.get("/v1/queues").await.1["queues"]
            .as_array()
            .unwrap()
            .is_empty(),
        "nothing was stored"
    );
    let answer = raw(&daemon, &insert("transfer-encoding: chunked\r\n", &chunked)).await;
    assert_eq!(status(&answer), 200, "{answer}");
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_stop_tells_those_who_send_to_come_again_and_succeeds() {
    let mut daemon = Daemon::start("", &[]).await;
    let port = daemon.http_port();
    let begin = async |head: &str, body: &str| {
        let mut client = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        client
            .write_all(format!("{head}\r\nhost: localhost\r\n").as_bytes())
            .await
            .unwrap();
        client.write_all(body.as_bytes()).await.unwrap();
        client
    };
    let lines = "content-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n";
    let json = "content-type: application/json\r\ncontent-length: 100\r\n\r\n[";
    // Sends a body byte by byte, has sent no line, has sent one, is in the middle of a head, and
    // says nothing.
    let mut drip = begin("POST /v1/tasks HTTP/1.1", json).await;
    let mut no_line = begin("POST /v1/tasks HTTP/1.1", &format!("{lines}1\r\n{{\r\n")).await;
    let line = json!({"queue": "q", "key": "k"});
    let mut one_line = begin(
        "POST /v1/tasks HTTP/1.1",
        &format!("{lines}{:x}\r\n{line}\n\r\n", line.to_string().len() + 1),
    )
    .await;
    let mut head = begin("POST /v1/tasks HTTP/1.1", "content-type: appl").await;
    let mut silent = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let mut silent_grpc = TcpStream::connect(("127.0.0.1", daemon.grpc_port()))
        .await
        .unwrap();
    let mut channel = TasksClient::connect(daemon.grpc()).await.unwrap();
    let wait = Some(prost_types::Duration {
        seconds: 60,
        nanos: 0,
    });
    let get = pb::GetTasksRequest {
        worker: "w".into(),
        queues: vec!["none".into()],
        wait,
        ..Default::default()
    };
    let poll = tokio::spawn(async move { channel.get_tasks(get).await });
    until("the line is stored", async || {
        daemon.queue("q").await["waiting"] == 1
    })
    .await;
    until("the poll waits", async || {
        // One that is answered at once has a status, one that waits has none yet.
        drip.write_all(b" ").await.unwrap();
        daemon.get("/readyz").await.0 == 200
    })
    .await;

    daemon.signal(Signal::SIGTERM);
    let answer = read_all(&mut drip).await;
    assert!(
        status(&answer) == 503 && answer.contains("retry-after: 1\r\n"),
        "{answer}"
    );
    assert!(
        answer.contains("this process is stopping; send the request again"),
        "{answer}"
    );
    let answer = read_all(&mut no_line).await;
    assert!(
        status(&answer) == 503 && answer.contains("retry-after: 1\r\n"),
        "{answer}"
    );
    let answer = read_all(&mut one_line).await;
    assert!(
        status(&answer) == 200 && answer.contains("CREATED") && answer.contains("TRY_LATER"),
        "{answer}"
    );
    for client in [&mut head, &mut silent, &mut silent_grpc] {
        read_all(client).await;
    }
    assert!(
        poll.await.unwrap().unwrap().into_inner().tasks.is_empty(),
        "a poll is answered with nothing"
    );
    assert!(daemon.ended().await.success());
    assert!(
        !daemon.log().contains("did not end within the grace period"),
        "{}",
        daemon.log()
    );
}

#[tokio::test]
async fn a_client_that_does_not_read_does_not_make_a_stop_a_failure() {
    let mut daemon =
        Daemon::start("grace_period = \"16s\"\n[queues.q]\nlease = \"10m\"", &[]).await;
    let payload = "x".repeat(900 << 10);
    let task = |n: usize| json!({"queue": "q", "key": n.to_string(), "payload": payload});
    // As much as an answer may have, so that the kernel does not keep it all.
    daemon.insert(&(0..12).map(task).collect::<Vec<_>>()).await;
    until("all wait", async || {
        daemon.queue("q").await["waiting"] == 12
    })
    .await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let mut deaf = socket
        .connect(([127, 0, 0, 1], daemon.http_port()).into())
        .await
        .unwrap();
    let body = json!({"worker": "deaf", "queues": ["q"], "max_tasks": 12}).to_string();
    let head = "POST /v1/tasks:get HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: ";
    deaf.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes())
        .await
        .unwrap();
    until("it has some", async || {
        daemon.queue("q").await["assigned"] != 0
    })
    .await;
    assert!(daemon.stop().await.success());
    assert!(
        daemon
            .log()
            .contains("some callers did not end within the grace period"),
        "{}",
        daemon.log()
    );
    drop(deaf);
}

#[tokio::test]
async fn a_stop_does_not_wait_for_those_who_watch_the_health() {
    let mut daemon = Daemon::start("", &[]).await;
    let channel = tonic::transport::Channel::from_shared(daemon.grpc())
        .unwrap()
        .timeout(crate::support::PATIENCE)
        .connect()
        .await
        .unwrap();
    let mut client = HealthClient::new(channel);
    let mut watch = client
        .watch(HealthCheckRequest::default())
        .await
        .unwrap()
        .into_inner();
    let mut status = async || watch.message().await.unwrap().map(|answer| answer.status());
    assert_eq!(status().await, Some(ServingStatus::Serving));
    daemon.signal(Signal::SIGTERM);
    assert_eq!(status().await, Some(ServingStatus::NotServing));
    assert!(daemon.ended().await.success());
    assert!(
        !daemon.log().contains("did not end within the grace period"),
        "{}",
        daemon.log()
    );
}

#[tokio::test]
async fn one_rejected_task_is_an_error_and_of_a_list_none_is() {
    let mut daemon = Daemon::start("", &[]).await;
    let wrong = json!({"queue": "a b", "key": "k"});
    let (status, answer) = daemon.post("/v1/tasks", &wrong).await;
    assert_eq!(
        (status, &answer["results"][0]["status"]),
        (422, &json!("REJECTED")),
        "{answer}"
    );
    assert_eq!(daemon.post("/v1/tasks", &json!([wrong])).await.0, 200);
    assert_eq!(
        daemon
            .post_text("/v1/tasks", "application/x-ndjson", wrong.to_string())
            .await
            .0,
        200
    );
    let right = json!({"queue": "q", "key": "k"});
    assert_eq!(daemon.post("/v1/tasks", &right).await.0, 200);
    assert_eq!(
        daemon.post("/v1/tasks", &right).await.0,
        200,
        "a duplicate is none"
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn small_mistakes_are_named_and_small_differences_are_none() {
    let mut daemon = Daemon::start("", &[]).await;
    let task = json!({"queue": "q", "key": "k"}).to_string();
    for content_type in [
        "Application/JSON",
        "APPLICATION/X-NDJSON",
        "application/json; charset=utf-8",
    ] {
        assert_eq!(
            daemon
                .post_text("/v1/tasks", content_type, task.clone())
                .await
                .0,
            200,
            "{content_type}"
        );
    }
    for path in [
        "/v1/tasks/%ff",
        "/v1/tasks/%ff/results",
        &format!("/v1/tasks/{}", "a".repeat(9000)),
    ] {
        let (status, problem) = daemon.get(path).await;
        assert_eq!(status, 400, "{problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            detail.contains("is not a task id; ids are UUIDs") && detail.len() < 700,
            "{detail}"
        );
    }
    let trace = |version: &str, trace: &str| format!("{version}-{trace}-{}-01", "b".repeat(16));
    let wrong = [
        (
            json!({"not_before": "2030-01-01"}),
            "is not a time; write it as RFC 3339",
        ),
        (
            json!({"not_before": "2030-01-01T00:00:00"}),
            "is not a time; write it as RFC 3339",
        ),
        (
            json!({"not_before": "+99999-01-01T00:00:00Z"}),
            "is not a time; write it as RFC 3339",
        ),
        (
            json!({"not_before": "2030-01-01T00:00:60Z"}),
            "is not a time; write it as RFC 3339",
        ),
        (json!({"delay": "10000y"}), "year 9999 is the last"),
        (
            json!({"traceparent": trace("00", &"0".repeat(32))}),
            "W3C form",
        ),
        (
            json!({"traceparent": trace("ff", &"a".repeat(32))}),
            "W3C form",
        ),
        (
            json!({"traceparent": trace("00", &"A".repeat(32))}),
            "W3C form",
        ),
        (
            json!({"traceparent": trace("01", &"a".repeat(32)) + "-\u{1b}\n"}),
            "W3C form",
        ),
        (
            json!({"headers": {"a\r\nX: y": ""}}),
            "contains a control character",
        ),
        (json!({"headers": {"": "v"}}), "a header has an empty name"),
        (
            json!({"headers": {"n": "\0"}}),
            "contains a control character",
        ),
        (
            json!({"queue": "\u{1}".repeat(1 << 18)}),
            "queue name has 262144 characters; at most 64",
        ),
    ];
    for (fields, want) in wrong {
        let mut task = json!({"queue": "q", "key": "wrong"});
        task.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        let (status, answer) = daemon.post("/v1/tasks", &task).await;
        let error = answer["results"][0]["error"].as_str().unwrap();
        assert!(
            status == 422 && error.contains(want) && error.len() < 1000,
            "{fields:.100}: {answer:.1000}"
        );
    }
    let mut client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let far = Some(prost_types::Timestamp {
        seconds: 8_999_999_999_999,
        nanos: 0,
    });
    let task = pb::NewTask {
        queue: "q".into(),
        key: "far".into(),
        not_before: far,
        ..Default::default()
    };
    let answer = client
        .insert_tasks(pb::InsertTasksRequest {
            tasks: vec![task],
            ..Default::default()
        })
        .await
        .unwrap()
        .into_inner();
    assert!(
        answer.results[0].error.contains("year 9999 is the last"),
        "{answer:?}"
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_worker_without_a_name_is_told_so_whatever_it_sends() {
    let mut daemon = Daemon::start("", &[]).await;
    for (call, list) in [
        ("complete", "completions"),
        ("reject", "rejections"),
        ("extend", "extensions"),
    ] {
        for items in [json!([]), json!([1])] {
            let (status, problem) = daemon
                .post(
                    &format!("/v1/tasks:{call}"),
                    &json!({"worker": "", list: items}),
                )
                .await;
            assert_eq!(status, 400, "{problem}");
            assert!(
                problem["detail"]
                    .as_str()
                    .unwrap()
                    .starts_with("worker is missing"),
                "{problem}"
            );
        }
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn requests_are_measured_by_route_and_method_and_made_up_names_are_one() {
    let mut daemon = Daemon::start("", &[]).await;
    let id = daemon
        .insert(&[json!({"queue": "q", "key": "k"})])
        .await
        .remove(0);
    daemon.get(&format!("/v1/tasks/{id}")).await;
    daemon.get("/v1/tasks/42").await;
    for made_up in 0..50 {
        daemon.get(&format!("/made-up/{made_up}")).await;
    }
    let mut client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let status = client
        .get_task(pb::GetTaskRequest { id: "42".into() })
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    client.get_task(pb::GetTaskRequest { id }).await.unwrap();
    let (_, metrics) = daemon.get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    for line in [
        "taskd_http_request_duration_seconds_count{route=\"/v1/tasks\",status=\"2xx\"} 1",
        "taskd_http_request_duration_seconds_count{route=\"/v1/tasks/{id}\",status=\"2xx\"} 1",
        "taskd_http_request_duration_seconds_count{route=\"/v1/tasks/{id}\",status=\"4xx\"} 1",
        "taskd_http_request_duration_seconds_count{route=\"other\",status=\"4xx\"} 50",
        "taskd_grpc_call_duration_seconds_count{method=\"taskd.v1.Discovery/GetTask\",code=\"INVALID_ARGUMENT\"} 1",
        "taskd_grpc_call_duration_seconds_count{method=\"taskd.v1.Discovery/GetTask\",code=\"OK\"} 1",
        "taskd_grpc_call_duration_seconds_bucket{method=\"taskd.v1.Discovery/GetTask\",code=\"OK\",le=\"64\"} 1",
        "taskd_discovery_insert_duration_seconds_count 1",
        concat!(
            "taskd_build_info{version=\"",
            env!("CARGO_PKG_VERSION"),
            "\",commit=\"",
            env!("BUILD_COMMIT"),
            "\"} 1"
        ),
        "process_resident_memory_bytes ",
        "process_open_fds ",
        "process_cpu_seconds_total ",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn a_payload_comes_back_once_and_as_what_it_was() {
    let mut daemon = Daemon::start("", &[]).await;
    let json = r#"{"n": 1.50,  "list":[1,"é"]}"#;
    let tasks = format!(
        r#"[{{"queue":"q","key":"json","payload":{json}}},{{"queue":"q","key":"text","payload":"[1]\n"}},
            {{"queue":"q","key":"bytes","payload_base64":"eyJhIjoxfQ=="}},{{"queue":"q","key":"none"}}]"#
    );
    assert_eq!(
        daemon
            .post_text("/v1/tasks", "application/json", tasks)
            .await
            .0,
        200
    );
    // As a gRPC client says it, or does not.
    let mut client = DiscoveryClient::connect(daemon.grpc()).await.unwrap();
    let task = |key: &'static str, payload: &'static [u8], encoding: pb::Encoding| pb::NewTask {
        queue: "q".into(),
        key: key.into(),
        payload: payload.into(),
        payload_encoding: encoding.into(),
        ..Default::default()
    };
    let tasks = vec![
        task("grpc json", b"\"quoted\"", pb::Encoding::Json),
        task("grpc text", b"{}", pb::Encoding::Text),
        task("grpc bytes", b"{}", pb::Encoding::Unspecified),
        task("no json", b"{", pb::Encoding::Json),
        task("no text", b"\xff", pb::Encoding::Text),
    ];
    let results = client
        .insert_tasks(pb::InsertTasksRequest {
            tasks,
            ..Default::default()
        })
        .await
        .unwrap()
        .into_inner()
        .results;
    let errors: Vec<_> = results.into_iter().map(|result| result.error).collect();
    assert_eq!(errors[..3], ["", "", ""]);
    assert!(
        errors[3].starts_with("payload_encoding is JSON, but payload is not: EOF"),
        "{errors:?}"
    );
    assert_eq!(
        errors[4],
        "payload_encoding is TEXT, but payload is not: it is not UTF-8 at byte 0"
    );

    until("all wait", async || daemon.queue("q").await["waiting"] == 7).await;
    let get = json!({"worker": "w", "queues": ["q"], "max_tasks": 100});
    let answer = crate::support::http_client()
        .post(format!("{}/v1/tasks:get", daemon.http()))
        .json(&get)
        .send()
        .await
        .unwrap();
    let text = answer.text().await.unwrap();
    assert!(
        text.contains(&format!("\"payload\":{json},")),
        "byte for byte: {text}"
    );
    let answer: Value = serde_json::from_str(&text).unwrap();
    let tasks = answer["tasks"].as_array().unwrap();
    for (key, payload, base64, encoding) in [
        (
            "json",
            json!({"n": 1.5, "list": [1, "é"]}),
            Value::Null,
            json!("json"),
        ),
        ("text", json!("[1]\n"), Value::Null, json!("text")),
        ("bytes", Value::Null, json!("eyJhIjoxfQ=="), json!("bytes")),
        ("none", Value::Null, Value::Null, Value::Null),
        ("grpc json", json!("quoted"), Value::Null, json!("json")),
        ("grpc text", json!("{}"), Value::Null, json!("text")),
        ("grpc bytes", Value::Null, json!("e30="), json!("bytes")),
    ] {
        let task = tasks.iter().find(|task| task["key"] == key).unwrap();
        let shown =
            ["payload", "payload_base64", "payload_encoding"].map(|name| task[name].clone());
        assert_eq!(shown, [payload, base64, encoding], "{key}: {task}");
    }

    // Results, over both as well.
    let with = |task: &Value, result: Value| {
        let mut completion = json!({"id": task["id"], "lease_token": task["lease_token"]});
        completion
            .as_object_mut()
            .unwrap()
            .extend(result.as_object().unwrap().clone());
        completion
    };
    let results = [
        (
            json!({"result": {"ok": [true]}}),
            json!({"ok": [true]}),
            Value::Null,
            "json",
        ),
        (
            json!({"result": "done"}),
            json!("done"),
            Value::Null,
            "text",
        ),
        (
            json!({"result_base64": "/w=="}),
            Value::Null,
            json!("/w=="),
            "bytes",
        ),
    ];
    let completions: Vec<_> = tasks
        .iter()
        .zip(&results)
        .map(|(task, result)| with(task, result.0.clone()))
        .collect();
    let (_, answer) = daemon
        .post(
            "/v1/tasks:complete",
            &json!({"worker": "w", "completions": completions}),
        )
        .await;
    assert!(
        answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .all(|result| result["status"] == "OK"),
        "{answer}"
    );
    for (task, (_, result, base64, encoding)) in tasks.iter().zip(results) {
        let path = format!("/v1/tasks/{}/results", task["id"].as_str().unwrap());
        until("its result is stored", async || {
            daemon.get(&path).await.1["results"][0].is_object()
        })
        .await;
        let stored = daemon.get(&path).await.1["results"][0].clone();
        let shown = ["result", "result_base64", "result_encoding"].map(|name| stored[name].clone());
        assert_eq!(shown, [result, base64, json!(encoding)], "{stored}");
    }
    let mut client = TasksClient::connect(daemon.grpc()).await.unwrap();
    let completion = |task: &Value, result: &'static [u8]| pb::Completion {
        id: task["id"].as_str().unwrap().into(),
        lease_token: task["lease_token"].as_str().unwrap().into(),
        result: result.into(),
        result_encoding: pb::Encoding::Json.into(),
        ..Default::default()
    };
    let completions = vec![completion(&tasks[3], b"{"), completion(&tasks[4], b"{}")];
    let request = pb::CompleteTasksRequest {
        worker: "w".into(),
        completions,
        next: None,
    };
    let results = client
        .complete_tasks(request)
        .await
        .unwrap()
        .into_inner()
        .results;
    assert_eq!(results[0].status(), pb::ItemStatus::Invalid);
    assert!(
        results[0]
            .error
            .starts_with("result_encoding is JSON, but result is not"),
        "{results:?}"
    );
    assert_eq!(results[1].status(), pb::ItemStatus::Ok);
    assert!(daemon.stop().await.success());
}
