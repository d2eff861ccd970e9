//! The entries of a stream that other consumers of the group have had for long.

use std::time::Duration;

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
    is_own: bool,
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
            if let Some(rule) = self.rule_of(&pending) {
                self.act(conn, pending.id, rule, &mut taken).await?;
            }
        }
        Ok((taken, next))
    }

    fn rule_of(&self, pending: &Pending) -> Option<&PendingRule> {
        // This reader's own wait for their trees.
        if pending.is_own {
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
                is_own: bytes(consumer)? == self.reader.as_bytes(),
                idle: Duration::from_millis(number(idle)?),
                deliveries: number(deliveries)?,
            });
        }
        Ok(entries)
    }

    async fn act(
        &self,
        conn: &mut Connection,
        id: Offset,
        rule: &PendingRule,
        taken: &mut TakenOver,
    ) -> RedisResult<()> {
        let text = id.to_string();
        let to = match &rule.act {
            PendingAct::Claim => {
                let mut claim = self.command("XCLAIM");
                // Somebody may have taken or finished it meanwhile: then there is no answer.
                claim.arg(self.reader).arg(millis(rule.idle)).arg(text);
                for entry in reply::list(claim.query_async(conn).await?)? {
                    taken.records.push(record(self.settings, entry, true));
                }
                return Ok(());
            }
            PendingAct::Ack => return self.finish(Vec::new(), &text, false, conn).await,
            PendingAct::Delete => return self.finish(Vec::new(), &text, true, conn).await,
            PendingAct::Move(to) => to,
        };
        let mut range = redis::cmd("XRANGE");
        range.arg(&self.settings.key).arg(&text).arg(&text);
        let entry = reply::list(range.query_async(conn).await?)?.pop();
        let Some((id, Some(fields))) = entry else {
            // Nothing is left to move.
            return self.finish(Vec::new(), &text, false, conn).await;
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
        self.finish(vec![copy], &text, false, conn).await
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

    /// Copies an entry and acknowledges it, in one step.
    async fn finish(
        &self,
        copies: Vec<Cmd>,
        id: &str,
        deletes: bool,
        conn: &mut Connection,
    ) -> RedisResult<()> {
        let mut step = redis::pipe();
        step.atomic();
        for copy in copies {
            step.add_command(copy).ignore();
        }
        let mut ack = self.command("XACK");
        ack.arg(id);
        step.add_command(ack).ignore();
        if deletes || self.settings.delete {
            step.cmd("XDEL").arg(&self.settings.key).arg(id).ignore();
        }
        step.query_async(conn).await
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
