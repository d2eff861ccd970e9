//! Connections to MariaDB and Kafka that fall silent: nothing closes them, and nothing goes through. taskd works again
//! by itself.

use serde_json::json;

use crate::support::{
    daemon::Daemon,
    kafka::KafkaServer,
    mariadb::MysqlDatabase,
    proxy::{Proxy, Upstream},
    store_contract::Database,
    until,
};

#[tokio::test]
async fn silent_connections_to_mariadb_are_made_anew() {
    let database = MysqlDatabase::create().await;
    let (proxy, mut url) = (Proxy::start().await, url::Url::parse(&database.url()).unwrap());
    proxy.lead_to(Upstream::Tcp(format!("127.0.0.1:{}", url.port().unwrap())));
    url.set_port(Some(proxy.port())).unwrap();
    // So few connections that none may be lost.
    let daemon = Daemon::start("", &["--database-url", url.as_str(), "--database-pool", "2"]).await;
    for round in 0..3 {
        // In the middle of something, whatever it is. The server holds the locks of a silent connection for up to 20 s:
        // until then an insert into the same queue may be told to come again.
        for n in 0..10 {
            let task = json!([{"queue": "q", "key": format!("{round} {n}")}]);
            until("it is stored", async || daemon.post("/v1/tasks", &task).await.0 == 200).await;
        }
        assert!(proxy.silence() > 0);
        daemon.works_again(&format!("after-{round}")).await;
    }
    drop(daemon);
    database.remove().await;
}

#[tokio::test]
async fn silent_connections_to_kafka_are_made_anew() {
    let proxy = Proxy::start().await;
    let kafka = KafkaServer::start_behind(&proxy).await;
    let bus = format!("kafka://{}", kafka.brokers());
    let daemon = Daemon::start("", &["--bus-url", &bus]).await;
    // All connections are there, and all readers have joined: librdkafka waits for minutes for the answer to a join.
    daemon.insert(&[json!({"queue": "q", "key": "first"})]).await;
    daemon.work("w", "q", 1).await;
    until("SQL has the first", async || daemon.queue("q").await["completed"] == 1).await;
    daemon.insert(&[json!({"queue": "q", "key": "before"})]).await;
    assert!(proxy.silence() > 0);
    daemon.works_again("q").await;
}
