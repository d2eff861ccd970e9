//! The entries of a stream that other consumers of the group have had for long.

use std::time::Duration;

use bytes::Bytes;
use redis::{Cmd, RedisResult, Value};

use super::{
    entry::record,
    reply::{self, Entry, array, bytes},
    source::TakenOver,
};
use crate::{
    model::{MoveTo, Offset, PendingAct, PendingRule, RedisStream, millis},
    redis_pool::Connection,
};

/// How many pending entries are looked at at once.
const PAGE: usize = 100;

/// The field or part of a copy that has the id of the entry.
const ID: &str = "id";

/// An entry that a consumer has.
struct Pending {
    id: Offset,
    consumer: Bytes,
    idle: Duration,
    deliveries: u64,
}

/// What is done with the pending entries of a stream.
pub(super) struct Rules<'a> {
    pub(super) settings: &'a RedisStream,
    /// The name of the consumer.
    pub(super) reader: &'a str,
}

impl Rules<'_> {
    /// Looks at the next page of pending entries after `after`. Returns what was taken over, and where
    /// the next page begins; `None`: this was the last one.
    pub(super) async fn apply(
        &self,
        conn: &mut Connection,
        after: Option<Offset>,
    ) -> RedisResult<(TakenOver, Option<Offset>)> {
        let page = self.page(conn, after).await?;
        let next = page.last().map(|last| last.id);
        let next = next.filter(|_| page.len() >= PAGE);
        let mut taken = TakenOver {
            is_more: next.is_some(),
            ..TakenOver::default()
        };
        for pending in page {
            if let Some(rule) = self.rule_of(&pending)
                && let Err(error) = self.act(conn, &pending, rule, &mut taken).await
            {
                // The others may go, and this one is found again.
                let why = format!("a rule of pending fails for {}: {error}", pending.id);
                taken.failed.get_or_insert(why);
            }
        }
        Ok((taken, next))
    }

    fn rule_of(&self, pending: &Pending) -> Option<&PendingRule> {
        // This reader's own wait for their trees.
        if pending.consumer == self.reader.as_bytes() {
            return None;
        }
        self.settings.pending.iter().find(|rule| {
            pending.idle >= rule.idle && pending.deliveries >= u64::from(rule.deliveries)
        })
    }

    async fn page(
        &self,
        conn: &mut Connection,
        after: Option<Offset>,
    ) -> RedisResult<Vec<Pending>> {
        let idle = self.settings.pending.iter().map(|rule| rule.idle).min();
        let mut page = self.command("XPENDING");
        page.arg("IDLE").arg(millis(idle.unwrap_or_default()));
        match after {
            Some(after) => page.arg(format!("({after}")),
            None => page.arg("-"),
        };
        page.arg("+").arg(PAGE);
        let mut entries = Vec::new();
        for entry in array(page.query_async(conn).await?)? {
            let [id, consumer, idle, deliveries] =
                <[Value; 4]>::try_from(array(entry)?).map_err(|_| reply::unexpected())?;
            entries.push(Pending {
                id: reply::offset(id)?,
                consumer: bytes(consumer)?,
                idle: Duration::from_millis(number(idle)?),
                deliveries: number(deliveries)?,
            });
        }
        Ok(entries)
    }

    async fn act(
        &self,
        conn: &mut Connection,
        pending: &Pending,
        rule: &PendingRule,
        taken: &mut TakenOver,
    ) -> RedisResult<()> {
        let id = pending.id;
        let text = id.to_string();
        // Somebody may have taken or finished it since it was looked at: then there is no answer.
        let mut claim = self.command("XCLAIM");
        if rule.act == PendingAct::Claim {
            claim.arg(self.reader).arg(millis(rule.idle)).arg(text);
            for entry in reply::list(claim.query_async(conn).await?)? {
                taken.records.push(record(self.settings, entry, true));
            }
            return Ok(());
        }
        // It stays with its consumer, whose wait begins again: if what follows fails, the rule fits
        // once more after `idle`.
        claim.arg(&pending.consumer[..]).arg(millis(rule.idle));
        claim.arg(&text).arg("JUSTID");
        if array(claim.query_async(conn).await?)?.is_empty() {
            return Ok(());
        }
        let to = match &rule.act {
            PendingAct::Claim | PendingAct::Ack => return self.finish(&text, false, conn).await,
            PendingAct::Delete => return self.finish(&text, true, conn).await,
            PendingAct::Move(to) => to,
        };
        let mut range = redis::cmd("XRANGE");
        range.arg(&self.settings.key).arg(&text).arg(&text);
        let entry = reply::list(range.query_async(conn).await?)?.pop();
        let Some((id, Some(fields))) = entry else {
            // Nothing is left to move.
            return self.finish(&text, false, conn).await;
        };
        let copy = match to {
            MoveTo::Queue(queue) => {
                let moved = record(self.settings, (id, Some(fields)), true);
                taken.to_queues.push((queue.clone(), moved));
                return Ok(());
            }
            MoveTo::Stream(key) => {
                let mut copy = redis::cmd("XADD");
                copy.arg(key).arg("*").arg(ID).arg(&text);
                for (name, value) in &fields {
                    copy.arg(&name[..]).arg(&value[..]);
                }
                copy
            }
            MoveTo::List(key) => {
                let mut copy = redis::cmd("RPUSH");
                copy.arg(key).arg(self.as_text((id, Some(fields))));
                copy
            }
            MoveTo::SortedSet(key) => {
                let mut copy = redis::cmd("ZADD");
                copy.arg(key).arg(id.major);
                copy.arg(self.as_text((id, Some(fields))));
                copy
            }
        };
        // A transaction would acknowledge the entry even if the copy fails.
        copy.query_async::<()>(conn).await?;
        self.finish(&text, false, conn).await
    }

    /// An entry as a JSON object with its id and its fields.
    fn as_text(&self, entry: Entry) -> String {
        let id = entry.0.to_string();
        let all = RedisStream {
            payload: String::new(),
            ..self.settings.clone()
        };
        let content = record(&all, entry, true).content;
        let fields = content.map(|content| content.payload);
        let fields = String::from_utf8_lossy(fields.as_deref().unwrap_or(b"{}")).into_owned();
        format!("{{\"{ID}\":\"{id}\",\"fields\":{fields}}}")
    }

    /// Acknowledges an entry. Deletes it before, because a deleted entry can still be acknowledged.
    async fn finish(&self, id: &str, deletes: bool, conn: &mut Connection) -> RedisResult<()> {
        if deletes || self.settings.delete {
            let mut delete = redis::cmd("XDEL");
            delete.arg(&self.settings.key).arg(id);
            delete.query_async::<()>(conn).await?;
        }
        let mut ack = self.command("XACK");
        ack.arg(id);
        ack.query_async(conn).await
    }

    fn command(&self, name: &str) -> Cmd {
        let mut command = redis::cmd(name);
        command.arg(&self.settings.key).arg(&self.settings.group);
        command
    }
}

fn number(value: Value) -> RedisResult<u64> {
    match value {
        Value::Int(number) => Ok(u64::try_from(number).unwrap_or(0)),
        _ => Err(reply::unexpected()),
    }
}
