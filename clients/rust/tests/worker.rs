//! Workers on the mock, and on a source that loses leases.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use taskd_client::{
    Client, Done, Ended, Error, Event, Failure, Json, Mock, NewTask, Next, Priority, Source, Task,
    TaskInfo, Worker,
    pb::{self, ItemStatus},
};
use tokio::{
    sync::{Notify, Semaphore},
    task::JoinSet,
};

fn tasks(count: usize) -> impl Iterator<Item = NewTask> {
    (0..count).map(|number| NewTask::new("q", format!("k{number}")).text(number.to_string()))
}

fn worker() -> Worker {
    Worker::new("w", ["q"])
}

#[derive(serde::Deserialize, serde::Serialize)]
struct Page {
    depth: u32,
}

#[tokio::test]
async fn discovered_tasks_are_worked_on_once() {
    let mock = Mock::new([NewTask::new("q", "root").json(&Page { depth: 2 }).unwrap()]);
    let handler = async |task: Task<Json<Page>>| {
        let depth = task.payload.depth;
        let child = |name: &str| {
            NewTask::new("q", format!("{}/{name}", task.key())).json(&Page { depth: depth - 1 })
        };
        // The same key twice: one task.
        let found = if depth > 0 {
            vec![child("a")?, child("b")?, child("a")?]
        } else {
            vec![]
        };
        Ok::<_, Failure>(Done::json(&depth)?.discover(found))
    };
    let summary = worker()
        .concurrency(3)
        .run_on(mock.clone(), handler)
        .await
        .unwrap();
    assert_eq!((summary.completed, mock.completed()), (7, 7));
    assert_eq!(mock.result("q", "root/b/a").unwrap(), "0");
}

#[tokio::test]
async fn a_handler_that_runs_for_long_is_not_silent() {
    let mock = Mock::new([NewTask::new("q", "slow")]);
    let said = Arc::new(Semaphore::new(0));
    let events = said.clone();
    let worker = worker()
        .lease(Duration::from_millis(300))
        .on_event(move |event| {
            if let Event::StillRuns { task, so_far } = event {
                assert_eq!(task.key(), "slow");
                assert!(so_far >= Duration::from_millis(150));
                events.add_permits(1);
            }
        });
    let handler = move |_: Task<()>| {
        let said = said.clone();
        async move {
            // The second time comes after a whole lease.
            let twice = said.acquire_many(2).await?;
            Ok::<_, Failure>(Done::text(twice.num_permits().to_string()))
        }
    };
    worker.run_on(mock.clone(), handler).await.unwrap();
    assert_eq!(mock.result("q", "slow").unwrap(), "2");
}

#[tokio::test]
async fn holds_reach_only_tasks_with_a_limit_key() {
    let limited = NewTask::new("q", "limited").limit_key("example.org");
    let mock = Mock::new([limited, NewTask::new("q", "plain")]);
    let told = Arc::new(Mutex::new(Vec::new()));
    let events = told.clone();
    let worker = worker().on_event(move |event| {
        if let Event::NoLimitKey(task) = event {
            events.lock().unwrap().push(task.key().into_owned());
        }
    });
    // The mock refuses reports as taskd does.
    let handler = async |task: Task<()>| {
        if task.attempt() == 1 {
            return Err(Failure::new("busy").pace(Duration::from_secs(1)));
        }
        Ok(Done::text(task.limit_key()).hold(Duration::from_secs(7200)))
    };
    let summary = worker.run_on(mock.clone(), handler).await.unwrap();
    assert_eq!(
        (summary.completed, summary.rejected, summary.lost),
        (2, 2, 0)
    );
    assert_eq!(mock.result("q", "limited").unwrap(), "example.org");
    assert_eq!(*told.lock().unwrap(), ["plain", "plain"]);
}

#[tokio::test]
async fn wraps_run_around_the_handler_which_sees_the_whole_task() {
    let mock = Mock::new([NewTask::new("q", "a").replicas(3).priority(Priority::High)]);
    let said = Arc::new(Mutex::new(Vec::new()));
    let around = |name: &'static str| {
        let said = said.clone();
        move |task: Arc<TaskInfo>, next: Next| {
            let said = said.clone();
            async move {
                said.lock()
                    .unwrap()
                    .push(format!("{name} before {}", task.key()));
                let outcome = next.await;
                said.lock()
                    .unwrap()
                    .push(format!("{name} after {}", outcome.is_ok()));
                outcome.or_else(|_| Ok(Done::text("mended")))
            }
        }
    };
    let heard = said.clone();
    let handler = move |task: Task| {
        let what = format!("{} {:?}", task.replicas(), task.priority());
        heard.lock().unwrap().push(what);
        async { Err::<(), _>("wrong") }
    };
    let worker = worker().around(around("outer")).around(around("inner"));
    worker.run_on(mock.clone(), handler).await.unwrap();
    let expected = [
        "outer before a",
        "inner before a",
        "3 High",
        "inner after false",
        "outer after true",
    ];
    assert_eq!(*said.lock().unwrap(), expected);
    assert_eq!(mock.result("q", "a").unwrap(), "mended");
}

#[tokio::test]
async fn errors_reject_and_panics_do_too() {
    let mock = Mock::new(tasks(4).map(|task| task.max_attempts(2)));
    let handler = async |task: Task<String>| match (task.payload.as_str(), task.attempt()) {
        ("0", _) => Err(Failure::new("never").never_again()),
        ("1", _) => panic!("this is the test's own"),
        ("2", 1) => Err("once".into()),
        _ => Ok(()),
    };
    let events = Arc::new(Mutex::new(Vec::new()));
    let heard = events.clone();
    let worker = worker().on_event(move |event| {
        if let Event::Ended {
            task,
            ended,
            reason,
            ..
        } = event
        {
            heard
                .lock()
                .unwrap()
                .push((task.key().into_owned(), ended, reason.to_owned()));
        }
    });
    let summary = worker.run_on(mock.clone(), handler).await.unwrap();
    assert_eq!((summary.completed, summary.rejected), (2, 4));
    assert_eq!(mock.dead("q", "k0").unwrap(), "never");
    assert_eq!(
        mock.dead("q", "k1").unwrap(),
        "the handler panicked: this is the test's own"
    );
    let events = events.lock().unwrap();
    assert!(
        events.contains(&("k2".to_owned(), Ended::Rejected, "once".to_owned())),
        "{events:?}"
    );
    assert!(
        events.contains(&("k2".to_owned(), Ended::Completed, String::new())),
        "{events:?}"
    );
}

#[tokio::test]
async fn a_payload_of_another_form_is_rejected_for_good() {
    let mock = Mock::new([NewTask::new("q", "k").text("no JSON")]);
    let handler = async |_: Task<Json<Page>>| Ok::<_, Failure>(Done::new());
    worker().run_on(mock.clone(), handler).await.unwrap();
    assert!(
        mock.dead("q", "k")
            .unwrap()
            .starts_with("the payload is not as expected: ")
    );
}

#[tokio::test]
async fn never_more_handlers_than_asked_for_and_as_many() {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let all_run = Arc::new(Semaphore::new(0));
    let handler = {
        let (running, most, all_run) = (running.clone(), most.clone(), all_run.clone());
        move |_: Task| {
            let (running, most, all_run) = (running.clone(), most.clone(), all_run.clone());
            async move {
                let now = running.fetch_add(1, SeqCst) + 1;
                most.fetch_max(now, SeqCst);
                if now == 4 {
                    all_run.add_permits(1000);
                }
                // Four wait for each other.
                all_run.acquire().await.unwrap().forget();
                tokio::task::yield_now().await;
                running.fetch_sub(1, SeqCst);
                Ok::<_, Failure>(Done::new())
            }
        }
    };
    let mock = Mock::new(tasks(40));
    worker()
        .concurrency(4)
        .prefetch(3)
        .run_on(mock.clone(), handler)
        .await
        .unwrap();
    assert_eq!((mock.completed(), most.load(SeqCst)), (40, 4));
}

#[tokio::test]
async fn a_handler_that_takes_too_long_is_dropped() {
    let mock = Mock::new(tasks(1).map(|task| task.max_attempts(1)));
    let handler = async |_: Task| {
        std::future::pending::<()>().await;
        Ok::<_, Failure>(Done::new())
    };
    worker()
        .time_limit(Duration::from_millis(10))
        .run_on(mock.clone(), handler)
        .await
        .unwrap();
    assert_eq!(mock.dead("q", "k0").unwrap(), "it took longer than 10ms");
}

/// A handler that says when it has begun, and ends when it may.
fn held(began: &Arc<Notify>, may_end: &Arc<Notify>) -> impl Fn(Task) -> Handled + use<> {
    let (began, may_end) = (began.clone(), may_end.clone());
    move |_| {
        let (began, may_end) = (began.clone(), may_end.clone());
        Box::pin(async move {
            began.notify_one();
            may_end.notified().await;
            Ok(Done::new())
        })
    }
}

type Handled = std::pin::Pin<Box<dyn Future<Output = Result<Done, Failure>> + Send>>;

#[tokio::test]
async fn a_drain_finishes_what_runs_and_gives_back_what_waits() {
    let mock = Mock::new(tasks(5).map(|task| task.max_attempts(1)));
    let (began, may_end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let waits = worker().prefetch(2);
    let stop = waits.stop();
    let stopped = async {
        began.notified().await;
        stop.drain();
        may_end.notify_one();
    };
    let (summary, ()) = tokio::join!(waits.run_on(mock.clone(), held(&began, &may_end)), stopped);
    let summary = summary.unwrap();
    assert_eq!((summary.completed, summary.given_back), (1, 2));
    assert_eq!(mock.completed(), 1);
    // Tasks that went back have no failed attempt.
    let first = async |task: Task| {
        if task.attempt() == 1 {
            Ok(())
        } else {
            Err(Failure::new("not the first"))
        }
    };
    assert_eq!(worker().run_on(mock, first).await.unwrap().completed, 4);
}

#[tokio::test]
async fn a_handler_may_give_its_task_back_at_no_cost() {
    let mock = Mock::new(tasks(1).map(|task| task.max_attempts(1)));
    let calls = AtomicUsize::new(0);
    let handler = move |task: Task| {
        let is_first = calls.fetch_add(1, SeqCst) == 0;
        let busy = || {
            Failure::new("busy")
                .again_after(Duration::from_secs(9))
                .not_started()
        };
        async move {
            if is_first {
                Err(busy())
            } else {
                Ok(Done::text(task.attempt().to_string()))
            }
        }
    };
    let summary = worker().run_on(mock.clone(), handler).await.unwrap();
    assert_eq!(
        (summary.completed, summary.given_back, summary.rejected),
        (1, 1, 0)
    );
    assert!(mock.dead("q", "k0").is_none(), "no attempt counted");
}

#[tokio::test]
async fn a_throttled_worker_begins_nothing_meanwhile() {
    const PAUSE: Duration = Duration::from_millis(300);
    let mock = Mock::new(tasks(4).map(|task| task.max_attempts(1)));
    let began = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let began = began.clone();
        move |_: Task| {
            began.lock().unwrap().push(Instant::now());
            let is_first = began.lock().unwrap().len() == 1;
            async move {
                if is_first {
                    Err(Failure::new("the service is away").throttle(PAUSE))
                } else {
                    Ok(())
                }
            }
        }
    };
    let worker = worker().prefetch(2);
    let summary = worker.run_on(mock.clone(), handler).await.unwrap();
    assert_eq!((summary.completed, summary.rejected), (4, 0));
    let began = began.lock().unwrap();
    assert_eq!(began.len(), 5);
    assert!(began[1] - began[0] >= PAUSE);
}

#[tokio::test]
async fn a_second_stop_drops_what_runs() {
    let mock = Mock::new(tasks(2));
    let (began, may_end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let worker = worker();
    let stop = worker.stop();
    let stopped = async {
        began.notified().await;
        stop.next();
        stop.next();
    };
    let (summary, ()) = tokio::join!(worker.run_on(mock.clone(), held(&began, &may_end)), stopped);
    assert_eq!(summary.unwrap().given_back, 1);
}

/// One task, whose lease is lost at the first extension; reports fail for a while.
#[derive(Clone, Default)]
struct Losing(Arc<Counts>);

#[derive(Default)]
struct Counts {
    given: AtomicUsize,
    extended: AtomicUsize,
    reports: AtomicUsize,
}

impl Source for Losing {
    async fn get(&self, _: usize) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
        let task = |id: &str| pb::LeasedTask {
            id: id.to_owned(),
            key: id.to_owned().into(),
            ..Default::default()
        };
        match self.0.given.fetch_add(1, SeqCst) {
            0 => Err(Error::Away {
                address: "here".to_owned(),
                message: "later".to_owned(),
            }),
            1 => Ok(Some(vec![task("lost")])),
            2 => Ok(Some(vec![task("done")])),
            _ => Ok(None),
        }
    }

    async fn complete(&self, all: Vec<pb::Completion>) -> Result<Vec<pb::ItemResult>, Error> {
        let status = match self.0.reports.fetch_add(1, SeqCst) {
            0 => {
                return Err(Error::Away {
                    address: "here".to_owned(),
                    message: "later".to_owned(),
                });
            }
            1 => ItemStatus::TryLater,
            _ => ItemStatus::Ok,
        };
        Ok(all
            .into_iter()
            .map(|one| pb::ItemResult {
                id: one.id,
                status: status.into(),
                ..Default::default()
            })
            .collect())
    }

    async fn reject(&self, _: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        panic!("nothing is rejected");
    }

    async fn extend(&self, all: Vec<pb::Extension>) -> Result<Vec<pb::ItemResult>, Error> {
        self.0.extended.fetch_add(1, SeqCst);
        let status = ItemStatus::Cancelled.into();
        Ok(all
            .into_iter()
            .map(|one| pb::ItemResult {
                id: one.id,
                status,
                ..Default::default()
            })
            .collect())
    }
}

#[tokio::test]
async fn a_lost_lease_ends_its_handler_and_reports_are_repeated() {
    let source = Losing::default();
    let handler = async |task: Task| {
        if task.key() == "lost" {
            std::future::pending::<()>().await;
        }
        Ok::<_, Failure>(Done::new())
    };
    let summary = worker()
        .lease(Duration::from_millis(300))
        .run_on(source.clone(), handler)
        .await
        .unwrap();
    assert_eq!((summary.lost, summary.completed), (1, 1));
    assert_eq!(source.0.reports.load(SeqCst), 3);
}

/// The tasks of one shard that is away: a call with only such tasks fails, and in others they are
/// to be sent later.
#[derive(Clone, Default)]
struct Sharded(Arc<Shards>);

#[derive(Default)]
struct Shards {
    given: AtomicUsize,
    others: AtomicUsize,
}

fn result(id: String, status: ItemStatus) -> pb::ItemResult {
    pb::ItemResult {
        id,
        status: status.into(),
        ..Default::default()
    }
}

fn away() -> Error {
    Error::Away {
        address: "here".to_owned(),
        message: "later".to_owned(),
    }
}

impl Source for Sharded {
    async fn get(&self, _: usize) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
        let number = self.0.given.fetch_add(1, SeqCst);
        let id = if number == 0 {
            "away".to_owned()
        } else {
            number.to_string()
        };
        Ok((number <= 20).then(|| {
            vec![pb::LeasedTask {
                id: id.clone(),
                key: id.into(),
                ..Default::default()
            }]
        }))
    }

    async fn complete(&self, all: Vec<pb::Completion>) -> Result<Vec<pb::ItemResult>, Error> {
        // It is back when all others are done.
        let is_away = |one: &pb::Completion| one.id == "away" && self.0.others.load(SeqCst) < 20;
        if all.iter().all(is_away) {
            return Err(away());
        }
        let answer = |one: pb::Completion| {
            if is_away(&one) {
                return result(one.id, ItemStatus::TryLater);
            }
            self.0
                .others
                .fetch_add(usize::from(one.id != "away"), SeqCst);
            result(one.id, ItemStatus::Ok)
        };
        Ok(all.into_iter().map(answer).collect())
    }

    async fn reject(&self, _: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        panic!("nothing is rejected");
    }

    async fn extend(&self, all: Vec<pb::Extension>) -> Result<Vec<pb::ItemResult>, Error> {
        Ok(all
            .into_iter()
            .map(|one| result(one.id, ItemStatus::Ok))
            .collect())
    }
}

#[tokio::test]
async fn a_shard_that_is_away_holds_up_no_reports_of_others() {
    let order = Arc::new(Mutex::new(Vec::new()));
    let heard = order.clone();
    let worker = worker().on_event(move |event| {
        if let Event::Ended { task, .. } = event {
            heard.lock().unwrap().push(task.key().into_owned());
        }
    });
    let done = worker.run_on(Sharded::default(), async |_: Task| {
        Ok::<_, Failure>(Done::new())
    });
    let summary = tokio::time::timeout(Duration::from_secs(60), done)
        .await
        .expect("nothing waits for it")
        .unwrap();
    assert_eq!((summary.completed, summary.unreported), (21, 0));
    assert_eq!(order.lock().unwrap().last().unwrap(), "away");
}

/// One task, whose completion it refuses.
#[derive(Clone, Default)]
struct Refusing(Arc<Refused>);

#[derive(Default)]
struct Refused {
    given: AtomicUsize,
    rejections: Mutex<Vec<pb::Rejection>>,
}

impl Source for Refusing {
    async fn get(&self, _: usize) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
        let is_first = self.0.given.fetch_add(1, SeqCst) == 0;
        Ok(is_first.then(|| {
            vec![pb::LeasedTask {
                id: "a".to_owned(),
                key: "a".into(),
                ..Default::default()
            }]
        }))
    }

    async fn complete(&self, all: Vec<pb::Completion>) -> Result<Vec<pb::ItemResult>, Error> {
        let refused = |id| pb::ItemResult {
            error: "no".to_owned(),
            ..result(id, ItemStatus::Invalid)
        };
        Ok(all.into_iter().map(|one| refused(one.id)).collect())
    }

    async fn reject(&self, all: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        self.0
            .rejections
            .lock()
            .unwrap()
            .extend(all.iter().cloned());
        Ok(all
            .into_iter()
            .map(|one| result(one.id, ItemStatus::Ok))
            .collect())
    }

    async fn extend(&self, all: Vec<pb::Extension>) -> Result<Vec<pb::ItemResult>, Error> {
        Ok(all
            .into_iter()
            .map(|one| result(one.id, ItemStatus::Ok))
            .collect())
    }
}

#[tokio::test]
async fn a_refused_completion_fails_the_attempt_and_does_not_kill_the_task() {
    let source = Refusing::default();
    let summary = worker()
        .run_on(
            source.clone(),
            async |_: Task| Ok::<_, Failure>(Done::new()),
        )
        .await
        .unwrap();
    assert_eq!((summary.completed, summary.rejected), (0, 1));
    let rejections = source.0.rejections.lock().unwrap();
    let said: Vec<_> = rejections
        .iter()
        .map(|one| (&*one.reason, one.retry))
        .collect();
    assert_eq!(said, [("taskd refused the completion: no", Some(true))]);
}

#[tokio::test]
async fn a_task_is_put_off_at_no_cost_and_not_for_ever_by_a_mock() {
    let mock = Mock::new(tasks(2).map(|task| task.max_attempts(1)));
    let calls = AtomicUsize::new(0);
    let handler = move |task: Task<String>| {
        let is_over = task.payload == "0" && calls.fetch_add(1, SeqCst) >= 3;
        let busy = Failure::new("busy").put_off(Duration::from_secs(3600));
        async move {
            if is_over {
                Ok(Done::text(task.attempt().to_string()))
            } else {
                Err(busy)
            }
        }
    };
    let summary = worker().run_on(mock.clone(), handler).await.unwrap();
    assert_eq!(
        (summary.completed, summary.given_back, summary.rejected),
        (1, 103, 0)
    );
    assert_eq!(mock.result("q", "k0").unwrap(), "1");
    assert_eq!(mock.dead("q", "k1").unwrap(), "busy");
}

/// A task that comes when it may.
#[derive(Clone, Default)]
struct Late(Arc<Comes>);

#[derive(Default)]
struct Comes {
    may_come: Notify,
    rejected: Mutex<Vec<String>>,
}

impl Source for Late {
    async fn get(&self, _: usize) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
        self.0.may_come.notified().await;
        Ok(Some(vec![pb::LeasedTask {
            id: "late".to_owned(),
            key: "late".into(),
            ..Default::default()
        }]))
    }

    async fn complete(&self, _: Vec<pb::Completion>) -> Result<Vec<pb::ItemResult>, Error> {
        Err(away())
    }

    async fn reject(&self, all: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        self.0
            .rejected
            .lock()
            .unwrap()
            .extend(all.iter().map(|one| one.id.clone()));
        Ok(all
            .into_iter()
            .map(|one| result(one.id, ItemStatus::Ok))
            .collect())
    }

    async fn extend(&self, _: Vec<pb::Extension>) -> Result<Vec<pb::ItemResult>, Error> {
        Err(away())
    }
}

#[tokio::test]
async fn an_answer_that_comes_with_the_stop_is_given_back() {
    // The loop of a worker takes one of several events at random.
    for _ in 0..30 {
        let source = Late::default();
        let worker = worker();
        let (stop, may_come) = (worker.stop(), source.clone());
        let stopped = async move {
            tokio::task::yield_now().await;
            may_come.0.may_come.notify_one();
            stop.drain();
        };
        let done = async |_: Task| Err::<Done, _>(Failure::new("it may have begun"));
        let (summary, ()) = tokio::join!(worker.run_on(source.clone(), done), stopped);
        let summary = summary.unwrap();
        assert_eq!(summary.given_back + summary.rejected, 1);
        assert_eq!(*source.0.rejected.lock().unwrap(), ["late"]);
    }
}

/// Its reports bring the next of these tasks, when they may.
#[derive(Clone)]
struct Chain(Arc<Links>);

struct Links {
    left: Mutex<Vec<&'static str>>,
    may_answer: Semaphore,
    asked: Notify,
    gets: AtomicUsize,
    rejected: Mutex<Vec<String>>,
}

impl Chain {
    fn new(answers: usize) -> Self {
        Self(Arc::new(Links {
            left: Mutex::new(vec!["c", "b", "a"]),
            may_answer: Semaphore::new(answers),
            asked: Notify::new(),
            gets: AtomicUsize::new(0),
            rejected: Mutex::default(),
        }))
    }

    fn next(&self) -> Option<pb::LeasedTask> {
        let id = self.0.left.lock().unwrap().pop()?;
        Some(pb::LeasedTask {
            id: id.to_owned(),
            key: id.into(),
            ..Default::default()
        })
    }
}

impl Source for Chain {
    async fn get(&self, _: usize) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
        self.0.gets.fetch_add(1, SeqCst);
        Ok(self.next().map(|task| vec![task]))
    }

    async fn complete(&self, all: Vec<pb::Completion>) -> Result<Vec<pb::ItemResult>, Error> {
        Ok(all
            .into_iter()
            .map(|one| result(one.id, ItemStatus::Ok))
            .collect())
    }

    fn brings_tasks(&self) -> bool {
        true
    }

    async fn complete_and_get(
        &self,
        all: Vec<pb::Completion>,
        most: usize,
    ) -> Result<(Vec<pb::ItemResult>, Vec<pb::LeasedTask>), Error> {
        assert_eq!(most, 1, "the room of a worker with one handler");
        self.0.asked.notify_one();
        self.0.may_answer.acquire().await.unwrap().forget();
        Ok((self.complete(all).await?, self.next().into_iter().collect()))
    }

    async fn reject(&self, all: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        assert!(all.iter().all(|one| one.not_started));
        self.0
            .rejected
            .lock()
            .unwrap()
            .extend(all.iter().map(|one| one.id.clone()));
        Ok(all
            .into_iter()
            .map(|one| result(one.id, ItemStatus::Ok))
            .collect())
    }

    async fn extend(&self, all: Vec<pb::Extension>) -> Result<Vec<pb::ItemResult>, Error> {
        Ok(all
            .into_iter()
            .map(|one| result(one.id, ItemStatus::Ok))
            .collect())
    }
}

#[tokio::test]
async fn a_report_brings_the_next_task() {
    let chain = Chain::new(3);
    let summary = worker()
        .run_on(chain.clone(), async |_: Task| Ok::<_, Failure>(Done::new()))
        .await
        .unwrap();
    assert_eq!(summary.completed, 3);
    assert_eq!(
        chain.0.gets.load(SeqCst),
        2,
        "for the first task, and behind a report that brought none"
    );
}

#[tokio::test]
async fn a_task_that_a_report_brings_with_the_stop_is_done_or_given_back() {
    let chain = Chain::new(0);
    let worker = worker();
    let (stop, source) = (worker.stop(), chain.clone());
    let stopped = async move {
        source.0.asked.notified().await;
        source.0.may_answer.add_permits(1);
        stop.drain();
    };
    let done = async |_: Task| Ok::<_, Failure>(Done::new());
    let (summary, ()) = tokio::join!(worker.run_on(chain.clone(), done), stopped);
    let summary = summary.unwrap();
    // The loop of a worker takes one of several events at random: the task may have begun.
    assert_eq!(
        (summary.completed + summary.given_back, summary.unreported),
        (2, 0)
    );
    assert_eq!(
        chain.0.rejected.lock().unwrap().len() as u64,
        summary.given_back
    );
    assert_eq!(*chain.0.left.lock().unwrap(), ["c"]);
}

#[tokio::test]
async fn a_task_that_a_report_brings_behind_the_stop_is_given_back() {
    let chain = Chain::new(0);
    let worker = worker();
    let (stop, source) = (worker.stop(), chain.clone());
    let stopped = async move {
        source.0.asked.notified().await;
        stop.drain();
        // The worker hears of it first.
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        source.0.may_answer.add_permits(1);
    };
    let done = async |_: Task| Ok::<_, Failure>(Done::new());
    let (summary, ()) = tokio::join!(worker.run_on(chain.clone(), done), stopped);
    let summary = summary.unwrap();
    assert_eq!(
        (summary.completed, summary.given_back, summary.unreported),
        (1, 1, 0)
    );
    assert_eq!(*chain.0.rejected.lock().unwrap(), ["b"]);
}

#[tokio::test]
async fn a_report_without_an_answer_goes_anew_in_a_drain() {
    let chain = Chain::new(0);
    let worker = worker();
    let (stop, source) = (worker.stop(), chain.clone());
    let stopped = async move {
        source.0.asked.notified().await;
        stop.drain();
    };
    let done = async |_: Task| Ok::<_, Failure>(Done::new());
    let (summary, ()) = tokio::join!(worker.run_on(chain.clone(), done), stopped);
    let summary = summary.unwrap();
    assert_eq!(
        (summary.completed, summary.given_back, summary.unreported),
        (1, 0, 0)
    );
    assert_eq!(*chain.0.left.lock().unwrap(), ["c", "b"]);
}

#[tokio::test]
async fn a_report_that_takes_long_holds_up_no_poll() {
    let chain = Chain::new(0);
    let summary = worker()
        .run_on(chain.clone(), async |_: Task| Ok::<_, Failure>(Done::new()))
        .await
        .unwrap();
    assert_eq!((summary.completed, chain.0.gets.load(SeqCst)), (3, 4));
}

/// Five answers without tasks, none of which waits.
#[derive(Default)]
struct Empty(AtomicUsize);

impl Source for Empty {
    async fn get(&self, _: usize) -> Result<Option<Vec<pb::LeasedTask>>, Error> {
        Ok((self.0.fetch_add(1, SeqCst) < 5).then(Vec::new))
    }

    async fn complete(&self, _: Vec<pb::Completion>) -> Result<Vec<pb::ItemResult>, Error> {
        panic!("there is no task");
    }

    async fn reject(&self, _: Vec<pb::Rejection>) -> Result<Vec<pb::ItemResult>, Error> {
        panic!("there is no task");
    }

    async fn extend(&self, _: Vec<pb::Extension>) -> Result<Vec<pb::ItemResult>, Error> {
        panic!("there is no task");
    }
}

#[tokio::test]
async fn a_source_that_does_not_wait_is_not_asked_all_the_time() {
    let began = Instant::now();
    worker()
        .run_on(Empty::default(), async |_: Task| {
            Ok::<_, Failure>(Done::new())
        })
        .await
        .unwrap();
    assert!(
        began.elapsed() >= Duration::from_millis(500),
        "a tenth of a second for each"
    );
}

#[tokio::test]
async fn a_dropped_handler_tells_what_it_started() {
    let mock = Mock::new(tasks(2).map(|task| task.max_attempts(1)));
    // These outlive the handlers.
    let started = Arc::new(Mutex::new(JoinSet::new()));
    let heard = started.clone();
    let handler = move |task: Task<String>| {
        let heard = heard.clone();
        async move {
            let (cancelled, key) = (task.cancelled(), task.key().into_owned());
            heard.lock().unwrap().spawn(async move {
                cancelled.await;
                key
            });
            if task.payload == "0" {
                std::future::pending::<()>().await;
            }
            assert!(!task.is_cancelled());
            Ok::<_, Failure>(Done::new())
        }
    };
    worker()
        .time_limit(Duration::from_millis(50))
        .run_on(mock, handler)
        .await
        .unwrap();
    let mut started = std::mem::take(&mut *started.lock().unwrap());
    assert_eq!(started.join_next().await.unwrap().unwrap(), "k0");
    assert!(started.try_join_next().is_none());
}

#[tokio::test]
async fn an_address_of_no_use_is_told_at_once() {
    assert!(Client::new("http://a b").is_err());
    let said = Client::new("http://u:s3cret@a b")
        .err()
        .unwrap()
        .to_string();
    assert!(
        said.contains("http://***@a b") && !said.contains("s3cret"),
        "{said}"
    );
    assert!(Client::builder(Vec::<String>::new()).build().is_err());
    let nobody = Client::builder(["127.0.0.1:1"])
        .give_up_after(Duration::ZERO)
        .build()
        .unwrap();
    let error = nobody.insert([NewTask::new("q", "k")]).await.unwrap_err();
    assert!(
        error.may_pass() && error.to_string().contains("127.0.0.1:1"),
        "{error}"
    );
}

#[tokio::test]
async fn a_payload_may_be_absent() {
    let page = NewTask::new("q", "page").json(&Page { depth: 2 }).unwrap();
    let mock = Mock::new([
        page,
        NewTask::new("q", "none"),
        NewTask::new("q", "text").text("no JSON"),
    ]);
    let handler = async |task: Task<Option<Json<Page>>>| {
        let depth = task.payload.as_ref().map(|page| page.depth);
        Done::json(&depth)
    };
    worker().run_on(mock.clone(), handler).await.unwrap();
    assert_eq!(
        (
            mock.result("q", "page").unwrap(),
            mock.result("q", "none").unwrap()
        ),
        ("2".into(), "null".into())
    );
    assert!(
        mock.dead("q", "text")
            .unwrap()
            .starts_with("the payload is not as expected: ")
    );
}
