//! A record or a body that no script wrote and that cannot be read. It holds up no other task, and
//! goes, so that the reconciler brings the task back.

use taskd::redis_pool::{Call, scripts};

use super::{
    Fixture, WEIGHT, body, changed, claim::claim, element, enqueue::enqueue, flat, id, lease,
    report::complete,
};

/// Cut off, of another kind, or nonsense.
const DAMAGED: [&[u8]; 7] = [
    b"\x97\xa1L\x01",
    b"\x81\xa1a\x01",
    b"\xc1",
    b"h5",
    b"3x",
    b"m\x02",
    b"",
];

#[tokio::test]
async fn a_damaged_record_holds_up_no_expiry_behind_it() {
    for damage in DAMAGED {
        let f = Fixture::new().await;
        f.held('a', "w", 1).await;
        f.held('b', "w", 1).await;
        f.seed("HSET", "records", &[&id('a'), damage]).await;
        let before = f.state().await;
        let expire = |call: &mut Call| {
            call.arg(1)
                .arg("t:wake")
                .arg("q")
                .arg(&b"\x91\x00"[..])
                .arg(10)
                .arg(100)
                .arg(1000);
        };
        assert_eq!(
            flat(f.run(&scripts::EXPIRE, expire).await.expect("expire")),
            ["1", "0", "0", "0", "-1"]
        );
        let record = r#"b=["L",1,1,[],[],[],0,1,[],[1000000,"w","lease expired"]]"#;
        changed(
            &before,
            &f.state().await,
            &[
                ("records", &[record]),
                ("bodies", &["b=body2"]),
                ("leases", &[]),
                ("mr:T", &["1/1/b"]),
                ("outbox", &["x=b w=w a=1 e=0 n=7 g=1 s=970000"]),
                (
                    "counters",
                    &["open_bytes=413", "live=1", "open=1", "outbox_bytes=34"],
                ),
            ],
        );
    }
}

#[tokio::test]
async fn a_damaged_record_is_missing() {
    for damage in DAMAGED {
        let f = Fixture::new().await;
        f.seed(
            "HSET",
            "records",
            &[&id('a'), b"1", &id('b'), damage, &id('c'), b"3"],
        )
        .await;
        let ask = |call: &mut Call| {
            call.arg(['a', 'b', 'c'].map(id).concat());
        };
        assert_eq!(
            flat(f.run(&scripts::MISSING, ask).await.expect("missing")),
            ["", "2"],
            "{damage:?}"
        );
    }
}

#[tokio::test]
async fn a_damaged_record_is_passed_by_claims_and_promotions() {
    for damage in DAMAGED {
        let f = Fixture::new().await;
        f.waiting('a', 2, damage).await;
        f.waiting('b', 1, b"1").await;
        let answer = f
            .run(&scripts::CLAIM, |call| claim(call, &[("w", 9)]))
            .await
            .expect("claim");
        assert_eq!(flat(answer)[4..], ["b", "body2", "1", "0"]);
        // A claim passes a record that begins like a held one. The scripts that load records find
        // the damage.
        let passed = String::from_utf8_lossy(damage)
            .starts_with('h')
            .then_some("a=h5");
        assert!(
            f.state().await["records"]
                .iter()
                .eq(passed.iter().chain(&["b=h1:w"]))
        );

        f.seed("HSET", "records", &[&id('a'), damage]).await;
        f.seed("ZADD", "delayed", &[b"5", &lease('a', 1)]).await;
        let promote = |call: &mut Call| {
            call.arg("t:wake").arg("q").arg(10).arg(600_000);
        };
        assert_eq!(
            flat(f.run(&scripts::PROMOTE, promote).await.expect("promote")),
            ["0", "0", "-1"]
        );
        let after = f.state().await;
        assert_eq!(
            (&after["records"][..], after.get("delayed")),
            (&["b=h1:w".to_owned()][..], None)
        );
        assert!(
            after["counters"].contains(&"live=1".to_owned()),
            "{damage:?}: {:?}",
            after["counters"]
        );
    }
}

#[tokio::test]
async fn a_task_with_a_damaged_record_is_enqueued_anew() {
    for damage in DAMAGED {
        let f = Fixture::new().await;
        f.seed("HSET", "records", &[&id('a'), damage]).await;
        let tasks = [("1-0", 'a', 1, 0)];
        let answer = f
            .run(&scripts::ENQUEUE, |call| {
                enqueue(call, "", "1-0", 100, &tasks)
            })
            .await
            .expect("enqueue");
        assert_eq!(flat(answer), ["ok", "1", "1", "0"]);
        assert_eq!(f.state().await["records"], ["a=1"]);

        // With its body it counts as live already.
        f.seed("HSET", "records", &[&id('a'), damage]).await;
        let tasks = [("2-0", 'a', 1, 0)];
        let answer = f
            .run(&scripts::ENQUEUE, |call| {
                enqueue(call, "", "2-0", 100, &tasks)
            })
            .await
            .expect("enqueue");
        assert_eq!(flat(answer), ["ok", "1", "1", "0"]);
        assert!(f.state().await["counters"].contains(&"live=1".to_owned()));
    }
}

#[tokio::test]
async fn a_damaged_record_takes_no_report() {
    for damage in DAMAGED {
        let f = Fixture::new().await;
        f.held('a', "w", 1).await;
        f.seed("HSET", "records", &[&id('a'), damage]).await;
        let before = f.state().await;
        let complete = |call: &mut Call| complete(call, &[('a', "7", 1, "w")]);
        assert_eq!(
            flat(f.run(&scripts::COMPLETE, complete).await.expect("complete")),
            ["3"]
        );
        let extend = |call: &mut Call| {
            call.arg(id('a')).arg("7").arg(1).arg("w").arg(5000);
        };
        assert_eq!(
            flat(f.run(&scripts::EXTEND, extend).await.expect("extend")),
            ["3", "0"]
        );
        assert_eq!(f.state().await, before);
        let reject = |call: &mut Call| {
            call.arg(1)
                .arg("t:wake")
                .arg("q")
                .arg(&b"\x91\x00"[..])
                .arg(1000);
            call.arg(id('a'))
                .arg("7")
                .arg(1)
                .arg("w")
                .arg("retry")
                .arg("")
                .arg("no reason")
                .arg("failed");
        };
        assert_eq!(
            flat(f.run(&scripts::REJECT, reject).await.expect("reject")),
            ["3", "0"]
        );
        changed(
            &before,
            &f.state().await,
            &[("records", &[]), ("bodies", &[]), ("counters", &["live=0"])],
        );
    }
}

#[tokio::test]
async fn what_is_no_id_leaves_the_list_of_final_tasks() {
    let f = Fixture::new().await;
    f.seed("HSET", "records", &[&id('a'), b"f5:1:w"]).await;
    f.seed(
        "RPUSH",
        "finals",
        &[b"", b"short", &[id('b'), id('c')].concat(), &id('a')],
    )
    .await;
    let before = f.state().await;
    let finals = |call: &mut Call| {
        call.arg(60_000).arg(10);
    };
    assert_eq!(
        flat(f.run(&scripts::FINALS, finals).await.expect("finals")),
        ["3", "a"]
    );
    changed(&before, &f.state().await, &[("finals", &["a"])]);
}

#[tokio::test]
async fn a_damaged_body_is_passed_by_claims() {
    for (shown, weight) in [("short", 405), ("nil", 400)] {
        let f = Fixture::new().await;
        f.waiting('a', 2, b"2").await;
        f.waiting('b', 1, b"1").await;
        if shown == "nil" {
            f.seed("HDEL", "bodies", &[&id('a')]).await;
        } else {
            f.seed("HSET", "bodies", &[&id('a'), shown.as_bytes()])
                .await;
        }
        let claim = |call: &mut Call| claim(call, &[("w", 9), ("v", 9)]);
        let answer = flat(f.run(&scripts::CLAIM, claim).await.expect("claim"));
        // The caller leaves out what is damaged, too.
        assert_eq!(answer[4..], ["aba", shown, "body2", shown, "2", "1", "0"]);
        let after = f.state().await;
        let is = |key: &str| after[key].join(" ");
        assert_eq!(
            (is("records"), is("bodies")),
            ("b=h1:w".to_owned(), "b=body2".to_owned())
        );
        // The other one is held.
        let open_bytes = format!("open_bytes={}", WEIGHT - weight);
        assert_eq!(
            is("counters"),
            format!("grants=2 live=1 longest_lease=30000 open=0 {open_bytes}")
        );
    }
}

#[tokio::test]
async fn a_damaged_record_holds_up_no_sweep_and_no_stats() {
    for damage in DAMAGED {
        let f = Fixture::new().await;
        f.seed("HSET", "records", &[&id('a'), damage]).await;
        f.seed("HSET", "bodies", &[&id('a'), &body(2)]).await;
        f.seed("LPUSH", "m:T", &[&element(1, 0, 'a')]).await;
        f.run(&scripts::STATS, |_| {}).await.expect("stats");
        let sweep = |call: &mut Call| {
            call.arg(512);
        };
        assert_eq!(
            flat(f.run(&scripts::SWEEP, sweep).await.expect("sweep")),
            ["1", "0"]
        );
    }
}
