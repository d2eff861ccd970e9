//! MariaDB, Kafka and a Redis Cluster. Each taskd has a database, topics and keys of its own.

use crate::support::{
    daemon::Daemon, kafka, mariadb::MysqlDatabase, redis_cluster, store_contract::Database as _,
};

pub(crate) async fn start(config: &str, args: &[&str]) -> Daemon {
    let (database, cluster) = (
        MysqlDatabase::create().await.url(),
        redis_cluster::shared().await,
    );
    let (bus, name) = (
        format!("kafka://{}", kafka::shared().await),
        redis_cluster::own_prefix(),
    );
    let topics = format!("{name}.");
    let mut all = vec![
        "--database-url",
        &database,
        "--redis-url",
        cluster,
        "--redis-prefix",
        &name,
    ];
    all.extend(["--bus-url", &bus, "--topic-prefix", &topics]);
    // A topic costs the broker something for each partition.
    if !config.contains("partitions = ") {
        all.extend(["--partitions", "2"]);
    }
    all.extend(args);
    Daemon::start(config, &all).await
}
