//! Tests of the idempotency keys of inserts.

use taskd::model::Idempotency;

use super::*;

const WINDOW: i64 = 1_000;

/// A task with an idempotency key.
fn with(idempotency_key: &str, key: &str) -> NewRow {
    at(NOW, idempotency_key, key)
}

fn at(now: i64, idempotency_key: &str, key: &str) -> NewRow {
    let task = task("q", key);
    let hash = KeyHash::new(&task.queue, idempotency_key.as_bytes()).0;
    let idempotency = Idempotency {
        hash,
        fingerprint: task.key_hash.0,
        expires_unix_ms: now + WINDOW,
    };
    fresh(TaskRow {
        created_unix_ms: now,
        idempotency: Some(Box::new(idempotency)),
        ..task
    })
}

async fn insert(store: &Arc<dyn Store>, rows: &[NewRow]) -> Vec<Inserted> {
    store.insert(rows).await.unwrap().answers
}

fn again(row: &NewRow) -> Inserted {
    Inserted::Repeated { id: row.task.id }
}

fn duplicate(row: &NewRow) -> Inserted {
    Duplicate {
        id: row.task.id,
        status: Unfinished,
    }
}

pub(crate) async fn an_insert_with_an_idempotency_key_is_answered_again<D: Database>(db: &D) {
    let store = db.open().await;
    let first = with("i", "k");
    assert_eq!(insert(&store, std::slice::from_ref(&first)).await, [New]);
    // A retry through another process, with a new id, because the caller got no answer.
    let other = db.open().await;
    assert_eq!(insert(&other, &[with("i", "k")]).await, [again(&first)]);
    // The same call is repeated because its COMMIT was not answered.
    assert_eq!(insert(&store, std::slice::from_ref(&first)).await, [New]);
    // Without its idempotency key the task is a duplicate, and so is the same task with a different
    // idempotency key, every time.
    assert_eq!(insert(&store, &[row("q", "k")]).await, [duplicate(&first)]);
    for _ in 0..2 {
        assert_eq!(insert(&store, &[with("j", "k")]).await, [duplicate(&first)]);
    }
    // Within one call, the first task with an idempotency key wins.
    let rows = [
        with("l", "l"),
        with("l", "l"),
        row("q", "l"),
        row("q", "m"),
        with("m", "m"),
        with("m", "m"),
    ];
    let expected = [
        New,
        again(&rows[0]),
        duplicate(&rows[0]),
        New,
        duplicate(&rows[3]),
        duplicate(&rows[3]),
    ];
    assert_eq!(insert(&store, &rows).await, expected);
    assert_eq!(store.unfinished().await.unwrap(), [(queue("q"), 3)]);
    assert_eq!(db.number("SELECT COUNT(*) FROM tasks").await, 3);
    // The answer is kept when the task is completed and removed.
    store.settle(&[completed(&first, "w")]).await.unwrap();
    assert_eq!(insert(&store, &[with("i", "k")]).await, [again(&first)]);
    db.execute("UPDATE tasks SET updated_ms = 1 WHERE status <> 0")
        .await;
    assert_eq!(
        store
            .remove_finished(std::time::Duration::from_secs(60), 10)
            .await
            .unwrap(),
        1
    );
    assert_eq!(insert(&store, &[with("i", "k")]).await, [again(&first)]);
}

pub(crate) async fn an_idempotency_key_is_for_one_task<D: Database>(db: &D) {
    let store = db.open().await;
    let first = with("i", "k");
    assert_eq!(insert(&store, std::slice::from_ref(&first)).await, [New]);
    assert_eq!(
        insert(&store, &[with("i", "other")]).await,
        [Inserted::KeyReused]
    );
    // Also if the first one was a duplicate, and within one call.
    assert_eq!(insert(&store, &[with("j", "k")]).await, [duplicate(&first)]);
    assert_eq!(
        insert(&store, &[with("j", "other")]).await,
        [Inserted::KeyReused]
    );
    let rows = [
        with("l", "l"),
        with("l", "other"),
        with("l", "l"),
        with("i", "k"),
        with("i", "other"),
    ];
    let expected = [
        New,
        Inserted::KeyReused,
        again(&rows[0]),
        again(&first),
        Inserted::KeyReused,
    ];
    assert_eq!(insert(&store, &rows).await, expected);
    // The refused task is new with an idempotency key of its own; and in another queue, the same
    // idempotency key is independent.
    assert_eq!(insert(&store, &[with("other", "other")]).await, [New]);
    let mut elsewhere = with("i", "k");
    elsewhere.task.queue = queue("r");
    elsewhere.task.key_hash = KeyHash::new(&queue("r"), b"k");
    elsewhere.task.idempotency.as_mut().unwrap().hash = KeyHash::new(&queue("r"), b"i").0;
    assert_eq!(insert(&store, &[elsewhere]).await, [New]);
}

pub(crate) async fn an_idempotency_key_is_free_after_its_window<D: Database>(db: &D) {
    let store = db.open().await;
    let first = with("i", "k");
    let rows: Vec<NewRow> = (0..9)
        .map(|n| at(NOW + n, &format!("i{n}"), &format!("k{n}")))
        .collect();
    assert_eq!(insert(&store, std::slice::from_ref(&first)).await, [New]);
    assert_eq!(insert(&store, &rows).await, [New; 9]);
    assert_eq!(
        insert(&store, &[at(NOW + WINDOW - 1, "i", "k")]).await,
        [again(&first)]
    );
    // The window began with the first insert. The row still exists, and another task reuses it.
    let second = at(NOW + WINDOW, "i", "other");
    assert_eq!(insert(&store, std::slice::from_ref(&second)).await, [New]);
    assert_eq!(
        insert(&store, &[at(NOW + WINDOW, "i", "other")]).await,
        [again(&second)]
    );
    assert_eq!(
        insert(&store, &[at(NOW + WINDOW, "i", "k")]).await,
        [Inserted::KeyReused]
    );

    let count = "SELECT COUNT(*) FROM idempotency_keys";
    assert_eq!(
        store
            .remove_expired_keys(NOW + WINDOW - 1, 100)
            .await
            .unwrap(),
        0
    );
    assert_eq!(
        store
            .remove_expired_keys(NOW + WINDOW + 6, 5)
            .await
            .unwrap(),
        5
    );
    assert_eq!(db.number(count).await, 5);
    assert_eq!(
        store
            .remove_expired_keys(NOW + WINDOW + 6, 5)
            .await
            .unwrap(),
        2
    );
    assert_eq!(db.number(count).await, 3);
    assert_eq!(
        insert(&store, &[at(NOW + WINDOW, "i", "other")]).await,
        [again(&second)]
    );
    assert_eq!(
        insert(&store, &[at(NOW + WINDOW, "i8", "k8")]).await,
        [again(&rows[8])]
    );
    // The window is over, so the key of the task decides again.
    assert_eq!(
        insert(&store, &[at(NOW + WINDOW, "i0", "k0")]).await,
        [duplicate(&rows[0])]
    );
    assert_eq!(
        insert(&store, &[at(NOW + WINDOW, "i1", "new")]).await,
        [New]
    );
}

pub(crate) async fn of_concurrent_inserts_one_takes_an_idempotency_key<D: Database>(db: &D) {
    const KEYS: usize = 30;
    let stores = [db.open().await, db.open().await];
    // Every writer inserts its own tasks with the same idempotency keys, each in another order.
    let writer = |n: usize| {
        let store = Arc::clone(&stores[n % 2]);
        tokio::spawn(async move {
            let mut answers = Vec::new();
            let numbers: Vec<usize> = (0..KEYS)
                .map(|i| (i * (2 * n + 1) + 7 * n) % KEYS)
                .collect();
            for numbers in numbers.chunks(10) {
                let key = |number: &usize| {
                    with(&format!("i{number}"), &format!("k{number} of {}", n / 2))
                };
                let batch: Vec<NewRow> = numbers.iter().map(key).collect();
                let inserted = insert(&store, &batch).await;
                answers.extend(numbers.iter().copied().zip(batch).zip(inserted));
            }
            answers
        })
    };
    let answers = join_all([0, 3, 5, 6, 8, 9, 11, 14].map(writer))
        .await
        .into_iter()
        .flat_map(Result::unwrap);
    let (mut new, mut others) = (BTreeMap::new(), Vec::new());
    for ((number, row), answer) in answers {
        match answer {
            New => assert!(
                new.insert(number, row.task).is_none(),
                "{number} is new twice"
            ),
            answer => others.push((number, row.task, answer)),
        }
    }
    assert_eq!(new.len(), KEYS);
    for (number, task, answer) in others {
        let first = &new[&number];
        let same = Inserted::Repeated { id: first.id };
        assert_eq!(
            answer,
            if task.key == first.key {
                same
            } else {
                Inserted::KeyReused
            },
            "{number}"
        );
    }
    assert_eq!(db.number("SELECT COUNT(*) FROM tasks").await, KEYS as i64);
}
