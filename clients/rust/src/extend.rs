//! Extends leases, in calls as large as taskd accepts.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use backon::BackoffBuilder as _;
use tokio::time::{Instant, sleep};

use crate::{
    client::WAITS,
    error::Error,
    event::{Event, Tell},
    held::Number,
    pb,
    source::Source,
};

/// Leases per call, unless taskd accepts fewer (its setting `max_items`).
pub(crate) const MOST_EXTENSIONS: usize = 500;

pub(crate) type Extended = Result<Vec<(Number, pb::ItemResult)>, Error>;

/// Extends all of them; retries transient errors until `until`. `most` is the number of leases per
/// call; it is halved if taskd finds a call too large.
pub(crate) async fn extend_all<S: Source>(
    source: &S,
    all: Vec<(Number, pb::Extension)>,
    most: &AtomicUsize,
    tell: &Tell,
    until: Instant,
) -> Extended {
    let mut extended = Vec::with_capacity(all.len());
    let mut done = 0;
    while done < all.len() {
        let count = most.load(Ordering::Relaxed).clamp(1, all.len() - done);
        let (numbers, extensions): (Vec<_>, Vec<_>) =
            all.iter().skip(done).take(count).cloned().unzip();
        let mut waits = WAITS.build();
        loop {
            match source.extend(extensions.clone()).await {
                Ok(results) => {
                    extended.extend(numbers.into_iter().zip(results));
                    done += count;
                    break;
                }
                // Give up: the next regular extension is due soon.
                Err(error) if error.may_pass() && Instant::now() > until => {
                    done += count;
                    break;
                }
                Err(error) if error.may_pass() => tell(Event::Away(&error)),
                Err(error) if error.is_of_items() && count > 1 => {
                    most.store(count / 2, Ordering::Relaxed);
                    break;
                }
                Err(error) => return Err(error),
            }
            sleep(waits.next().unwrap_or(Duration::from_secs(1))).await;
        }
    }
    Ok(extended)
}
