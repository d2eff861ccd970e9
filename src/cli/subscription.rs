//! `taskd subscription`: subscriptions of a running taskd.

use anyhow::Context as _;
use axum::body::Bytes;
use clap::{Args, Subcommand};
use hyper::Method;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use url::form_urlencoded;

use super::{
    address::Server,
    ask::{ask, ask_with, printable},
    print::{self, print},
};

const JSON: &str = "application/json";

/// Make, list, move and delete subscriptions, which turn records of topics into tasks
#[derive(Args)]
#[command(
    arg_required_else_help = false,
    after_help = "\
Examples:
  taskd subscription put mailer --topic orders                  tasks of queue mailer, from now on
  taskd subscription put audit --topic 'orders.*' --start 0     all topics that begin so
  taskd subscription put eu --topic orders --match '{\"region\": {\"prefix\": \"eu-\"}}'
  taskd subscription list                                       what is behind, and what is done
  taskd subscription seek mailer --to -1h                       the records of the last hour again

Exit code: 0, or 1 if there is no such subscription or topic, 2 if the server cannot be reached or the request is \
wrong."
)]
pub struct Subscription {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Put(Put),
    List(List),
    Show(Show),
    Seek(Seek),
    Delete(Delete),
}

/// Make a subscription, or change it; what is left out stays
#[derive(Args)]
struct Put {
    /// Name of the subscription: 1 to 64 characters of A-Z a-z 0-9 . _ -
    subscription: String,
    /// The topic that it reads, or all that begin so: PREFIX*
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// The queue of its tasks [default: the queue with its name]
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// Where it begins when it is made: 0, $, an offset, a time in RFC 3339, or -1h [default: $]
    #[arg(long, value_name = "PLACE", allow_hyphen_values = true)]
    start: Option<String>,
    /// What a record must have, in JSON: {"NAME": ["VALUE", {"prefix": "V"}, {"exists": true}]};
    /// NAME is an attribute or $key
    #[arg(long = "match", value_name = "JSON")]
    matching: Option<String>,
    /// none, or key: tasks of records with the same key go one after the other [default: none]
    #[arg(long, value_name = "BY")]
    sequence: Option<String>,
    /// When such a task dies, the next ones of its sequence: next lets them go on, hold lets them
    /// wait until it is sent again or purged [default: next]
    #[arg(long, value_name = "WHAT")]
    on_dead: Option<String>,
    #[command(flatten)]
    server: Server,
}

/// List the subscriptions
#[derive(Args)]
struct List {
    /// Print a JSON object for each subscription
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: Server,
}

/// Show a subscription with its positions, as a JSON object
#[derive(Args)]
struct Show {
    /// Name of the subscription
    subscription: String,
    #[command(flatten)]
    server: Server,
}

/// Send a subscription to another place; the records from there on become new tasks
#[derive(Args)]
struct Seek {
    /// Name of the subscription
    subscription: String,
    /// 0, $, after an offset (PARTITION:OFFSET, with commas between several), a time in RFC 3339,
    /// or -1h
    #[arg(long, value_name = "PLACE", allow_hyphen_values = true)]
    to: String,
    /// Also cancel the unfinished tasks that records have become since it was last sent
    #[arg(long)]
    cancel: bool,
    #[command(flatten)]
    server: Server,
}

/// Delete a subscription; its tasks stay
#[derive(Args)]
struct Delete {
    /// Name of the subscription
    subscription: String,
    #[command(flatten)]
    server: Server,
}

/// Does it. False if there is no such subscription or topic.
pub(super) async fn run(args: Subscription) -> anyhow::Result<bool> {
    match args.command {
        Command::Put(put) => self::put(put).await,
        Command::List(list) => self::list(list).await,
        Command::Show(show) => {
            let server = show.server.port()?;
            let path = path(&show.subscription, "");
            let Some((_, subscription)) = ask::<Value>(&server, &path).await? else {
                return Ok(false);
            };
            print(format_args!("{subscription:#}"))?;
            Ok(true)
        }
        Command::Seek(seek) => {
            let body = json!({"to": seek.to, "cancel": seek.cancel});
            let path = path(&seek.subscription, ":seek");
            change(&seek.server, Method::POST, &path, Some(&body)).await
        }
        Command::Delete(delete) => {
            let path = path(&delete.subscription, "");
            change(&delete.server, Method::DELETE, &path, None).await
        }
    }
}

/// The path of a subscription, or of a verb of it.
fn path(subscription: &str, verb: &str) -> String {
    let encoded: String = form_urlencoded::byte_serialize(subscription.as_bytes()).collect();
    format!("/v1/subscriptions/{}{verb}", encoded.replace('+', "%20"))
}

/// Sends a request, and prints the answer. False if there is no such thing.
async fn change(
    server: &Server,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> anyhow::Result<bool> {
    let server = server.port()?;
    let body = match body {
        Some(body) => Some((JSON, Bytes::from(serde_json::to_vec(body)?))),
        None => None,
    };
    let answer = ask_with(&server, method, path, body).await?;
    if let Some(body) = answer.as_ref().filter(|body| !body.is_empty()) {
        print(String::from_utf8_lossy(body))?;
    }
    Ok(answer.is_some())
}

async fn put(put: Put) -> anyhow::Result<bool> {
    let mut settings = Map::new();
    for (name, value) in [
        ("topic", put.topic),
        ("queue", put.queue),
        ("start", put.start),
        ("sequence", put.sequence),
        ("on_dead", put.on_dead),
    ] {
        if let Some(value) = value {
            settings.insert(name.to_owned(), value.into());
        }
    }
    if let Some(matching) = put.matching {
        let matching = serde_json::from_str(&matching).context("--match is not JSON")?;
        settings.insert("match".to_owned(), matching);
    }
    let path = path(&put.subscription, "");
    change(&put.server, Method::PUT, &path, Some(&settings.into())).await
}

#[derive(Deserialize)]
struct Subscriptions {
    subscriptions: Vec<Value>,
}

async fn list(list: List) -> anyhow::Result<bool> {
    let server = list.server.port()?;
    let Some((_, Subscriptions { subscriptions })) = ask(&server, "/v1/subscriptions").await?
    else {
        return Ok(false);
    };
    if list.json {
        for subscription in subscriptions {
            print(subscription)?;
        }
        return Ok(true);
    }
    const COLUMNS: [&str; 10] = [
        "name", "topic", "queue", "behind", "waiting", "leased", "done", "dead", "filtered",
        "skipped",
    ];
    let mut table = print::table(COLUMNS);
    for subscription in &subscriptions {
        let cell = |name: &str| match &subscription[name] {
            Value::String(text) => printable(text),
            other => other.to_string(),
        };
        table.add_row(COLUMNS.map(cell));
    }
    print::print_table(&table)?;
    Ok(true)
}
