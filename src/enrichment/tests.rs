//! The breakers of endpoints: what opens them, and what they show.

use std::net::TcpListener;

use metrics_exporter_prometheus::PrometheusBuilder;

use super::*;
use crate::{
    config::{EnrichUrl, QueueSettings},
    model::{NewTask, TaskId, validate},
};

/// An endpoint that takes connections, and answers nothing.
fn silent(timeout: Duration, failures: u32) -> (TcpListener, Endpoint) {
    drop(rustls::crypto::ring::default_provider().install_default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap())
        .parse()
        .unwrap();
    (
        listener,
        Endpoint::new(
            Enrich {
                timeout,
                failures,
                ..settings(url)
            },
            LONGEST,
        ),
    )
}

fn settings(url: url::Url) -> Enrich {
    let queue = Settings::default().queues.default;
    let queue = QueueSettings {
        enrich_url: EnrichUrl(Some(url)),
        ..queue
    };
    queue.enrich().unwrap()
}

async fn ask(endpoint: &Endpoint, time: Duration) -> Option<Skipped> {
    let task = NewTask {
        queue: "q".into(),
        key: "k".into(),
        ..NewTask::default()
    };
    let row = validate::task_row(
        task,
        TaskId::new(),
        &Settings::default().task_rules("q"),
        1,
        0,
    )
    .unwrap();
    endpoint
        .ask(&row.queue, &[&row], Instant::now() + time)
        .await
        .err()
}

#[tokio::test]
async fn a_call_that_its_caller_cuts_off_does_not_open_the_breaker() {
    let (_listener, endpoint) = silent(Duration::from_secs(5), 1);
    for _ in 0..3 {
        assert_eq!(
            ask(&endpoint, Duration::from_millis(20)).await,
            Some(Skipped::Busy)
        );
    }
    let (_listener, endpoint) = silent(Duration::from_millis(10), 1);
    assert_eq!(ask(&endpoint, LONGEST).await, Some(Skipped::TimedOut));
    assert_eq!(ask(&endpoint, LONGEST).await, Some(Skipped::Open));
}

#[test]
fn the_open_breakers_of_an_endpoint_are_counted() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let open = |count: u32| {
        let text = recorder.handle().render();
        let line = format!("taskd_enrichment_open_breakers{{endpoint=\"http://h/\"}} {count}");
        assert!(
            text.lines().any(|found| found == line),
            "{line} is not in\n{text}"
        );
    };
    ::metrics::with_local_recorder(&recorder, || {
        let endpoint = || Endpoint::new(settings("http://h/".parse().unwrap()), LONGEST);
        let one = endpoint();
        let other = endpoint();
        open(0);
        one.turned(Some(Turned::Opened), "it is away");
        other.turned(Some(Turned::Opened), "it is away");
        open(2);
        one.turned(Some(Turned::Closed), "");
        open(1);
    });
}
