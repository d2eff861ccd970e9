//! What all viewers of a process share: one of them asks, the others get the same answer. After an
//! answer nobody asks for 20 times as long as it took, so viewers cost little however many there
//! are, and nothing when nobody looks.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use super::charts::{Lately, Rates};
use crate::{
    api::{self, Api},
    model::{
        Access, Books, Caller, Client, DepthEntries, LetterFilter, LetterPages, Protocol,
        QueueView, SeenProcess, SeenWorkers,
    },
};

/// From the beginning of a look to the next one: at least this long, and after the look a rest of
/// this many times as long as it took. A page asks every two seconds, so the least is a little less:
/// then many viewers cause hardly more looks than one.
const AT_LEAST: Duration = Duration::from_millis(1900);
const TIMES: u32 = 20;
const AT_MOST: Duration = Duration::from_secs(60);

/// Rates are those of the last minute, from counts that are at least this far apart.
const RATES_OVER: Duration = Duration::from_secs(60);
const COUNT_EVERY: Duration = Duration::from_secs(5);
const RATES_FROM: Duration = Duration::from_secs(1);

/// How far back deaths are counted, and up to which number.
const DEAD_WITHIN_MS: i64 = 24 * 3600 * 1000;
pub(super) const MOST_DEAD: usize = 1000;

/// The answers that the viewers share.
#[derive(Default)]
pub(super) struct Looks {
    queues: Shared<Queues>,
    books: Shared<Books>,
    people: Shared<People>,
    depths: Shared<HashMap<String, Lately>>,
    counts: Mutex<VecDeque<Counts>>,
}

/// All queues, with their rates per second.
pub(super) struct Queues {
    pub(super) queues: Vec<QueueView>,
    pub(super) rates: HashMap<String, Rates>,
}

/// Who works, which processes live, and how many tasks died lately.
pub(super) struct People {
    pub(super) workers: SeenWorkers,
    pub(super) processes: Vec<SeenProcess>,
    /// At most [`MOST_DEAD`].
    pub(super) dead: usize,
}

/// How many tasks there were, and each queue lately.
pub(super) struct Depths {
    pub(super) entries: DepthEntries,
    pub(super) queues: Arc<HashMap<String, Lately>>,
}

/// The totals of each queue at a time.
struct Counts {
    at: Instant,
    totals: HashMap<String, (u64, u64)>,
}

/// An answer, which may be an old one.
pub(super) struct Look<T> {
    pub(super) value: Arc<T>,
    pub(super) at_unix_ms: i64,
    /// Since when the servers do not answer, and why.
    pub(super) failed: Option<(i64, String)>,
}

struct Shared<T>(Mutex<Seen<T>>);

struct Seen<T> {
    last: Option<(Arc<T>, i64)>,
    failed: Option<(i64, String)>,
    next: Instant,
}

impl<T> Default for Shared<T> {
    fn default() -> Self {
        Self(Mutex::new(Seen {
            last: None,
            failed: None,
            next: Instant::now(),
        }))
    }
}

impl<T> Shared<T> {
    /// Returns the last answer, or asks if it is old enough. If that fails, the last answer stays;
    /// without one, the failure is returned.
    async fn get(
        &self,
        now_unix_ms: i64,
        ask: impl Future<Output = Result<T, api::Error>>,
    ) -> Result<Look<T>, api::Error> {
        // Others wait for the answer to the first.
        let mut seen = self.0.lock().await;
        if seen.next <= Instant::now() || seen.last.is_none() {
            let began = Instant::now();
            let answer = ask.await;
            let took = began.elapsed();
            seen.next = began + (took + took * TIMES).clamp(AT_LEAST, took + AT_MOST);
            match answer {
                Ok(value) => {
                    seen.last = Some((Arc::new(value), now_unix_ms));
                    seen.failed = None;
                }
                Err(error) if seen.last.is_none() => return Err(error),
                Err(error) => {
                    let since = seen.failed.take().map_or(now_unix_ms, |(since, _)| since);
                    seen.failed = Some((since, error.to_string()));
                }
            }
        }
        let (value, at_unix_ms) = seen.last.as_ref().expect("it was set above");
        Ok(Look {
            value: Arc::clone(value),
            at_unix_ms: *at_unix_ms,
            failed: seen.failed.clone(),
        })
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

impl Looks {
    /// Looks at the queues again for the next viewer, who has changed one.
    pub(super) async fn forget_queues(&self) {
        self.queues.0.lock().await.next = Instant::now();
    }

    pub(super) async fn queues(&self, api: &Api) -> Result<Look<Queues>, api::Error> {
        let ask = async {
            let queues = api.queues(&everybody()).await?;
            let rates = self.rates(&queues, Instant::now()).await;
            Ok(Queues { queues, rates })
        };
        self.queues.get(api.now_unix_ms(), ask).await
    }

    pub(super) async fn books(&self, api: &Api) -> Result<Look<Books>, api::Error> {
        let ask = async { api.books(&everybody(), "").await };
        self.books.get(api.now_unix_ms(), ask).await
    }

    pub(super) async fn people(&self, api: &Api) -> Result<Look<People>, api::Error> {
        let ask = async {
            let caller = everybody();
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
            let dead = api.letters(&caller, Ok(pages)).await?.letters.len();
            Ok(People {
                workers: api.workers(&caller, "").await?,
                processes: api.processes(&caller).await?,
                dead,
            })
        };
        self.people.get(api.now_unix_ms(), ask).await
    }

    pub(super) async fn depths(&self, api: &Api) -> Result<Look<Depths>, api::Error> {
        let now = api.now_unix_ms();
        let ask = async {
            let entries = api.all_depths(&everybody()).await?;
            Ok(Lately::of_all(&entries.hour, now))
        };
        let look = self.depths.get(now, ask).await?;
        let depths = Depths {
            // These are large. The API knows them, and forgets them when nobody asks.
            entries: api.all_depths(&everybody()).await?,
            queues: look.value,
        };
        Ok(Look {
            value: Arc::new(depths),
            at_unix_ms: look.at_unix_ms,
            failed: look.failed,
        })
    }

    /// The rates between the oldest counts of the last minute and these.
    async fn rates(&self, queues: &[QueueView], now: Instant) -> HashMap<String, Rates> {
        let totals: HashMap<String, (u64, u64)> = queues
            .iter()
            .map(|view| (view.queue.to_string(), totals(view)))
            .collect();
        let mut counts = self.counts.lock().await;
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

    use super::*;
    use crate::model::QueueName;

    #[tokio::test]
    async fn viewers_share_an_answer_and_keep_it_while_servers_are_away() {
        let shared: Shared<usize> = Shared::default();
        let asked = AtomicUsize::new(0);
        let ask = || async { Ok(asked.fetch_add(1, Ordering::Relaxed)) };
        let looks = futures::future::join_all((0..100).map(|_| shared.get(0, ask()))).await;
        assert!(looks.into_iter().all(|look| *look.unwrap().value == 0));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        shared.0.lock().await.next = Instant::now();
        let away = async { Err(api::Error::Invalid("away".to_owned())) };
        let look = shared.get(0, away).await.unwrap();
        assert_eq!((*look.value, look.failed.unwrap().1.as_str()), (0, "away"));
        shared.0.lock().await.next = Instant::now();
        let look = shared.get(0, ask()).await.unwrap();
        assert_eq!((*look.value, look.failed), (1, None));
        let never: Shared<usize> = Shared::default();
        let away = async { Err(api::Error::Invalid("away".to_owned())) };
        assert!(never.get(0, away).await.is_err());
    }

    #[tokio::test]
    async fn rates_are_those_of_the_last_minute() {
        let looks = Looks::default();
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
        assert!(looks.rates(&[view(10, 0)], began).await.is_empty());
        let after = |seconds| began + Duration::from_secs(seconds);
        let rates = looks.rates(&[view(20, 10)], after(10)).await;
        let want = Rates {
            inserted: 2.0,
            completed: 1.0,
        };
        assert_eq!(rates["q"], want);
        let rates = looks.rates(&[view(20, 10)], after(65)).await;
        let quiet = Rates {
            inserted: 0.0,
            completed: 0.0,
        };
        assert_eq!(rates["q"], quiet, "the first counts are too old");
    }
}
