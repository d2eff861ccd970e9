//! Items of somebody else's list go into a hash beside it.

use redis::Value;
use taskd::redis_pool::scripts;

use super::{Fixture, flat};

const ITEMS: [&str; 5] = ["a", "b", "c", "d", "e"];

impl Fixture {
    async fn redis(&self, command: &[&str]) -> Value {
        let mut run = redis::cmd(command[0]);
        run.arg(&command[1..]);
        run.query_async(&mut self.redis.conn()).await.unwrap()
    }

    /// A list of five items, and a hash from which three were taken before.
    async fn list(&self) {
        self.redis(&["DEL", "list", "hash"]).await;
        self.redis(&[&["RPUSH", "list"][..], &ITEMS].concat()).await;
        self.redis(&["HSET", "hash", "number", "3"]).await;
    }

    /// Takes items. Returns the answer, or what the script says.
    async fn take(&self, most: &str, pop: &str, keeps: &str) -> Result<Vec<String>, String> {
        let mut take = scripts::FEED_TAKE.call(&["list", "hash"]);
        take.arg(most).arg(pop).arg(keeps);
        let taken = take.run(&mut self.redis.conn()).await;
        let taken = taken.map_err(|error| error.to_string())?;
        Ok(without_times(flat(taken)))
    }

    async fn holds(&self, list: &[&str], hash: &[&str]) {
        let state = self.state().await;
        let list: Vec<String> = list.iter().map(ToString::to_string).collect();
        assert_eq!(state.get("list").cloned().unwrap_or_default(), list);
        let mut found = without_times(state.get("hash").cloned().unwrap_or_default());
        found.sort();
        assert_eq!(found, hash);
        let others = state
            .keys()
            .filter(|key| !["list", "hash"].contains(&&***key));
        assert_eq!(others.collect::<Vec<_>>(), ["generation"]);
    }
}

/// Takes the time out of the fields of items.
fn without_times(fields: Vec<String>) -> Vec<String> {
    let fields = fields.into_iter();
    let fields = fields.map(|field| match field.split_once('-') {
        Some((time, number)) => {
            assert!(time.len() == 13 && time.parse::<u64>().is_ok(), "{field}");
            number.to_owned()
        }
        None => field,
    });
    fields.collect()
}

#[tokio::test]
async fn taken_items_go_from_either_end_into_the_hash() {
    let f = Fixture::new().await;
    f.list().await;
    let taken = f.take("2", "LPOP", "1").await.unwrap();
    assert_eq!(taken, ["4", "a", "5", "b"]);
    f.holds(&["c", "d", "e"], &["4=a", "5=b", "number=5"]).await;
    let taken = f.take("2", "RPOP", "1").await.unwrap();
    assert_eq!(taken, ["6", "e", "7", "d"]);
    let hash = ["4=a", "5=b", "6=e", "7=d", "number=7"];
    f.holds(&["c"], &hash).await;
    let taken = f.take("2", "RPOP", "0").await.unwrap();
    assert_eq!(taken, ["8", "c"], "and nobody keeps it");
    let hash = ["4=a", "5=b", "6=e", "7=d", "number=8"];
    f.holds(&[], &hash).await;
    assert_eq!(f.take("2", "LPOP", "1").await.unwrap(), [""; 0]);
    f.holds(&[], &hash).await;

    f.list().await;
    f.redis(&["DEL", "hash"]).await;
    assert_eq!(f.take("2", "LPOP", "1").await.unwrap(), ["nil"]);
    f.holds(&ITEMS, &[]).await;
}

#[tokio::test]
async fn a_take_that_fails_leaves_the_items_in_the_list() {
    let f = Fixture::new().await;
    f.list().await;
    f.redis(&["HSET", "hash", "number", "many"]).await;
    let error = f.take("2", "LPOP", "1").await.unwrap_err();
    assert!(error.contains("not an integer"), "{error}");
    f.holds(&ITEMS, &["number=many"]).await;

    for (denied, number) in [("hincrby", "3"), ("hset", "5"), ("ltrim", "3")] {
        f.list().await;
        let rule = format!("-{denied}");
        f.redis(&["ACL", "SETUSER", "default", &rule]).await;
        let error = f.take("2", "LPOP", "1").await.unwrap_err();
        assert!(error.contains("can't run"), "{denied}: {error}");
        let rule = format!("+{denied}");
        f.redis(&["ACL", "SETUSER", "default", &rule]).await;
        let hash = format!("number={number}");
        f.holds(&ITEMS, &[hash.as_str()]).await;
    }
}
