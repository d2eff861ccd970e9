//! Back pressure: more is offered than anybody works off.

use std::time::Duration;

use futures::{StreamExt, stream};
use serde_json::{Value, json};

use crate::support::{
    daemon::{Daemon, statuses},
    until,
};

const OFFERED: usize = 1_000_000;
const KEPT: u64 = 100_000;
const IN_REDIS: u64 = 5_000;

/// A million tasks are offered. Tasks beyond `high_water_tasks` stay in SQL, and inserts beyond
/// `max_unfinished` are told to try later. Memory is flat all along, and workers get each accepted
/// task.
#[tokio::test(flavor = "multi_thread")]
async fn a_million_inserts_without_a_worker() {
    let config = format!("[queues.q]\nhigh_water_tasks = {IN_REDIS}\nmax_unfinished = {KEPT}");
    let mut daemon = Daemon::start(&config, &[]).await;
    let (mut accepted, mut told_later, mut offered) = (0, 0, 0);
    let mut memory = Vec::new();
    let client = crate::support::http_client();
    let url = format!("{}/v1/tasks", daemon.http());
    let offers = stream::iter((0..OFFERED).step_by(1000)).map(|first| {
        let tasks: Vec<Value> = (first..first + 1000)
            .map(|n| json!({"queue": "q", "key": n.to_string()}))
            .collect();
        let request = client.post(&url).json(&tasks);
        async move {
            let response = request.send().await.unwrap();
            match response.status().as_u16() {
                429 => {
                    assert!(response.headers().contains_key("retry-after"));
                    None
                }
                200 => Some(statuses(&response.json().await.unwrap())),
                other => panic!("answered {other}: {}", response.text().await.unwrap()),
            }
        }
    });
    let mut offers = std::pin::pin!(offers.buffer_unordered(8));
    while let Some(answer) = offers.next().await {
        offered += 1000;
        match answer {
            Some(statuses) => {
                accepted += statuses
                    .iter()
                    .filter(|status| *status == "CREATED")
                    .count() as u64
            }
            None => told_later += 1000,
        }
        // From when all parts have been in use.
        if offered >= OFFERED / 20 {
            memory.push(resident_mib(daemon.pid()));
        }
    }
    let (least, most) = (memory.iter().min().unwrap(), memory.iter().max().unwrap());
    assert!(
        most - least < 100,
        "taskd's memory went from {least} to {most} MiB"
    );
    assert_eq!(accepted + told_later, OFFERED as u64);
    // The count that admits is at most half a second old.
    assert!(
        (KEPT..KEPT + 50_000).contains(&accepted),
        "{accepted} were accepted"
    );

    let queue = daemon.queue("q").await;
    assert_eq!(
        queue["pending"].as_u64().unwrap() + queue["waiting"].as_u64().unwrap(),
        accepted,
        "{queue}"
    );
    assert!(
        queue["waiting"].as_u64().unwrap() <= IN_REDIS + 1000,
        "{queue}"
    );

    let done = async {
        let workers = (0..4).map(|n| {
            let daemon = &daemon;
            async move {
                let (worker, mut done) = (format!("w{n}"), 0);
                loop {
                    let tasks = daemon.lease(&worker, "q", 1000, "2s").await;
                    if tasks.is_empty() && daemon.unfinished("q").await == 0 {
                        return done;
                    }
                    done += daemon
                        .complete(&worker, &tasks)
                        .await
                        .iter()
                        .filter(|status| *status == "OK")
                        .count();
                }
            }
        });
        futures::future::join_all(workers)
            .await
            .into_iter()
            .sum::<usize>() as u64
    };
    let done = tokio::time::timeout(Duration::from_secs(300), done)
        .await
        .expect("all is worked off");
    assert_eq!(done, accepted);
    until("SQL knows", async || {
        daemon.queue("q").await["completed"] == accepted
    })
    .await;
    assert!(daemon.stop().await.success());
}

fn resident_mib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        / 1024
}

/// A full queue is emptied although the bus is never idle, and while another full one is not.
#[tokio::test(flavor = "multi_thread")]
async fn parked_tasks_go_out_whatever_other_queues_do() {
    let full = "high_water_tasks = 100\n";
    let mut daemon = Daemon::start(&format!("[queues.a]\n{full}[queues.b]\n{full}"), &[]).await;
    for queue in ["a", "b"] {
        daemon
            .insert(
                &(0..3000)
                    .map(|n| json!({"queue": queue, "key": n.to_string()}))
                    .collect::<Vec<_>>(),
            )
            .await;
    }
    let busy = async {
        for n in 0.. {
            daemon
                .insert(&[json!({"queue": "c", "key": n.to_string()})])
                .await;
        }
    };
    let worked_off = async {
        until("there is work", async || {
            daemon.queue("a").await["waiting"].as_u64() > Some(0)
        })
        .await;
        assert_eq!(daemon.drain("w", "a").await.len(), 3000);
    };
    tokio::select! {
        () = worked_off => {}
        () = busy => unreachable!("goes on for ever"),
    }
    assert!(daemon.unfinished("b").await == 3000);
    assert!(daemon.stop().await.success());
}
