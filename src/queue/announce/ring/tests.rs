//! Order, places and bounds of a ring, at made-up times.

use super::*;
use crate::model::QueueName;

fn event(status: TaskStatus, at_unix_ms: i64) -> TaskEvent {
    TaskEvent {
        id: TaskId::new(),
        queue: QueueName::new("q").unwrap(),
        status,
        at_unix_ms,
    }
}

fn queued(at_unix_ms: i64) -> TaskEvent {
    event(TaskStatus::Queued, at_unix_ms)
}

fn ring() -> (Ring, Instant) {
    (Ring::new(Arc::default()), Instant::now())
}

/// All that there is to read at this time: the times of events, and -1 for a gap.
fn read(ring: &Ring, place: &mut Place, now: Instant) -> Result<Vec<i64>, TooSlow> {
    let mut times = Vec::new();
    while let Found::Words(words) = ring.read(place, now)? {
        assert!(words.len() <= AT_ONCE);
        times.extend(words.iter().map(|word| match word {
            Watched::Event(event) => event.at_unix_ms,
            _ => -1,
        }));
    }
    Ok(times)
}

#[test]
fn events_wait_for_earlier_ones_and_all_watchers_see_the_same_order() {
    let (ring, now) = ring();
    let mut first = ring.end();
    ring.tell(vec![queued(10), queued(30)], now);
    assert!(matches!(ring.read(&mut first, now), Ok(Found::NotBefore(at)) if at == now + HOLD));
    ring.tell(vec![queued(20), queued(40)], now + HOLD / 2);
    let mut second = ring.end();
    // A later arrival that belongs before goes along; the others wait in their turn.
    assert_eq!(read(&ring, &mut first, now + HOLD), Ok(vec![10, 20, 30]));
    ring.tell(vec![queued(35)], now + HOLD);
    assert_eq!(read(&ring, &mut first, now + HOLD), Ok(vec![]));
    assert_eq!(read(&ring, &mut first, now + 2 * HOLD), Ok(vec![35, 40]));
    assert_eq!(
        read(&ring, &mut second, now + 2 * HOLD),
        Ok(vec![35]),
        "from its beginning on"
    );
    assert!(matches!(
        ring.read(&mut first, now + 2 * HOLD),
        Ok(Found::Nothing)
    ));
    ring.gap();
    assert_eq!(read(&ring, &mut first, now + 2 * HOLD), Ok(vec![-1]));
}

#[test]
fn a_watcher_goes_on_behind_an_event_that_was_told_or_is_held() {
    let (ring, now) = ring();
    let old = queued(1);
    let told = queued(10);
    let held = queued(20);
    ring.tell(vec![old.clone()], now);
    ring.gap();
    ring.tell(vec![told.clone(), queued(12), queued(11)], now + HOLD);
    ring.tell(vec![held.clone(), queued(21)], now + 2 * HOLD);
    let later = now + 3 * HOLD;
    let mut of_told = ring.behind(&told.event_id()).unwrap();
    let mut of_held = ring.behind(&held.event_id()).unwrap();
    assert_eq!(read(&ring, &mut of_told, later), Ok(vec![11, 12, 20, 21]));
    assert_eq!(read(&ring, &mut of_held, later), Ok(vec![21]));
    assert_eq!(
        ring.behind(&old.event_id()),
        None,
        "what followed it may be missing"
    );
    assert_eq!(ring.behind(&queued(10).event_id()), None);
    assert_eq!(
        read(&ring, &mut ring.behind(&held.event_id()).unwrap(), later),
        Ok(vec![21])
    );
}

#[test]
fn what_was_told_before_is_not_told_again() {
    let (ring, now) = ring();
    let mut place = ring.end();
    let task = queued(1);
    let done = event(TaskStatus::Completed, 5);
    let of = |id: TaskId, status, at_unix_ms| TaskEvent {
        id,
        status,
        at_unix_ms,
        ..task.clone()
    };
    ring.tell(
        vec![
            task.clone(),
            of(task.id, TaskStatus::Queued, 2),
            done.clone(),
        ],
        now,
    );
    ring.tell(
        vec![
            of(done.id, TaskStatus::Assigned, 4),
            of(task.id, TaskStatus::Assigned, 6),
        ],
        now,
    );
    assert_eq!(read(&ring, &mut place, now + HOLD), Ok(vec![1, 5, 6]));
    for n in 0..KNOWN {
        ring.tell(vec![queued(7 + i64::try_from(n).unwrap())], now + HOLD);
    }
    ring.tell(vec![of(task.id, TaskStatus::Assigned, 7)], now + HOLD);
    assert_eq!(
        read(&ring, &mut place, now + 2 * HOLD).unwrap().len(),
        KNOWN + 1,
        "it is forgotten in the end"
    );
}

#[test]
fn an_earlier_status_that_comes_behind_a_told_one_is_not_told() {
    let (ring, now) = ring();
    let mut place = ring.end();
    let [in_order, too_late] = [
        event(TaskStatus::Assigned, 4),
        event(TaskStatus::Assigned, 4),
    ];
    let of = |task: &TaskEvent, at_unix_ms| TaskEvent {
        status: TaskStatus::Queued,
        at_unix_ms,
        ..task.clone()
    };
    ring.tell(vec![in_order.clone(), too_late.clone()], now);
    ring.tell(vec![of(&in_order, 3)], now);
    assert_eq!(read(&ring, &mut place, now + HOLD), Ok(vec![3, 4, 4]));
    ring.tell(vec![of(&too_late, 4)], now + HOLD);
    ring.tell(vec![of(&in_order, 5)], now + HOLD);
    assert_eq!(
        read(&ring, &mut place, now + 2 * HOLD),
        Ok(vec![5]),
        "a task that is queued again"
    );
}

#[test]
fn a_watcher_whose_next_event_was_dropped_is_too_slow_and_one_that_reads_is_not() {
    let (ring, now) = ring();
    let mut reads = ring.end();
    let mut stays = ring.end();
    let mut count = 0;
    for n in 0..30 {
        let now = now + n * 2 * HOLD;
        let is_cut = count > ROOM;
        let mut place = stays;
        assert_eq!(
            ring.read(&mut place, now).is_err(),
            is_cut,
            "{count} events"
        );
        ring.tell((0..500).map(|_| queued(1)).collect(), now);
        let read = read(&ring, &mut reads, now + HOLD).unwrap();
        assert_eq!(read.len(), 500);
        count += read.len();
    }
    assert_eq!(read(&ring, &mut stays, now + 60 * HOLD), Err(TooSlow));
    assert_eq!(ring.total.events(), ROOM);
    // More than there is room for to wait: the earlier ones do not wait on.
    ring.tell(
        (0..=i64::try_from(ROOM).unwrap())
            .rev()
            .map(queued)
            .collect(),
        now + 60 * HOLD,
    );
    let early = read(&ring, &mut reads, now + 60 * HOLD).unwrap();
    assert!(
        early.len() >= ROOM / 2 && early.is_sorted() && early[0] == 1,
        "{}",
        early.len()
    );
    assert!(ring.total.events() <= 2 * ROOM);
}

#[test]
fn all_rings_together_have_a_bound() {
    let total = Arc::<Total>::default();
    let now = Instant::now();
    let rings: Vec<Ring> = (0..2 * ROOM_OF_ALL / ROOM)
        .map(|_| Ring::new(Arc::clone(&total)))
        .collect();
    for n in 0..ROOM / 500 {
        let now = now + u32::try_from(n).unwrap() * 2 * HOLD;
        for ring in &rings {
            ring.tell((0..500).map(|_| queued(1)).collect(), now);
        }
    }
    let share = ROOM_OF_ALL / rings.len();
    assert!(
        total.is_crowded() && total.events() <= ROOM_OF_ALL + rings.len() * 1_000,
        "{}",
        total.events()
    );
    rings.iter().for_each(Ring::shrink);
    assert!(
        !total.is_crowded(),
        "{} events, a share is {share}",
        total.events()
    );
    assert!(
        rings
            .iter()
            .all(|ring| ring.state.lock().told.capacity() <= share)
    );
    assert!(size_of::<Word>() <= 64 && size_of::<HeldEvent>() <= 80);
    drop(rings);
    assert_eq!(
        (total.events(), total.rings.load(Ordering::Relaxed)),
        (0, 0)
    );
}
