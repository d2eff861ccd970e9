//! Books that do not add up, made inside taskd's own Redis.

use redis::AsyncCommands as _;
use serde_json::json;

use crate::{
    columns::books::{CONFIG, taskd, until_books},
    support::daemon::Daemon,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_redis_forgot_unbalances_the_books() {
    let daemon = Daemon::start(CONFIG, &[]).await;
    daemon.insert(&[json!({"queue": "q", "key": "a"}), json!({"queue": "q", "key": "b"})]).await;
    until_books(&daemon, "q", |books| books["state"] == "BALANCED" && books["held"]["redis"]["live"] == 2).await;
    let mut redis = daemon.redis().await;
    let counters: Vec<String> = redis.keys("*:counters").await.unwrap();
    for key in counters {
        if redis.hget::<_, _, Option<i64>>(&key, "live").await.unwrap().unwrap_or(0) > 0 {
            redis.hincr::<_, _, _, ()>(&key, "live", -1).await.unwrap();
            break;
        }
    }
    let books = until_books(&daemon, "q", |books| books["state"] == "UNBALANCED").await;
    assert_eq!(books["held"]["between"], 1);
    let (code, table) = taskd(&daemon, &["q"]);
    assert_eq!(code, 1, "{table}");
}
