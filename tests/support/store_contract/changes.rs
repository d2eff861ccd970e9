//! Changes of live work: the wishes that SQL keeps, and their ends.

use taskd::{
    model::{Act, Change, ChangeKind, TaskAct},
    store::{ChangeEnd, Decided, EndedChange, KeptChange, KeptPages, Retried, Store, Wanted},
};

use super::*;

fn act(row: &NewRow) -> TaskAct {
    (row.task.id, Act::new("ops", "cancel task", &row.task.id.to_string()))
}

async fn want(store: &dyn Store, rows: &[&NewRow]) -> Vec<Wanted> {
    let ids: Vec<TaskId> = rows.iter().map(|row| row.task.id).collect();
    store.want(&ids, &Change::Cancel, NOW, &[]).await.unwrap()
}

fn kept_of(wanted: &Wanted) -> KeptChange {
    match wanted {
        Wanted::Kept(kept) => kept.clone(),
        other => panic!("{other:?}"),
    }
}

fn pages(after: Option<(i64, TaskId)>, limit: u32) -> KeptPages {
    KeptPages { kind: ChangeKind::Cancel, upto_unix_ms: i64::MAX, after, limit }
}

async fn kept(store: &dyn Store) -> Vec<TaskId> {
    store.kept_changes(&pages(None, 100)).await.unwrap().changes.into_iter().map(|kept| kept.task.id).collect()
}

fn cancelled(kept: &KeptChange, generation: u64) -> EndedChange {
    let end = Decided::Cancelled { epoch: kept.task.epoch, generation };
    EndedChange { id: kept.task.id, turn: Some(kept.turn), end }
}

fn shard_of(row: &NewRow) -> ShardId {
    ShardId { queue: row.task.queue.clone(), number: row.task.partition }
}

fn ended(row: &NewRow, status: StoredStatus) -> ChangeEnd {
    let is_freed = matches!(status, Dead | StoredStatus::Cancelled);
    ChangeEnd { status: Some(status), key: is_freed.then(|| (row.task.queue.clone(), row.task.key_hash)) }
}

pub(crate) async fn a_wish_is_kept_until_its_task_is_cancelled<D: Database>(db: &D) {
    let store = db.open().await;
    let (fresh, parked, done) =
        (row("q", "fresh"), NewRow { unpublished: Parked, ..row("q", "parked") }, row("q", "done"));
    insert_new(&*store, &[fresh.clone(), parked.clone(), done.clone()]).await;
    store.open_shards(&[shard_of(&fresh), shard_of(&parked)]).await.unwrap();
    store.settle(&[completed(&done, "w")]).await.unwrap();
    let ids = [fresh.task.id, done.task.id, TaskId::new(), parked.task.id, fresh.task.id];
    let acts = [act(&fresh), act(&done), act(&parked)];
    let wanted = store.want(&ids, &Change::Cancel, NOW, &acts).await.unwrap();
    assert_eq!((&wanted[1], &wanted[2]), (&Wanted::Final(Completed), &Wanted::Unknown));
    assert_eq!(wanted[0], wanted[4]);
    let wishes = [kept_of(&wanted[0]), kept_of(&wanted[3])];
    let task = &wishes[0].task;
    assert_eq!((task.id, &task.shard, task.replicas, task.epoch), (fresh.task.id, &shard_of(&fresh), 1, 0));
    assert_eq!(wishes[0].kind, ChangeKind::Cancel);
    // Only what may change something is an act.
    let targets: HashSet<String> = store.acts(None, 10).await.unwrap().into_iter().map(|act| act.target).collect();
    assert_eq!(targets, [&fresh, &parked].map(|row| row.task.id.to_string()).into());
    let page = store.kept_changes(&pages(None, 100)).await.unwrap();
    let mut found = page.changes.clone();
    found.sort_by_key(|kept| kept.task.id);
    let mut expected = wishes.to_vec();
    expected.sort_by_key(|kept| kept.task.id);
    assert_eq!((found, page.next), (expected, None));

    let ends = wishes.each_ref().map(|kept| cancelled(kept, 1));
    let ends_of = |row: &NewRow| ended(row, StoredStatus::Cancelled);
    assert_eq!(store.end_changes(&ends, NOW + 9).await.unwrap(), [ends_of(&fresh), ends_of(&parked)]);
    assert_eq!(kept(&*store).await, []);
    let detail = detail_of(&*store, &parked).await;
    assert_eq!((detail.status, detail.unpublished, detail.updated_unix_ms), (StoredStatus::Cancelled, false, NOW + 9));
    assert_eq!(counts(&*store).await, [count("q", Completed, 1), count("q", StoredStatus::Cancelled, 2)],);
    assert_eq!(store.parked_queues().await.unwrap(), []);
    // A second time it changes nothing, and neither does a completion that comes late.
    assert_eq!(store.end_changes(&ends, NOW + 10).await.unwrap(), [ends_of(&fresh), ends_of(&parked)]);
    let late = store.settle(&[completed(&fresh, "w")]).await.unwrap().answers;
    assert_eq!((late[0].surplus, late[0].status), (true, Some(StoredStatus::Cancelled)));
    assert_eq!(want(&*store, &[&fresh]).await, [Wanted::Final(StoredStatus::Cancelled)]);
    let again = store.insert(&[row("q", "fresh")]).await.unwrap().answers;
    assert_eq!(again, [Duplicate { id: fresh.task.id, status: StoredStatus::Cancelled }]);
}

pub(crate) async fn a_decision_counts_in_its_epoch_and_generation_only<D: Database>(db: &D) {
    let store = db.open().await;
    let task = row("q", "k");
    insert_new(&*store, std::slice::from_ref(&task)).await;
    store.open_shards(&[shard_of(&task)]).await.unwrap();
    let wish = kept_of(&want(&*store, &[&task]).await[0]);
    // Redis lost the shard behind the script.
    assert_eq!(store.begin_rebuild(&[(shard_of(&task), 1)]).await.unwrap(), [2]);
    let unfinished = [ended(&task, Unfinished)];
    assert_eq!(store.end_changes(&[cancelled(&wish, 1)], NOW).await.unwrap(), unfinished);
    assert_eq!(kept(&*store).await, [task.task.id]);
    assert_eq!(store.end_changes(&[cancelled(&wish, 2)], NOW).await.unwrap(), [ended(&task, StoredStatus::Cancelled)]);

    // A cancelled task that is sent again is in its next epoch, and no wish is left of the one before.
    let retried = store.retry(&[task.task.id], NOW).await.unwrap();
    assert_eq!(retried, [Retried { id: task.task.id, status: Unfinished }]);
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 1)]);
    assert_eq!(store.end_changes(&[cancelled(&wish, 2)], NOW).await.unwrap(), unfinished);
    let wish = kept_of(&want(&*store, &[&task]).await[0]);
    assert_eq!(wish.task.epoch, 1);
    assert_eq!(store.end_changes(&[cancelled(&wish, 2)], NOW).await.unwrap(), [ended(&task, StoredStatus::Cancelled)]);
}

pub(crate) async fn a_later_wish_stays_when_the_earlier_one_ends<D: Database>(db: &D) {
    let store = db.open().await;
    let tasks = [row("q", "a"), row("q", "b"), row("q", "c")];
    insert_new(&*store, &tasks).await;
    let first = kept_of(&want(&*store, &[&tasks[0]]).await[0]);
    let second = kept_of(&want(&*store, &[&tasks[0]]).await[0]);
    assert_ne!(first.turn, second.turn);
    let over = |kept: &KeptChange| EndedChange { id: kept.task.id, turn: Some(kept.turn), end: Decided::Over };
    assert_eq!(store.end_changes(&[over(&first)], NOW).await.unwrap(), [ended(&tasks[0], Unfinished)]);
    assert_eq!(kept(&*store).await, [tasks[0].task.id]);
    store.end_changes(&[over(&second)], NOW).await.unwrap();
    assert_eq!(kept(&*store).await, []);

    // Pages end where they should, and wishes about what is final go.
    want(&*store, &[&tasks[0], &tasks[1], &tasks[2]]).await;
    let (mut after, mut found) = (None, Vec::new());
    loop {
        let page = store.kept_changes(&pages(after, 2)).await.unwrap();
        found.extend(page.changes.into_iter().map(|kept| kept.task.id));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    let mut all = tasks.each_ref().map(|row| row.task.id);
    all.sort_unstable();
    assert_eq!(found, all);
    store.settle(&[completed(&tasks[0], "w")]).await.unwrap();
    store.settle(&[died(&tasks[1])]).await.unwrap();
    assert_eq!(kept(&*store).await, [tasks[2].task.id]);
    assert_eq!(db.number("SELECT COUNT(*) FROM changes").await, 1);
}
