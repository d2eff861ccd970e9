//! The forwarder, from outboxes to `task-results`.

use std::{collections::BTreeSet, sync::atomic::Ordering};

use bytes::Bytes;
use taskd::{
    model::{Completion, ItemStatus, LeasedTask, TaskId},
    wire,
};

use crate::{
    discovery_insert::{Picky, TOO_LARGE},
    support::until,
    tasks_service::{Service, put},
};

/// The tasks that the records of `task-results` report, one list per record.
async fn records(service: &Service) -> Vec<Vec<TaskId>> {
    let mut read = redis::cmd("XRANGE");
    read.arg("t:{bus}:task-results:0").arg("-").arg("+");
    let entries: Vec<(String, Vec<(String, Bytes)>)> =
        read.query_async(&mut service.redis.conn()).await.unwrap();
    let ids = |value: &Bytes| {
        let reports = wire::read_reports(value).unwrap().reports;
        reports
            .into_iter()
            .map(|report| report.unwrap().id)
            .collect()
    };
    entries
        .iter()
        .map(|(_, fields)| ids(&fields[0].1))
        .collect()
}

async fn reported(service: &Service) -> BTreeSet<TaskId> {
    records(service).await.concat().into_iter().collect()
}

fn ids<'a>(leased: impl IntoIterator<Item = &'a LeasedTask>) -> BTreeSet<TaskId> {
    leased.into_iter().map(|leased| leased.id).collect()
}

#[tokio::test]
async fn reports_of_many_shards_share_records() {
    let names: Vec<String> = (0..100).map(|n| format!("q{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let service = Service::start(&names).await;
    let (mut all, mut fewest) = (BTreeSet::new(), usize::MAX);
    // The forwarder's own look, once a second, may come before it hears of the completions.
    for round in 1..=5 {
        if round > 1 {
            let more = names
                .iter()
                .map(|name| put(&service.queue, name, TaskId::new(), 2, round));
            futures::future::join_all(more).await;
        }
        let before = records(&service).await.len();
        let leased = service.get(&names, 100, 0).await.unwrap();
        let statuses = service
            .complete_all("w", &leased.iter().collect::<Vec<_>>())
            .await
            .unwrap();
        assert_eq!(statuses, [ItemStatus::Ok; 100]);
        all.extend(ids(&leased));
        until("all reports are on the bus", async || {
            reported(&service).await == all
        })
        .await;
        fewest = fewest.min(records(&service).await.len() - before);
        if fewest < 10 {
            break;
        }
    }
    assert!(fewest < 10, "{fewest} records for 100 reports");
    assert_eq!(
        records(&service).await.concat().len(),
        all.len(),
        "each once"
    );
    until("the outboxes are empty", async || {
        let mut lengths = redis::pipe();
        for name in &names {
            lengths.cmd("XLEN").arg(format!("t:{{{name}:0}}:outbox"));
        }
        lengths
            .query_async::<Vec<u64>>(&mut service.redis.conn())
            .await
            .unwrap()
            .iter()
            .sum::<u64>()
            == 0
    })
    .await;
    service.stop().await;
}

#[tokio::test]
async fn a_report_that_the_bus_does_not_take_holds_up_no_other_shard() {
    let mut picky = None;
    let service = Service::start_on(&["a", "b", "c"], |bus| {
        picky.insert(Picky::new(bus)).clone()
    })
    .await;
    let leased = service.get(&["a", "b", "c"], 3, 0).await.unwrap();
    let large = leased
        .iter()
        .find(|leased| leased.token.shard.queue.as_str() == "b")
        .unwrap();
    let report = |leased: &LeasedTask| {
        let is_large = leased.id == large.id;
        Completion {
            result: if is_large {
                TOO_LARGE.into()
            } else {
                Bytes::new()
            },
            ..Default::default()
        }
    };
    service
        .complete_each(leased.iter().map(|leased| (leased, report(leased))))
        .await;
    let others = ids(leased.iter().filter(|leased| leased.id != large.id));
    until("the others are on the bus", async || {
        reported(&service).await == others
    })
    .await;
    let refused = picky.unwrap().refused.load(Ordering::SeqCst);
    assert!(
        refused <= 2,
        "the large one with the others, and alone; not {refused} times"
    );
    service.stop().await;
}
