//! `taskd limits`: lists limit keys of a queue, shows one, and gives it own limits, over gRPC.

use anyhow::bail;
use clap::{Args, Subcommand, ValueEnum};
use indicatif::HumanCount;
use serde_json::{Value, json};

use super::{
    ask::printable,
    client::{Server, Taskd},
    patience::patiently,
    print::{self, print, print_table},
};
use crate::{
    config::Time,
    wire::pb::{self, operator_client::OperatorClient},
};

/// The limit keys of one call.
const AT_ONCE: u32 = 500;

/// List limit keys of a queue, and give them own limits
#[derive(Args)]
#[command(arg_required_else_help = false)]
#[command(after_help = "\
Examples:
  taskd limits list crawl                             those with own limits
  taskd limits list crawl --state waiting             those with tasks that wait
  taskd limits show crawl example.org                 one of them
  taskd limits set crawl example.org --at-a-time 1 --pace 1/10s
  taskd limits set crawl example.org --hold 2h        nothing of it starts for two hours
  taskd limits set crawl '*' --at-a-time 0            nothing of the queue starts
  taskd limits clear crawl example.org                as the queue's again

Own limits replace those that the key had before, and count within a second on all processes. '*' stands for all \
limit keys of the queue that have none of their own.
Exit code: 0, or 2 if the request is wrong or the server cannot be reached.")]
pub struct Limits {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// List limit keys
    List(List),
    /// Show one limit key: what runs, what waits, its limits
    Show(Show),
    /// Give a limit key own limits
    Set(Set),
    /// Remove the own limits of a limit key
    Clear(Clear),
}

#[derive(Args)]
struct List {
    /// Name of the queue
    #[arg(value_name = "QUEUE")]
    queue: String,

    /// Which limit keys
    #[arg(long, value_enum, value_name = "STATE", default_value_t = State::Own)]
    state: State,

    /// At most this many
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: usize,

    /// Print a JSON object for each limit key
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Clone, Copy, ValueEnum)]
enum State {
    /// With own limits
    Own,
    /// With leases
    Running,
    /// With tasks that wait
    Waiting,
    /// Nothing starts before some time
    Held,
}

#[derive(Args)]
struct Named {
    /// Name of the queue
    #[arg(value_name = "QUEUE")]
    queue: String,

    /// The limit key; '*': all of the queue
    #[arg(value_name = "KEY")]
    key: String,
}

#[derive(Args)]
struct Show {
    #[command(flatten)]
    named: Named,

    /// Print a JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Set {
    #[command(flatten)]
    named: Named,

    /// Leases at a time, 0 to 1000; 0: nothing starts
    #[arg(long, value_name = "N")]
    at_a_time: Option<u32>,

    /// Starts within a time: 10/1m
    #[arg(long, value_name = "STARTS/TIME")]
    pace: Option<String>,

    /// Starts that may come at once after a pause
    #[arg(long, value_name = "N")]
    burst: Option<u32>,

    /// Nothing starts for this long; 0s ends a hold
    #[arg(long, value_name = "DURATION")]
    hold: Option<Time>,

    #[command(flatten)]
    server: Server,
}

#[derive(Args)]
struct Clear {
    #[command(flatten)]
    named: Named,

    #[command(flatten)]
    server: Server,
}

pub(super) async fn run(args: Limits) -> anyhow::Result<()> {
    match args.what {
        What::List(list) => list.run().await,
        What::Show(show) => show.run().await,
        What::Set(set) => set.run().await,
        What::Clear(clear) => clear.run().await,
    }
}

impl List {
    async fn run(self) -> anyhow::Result<()> {
        let taskd = self.server.connect().await?;
        let state = match self.state {
            State::Own => "own",
            State::Running => "running",
            State::Waiting => "waiting",
            State::Held => "held",
        };
        let mut keys = Vec::new();
        let mut cursor = String::new();
        while keys.len() < self.limit {
            let missing = u32::try_from(self.limit - keys.len()).unwrap_or(AT_ONCE);
            let request = pb::ListLimitsRequest {
                queue: self.queue.clone(),
                state: state.into(),
                limit: missing.min(AT_ONCE),
                cursor,
            };
            let ask = async || client(&taskd).list_limits(request.clone()).await;
            let page = patiently(ask).await?.into_inner();
            keys.extend(page.limits);
            cursor = page.cursor;
            if cursor.is_empty() {
                break;
            }
        }
        keys.truncate(self.limit);
        if self.json {
            for key in &keys {
                print(as_json(key))?;
            }
            return Ok(());
        }
        let mut table = print::table(["LIMIT KEY", "RUNNING", "WAITING", "LIMITS", "NEXT START"]);
        for key in &keys {
            table.add_row([
                printable(name(key)),
                HumanCount(key.running).to_string(),
                HumanCount(key.waiting).to_string(),
                in_words(key),
                next_start(key),
            ]);
        }
        print_table(&table)?;
        Ok(())
    }
}

impl Show {
    async fn run(self) -> anyhow::Result<()> {
        let taskd = self.server.connect().await?;
        let request = pb::GetLimitRequest {
            queue: self.named.queue,
            limit_key: self.named.key,
        };
        let ask = async || client(&taskd).get_limit(request.clone()).await;
        let key = patiently(ask).await?.into_inner();
        if self.json {
            print(as_json(&key))?;
            return Ok(());
        }
        print(in_a_line(&key))?;
        Ok(())
    }
}

impl Set {
    async fn run(self) -> anyhow::Result<()> {
        let hold = match self.hold {
            Some(Time(hold)) => match prost_types::Duration::try_from(hold) {
                Ok(hold) => Some(hold),
                Err(_) => bail!("--hold is too long"),
            },
            None => None,
        };
        let request = pb::SetLimitRequest {
            queue: self.named.queue,
            limit_key: self.named.key,
            at_a_time: self.at_a_time,
            pace: self.pace.unwrap_or_default(),
            burst: self.burst,
            hold,
        };
        let taskd = self.server.connect().await?;
        let ask = async || client(&taskd).set_limit(request.clone()).await;
        let key = patiently(ask).await?.into_inner();
        let own = key.own.as_ref().map(own_in_words).unwrap_or_default();
        let name = printable(name(&key));
        print(format_args!("{name} of queue {} has {own}", key.queue))?;
        Ok(())
    }
}

impl Clear {
    async fn run(self) -> anyhow::Result<()> {
        let taskd = self.server.connect().await?;
        let Named { queue, key } = self.named;
        let request = pb::ClearLimitRequest {
            queue: queue.clone(),
            limit_key: key.clone(),
        };
        let ask = async || client(&taskd).clear_limit(request.clone()).await;
        let has = match patiently(ask).await?.into_inner().changed {
            true => "has the limits of the queue again",
            false => "had no own limits",
        };
        print(format_args!("{} of queue {queue} {has}", printable(&key)))?;
        Ok(())
    }
}

fn client(taskd: &Taskd) -> OperatorClient<Taskd> {
    OperatorClient::new(taskd.clone())
}

/// The limit key, or a dash if nothing tells its name.
fn name(key: &pb::LimitKey) -> &str {
    match key.limit_key.as_str() {
        "" => "-",
        name => name,
    }
}

fn next_start(key: &pb::LimitKey) -> String {
    key.next_start_at
        .map_or_else(String::new, |at| at.to_string())
}

/// "2 at a time, 6s apart".
fn in_words(key: &pb::LimitKey) -> String {
    if let Some(own) = &key.own {
        return own_in_words(own);
    }
    let mut words = Vec::new();
    if let Some(at_a_time) = key.at_a_time {
        words.push(format!("{at_a_time} at a time"));
    }
    if key.pace_ms > 0 {
        let pace = std::time::Duration::from_millis(key.pace_ms);
        words.push(format!("{} apart", humantime::format_duration(pace)));
    }
    if let Some(until) = key.held_until {
        words.push(format!("held until {until}"));
    }
    words.join(", ")
}

fn own_in_words(own: &pb::OwnLimits) -> String {
    let mut words = Vec::new();
    if let Some(at_a_time) = own.at_a_time {
        words.push(format!("{at_a_time} at a time"));
    }
    if !own.pace.is_empty() {
        words.push(format!("pace {}", own.pace));
    }
    if let Some(burst) = own.burst {
        words.push(format!("burst {burst}"));
    }
    if let Some(until) = own.hold_until {
        words.push(format!("hold until {until}"));
    }
    format!("own limits: {}", words.join(", "))
}

fn in_a_line(key: &pb::LimitKey) -> String {
    let mut line = format!(
        "{}: {} running, {} waiting",
        printable(name(key)),
        HumanCount(key.running),
        HumanCount(key.waiting)
    );
    let limits = pb::LimitKey {
        own: None,
        ..key.clone()
    };
    for words in [
        in_words(&limits),
        key.own.as_ref().map(own_in_words).unwrap_or_default(),
    ] {
        if !words.is_empty() {
            line += &format!("; {words}");
        }
    }
    if let Some(at) = key.next_start_at {
        line += &format!("; next start {at}");
    }
    line
}

fn as_json(key: &pb::LimitKey) -> Value {
    let text = |at: Option<prost_types::Timestamp>| at.map(|at| at.to_string());
    let own = key.own.as_ref().map(|own| {
        json!({
            "at_a_time": own.at_a_time, "pace": own.pace, "burst": own.burst, "hold_until": text(own.hold_until),
            "at": text(own.at), "who": own.who,
        })
    });
    json!({
        "queue": key.queue, "limit_key": key.limit_key, "running": key.running, "waiting": key.waiting,
        "at_a_time": key.at_a_time, "pace_ms": key.pace_ms, "burst": key.burst,
        "next_start_at": text(key.next_start_at), "held_until": text(key.held_until), "own": own,
    })
}
