//! The depths of all queues in the last hour and in the last day: a list of entries for each, which
//! the process that does the watchdog's work extends.

use redis::AsyncCommands as _;

use super::{Coordination, Result};
use crate::{
    model::{DepthEntry, DepthSpan},
    runtime::compute,
};

/// How many entries are read at a time: at most 360 kB, so that other callers of the connection
/// wait only briefly.
const PAGE: usize = 30;
/// The first page of a reader that knows all entries but the last ones.
const FIRST_PAGE: usize = 3;
/// What is parsed at once, in bytes.
const QUICKLY: usize = 40_000;

/// The last entries of a span, in the order in which they were written.
#[derive(Debug, Default)]
pub struct LastDepths {
    pub entries: Vec<DepthEntry>,
    /// True if they follow the entry that the reader knows; false if they are all entries.
    pub follow: bool,
}

impl Coordination {
    /// Adds the last entry of each of these spans and removes their first ones, all or nothing.
    pub async fn add_depths(&self, spans: &[DepthSpan], entry: &DepthEntry) -> Result<()> {
        let value = serde_json::to_string(entry).unwrap_or_default();
        let mut pipe = redis::pipe();
        pipe.atomic();
        for span in spans {
            let key = self.depths_key(*span);
            let entries = isize::try_from(span.entries()).unwrap_or(isize::MAX);
            pipe.rpush(&key, &value)
                .ignore()
                .ltrim(&key, -entries, -1)
                .ignore()
                .pexpire(&key, 2 * span.ms())
                .ignore();
        }
        Ok(pipe.query_async(&mut self.redis.conn()).await?)
    }

    /// The last entry of a span.
    pub async fn last_depths(&self, span: DepthSpan) -> Result<Option<DepthEntry>> {
        let last: Option<String> = self.redis.conn().lindex(self.depths_key(span), -1).await?;
        Ok(last.and_then(|text| read(&text)))
    }

    /// The entries of a span that were written after the one of the time `known`, or all of them if
    /// that one is not there.
    pub async fn depths_after(&self, span: DepthSpan, known: Option<i64>) -> Result<LastDepths> {
        let key = self.depths_key(span);
        let most = usize::try_from(span.entries()).unwrap_or(0);
        let mut last_first: Vec<DepthEntry> = Vec::new();
        let mut follow = false;
        let mut passed = 0;
        let mut size = if known.is_some() { FIRST_PAGE } else { PAGE };
        while passed < most && !follow {
            let from = -isize::try_from(passed + size).unwrap_or(isize::MAX);
            let to = -isize::try_from(passed + 1).unwrap_or(isize::MAX);
            let page: Vec<String> = self.redis.conn().lrange(&key, from, to).await?;
            let has_more = page.len() == size;
            for entry in parse(page).await.into_iter().rev() {
                if Some(entry.at_unix_ms) == known {
                    follow = true;
                    break;
                }
                // An entry that is added meanwhile moves the others to the next page.
                let is_new = |other: &DepthEntry| other.at_unix_ms != entry.at_unix_ms;
                if last_first.iter().all(is_new) {
                    last_first.push(entry);
                }
            }
            if !has_more {
                break;
            }
            passed += size;
            size = PAGE;
        }
        last_first.reverse();
        Ok(LastDepths {
            entries: last_first,
            follow,
        })
    }

    fn depths_key(&self, span: DepthSpan) -> String {
        format!("{}:{{depths}}:{}", self.redis.prefix(), span.as_str())
    }
}

/// A page, as Redis has it and parsed.
struct Page {
    texts: Vec<String>,
    entries: Vec<DepthEntry>,
}

/// Parses a page, and a large one not on the threads that serve requests.
async fn parse(texts: Vec<String>) -> Vec<DepthEntry> {
    let page = Page {
        texts,
        entries: Vec::new(),
    };
    let quickly = |page: &mut Page| {
        let bytes: usize = page.texts.iter().map(String::len).sum();
        bytes <= QUICKLY && parse_all(page)
    };
    compute(page, quickly, parse_all).await.entries
}

fn parse_all(page: &mut Page) -> bool {
    page.entries = page.texts.iter().filter_map(|text| read(text)).collect();
    true
}

/// A later version may write what this one cannot read.
fn read(text: &str) -> Option<DepthEntry> {
    serde_json::from_str(text).ok()
}
