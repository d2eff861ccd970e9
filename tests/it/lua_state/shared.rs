//! The scripts of shared sessions. The session of the tests is `11111111-…` of the worker `w`,
//! whose slot is 6.

use redis::Value;
use taskd::{
    model::WorkerName,
    queue::{SharedSession, shared_keys},
    redis_pool::{Call, Script, scripts},
};
use uuid::Uuid;

use super::{Fixture, NOW, State, changed, flat, id};

const SESSION: &str = "11111111-1111-1111-1111-111111111111";
const OTHER: &str = "22222222-2222-2222-2222-222222222222";
const OF: &str = "t:{sessions:6}:of:w";
const DUE: &str = "t:{sessions:6}:due";
const PROCESSES: &str = "t:{sessions:6}:processes";
const HELD: &str = "t:{sessions:6}:held:11111111-1111-1111-1111-111111111111";
const ENDS: &str = "t:{sessions:6}:ends:11111111-1111-1111-1111-111111111111";

impl Fixture {
    async fn shared(
        &self,
        script: &'static Script,
        session: &str,
        args: impl FnOnce(&mut Call),
    ) -> Vec<String> {
        let worker = WorkerName::new("w").expect("a name");
        let id: Uuid = session.parse().expect("an id");
        let mut call = script
            .call(&shared_keys("t", &SharedSession { worker, id }))
            .now(Some(NOW));
        call.arg("w").arg(session);
        args(&mut call);
        let answer: Value = call.run(&mut self.redis.conn()).await.expect(script.name);
        flat(answer)
    }

    async fn open(&self, session: &str, is_new: u8, most: u32, holding: &[char]) -> Vec<String> {
        let open = |call: &mut Call| {
            call.arg(is_new).arg(15_000).arg("plan").arg(most).arg(3);
            for letter in holding {
                call.arg(id(*letter));
            }
        };
        self.shared(&scripts::SHARED_OPEN, session, open).await
    }

    /// The answer to a call, without the plan and without how often the demand was set to 0.
    async fn call(
        &self,
        session: &str,
        want: &str,
        most: (u32, u32),
        started: &[char],
    ) -> Vec<String> {
        let mut answer = self.call_since("", session, want, most, started).await;
        answer.pop();
        answer
    }

    /// The answer to a call without the plan, for a wish that began when the demand had been set to
    /// 0 so often.
    async fn call_since(
        &self,
        since: &str,
        session: &str,
        want: &str,
        most: (u32, u32),
        started: &[char],
    ) -> Vec<String> {
        let args = |call: &mut Call| {
            call.arg(want).arg(most.0).arg(most.1).arg(since);
            for letter in started {
                call.arg(id(*letter));
            }
        };
        let mut answer = self.shared(&scripts::SHARED_CALL, session, args).await;
        if !answer.is_empty() {
            assert_eq!(answer.remove(3), "plan");
        }
        answer
    }

    async fn hold(&self, session: &str, tasks: &[(char, &str, i64)]) -> Vec<String> {
        let hold = |call: &mut Call| {
            for (letter, held, deadline) in tasks {
                call.arg(id(*letter)).arg(*held).arg(*deadline);
            }
        };
        self.shared(&scripts::SHARED_HOLD, session, hold).await
    }

    async fn end(&self, only_due: u8) -> Vec<String> {
        self.shared(&scripts::SHARED_END, SESSION, |call| {
            _ = call.arg(only_due).arg(5000)
        })
        .await
    }

    /// A session that wants three and has `a` and `b` in hand.
    async fn open_with_two(&self) -> State {
        assert_eq!(self.open(SESSION, 1, 10, &[]).await, ["1"]);
        assert_eq!(
            self.call(SESSION, "5", (9, 9), &[]).await,
            ["5", "5", "0", "0"]
        );
        let tasks = [
            ('a', "0q:0:7:1:1", NOW + 1000),
            ('b', "1q:0:7:1:1", NOW + 2000),
        ];
        assert_eq!(self.hold(SESSION, &tasks).await, ["1", "3", "2"]);
        let state = self.state().await;
        assert_eq!(
            state[OF],
            [format!(r#"{SESSION}=[15000,3,2,0,"plan",0,1002000]"#)]
        );
        assert_eq!(state[DUE], [format!("{SESSION}w={}", NOW + 15_000)]);
        assert_eq!(state[HELD], ["a=0q:0:7:1:1", "b=1q:0:7:1:1"]);
        assert_eq!(
            state[ENDS],
            [format!("a={}", NOW + 1000), format!("b={}", NOW + 2000)]
        );
        state
    }

    async fn due_at(&self, ms: i64) {
        let mut due = redis::cmd("ZADD");
        due.arg(DUE).arg(ms).arg(format!("{SESSION}w"));
        let _: Value = due.query_async(&mut self.redis.conn()).await.expect("due");
    }
}

#[tokio::test]
async fn a_session_opens_wants_and_holds() {
    let f = Fixture::new().await;
    let before = f.open_with_two().await;
    // It is not there twice, and one is enough here.
    assert_eq!(f.open(OTHER, 1, 1, &[]).await, ["2"]);
    assert_eq!(f.state().await, before);
    assert_eq!(f.open(OTHER, 1, 2, &[]).await, ["1"]);
    assert_eq!(f.hold(OTHER, &[]).await, ["1", "0", "0"]);
    let worker: Vec<String> = redis::cmd("HKEYS")
        .arg(OF)
        .query_async(&mut f.redis.conn())
        .await
        .unwrap();
    assert_eq!(worker.len(), 2);
}

#[tokio::test]
async fn a_worker_has_a_bounded_number_of_sessions() {
    let f = Fixture::new().await;
    f.open_with_two().await;
    assert_eq!(f.open(OTHER, 1, 10, &[]).await, ["1"]);
    assert_eq!(
        f.open("33333333-3333-3333-3333-333333333333", 1, 10, &[])
            .await,
        ["1"]
    );
    let before = f.state().await;
    assert_eq!(
        f.open("44444444-4444-4444-4444-444444444444", 1, 10, &[])
            .await,
        ["3"]
    );
    assert_eq!(f.state().await, before);
    assert_eq!(f.open(OTHER, 0, 10, &[]).await, ["1"], "one that goes on");
}

#[tokio::test]
async fn a_surrender_ends_the_wishes_from_before() {
    let f = Fixture::new().await;
    f.open_with_two().await;
    let rest = async |since| f.call_since(since, SESSION, "1", (9, 9), &[]).await;
    assert_eq!(rest("0").await, ["1", "4", "2", "0", "0"]);
    assert_eq!(
        f.call_since("", SESSION, "", (9, 9), &[]).await,
        ["4", "0", "2", "0", "1"]
    );
    let before = f.state().await;
    assert_eq!(
        before[OF],
        [format!(r#"{SESSION}=[15000,0,2,0,"plan",1,1002000]"#)]
    );
    assert_eq!(rest("0").await, ["0", "0", "2", "0", "1"]);
    assert_eq!(f.state().await, before);
    assert_eq!(rest("1").await, ["1", "1", "2", "0", "1"]);
    // One that goes on begins anew.
    assert_eq!(f.open(SESSION, 0, 9, &['a', 'b']).await, ["1"]);
    assert_eq!(rest("1").await, ["0", "0", "2", "0", "2"]);
}

#[tokio::test]
async fn a_demand_stops_at_the_bounds_of_the_session_and_of_the_worker() {
    let f = Fixture::new().await;
    f.open_with_two().await;
    assert_eq!(
        f.call(SESSION, "9", (7, 100), &[]).await,
        ["2", "5", "2", "0"],
        "seven in hand and on demand"
    );
    f.open(OTHER, 1, 10, &[]).await;
    assert_eq!(
        f.call(OTHER, "9", (7, 10), &[]).await,
        ["3", "3", "0", "0"],
        "ten of the worker"
    );
    assert_eq!(f.call(OTHER, "9", (7, 10), &[]).await, ["0", "3", "0", "0"]);
    // The bound may have been lowered since.
    assert_eq!(f.call(OTHER, "9", (2, 5), &[]).await, ["0", "3", "0", "0"]);
    assert_eq!(
        f.call(SESSION, "", (7, 10), &[]).await,
        ["5", "0", "2", "0"],
        "a surrender"
    );
    assert_eq!(f.call(OTHER, "9", (9, 10), &[]).await, ["5", "8", "0", "0"]);
    assert_eq!(
        f.call(SESSION, "0", (7, 10), &[]).await,
        ["0", "0", "2", "0"]
    );
}

#[tokio::test]
async fn streams_of_the_worker_count_as_long_as_their_process_lives() {
    let f = Fixture::new().await;
    f.open_with_two().await;
    let mut conn = f.redis.conn();
    let mut seed = redis::pipe();
    seed.hset(OF, "plives", 4).hset(OF, "pdied", 100);
    seed.zadd("t:{sessions:6}:processes", "lives", NOW + 1)
        .zadd("t:{sessions:6}:processes", "died", NOW);
    let _: () = seed.query_async(&mut conn).await.unwrap();
    assert_eq!(
        f.call(SESSION, "9", (100, 12), &[]).await,
        ["3", "6", "2", "1"],
        "the streams may give back a part"
    );
    assert_eq!(
        f.call(SESSION, "1", (100, 13), &[]).await,
        ["1", "7", "2", "0"]
    );
    let answer = f.call_since("", SESSION, "9", (100, 13), &[]).await;
    assert_eq!(answer, ["0", "7", "2", "1", "0"], "a process is no session");
}

#[tokio::test]
async fn more_tasks_than_the_demand_are_not_noted_and_none_of_a_session_that_is_over() {
    let f = Fixture::new().await;
    let before = f.open_with_two().await;
    let tasks: Vec<_> = ['c', 'd', 'e', 'f']
        .map(|letter| (letter, "1q:0:7:2:1", NOW + 9))
        .into();
    assert_eq!(f.hold(SESSION, &tasks).await, ["2", "3", "2"]);
    assert_eq!(f.state().await, before);
    assert_eq!(f.hold(OTHER, &tasks[..1]).await, ["0", "0", "0"]);
    assert_eq!(f.call(OTHER, "1", (9, 9), &[]).await, Vec::<String>::new());
    assert_eq!(f.open(OTHER, 0, 9, &[]).await, ["0"]);
    assert_eq!(f.state().await, before);
}

#[tokio::test]
async fn a_lease_that_is_over_is_not_in_hand() {
    let f = Fixture::new().await;
    let before = f.open_with_two().await;
    // A new lease of a task takes the place of the old one.
    assert_eq!(
        f.hold(SESSION, &[('a', "0q:0:7:3:2", NOW)]).await,
        ["1", "2", "1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            (
                OF,
                &[&format!(r#"{SESSION}=[15000,2,1,0,"plan",0,1002000]"#)],
            ),
            (HELD, &["b=1q:0:7:1:1"]),
            (ENDS, &[&format!("b={}", NOW + 2000)]),
        ],
    );
}

#[tokio::test]
async fn leases_that_are_over_do_not_count_though_their_session_is_silent() {
    let entry = |latest: i64| rmp_serde::to_vec(&(15_000, 1, 5, 0, "plan", 0, latest));
    for (latest, beside) in [(NOW + 1, 6), (NOW, 1)] {
        let f = Fixture::new().await;
        let mut seed = redis::cmd("HSET");
        seed.arg(OF)
            .arg(OTHER)
            .arg(entry(latest).expect("numbers can be packed"));
        let _: Value = seed.query_async(&mut f.redis.conn()).await.expect("seed");
        let room = (10 - beside).to_string();
        assert_eq!(f.allot("one", 10, 0).await, [&room[..], "0"], "{latest:?}");
        assert_eq!(f.allot("one", 0, 0).await, ["0", "0"]);
        assert_eq!(f.open(SESSION, 1, 10, &[]).await, ["1"]);
        assert_eq!(
            f.call(SESSION, "10", (100, 10), &[]).await,
            [&room[..], &room, "0", "0"],
            "{latest:?}"
        );
    }
}

#[tokio::test]
async fn a_report_takes_its_leases_out_of_the_book_and_counts_each_once() {
    let f = Fixture::new().await;
    let before = f.open_with_two().await;
    let note = |call: &mut Call| {
        call.arg(3).arg(id('a')).arg("q:0:7:1:1").arg(1);
        // Another lease of the task, and a task of another session.
        call.arg(id('b'))
            .arg("q:0:7:9:1")
            .arg(1)
            .arg(id('z'))
            .arg("q:0:7:1:1")
            .arg(1);
    };
    assert_eq!(
        f.shared(&scripts::SHARED_NOTE, SESSION, note).await,
        ["1", "3", "1"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            (
                OF,
                &[&format!(r#"{SESSION}=[15000,3,1,0,"plan",0,1002000]"#)],
            ),
            (HELD, &["b=1q:0:7:1:1"]),
            (ENDS, &[&format!("b={}", NOW + 2000)]),
        ],
    );
    assert_eq!(
        f.shared(&scripts::SHARED_NOTE, SESSION, note).await,
        ["0", "3", "1"],
        "a repeat"
    );
    assert_eq!(
        f.shared(&scripts::SHARED_NOTE, OTHER, note).await,
        Vec::<String>::new()
    );
}

#[tokio::test]
async fn an_extension_moves_the_deadline_and_brings_in_a_lease_of_another_way() {
    let f = Fixture::new().await;
    let before = f.open_with_two().await;
    assert_eq!(
        f.call(SESSION, "0", (9, 9), &['b', 'z']).await,
        ["0", "3", "2", "0"],
        "started"
    );
    let note = |call: &mut Call| {
        call.arg(0);
        for (letter, token) in [('b', "q:0:7:1:1"), ('c', "q:0:7:5:1")] {
            call.arg(id(letter)).arg(token).arg(NOW + 9000).arg(1);
        }
    };
    assert_eq!(
        f.shared(&scripts::SHARED_NOTE, SESSION, note).await,
        ["0", "3", "3"]
    );
    changed(
        &before,
        &f.state().await,
        &[
            (
                OF,
                &[&format!(r#"{SESSION}=[15000,3,3,0,"plan",0,1009000]"#)],
            ),
            (HELD, &["a=0q:0:7:1:1", "b=2q:0:7:1:1", "c=1q:0:7:5:1"]),
            (
                ENDS,
                &[
                    &format!("a={}", NOW + 1000),
                    &format!("b={}", NOW + 9000),
                    &format!("c={}", NOW + 9000),
                ],
            ),
        ],
    );
}

#[tokio::test]
async fn a_session_goes_on_without_its_demand_and_names_what_did_not_arrive() {
    let f = Fixture::new().await;
    let before = f.open_with_two().await;
    assert_eq!(
        f.open(SESSION, 0, 0, &['a']).await,
        ["1", "b", "1q:0:7:1:1", &format!("{}", NOW + 2000)]
    );
    changed(
        &before,
        &f.state().await,
        &[(
            OF,
            &[&format!(r#"{SESSION}=[15000,0,2,0,"plan",1,1002000]"#)],
        )],
    );
}

#[tokio::test]
async fn a_session_ends_when_it_is_due_and_any_process_may_go_on_with_the_end() {
    let f = Fixture::new().await;
    let before = f.open_with_two().await;
    assert_eq!(f.end(1).await, ["0"], "its worker lives");
    assert_eq!(f.state().await, before);
    f.due_at(NOW).await;
    let leases = [
        "1",
        "a",
        "0q:0:7:1:1",
        "1001000",
        "b",
        "1q:0:7:1:1",
        "1002000",
    ];
    assert_eq!(f.end(1).await, leases);
    let ending = format!(r#"{SESSION}=[15000,0,2,1,"plan",0,1002000]"#);
    let due = format!("{SESSION}w={}", NOW + 5000);
    changed(
        &before,
        &f.state().await,
        &[(OF, &[&ending]), (DUE, &[&due])],
    );
    // It is over for its worker, and nobody else ends it for a while.
    assert_eq!(
        f.call(SESSION, "1", (9, 9), &[]).await,
        Vec::<String>::new()
    );
    assert_eq!(f.open(SESSION, 0, 0, &[]).await, ["0"]);
    assert_eq!(
        f.hold(SESSION, &[('c', "0q:0:7:1:1", NOW + 1)]).await,
        ["0", "0", "0"]
    );
    assert_eq!(f.end(1).await, ["0"]);
    f.due_at(NOW - 1).await;
    assert_eq!(f.end(1).await, leases);
    assert_eq!(f.end(0).await, leases, "at once");
    assert_eq!(
        f.shared(&scripts::SHARED_FORGET, SESSION, |_| {}).await,
        ["1"]
    );
    assert_eq!(
        f.state().await.keys().collect::<Vec<_>>(),
        ["generation"],
        "nothing is left"
    );
}

#[tokio::test]
async fn a_session_that_ends_drops_the_leases_that_are_over() {
    let f = Fixture::new().await;
    let before = f.open_with_two().await;
    let over = async |letter: char| {
        let mut over = redis::cmd("ZADD");
        over.arg(ENDS).arg(NOW).arg(id(letter));
        let _: Value = over
            .query_async(&mut f.redis.conn())
            .await
            .expect("it is over");
    };
    let entry =
        |in_hand: u32, latest: i64| format!(r#"{SESSION}=[15000,0,{in_hand},1,"plan",0,{latest}]"#);
    let due = format!("{SESSION}w={}", NOW + 5000);
    over('a').await;
    assert_eq!(f.end(0).await, ["1", "b", "1q:0:7:1:1", "1002000"]);
    changed(
        &before,
        &f.state().await,
        &[
            (OF, &[&entry(1, NOW + 2000)]),
            (DUE, &[&due]),
            (HELD, &["b=1q:0:7:1:1"]),
            (ENDS, &[&format!("b={}", NOW + 2000)]),
        ],
    );
    over('b').await;
    assert_eq!(f.end(0).await, ["1"]);
    changed(
        &before,
        &f.state().await,
        &[
            (OF, &[&entry(0, 0)]),
            (DUE, &[&due]),
            (HELD, &[]),
            (ENDS, &[]),
        ],
    );
}

#[tokio::test]
async fn a_session_that_is_due_gets_its_time_out_once_more_unless_it_ends_already() {
    let f = Fixture::new().await;
    let before = f.open_with_two().await;
    assert_eq!(f.end(2).await, ["0"]);
    assert_eq!(f.state().await, before, "it is not due");
    f.due_at(NOW).await;
    assert_eq!(f.end(2).await, ["0"]);
    assert_eq!(f.state().await, before, "it is due in fifteen seconds");
    f.due_at(NOW).await;
    f.end(1).await;
    f.due_at(NOW).await;
    let before = f.state().await;
    assert_eq!(f.end(2).await, ["0"]);
    assert_eq!(f.state().await, before, "it ends");
}

#[tokio::test]
async fn the_end_of_a_session_that_is_lost_leaves_nothing() {
    let f = Fixture::new().await;
    f.open_with_two().await;
    let _: Value = redis::cmd("DEL")
        .arg(OF)
        .query_async(&mut f.redis.conn())
        .await
        .unwrap();
    assert_eq!(f.end(1).await, ["0"]);
    assert_eq!(f.state().await.keys().collect::<Vec<_>>(), ["generation"]);
}

#[tokio::test]
async fn the_sessions_that_are_due_are_named_and_a_clock_that_was_set_back_holds_none_up() {
    let f = Fixture::new().await;
    let due = async || {
        let mut call = scripts::SHARED_DUE.call(&[DUE, PROCESSES]).now(Some(NOW));
        call.arg(600_000).arg(2).arg(10_000);
        flat(call.run(&mut f.redis.conn()).await.unwrap())
    };
    assert_eq!(due().await, ["-1"]);
    let mut seed = redis::pipe();
    seed.zadd(DUE, "far", NOW + 700_000)
        .zadd(DUE, "soon", NOW + 300);
    let _: () = seed.query_async(&mut f.redis.conn()).await.unwrap();
    assert_eq!(due().await, ["300"]);
    assert_eq!(
        f.state().await[DUE],
        [
            format!("soon={}", NOW + 300),
            format!("far={}", NOW + 600_000)
        ]
    );
    let mut seed = redis::pipe();
    seed.zadd(DUE, "a", NOW - 3)
        .zadd(DUE, "b", NOW - 2)
        .zadd(DUE, "c", NOW);
    let _: () = seed.query_async(&mut f.redis.conn()).await.unwrap();
    assert_eq!(due().await, ["0", "a", "b"]);
}

impl Fixture {
    /// Asks for an allotment of ten of the worker's cap, for a process that lives for ten seconds.
    async fn allot(&self, process: &str, asked: u32, used: u32) -> Vec<String> {
        let workers = format!("t:{{sessions:6}}:workers:{process}");
        let mut call = scripts::SHARED_ALLOT
            .call(&[OF, PROCESSES, &workers])
            .now(Some(NOW));
        call.arg("w")
            .arg(process)
            .arg(10_000)
            .arg(asked)
            .arg(used)
            .arg(10);
        flat(
            call.run(&mut self.redis.conn())
                .await
                .expect("shared_allot"),
        )
    }

    async fn gone(&self, process: &str, workers: &[&str]) -> Vec<String> {
        let mut keys = vec![
            PROCESSES.to_owned(),
            format!("t:{{sessions:6}}:workers:{process}"),
        ];
        keys.extend(
            workers
                .iter()
                .map(|worker| format!("t:{{sessions:6}}:of:{worker}")),
        );
        let mut call = scripts::SHARED_GONE.call(&keys).now(Some(NOW));
        call.arg(process).arg(workers);
        flat(call.run(&mut self.redis.conn()).await.expect("shared_gone"))
    }

    async fn live(&self, process: &str, allotments: u32) -> Vec<String> {
        let workers = format!("t:{{sessions:6}}:workers:{process}");
        let mut call = scripts::SHARED_LIVE
            .call(&[PROCESSES, &workers])
            .now(Some(NOW));
        call.arg(process).arg(10_000).arg(allotments);
        flat(call.run(&mut self.redis.conn()).await.expect("shared_live"))
    }
}

#[tokio::test]
async fn allotments_add_up_to_the_cap_and_never_take_what_is_used() {
    let f = Fixture::new().await;
    assert_eq!(f.allot("one", 7, 0).await, ["7", "0"]);
    assert_eq!(
        f.allot("two", 7, 0).await,
        ["3", "1"],
        "the first one may have more than it uses"
    );
    let state = f.state().await;
    assert_eq!(state[OF], ["pone=7", "ptwo=3"]);
    assert_eq!(
        state[PROCESSES],
        [
            format!("one={}", NOW + 10_000),
            format!("two={}", NOW + 10_000)
        ]
    );
    assert_eq!(state["t:{sessions:6}:workers:one"], ["w"]);
    // The first one gives back what it does not use.
    assert_eq!(f.allot("one", 2, 2).await, ["2", "0"]);
    assert_eq!(f.allot("two", 7, 3).await, ["7", "0"]);
    assert_eq!(f.allot("two", 9, 7).await, ["8", "1"]);
    assert_eq!(
        f.allot("one", 5, 4).await,
        ["4", "1"],
        "it uses them, whatever the others have"
    );
    let state = f.state().await;
    assert_eq!(state[OF], ["pone=4", "ptwo=8"]);
    // An allotment of nothing is none.
    assert_eq!(f.allot("three", 1, 0).await, ["0", "1"]);
    assert_eq!(f.state().await, state);
    // Shared sessions count, too.
    assert_eq!(f.allot("one", 0, 0).await, ["0", "0"]);
    assert_eq!(f.open(SESSION, 1, 9, &[]).await, ["1"]);
    assert_eq!(
        f.call(SESSION, "5", (9, 10), &[]).await,
        ["2", "2", "0", "1"]
    );
    assert_eq!(f.allot("two", 9, 7).await, ["8", "0"]);
    assert_eq!(f.allot("two", 0, 0).await, ["0", "0"]);
    let left: Vec<_> = f
        .state()
        .await
        .into_keys()
        .filter(|key| key.contains("workers"))
        .collect();
    assert_eq!(left, Vec::<String>::new());
}

#[tokio::test]
async fn what_a_dead_process_had_is_removed_and_one_that_comes_back_hears_of_it() {
    let f = Fixture::new().await;
    f.allot("one", 7, 0).await;
    let before = f.state().await;
    assert_eq!(f.gone("one", &["w"]).await, ["0"], "it lives");
    assert_eq!(f.state().await, before);
    assert_eq!(f.live("one", 1).await, ["0"]);
    assert_eq!(f.live("two", 0).await, ["1"], "it was not there");
    let _: Value = redis::cmd("ZADD")
        .arg(PROCESSES)
        .arg(NOW)
        .arg("one")
        .query_async(&mut f.redis.conn())
        .await
        .unwrap();
    assert_eq!(f.allot("two", 10, 0).await, ["10", "0"], "it is dead");
    let _: Value = redis::cmd("SADD")
        .arg("t:{sessions:6}:workers:one")
        .arg("another")
        .query_async(&mut f.redis.conn())
        .await
        .unwrap();
    assert_eq!(f.gone("one", &["w"]).await, ["1"], "one worker is left");
    assert_eq!(f.live("one", 1).await, ["1"], "it was dead");
    assert_eq!(f.gone("one", &["another"]).await, ["0"], "it lives again");
    let _: Value = redis::cmd("ZADD")
        .arg(PROCESSES)
        .arg(NOW - 1)
        .arg("one")
        .query_async(&mut f.redis.conn())
        .await
        .unwrap();
    assert_eq!(f.gone("one", &["another"]).await, ["0"]);
    let state = f.state().await;
    assert_eq!(
        (&state[OF][..], state[PROCESSES].len()),
        (&["ptwo=10".to_owned()][..], 1)
    );
    assert_eq!(state.get("t:{sessions:6}:workers:one"), None);
}

#[tokio::test]
async fn a_process_that_asks_after_its_death_hears_that_its_other_allotments_are_gone() {
    let f = Fixture::new().await;
    f.allot("one", 7, 0).await;
    let mut dies = redis::pipe();
    dies.zadd(PROCESSES, "one", NOW)
        .sadd("t:{sessions:6}:workers:one", "another");
    let _: () = dies.query_async(&mut f.redis.conn()).await.unwrap();
    assert_eq!(f.gone("one", &["w", "another"]).await, ["0"]);
    // It lives again by its next question, about one worker of the two.
    assert_eq!(f.allot("one", 7, 7).await, ["7", "0"]);
    assert_eq!(f.live("one", 1).await, ["0"]);
    assert_eq!(f.live("one", 2).await, ["1"]);
}
