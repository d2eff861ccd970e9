//! Tests every promise of `Store` (`src/store`). `store_contract!(SomeDatabase)` runs the tests on
//! a backend.

use std::{
    collections::{BTreeMap, HashSet},
    future::Future,
    sync::Arc,
};

use bytes::Bytes;
use futures::future::join_all;
use taskd::{
    model::{
        Encoding, KeyHash, LeaseNumber, LimitHash, Offset, Priority, QueueName, ShardId,
        StoredStatus, TaskId, TaskResult, TaskRow, WorkerName, limit_hash,
    },
    store::{
        self, Inserted, NewRow, OutboxRow, PAGE_BYTES, Place, Published, PublishedTask, QueueCount,
        Settled, SettledTask, Settlement, Store, Stretch, TaskDetail, TaskState, Turn, Unpublished,
        Walked,
    },
};

mod access;
mod batches;
mod books;
mod bulk;
mod changes;
mod check;
mod deadlines;
mod events;
mod executions;
mod history;
mod idempotency;
mod keyless;
mod letters;
mod limits;
mod pauses;
mod queues;
mod rebuild;
mod retention;
mod search;
mod sequences;
mod subscriptions;
mod subtrees;
mod topics;
mod topologies;
mod trees;

pub(crate) use access::*;
pub(crate) use batches::*;
pub(crate) use books::*;
pub(crate) use bulk::*;
pub(crate) use changes::*;
pub(crate) use check::*;
pub(crate) use deadlines::*;
pub(crate) use events::*;
pub(crate) use executions::*;
pub(crate) use history::*;
pub(crate) use idempotency::*;
pub(crate) use keyless::*;
pub(crate) use letters::*;
pub(crate) use limits::*;
pub(crate) use pauses::*;
pub(crate) use queues::*;
pub(crate) use rebuild::*;
pub(crate) use retention::*;
pub(crate) use search::*;
pub(crate) use sequences::*;
pub(crate) use subscriptions::*;
pub(crate) use subtrees::*;
pub(crate) use topics::*;
pub(crate) use topologies::*;
pub(crate) use trees::*;

use Inserted::{Duplicate, New};
use StoredStatus::{Completed, Dead, Unfinished};
use Unpublished::{Crowded, Fresh, Missing, Parked, Scheduled};

/// A database for one test.
pub(crate) trait Database: Sized {
    fn create() -> impl Future<Output = Self>;
    /// Opens the database, as a new process would.
    fn try_open(&self) -> impl Future<Output = store::Result<Arc<dyn Store>>>;
    async fn open(&self) -> Arc<dyn Store> {
        self.try_open().await.unwrap()
    }
    /// Executes SQL directly, bypassing the store.
    fn execute(&self, sql: &str) -> impl Future<Output = ()>;
    /// The single number that `sql` returns.
    fn number(&self, sql: &str) -> impl Future<Output = i64>;
    /// Removes the database. Only called after a test has passed; otherwise the database is kept
    /// for inspection.
    fn remove(self) -> impl Future<Output = ()>;
}

macro_rules! store_contract {
    ($database:ty) => {
        store_contract!($database:
            a_task_comes_back_as_it_was_stored,
            a_key_is_new_once,
            keys_and_queues_are_compared_bytewise,
            a_repeated_insert_changes_nothing,
            a_task_without_a_key_is_stored_once,
            a_task_without_a_key_ends_like_any_other,
            answers_come_in_the_order_of_the_rows,
            large_rows_fit,
            what_payloads_and_results_are_is_remembered,
            a_report_is_settled_once,
            num_workers_complete_a_task_and_the_rest_is_surplus,
            the_first_final_status_stays,
            workers_are_compared_bytewise,
            discoveries_are_stored_with_their_report,
            the_first_report_to_discover_a_key_wins,
            an_unknown_task_changes_nothing,
            many_reports_are_settled_at_once,
            tasks_of_a_sequence_leave_sql_one_after_the_other,
            a_death_lets_the_next_one_go_or_holds_it,
            a_task_that_dies_while_it_waits_holds_at_its_place,
            a_task_sent_again_waits_at_its_old_place,
            tasks_that_end_while_they_wait_leave_their_sequence,
            a_sequence_goes_on_through_discoveries_and_higher_num,
            the_next_of_a_sequence_waits_for_its_own_time,
            what_is_released_beyond_a_page_is_due_at_once,
            late_calls_do_not_let_a_waiting_task_overtake,
            of_concurrent_settlements_each_releases_its_own_sequences,
            a_broken_sequence_is_found_and_mended,
            what_is_final_leaves_the_outbox,
            a_published_task_leaves_the_outbox_and_its_place_is_kept,
            a_place_never_moves_backwards,
            an_unpublished_task_is_back_in_the_outbox,
            a_late_mark_leaves_a_task_that_came_back,
            due_rows_come_earliest_first,
            parked_rows_come_by_priority_then_age,
            crowded_rows_come_by_limit_key_then_priority_then_age,
            final_rows_met_in_the_outbox_are_removed,
            a_page_of_the_outbox_has_bounded_weight,
            a_page_leaves_out_what_it_is_told_to,
            a_batch_is_marked_as_a_whole,
            each_partition_of_a_batch_has_its_place,
            what_is_left_of_a_batch_stays_due,
            what_is_put_off_is_due_later,
            a_late_mark_of_a_batch_leaves_a_task_that_came_back,
            of_two_publishers_of_a_batch_the_later_place_holds,
            many_small_batches_come_in_one_page,
            batches_that_no_task_needs_are_removed,
            batches_agree_with_a_row_for_each_task,
            a_dead_task_has_its_letter_until_it_is_sent_again,
            a_task_that_is_sent_again_before_its_time_waits_for_it,
            a_death_of_an_earlier_epoch_ends_nothing,
            completions_behind_the_death_count_when_a_task_is_sent_again,
            a_wish_is_kept_until_its_task_is_cancelled,
            a_decision_counts_in_its_epoch_and_generation_only,
            a_later_wish_stays_when_the_earlier_one_ends,
            of_two_changes_at_once_the_queue_gets_the_later,
            of_two_reservations_the_earlier_end_stays_until_the_queue_names_one,
            credits_on_their_way_count_once_when_a_task_is_reopened,
            a_deadline_comes_until_its_task_is_final,
            a_deadline_that_cannot_be_read_holds_up_no_other,
            a_deadline_ends_with_the_first_life_of_its_task,
            new_values_are_stored_with_their_wish,
            a_higher_num_reopens_a_completed_task,
            a_completion_before_a_higher_num_reopens_once_sql_has_it,
            a_task_that_a_lower_num_completes_behind_a_higher_one_is_off_the_bus,
            letters_are_kept_once_and_listed_by_every_filter,
            letters_are_paged_and_purged_and_removed_by_age,
            an_attempt_is_kept_once_and_told_in_its_order,
            a_task_keeps_its_last_failures_and_takes_them_with_it,
            old_failures_are_removed_in_slices,
            acts_are_found_by_their_target,
            a_change_has_one_event_and_a_call_that_changes_nothing_has_none,
            what_operators_do_has_events_too,
            events_stay_until_they_are_removed_in_the_order_of_their_tasks,
            what_was_counted_is_found_again_and_nothing_else,
            a_bulk_change_goes_on_where_it_stands,
            bulk_changes_are_bounded_and_those_of_a_later_taskd_are_left_to_it,
            each_task_that_is_sent_again_has_its_act,
            tasks_are_listed_by_every_filter,
            a_page_that_stays_in_its_queue_tells_nothing_of_others,
            a_page_ends_when_it_has_looked_at_enough,
            what_finished_long_ago_is_removed_and_stays_a_duplicate,
            the_earliest_finished_are_removed_first,
            the_completed_tasks_of_one_queue_are_removed_page_by_page,
            a_report_of_a_removed_task_changes_nothing,
            a_repeated_insert_of_a_removed_task_is_no_duplicate_of_itself,
            discoveries_of_removed_keys_are_duplicates,
            many_old_keys_among_new_ones_are_told_apart,
            no_key_is_new_again_while_its_task_is_removed,
            published_tasks_are_paged_by_id,
            states_name_the_credited_workers,
            what_is_not_there_is_not_found,
            an_unfinished_task_has_a_place,
            the_generation_of_a_lost_shard_is_raised_once,
            shards_are_rebuilt_page_by_page,
            walks_go_by_queue_and_id_through_all_shards,
            a_walk_comes_to_more_queues_than_a_page,
            a_page_of_a_rebuild_has_bounded_weight,
            the_tasks_of_a_rebuilt_shard_have_one_place,
            many_shards_are_rebuilt_at_once,
            shards_open_all_at_once_and_close_one_by_one,
            changes_of_shards_are_read_once_and_none_is_missed,
            only_queues_with_unfinished_tasks_are_counted,
            what_waits_off_the_bus_is_counted,
            what_is_turned_away_adds_up,
            a_wrong_count_is_found_and_corrected,
            a_stranded_task_is_found,
            published_tasks_are_found_by_id,
            queues_are_paused_and_resumed_with_their_acts,
            own_limits_are_set_and_cleared_with_their_acts,
            holds_are_kept_until_they_are_over,
            topics_are_kept_changed_and_deleted_with_their_acts,
            topologies_are_kept_by_version_with_their_acts,
            subscriptions_are_kept_with_their_positions,
            a_position_moves_only_from_where_it_was_read,
            positions_leave_with_their_topic,
            thousands_of_positions_are_added_and_sent_back,
            a_tree_begins_with_its_root_and_ends_with_its_last_task,
            a_repeated_or_surplus_report_adds_nothing_to_a_tree,
            every_way_to_end_a_task_ends_its_tree,
            dead_tasks_count_or_are_ignored_or_hold,
            a_task_that_is_sent_again_opens_the_next_epoch,
            letters_count_in_their_tree,
            the_deadline_of_a_tree_is_that_of_its_tasks,
            nothing_is_added_to_a_cancelled_tree,
            trees_are_listed_and_their_tasks_counted,
            ended_trees_are_removed_after_their_tasks,
            a_root_without_a_key_comes_again_after_its_removal,
            a_wrong_tree_is_found_and_corrected,
            the_end_of_a_tree_is_an_event_of_its_root,
            the_end_of_a_tree_is_an_ack_for_its_feed,
            a_feed_is_stored_with_each_source,
            two_settlers_end_a_tree_once,
            a_join_gets_one_task_when_its_subtree_is_over,
            a_subtree_without_parts_makes_no_task,
            a_join_waits_for_the_joins_within_it,
            a_dead_task_ends_or_holds_its_subtree,
            a_join_that_is_too_large_becomes_a_letter,
            a_cancelled_tree_joins_nothing,
            a_fork_outside_of_trees_becomes_a_root,
            two_settlers_end_a_subtree_once,
            a_wrong_subtree_is_found_and_corrected,
            the_task_of_a_join_ends_at_the_deadline_of_its_tree,
            a_part_counts_before_the_last_credit_of_its_task,
            joins_of_many_bytes_are_left_to_the_watchdog,
            a_definition_never_changes,
            a_definition_stays_while_executions_run,
            an_execution_starts_once_for_a_given_id,
            of_concurrent_starts_one_gets_the_id,
            an_append_is_stored_as_a_whole_or_not_at_all,
            many_executions_append_at_once,
            of_two_that_step_an_execution_one_appends,
            every_end_of_a_step_comes_to_its_execution_once,
            a_step_stays_until_its_end_is_consumed,
            a_step_is_cancelled_with_its_append,
            a_timer_is_due_until_an_append_disarms_it,
            an_inbox_is_read_in_pages_until_it_is_consumed,
            an_ended_execution_takes_nothing_more,
            executions_are_listed_newest_first,
            a_log_is_read_in_bounded_pages,
            a_removed_execution_leaves_nothing,
            tokens_come_and_go_with_their_acts,
            old_acts_go_a_few_at_a_time,
            of_concurrent_tokens_one_gets_the_name,
            rows_and_owners_are_found_by_ids_and_keys,
            the_oldest_that_waits_in_sql_is_told,
            rows_of_a_time_that_the_clock_left_again_are_due,
            everything_is_there_after_a_restart,
            one_of_two_replaces_the_holder,
            a_newer_schema_is_used_where_it_allows_it,
            of_concurrent_inserts_one_wins_each_key,
            an_insert_with_an_idempotency_key_is_answered_again,
            an_idempotency_key_is_for_one_task,
            an_idempotency_key_is_free_after_its_window,
            of_concurrent_inserts_one_takes_an_idempotency_key,
            of_concurrent_settlements_one_credits_each_worker,
        );
    };
    ($database:ty: $($test:ident,)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                use $crate::support::store_contract::{self, Database};
                let database = <$database>::create().await;
                store_contract::$test(&database).await;
                database.remove().await;
            }
        )*
    };
}

const NOW: i64 = 1_700_000_000_000;

fn queue(name: &str) -> QueueName {
    QueueName::new(name).unwrap()
}

fn task(queue_name: &str, key: impl AsRef<[u8]>) -> TaskRow {
    let (queue, key) = (queue(queue_name), Bytes::copy_from_slice(key.as_ref()));
    let key_hash = KeyHash::new(&queue, &key);
    TaskRow {
        id: TaskId::new(),
        partition: key_hash.partition(4),
        queue,
        key,
        key_hash,
        payload: "payload".into(),
        payload_encoding: Encoding::Text,
        replicas: 1,
        priority: Priority::Medium,
        max_attempts: 5,
        lease_ms: 30_000,
        not_before_unix_ms: 0,
        headers: vec![],
        traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into(),
        created_unix_ms: NOW,
        backoff: None,
        deadline_unix_ms: 0,
        limit_key: String::new(),
        sequence: None,
        idempotency: None,
        tree: None,
        execution: None,
    }
}

fn fresh(task: TaskRow) -> NewRow {
    NewRow {
        task,
        unpublished: Fresh,
        due_unix_ms: NOW + 5_000,
    }
}

pub(crate) fn row(queue: &str, key: impl AsRef<[u8]>) -> NewRow {
    fresh(task(queue, key))
}

fn replicated(key: &str, replicas: u32) -> NewRow {
    fresh(TaskRow {
        replicas,
        ..task("q", key)
    })
}

/// Makes rows of one queue.
pub(crate) fn rows(queue: &str, count: usize) -> Vec<NewRow> {
    (0..count).map(|i| row(queue, format!("key {i}"))).collect()
}

fn ids(rows: &[NewRow]) -> Vec<TaskId> {
    rows.iter().map(|row| row.task.id).collect()
}

pub(crate) fn completed(row: &NewRow, worker: &str) -> Settlement {
    discovering(row, worker, vec![])
}

pub(crate) fn discovering(row: &NewRow, worker: &str, discovered: Vec<NewRow>) -> Settlement {
    Settlement::Completed {
        id: row.task.id,
        worker: worker.into(),
        lease: lease_of(worker),
        result: format!("of {worker}").into(),
        encoding: row.task.payload_encoding,
        attempt: 2,
        leased_unix_ms: 0,
        at_unix_ms: NOW + 10,
        discovered,
        joining: None,
    }
}

fn lease_of(worker: &str) -> LeaseNumber {
    LeaseNumber {
        generation: i64::MAX as u64,
        grant: worker.len() as u64,
    }
}

pub(crate) fn died(row: &NewRow) -> Settlement {
    Settlement::Died {
        id: row.task.id,
        reason: "no luck".into(),
        attempts: 5,
        history: vec![],
        epoch: None,
        at_unix_ms: NOW + 20,
    }
}

fn settled(status: StoredStatus) -> Settled {
    let task = SettledTask {
        queue: queue("q"),
        priority: Priority::Medium,
        is_step: false,
    };
    Settled {
        status: Some(status),
        task: Some(task),
        ..Settled::default()
    }
}

/// The expected answer to a report about a dead task.
fn settled_dead(row: &NewRow) -> Settled {
    Settled {
        key: Some((row.task.queue.clone(), row.task.key_hash)),
        ..settled(Dead)
    }
}

fn result_of(worker: &str, surplus: bool) -> TaskResult {
    let (worker, result, encoding) = (
        worker.to_owned(),
        format!("of {worker}").into(),
        Encoding::Text,
    );
    TaskResult {
        worker,
        result,
        encoding,
        attempt: 2,
        completed_unix_ms: NOW + 10,
        surplus,
    }
}

/// The expected details of a task to which nothing has happened yet.
pub(crate) fn detail(row: &NewRow) -> TaskDetail {
    TaskDetail {
        task: row.task.clone(),
        status: Unfinished,
        completed: 0,
        attempts: 0,
        reason: String::new(),
        epoch: 0,
        updated_unix_ms: NOW,
        unpublished: true,
        tree: None,
    }
}

pub(crate) fn detail_completed(row: &NewRow) -> TaskDetail {
    TaskDetail {
        status: Completed,
        completed: row.task.replicas,
        attempts: 1,
        updated_unix_ms: NOW + 10,
        unpublished: false,
        ..detail(row)
    }
}

fn detail_dead(row: &NewRow) -> TaskDetail {
    TaskDetail {
        status: Dead,
        attempts: 5,
        reason: "no luck".into(),
        updated_unix_ms: NOW + 20,
        unpublished: false,
        ..detail(row)
    }
}

/// The expected outbox row, without its turn: see [`without_turns`].
fn in_outbox(row: &NewRow, unpublished: Unpublished) -> OutboxRow {
    OutboxRow {
        task: row.task.clone(),
        is_as_new: true,
        unpublished,
        turn: Turn::FIRST,
    }
}

fn without_turns(mut rows: Vec<OutboxRow>) -> Vec<OutboxRow> {
    rows.iter_mut().for_each(|row| row.turn = Turn::FIRST);
    rows
}

async fn due_rows(store: &dyn Store, now_unix_ms: i64, limit: usize) -> Vec<OutboxRow> {
    without_turns(
        store
            .due(now_unix_ms, limit, &HashSet::new())
            .await
            .unwrap(),
    )
}

async fn parked_rows(store: &dyn Store, name: &str, limit: usize) -> Vec<OutboxRow> {
    without_turns(
        store
            .parked(&queue(name), limit, &HashSet::new())
            .await
            .unwrap(),
    )
}

pub(crate) fn count(queue_name: &str, status: StoredStatus, count: u64) -> QueueCount {
    QueueCount {
        queue: queue(queue_name),
        status,
        count,
    }
}

pub(crate) async fn counts(store: &dyn Store) -> Vec<QueueCount> {
    let mut counts = store.counts(None).await.unwrap();
    counts.retain(|count| count.count > 0);
    counts.sort_by_key(|count| (count.queue.clone(), count.status));
    counts
}

/// The open shards, with their generations.
async fn open_shards(store: &dyn Store) -> Vec<(ShardId, u64)> {
    store
        .shards(None)
        .await
        .unwrap()
        .into_iter()
        .map(|shard| (shard.id, shard.generation))
        .collect()
}

pub(crate) async fn insert_new(store: &dyn Store, rows: &[NewRow]) {
    assert_eq!(
        store.insert(rows).await.unwrap().answers,
        vec![New; rows.len()]
    );
}

pub(crate) async fn detail_of(store: &dyn Store, row: &NewRow) -> TaskDetail {
    store.task(row.task.id).await.unwrap().unwrap()
}

/// The whole outbox, whenever its rows are due.
async fn outbox(store: &dyn Store) -> Vec<OutboxRow> {
    due_rows(store, i64::MAX, 10_000).await
}

fn at(major: u64, minor: u64) -> Offset {
    Offset { major, minor }
}

/// Marks tasks as published, in the turns that they have in the outbox.
async fn publish(store: &dyn Store, rows: &[NewRow], offset: Offset) {
    let mut stored = store.due(i64::MAX, 10_000, &HashSet::new()).await.unwrap();
    for queue in store.parked_queues().await.unwrap() {
        stored.extend(store.parked(&queue, 10_000, &HashSet::new()).await.unwrap());
    }
    let turn = |id| {
        stored
            .iter()
            .find(|row| row.task.id == id)
            .map_or(Turn::FIRST, |row| row.turn)
    };
    let mut partitions: BTreeMap<u32, Published> = BTreeMap::new();
    for TaskRow { id, partition, .. } in rows.iter().map(|row| &row.task) {
        let published = Published {
            partition: *partition,
            offset,
            tasks: Vec::new(),
        };
        partitions
            .entry(*partition)
            .or_insert(published)
            .tasks
            .push((*id, turn(*id)));
    }
    store
        .mark_published("g", &partitions.into_values().collect::<Vec<_>>())
        .await
        .unwrap();
}

async fn mark(store: &dyn Store, tasks: Vec<(TaskId, Turn)>, offset: Offset) {
    store
        .mark_published(
            "g",
            &[Published {
                partition: 0,
                offset,
                tasks,
            }],
        )
        .await
        .unwrap();
}

fn first_turn(ids: &[TaskId]) -> Vec<(TaskId, Turn)> {
    ids.iter().map(|id| (*id, Turn::FIRST)).collect()
}

fn published_at(row: &NewRow, offset: Option<Offset>) -> PublishedTask {
    let shard = ShardId {
        queue: row.task.queue.clone(),
        number: row.task.partition,
    };
    PublishedTask {
        id: row.task.id,
        shard,
        offset,
    }
}

fn walked_to(task: &PublishedTask) -> Walked {
    Walked {
        queue: task.shard.queue.clone(),
        id: task.id,
    }
}

async fn published(store: &dyn Store) -> Vec<PublishedTask> {
    published_in(store, "g", Stretch::ALL, 10_000).await.0
}

/// The published tasks in a page of a walk, in order, and where the next page begins.
async fn published_in(
    store: &dyn Store,
    generation: &str,
    stretch: Stretch<'_>,
    limit: u32,
) -> (Vec<PublishedTask>, Option<Walked>) {
    let page = store.on_bus(stretch, limit).await.unwrap();
    let on_bus: HashSet<(&ShardId, &TaskId)> = page
        .tasks
        .iter()
        .flat_map(|(shard, ids)| ids.iter().map(move |id| (shard, id)))
        .collect();
    assert!(page.tasks.values().all(|ids| ids.is_sorted()), "{page:?}");
    let ids: Vec<TaskId> = page.tasks.values().flatten().copied().collect();
    let mut tasks = store.published_among(generation, &ids).await.unwrap();
    assert!(
        tasks
            .iter()
            .all(|task| on_bus.contains(&(&task.shard, &task.id))),
        "{page:?} {tasks:?}"
    );
    tasks.sort_unstable_by_key(|task| (task.shard.queue.clone(), task.id));
    (tasks, page.next)
}

pub(crate) async fn a_task_comes_back_as_it_was_stored(db: &impl Database) {
    let store = db.open().await;
    let every_byte: Vec<u8> = (0..=255).cycle().take(4096).collect();
    let odd = TaskRow {
        partition: 4_000_000_000,
        payload: every_byte.repeat(10).into(),
        replicas: 100,
        priority: Priority::High,
        max_attempts: 1000,
        lease_ms: u32::MAX,
        not_before_unix_ms: 1 << 53,
        headers: vec![
            ("b".into(), "'\"\\ \u{1F980}\0".into()),
            ("a".into(), "ü".repeat(8000)),
        ],
        traceparent: format!(
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-{}",
            "x".repeat(300)
        ),
        ..task("Q.with-all_64", &every_byte)
    };
    let empty = TaskRow {
        payload: Bytes::new(),
        priority: Priority::Low,
        ..task(&"q".repeat(64), "k")
    };
    let rows = [fresh(odd), fresh(empty)];
    insert_new(&*store, &rows).await;

    for row in &rows {
        assert_eq!(detail_of(&*store, row).await, detail(row));
    }
    assert_eq!(
        outbox(&*store).await,
        rows.each_ref().map(|row| in_outbox(row, Fresh))
    );
}

pub(crate) async fn a_key_is_new_once(db: &impl Database) {
    let store = db.open().await;
    let first = row("q", "k");
    insert_new(&*store, std::slice::from_ref(&first)).await;

    let again = [row("q", "k"), row("q", "k2")];
    let taken = Duplicate {
        id: first.task.id,
        status: Unfinished,
    };
    assert_eq!(store.insert(&again).await.unwrap().answers, [taken, New]);
    assert!(store.task(again[0].task.id).await.unwrap().is_none());
    assert_eq!(detail_of(&*store, &first).await, detail(&first));

    store
        .settle(&[completed(&first, "w"), died(&again[1])])
        .await
        .unwrap();
    let completed = Duplicate {
        id: first.task.id,
        status: Completed,
    };
    let dead = Duplicate {
        id: again[1].task.id,
        status: Dead,
    };
    let once_more = [row("q", "k2"), row("q", "k")];
    assert_eq!(
        store.insert(&once_more).await.unwrap().answers,
        [dead, completed]
    );
    assert_eq!(
        counts(&*store).await,
        [count("q", Completed, 1), count("q", Dead, 1)]
    );
}

pub(crate) async fn keys_and_queues_are_compared_bytewise(db: &impl Database) {
    let store = db.open().await;
    let keys = [
        "/A",
        "/a",
        "/a ",
        "/a  ",
        "/a\0",
        "/\u{e4}",
        "/a\u{308}",
        "/ss",
        "/\u{df}",
    ];
    let in_q = keys.map(|key| row("q", key));
    let elsewhere = ["Q", "q-", "q."].map(|queue| row(queue, "/a"));
    insert_new(&*store, &in_q).await;
    insert_new(&*store, &elsewhere).await;

    let expected = in_q.each_ref().map(|row| Duplicate {
        id: row.task.id,
        status: Unfinished,
    });
    assert_eq!(
        store
            .insert(&keys.map(|key| row("q", key)))
            .await
            .unwrap()
            .answers,
        expected
    );
    let mut expected = vec![
        count("Q", Unfinished, 1),
        count("q", Unfinished, keys.len() as u64),
    ];
    expected.extend([count("q-", Unfinished, 1), count("q.", Unfinished, 1)]);
    assert_eq!(counts(&*store).await, expected);
}

pub(crate) async fn a_repeated_insert_changes_nothing(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 3);
    insert_new(&*store, &batch).await;
    publish(&*store, &batch[..1], at(1, 0)).await;
    store.settle(&[completed(&batch[1], "w")]).await.unwrap();

    // Repeat as if the answer had been lost: the same ids in another order, one of them with
    // different data, and one additional row.
    let changed = NewRow {
        unpublished: Parked,
        due_unix_ms: 0,
        ..batch[2].clone()
    };
    let more = row("q", "more");
    let again = [
        changed,
        more.clone(),
        batch[0].clone(),
        batch[1].clone(),
        batch[0].clone(),
    ];
    insert_new(&*store, &again).await;

    assert_eq!(
        detail_of(&*store, &batch[0]).await,
        TaskDetail {
            unpublished: false,
            ..detail(&batch[0])
        }
    );
    assert_eq!(
        detail_of(&*store, &batch[1]).await,
        detail_completed(&batch[1])
    );
    assert_eq!(
        outbox(&*store).await,
        [in_outbox(&batch[2], Fresh), in_outbox(&more, Fresh)]
    );
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 3), count("q", Completed, 1)]
    );
}

pub(crate) async fn answers_come_in_the_order_of_the_rows(db: &impl Database) {
    let store = db.open().await;
    assert_eq!(store.insert(&[]).await.unwrap().answers, []);

    let batch: Vec<NewRow> = (0..1500)
        .map(|i| row("q", format!("key {}", i % 1000)))
        .collect();
    let answers = store.insert(&batch).await.unwrap().answers;
    let owner = |i: usize| Duplicate {
        id: batch[i].task.id,
        status: Unfinished,
    };
    let expected: Vec<Inserted> = (0..1500)
        .map(|i| if i < 1000 { New } else { owner(i - 1000) })
        .collect();
    assert_eq!(answers, expected);
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 1000)]);
    let mut stored: Vec<TaskId> = outbox(&*store)
        .await
        .iter()
        .map(|row| row.task.id)
        .collect();
    stored.sort();
    assert_eq!(stored, ids(&batch[..1000]));
}

pub(crate) async fn large_rows_fit(db: &impl Database) {
    let store = db.open().await;
    // More in total than a server accepts in one packet.
    let payload = Bytes::from(vec![0xa5; 1 << 20]);
    let large = |i| {
        fresh(TaskRow {
            payload: payload.clone(),
            ..task("q", format!("{i}"))
        })
    };
    let batch: Vec<NewRow> = (0..20).map(large).collect();
    insert_new(&*store, &batch).await;

    let report = |row: &NewRow| Settlement::Completed {
        id: row.task.id,
        worker: "w".into(),
        lease: lease_of("w"),
        result: payload.clone(),
        encoding: Encoding::Bytes,
        attempt: 1,
        leased_unix_ms: 0,
        at_unix_ms: NOW,
        discovered: vec![],
        joining: None,
    };
    let answers = store
        .settle(&batch.iter().map(report).collect::<Vec<_>>())
        .await
        .unwrap()
        .answers;
    assert_eq!(answers, vec![settled(Completed); 20]);
    assert_eq!(
        store.results(batch[19].task.id).await.unwrap()[0].result,
        payload
    );
    let sizes = store.result_sizes(batch[19].task.id).await.unwrap();
    assert_eq!(sizes, [("w".to_owned(), payload.len())]);
}

pub(crate) async fn what_payloads_and_results_are_is_remembered(db: &impl Database) {
    let store = db.open().await;
    let encodings = [Encoding::Bytes, Encoding::Text, Encoding::Json];
    let rows: Vec<NewRow> = encodings
        .iter()
        .map(|encoding| {
            fresh(TaskRow {
                payload_encoding: *encoding,
                ..task("q", format!("{encoding:?}"))
            })
        })
        .collect();
    insert_new(&*store, &rows).await;
    assert_eq!(due_rows(&*store, NOW + 5_000, 10).await.len(), 3);
    for out in due_rows(&*store, NOW + 5_000, 10).await {
        assert_eq!(out.task.key, format!("{:?}", out.task.payload_encoding));
    }
    store
        .settle(
            &rows
                .iter()
                .map(|row| completed(row, "w"))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap();
    for row in &rows {
        let (id, encoding) = (row.task.id, row.task.payload_encoding);
        assert_eq!(
            store.task(id).await.unwrap().unwrap().task.payload_encoding,
            encoding
        );
        assert_eq!(store.results(id).await.unwrap()[0].encoding, encoding);
    }
    // Rows from before the column existed have an unknown encoding.
    db.execute("UPDATE tasks SET payload_encoding = 0").await;
    db.execute("UPDATE results SET result_encoding = 0").await;
    assert_eq!(
        store
            .task(rows[2].task.id)
            .await
            .unwrap()
            .unwrap()
            .task
            .payload_encoding,
        Encoding::Unknown
    );
    assert_eq!(
        store.results(rows[2].task.id).await.unwrap()[0].encoding,
        Encoding::Unknown
    );
}

pub(crate) async fn a_report_is_settled_once(db: &impl Database) {
    let store = db.open().await;
    let row = replicated("k", 3);
    insert_new(&*store, std::slice::from_ref(&row)).await;

    let twice = vec![completed(&row, "w"), completed(&row, "w")];
    let repeated = Settled {
        repeated: true,
        ..settled(Unfinished)
    };
    assert_eq!(
        store.settle(&twice).await.unwrap().answers,
        [settled(Unfinished), repeated.clone()]
    );
    let with_discovery = discovering(&row, "w", vec![self::row("q", "child")]);
    assert_eq!(
        store.settle(&[with_discovery]).await.unwrap().answers,
        [repeated]
    );

    assert_eq!(
        store.results(row.task.id).await.unwrap(),
        [result_of("w", false)]
    );
    let expected = TaskDetail {
        completed: 1,
        attempts: 1,
        updated_unix_ms: NOW + 10,
        ..detail(&row)
    };
    assert_eq!(detail_of(&*store, &row).await, expected);
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 1)],
        "a repeated report discovers nothing"
    );
}

pub(crate) async fn num_workers_complete_a_task_and_the_rest_is_surplus(db: &impl Database) {
    let store = db.open().await;
    let row = replicated("k", 3);
    insert_new(&*store, std::slice::from_ref(&row)).await;

    let reports = ["a", "b"].map(|worker| completed(&row, worker)).to_vec();
    assert_eq!(
        store.settle(&reports).await.unwrap().answers,
        [settled(Unfinished), settled(Unfinished)]
    );
    assert_eq!(counts(&*store).await, [count("q", Unfinished, 1)]);

    let child = self::row("q", "child");
    let reports = vec![
        completed(&row, "c"),
        discovering(&row, "d", vec![child.clone()]),
        completed(&row, "d"),
    ];
    let surplus = Settled {
        surplus: true,
        discovered: vec![New],
        ..settled(Completed)
    };
    let repeated = Settled {
        repeated: true,
        ..settled(Completed)
    };
    assert_eq!(
        store.settle(&reports).await.unwrap().answers,
        [settled(Completed), surplus, repeated]
    );

    assert_eq!(detail_of(&*store, &row).await, detail_completed(&row));
    assert_eq!(detail_of(&*store, &child).await, detail(&child));
    let expected = [("a", false), ("b", false), ("c", false), ("d", true)];
    assert_eq!(
        store.results(row.task.id).await.unwrap(),
        expected.map(|(worker, surplus)| result_of(worker, surplus))
    );
    let sizes = store.result_sizes(row.task.id).await.unwrap();
    let workers: Vec<&str> = sizes.iter().map(|(worker, _)| &worker[..]).collect();
    assert_eq!(workers, expected.map(|(worker, _)| worker));
    let some = ["d", "gone", "a"].map(str::to_owned);
    let expected = [expected[0], expected[3]].map(|(worker, surplus)| result_of(worker, surplus));
    assert_eq!(
        store.results_of(row.task.id, &some).await.unwrap(),
        expected
    );
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 1), count("q", Completed, 1)]
    );
}

pub(crate) async fn the_first_final_status_stays(db: &impl Database) {
    let store = db.open().await;
    let [early, late, both] = ["early", "late", "both"].map(|key| row("q", key));
    insert_new(&*store, &[early.clone(), late.clone(), both.clone()]).await;

    assert_eq!(
        store
            .settle(&[died(&early), completed(&late, "w")])
            .await
            .unwrap()
            .answers,
        [settled_dead(&early), settled(Completed)]
    );
    let child = row("q", "child");
    let surplus = Settled {
        surplus: true,
        discovered: vec![New],
        ..settled_dead(&early)
    };
    let reports = vec![
        discovering(&early, "w", vec![child.clone()]),
        died(&late),
        died(&early),
    ];
    let repeated = Settled {
        repeated: true,
        ..settled_dead(&early)
    };
    assert_eq!(
        store.settle(&reports).await.unwrap().answers,
        [surplus, settled(Completed), repeated]
    );

    // The same two reports within one call.
    let surplus = Settled {
        surplus: true,
        ..settled_dead(&both)
    };
    let answers = store
        .settle(&[died(&both), completed(&both, "w")])
        .await
        .unwrap()
        .answers;
    assert_eq!(answers, [settled_dead(&both), surplus]);

    for row in [&early, &both] {
        assert_eq!(detail_of(&*store, row).await, detail_dead(row));
        assert_eq!(
            store.results(row.task.id).await.unwrap(),
            [result_of("w", true)]
        );
    }
    assert_eq!(detail_of(&*store, &late).await, detail_completed(&late));
    let expected = [
        count("q", Unfinished, 1),
        count("q", Completed, 1),
        count("q", Dead, 2),
    ];
    assert_eq!(counts(&*store).await, expected);
}

pub(crate) async fn workers_are_compared_bytewise(db: &impl Database) {
    let store = db.open().await;
    let workers = ["w", "W", "w ", "\u{fc}", "u\u{308}", &"w".repeat(128)];
    let row = replicated("k", 6);
    insert_new(&*store, std::slice::from_ref(&row)).await;
    let answers = store
        .settle(
            &workers
                .iter()
                .map(|worker| completed(&row, worker))
                .collect::<Vec<_>>(),
        )
        .await
        .unwrap()
        .answers;
    let mut expected = vec![settled(Unfinished); 5];
    expected.push(settled(Completed));
    assert_eq!(answers, expected);
}

pub(crate) async fn discoveries_are_stored_with_their_report(db: &impl Database) {
    let store = db.open().await;
    let [parent, known] = ["parent", "known"].map(|key| row("q", key));
    insert_new(&*store, &[parent.clone(), known.clone()]).await;

    let parked = NewRow {
        unpublished: Parked,
        ..row("other", "parked")
    };
    let discovered = vec![
        row("q", "known"),
        parked.clone(),
        row("q", "parent"),
        row("other", "parked"),
    ];
    let answers = store
        .settle(&[discovering(&parent, "w", discovered)])
        .await
        .unwrap()
        .answers;
    let duplicate = |row: &NewRow, status| Duplicate {
        id: row.task.id,
        status,
    };
    let expected = Settled {
        discovered: vec![
            duplicate(&known, Unfinished),
            New,
            duplicate(&parent, Completed),
            duplicate(&parked, Unfinished),
        ],
        ..settled(Completed)
    };
    assert_eq!(answers, [expected]);
    assert_eq!(detail_of(&*store, &parked).await, detail(&parked));
    assert_eq!(
        parked_rows(&*store, "other", 10).await,
        [in_outbox(&parked, Parked)]
    );
    let expected = [
        count("other", Unfinished, 1),
        count("q", Unfinished, 1),
        count("q", Completed, 1),
    ];
    assert_eq!(counts(&*store).await, expected);
}

pub(crate) async fn the_first_report_to_discover_a_key_wins(db: &impl Database) {
    let store = db.open().await;
    let parents = rows("q", 2);
    insert_new(&*store, &parents).await;
    let children = [
        row("q", "child"),
        row("q", "child"),
        row("q", "second child"),
    ];
    let reports = vec![
        discovering(&parents[0], "w", vec![children[0].clone()]),
        discovering(
            &parents[1],
            "w",
            vec![children[1].clone(), children[2].clone()],
        ),
    ];
    let taken = Duplicate {
        id: children[0].task.id,
        status: Unfinished,
    };
    let expected = [vec![New], vec![taken, New]].map(|discovered| Settled {
        discovered,
        ..settled(Completed)
    });
    assert_eq!(store.settle(&reports).await.unwrap().answers, expected);
    assert_eq!(
        counts(&*store).await,
        [count("q", Unfinished, 2), count("q", Completed, 2)]
    );
}

pub(crate) async fn an_unknown_task_changes_nothing(db: &impl Database) {
    let store = db.open().await;
    let nowhere = row("q", "k");
    let reports = vec![
        discovering(&nowhere, "w", vec![row("q", "child")]),
        died(&nowhere),
    ];
    let unknown = Settled {
        unknown: true,
        ..Settled::default()
    };
    assert_eq!(
        store.settle(&reports).await.unwrap().answers,
        [unknown.clone(), unknown]
    );
    assert_eq!(store.settle(&[]).await.unwrap().answers, []);
    assert_eq!(counts(&*store).await, []);
    assert_eq!(store.results(nowhere.task.id).await.unwrap(), []);
}

pub(crate) async fn many_reports_are_settled_at_once(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 700);
    insert_new(&*store, &batch).await;
    let report = |(i, row): (usize, &NewRow)| {
        if i % 7 == 0 {
            died(row)
        } else {
            completed(row, &format!("w{i}"))
        }
    };
    let answers = store
        .settle(&batch.iter().enumerate().map(report).collect::<Vec<_>>())
        .await
        .unwrap()
        .answers;
    let expected = |(i, row): (usize, &NewRow)| {
        if i % 7 == 0 {
            settled_dead(row)
        } else {
            settled(Completed)
        }
    };
    assert_eq!(
        answers,
        batch.iter().enumerate().map(expected).collect::<Vec<_>>()
    );
    for (i, row) in batch.iter().enumerate().step_by(10) {
        let expected = if i % 7 == 0 {
            detail_dead(row)
        } else {
            detail_completed(row)
        };
        assert_eq!(detail_of(&*store, row).await, expected);
    }
    assert_eq!(
        counts(&*store).await,
        [count("q", Completed, 600), count("q", Dead, 100)]
    );
    assert_eq!(outbox(&*store).await, []);
}

pub(crate) async fn what_is_final_leaves_the_outbox(db: &impl Database) {
    let store = db.open().await;
    let (batch, open) = (rows("q", 3), replicated("open", 2));
    insert_new(&*store, &batch).await;
    insert_new(&*store, std::slice::from_ref(&open)).await;
    store
        .settle(&[
            completed(&batch[0], "w"),
            died(&batch[1]),
            completed(&open, "w"),
        ])
        .await
        .unwrap();
    let half_done = OutboxRow {
        is_as_new: false,
        ..in_outbox(&open, Fresh)
    };
    assert_eq!(
        outbox(&*store).await,
        [in_outbox(&batch[2], Fresh), half_done]
    );
}

pub(crate) async fn a_published_task_leaves_the_outbox_and_its_place_is_kept(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 4);
    insert_new(&*store, &batch).await;
    assert_eq!(published(&*store).await, []);
    store.settle(&[completed(&batch[2], "w")]).await.unwrap();

    let unknown = TaskId::new();
    let marks = [
        Published {
            partition: 0,
            offset: at(7, 1),
            tasks: first_turn(&[batch[0].task.id, unknown, batch[2].task.id]),
        },
        Published {
            partition: 1,
            offset: at(1_700_000_000_000, 12),
            tasks: first_turn(&[batch[1].task.id]),
        },
        Published {
            partition: 2,
            offset: at(1, 0),
            tasks: vec![],
        },
    ];
    for _ in 0..2 {
        store.mark_published("g", &marks).await.unwrap();
        let places = [
            published_at(&batch[0], Some(at(7, 1))),
            published_at(&batch[1], Some(at(1_700_000_000_000, 12))),
        ];
        assert_eq!(published(&*store).await, places);
        assert_eq!(outbox(&*store).await, [in_outbox(&batch[3], Fresh)]);
    }
    assert_eq!(
        detail_of(&*store, &batch[0]).await,
        TaskDetail {
            unpublished: false,
            ..detail(&batch[0])
        }
    );

    store
        .settle(&[completed(&batch[0], "w"), died(&batch[1])])
        .await
        .unwrap();
    assert_eq!(
        published(&*store).await,
        [],
        "what is final is not waited for"
    );
}

pub(crate) async fn a_place_never_moves_backwards(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 2);
    insert_new(&*store, &batch).await;
    publish(&*store, &batch[..1], at(5, 5)).await;
    for earlier in [at(5, 4), at(4, 9)] {
        publish(&*store, &batch[..1], earlier).await;
        assert_eq!(
            published(&*store).await,
            [published_at(&batch[0], Some(at(5, 5)))]
        );
    }
    for (moved, later) in [at(5, 6), at(6, 0)].into_iter().enumerate() {
        publish(&*store, &batch, later).await;
        let places = batch
            .iter()
            .map(|row| published_at(row, Some(later)))
            .collect::<Vec<_>>();
        assert_eq!(published(&*store).await, places, "{moved}");
    }
    // A late mark of a task that is back in the outbox: the task was published at or before the
    // later offset.
    store.unpublish(&ids(&batch), Missing).await.unwrap();
    publish(&*store, &batch[..1], at(2, 0)).await;
    assert_eq!(
        published(&*store).await,
        [published_at(&batch[0], Some(at(6, 0)))]
    );
    assert_eq!(outbox(&*store).await, [in_outbox(&batch[1], Missing)]);

    // Offsets of different generations cannot be compared.
    let elsewhere = Published {
        partition: 0,
        offset: at(1, 0),
        tasks: first_turn(&[batch[0].task.id]),
    };
    store.mark_published("h", &[elsewhere]).await.unwrap();
    assert_eq!(
        published_in(&*store, "h", Stretch::ALL, 10).await.0,
        [published_at(&batch[0], Some(at(1, 0)))]
    );
    assert_eq!(published(&*store).await, [published_at(&batch[0], None)]);
}

pub(crate) async fn an_unpublished_task_is_back_in_the_outbox(db: &impl Database) {
    let store = db.open().await;
    let mut batch = rows("q", 4);
    batch[3].task.not_before_unix_ms = NOW + 99;
    insert_new(&*store, &batch).await;
    publish(&*store, &batch, at(1, 0)).await;
    store.settle(&[completed(&batch[2], "w")]).await.unwrap();

    for _ in 0..2 {
        store
            .unpublish(
                &[batch[0].task.id, batch[2].task.id, TaskId::new()],
                Missing,
            )
            .await
            .unwrap();
        store.unpublish(&[batch[1].task.id], Parked).await.unwrap();
        store
            .unpublish(&[batch[3].task.id], Scheduled)
            .await
            .unwrap();
        store.unpublish(&[], Missing).await.unwrap();

        assert_eq!(
            due_rows(&*store, 0, 10).await,
            [in_outbox(&batch[0], Missing)],
            "what is missing is due at once"
        );
        assert_eq!(
            due_rows(&*store, NOW + 98, 10).await,
            [in_outbox(&batch[0], Missing)]
        );
        assert_eq!(
            outbox(&*store).await,
            [
                in_outbox(&batch[0], Missing),
                in_outbox(&batch[3], Scheduled)
            ]
        );
        assert_eq!(
            parked_rows(&*store, "q", 10).await,
            [in_outbox(&batch[1], Parked)]
        );
        assert_eq!(published(&*store).await, []);
    }
    assert_eq!(detail_of(&*store, &batch[0]).await, detail(&batch[0]));

    // Move tasks from one state in the outbox to another.
    store.unpublish(&[batch[0].task.id], Parked).await.unwrap();
    store.unpublish(&[batch[1].task.id], Missing).await.unwrap();
    assert_eq!(
        outbox(&*store).await,
        [
            in_outbox(&batch[1], Missing),
            in_outbox(&batch[3], Scheduled)
        ]
    );
    assert_eq!(
        parked_rows(&*store, "q", 10).await,
        [in_outbox(&batch[0], Parked)]
    );
}

pub(crate) async fn a_late_mark_leaves_a_task_that_came_back(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 4);
    insert_new(&*store, &batch).await;
    // Meanwhile, the fanout found the queue full and the reconciler found a task missing, before
    // the publisher marks them.
    store.unpublish(&ids(&batch[..1]), Parked).await.unwrap();
    store.unpublish(&ids(&batch[1..2]), Missing).await.unwrap();
    mark(&*store, first_turn(&ids(&batch)), at(1, 0)).await;
    assert_eq!(
        parked_rows(&*store, "q", 10).await,
        [in_outbox(&batch[0], Parked)]
    );
    assert_eq!(outbox(&*store).await, [in_outbox(&batch[1], Missing)]);
    assert_eq!(
        published(&*store).await,
        [2, 3].map(|i| published_at(&batch[i], Some(at(1, 0))))
    );
    assert!(detail_of(&*store, &batch[0]).await.unpublished);

    // The old turn does not match after it came back a second time, either.
    let stored = store
        .parked(&queue("q"), 10, &HashSet::new())
        .await
        .unwrap();
    store.unpublish(&ids(&batch[..2]), Parked).await.unwrap();
    let again = store
        .parked(&queue("q"), 10, &HashSet::new())
        .await
        .unwrap();
    assert_eq!(again.len(), 2);
    assert!(
        again
            .iter()
            .all(|row| row.turn != stored[0].turn && row.turn != Turn::FIRST)
    );
    mark(
        &*store,
        vec![
            (batch[0].task.id, stored[0].turn),
            (batch[1].task.id, Turn::FIRST),
        ],
        at(2, 0),
    )
    .await;
    assert_eq!(
        store
            .parked(&queue("q"), 10, &HashSet::new())
            .await
            .unwrap(),
        again
    );

    // Mark them in their current turn, together with a new task.
    let fresh = row("q", "fresh");
    insert_new(&*store, std::slice::from_ref(&fresh)).await;
    let mut tasks: Vec<_> = again.iter().map(|row| (row.task.id, row.turn)).collect();
    tasks.push((fresh.task.id, Turn::FIRST));
    mark(&*store, tasks, at(3, 0)).await;
    assert_eq!(store.parked_queues().await.unwrap(), []);
    assert_eq!(outbox(&*store).await, []);
    let places = [(0, at(3, 0)), (1, at(3, 0)), (2, at(1, 0)), (3, at(1, 0))];
    let mut places: Vec<_> = places
        .into_iter()
        .map(|(i, at)| published_at(&batch[i], Some(at)))
        .collect();
    places.push(published_at(&fresh, Some(at(3, 0))));
    assert_eq!(published(&*store).await, places);
}

pub(crate) async fn due_rows_come_earliest_first(db: &impl Database) {
    let store = db.open().await;
    let due = |key: &str, due_unix_ms, unpublished| NewRow {
        due_unix_ms,
        unpublished,
        ..row("q", key)
    };
    let late = due("late", 300, Scheduled);
    let early = due("early", 100, Fresh);
    let parked = due("parked", 0, Parked);
    let also_early = due("also early", 100, Missing);
    let middle = due("middle", 200, Fresh);
    insert_new(
        &*store,
        &[late.clone(), early.clone(), parked, also_early.clone()],
    )
    .await;
    // A batch is due when the last of its tasks is due.
    insert_new(&*store, std::slice::from_ref(&middle)).await;

    let [early, also_early] = [in_outbox(&early, Fresh), in_outbox(&also_early, Missing)];
    let [middle, late] = [in_outbox(&middle, Fresh), in_outbox(&late, Scheduled)];
    assert_eq!(due_rows(&*store, 99, 10).await, []);
    assert_eq!(
        due_rows(&*store, 100, 10).await,
        [early.clone(), also_early.clone()]
    );
    assert_eq!(
        due_rows(&*store, 1000, 1).await,
        std::slice::from_ref(&early)
    );
    assert_eq!(
        due_rows(&*store, 1000, 3).await,
        [early.clone(), also_early.clone(), middle.clone()]
    );
    assert_eq!(outbox(&*store).await, [early, also_early, middle, late]);
}

pub(crate) async fn parked_rows_come_by_priority_then_age(db: &impl Database) {
    let store = db.open().await;
    assert_eq!(store.parked_queues().await.unwrap(), []);
    let parked = |queue: &str, key: &str, priority| {
        let task = TaskRow {
            priority,
            ..task(queue, key)
        };
        NewRow {
            task,
            unpublished: Parked,
            due_unix_ms: 0,
        }
    };
    let low = parked("b", "low", Priority::Low);
    let high = parked("b", "high", Priority::High);
    let medium = parked("b", "medium", Priority::Medium);
    let high_too = parked("b", "high too", Priority::High);
    let elsewhere = [
        parked("a", "k", Priority::High),
        parked("C", "k", Priority::High),
    ];
    insert_new(
        &*store,
        &[low.clone(), high_too.clone(), high.clone(), medium.clone()],
    )
    .await;
    insert_new(&*store, &elsewhere).await;
    insert_new(&*store, &[row("fresh", "k")]).await;

    let expected = [&high, &high_too, &medium, &low].map(|row| in_outbox(row, Parked));
    assert_eq!(parked_rows(&*store, "b", 10).await, expected);
    assert_eq!(parked_rows(&*store, "b", 2).await, expected[..2]);
    assert_eq!(parked_rows(&*store, "fresh", 2).await, []);
    let mut queues = store.parked_queues().await.unwrap();
    queues.sort();
    assert_eq!(queues, ["C", "a", "b"].map(queue));

    publish(&*store, &elsewhere, at(1, 0)).await;
    assert_eq!(store.parked_queues().await.unwrap(), [queue("b")]);
}

pub(crate) async fn crowded_rows_come_by_limit_key_then_priority_then_age(db: &impl Database) {
    let store = db.open().await;
    let of = |name: &str, key: &str, limit_key: &str, priority: Priority| {
        let mut row = row(name, key);
        row.task.limit_key = limit_key.to_owned();
        row.task.priority = priority;
        row
    };
    let mut rows = vec![
        of("q", "a", "one", Priority::Low),
        of("q", "b", "one", Priority::Medium),
        of("q", "c", "one", Priority::Medium),
        of("q", "d", "two", Priority::High),
        of("other", "e", "one", Priority::Medium),
        of("q", "f", "one", Priority::Medium),
    ];
    // Some are crowded at their insert, others on their way.
    rows[3].unpublished = Crowded;
    rows[5].unpublished = Crowded;
    insert_new(&*store, &rows).await;
    let ids = ids(&rows[..5]);
    store.unpublish(&ids, Crowded).await.unwrap();
    let key = |row: &NewRow| limit_hash(&row.task.queue, &row.task.limit_key);
    let crowded = async |name: &str, key: LimitHash, limit: usize| {
        let rows = store
            .crowded(&queue(name), &key, limit, &HashSet::new())
            .await
            .unwrap();
        assert!(rows.iter().all(|row| row.unpublished == Crowded));
        rows.iter().map(|row| row.task.id).collect::<Vec<_>>()
    };
    let expected: Vec<_> = [1, 2, 5, 0].map(|n: usize| rows[n].task.id).into();
    assert_eq!(crowded("q", key(&rows[0]), 10).await, expected);
    assert_eq!(crowded("q", key(&rows[0]), 2).await, expected[..2]);
    assert_eq!(crowded("q", key(&rows[3]), 10).await, [rows[3].task.id]);
    assert_eq!(crowded("other", key(&rows[4]), 10).await, [rows[4].task.id]);
    assert_eq!(outbox(&*store).await, [], "they are never due");
    assert_eq!(store.parked_queues().await.unwrap(), [], "nor parked");

    let queues = store.crowded_queues().await.unwrap();
    assert_eq!(queues, [queue("other"), queue("q")]);
    let mut keys = vec![key(&rows[0]), key(&rows[3])];
    keys.sort_unstable();
    let page = async |after: Option<&LimitHash>, limit| {
        store.crowded_keys(&queue("q"), after, limit).await.unwrap()
    };
    assert_eq!(page(None, 10).await, keys);
    assert_eq!(page(None, 1).await, keys[..1]);
    assert_eq!(page(Some(&keys[0]), 10).await, keys[1..]);
    assert!(page(Some(&keys[1]), 10).await.is_empty());
    let count = async |most| {
        let mut sum = 0;
        for key in &keys {
            sum += store.count_crowded(&queue("q"), key, most).await.unwrap();
        }
        sum
    };
    assert_eq!(count(10).await, 5);
    assert_eq!(count(2).await, 3, "no more than asked");

    // They leave by their mark, or for another reason to wait.
    store
        .unpublish(&[rows[3].task.id], Unpublished::Parked)
        .await
        .unwrap();
    assert!(crowded("q", key(&rows[3]), 10).await.is_empty());
    let all = store
        .crowded(&queue("q"), &key(&rows[0]), 10, &HashSet::new())
        .await
        .unwrap();
    let tasks = all.iter().map(|row| (row.task.id, row.turn)).collect();
    mark(&*store, tasks, at(1, 0)).await;
    assert!(page(None, 10).await.is_empty());
    assert_eq!(store.crowded_queues().await.unwrap(), [queue("other")]);
}

pub(crate) async fn final_rows_met_in_the_outbox_are_removed(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 5);
    insert_new(&*store, &batch).await;
    let reports: Vec<_> = batch[..4].iter().map(|row| completed(row, "w")).collect();
    store.settle(&reports).await.unwrap();
    let leave = |state: &str, due: &str| {
        format!(
            "INSERT INTO outbox (task_id, state, queue, priority, due_ms, turn) \
             SELECT id, {state}, queue, priority, {due}, 0 FROM tasks WHERE status <> 0"
        )
    };

    db.execute(&leave("3", "0")).await;
    assert_eq!(
        due_rows(&*store, i64::MAX, 2).await,
        [in_outbox(&batch[4], Fresh)],
        "a page of them hides nothing"
    );
    assert!(!detail_of(&*store, &batch[0]).await.unpublished);

    db.execute(&leave("1", "9223372036854775807")).await;
    assert_eq!(store.parked_queues().await.unwrap(), [queue("q")]);
    assert_eq!(parked_rows(&*store, "q", 2).await, []);
    assert_eq!(store.parked_queues().await.unwrap(), []);
}

pub(crate) async fn a_page_of_the_outbox_has_bounded_weight(db: &impl Database) {
    let store = db.open().await;
    let heavy = |i: usize| NewRow {
        due_unix_ms: NOW,
        ..fresh(TaskRow {
            payload: vec![7; 1 << 20].into(),
            ..task("q", [i as u8])
        })
    };
    let mut batch: Vec<NewRow> = (0..40).map(heavy).collect();
    batch.extend(rows("light", 300).into_iter().map(|row| NewRow {
        due_unix_ms: NOW + 1,
        ..row
    }));
    insert_new(&*store, &batch).await;

    // The rest of a page stays due, until each task was returned once, in order.
    let mut seen = Vec::new();
    let mut pages = Vec::new();
    loop {
        let page = store.due(NOW + 1, 1000, &HashSet::new()).await.unwrap();
        let Some(last) = page.last() else { break };
        let weight: usize = page.iter().map(|row| row.task.weight()).sum();
        assert!(weight - last.task.weight() < PAGE_BYTES);
        pages.push(page.len());
        seen.extend(page.iter().map(|row| row.task.id));
        mark(
            &*store,
            page.iter().map(|row| (row.task.id, row.turn)).collect(),
            at(1, 0),
        )
        .await;
    }
    assert_eq!(pages, [16, 16, 308]);
    assert_eq!(seen, ids(&batch));

    // The same for tasks that came back, whose stored size counts.
    store.unpublish(&ids(&batch[..20]), Parked).await.unwrap();
    assert_eq!(
        store
            .parked(&queue("q"), 1000, &HashSet::new())
            .await
            .unwrap()
            .len(),
        16
    );
}

pub(crate) async fn a_page_leaves_out_what_it_is_told_to(db: &impl Database) {
    let store = db.open().await;
    let large = |key: &str| {
        fresh(TaskRow {
            payload: vec![7; 8 << 20].into(),
            ..task("q", key)
        })
    };
    let mut batch = vec![large("a"), large("b"), large("c")];
    batch.extend(rows("q", 3));
    insert_new(&*store, &batch).await;

    // The first three tasks, which nobody accepts, would fill a page, both by weight and by number.
    let refused: HashSet<TaskId> = ids(&batch[..3]).into_iter().collect();
    let rest: Vec<OutboxRow> = batch[3..].iter().map(|row| in_outbox(row, Fresh)).collect();
    assert_eq!(
        without_turns(store.due(i64::MAX, 3, &refused).await.unwrap()),
        rest
    );
    store.unpublish(&ids(&batch), Parked).await.unwrap();
    let rest: Vec<OutboxRow> = batch[3..]
        .iter()
        .map(|row| in_outbox(row, Parked))
        .collect();
    assert_eq!(
        without_turns(store.parked(&queue("q"), 3, &refused).await.unwrap()),
        rest
    );
}

pub(crate) async fn published_tasks_are_paged_by_id(db: &impl Database) {
    let store = db.open().await;
    let batch = rows("q", 7);
    insert_new(&*store, &batch).await;
    publish(&*store, &batch[..6], at(3, 1)).await;
    store.unpublish(&ids(&batch[2..3]), Missing).await.unwrap();
    store.settle(&[died(&batch[3])]).await.unwrap();

    let published = |i: usize| published_at(&batch[i], Some(at(3, 1)));
    // A page of two visits two unfinished tasks, even if one is in the outbox or waits in its
    // batch.
    let mut after = None;
    for (page, last) in [
        (vec![0, 1], Some(1)),
        (vec![4], Some(4)),
        (vec![5], Some(6)),
        (vec![], None),
    ] {
        let stretch = Stretch {
            after: after.as_ref(),
            ..Stretch::ALL
        };
        let tasks = page.into_iter().map(published).collect();
        let next = last.map(|last: usize| walked_to(&published(last)));
        assert_eq!(
            published_in(&*store, "g", stretch, 2).await,
            (tasks, next.clone())
        );
        after = next;
    }
    let upto = Stretch {
        upto: batch[1].task.id,
        ..Stretch::ALL
    };
    assert_eq!(
        published_in(&*store, "g", upto, 10).await,
        (vec![published(0), published(1)], None)
    );
    let first = Stretch {
        upto: TaskId::first_of(batch[0].task.id.created_unix_ms()),
        ..Stretch::ALL
    };
    assert_eq!(published_in(&*store, "g", first, 10).await, (vec![], None));
    assert_eq!(store.last_id().await.unwrap(), Some(batch[6].task.id));
}

pub(crate) async fn states_name_the_credited_workers(db: &impl Database) {
    let store = db.open().await;
    let [twice, once, never] = [replicated("twice", 2), row("q", "once"), row("q", "never")];
    let stored = [twice.clone(), once.clone(), never.clone()];
    insert_new(&*store, &stored).await;
    let reports = [("a", &twice), ("b", &twice), ("late", &twice), ("a", &once)];
    store
        .settle(&reports.map(|(worker, row)| completed(row, worker)))
        .await
        .unwrap();

    let mut asked = ids(&stored);
    asked.extend((0..300).map(|_| TaskId::new()));
    // A task that is on the bus twice is requested twice, but not in the same statement.
    asked.extend(ids(&stored));
    let mut states = store.states(&asked).await.unwrap();
    states.sort_by_key(|state| state.id);
    states.iter_mut().for_each(|state| state.workers.sort());
    let state = |row: &NewRow, status, workers: &[&str]| TaskState {
        id: row.task.id,
        status,
        workers: workers.iter().map(ToString::to_string).collect(),
        epoch: 0,
        is_behind: false,
        replicas: row.task.replicas,
        priority: row.task.priority,
    };
    let expected = [
        state(&twice, Completed, &["a", "b"]),
        state(&once, Completed, &["a"]),
        state(&never, Unfinished, &[]),
    ];
    assert_eq!(states, expected);
    assert_eq!(store.states(&[]).await.unwrap(), []);
    assert_eq!(
        store.unfinished_among(&asked).await.unwrap(),
        [never.task.id]
    );

    let for_worker = async |worker: &str| {
        let worker = WorkerName::new(worker).unwrap();
        let mut states = store.states_for(&worker, &asked).await.unwrap();
        states.sort_by_key(|state| state.id);
        let shard = |row: &NewRow| ShardId {
            queue: row.task.queue.clone(),
            number: row.task.partition,
        };
        assert!(
            states
                .iter()
                .zip(&stored)
                .all(|(state, row)| state.shard == shard(row)),
            "{states:?}"
        );
        states
            .into_iter()
            .map(|state| (state.status, state.completed_under))
            .collect::<Vec<_>>()
    };
    let [a, late] = ["a", "late"].map(lease_of);
    assert_eq!(
        for_worker("a").await,
        [
            (Completed, Some(a)),
            (Completed, Some(a)),
            (Unfinished, None)
        ]
    );
    // A surplus completion was also answered with OK.
    assert_eq!(
        for_worker("late").await,
        [
            (Completed, Some(late)),
            (Completed, None),
            (Unfinished, None)
        ]
    );
}

pub(crate) async fn an_unfinished_task_has_a_place(db: &impl Database) {
    let store = db.open().await;
    let [fresh, mut parked, mut scheduled] =
        ["fresh", "parked", "scheduled"].map(|key| row("q", key));
    parked.unpublished = Parked;
    (scheduled.unpublished, scheduled.due_unix_ms) = (Scheduled, NOW + 7);
    insert_new(&*store, &[fresh.clone(), parked.clone(), scheduled.clone()]).await;
    let place = async |row: &NewRow| store.place("g", row.task.id).await.unwrap();
    let off = |why, due_unix_ms| {
        Some(Place::Off {
            why,
            due_unix_ms,
            came_back: why == Missing,
        })
    };
    assert_eq!(place(&fresh).await, off(Fresh, Some(NOW + 5_000)));
    assert_eq!(place(&parked).await, off(Parked, None));
    assert_eq!(place(&scheduled).await, off(Scheduled, Some(NOW + 7)));

    // One is marked by its batch, the other by itself.
    publish(&*store, &[fresh.clone(), scheduled.clone()], at(4, 2)).await;
    for row in [&fresh, &scheduled] {
        assert_eq!(place(row).await, Some(Place::On(Some(at(4, 2)))));
        assert_eq!(
            store.place("another", row.task.id).await.unwrap(),
            Some(Place::On(None))
        );
    }
    store.unpublish(&[fresh.task.id], Missing).await.unwrap();
    assert_eq!(place(&fresh).await, off(Missing, Some(0)));
    publish(&*store, std::slice::from_ref(&fresh), at(9, 0)).await;
    assert_eq!(
        place(&fresh).await,
        Some(Place::On(Some(at(9, 0)))),
        "the later of its own and its batch's"
    );

    store
        .settle(&[completed(&fresh, "w"), died(&parked)])
        .await
        .unwrap();
    for over in [&fresh, &parked, &row("q", "never stored")] {
        assert_eq!(place(over).await, None);
    }
}

pub(crate) async fn what_is_not_there_is_not_found(db: &impl Database) {
    let store = db.open().await;
    assert_eq!(store.task(TaskId::new()).await.unwrap(), None);
    assert_eq!(store.results(TaskId::new()).await.unwrap(), []);
    assert_eq!(counts(&*store).await, []);
    assert_eq!(open_shards(&*store).await, []);
    assert_eq!(outbox(&*store).await, []);
    assert_eq!(parked_rows(&*store, "q", 10).await, []);
    store.unpublish(&[TaskId::new()], Parked).await.unwrap();
    assert_eq!(store.parked_queues().await.unwrap(), []);
}

pub(crate) async fn one_of_two_replaces_the_holder(db: &impl Database) {
    let (a, b) = (db.open().await, db.open().await);
    assert_eq!(a.holder().await.unwrap(), "");
    assert!(a.replace_holder("", "one 1").await.unwrap());
    assert!(!b.replace_holder("", "two 1").await.unwrap());
    assert!(b.replace_holder("one 1", "one 2").await.unwrap());
    assert!(!a.replace_holder("one 1", "one 2").await.unwrap());
    let (first, second) = tokio::join!(
        a.replace_holder("one 2", "one 3"),
        b.replace_holder("one 2", "two 3")
    );
    let holder = if first.unwrap() { "one 3" } else { "two 3" };
    assert_eq!(
        (second.unwrap(), a.holder().await.unwrap()),
        (holder == "two 3", holder.to_owned())
    );
    a.close().await;
    b.close().await;
}

pub(crate) async fn everything_is_there_after_a_restart(db: &impl Database) {
    let before = db.open().await;
    let batch = rows("q", 3);
    insert_new(&*before, &batch).await;
    publish(&*before, &batch[..1], at(1, 2)).await;
    before.settle(&[completed(&batch[1], "w")]).await.unwrap();
    before
        .open_shards(&[ShardId {
            queue: queue("q"),
            number: 3,
        }])
        .await
        .unwrap();
    let id = before.store_id().await.unwrap();
    assert!(!id.is_empty());
    before.close().await;

    let after = db.open().await;
    assert_eq!(after.store_id().await.unwrap(), id);
    assert_eq!(
        published(&*after).await,
        [published_at(&batch[0], Some(at(1, 2)))]
    );
    assert_eq!(
        detail_of(&*after, &batch[1]).await,
        detail_completed(&batch[1])
    );
    assert_eq!(
        after.results(batch[1].task.id).await.unwrap(),
        [result_of("w", false)]
    );
    assert_eq!(outbox(&*after).await, [in_outbox(&batch[2], Fresh)]);
    assert_eq!(
        counts(&*after).await,
        [count("q", Unfinished, 2), count("q", Completed, 1)]
    );
    assert_eq!(
        open_shards(&*after).await,
        [(
            ShardId {
                queue: queue("q"),
                number: 3
            },
            1
        )]
    );
}

pub(crate) async fn a_newer_schema_is_used_where_it_allows_it(db: &impl Database) {
    db.open().await.close().await;
    let known = migration_files().into_iter().max().unwrap();
    let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                 VALUES (9000, 'of a newer taskd', TRUE, X'00', 0)";
    db.execute(newer).await;
    insert_new(&*db.open().await, &rows("q", 3)).await;

    db.execute("UPDATE meta SET value = '8000' WHERE name = 'lowest_schema'")
        .await;
    let error = db.try_open().await.err().unwrap();
    assert!(!error.is_transient());
    let expected = format!(
        "schema 9000, which needs a taskd that knows schema 8000 or later; this one knows {known}"
    );
    assert!(error.to_string().ends_with(&expected), "{error}");
    // Without the entry, no older version is allowed to use it.
    db.execute("DELETE FROM meta WHERE name = 'lowest_schema'")
        .await;
    let error = db.try_open().await.err().unwrap();
    assert!(
        error
            .to_string()
            .contains("needs a taskd that knows schema 9000"),
        "{error}"
    );
}

pub(crate) async fn of_concurrent_inserts_one_wins_each_key(db: &impl Database) {
    const KEYS: usize = 60;
    let stores = [db.open().await, db.open().await];
    // Every writer inserts all keys in small batches, each in another order (2n + 1 is coprime to
    // KEYS).
    let writer = |n: usize| {
        let store = Arc::clone(&stores[n % 2]);
        let key = move |i: usize| format!("key {}", (i * (2 * n + 1) + 7 * n) % KEYS);
        tokio::spawn(async move {
            let mut answers = Vec::new();
            for from in (0..KEYS).step_by(15) {
                let batch: Vec<NewRow> = (from..from + 15).map(|i| row("q", key(i))).collect();
                let inserted = store.insert(&batch).await.unwrap().answers;
                answers.extend(batch.into_iter().map(|row| row.task).zip(inserted));
            }
            answers
        })
    };
    let answers = join_all([0, 3, 5, 6, 8, 9, 11, 14].map(writer))
        .await
        .into_iter()
        .flat_map(Result::unwrap);

    let mut owners: BTreeMap<Bytes, Vec<TaskId>> = BTreeMap::new();
    let mut duplicates = Vec::new();
    for (task, answer) in answers {
        match answer {
            New => owners.entry(task.key).or_default().push(task.id),
            Duplicate { id, status } => duplicates.push((task.key, id, status)),
            other => panic!("{other:?} without an idempotency key"),
        }
    }
    assert_eq!(owners.len(), KEYS);
    assert!(
        owners.values().all(|ids| ids.len() == 1),
        "each key is new once: {owners:?}"
    );
    assert!(
        duplicates
            .iter()
            .all(|(key, id, status)| owners[key] == [*id] && *status == Unfinished)
    );
    assert_eq!(
        counts(&*stores[0]).await,
        [count("q", Unfinished, KEYS as u64)]
    );
    assert_eq!(outbox(&*stores[1]).await.len(), KEYS);
}

pub(crate) async fn of_concurrent_settlements_one_credits_each_worker(db: &impl Database) {
    let stores = [db.open().await, db.open().await];
    let batch: Vec<NewRow> = (0..30).map(|i| replicated(&format!("{i}"), 3)).collect();
    insert_new(&*stores[0], &batch).await;

    // Each worker's reports are delivered twice, in different orders; each report discovers the
    // same task as those of the other workers.
    let delivery = |n: usize| {
        let (store, mut rows) = (Arc::clone(&stores[n % 2]), batch.clone());
        rows.rotate_left(n * 7 % 30);
        let worker = format!("w{}", n / 2);
        let reports: Vec<_> = rows
            .iter()
            .map(|row| discovering(row, &worker, vec![self::row("found", &row.task.key)]))
            .collect();
        tokio::spawn(async move { store.settle(&reports).await.unwrap().answers })
    };
    let answers: Vec<Settled> = join_all((0..8).map(delivery))
        .await
        .into_iter()
        .flat_map(Result::unwrap)
        .collect();

    let number = |wanted: &dyn Fn(&Settled) -> bool| {
        answers.iter().filter(|settled| wanted(settled)).count()
    };
    assert_eq!(number(&|settled| settled.repeated), 4 * 30);
    assert_eq!(number(&|settled| settled.surplus), 30);
    assert_eq!(number(&|settled| settled.discovered == [New]), 30);
    for row in &batch {
        assert_eq!(detail_of(&*stores[0], row).await, detail_completed(row));
        assert_eq!(stores[1].results(row.task.id).await.unwrap().len(), 4);
    }
    assert_eq!(
        counts(&*stores[0]).await,
        [count("found", Unfinished, 30), count("q", Completed, 30)]
    );
}

/// The number of migrations.
pub(crate) fn migrations(backend: &str) -> usize {
    std::fs::read_dir(format!(
        "{}/migrations/{backend}",
        env!("CARGO_MANIFEST_DIR")
    ))
    .unwrap()
    .count()
}

/// The numbers of the migrations, which are the same in all backends.
fn migration_files() -> Vec<i64> {
    let files =
        std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/mysql")).unwrap();
    files
        .map(|file| {
            file.unwrap().file_name().to_str().unwrap()[..4]
                .parse()
                .unwrap()
        })
        .collect()
}
