//! Kafka by TLS and password.

use std::{collections::BTreeMap, fs, path::Path};

use taskd::bus::{Bus, Error, Reading, Topic, kafka::Kafka};

use crate::{
    bus_kafka::Broker,
    support::{
        bus_contract::{commit, publish, read, subscribe, values, within},
        daemon::Daemon,
        kafka::KafkaServer,
        redis::{Fsync, RedisServer},
    },
};

fn properties(mechanism: &str, ca: &Path, password: &str) -> BTreeMap<String, String> {
    let all = [
        ("security.protocol", "SASL_SSL"),
        ("ssl.ca.location", ca.to_str().expect("a path in UTF-8")),
        ("sasl.mechanism", mechanism),
        ("sasl.username", "taskd"),
        ("sasl.password", password),
    ];
    all.map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_go_by_tls_and_password_and_who_is_refused_is_told_why() {
    let server = KafkaServer::start_secured().await;
    let broker = Broker::new(&server.secured_brokers());
    let open = async |mechanism: &str, ca: &Path, password: &str| {
        let mut config = broker.config();
        config.properties = properties(mechanism, ca, password);
        within("open", Kafka::open(config)).await
    };
    for mechanism in ["SCRAM-SHA-512", "PLAIN"] {
        let bus = open(mechanism, &server.ca(), "let me in")
            .await
            .expect("the password is right");
        publish(&bus, Topic::Pipeline, &[(0, mechanism)]).await;
        let mut reader = subscribe(&bus, Topic::Pipeline, Reading::Ordered).await;
        let messages = read(&mut *reader, 1).await;
        assert_eq!(values(&messages), [mechanism]);
        commit(&mut *reader, &messages).await;
        bus.close().await;
    }
    let refused = async |ca: &Path, password: &str| match open("SCRAM-SHA-512", ca, password).await
    {
        Err(Error::Misconfigured(reason)) => reason.to_string(),
        other => panic!("should be refused: {:?}", other.map(|_| ())),
    };
    let reason = refused(&server.ca(), "let me out").await;
    assert!(reason.contains("Authentication failed"), "{reason}");
    let other = tempfile::tempdir().expect("a folder");
    let other_ca = other.path().join("ca.pem");
    let args = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=another",
        "-keyout",
        "/dev/null",
        "-out",
    ];
    let made = std::process::Command::new("openssl")
        .args(args)
        .arg(&other_ca)
        .output()
        .expect("openssl runs");
    assert!(made.status.success());
    let reason = refused(&other_ca, "let me in").await;
    assert!(
        reason.contains("verify") && reason.contains("ssl.ca.location"),
        "{reason}"
    );
    let reason = refused(Path::new("/no/such.pem"), "let me in").await;
    assert!(reason.contains("ssl.ca.location"), "{reason}");

    through_the_binary(&server).await;
}

/// The same by configuration file, with the password in a file of its own.
async fn through_the_binary(server: &KafkaServer) {
    let redis = RedisServer::start(Fsync::Always);
    let dir = tempfile::tempdir().expect("a folder");
    let secret = dir.path().join("password");
    let config = |ca: &Path| {
        format!(
            "redis_url = {:?}\nbus_url = \"kafka://{}\"\ntopic_prefix = \"binary.\"\n[kafka]\nsecurity.protocol = \
             \"SASL_SSL\"\n\
             ssl.ca.location = {ca:?}\nsasl.mechanism = \"SCRAM-SHA-512\"\nsasl.username = \
             \"taskd\"\n\"sasl.password.file\" = {secret:?}\n",
            redis.url(),
            server.secured_brokers(),
        )
    };
    fs::write(&secret, "let me out\n").expect("the folder is ours");
    let mut refused = Daemon::begin(&config(&server.ca()), &[]);
    assert_eq!(refused.ended().await.code(), Some(1));
    let log = refused.log();
    let last = log.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("taskd: kafka at 127.0.0.1:") && last.contains("Authentication failed"),
        "{log}"
    );
    assert!(!log.contains("let me out"), "{log}");

    fs::write(&secret, "let me in\n").expect("the folder is ours");
    let mut daemon = Daemon::start(&config(&server.ca()), &[]).await;
    daemon
        .insert(&[serde_json::json!({"queue": "q", "key": "k"})])
        .await;
    assert_eq!(daemon.drain("w", "q").await, ["k"]);
    assert!(daemon.stop().await.success());
}
