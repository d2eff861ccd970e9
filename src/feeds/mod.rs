//! Feeds: sources outside of taskd whose records open trees.
//!
//! A record that a feed has handed out comes again, in this process or in another one, until it is
//! acknowledged. Whoever reads a feed recognises it by its reference.

mod entry;
mod pending;
mod redis_list;
mod redis_stream;
mod reply;
mod source;

pub use self::source::{Error, Feed, FeedContent, FeedRecord, Result, TakenOver};
use crate::{
    config::RedisAccess,
    model::{FeedSettings, FeedSource},
    redis_pool::Redis,
};

/// Refuses settings with which no source can be used.
pub fn check(settings: &FeedSettings) -> Result<()> {
    match &settings.source {
        FeedSource::Topic { .. } => Ok(()),
        FeedSource::RedisStream(stream) => check_url(&stream.url),
        FeedSource::RedisList(list) => check_url(&list.url),
    }
}

/// The source of a feed; `None` if a subscription reads it.
pub fn feed(settings: &FeedSettings) -> Option<Box<dyn Feed>> {
    let reader = settings.name.as_str();
    match &settings.source {
        FeedSource::Topic { .. } => None,
        FeedSource::RedisStream(stream) => {
            let stream = redis_stream::Stream::new(stream.clone(), reader, settings.ack);
            Some(Box::new(stream))
        }
        FeedSource::RedisList(list) => {
            let list = redis_list::List::new(list.clone(), reader, settings.ack);
            Some(Box::new(list))
        }
    }
}

fn check_url(url: &str) -> Result<()> {
    // Its own error is about taskd's Redis.
    let checked = Redis::check_settings(url, &RedisAccess::default());
    checked.map_err(|_| Error::Url)
}
