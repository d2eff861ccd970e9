//! The command line of `taskd bench`.

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::{
    cli::{address, own::setting, trust::Trust},
    config::{ByteSize, Time},
};

/// The most payload bytes of one insert call: half of what taskd accepts by default.
const MOST_BYTES_A_CALL: u64 = 16 << 20;
/// The most tasks of the phase latency; --tasks has the same limit.
const MOST_SAMPLES: u32 = 10_000_000;
/// The most queues that a get call may list.
pub(super) const QUEUES_A_CALL: u16 = 100;

/// Measure a taskd: tasks a second, latency, CPU per task
#[derive(Args)]
#[command(after_help = "\
Examples:
  taskd bench                               the first four phases, with a taskd of its own
  taskd bench insert process --batch 1      one task in each call
  taskd bench process --replicas 3          each task done by three workers
  taskd bench latency --rate 2000 --duration 30s
  taskd bench flat --waiting 10000,10000000 the same speed in front of ten million tasks?
  taskd bench --json | jq '.rates[] | {phase, measure, per_second}'
  taskd bench --server 127.0.0.1:7600 --redis unix://$PWD/taskd-data/redis.sock

Phases:
  insert       new tasks: until taskd has accepted (stored) all, and until all can be claimed
  duplicates   the same again: 9 of 10 tasks are known
  process      workers get and complete all tasks: until the last OK, and until SQL shows all of
               them as completed
  latency      one task a call at a fixed rate, while workers wait: the time from the moment at
               which a task was due to be sent, so that a slow answer hides nothing; and the time
               from a call that rejects a task to the next worker with it: no SQL, no bus
Only when named, and only with a taskd of its own:
  flat         tasks a second in front of few and of many waiting tasks, by few and by many workers,
               in one and in many queues, each beside the first; memory of a waiting task; memory
               and CPU of a taskd that nobody calls
  start        the time to ready in an empty folder; how fast all tasks can be claimed again after
               Redis has lost everything
  topics       records published, beside inserted tasks and beside Redis alone; tasks that one
               subscription and ten make of them, and their processing, each beside inserted ones;
               tasks in 10,000 sequences beside tasks in none; the time from a publish to a handler;
               CPU of 500 subscriptions that nobody uses
  trees        tasks that a topology sends on, in one tree and in many, beside tasks discovered in
               none; forks of 100 with a join beside those without; CPU of 50 idle topologies
  workflow     steps of executions beside plain tasks through the same workers, and their CPU; late
               rounds of a loop beside early ones; memory of an execution that waits; other queues
               of a taskd that could run workflows, but has none, beside one that could not
  limits       limits per key: tasks a second with a limit key each and with ten, each beside none;
               in front of many tasks whose limit key is busy; how late the starts of many keys are
               at one a second; memory of a busy key, and of a task behind it

Without --server each run starts a taskd of its own: embedded defaults, free ports, and a folder \
under TMPDIR, which it removes. Put TMPDIR on a disk: in memory fsync costs nothing.

With --server the tasks go into queues of their own, bench-…, of the taskd that runs there. They stay \
there as completed tasks until its retention removes them. TASKD_URL does not count here: no \
variable turns a benchmark against a server.

CPU is that of taskd, of its Redis and of this command, in µs per task. It is unknown for a taskd \
on another machine, and for a Redis that --redis does not name.

Each phase ends when its tasks are completed. bench counts that exactly NUM distinct workers have \
completed each of them, and that SQL agrees.
Exit code: 0 if the counts are right, 1 if a task was lost or completed too often, 2 for a wrong \
command line or a taskd that cannot be reached or started.")]
pub struct Bench {
    /// The measurements: insert, duplicates, process, latency, flat, start, limits, topics, trees,
    /// workflow; without one, the first four
    #[arg(value_name = "PHASE", value_enum, hide_possible_values = true)]
    phases: Vec<Phase>,

    /// Address of a taskd that runs already; host:port is enough
    #[arg(long, value_name = "URL", value_parser = address::with_scheme)]
    pub(super) server: Option<String>,

    /// The Redis of that taskd, to read its CPU and its appendfsync
    #[arg(long, value_name = "URL", requires = "server")]
    pub(super) redis: Option<String>,

    /// The token and the certificates for that taskd
    #[command(flatten)]
    pub(super) trust: Trust,

    /// Let the taskd of its own ask for an access token with each call
    #[arg(long, conflicts_with = "server")]
    pub(super) with_token: bool,

    /// A setting of the taskd of its own, by its key in the configuration file: history=false
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = setting, conflicts_with = "server")]
    pub(super) settings: Vec<(String, String)>,

    #[command(flatten)]
    pub(super) work: Work,

    #[command(flatten)]
    pub(super) flat: Flat,

    #[command(flatten)]
    pub(super) limits: Limits,

    #[command(flatten)]
    pub(super) workflow: Workflow,

    /// Runs; the table shows the median, the lowest and the highest of them
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) runs: u16,

    /// Print one JSON object instead of the table
    #[arg(long)]
    pub(super) json: bool,
}

/// The shape of the work.
#[derive(Args, Clone, Serialize)]
pub(super) struct Work {
    /// Tasks of the phases insert, duplicates and process
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(super) tasks: u32,

    /// Payload of a task
    #[arg(long, value_name = "SIZE", default_value = "100")]
    #[serde(serialize_with = "bytes")]
    pub(super) payload: ByteSize,

    /// NUM: distinct workers that must complete each task
    #[arg(long, value_name = "NUM", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) replicas: u16,

    /// In the phase process, each task fails once: the worker that gets its first attempt rejects
    /// it
    #[arg(long)]
    pub(super) failing: bool,

    /// Queues that share the tasks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) queues: u16,

    /// Tasks in one insert, get or complete call
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) batch: u16,

    /// Insert calls in flight at a time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(super) concurrency: u16,

    /// Workers, each with one call at a time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(super) workers: u16,

    /// Workers get their next tasks by the call that reports those before
    #[arg(long, conflicts_with = "stream")]
    pub(super) next: bool,

    /// Workers hold streams, and taskd sends them tasks
    #[arg(long)]
    pub(super) stream: bool,

    /// gRPC connections, shared by all calls
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) connections: u16,

    /// Tasks a second of the phase latency
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) rate: u32,

    /// How long the phase latency inserts
    #[arg(long, value_name = "TIME", default_value = "10s")]
    #[serde(serialize_with = "seconds")]
    pub(super) duration: Time,

    /// How long to go on while no task makes progress
    #[arg(long, value_name = "TIME", default_value = "60s")]
    #[serde(skip)]
    pub(super) give_up_after: Time,
}

/// The sizes of the phase flat.
#[derive(Args, Clone, Serialize)]
#[command(next_help_heading = "Sizes of the phase flat")]
pub(super) struct Flat {
    /// Tasks that wait while workers take some of them; the first is what the others are compared
    /// with
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [10_000, 1_000_000])]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=100_000_000))]
    pub(super) waiting: Vec<u32>,

    /// Tasks that workers take for a figure, and a fifth of them one a call. Fewer take less time
    /// than Redis needs to rewrite its file
    #[arg(long, value_name = "N", default_value_t = 250_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) taken: u32,

    /// Workers that are compared with 10
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(super) many_workers: u16,

    /// Queues that are compared with one
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) many_queues: u16,

    /// How long nobody calls while CPU and memory are looked at
    #[arg(long, value_name = "TIME", default_value = "10s")]
    #[serde(serialize_with = "seconds")]
    pub(super) idle: Time,
}

/// The sizes of the phase limits.
#[derive(Args, Clone, Serialize)]
#[command(next_help_heading = "Sizes of the phase limits")]
pub(super) struct Limits {
    /// Tasks whose limit key is busy while workers take others
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    pub(super) blocked: u32,

    /// Limit keys with one start a second, for --duration
    #[arg(long, value_name = "N", default_value_t = 5000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) paced_keys: u32,
}

/// The sizes of the phase workflow.
#[derive(Args, Clone, Serialize)]
#[command(next_help_heading = "Sizes of the phase workflow")]
pub(super) struct Workflow {
    /// Executions whose steps are compared with plain tasks
    #[arg(long, value_name = "N", default_value_t = 1000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) executions: u32,

    /// Steps of each of them, one after the other
    #[arg(long, value_name = "N", default_value_t = 10)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) steps: u32,

    /// Rounds of a loop, the last of which are compared with those after the hundredth
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(4..=15_000))]
    pub(super) rounds: u32,

    /// Executions that wait while memory is looked at
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=900_000))]
    pub(super) parked: u32,
}

/// Phases that share a taskd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// insert, duplicates, process, latency
    Calls,
    Flat,
    Start,
    Limits,
    Topics,
    Trees,
    Workflow,
}

/// A part of a run, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    Insert,
    Duplicates,
    Process,
    Latency,
    Flat,
    Start,
    Limits,
    Topics,
    Trees,
    Workflow,
}

impl Phase {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Duplicates => "duplicates",
            Self::Process => "process",
            Self::Latency => "latency",
            Self::Flat => "flat",
            Self::Start => "start",
            Self::Limits => "limits",
            Self::Topics => "topics",
            Self::Trees => "trees",
            Self::Workflow => "workflow",
        }
    }
}

impl Bench {
    /// Checks for values that contradict each other; the error describes the first mistake, in one
    /// line. `is_given` says whether an argument is on the command line, and not only in the
    /// environment, which may be meant for other commands.
    pub(in crate::cli) fn check(&self, is_given: impl Fn(&str) -> bool) -> Result<(), String> {
        let Work {
            replicas,
            workers,
            batch,
            payload,
            rate,
            duration,
            queues,
            ..
        } = &self.work;
        if replicas > workers {
            return Err(format!(
                "--replicas {replicas} needs as many distinct workers, and --workers is {workers}: raise it"
            ));
        }
        let groups = queues.div_ceil(QUEUES_A_CALL);
        if groups * replicas > *workers {
            return Err(format!(
                "--queues {queues} needs {} workers, as a call names {QUEUES_A_CALL} queues at most: raise --workers",
                groups * replicas
            ));
        }
        if self.server.is_some() && self.parts().any(|part| part != Part::Calls) {
            return Err(
                "flat, start, limits, topics, trees and workflow measure a taskd of their own: leave out --server"
                    .to_owned(),
            );
        }
        let of_a_server = ["token", "tls_ca", "client_cert"]
            .into_iter()
            .find(|flag| is_given(flag));
        if let (None, Some(flag)) = (&self.server, of_a_server) {
            return Err(format!(
                "--{} is for a taskd that runs: name it with --server",
                flag.replace('_', "-")
            ));
        }
        if !self.flat.waiting.is_sorted() {
            return Err("--waiting: each number must be as large as the one before".to_owned());
        }
        if u64::from(*batch) * payload.0 > MOST_BYTES_A_CALL {
            let most = ByteSize(MOST_BYTES_A_CALL);
            return Err(format!(
                "--batch {batch} × --payload {payload} is more than {most} in one call: lower one"
            ));
        }
        if self.work.samples() == 0 {
            return Err(format!(
                "--rate {rate} for --duration {duration} is no task at all: raise one"
            ));
        }
        if self.work.samples() > MOST_SAMPLES {
            return Err(format!(
                "--rate {rate} for --duration {duration} is more than {MOST_SAMPLES} tasks: lower one"
            ));
        }
        Ok(())
    }

    pub(super) fn wants(&self, phase: Phase) -> bool {
        let is_special = matches!(
            phase,
            Phase::Flat
                | Phase::Start
                | Phase::Limits
                | Phase::Topics
                | Phase::Trees
                | Phase::Workflow
        );
        (self.phases.is_empty() && !is_special) || self.phases.contains(&phase)
    }

    /// The parts of a run, each of which gets a taskd of its own.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> {
        let special = [
            Phase::Flat,
            Phase::Start,
            Phase::Limits,
            Phase::Topics,
            Phase::Trees,
            Phase::Workflow,
        ];
        let [flat, start, limits, topics, trees, workflow] = special.map(|phase| self.wants(phase));
        let calls = [
            Phase::Insert,
            Phase::Duplicates,
            Phase::Process,
            Phase::Latency,
        ];
        let calls = calls.into_iter().any(|phase| self.wants(phase));
        let parts = [
            (calls, Part::Calls),
            (flat, Part::Flat),
            (start, Part::Start),
            (limits, Part::Limits),
            (topics, Part::Topics),
            (trees, Part::Trees),
            (workflow, Part::Workflow),
        ];
        parts
            .into_iter()
            .filter_map(|(is_wanted, part)| is_wanted.then_some(part))
    }

    /// The most tasks and the most queues that exist at the same time in a part.
    pub(super) fn room(&self, part: Part) -> (u64, u64) {
        let Self {
            work,
            flat,
            limits,
            workflow,
            ..
        } = self;
        match part {
            Part::Calls | Part::Start => {
                (work.tasks.max(work.samples()).into(), work.queues.into())
            }
            Part::Flat => (
                flat.waiting
                    .iter()
                    .max()
                    .copied()
                    .unwrap_or_default()
                    .into(),
                flat.many_queues.into(),
            ),
            // Beside queues of work those of the idle subscriptions, which have no tasks.
            Part::Topics => (work.tasks.max(work.samples()).into(), 600),
            Part::Trees => (u64::from(work.tasks) * 2, 200),
            Part::Workflow => {
                let steps = u64::from(workflow.executions) * u64::from(workflow.steps);
                (steps.max(work.tasks.into()), 20)
            }
            Part::Limits => {
                let rounds = work.duration.0.as_secs() + 2;
                let paced = u64::from(limits.paced_keys) * rounds;
                let blocked = u64::from(limits.blocked) + u64::from(work.tasks);
                (paced.max(blocked), 9)
            }
        }
    }
}

impl Work {
    /// How many tasks the phase latency inserts.
    pub(super) fn samples(&self) -> u32 {
        let samples = f64::from(self.rate) * self.duration.0.as_secs_f64();
        samples.min(f64::from(u32::MAX)) as u32
    }
}

fn bytes<S: serde::Serializer>(size: &ByteSize, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(size.0)
}

fn seconds<S: serde::Serializer>(time: &Time, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.0.as_secs_f64())
}
