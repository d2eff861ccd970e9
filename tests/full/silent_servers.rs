//! Connections to MariaDB and Kafka that fall silent: nothing closes them, and nothing goes
//! through. taskd works again by itself.

use std::time::Duration;

use serde_json::json;
use tokio::time::timeout;

use crate::support::{
    daemon::Daemon,
    kafka::KafkaServer,
    mariadb::MysqlDatabase,
    proxy::{Mode, Proxy, Upstream},
    store_contract::Database,
    until,
};

/// A proxy before the database, and its URL.
pub(crate) async fn way_to(database: &MysqlDatabase) -> (Proxy, url::Url) {
    let (proxy, mut url) = (
        Proxy::start().await,
        url::Url::parse(&database.url()).unwrap(),
    );
    proxy.lead_to(Upstream::Tcp(format!("127.0.0.1:{}", url.port().unwrap())));
    url.set_port(Some(proxy.port())).unwrap();
    (proxy, url)
}

#[tokio::test]
async fn silent_connections_to_mariadb_are_made_anew() {
    let database = MysqlDatabase::create().await;
    let (proxy, url) = way_to(&database).await;
    // So few connections that none may be lost.
    let daemon = Daemon::start(
        "",
        &["--database-url", url.as_str(), "--database-pool", "2"],
    )
    .await;
    for round in 0..3 {
        // In the middle of something, whatever it is. The server holds the locks of a silent
        // connection for up to 20 s: until then an insert into the same queue may be told to come
        // again.
        for n in 0..10 {
            let task = json!([{"queue": "q", "key": format!("{round} {n}")}]);
            until("it is stored", async || {
                daemon.post("/v1/tasks", &task).await.0 == 200
            })
            .await;
        }
        assert!(proxy.silence() > 0);
        daemon.works_again(&format!("after-{round}")).await;
    }
    drop(daemon);
    database.remove().await;
}

#[tokio::test]
async fn a_start_asks_again_where_mariadb_takes_its_connection_and_says_nothing() {
    let database = MysqlDatabase::create().await;
    let (proxy, url) = way_to(&database).await;
    proxy.set(Mode::Stall);
    let mut daemon = Daemon::begin("", &["--database-url", url.as_str()]);
    until("it has connected", async || proxy.silence() > 0).await;
    proxy.set(Mode::Pass);
    daemon.ready().await;
    drop(daemon);
    database.remove().await;
}

#[tokio::test]
async fn inserts_do_not_wait_for_a_kafka_that_is_away() {
    let proxy = Proxy::start().await;
    let kafka = KafkaServer::start_behind(&proxy).await;
    let bus = format!("kafka://{}", kafka.brokers());
    let mut daemon = Daemon::start("republish_after = \"1s\"", &["--bus-url", &bus]).await;
    daemon
        .insert(&[json!({"queue": "q", "key": "first"})])
        .await;
    proxy.set(Mode::Refuse);
    // Kafka's client gives a record up after half a minute, and eight batches may wait for that.
    let inserts = async {
        for n in 0..40 {
            daemon
                .insert(&[json!({"queue": "q", "key": n.to_string()})])
                .await;
        }
    };
    timeout(Duration::from_secs(60), inserts)
        .await
        .expect("SQL has them");
    proxy.set(Mode::Pass);
    assert_eq!(daemon.drain("w", "q").await.len(), 41);
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn silent_connections_to_kafka_are_made_anew() {
    let proxy = Proxy::start().await;
    let kafka = KafkaServer::start_behind(&proxy).await;
    let bus = format!("kafka://{}", kafka.brokers());
    let daemon = Daemon::start("", &["--bus-url", &bus]).await;
    // All connections are there, and all readers have joined: librdkafka waits for minutes for the
    // answer to a join.
    daemon
        .insert(&[json!({"queue": "q", "key": "first"})])
        .await;
    daemon.work("w", "q", 1).await;
    until("SQL has the first", async || {
        daemon.queue("q").await["completed"] == 1
    })
    .await;
    daemon
        .insert(&[json!({"queue": "q", "key": "before"})])
        .await;
    assert!(proxy.silence() > 0);
    daemon.works_again("q").await;
}
