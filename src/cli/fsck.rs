//! `taskd fsck`: finds where SQL, the bus and Redis do not agree, and repairs it, over gRPC.

use std::collections::BTreeSet;

use anyhow::bail;
use clap::Args;
use serde_json::json;

use super::{
    ask::printable,
    client::Server,
    named::AnyQueue,
    patience::patiently,
    print::{NotThere, print, say},
};
use crate::wire::pb::{self, operator_client::OperatorClient};

/// Find where SQL, the bus and Redis of a running taskd do not agree, and mend it
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd fsck                      check everything, and change nothing
  taskd fsck crawl                the shards and tasks of one queue
  taskd fsck --repair             mend what is found, while taskd runs

A line per difference: its kind, queue and shard, the task, what is wrong, and what a repair does. \
Tasks that move are no difference. If the command breaks off, repeat it: it finds the rest.
Exit code: 0 if nothing was found or all was mended, 1 if something was found or could not be \
looked at, or nothing of the queue is there, 2 if the request is wrong or the server cannot be reached.")]
pub struct Fsck {
    #[command(flatten)]
    queue: AnyQueue,

    /// Mend what is found
    #[arg(long)]
    repair: bool,

    /// Print a JSON object per difference
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

/// Checks page by page. Returns true if nothing is left to repair or to check.
pub(super) async fn run(args: Fsck) -> anyhow::Result<bool> {
    // Checking a large shard is one call, which takes minutes.
    let taskd = args.server.connect_for_long_calls().await?;
    let client = OperatorClient::new(taskd).max_decoding_message_size(64 << 20);
    let mut request = pb::FsckRequest {
        queue: args.queue.name().unwrap_or_default().to_owned(),
        repair: args.repair,
        cursor: String::new(),
    };
    let mut found = 0;
    let mut mended = 0;
    let mut more = 0;
    let mut shards = 0;
    let mut tasks = 0;
    let mut unchecked = 0;
    let mut unchecked_shards = BTreeSet::new();
    loop {
        let page = patiently(async || client.clone().fsck(request.clone()).await)
            .await?
            .into_inner();
        for find in &page.finds {
            let line = if args.json {
                json_line(find)
            } else {
                line(find)
            };
            print(line)?;
            found += 1;
            mended += u64::from(find.mended);
        }
        // `more` counts findings that the page does not list. A page repairs all of its findings or
        // none.
        found += page.more;
        mended += if args.repair { page.more } else { 0 };
        more += page.more;
        unchecked += page.unchecked;
        for pb::UncheckedShard { queue, shard, says } in page.unchecked_shards {
            if unchecked_shards.insert((queue.clone(), shard)) {
                say(printable(&format!("cannot check {queue}:{shard}: {says}")));
            }
        }
        shards += page.shards;
        tasks += page.tasks;
        if page.cursor.is_empty() {
            break;
        }
        request.cursor = page.cursor;
    }
    if let Some(queue) = args
        .queue
        .name()
        .filter(|_| shards == 0 && tasks == 0 && found == 0 && unchecked_shards.is_empty())
    {
        let why = format!(
            "queue {queue} has no shard and no published task; taskd stats lists the queues"
        );
        bail!(NotThere(why));
    }
    say(format_args!(
        "{shards} shards and {tasks} published tasks checked: {found} differences, {mended} mended"
    ));
    if more > 0 {
        say(format_args!(
            "{more} of them have no line: a part of the answer shows 5,000"
        ));
    }
    if unchecked > 0 {
        say(format_args!(
            "{unchecked} suspected tasks, or counts in SQL, could not be looked at; run taskd fsck again"
        ));
    }
    if !unchecked_shards.is_empty() {
        say(format_args!(
            "{} shards could not be checked; run taskd fsck again",
            unchecked_shards.len()
        ));
    }
    Ok(found == mended && unchecked == 0 && unchecked_shards.is_empty())
}

fn line(find: &pb::FsckFind) -> String {
    let pb::FsckFind {
        kind,
        queue,
        shard,
        task_id,
        says,
        repair,
        mended,
    } = find;
    let shard = shard.map(|shard| format!(":{shard}")).unwrap_or_default();
    let task = if task_id.is_empty() {
        String::new()
    } else {
        format!(" {task_id}")
    };
    let end = if *mended {
        format!("mended: {repair}")
    } else {
        format!("a repair {repair}")
    };
    printable(&format!("{kind} {queue}{shard}{task}: {says}; {end}"))
}

fn json_line(find: &pb::FsckFind) -> String {
    let pb::FsckFind {
        kind,
        queue,
        shard,
        task_id,
        says,
        repair,
        mended,
    } = find;
    let mut object =
        json!({"kind": kind, "queue": queue, "says": says, "repair": repair, "mended": mended});
    if let Some(shard) = shard {
        object["shard"] = json!(shard);
    }
    if !task_id.is_empty() {
        object["task"] = json!(task_id);
    }
    object.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_a_line() {
        let mut find = pb::FsckFind {
            kind: "lost_payload".into(),
            queue: "q".into(),
            shard: Some(3),
            task_id: "t".into(),
            says: "0 bytes\u{7}".into(),
            repair: "publishes it again".into(),
            mended: false,
        };
        assert_eq!(
            line(&find),
            "lost_payload q:3 t: 0 bytes\\u{7}; a repair publishes it again"
        );
        find.mended = true;
        find.shard = None;
        find.task_id.clear();
        assert_eq!(
            line(&find),
            "lost_payload q: 0 bytes\\u{7}; mended: publishes it again"
        );
        assert!(!json_line(&find).contains("task"), "{}", json_line(&find));
    }
}
