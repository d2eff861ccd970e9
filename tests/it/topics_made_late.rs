//! Topics whose logs are made, or not, while nobody hears of it.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use taskd::{
    api::declare_topic,
    bus::{Error, Log, LogEnd, LogMessage, LogRecord, Logs, Result, Retention},
    model::{Act, Offset, Topic, TopicName, TopicSettings},
    store::{KeptTopic, Store},
};

use crate::support::{sqlite::SqliteFile, store_contract::Database};

type Meanwhile = (Arc<dyn Store>, [Topic; 2]);

/// Logs of a server that answers the first call for a log with this error, and makes it or not.
struct Late {
    error: Mutex<Option<Error>>,
    is_there: Mutex<bool>,
    /// The numbers of records that logs were changed to keep.
    changed: Mutex<Vec<u64>>,
    /// What another call makes of a topic while a log is changed.
    meanwhile: Mutex<Option<Meanwhile>>,
}

impl Late {
    fn new(error: Error, is_made: bool) -> Self {
        Self {
            error: Mutex::new(Some(error)),
            is_there: Mutex::new(is_made),
            changed: Mutex::default(),
            meanwhile: Mutex::default(),
        }
    }
}

#[async_trait]
impl Logs for Late {
    async fn exists(&self, _log: &Log) -> Result<bool> {
        Ok(*self.is_there.lock() && self.error.lock().is_none())
    }

    async fn make(&self, log: &Log) -> Result<u32> {
        if let Some(error) = self.error.lock().take() {
            return Err(error);
        }
        *self.is_there.lock() = true;
        Ok(log.partitions)
    }

    async fn change(&self, log: &Log) -> Result<()> {
        self.changed.lock().push(log.keep.records);
        let meanwhile = self.meanwhile.lock().take();
        if let Some((store, [known, new])) = meanwhile {
            let act = Act::new("ops", "put topic", "t");
            let kept = store.keep_topic(&new, Some(&known), &act).await.unwrap();
            assert!(matches!(kept, KeptTopic::Yes));
        }
        Ok(())
    }

    async fn delete(&self, _log: &Log) -> Result<()> {
        unreachable!()
    }

    async fn append(&self, _log: &Log, _records: &[LogRecord]) -> Result<Vec<Offset>> {
        unreachable!()
    }

    async fn read(
        &self,
        _log: &Log,
        _partition: u32,
        _after: Option<Offset>,
        _max: usize,
    ) -> Result<Vec<LogMessage>> {
        unreachable!()
    }

    async fn first(&self, _log: &Log) -> Result<Vec<Option<Offset>>> {
        unreachable!()
    }

    async fn ends(&self, _log: &Log) -> Result<Vec<Option<Offset>>> {
        unreachable!()
    }

    async fn counted_ends(&self, _log: &Log) -> Result<Vec<LogEnd>> {
        unreachable!()
    }

    async fn at_time(&self, _log: &Log, _unix_ms: i64) -> Result<Vec<Option<Offset>>> {
        unreachable!()
    }

    async fn trim(&self, _log: &Log, _keep: Retention) -> Result<u64> {
        unreachable!()
    }
}

async fn declare(store: &dyn Store, logs: &Late) -> std::result::Result<(), String> {
    let name = TopicName::new("t").unwrap();
    let settings = TopicSettings {
        retention_age: Duration::from_secs(7),
        ..TopicSettings::default()
    };
    let declared = declare_topic(store, logs, &name, &settings, 1).await;
    declared.map_err(|error| error.to_string())
}

async fn names(store: &dyn Store) -> Vec<String> {
    let topics: Vec<Topic> = store.topics().await.unwrap();
    topics.iter().map(|topic| topic.name.to_string()).collect()
}

#[tokio::test]
async fn a_log_whose_making_was_not_answered_is_taken_by_the_next_call() {
    for is_made in [true, false] {
        let file = SqliteFile::create().await;
        let store = file.try_open().await.unwrap();
        let logs = Late::new(Error::Setup("no answer".into()), is_made);
        let said = declare(&*store, &logs).await.unwrap_err();
        assert!(said.contains("no answer"), "{said}");
        declare(&*store, &logs).await.unwrap();
        assert_eq!(names(&*store).await, ["t"]);
    }
}

#[tokio::test]
async fn a_topic_that_the_server_refuses_is_forgotten_unless_it_is_there() {
    for is_made in [false, true] {
        let file = SqliteFile::create().await;
        let store = file.try_open().await.unwrap();
        let logs = Late::new(Error::NotMade("invalid name".into()), is_made);
        let said = declare(&*store, &logs).await.unwrap_err();
        assert!(said.ends_with("invalid name"), "{said}");
        // Another process may have made it at the same moment.
        let expected: &[&str] = if is_made { &["t"] } else { &[] };
        assert_eq!(names(&*store).await, expected);
    }
}

#[tokio::test]
async fn a_log_has_the_bounds_that_another_call_stored_while_it_was_changed() {
    let file = SqliteFile::create().await;
    let store = file.try_open().await.unwrap();
    let logs = Late::new(Error::Setup("no answer".into()), true);
    declare(&*store, &logs).await.unwrap_err();
    let known = store.topics().await.unwrap().remove(0);
    let mut new = known.clone();
    new.settings.retention_records = 7;
    let before = known.settings.retention_records;
    *logs.meanwhile.lock() = Some((Arc::clone(&store), [known, new]));
    declare(&*store, &logs).await.unwrap();
    assert_eq!(*logs.changed.lock(), [before, 7]);
}
