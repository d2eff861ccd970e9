//! Subscriptions on the other backends: Kafka with MariaDB, and a Redis Cluster.

use crate::support::{
    daemon::Daemon,
    kafka,
    mariadb::MysqlDatabase,
    redis_cluster::{self, own_prefix},
    store_contract::Database as _,
    subscriptions::three_groups_hear_of_each_record,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_groups_hear_of_each_record_on_kafka_and_mariadb() {
    let database = MysqlDatabase::create().await;
    let bus = format!("kafka://{}", kafka::shared().await);
    let topics = format!("{}.", own_prefix());
    let args = ["--database-url", &database.url(), "--bus-url", &bus];
    let more = ["--topic-prefix", &topics, "--partitions", "1"];
    let mut daemon = Daemon::start("", &[&args[..], &more[..]].concat()).await;
    three_groups_hear_of_each_record(&mut daemon).await;
    assert!(daemon.stop().await.success());
    database.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_groups_hear_of_each_record_on_a_redis_cluster() {
    let cluster = redis_cluster::shared().await;
    let prefix = own_prefix();
    let args = ["--redis-url", cluster, "--redis-prefix", &prefix];
    let mut daemon = Daemon::start("", &[&args[..], &["--partitions", "1"]].concat()).await;
    three_groups_hear_of_each_record(&mut daemon).await;
    assert!(daemon.stop().await.success());
}
