//! What all viewers of a process share: one of them asks, the others get the same answer. After an
//! answer nobody asks for 20 times as long as it took, so viewers cost little however many there
//! are, and nothing when nobody looks.
//!
//! A look is a task of its own, so a viewer who leaves does not end it. A look that fails is tried
//! again soon; until then its viewers get the last answer, or the failure if there is none.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use super::{
    super::problem::Problem,
    charts::{Lately, Rates},
    format::Moment,
};
use crate::{
    api::{self, Api, HeldQueues, Kind, StoredQueues, WorkersLook, merged_queues},
    model::{
        Access, Books, Caller, Client, DepthEntries, LetterFilter, LetterPages, Protocol,
        QueueBooks, QueueView, SeenProcess, SeenWorkers,
    },
};

/// From the beginning of a look to the next one: at least this long, and after the look a rest of
/// this many times as long as it took. A page asks every two seconds, so the least is a little less:
/// then many viewers cause hardly more looks than one.
const AT_LEAST: Duration = Duration::from_millis(1900);
const TIMES: u32 = 20;
const AT_MOST: Duration = Duration::from_secs(60);

/// How long a viewer waits for a look, and a look for one of several servers.
const WAITS: Duration = Duration::from_secs(5);
/// How long a look at one thing may take.
const TAKES: Duration = Duration::from_secs(60);

/// Rates are those of the last minute, from counts that are at least this far apart.
const RATES_OVER: Duration = Duration::from_secs(60);
const COUNT_EVERY: Duration = Duration::from_secs(5);
const RATES_FROM: Duration = Duration::from_secs(1);

/// How far back deaths are counted, and up to which number.
const DEAD_WITHIN_MS: i64 = 24 * 3600 * 1000;
pub(super) const MOST_DEAD: usize = 1000;

/// A worker that was heard this lately works on its queues.
pub(super) const HEARD_WITHIN_MS: i64 = 60_000;

/// How long a rest is after something that took so long.
pub(super) fn rest(took: Duration) -> Duration {
    (took * TIMES).min(AT_MOST)
}

/// The answers that the viewers share.
pub(super) struct Looks {
    queues: Shared<Queues>,
    parts: Arc<Parts>,
    books: Shared<AllBooks>,
    workers: Shared<Workers>,
    processes: Shared<Vec<SeenProcess>>,
    dead: Shared<usize>,
    depths: Shared<HashMap<String, Lately>>,
    tasks: TaskTracker,
}

/// All queues, with their rates per second. While SQL or Redis is away, the numbers of the other
/// one go on.
pub(super) struct Queues {
    pub(super) queues: Vec<QueueView>,
    pub(super) rates: HashMap<String, Rates>,
    /// What SQL and Redis have said, and since when they do not.
    pub(super) sql: State,
    pub(super) redis: State,
}

/// The age of an answer.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) at_unix_ms: i64,
    pub(super) failed: Option<(i64, String)>,
}

impl State {
    /// The moment of an old answer.
    pub(super) fn as_of(&self) -> Option<Moment> {
        self.failed.is_some().then(|| Moment::new(self.at_unix_ms))
    }

    /// A class for what comes from there, after others.
    pub(super) fn class(&self) -> &'static str {
        if self.failed.is_some() { " old" } else { "" }
    }
}

/// The books of all queues that have something.
pub(super) struct AllBooks {
    pub(super) books: Books,
    places: HashMap<String, usize>,
}

impl AllBooks {
    fn new(books: Books) -> Self {
        let places = books.queues.iter().enumerate();
        let places = places.map(|(place, of)| (of.queue.to_string(), place));
        Self {
            places: places.collect(),
            books,
        }
    }

    pub(super) fn of(&self, queue: &str) -> Option<&QueueBooks> {
        self.books.queues.get(*self.places.get(queue)?)
    }
}

/// Who works. Each page takes what its viewer may see.
pub(super) struct Workers {
    pub(super) look: WorkersLook,
    pub(super) heard: Heard,
}

/// The workers that were heard lately.
#[derive(Default)]
pub(super) struct Heard {
    /// Their queues.
    pub(super) queues: HashSet<String>,
    pub(super) workers: usize,
    /// There are others, whose queues nobody has told.
    pub(super) has_more: bool,
}

impl Heard {
    pub(super) fn new(seen: &SeenWorkers, now_unix_ms: i64) -> Self {
        let mut heard = Self {
            has_more: seen.more > 0,
            ..Self::default()
        };
        for worker in &seen.workers {
            if now_unix_ms - worker.heard_unix_ms < HEARD_WITHIN_MS {
                heard.workers += 1;
                heard.queues.extend(worker.queues.iter().cloned());
            }
        }
        heard
    }
}

/// How many tasks there were, and each queue lately.
pub(super) struct Depths {
    pub(super) entries: DepthEntries,
    pub(super) queues: Arc<HashMap<String, Lately>>,
}

/// An answer, which may be an old one.
#[derive(Debug)]
pub(super) struct Look<T> {
    pub(super) value: Arc<T>,
    pub(super) at_unix_ms: i64,
    /// Since when the servers do not answer, and why.
    pub(super) failed: Option<(i64, String)>,
}

/// Why a look has no answer.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    kind: Kind,
    why: String,
}

impl Failure {
    pub(super) fn why(&self) -> &str {
        &self.why
    }

    /// No answer in time.
    fn late() -> Self {
        Self {
            kind: Kind::Unavailable,
            why: format!("cannot read now: no answer within {} s", WAITS.as_secs()),
        }
    }
}

impl From<api::Error> for Failure {
    fn from(error: api::Error) -> Self {
        Self {
            kind: error.kind(),
            why: error.to_string(),
        }
    }
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        Self::of_kind(failure.kind, failure.why)
    }
}

/// The last answer, and why there is no newer one.
struct Kept<T> {
    last: Option<(Arc<T>, i64)>,
    failed: Option<(i64, Failure)>,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self {
            last: None,
            failed: None,
        }
    }
}

impl<T> Kept<T> {
    fn keep(&mut self, answer: Result<T, Failure>, now_unix_ms: i64) {
        match answer {
            Ok(value) => {
                self.last = Some((Arc::new(value), now_unix_ms));
                self.failed = None;
            }
            Err(failure) => {
                let since = self.failed.take().map_or(now_unix_ms, |(since, _)| since);
                self.failed = Some((since, failure));
            }
        }
    }

    fn look(&self) -> Result<Look<T>, Failure> {
        let failed = self.failed.as_ref();
        match &self.last {
            Some((value, at_unix_ms)) => Ok(Look {
                value: Arc::clone(value),
                at_unix_ms: *at_unix_ms,
                failed: failed.map(|(since, failure)| (*since, failure.why.clone())),
            }),
            None => Err(failed.map_or_else(Failure::late, |(_, failure)| failure.clone())),
        }
    }
}

struct Shared<T> {
    seen: Arc<Mutex<Seen<T>>>,
    /// Whether all servers that an answer needs have answered.
    is_whole: fn(&T) -> bool,
}

struct Seen<T> {
    kept: Kept<T>,
    next: Instant,
    /// The number of the last look that began, and whether it goes on: it drops the sender.
    number: u64,
    over: Option<watch::Receiver<()>>,
}

impl<T: Send + Sync + 'static> Shared<T> {
    fn new(is_whole: fn(&T) -> bool) -> Self {
        let seen = Seen {
            kept: Kept::default(),
            next: Instant::now(),
            number: 0,
            over: None,
        };
        Self {
            seen: Arc::new(Mutex::new(seen)),
            is_whole,
        }
    }

    /// Returns the last answer, or waits a while for a new one if it is old enough. If that fails,
    /// the last answer stays; without one, the failure is returned.
    async fn get<A>(
        &self,
        tasks: &TaskTracker,
        now_unix_ms: i64,
        ask: impl FnOnce() -> A,
    ) -> Result<Look<T>, Failure>
    where
        A: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        if let Some(mut over) = self.begin(tasks, now_unix_ms, ask) {
            // It ends with an error: the sender is dropped.
            drop(tokio::time::timeout(WAITS, over.changed()).await);
        }
        self.seen.lock().kept.look()
    }

    /// Begins a look if it is time. Returns what to wait for; `None` if what is known is shown.
    fn begin<A>(
        &self,
        tasks: &TaskTracker,
        now_unix_ms: i64,
        ask: impl FnOnce() -> A,
    ) -> Option<watch::Receiver<()>>
    where
        A: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let mut seen = self.seen.lock();
        let goes_on = |over: &watch::Receiver<()>| over.has_changed().is_ok();
        if !seen.over.as_ref().is_some_and(goes_on) {
            if seen.next > Instant::now() {
                return None;
            }
            let (sender, over) = watch::channel(());
            seen.number += 1;
            seen.over = Some(over);
            let number = seen.number;
            let (shared, is_whole, ask) = (Arc::clone(&self.seen), self.is_whole, ask());
            let look = async move {
                let began = Instant::now();
                let answer = ask.await;
                let took = began.elapsed();
                let rested = match &answer {
                    Ok(value) if is_whole(value) => AT_LEAST.max(took + rest(took)),
                    _ => took + AT_LEAST,
                };
                let mut seen = shared.lock();
                if seen.number == number {
                    seen.next = began + rested;
                    seen.kept.keep(answer, now_unix_ms);
                }
                drop((seen, sender));
            };
            tasks.spawn(Box::pin(look));
        }
        let kept = &seen.kept;
        let is_known_to_be_away = kept.last.is_some() && kept.failed.is_some();
        if is_known_to_be_away {
            return None;
        }
        seen.over.clone()
    }

    /// Looks again for the next viewer. A look that goes on may be too old.
    fn forget(&self) {
        let mut seen = self.seen.lock();
        seen.next = Instant::now();
        seen.number += 1;
        seen.over = None;
    }
}

/// What the look at queues knows between two answers.
#[derive(Default)]
struct Parts {
    stored: Mutex<Half<StoredQueues>>,
    held: Mutex<Half<HeldQueues>>,
    counts: Mutex<VecDeque<Counts>>,
}

/// What one of the two servers said. While the other one is away, this one rests as usual.
struct Half<T> {
    kept: Kept<T>,
    /// When it is asked again at the earliest.
    next: Option<Instant>,
    /// How often it was forgotten. An answer from before that is too old.
    number: u64,
}

impl<T> Default for Half<T> {
    fn default() -> Self {
        Self {
            kept: Kept::default(),
            next: None,
            number: 0,
        }
    }
}

impl<T> Half<T> {
    fn forget(&mut self) {
        self.next = None;
        self.number += 1;
    }
}

/// Asks a server, unless it rests: then its last answer stays.
async fn ask_half<T>(
    half: &Mutex<Half<T>>,
    now_unix_ms: i64,
    ask: impl Future<Output = Result<T, api::Error>>,
) -> Result<Look<T>, Failure> {
    let number = {
        let half = half.lock();
        if half.next.is_some_and(|next| next > Instant::now()) {
            return half.kept.look();
        }
        half.number
    };
    let began = Instant::now();
    let answer = within(WAITS, ask).await;
    let rested = match &answer {
        Ok(_) => rest(began.elapsed()),
        Err(_) => AT_LEAST,
    };
    let mut half = half.lock();
    if half.number == number {
        half.next = Some(Instant::now() + rested);
        half.kept.keep(answer, now_unix_ms);
    }
    half.kept.look()
}

/// The totals of each queue at a time.
struct Counts {
    at: Instant,
    totals: HashMap<String, (u64, u64)>,
}

impl Parts {
    async fn look(&self, api: &Api) -> Result<Queues, Failure> {
        let caller = everybody();
        let now = api.now_unix_ms();
        // Together, so that they are of the same moment.
        let (stored, held) = tokio::join!(
            ask_half(&self.stored, now, api.stored_queues(&caller)),
            ask_half(&self.held, now, api.held_queues(&caller))
        );
        let (of_sql, of_redis) = (stored?, held?);
        let queues = merged_queues(&of_sql.value, &of_redis.value, now);
        let are_whole = of_sql.failed.is_none() && of_redis.failed.is_none();
        // After a failure one of them may still rest.
        let rates = if are_whole && of_sql.at_unix_ms == of_redis.at_unix_ms {
            self.rates(&queues, Instant::now())
        } else {
            HashMap::new()
        };
        Ok(Queues {
            queues,
            rates,
            sql: of_sql.into(),
            redis: of_redis.into(),
        })
    }

    /// The rates between the oldest counts of the last minute and these.
    fn rates(&self, queues: &[QueueView], now: Instant) -> HashMap<String, Rates> {
        let totals: HashMap<String, (u64, u64)> = queues
            .iter()
            .map(|view| (view.queue.to_string(), totals(view)))
            .collect();
        let mut counts = self.counts.lock();
        while counts
            .front()
            .is_some_and(|counts| now.duration_since(counts.at) > RATES_OVER)
        {
            counts.pop_front();
        }
        let rates = counts
            .front()
            .filter(|before| now.duration_since(before.at) >= RATES_FROM)
            .map(|before| differences(before, &totals, now))
            .unwrap_or_default();
        let is_time = counts
            .back()
            .is_none_or(|counts| now.duration_since(counts.at) >= COUNT_EVERY);
        if is_time {
            counts.push_back(Counts { at: now, totals });
        }
        rates
    }
}

impl<T> From<Look<T>> for State {
    fn from(look: Look<T>) -> Self {
        Self {
            at_unix_ms: look.at_unix_ms,
            failed: look.failed,
        }
    }
}

async fn within<T>(
    time: Duration,
    ask: impl Future<Output = Result<T, api::Error>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(time, ask).await {
        Ok(answer) => answer.map_err(Failure::from),
        Err(_) => Err(Failure::late()),
    }
}

/// The looks see everything. Each page leaves out what its viewer does not reach.
fn everybody() -> Caller {
    Caller {
        client: Client {
            protocol: Protocol::Http,
            peer: None,
        },
        access: Access::Open,
    }
}

impl Default for Looks {
    fn default() -> Self {
        Self {
            queues: Shared::new(|all| all.sql.failed.is_none() && all.redis.failed.is_none()),
            parts: Arc::default(),
            books: Shared::new(|_| true),
            workers: Shared::new(|_| true),
            processes: Shared::new(|_| true),
            dead: Shared::new(|_| true),
            depths: Shared::new(|_| true),
            tasks: TaskTracker::new(),
        }
    }
}

impl Looks {
    /// Looks at the queues again for the next viewer, who has changed one.
    pub(super) fn forget_queues(&self) {
        self.parts.stored.lock().forget();
        self.parts.held.lock().forget();
        self.queues.forget();
    }

    async fn get<T, A>(
        &self,
        shared: &Shared<T>,
        api: &Arc<Api>,
        ask: impl FnOnce(Arc<Api>) -> A,
    ) -> Result<Look<T>, Failure>
    where
        T: Send + Sync + 'static,
        A: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let ask = || {
            let stop = api.stop.clone();
            let asked = ask(Arc::clone(api));
            async move {
                let answer = stop.run_until_cancelled(asked).await;
                answer.unwrap_or_else(|| Err(Failure::late()))
            }
        };
        shared.get(&self.tasks, api.now_unix_ms(), ask).await
    }

    pub(super) async fn queues(&self, api: &Arc<Api>) -> Result<Look<Queues>, Failure> {
        let parts = Arc::clone(&self.parts);
        let ask = |api: Arc<Api>| async move { parts.look(&api).await };
        self.get(&self.queues, api, ask).await
    }

    pub(super) async fn books(&self, api: &Arc<Api>) -> Result<Look<AllBooks>, Failure> {
        let ask = |api: Arc<Api>| async move {
            let books = within(TAKES, api.books(&everybody(), "")).await?;
            Ok(AllBooks::new(books))
        };
        self.get(&self.books, api, ask).await
    }

    pub(super) async fn workers(&self, api: &Arc<Api>) -> Result<Look<Workers>, Failure> {
        let ask = |api: Arc<Api>| async move {
            let caller = everybody();
            let look = within(TAKES, api.workers_look(&caller, "")).await?;
            let all = look.seen_by(&caller, "")?;
            let heard = Heard::new(&all, api.now_unix_ms());
            Ok(Workers { look, heard })
        };
        self.get(&self.workers, api, ask).await
    }

    pub(super) async fn processes(
        &self,
        api: &Arc<Api>,
    ) -> Result<Look<Vec<SeenProcess>>, Failure> {
        let ask = |api: Arc<Api>| async move { within(TAKES, api.processes(&everybody())).await };
        self.get(&self.processes, api, ask).await
    }

    /// How many tasks died lately, at most [`MOST_DEAD`].
    pub(super) async fn dead(&self, api: &Arc<Api>) -> Result<Look<usize>, Failure> {
        let ask = |api: Arc<Api>| async move {
            let filter = LetterFilter {
                since_unix_ms: Some(api.now_unix_ms() - DEAD_WITHIN_MS),
                ..LetterFilter::default()
            };
            let limit = u32::try_from(MOST_DEAD).unwrap_or(u32::MAX);
            let pages = LetterPages {
                filter,
                limit,
                after: None,
            };
            let dead = within(TAKES, api.letters(&everybody(), Ok(pages))).await?;
            Ok(dead.letters.len())
        };
        self.get(&self.dead, api, ask).await
    }

    pub(super) async fn depths(&self, api: &Arc<Api>) -> Result<Look<Depths>, Failure> {
        let ask = |api: Arc<Api>| async move {
            let entries = within(TAKES, api.all_depths(&everybody())).await?;
            Ok(Lately::of_all(&entries.hour, api.now_unix_ms()))
        };
        let look = self.get(&self.depths, api, ask).await?;
        let depths = Depths {
            // These are large. The API knows them, and forgets them when nobody asks.
            entries: within(WAITS, api.all_depths(&everybody())).await?,
            queues: look.value,
        };
        Ok(Look {
            value: Arc::new(depths),
            at_unix_ms: look.at_unix_ms,
            failed: look.failed,
        })
    }
}

/// All tasks that are counted, and the completed ones.
fn totals(view: &QueueView) -> (u64, u64) {
    let unfinished = view.pending + view.waiting + view.assigned + view.delayed;
    let all = unfinished + view.completed + view.dead + view.cancelled;
    (all, view.completed)
}

fn differences(
    before: &Counts,
    totals: &HashMap<String, (u64, u64)>,
    now: Instant,
) -> HashMap<String, Rates> {
    let seconds = now.duration_since(before.at).as_secs_f64();
    let mut rates = HashMap::new();
    for (queue, (all, completed)) in totals {
        let Some((all_before, completed_before)) = before.totals.get(queue) else {
            continue;
        };
        let rate = Rates {
            inserted: all.saturating_sub(*all_before) as f64 / seconds,
            completed: completed.saturating_sub(*completed_before) as f64 / seconds,
        };
        rates.insert(queue.clone(), rate);
    }
    rates
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Semaphore;

    use super::*;
    use crate::model::QueueName;

    fn away() -> Failure {
        api::Error::Invalid("away".to_owned()).into()
    }

    #[tokio::test]
    async fn viewers_share_an_answer_and_keep_it_while_servers_are_away() {
        let shared: Shared<usize> = Shared::new(|_| true);
        let tasks = TaskTracker::new();
        let asked = Arc::new(AtomicUsize::new(0));
        let ask = || {
            let asked = Arc::clone(&asked);
            async move { Ok(asked.fetch_add(1, Ordering::Relaxed)) }
        };
        let looks = (0..100).map(|_| shared.get(&tasks, 0, ask));
        let looks = futures::future::join_all(looks).await;
        assert!(looks.into_iter().all(|look| *look.unwrap().value == 0));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        shared.forget();
        let look = shared.get(&tasks, 0, || async { Err(away()) }).await;
        let look = look.unwrap();
        assert_eq!((*look.value, look.failed.unwrap().1.as_str()), (0, "away"));
        shared.forget();
        // While it is known that servers are away, nobody waits for the next answer.
        let look = shared.get(&tasks, 0, ask).await.unwrap();
        assert!(look.failed.is_some());
        while shared.get(&tasks, 0, ask).await.unwrap().failed.is_some() {
            tokio::task::yield_now().await;
        }
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn a_failure_is_shared_too_and_rests_shortly_however_long_it_took() {
        let shared: Shared<usize> = Shared::new(|_| true);
        let tasks = TaskTracker::new();
        let asked = Arc::new(AtomicUsize::new(0));
        let ask = || {
            let asked = Arc::clone(&asked);
            async move {
                asked.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(300)).await;
                Err(away())
            }
        };
        let looks = (0..100).map(|_| shared.get(&tasks, 0, ask));
        let looks = futures::future::join_all(looks).await;
        assert!(
            looks
                .into_iter()
                .all(|look| look.unwrap_err().why == "away")
        );
        assert!(shared.get(&tasks, 0, ask).await.is_err(), "without asking");
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        let next = shared.seen.lock().next;
        assert!(next <= Instant::now() + AT_LEAST);
    }

    #[tokio::test]
    async fn a_viewer_who_leaves_does_not_end_a_look() {
        let shared: Shared<usize> = Shared::new(|_| true);
        let tasks = TaskTracker::new();
        let gate = Arc::new(Semaphore::new(0));
        let ask = || {
            let gate = Arc::clone(&gate);
            async move {
                let _open = gate.acquire().await;
                Ok(7)
            }
        };
        let first = shared.get(&tasks, 0, ask);
        assert!(futures::FutureExt::now_or_never(first).is_none());
        gate.add_permits(1);
        let never = || async { panic!("the first look goes on") };
        assert_eq!(*shared.get(&tasks, 0, never).await.unwrap().value, 7);
    }

    #[tokio::test]
    async fn a_server_that_answers_rests_while_the_other_one_is_away() {
        let half: Mutex<Half<usize>> = Mutex::default();
        let answer = |value| async move {
            tokio::time::sleep(Duration::from_millis(200)).await;
            Ok(value)
        };
        let look = ask_half(&half, 1, answer(1)).await.unwrap();
        assert_eq!((*look.value, look.at_unix_ms), (1, 1));
        let look = ask_half(&half, 2, answer(2)).await.unwrap();
        assert_eq!((*look.value, look.at_unix_ms), (1, 1), "without asking");
        half.lock().forget();
        let look = ask_half(&half, 3, answer(3)).await.unwrap();
        assert_eq!((*look.value, look.at_unix_ms), (3, 3));
        half.lock().forget();
        let fails = async { Err(api::Error::Invalid("away".to_owned())) };
        let look = ask_half(&half, 4, fails).await.unwrap();
        assert!(look.failed.is_some());
        assert!(half.lock().next.unwrap() <= Instant::now() + AT_LEAST);
    }

    #[test]
    fn rates_are_those_of_the_last_minute() {
        let looks = Parts::default();
        let view = |waiting, completed| QueueView {
            queue: QueueName::new("q").unwrap(),
            pending: 0,
            waiting,
            assigned: 0,
            delayed: 0,
            leases: 0,
            completed,
            dead: 0,
            cancelled: 0,
            oldest_waiting_ms: None,
            paused: false,
            unread_shards: 0,
        };
        let began = Instant::now();
        assert!(looks.rates(&[view(10, 0)], began).is_empty());
        let after = |seconds| began + Duration::from_secs(seconds);
        let rates = looks.rates(&[view(20, 10)], after(10));
        let want = Rates {
            inserted: 2.0,
            completed: 1.0,
        };
        assert_eq!(rates["q"], want);
        let rates = looks.rates(&[view(20, 10)], after(65));
        let quiet = Rates {
            inserted: 0.0,
            completed: 0.0,
        };
        assert_eq!(rates["q"], quiet, "the first counts are too old");
    }
}
