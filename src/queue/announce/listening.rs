//! The exchange with Redis: which queues are watched, and the channels of announcements.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use futures::{StreamExt, future};
use tokio::time::MissedTickBehavior;

use super::{
    announcer::Announcer,
    watchers::{Interest, News},
};
use crate::{
    model::{QueueName, millis},
    queue::{
        error::{Error, Result},
        keys,
        wakes::{PING_EVERY, in_time},
    },
    runtime::{Loop, tick},
    telemetry::metrics,
    wire,
};

/// How often a process reads which queues are watched.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long a queue stays watched after its last renewal, and how often it is renewed.
const LEASE: Duration = Duration::from_secs(15);
const RENEW_EVERY: Duration = Duration::from_secs(5);
/// How soon to retry if a gap could not be published.
const TELL_GAPS_EVERY: Duration = Duration::from_secs(1);
/// How many gaps are published concurrently.
const GAPS_AT_ONCE: usize = 256;
/// The most announcements in one message.
const MESSAGE: usize = 1_000;

impl Announcer {
    /// Publishes what was announced, at each tick. A message without changes tells all processes of
    /// a gap.
    ///
    /// Crash window: if the process is killed after a message failed and before the message of its
    /// gap, the watchers of a queue miss those changes without notice. Watchers of tasks also ask
    /// SQL and Redis.
    pub(in crate::queue) async fn publish(&self, cx: &Loop) -> Result<()> {
        loop {
            let has_gaps = !self.0.gaps.lock().is_empty();
            tokio::select! {
                () = cx.idle(self.0.announced.notified()) => tick().await,
                () = tokio::time::sleep(TELL_GAPS_EVERY), if has_gaps => {}
                () = cx.stop.cancelled() => {}
            }
            let gaps = std::mem::take(&mut *self.0.gaps.lock());
            let waiting = std::mem::take(&mut *self.0.waiting.lock());
            let messages = waiting.iter().flat_map(|(queue, news)| {
                news.chunks(MESSAGE).map(move |news| {
                    (
                        keys::events_channel(self.0.redis.prefix(), queue),
                        queue,
                        news,
                    )
                })
            });
            let sent = messages.map(|(channel, queue, news)| async move {
                let news_of = news
                    .iter()
                    .map(|news| (news.id, news.status, news.at_unix_ms));
                let message = wire::status_changes(queue, news_of);
                let mut publish = redis::cmd("PUBLISH");
                publish.arg(channel).arg(&message[..]);
                let sent = publish.exec_async(&mut self.0.redis.conn()).await;
                if sent.is_err() {
                    metrics::events_dropped(news.len());
                }
                sent.map_err(|error| (queue.clone(), error))
            });
            // A loss is not serious: announcements are hints, and watchers also ask SQL and Redis.
            for (queue, error) in future::join_all(sent)
                .await
                .into_iter()
                .filter_map(std::result::Result::err)
            {
                tracing::debug!("could not announce what happened to tasks: {error}");
                self.0.gaps.lock().insert(queue);
            }
            self.tell_gaps(gaps, cx).await;
            cx.beat();
            if cx.stop.is_cancelled() {
                return Ok(());
            }
        }
    }

    /// Notifies the watchers of queues, in all processes, of gaps. Keeps gaps that cannot be
    /// published now.
    async fn tell_gaps(&self, gaps: HashSet<QueueName>, cx: &Loop) {
        let gaps: Vec<QueueName> = gaps.into_iter().collect();
        for gaps in gaps.chunks(GAPS_AT_ONCE) {
            let told = gaps.iter().map(|queue| async move {
                let mut publish = redis::cmd("PUBLISH");
                publish.arg(keys::events_channel(self.0.redis.prefix(), queue));
                publish.arg(&wire::status_changes(queue, std::iter::empty())[..]);
                publish.exec_async(&mut self.0.redis.conn()).await.is_ok()
            });
            let told = future::join_all(told).await;
            let untold = gaps.iter().zip(told).filter(|(_, is_told)| !is_told);
            self.0
                .gaps
                .lock()
                .extend(untold.map(|(queue, _)| queue.clone()));
            cx.beat();
        }
    }

    /// Keeps the wanted queues up to date: tells Redis what this process watches, and reads what
    /// all processes do.
    pub(in crate::queue) async fn keep_wanted(&self, cx: &Loop) -> Result<()> {
        let key = keys::watched(self.0.redis.prefix());
        let mut renewed: HashMap<(QueueName, Interest), Instant> = HashMap::new();
        loop {
            let own = self.0.watchers.watched();
            renewed.retain(|(queue, interest), at| {
                own.get(queue) == Some(interest) && at.elapsed() < RENEW_EVERY
            });
            let due = own
                .iter()
                .filter(|(queue, interest)| !renewed.contains_key(&((*queue).clone(), **interest)));
            let due: Vec<(QueueName, Interest)> = due
                .map(|(queue, interest)| (queue.clone(), *interest))
                .collect();
            let now = self.now_unix_ms();
            let lease = millis(LEASE);
            if !due.is_empty() {
                // Remove entries that have expired, and those in the far future, which a clock that
                // was since set back has left.
                let mut old = redis::cmd("ZREMRANGEBYSCORE");
                let mut far = redis::cmd("ZREMRANGEBYSCORE");
                let mut add = redis::cmd("ZADD");
                old.arg(&key).arg("-inf").arg(now - lease);
                far.arg(&key).arg(now + 2 * lease).arg("+inf");
                add.arg(&key);
                for (queue, interest) in &due {
                    add.arg(now + lease).arg(entry(queue, *interest));
                }
                for command in [old, far, add] {
                    command.exec_async(&mut self.0.redis.conn()).await?;
                }
                let at = Instant::now();
                renewed.extend(due.into_iter().map(|entry| (entry, at)));
            }
            let mut read = redis::cmd("ZRANGEBYSCORE");
            read.arg(&key).arg(now).arg(now + 2 * lease);
            let entries: Vec<String> = read.query_async(&mut self.0.redis.conn()).await?;
            self.set_wanted(entries.iter().filter_map(|entry| read_entry(entry)));
            cx.beat();
            tokio::select! {
                () = self.0.look.notified() => {}
                more = cx.pause(LOOK_EVERY) => if !more { return Ok(()) },
            }
        }
    }

    fn set_wanted(&self, of_all: impl Iterator<Item = (QueueName, Interest)>) {
        let mut wanted = self.0.wanted.write();
        // Read under the lock, so that a watcher that registers now is in one of the two.
        let own = self.0.watchers.watched();
        let mut all: HashMap<QueueName, Interest> = own;
        for (queue, interest) in of_all {
            let known = all.entry(queue).or_insert(interest);
            *known = (*known).max(interest);
        }
        self.0
            .is_wanted
            .store(!all.is_empty(), std::sync::atomic::Ordering::Relaxed);
        *wanted = all;
    }

    /// Receives announcements while this process has watchers, until the stop. Returns an error if
    /// the connection ends.
    pub(in crate::queue) async fn listen(&self, cx: &Loop) -> Result<()> {
        loop {
            while self.0.watchers.watched().is_empty() {
                tokio::select! {
                    () = cx.idle(self.0.watchers.changed()) => {}
                    () = cx.stop.cancelled() => return Ok(()),
                }
            }
            let heard = self.hear_while_watched(cx).await;
            self.0.watchers.hears_nothing();
            if heard? {
                return Ok(());
            }
        }
    }

    /// Receives announcements while anything is watched. Returns true at the stop.
    async fn hear_while_watched(&self, cx: &Loop) -> Result<bool> {
        let (mut sink, mut messages) = self.0.redis.pubsub().await?.split();
        let prefix = keys::events_channel_prefix(self.0.redis.prefix());
        let mut ping = tokio::time::interval(PING_EVERY);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if self.0.watchers.watched().is_empty() {
                return Ok(false);
            }
            for queue in self.0.watchers.unheard() {
                in_time(sink.subscribe(keys::events_channel(self.0.redis.prefix(), &queue)))
                    .await?;
                self.0.watchers.hears(queue);
            }
            for queue in self.0.watchers.take_left() {
                in_time(sink.unsubscribe(keys::events_channel(self.0.redis.prefix(), &queue)))
                    .await?;
            }
            loop {
                let message = tokio::select! {
                    message = cx.idle(messages.next()) => message,
                    () = self.0.watchers.changed() => break,
                    _ = ping.tick() => {
                        // Without a ping, a connection whose server vanished looks like one on
                        // which nothing happens.
                        in_time(sink.ping::<redis::Value>()).await?;
                        break;
                    }
                    () = cx.stop.cancelled() => return Ok(true),
                };
                self.take_in(&message.ok_or(Error::WakesClosed)?, &prefix);
            }
        }
    }

    /// Passes a message on to the watchers.
    fn take_in(&self, message: &redis::Msg, prefix: &str) {
        let queue = message
            .get_channel_name()
            .strip_prefix(prefix)
            .and_then(|name| QueueName::new(name).ok());
        let news = wire::read_status_changes(message.get_payload_bytes());
        match (queue, news) {
            (Some(queue), Ok(news)) if news.is_empty() => self.0.watchers.missed(&queue),
            (Some(queue), Ok(news)) => {
                let news = news.into_iter().map(|(id, status, at_unix_ms)| News {
                    id,
                    status,
                    at_unix_ms,
                });
                self.0.watchers.hear(&queue, news.collect());
            }
            (_, news) => tracing::warn!(
                "ignored an announcement that cannot be read: {:?}",
                news.err()
            ),
        }
    }
}

/// An entry of `<p>:watched`.
fn entry(queue: &QueueName, interest: Interest) -> String {
    let kind = match interest {
        Interest::Ends => "ends",
        Interest::All => "all",
    };
    format!("{kind}:{queue}")
}

fn read_entry(entry: &str) -> Option<(QueueName, Interest)> {
    let (kind, queue) = entry.split_once(':')?;
    let interest = match kind {
        "ends" => Interest::Ends,
        _ => Interest::All,
    };
    Some((QueueName::new(queue).ok()?, interest))
}
