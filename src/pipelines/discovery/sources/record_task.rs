//! The task that a record of a feed becomes.

use std::collections::HashMap;

use crate::{
    feeds::FeedContent,
    model::{
        FeedAck, FeedRef, FeedSettings, NewTask, NewTree, Offset, QueueName, TaskId, TaskTree,
        Topology, feed_task_id,
    },
    pipelines::discovery::feeds::{encoding, put},
};

/// Makes the root of the tree that a record opens, and its id. An error is one line: the stage cannot
/// have the task.
pub(super) fn record_task(
    topology: &Topology,
    feed: &FeedSettings,
    run: u64,
    at: Offset,
    content: FeedContent,
) -> Result<(TaskId, NewTask), String> {
    let queue = &topology.stages[feed.into].queue;
    let (id, mut task) = task_of(feed, run, at, content, queue);
    let hears_of_end = feed.ack == FeedAck::Done;
    task.tree = Some(Box::new(TaskTree::Root(NewTree {
        feed: hears_of_end.then(|| FeedRef {
            feed: feed.name.clone(),
            reference: reference_in(run, at),
        }),
        ..NewTree::default()
    })));
    topology.complete_insert(feed.into, &mut task)?;
    Ok((id, task))
}

/// Makes the task of a record in this queue, in no tree, and its id.
pub(super) fn task_of(
    feed: &FeedSettings,
    run: u64,
    at: Offset,
    content: FeedContent,
    queue: &QueueName,
) -> (TaskId, NewTask) {
    let id = feed_task_id(&feed.name, &feed.source.identity(), run, at);
    let mut headers = HashMap::new();
    for (name, value) in &content.attributes {
        // Somebody else's record could name another place.
        if !name.starts_with("taskd-") {
            put(&mut headers, name, value);
        }
    }
    let reference = at.to_string();
    put(&mut headers, "taskd-feed", feed.name.as_str().as_bytes());
    put(&mut headers, "taskd-feed-record", reference.as_bytes());
    let task = NewTask {
        id: Some(id),
        queue: queue.as_str().to_owned(),
        // It takes no key; this only chooses its shard.
        key: reference.into(),
        payload_encoding: encoding(&content.payload),
        payload: content.payload,
        headers,
        ..NewTask::default()
    };
    (id, task)
}

/// The reference of a tree's record, as SQL has it.
pub(super) fn reference_in(run: u64, at: Offset) -> String {
    format!("{run}:{at}")
}

/// Reads the record of such a reference.
pub(super) fn reference_of(text: &str) -> Option<Offset> {
    text.split_once(':')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::TreeOnDead;

    const FILE: &str = "name = \"t\"\non_dead = \"ignore\"\n\
         [feed.f]\ntype = \"redis_stream\"\nurl = \"redis://h\"\nkey = \"k\"\ninto = \"a\"\nack = \"done\"\n\
         [stage.a]\nstart = true\nmax_attempts = 2\n";

    #[test]
    fn a_record_opens_a_tree_with_the_same_id_each_time() {
        let topology = Topology::read(FILE).unwrap();
        let feed = &topology.feeds[0];
        let content = FeedContent {
            payload: "{\"a\": 1}".into(),
            attributes: vec![
                ("lang".to_owned(), "en".into()),
                ("taskd-feed".to_owned(), "forged".into()),
            ],
        };
        let at = Offset {
            major: 1_700_000_000_123,
            minor: 4,
        };
        let make = |run, at| record_task(&topology, feed, run, at, content.clone()).unwrap();
        let other = Topology::read(&FILE.replace("\"k\"", "\"other\"")).unwrap();
        let of_other = record_task(&other, &other.feeds[0], 7, at, content.clone()).unwrap();
        assert_ne!(of_other.0, make(7, at).0, "it reads another key");
        let (id, task) = make(7, at);
        assert_eq!(make(7, at), (id, task.clone()));
        assert_ne!(make(8, at).0, id, "the source has lost its data");
        assert_eq!(id.created_unix_ms(), 1_700_000_000_123);
        assert!(make(7, Offset { minor: 5, ..at }).0 > id);
        assert_eq!(task.headers["taskd-feed"], "t.f");
        assert_eq!(task.headers["taskd-feed-record"], "1700000000123-4");
        assert_eq!(task.headers["lang"], "en");
        assert_eq!(task.max_attempts, Some(2));
        let Some(TaskTree::Root(tree)) = task.tree.as_deref() else {
            panic!("{task:?}");
        };
        assert_eq!(tree.on_dead, Some(TreeOnDead::Ignore));
        let reference = &tree.feed.as_ref().unwrap().reference;
        assert_eq!(*reference, reference_in(7, at));
        assert_eq!(reference_of(reference), Some(at));
    }
}
