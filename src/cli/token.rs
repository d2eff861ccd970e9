//! `taskd token` and `taskd acts`: manage access tokens, and list what operators did. They use the
//! database itself, so that no token is needed to create the first one.

use std::{
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use humantime::format_rfc3339_seconds;
use serde::Serialize;

use super::print::{self, NotThere, print, print_one, print_table, say, say_more};
use crate::{
    app::{self, NeverRan},
    config::{Auth, Options, Settings, Time},
    model::{AccessToken, Act, QueueName, Roles, Scope, Secret, WorkerName, millis, now_unix_ms},
    store::{AddedToken, MOST_TOKENS, Store},
};

/// Make, list and revoke access tokens, for a taskd with auth = tokens
#[derive(Args)]
#[command(
    arg_required_else_help = false,
    after_help = "\
Examples:
  taskd token create ops --roles admin                        everything
  taskd token create ci --roles insert --expires 90days       insert tasks
  taskd token create w1 --roles work --worker w1              work, as this worker only
  taskd token create acme --roles insert,work,read --queues acme,acme.*
  TASKD_TOKEN=$(taskd token create me --roles read) …         the token alone goes to stdout

A token is shown once: taskd keeps only its hash. Each running process knows a new token at once, and drops \
a revoked one within a second: calls that wait, streams and bulk changes of a revoked token end. The command needs the \
database of the running taskd: the same \
--config or --data-dir.
Exit code: 0, or 1 if there is no token to revoke, 2 if the request is wrong or there is no database."
)]
pub(super) struct Token {
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    Create(Create),
    List(List),
    Revoke(Revoke),
}

impl Command {
    /// Takes the options that name the taskd whose tokens are meant.
    pub(super) fn take_options(&mut self) -> Options {
        std::mem::take(match self {
            Self::Create(create) => &mut create.options,
            Self::List(list) => &mut list.options,
            Self::Revoke(revoke) => &mut revoke.options,
        })
    }
}

/// Make a token and print it
#[derive(Args)]
pub struct Create {
    /// Name of the token, unique: 1 to 64 characters of A-Z a-z 0-9 . _ -
    #[arg(value_parser = name)]
    name: String,
    /// The rights of its owner, a comma list: insert (insert tasks), work (get, complete, reject,
    /// extend), read (tasks, results, queues, metrics), admin (everything)
    #[arg(long, value_name = "LIST")]
    roles: Roles,
    /// The queues that it reaches, a comma list of NAME and PREFIX* [default: every queue]
    #[arg(long, value_name = "LIST", value_parser = scope)]
    queues: Option<Scope>,
    /// The only worker that may call with it [default: any]
    #[arg(long, value_name = "NAME", value_parser = worker)]
    worker: Option<WorkerName>,
    /// How long it is valid [default: until it is revoked]
    #[arg(long, value_name = "TIME", value_parser = expiry)]
    expires: Option<Time>,
    /// Most calls a second, in each process [default: no limit]
    #[arg(long, value_name = "N")]
    calls_per_second: Option<NonZeroU32>,
    #[command(flatten)]
    options: Options,
}

/// List the tokens, without their secrets
#[derive(Args)]
pub struct List {
    /// Print one JSON object for each token
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: Options,
}

/// Make a token worthless
#[derive(Args)]
pub struct Revoke {
    /// Name of the token
    name: String,
    #[command(flatten)]
    options: Options,
}

/// List what operators did, the latest first
#[derive(Args)]
pub struct Acts {
    /// Most acts to print
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    last: u32,
    /// Print one JSON object for each act
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) options: Options,
}

/// Parses the name of a token, which follows the rules for the names of queues.
fn name(text: &str) -> Result<String, String> {
    let odd = |_| format!("{text:?} is not a name; use 1 to 64 of A-Z a-z 0-9 . _ -");
    QueueName::new(text)
        .map(|name| name.as_str().to_owned())
        .map_err(odd)
}

/// Parses the value of `--queues`. Refuses an empty list, which would mean every queue but is most
/// likely a variable that is not set.
fn scope(text: &str) -> Result<Scope, String> {
    if text
        .split(',')
        .any(|part| part.trim().trim_end_matches('*').contains('*'))
    {
        return Err("a * may only stand at the end, as in crawl.*".to_owned());
    }
    let scope: Scope = text.parse()?;
    match scope == Scope::default() {
        true => Err("it names no queue; * is every queue".to_owned()),
        false => Ok(scope),
    }
}

/// Parses the value of `--expires`: 1 ms to 100 years.
fn expiry(text: &str) -> Result<Time, String> {
    let time: Time = text.parse()?;
    if time.0 < Duration::from_millis(1) {
        return Err("it must be at least 1ms".to_owned());
    }
    match time.0 > Duration::from_secs(100 * 365 * 24 * 3600) {
        true => Err("it must be at most 100 years; leave it out for ever".to_owned()),
        false => Ok(time),
    }
}

fn worker(text: &str) -> Result<WorkerName, String> {
    WorkerName::new(text).map_err(|error| error.to_string())
}

/// Returns who is recorded as having acted: the user of this machine who runs the command.
fn me() -> String {
    let uid = nix::unistd::Uid::current();
    let user = nix::unistd::User::from_uid(uid)
        .ok()
        .flatten()
        .map_or_else(|| uid.to_string(), |user| user.name);
    format!("{user}, by command")
}

pub(super) async fn run(command: Command, settings: Settings) -> anyhow::Result<()> {
    if let (Command::Create(_), Err(never)) = (&command, app::must_have_run(&settings)) {
        say(match never {
            NeverRan::Folder(folder) => format!(
                "no taskd has run in {} yet; the token is for one that will (--data-dir, --config)",
                folder.display()
            ),
            NeverRan::File(file) => format!(
                "there is no database {} yet; the token is for a taskd that will have it (--database-url, --config)",
                file.display()
            ),
        });
    }
    let store = match command {
        Command::Create(_) => app::open_store(&settings).await?,
        Command::List(_) | Command::Revoke(_) => app::open_present_store(&settings).await?,
    };
    let done = match command {
        Command::Create(create) => self::create(create, &store, settings.auth).await,
        Command::List(list) => self::list(&list, &store).await,
        Command::Revoke(revoke) => self::revoke(&revoke.name, &store).await,
    };
    store.close().await;
    done
}

async fn create(create: Create, store: &Arc<dyn Store>, auth: Auth) -> anyhow::Result<()> {
    let Create {
        name,
        roles,
        queues,
        worker,
        expires,
        calls_per_second,
        ..
    } = create;
    let secret = Secret::new().context("the system has no random numbers")?;
    let now = now_unix_ms();
    let expires_unix_ms = expires.map(|time| now.saturating_add(millis(time.0)));
    let token = AccessToken {
        name,
        roles,
        scope: queues.unwrap_or_default(),
        worker,
        calls_per_second,
        created_unix_ms: now,
        expires_unix_ms,
    };
    let act = Act::new(
        &me(),
        "create token",
        &format!("{} ({})", token.name, token.roles),
    );
    match store.add_token(secret.hash(), &token, &act).await? {
        AddedToken::Yes => print(secret.as_str())?,
        AddedToken::NameTaken => {
            bail!(
                "there is a token {:?} already; revoke it first, or choose another name",
                token.name
            )
        }
        AddedToken::NoRoom => bail!("there are {MOST_TOKENS} tokens; revoke some first"),
    }
    if auth == Auth::None {
        say(
            "a taskd asks for tokens only with auth = tokens; the settings of this command have auth = none",
        );
    }
    Ok(())
}

async fn revoke(name: &str, store: &Arc<dyn Store>) -> anyhow::Result<()> {
    let hash = store
        .tokens()
        .await?
        .into_iter()
        .find(|(_, token)| token.name == name)
        .map(|(hash, _)| hash);
    if !store
        .revoke_token(name, &Act::new(&me(), "revoke token", name))
        .await?
    {
        bail!(NotThere(format!(
            "there is no token {name:?}; taskd token list shows all"
        )));
    }
    for bulk in store
        .running_bulk_changes()
        .await?
        .into_iter()
        .filter(|bulk| bulk.token.is_some() && bulk.token == hash)
    {
        let queue = bulk
            .filter
            .queue
            .as_ref()
            .map_or("all queues", QueueName::as_str);
        say(format!(
            "the bulk change {} ({} of {queue}) stops: {name:?} had started it",
            bulk.id,
            bulk.change.of_tasks()
        ));
    }
    Ok(())
}

/// A token as the list shows it.
#[derive(Serialize)]
struct Shown {
    name: String,
    roles: String,
    queues: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    calls_per_second: Option<NonZeroU32>,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
    has_expired: bool,
}

impl From<AccessToken> for Shown {
    fn from(token: AccessToken) -> Self {
        Self {
            has_expired: token.has_expired(now_unix_ms()),
            name: token.name,
            roles: token.roles.to_string(),
            queues: token.scope.to_string(),
            worker: token.worker.map(|worker| worker.as_str().to_owned()),
            calls_per_second: token.calls_per_second,
            created_at: in_seconds(token.created_unix_ms),
            expires_at: token.expires_unix_ms.map(in_seconds),
        }
    }
}

fn in_seconds(unix_ms: i64) -> String {
    let since = Duration::from_millis(unix_ms.max(0).unsigned_abs());
    format_rfc3339_seconds(SystemTime::UNIX_EPOCH + since).to_string()
}

async fn list(list: &List, store: &Arc<dyn Store>) -> anyhow::Result<()> {
    let tokens = store
        .tokens()
        .await?
        .into_iter()
        .map(|(_, token)| Shown::from(token));
    if list.json {
        for token in tokens {
            print_one(serde_json::to_string(&token)?)?;
        }
    } else {
        let mut table = print::table(["name", "roles", "queues", "worker", "calls/s", "expires"]);
        for token in tokens {
            let expires = token.expires_at.unwrap_or_else(|| "never".to_owned());
            table.add_row([
                token.name,
                token.roles,
                if token.queues.is_empty() {
                    "all".to_owned()
                } else {
                    token.queues
                },
                token.worker.unwrap_or_else(|| "any".to_owned()),
                token
                    .calls_per_second
                    .map_or_else(|| "any".to_owned(), |limit| limit.to_string()),
                if token.has_expired {
                    format!("{expires} (expired)")
                } else {
                    expires
                },
            ]);
        }
        print_table(&table)?;
    }
    Ok(())
}

pub(super) async fn list_acts(args: Acts, settings: Settings) -> anyhow::Result<()> {
    let store = app::open_present_store(&settings).await?;
    // One extra entry shows whether the list goes on.
    let mut acts = store.acts(None, args.last.saturating_add(1)).await?;
    store.close().await;
    if acts.len() > args.last as usize {
        acts.pop();
        say_more(args.last, "--last");
    }
    if args.json {
        for act in &acts {
            print_one(serde_json::to_string(act)?)?;
        }
    } else {
        let mut table = print::table(["when", "who", "what", "on"]);
        for act in acts {
            table.add_row([in_seconds(act.at_unix_ms()), act.who, act.what, act.target]);
        }
        print_table(&table)?;
    }
    Ok(())
}
