//! MariaDB and Kafka as in production: uses the servers of the tests, with a database and topics
//! for each measurement.

use std::{env, path::Path, process::Command, str::FromStr};

use anyhow::{Context, ensure};
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, MySqlConnection, mysql::MySqlConnectOptions,
};
use taskd::bus::{Log, Topic};
use uuid::Uuid;

use crate::redis_server::RedisServer;

/// The servers given by `TASKD_TEST_MYSQL_URL` and `TASKD_TEST_KAFKA`, or else those that the tests
/// start and leave running.
pub(crate) struct Servers {
    mysql: String,
    brokers: String,
    /// Versions and durability, for the report.
    pub(crate) about: String,
}

impl Servers {
    pub(crate) async fn find() -> anyhow::Result<Self> {
        let mysql = named_or_started("TASKD_TEST_MYSQL_URL", "start-mariadb").await?;
        let brokers = named_or_started("TASKD_TEST_KAFKA", "start-kafka").await?;
        let mut conn = connect(&mysql).await?;
        let sql = "SELECT VERSION(), CAST(@@innodb_flush_log_at_trx_commit AS CHAR)";
        let (version, flush): (String, String) = sqlx::query_as(sql).fetch_one(&mut conn).await?;
        conn.close().await?;
        let about = format!("{version} (innodb_flush_log_at_trx_commit {flush})");
        Ok(Self {
            mysql,
            brokers,
            about,
        })
    }
}

async fn named_or_started(variable: &str, script: &'static str) -> anyhow::Result<String> {
    if let Some(named) = env::var(variable).ok().filter(|named| !named.is_empty()) {
        return Ok(named);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("scripts")
        .join(script);
    let output = tokio::task::spawn_blocking(|| Command::new(path).output()).await??;
    ensure!(
        output.status.success(),
        "{script}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let said = String::from_utf8(output.stdout)?;
    Ok(said
        .lines()
        .last()
        .with_context(|| format!("{script} says no address"))?
        .to_owned())
}

pub(crate) async fn connect(url: &str) -> anyhow::Result<MySqlConnection> {
    Ok(MySqlConnectOptions::from_str(url)?
        .disable_statement_logging()
        .connect()
        .await?)
}

/// The topic for measuring a producer alone, which is the limit of Kafka.
pub(crate) const LIMIT: &str = "limit";

/// The database and topics for one taskd, and a redis-server.
pub(crate) struct Place<'a> {
    servers: &'a Servers,
    /// The name of the database, and the prefix of the topics.
    name: String,
    pub(crate) redis: RedisServer,
}

impl<'a> Place<'a> {
    pub(crate) async fn make(servers: &'a Servers) -> anyhow::Result<Self> {
        let name = format!("taskd_bench_{}", Uuid::now_v7().simple());
        let place = Self {
            servers,
            name,
            redis: RedisServer::start().await?,
        };
        place
            .on_server(format!("CREATE DATABASE {}", place.name))
            .await?;
        Ok(place)
    }

    pub(crate) fn database_url(&self) -> anyhow::Result<String> {
        let mut url = url::Url::parse(&self.servers.mysql)?;
        url.set_path(&self.name);
        Ok(url.into())
    }

    pub(crate) fn brokers(&self) -> &str {
        &self.servers.brokers
    }

    /// The full name of a topic in Kafka.
    pub(crate) fn topic(&self, name: impl std::fmt::Display) -> String {
        format!("{}.{name}", self.name)
    }

    /// The arguments of a taskd on these servers.
    pub(crate) fn arguments(&self) -> anyhow::Result<Vec<String>> {
        let bus = format!("kafka://{}", self.brokers());
        let prefix = self.topic("");
        let pairs = [
            ("--redis-url", self.redis.url()),
            ("--database-url", &self.database_url()?),
            ("--bus-url", &bus),
            ("--topic-prefix", &prefix),
        ];
        Ok(pairs
            .into_iter()
            .flat_map(|(name, value)| [name.to_owned(), value.to_owned()])
            .collect())
    }

    async fn on_server(&self, sql: String) -> anyhow::Result<()> {
        let mut conn = connect(&self.servers.mysql).await?;
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await?;
        Ok(conn.close().await?)
    }

    /// Creates a topic with one partition, as taskd does.
    pub(crate) async fn create_topic(&self, name: &str) -> anyhow::Result<()> {
        let topic = NewTopic::new(name, 1, TopicReplication::Fixed(-1));
        let results = self
            .admin()?
            .create_topics([&topic], &AdminOptions::new())
            .await?;
        results
            .into_iter()
            .try_for_each(|result| result.map(drop).map_err(|(_, code)| code))?;
        Ok(())
    }

    fn admin(&self) -> anyhow::Result<AdminClient<DefaultClientContext>> {
        Ok(ClientConfig::new()
            .set("bootstrap.servers", self.brokers())
            .create()?)
    }

    /// Drops the database and the topics, so that the servers are as before.
    pub(crate) async fn remove(self) -> anyhow::Result<()> {
        self.on_server(format!("DROP DATABASE {}", self.name))
            .await?;
        let topics: Vec<String> = Topic::ALL
            .iter()
            .map(|topic| self.topic(topic))
            .chain(Log::REPORTS.map(|log| self.topic(log.name)))
            .chain([self.topic(LIMIT)])
            .collect();
        let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
        // Ignore missing topics: after an error, not all of them exist.
        self.admin()?
            .delete_topics(&topics, &AdminOptions::new())
            .await?;
        Ok(())
    }
}
