//! `taskd topic`: topics of a running taskd, and their records.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use axum::body::Bytes;
use clap::{Args, Subcommand};
use hyper::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use url::form_urlencoded;

use super::{
    address::Server,
    ask::{ask, ask_with, printable, read},
    print::{self, print, print_one, say},
    values::header,
};
use crate::config::{ByteSize, Time};

/// How long a call of `--follow` waits for a record.
const WAIT: &str = "20s";
/// The most lines of a call.
const LINES: usize = 1000;
/// How long to wait before a record that the topic does not take now is published again.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// The most bytes of the lines of a call, unless it has only one.
const CALL_BYTES: usize = 4 << 20;
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);

const JSON: &str = "application/json";
const NDJSON: &str = "application/x-ndjson";

/// Make, list and delete topics, publish records, and read them
#[derive(Args)]
#[command(
    arg_required_else_help = false,
    after_help = "\
Examples:
  taskd topic put orders --partitions 4 --retention-age 7days
  taskd topic publish orders '{\"id\": 7}' --key customer-3 --attribute lang=en
  taskd topic publish orders --file records.ndjson           each line is a record, such as
      {\"key\": \"customer-3\", \"value\": {\"id\": 7}, \"attributes\": {\"lang\": \"en\"}}
  taskd topic read orders --from -1h                         the records of the last hour
  taskd topic read orders --from '$' --follow | jq .value    the records from now on

Exit code: 0, or 1 if there is no such topic or a record was rejected, 2 if the server cannot be reached or the \
request is wrong."
)]
pub struct Topic {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Put(Put),
    List(List),
    Show(Show),
    Delete(Delete),
    Publish(Publish),
    Read(ReadTopic),
}

/// Make a topic, or change its settings; those that are left out stay
#[derive(Args)]
struct Put {
    /// Name of the topic: 1 to 64 characters of A-Z a-z 0-9 . _ -
    topic: String,
    /// Number of partitions, 1 to 256; never fewer than now [default: 1]
    #[arg(long, value_name = "N")]
    partitions: Option<u32>,
    /// How long a record stays [default: 1day]
    #[arg(long, value_name = "TIME")]
    retention_age: Option<Time>,
    /// How many records stay, in all partitions together [default: 1000000]
    #[arg(long, value_name = "N")]
    retention_records: Option<u64>,
    /// How many bytes of records stay, in all partitions together [default: 512MiB]
    #[arg(long, value_name = "SIZE")]
    retention_bytes: Option<ByteSize>,
    /// Attach a topic that somebody else has made on Kafka: taskd never makes, trims or deletes it
    #[arg(long)]
    attached: bool,
    #[command(flatten)]
    server: Server,
}

/// List the topics
#[derive(Args)]
struct List {
    /// Print a JSON object for each topic
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: Server,
}

/// Show a topic, and the first and last offset of each partition, as a JSON object
#[derive(Args)]
struct Show {
    /// Name of the topic
    topic: String,
    #[command(flatten)]
    server: Server,
}

/// Delete a topic with its records
#[derive(Args)]
struct Delete {
    /// Name of the topic
    topic: String,
    #[command(flatten)]
    server: Server,
}

/// Publish a record, or a file of records
#[derive(Args)]
struct Publish {
    /// Name of the topic
    topic: String,
    /// The record: JSON, or else a text
    #[arg(
        value_name = "VALUE",
        required_unless_present = "file",
        conflicts_with = "file"
    )]
    value: Option<String>,
    /// A file with a record in JSON per line; - is stdin
    #[arg(long, value_name = "FILE", conflicts_with_all = ["key", "attribute", "id"])]
    file: Option<PathBuf>,
    /// Records with the same key keep their order
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// An attribute; may be repeated, also with the same name
    #[arg(long, value_name = "NAME=VALUE", value_parser = header)]
    attribute: Vec<(String, String)>,
    /// What tells a repeat from another record
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    #[command(flatten)]
    server: Server,
}

/// Print records, a JSON object each
#[derive(Args)]
struct ReadTopic {
    /// Name of the topic
    topic: String,
    /// 0 (the first record), $ (the next), after an offset (PARTITION:OFFSET, with commas between
    /// several), a time in RFC 3339, or -1h
    #[arg(
        long,
        value_name = "PLACE",
        default_value = "0",
        allow_hyphen_values = true
    )]
    from: String,
    /// Only this partition
    #[arg(long, value_name = "N")]
    partition: Option<u32>,
    /// Go on with the records that come later
    #[arg(long, short)]
    follow: bool,
    #[command(flatten)]
    server: Server,
}

/// Does it. False if there is no such topic, or a record was rejected.
pub(super) async fn run(args: Topic) -> anyhow::Result<bool> {
    match args.command {
        Command::Put(put) => self::put(put).await,
        Command::List(list) => self::list(list).await,
        Command::Show(show) => {
            let server = show.server.port()?;
            let Some((_, topic)) = ask::<Value>(&server, &path(&show.topic, "")).await? else {
                return Ok(false);
            };
            print(format_args!("{topic:#}"))?;
            Ok(true)
        }
        Command::Delete(delete) => {
            let server = delete.server.port()?;
            let path = path(&delete.topic, "");
            Ok(ask_with(&server, Method::DELETE, &path, None)
                .await?
                .is_some())
        }
        Command::Publish(publish) => self::publish(publish).await,
        Command::Read(read) => self::read_topic(read).await,
    }
}

/// The path of a topic, or of something of it.
fn path(topic: &str, of: &str) -> String {
    let encoded: String = form_urlencoded::byte_serialize(topic.as_bytes()).collect();
    format!("/v1/topics/{}{of}", encoded.replace('+', "%20"))
}

async fn put(put: Put) -> anyhow::Result<bool> {
    let server = put.server.port()?;
    let mut settings = serde_json::Map::new();
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            settings.insert(name.to_owned(), value);
        }
    };
    set("partitions", put.partitions.map(Value::from));
    set(
        "retention_age",
        put.retention_age.map(|age| age.to_string().into()),
    );
    set("retention_records", put.retention_records.map(Value::from));
    set(
        "retention_bytes",
        put.retention_bytes.map(|size| size.0.into()),
    );
    set("attached", put.attached.then_some(true.into()));
    let body = (JSON, serde_json::to_vec(&settings)?.into());
    let answer = ask_with(&server, Method::PUT, &path(&put.topic, ""), Some(body)).await?;
    if let Some(body) = &answer {
        print(String::from_utf8_lossy(body))?;
    }
    Ok(answer.is_some())
}

#[derive(Deserialize)]
struct Topics {
    topics: Vec<Value>,
}

async fn list(list: List) -> anyhow::Result<bool> {
    let server = list.server.port()?;
    let Some((_, Topics { topics })) = ask(&server, "/v1/topics").await? else {
        return Ok(false);
    };
    if list.json {
        for topic in topics {
            print(topic)?;
        }
        return Ok(true);
    }
    let mut table = print::table(["topic", "partitions", "age", "records", "bytes"]);
    for topic in &topics {
        let cell = |name: &str| match &topic[name] {
            Value::String(text) => printable(text),
            other => other.to_string(),
        };
        table.add_row([
            cell("name"),
            cell("partitions"),
            cell("retention_age"),
            cell("retention_records"),
            cell("retention_bytes"),
        ]);
    }
    print::print_table(&table)?;
    Ok(true)
}

async fn publish(publish: Publish) -> anyhow::Result<bool> {
    let server = publish.server.port()?;
    let path = path(&publish.topic, "/records");
    let lines = match &publish.file {
        Some(file) => lines_of(file)?,
        None => {
            let text = publish.value.unwrap_or_default();
            let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
            let mut attributes = serde_json::Map::new();
            for (name, value) in publish.attribute {
                let values = attributes.entry(name).or_insert_with(|| json!([]));
                values
                    .as_array_mut()
                    .expect("it was made as an array")
                    .push(value.into());
            }
            let record = json!({
                "value": value,
                "key": publish.key.unwrap_or_default(),
                "attributes": attributes,
                "id": publish.id.unwrap_or_default(),
            });
            vec![(1, record.to_string())]
        }
    };
    let mut is_all_stored = true;
    let mut last_stored = Instant::now();
    let mut lines = lines.into_iter().peekable();
    while lines.peek().is_some() {
        let mut left = Vec::new();
        let mut bytes = 0;
        while let Some(line) = lines.next_if(|(_, line)| {
            left.is_empty() || left.len() < LINES && bytes + line.len() < CALL_BYTES
        }) {
            bytes += line.1.len() + 1;
            left.push(line);
        }
        while !left.is_empty() {
            let body: Vec<&str> = left.iter().map(|(_, line)| line.as_str()).collect();
            let body: Bytes = body.join("\n").into();
            let answer = ask_with(&server, Method::POST, &path, Some((NDJSON, body))).await?;
            let Some(answer) = answer else {
                return Ok(false);
            };
            let answers: Vec<&[u8]> = answer
                .split(|byte| *byte == b'\n')
                .filter(|answer| !answer.is_empty())
                .collect();
            if answers.len() != left.len() {
                bail!(
                    "{} of {} records have an answer; the others may be stored or not",
                    answers.len(),
                    left.len()
                );
            }
            let mut again = Vec::new();
            for ((number, line), answer) in left.into_iter().zip(answers) {
                let published: Value = read(&server, answer)?;
                match published["status"].as_str() {
                    Some("TRY_LATER") => again.push((number, line)),
                    Some("STORED") => {
                        last_stored = Instant::now();
                        print_one(published)?;
                    }
                    _ => {
                        is_all_stored = false;
                        let why = published["error"].as_str().unwrap_or_default();
                        // The line is that of the call.
                        let why = why.split_once(": ").map_or(why, |(_, why)| why);
                        say(format_args!("taskd: line {number}: {}", printable(why)));
                    }
                }
            }
            left = again;
            if left.is_empty() {
                continue;
            }
            if last_stored.elapsed() > GIVE_UP_AFTER {
                bail!("gave up: the topic has taken no record for a minute");
            }
            tokio::time::sleep(AGAIN_AFTER).await;
        }
    }
    Ok(is_all_stored)
}

/// The lines of a file or of stdin with their numbers, without blank ones.
fn lines_of(file: &Path) -> anyhow::Result<Vec<(u64, String)>> {
    let mut text = String::new();
    if file == Path::new("-") {
        std::io::stdin()
            .read_to_string(&mut text)
            .context("cannot read stdin")?;
    } else {
        text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
    }
    let lines = (1..).zip(text.lines().map(str::to_owned));
    Ok(lines.filter(|(_, line)| !line.trim().is_empty()).collect())
}

#[derive(Deserialize)]
struct Page {
    records: Vec<Value>,
    next: String,
}

async fn read_topic(args: ReadTopic) -> anyhow::Result<bool> {
    let server = args.server.port()?;
    let mut from = args.from;
    loop {
        let mut query = form_urlencoded::Serializer::new(String::new());
        query.append_pair("from", &from);
        query.append_pair("limit", "1000");
        if let Some(partition) = args.partition {
            query.append_pair("partition", &partition.to_string());
        }
        if args.follow {
            query.append_pair("wait", WAIT);
        }
        let path = path(&args.topic, &format!("/records?{}", query.finish()));
        let Some((_, page)) = ask::<Page>(&server, &path).await? else {
            return Ok(false);
        };
        for record in &page.records {
            print_one(record)?;
        }
        if page.records.is_empty() && !args.follow {
            return Ok(true);
        }
        from = page.next;
    }
}
