//! Tests of joins: when a subtree is over, and what its join gets.

use serde_json::{Value, json};
use taskd::{
    model::{
        Join, Joining, LetterFilter, LetterPages, Part, RowTree, ThenTask, TreeOnDead,
        TreeSettings, TreeState, Way,
    },
    store::Stored,
};

use super::{
    trees::{cancel_tree, on_dead, root, send_again, settle, tree_of},
    *,
};

/// A join of a queue that takes from these stages.
fn join(queue: &str, from: &[&str]) -> Join {
    Join {
        task: ThenTask::from(&task(queue, "join")),
        from: from.iter().map(ToString::to_string).collect(),
        max_bytes: 1000,
    }
}

/// A task that is sent on this way.
fn sent(key: &str, way: Way) -> NewRow {
    fresh(TaskRow {
        tree: (way != Way::default()).then(|| Box::new(RowTree::Sent(way))),
        ..task("q", key)
    })
}

fn part(way: Way, join: &str, stage: &str, payload: &str) -> Part {
    Part {
        way,
        join: join.to_owned(),
        stage: stage.to_owned(),
        port: "out".to_owned(),
        payload: payload.to_owned().into(),
        encoding: Encoding::Json,
        ..Part::default()
    }
}

/// A completion that begins these joins, sends these tasks and these parts.
fn forks(row: &NewRow, tasks: &[&NewRow], joins: &[Join], parts: Vec<Part>) -> Settlement {
    let mut report = discovering(row, "w", tasks.iter().map(|row| (*row).clone()).collect());
    if let Settlement::Completed { joining, .. } = &mut report {
        *joining = Some(Box::new(Joining {
            ways: Vec::new(),
            joins: joins.to_vec(),
            parts,
        }));
    }
    report
}

fn sends(row: &NewRow, parts: Vec<Part>) -> Settlement {
    forks(row, &[], &[], parts)
}

/// A part of the innermost subtree of its task, which goes to this join.
fn part_of(join: &str, stage: &str, payload: &str) -> Part {
    part(Way::Out(0), join, stage, payload)
}

/// The same for the join of [`forked`].
fn own(stage: &str, payload: &str) -> Part {
    part_of("joined", stage, payload)
}

/// The tasks that a settlement answers, with their payloads.
fn made(stored: &Stored<Settled>) -> Vec<(NewRow, Value)> {
    let rows = stored.released.iter();
    rows.map(|row| {
        let payload = serde_json::from_slice(&row.task.payload).unwrap();
        (fresh(row.task.clone()), payload)
    })
    .collect()
}

/// State, and the tasks in all, open, dead, letters, late, and joins to come.
async fn counts(store: &dyn Store, root: &NewRow) -> (TreeState, [u64; 6]) {
    let tree = tree_of(store, root).await;
    let counts = [
        tree.tasks,
        tree.open,
        tree.dead,
        tree.letters,
        tree.late,
        tree.joins,
    ];
    (tree.state, counts)
}

const OPEN: TreeState = TreeState::Open;
const DONE: TreeState = TreeState::Done;
const FAILED: TreeState = TreeState::Failed;

/// A tree whose root has forked into tasks `a` and `b`.
async fn forked(store: &dyn Store, settings: TreeSettings, join: Join) -> [NewRow; 3] {
    let first = root("fork", settings);
    insert_new(store, std::slice::from_ref(&first)).await;
    let [a, b] = ["a", "b"].map(|key| sent(key, Way::Into(0)));
    let stored = settle(store, &[forks(&first, &[&a, &b], &[join], vec![])]).await;
    assert_eq!(stored.released, []);
    assert_eq!(counts(store, &first).await, (OPEN, [3, 2, 0, 0, 0, 1]));
    [first, a, b]
}

pub(crate) async fn a_join_gets_one_task_when_its_subtree_is_over<D: Database>(db: &D) {
    let store = db.open().await;
    let stages = ["left", "right", "none"];
    let [first, a, b] = forked(&*store, TreeSettings::default(), join("joined", &stages)).await;
    // `b` sends its work on within the subtree.
    let c = row("q", "c");
    let on = forks(&b, &[&c], &[], vec![own("right", "1")]);
    let stored = settle(&*store, &[sends(&a, vec![own("left", "{}")]), on.clone()]).await;
    assert_eq!(made(&stored), []);
    assert_eq!(counts(&*store, &first).await, (OPEN, [4, 1, 0, 0, 0, 1]));
    // A repeated report adds nothing.
    settle(&*store, &[on]).await;

    let last = sends(
        &c,
        vec![
            own("left", "2.0"),
            Part {
                index: 1,
                ..own("left", "3")
            },
        ],
    );
    let stored = settle(&*store, std::slice::from_ref(&last)).await;
    let of_join = made(&stored);
    let [(joined, payload)] = &of_join[..] else {
        panic!("{of_join:?}");
    };
    assert_eq!(payload["fork"]["key"], "fork");
    assert_eq!(payload["fork"]["payload"], "payload");
    assert_eq!(payload["missing"], json!(["none"]));
    let parts = payload["parts"].as_array().unwrap();
    let stages: Vec<_> = parts
        .iter()
        .map(|part| part["stage"].as_str().unwrap())
        .collect();
    assert_eq!(stages, ["left", "left", "left", "right"]);
    assert_eq!(parts[3]["payload"], json!(1));
    // Of one task they are in its order.
    let two = parts
        .iter()
        .position(|part| part["payload"] == json!(2.0))
        .unwrap();
    assert_eq!(parts[two + 1]["payload"], json!(3));
    assert_eq!(joined.task.queue, queue("joined"));
    assert_eq!(counts(&*store, &first).await, (OPEN, [5, 1, 0, 0, 0, 0]));
    assert_eq!(detail_of(&*store, joined).await.tree, Some(first.task.id));
    // It is counted in its queue, and waits in the outbox in case that nobody publishes it.
    assert!(
        outbox(&*store)
            .await
            .iter()
            .any(|row| row.task.id == joined.task.id)
    );

    assert_eq!(settle(&*store, &[last]).await.released, []);
    settle(&*store, &[completed(joined, "w")]).await;
    assert_eq!(counts(&*store, &first).await, (DONE, [5, 0, 0, 0, 0, 0]));
}

pub(crate) async fn a_subtree_without_parts_makes_no_task<D: Database>(db: &D) {
    let store = db.open().await;
    let [first, a, b] = forked(&*store, TreeSettings::default(), join("joined", &["left"])).await;
    let stored = settle(&*store, &[completed(&a, "w"), completed(&b, "w")]).await;
    assert_eq!(stored.released, []);
    assert_eq!(counts(&*store, &first).await, (DONE, [3, 0, 0, 0, 0, 0]));

    // A fork whose outputs are duplicates has none either, and one may send parts by itself.
    let second = root("second", TreeSettings::default());
    insert_new(&*store, std::slice::from_ref(&second)).await;
    let again = sent("a", Way::Into(0));
    let both = [join("joined", &["left"]), join("direct", &["fork"])];
    let parts = vec![part(Way::Into(1), "direct", "fork", "7")];
    let stored = settle(&*store, &[forks(&second, &[&again], &both, parts)]).await;
    let of_join = made(&stored);
    let [(joined, payload)] = &of_join[..] else {
        panic!("{of_join:?}");
    };
    assert_eq!(joined.task.queue, queue("direct"));
    assert_eq!(payload["parts"][0]["payload"], json!(7));
    assert_eq!(counts(&*store, &second).await, (OPEN, [2, 1, 0, 0, 0, 0]));
}

pub(crate) async fn a_join_waits_for_the_joins_within_it<D: Database>(db: &D) {
    let store = db.open().await;
    let [first, a, b] = forked(
        &*store,
        TreeSettings::default(),
        join("outer", &["inner", "a"]),
    )
    .await;
    // `a` is a fork, too: one task goes into its level, one stays, and one leaves all levels.
    let within = sent("within", Way::Into(0));
    let beside = row("q", "beside");
    let out = sent("out", Way::Out(1));
    let inner = [join("inner", &["within"])];
    let report = forks(
        &a,
        &[&within, &beside, &out],
        &inner,
        vec![part_of("outer", "a", "0")],
    );
    settle(&*store, &[report, completed(&b, "w")]).await;
    assert_eq!(counts(&*store, &first).await, (OPEN, [6, 3, 0, 0, 0, 2]));
    settle(&*store, &[completed(&beside, "w")]).await;

    // A part may leave levels as well.
    let parts = vec![
        part_of("inner", "within", "1"),
        part(Way::Out(1), "outer", "within", "2"),
        // By a file that had other levels.
        part_of("outer", "within", "late"),
    ];
    let of_inner = made(&settle(&*store, &[sends(&within, parts)]).await);
    let [(joined, payload)] = &of_inner[..] else {
        panic!("the outer join is early: {of_inner:?}");
    };
    assert_eq!(joined.task.queue, queue("inner"));
    assert_eq!(payload["parts"].as_array().unwrap().len(), 1);
    let of_outer = made(
        &settle(
            &*store,
            &[sends(joined, vec![part_of("outer", "inner", "3")])],
        )
        .await,
    );
    let [(joined, payload)] = &of_outer[..] else {
        panic!("{of_outer:?}");
    };
    assert_eq!(joined.task.queue, queue("outer"));
    let parts = payload["parts"].as_array().unwrap();
    let payloads: Vec<_> = parts.iter().map(|part| &part["payload"]).collect();
    assert_eq!(payloads, [&json!(3), &json!(0), &json!(2)]);
    assert_eq!(counts(&*store, &first).await, (OPEN, [8, 2, 0, 0, 1, 0]));
    settle(&*store, &[completed(joined, "w"), completed(&out, "w")]).await;
    assert_eq!(counts(&*store, &first).await, (DONE, [8, 0, 0, 0, 1, 0]));

    // Nothing but empty levels: both end at once, from the inside out.
    let second = root("empty", TreeSettings::default());
    insert_new(&*store, std::slice::from_ref(&second)).await;
    let x = sent("x", Way::Into(0));
    settle(
        &*store,
        &[forks(&second, &[&x], &[join("outer", &["x"])], vec![])],
    )
    .await;
    let y = sent("y", Way::Into(0));
    let inner = [join("inner", &["y"])];
    settle(&*store, &[forks(&x, &[&y], &inner, vec![])]).await;
    assert_eq!(counts(&*store, &second).await, (OPEN, [3, 1, 0, 0, 0, 2]));
    assert_eq!(settle(&*store, &[completed(&y, "w")]).await.released, []);
    assert_eq!(counts(&*store, &second).await, (DONE, [3, 0, 0, 0, 0, 0]));
}

pub(crate) async fn a_dead_task_ends_or_holds_its_subtree<D: Database>(db: &D) {
    let store = db.open().await;
    // It counts: the join goes without it, and sent again it is outside.
    let [first, a, b] = forked(&*store, TreeSettings::default(), join("joined", &["left"])).await;
    let reports = [sends(&a, vec![own("left", "1")]), died(&b)];
    assert_eq!(made(&settle(&*store, &reports).await).len(), 1);
    assert_eq!(counts(&*store, &first).await, (OPEN, [4, 1, 1, 0, 0, 0]));
    send_again(&*store, &b, NOW + 20).await;
    let found = row("q", "found");
    let late = forks(&b, &[&found], &[], vec![own("left", "2")]);
    assert_eq!(settle(&*store, &[late]).await.released, []);
    assert_eq!(counts(&*store, &first).await, (OPEN, [5, 2, 0, 0, 1, 0]));

    // It holds: the join waits until it is sent again, or purged.
    for purges in [false, true] {
        let hold = on_dead(TreeOnDead::Hold);
        let first = root(&format!("held {purges}"), hold);
        insert_new(&*store, std::slice::from_ref(&first)).await;
        let [a, b] = ["a", "b"].map(|key| sent(&format!("{key} {purges}"), Way::Into(0)));
        let joins = [join("joined", &["left"])];
        settle(&*store, &[forks(&first, &[&a, &b], &joins, vec![])]).await;
        let reports = [sends(&a, vec![own("left", "1")]), died(&b)];
        assert_eq!(settle(&*store, &reports).await.released, []);
        assert_eq!(counts(&*store, &first).await, (OPEN, [3, 0, 1, 0, 0, 1]));
        let before = outbox(&*store).await.len();
        if purges {
            assert_eq!(store.purge(&[b.task.id]).await.unwrap(), 1);
            assert_eq!(outbox(&*store).await.len(), before + 1);
            assert_eq!(counts(&*store, &first).await, (OPEN, [4, 1, 1, 0, 0, 0]));
        } else {
            send_again(&*store, &b, NOW + 20).await;
            assert_eq!(counts(&*store, &first).await, (OPEN, [3, 1, 0, 0, 0, 1]));
            let stored = settle(&*store, &[sends(&b, vec![own("left", "2")])]).await;
            let of_join = made(&stored);
            assert_eq!(of_join[0].1["parts"].as_array().unwrap().len(), 2);
        }
    }
}

pub(crate) async fn a_join_that_is_too_large_becomes_a_letter<D: Database>(db: &D) {
    let store = db.open().await;
    let [first, a, b] = forked(&*store, TreeSettings::default(), join("joined", &["left"])).await;
    let large = format!("\"{}\"", "x".repeat(600));
    let reports = [&a, &b].map(|row| sends(row, vec![own("left", &large)]));
    assert_eq!(settle(&*store, &reports).await.released, []);
    assert_eq!(counts(&*store, &first).await, (FAILED, [3, 0, 0, 1, 0, 0]));
    let pages = LetterPages {
        filter: LetterFilter::default(),
        after: None,
        limit: 10,
    };
    let letters = store.letters(&pages).await.unwrap().letters;
    let [stored] = &letters[..] else {
        panic!("{letters:?}");
    };
    let letter = &stored.letter;
    assert_eq!(
        (&*letter.queue, letter.parent_id),
        ("joined", Some(first.task.id))
    );
    assert!(
        letter.reason.contains("the 2 parts of the join have"),
        "{}",
        letter.reason
    );
    assert_eq!(letter.tree, Some(first.task.id));
}

pub(crate) async fn a_cancelled_tree_joins_nothing<D: Database>(db: &D) {
    let store = db.open().await;
    let hold = on_dead(TreeOnDead::Hold);
    let [first, a, b] = forked(&*store, hold, join("joined", &["left"])).await;
    settle(&*store, &[sends(&a, vec![own("left", "1")]), died(&b)]).await;
    // Only the dead task held it.
    cancel_tree(&*store, &first, 10).await;
    assert_eq!(counts(&*store, &first).await, (FAILED, [3, 0, 1, 0, 0, 0]));
    assert!(
        outbox(&*store)
            .await
            .iter()
            .all(|row| row.task.queue != queue("joined"))
    );
    // What comes back is outside of the subtree, which is gone.
    send_again(&*store, &b, NOW + 20).await;
    settle(&*store, &[sends(&b, vec![own("left", "2")])]).await;
    assert_eq!(counts(&*store, &first).await, (DONE, [3, 0, 0, 0, 1, 0]));
}

pub(crate) async fn a_fork_outside_of_trees_becomes_a_root<D: Database>(db: &D) {
    let store = db.open().await;
    let fork = row("q", "fork");
    insert_new(&*store, std::slice::from_ref(&fork)).await;
    let a = sent("a", Way::Into(0));
    let joins = [join("joined", &["left"])];
    settle(&*store, &[forks(&fork, &[&a], &joins, vec![])]).await;
    assert_eq!(detail_of(&*store, &fork).await.tree, Some(fork.task.id));
    assert_eq!(counts(&*store, &fork).await, (OPEN, [2, 1, 0, 0, 0, 1]));
    let of_join = made(&settle(&*store, &[sends(&a, vec![own("left", "1")])]).await);
    settle(&*store, &[completed(&of_join[0].0, "w")]).await;
    assert_eq!(counts(&*store, &fork).await, (DONE, [3, 0, 0, 0, 0, 0]));

    // Without a fork nothing begins: an output on a way is an ordinary task.
    let plain = row("q", "plain");
    insert_new(&*store, std::slice::from_ref(&plain)).await;
    let out = sent("out", Way::Out(1));
    settle(
        &*store,
        &[forks(&plain, &[&out], &[], vec![own("left", "1")])],
    )
    .await;
    assert_eq!(detail_of(&*store, &plain).await.tree, None);
    assert_eq!(detail_of(&*store, &out).await.tree, None);
}

pub(crate) async fn two_settlers_end_a_subtree_once<D: Database>(db: &D) {
    let (store, other) = (db.open().await, db.open().await);
    for round in 0..8 {
        let first = root(&format!("fork {round}"), TreeSettings::default());
        insert_new(&*store, std::slice::from_ref(&first)).await;
        let [a, b] = ["a", "b"].map(|key| sent(&format!("{key} {round}"), Way::Into(0)));
        let joins = [join("joined", &["left"])];
        settle(&*store, &[forks(&first, &[&a, &b], &joins, vec![])]).await;
        let [one, two] = [&a, &b].map(|row| [sends(row, vec![own("left", "1")])]);
        let (one, two) = futures::join!(settle(&*store, &one), settle(&*other, &two));
        let of_join = [made(&one), made(&two)].concat();
        let [(_, payload)] = &of_join[..] else {
            panic!("round {round}: {of_join:?}");
        };
        assert_eq!(payload["parts"].as_array().unwrap().len(), 2);
        assert_eq!(counts(&*store, &first).await, (OPEN, [4, 1, 0, 0, 0, 0]));
    }
}

pub(crate) async fn a_wrong_subtree_is_found_and_corrected<D: Database>(db: &D) {
    let store = db.open().await;
    let [first, a, b] = forked(&*store, TreeSettings::default(), join("joined", &["left"])).await;
    settle(&*store, &[sends(&a, vec![own("left", "1")])]).await;
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
    // The subtree waits for tasks that are not there.
    db.execute("UPDATE subtrees SET open_tasks = 3, children = 1")
        .await;
    let wrong = store.wrong_trees(None, 10).await.unwrap().wrong;
    assert_eq!((wrong.len(), wrong[0].subtrees), (1, 1));
    store.correct_tree(first.task.id).await.unwrap();
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
    db.execute("UPDATE subtrees SET open_tasks = 3").await;
    settle(&*store, &[completed(&b, "w")]).await;
    assert_eq!(counts(&*store, &first).await, (DONE, [3, 0, 0, 0, 0, 0]));

    // One that is over, and whose tree waits for another task, goes to its join.
    let [first, a, b] = {
        let first = root("second", TreeSettings::default());
        insert_new(&*store, std::slice::from_ref(&first)).await;
        let [a, b] = ["c", "d"].map(|key| sent(key, Way::Into(0)));
        let stays = row("q", "stays");
        let joins = [join("joined", &["left"])];
        settle(&*store, &[forks(&first, &[&a, &b, &stays], &joins, vec![])]).await;
        [first, a, b]
    };
    db.execute("UPDATE subtrees SET open_tasks = 3").await;
    let reports = [sends(&a, vec![own("left", "1")]), completed(&b, "w")];
    assert_eq!(settle(&*store, &reports).await.released, []);
    let before = outbox(&*store).await.len();
    assert_eq!(
        store.wrong_trees(None, 10).await.unwrap().wrong[0].subtrees,
        1
    );
    store.correct_tree(first.task.id).await.unwrap();
    assert_eq!(outbox(&*store).await.len(), before + 1);
    assert_eq!(counts(&*store, &first).await, (OPEN, [5, 2, 0, 0, 0, 0]));
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
}

pub(crate) async fn the_task_of_a_join_ends_at_the_deadline_of_its_tree<D: Database>(db: &D) {
    let store = db.open().await;
    let settings = TreeSettings {
        deadline_unix_ms: NOW + 1_000,
        ..TreeSettings::default()
    };
    let [_, a, b] = forked(&*store, settings, join("joined", &["left"])).await;
    let reports = [sends(&a, vec![own("left", "1")]), completed(&b, "w")];
    let of_join = made(&settle(&*store, &reports).await);
    let [(joined, _)] = &of_join[..] else {
        panic!("{of_join:?}");
    };
    assert_eq!(joined.task.deadline_unix_ms, NOW + 1_000);
    // All others are over, so it is the one that the watchdog hears of.
    let due = store.due_deadlines(NOW + 1_000, NOW + 2_000, 10).await;
    assert_eq!(due.unwrap().overdue.len(), 1);
}

pub(crate) async fn a_part_counts_before_the_last_credit_of_its_task<D: Database>(db: &D) {
    let store = db.open().await;
    let first = root("fork", TreeSettings::default());
    insert_new(&*store, std::slice::from_ref(&first)).await;
    let a = fresh(TaskRow {
        replicas: 2,
        ..sent("a", Way::Into(0)).task
    });
    let join = join("joined", &["left"]);
    settle(&*store, &[forks(&first, &[&a], &[join], vec![])]).await;
    // It changes no status of a task of the tree.
    let one = settle(&*store, &[sends(&a, vec![own("left", "1")])]).await;
    assert_eq!(made(&one), []);
    let of_join = made(&settle(&*store, &[completed(&a, "v")]).await);
    let [(_, payload)] = &of_join[..] else {
        panic!("{of_join:?}");
    };
    assert_eq!(payload["parts"][0]["payload"], json!(1));
}

pub(crate) async fn joins_of_many_bytes_are_left_to_the_watchdog<D: Database>(db: &D) {
    const LARGE: usize = 9 << 20;
    let store = db.open().await;
    let large = format!("\"{}\"", "x".repeat(LARGE));
    let roots = ["1", "2"].map(|key| root(key, TreeSettings::default()));
    insert_new(&*store, &roots).await;
    let reports = roots.each_ref().map(|row| {
        let join = Join {
            max_bytes: 2 * LARGE,
            ..join("joined", &["fork"])
        };
        let parts = vec![part(Way::Into(0), "joined", "fork", &large)];
        forks(row, &[], &[join], parts)
    });
    let stored = settle(&*store, &reports).await;
    assert_eq!(made(&stored).len(), 1, "both are more than a page");
    let waiting = outbox(&*store).await;
    let joins: Vec<_> = waiting
        .iter()
        .filter(|row| row.task.queue == queue("joined"))
        .collect();
    assert_eq!(joins.len(), 2);
    assert!(joins.iter().all(|row| row.task.payload.len() > LARGE));
    for row in &roots {
        assert_eq!(counts(&*store, row).await, (OPEN, [2, 1, 0, 0, 0, 0]));
    }
    assert_eq!(store.wrong_trees(None, 10).await.unwrap().wrong, []);
}
