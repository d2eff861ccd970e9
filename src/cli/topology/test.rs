//! `taskd topology test`: runs the tests in a file without a server. The ways of outputs and the
//! transactions are the real ones, on SQLite in a temporary folder; workers, queue and time are not.

use std::{
    collections::{BTreeMap, HashSet},
    path::PathBuf,
    sync::Arc,
};

use anyhow::{Context as _, bail};
use clap::Args;

use super::file::read;
use crate::{
    app,
    cli::{
        ask::printable,
        own::Folder,
        print::{print, say},
    },
    config::Settings,
    model::{
        Completion, Counted, FanOut, LeaseNumber, NewTask, RowTree, ScriptedAnswer, Stage, TaskId,
        TaskRow, TaskTree, Topology as Plan, TopologyTest, TreePages, TreeState, Way,
        validate::{self, Partitions},
    },
    pipelines::discovery,
    store::{Inserted, NewRow, Settlement, Store, Unpublished},
};

/// The time at which a test begins, in milliseconds.
const BEGINS_AT: i64 = 1_700_000_000_000;
/// The most tasks of a test: a loop whose outputs have no keys does not end.
const MOST_TASKS: usize = 1000;
/// The most outputs of a report.
const MOST_OUTPUTS: usize = 10_000;
/// How often the worker of a task may vanish.
const MOST_LOST: u32 = 3;
const PARTITIONS: Partitions = Partitions { all: 1, limited: 1 };

/// Run the tests of a file, without a server: other orders, repeats and lost workers must change nothing
#[derive(Args)]
pub(super) struct Test {
    /// File of a topology
    file: PathBuf,
    /// How many orders are tried
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    seeds: u64,
}

/// Runs the tests. False if the file has mistakes, or a test fails.
pub(super) async fn run(args: Test) -> anyhow::Result<bool> {
    let Some((_, plan)) = read(&args.file)? else {
        return Ok(false);
    };
    if plan.tests.is_empty() {
        say(format_args!(
            "{} has no [[test]]: see taskd topology --help and docs/topologies.md",
            args.file.display()
        ));
        return Ok(false);
    }
    let mut all_pass = true;
    for test in &plan.tests {
        let name = printable(&test.name);
        match outcome(&plan, test, args.seeds).await? {
            Ok(seen) => print(format_args!("ok    {name}: {}", seen.says(&plan)))?,
            Err(why) => {
                all_pass = false;
                print(format_args!("WRONG {name}: {why}"))?;
            }
        }
    }
    Ok(all_pass)
}

/// Runs a test with each seed. Returns what was seen, or what is wrong.
async fn outcome(
    plan: &Plan,
    test: &TopologyTest,
    seeds: u64,
) -> anyhow::Result<Result<Seen, String>> {
    let mut first: Option<Seen> = None;
    for seed in 0..seeds {
        let seen = match Run::new(plan, test, seed).await?.work_off().await? {
            Ok(seen) => seen,
            Err(why) => return Ok(Err(why)),
        };
        for expected in &test.expected {
            let count = seen.count(expected.what);
            if count != expected.count {
                return Ok(Err(format!(
                    "{} is {count}, expected {} (seed {seed}): {}",
                    name_of(plan, expected.what),
                    expected.count,
                    seen.says(plan)
                )));
            }
        }
        match &first {
            None => first = Some(seen),
            Some(first) if *first == seen => {}
            Some(first) => {
                return Ok(Err(format!(
                    "the order matters; seed 0: {}; seed {seed}: {}",
                    first.says(plan),
                    seen.says(plan)
                )));
            }
        }
    }
    first.context("no seed").map(Ok)
}

fn name_of(plan: &Plan, what: Counted) -> String {
    match what {
        Counted::Tasks(stage) => format!("{}.count", plan.stages[stage].name),
        Counted::Dead(stage) => format!("{}.dead", plan.stages[stage].name),
        Counted::Trees(state) => format!("trees.{}", state.as_str().to_lowercase()),
    }
}

/// What a run has seen, whatever its order.
#[derive(Debug, Default, PartialEq)]
struct Seen(BTreeMap<Counted, u64>);

impl Seen {
    fn add(&mut self, what: Counted, count: u64) {
        *self.0.entry(what).or_default() += count;
    }

    fn count(&self, what: Counted) -> u64 {
        self.0.get(&what).copied().unwrap_or_default()
    }

    /// One line.
    fn says(&self, plan: &Plan) -> String {
        let counts = self.0.iter().filter(|(_, count)| **count > 0);
        let counts: Vec<String> = counts
            .map(|(what, count)| format!("{} {count}", name_of(plan, *what)))
            .collect();
        counts.join(", ")
    }
}

/// A task that a worker may take.
struct Ready {
    task: TaskRow,
    failures: u32,
    lost: u32,
}

/// A run of a test with a seed.
struct Run<'p> {
    plan: &'p Plan,
    test: &'p TopologyTest,
    settings: Settings,
    store: Arc<dyn Store>,
    ready: Vec<Ready>,
    /// All tasks that ever were ready.
    known: HashSet<TaskId>,
    seen: Seen,
    random: Random,
    now: i64,
    // Removed with the run.
    _folder: Folder,
}

impl<'p> Run<'p> {
    async fn new(plan: &'p Plan, test: &'p TopologyTest, seed: u64) -> anyhow::Result<Self> {
        let folder = Folder::make()?;
        let store = app::temporary_store(&folder.data()).await?;
        Ok(Self {
            plan,
            test,
            settings: Settings::default(),
            store,
            ready: Vec::new(),
            known: HashSet::new(),
            seen: Seen::default(),
            random: Random(seed),
            now: BEGINS_AT,
            _folder: folder,
        })
    }

    /// Works until no task is left.
    async fn work_off(mut self) -> anyhow::Result<Result<Seen, String>> {
        if let Err(why) = self.insert().await? {
            return Ok(Err(why));
        }
        while !self.ready.is_empty() {
            if self.known.len() > MOST_TASKS {
                return Ok(Err(format!(
                    "there are more than {MOST_TASKS} tasks; send fewer, and give the outputs of a loop keys, without which it does not end"
                )));
            }
            let next = self.random.below(self.ready.len());
            let ready = self.ready.swap_remove(next);
            self.now += 1;
            if let Err(why) = self.work(ready).await? {
                return Ok(Err(why));
            }
        }
        let pages = TreePages {
            limit: 1000,
            ..TreePages::default()
        };
        for tree in self.store.trees(&pages).await? {
            if tree.state == TreeState::Open && tree.held == 0 {
                bail!("tree {} is open, and waits for nothing", tree.id);
            }
            self.seen.add(Counted::Trees(tree.state), 1);
        }
        Ok(Ok(self.seen))
    }

    async fn insert(&mut self) -> anyhow::Result<Result<(), String>> {
        let mut rows = Vec::new();
        for (place, (stage, task)) in self.test.inputs.iter().enumerate() {
            let mut task = task.clone();
            task.queue = self.plan.stages[*stage].queue.as_str().to_owned();
            let completed = self.plan.complete_insert(*stage, &mut task);
            let tree = task.tree.take();
            let row = completed.and_then(|()| self.row(task, TaskId::at(self.now, place)));
            let mut row = match row {
                Ok(row) => row,
                Err(why) => return Ok(Err(format!("input[{place}]: {why}"))),
            };
            if let Some(TaskTree::Root(tree)) = tree.as_deref() {
                let settings = discovery::tree_settings(tree, self.now, |then| {
                    let task = NewTask {
                        id: Some(row.id),
                        queue: then.to_owned(),
                        ..NewTask::default()
                    };
                    self.row(task, row.id)
                });
                match settings {
                    Ok(settings) => row.tree = Some(Box::new(RowTree::Root(settings))),
                    Err(why) => return Ok(Err(why)),
                }
            }
            rows.push(new_row(row));
        }
        let stored = self.store.insert(&rows).await?;
        for (row, answer) in rows.into_iter().zip(stored.answers) {
            if answer == Inserted::New {
                self.arrives(row.task);
            }
        }
        Ok(Ok(()))
    }

    fn row(&self, task: NewTask, id: TaskId) -> Result<TaskRow, String> {
        let rules = self.settings.task_rules(&task.queue).for_accepted();
        let checked = validate::check(&task, &rules, self.now)?;
        Ok(checked.row(task, id, PARTITIONS))
    }

    fn arrives(&mut self, task: TaskRow) {
        if !self.known.insert(task.id) {
            return;
        }
        if let Some(stage) = self.stage_of(&task) {
            self.seen.add(Counted::Tasks(stage), 1);
        }
        self.ready.push(Ready {
            task,
            failures: 0,
            lost: 0,
        });
    }

    fn stage_of(&self, task: &TaskRow) -> Option<usize> {
        let of_task = |stage: &Stage| stage.queue == task.queue;
        self.plan.stages.iter().position(of_task)
    }

    async fn work(&mut self, mut ready: Ready) -> anyhow::Result<Result<(), String>> {
        // Its worker vanishes, and the lease ends.
        if ready.lost < MOST_LOST && self.random.below(8) == 0 {
            ready.lost += 1;
            self.ready.push(ready);
            return Ok(Ok(()));
        }
        let Some(stage) = self.stage_of(&ready.task) else {
            let report = Completion::default();
            return self.complete(&ready.task, report).await;
        };
        let worker = self.test.workers.get(&stage);
        let answer = worker.and_then(|worker| worker.answer(&ready.task.key));
        let report = match answer {
            Some(ScriptedAnswer::Fails) => {
                ready.failures += 1;
                if ready.failures < ready.task.max_attempts {
                    self.ready.push(ready);
                    return Ok(Ok(()));
                }
                self.seen.add(Counted::Dead(stage), 1);
                let died = Settlement::Died {
                    id: ready.task.id,
                    reason: "the test says so".to_owned(),
                    attempts: ready.failures,
                    history: Vec::new(),
                    epoch: None,
                    at_unix_ms: self.now,
                };
                self.settle(died).await?;
                return Ok(Ok(()));
            }
            Some(ScriptedAnswer::Outputs(outputs)) => Completion {
                discovered: outputs.clone(),
                ..Completion::default()
            },
            None => Completion {
                result: ready.task.payload.clone(),
                result_encoding: ready.task.payload_encoding,
                ..Completion::default()
            },
        };
        let mut routed = report;
        let mut room = FanOut {
            tasks: MOST_OUTPUTS,
            bytes: usize::MAX,
        };
        let name = &self.plan.stages[stage].name;
        let sent = self
            .plan
            .route(stage, ready.task.id, &mut routed, &mut room);
        if let Err(why) = sent {
            return Ok(Err(format!("the worker of {name}: {why}")));
        }
        self.complete(&ready.task, routed).await
    }

    async fn complete(
        &mut self,
        task: &TaskRow,
        report: Completion,
    ) -> anyhow::Result<Result<(), String>> {
        const WORKER: &str = "test";
        let joining = report.joining.map(|joining| *joining).unwrap_or_default();
        let mut discovered = Vec::with_capacity(report.discovered.len());
        for (index, found) in report.discovered.into_iter().enumerate() {
            let way = joining.ways.get(index).copied().unwrap_or_default();
            let index = u32::try_from(index)?;
            let id = TaskId::derived(task.id, WORKER, index, self.now);
            let mut row = match self.row(found, id) {
                Ok(row) => row,
                Err(why) => return Ok(Err(format!("an output of {}: {why}", task.queue))),
            };
            if way != Way::default() {
                row.tree = Some(Box::new(RowTree::Sent(way)));
            }
            discovered.push(new_row(row));
        }
        let joining = discovery::joining(&self.settings, PARTITIONS, joining, task.id, self.now);
        let joining = match joining {
            Ok(joining) => joining,
            Err(why) => return Ok(Err(why)),
        };
        self.settle(Settlement::Completed {
            id: task.id,
            worker: WORKER.to_owned(),
            lease: LeaseNumber::default(),
            result: report.result,
            encoding: report.result_encoding,
            attempt: 1,
            leased_unix_ms: 0,
            at_unix_ms: self.now,
            discovered,
            joining,
        })
        .await?;
        Ok(Ok(()))
    }

    /// Settles a report, sometimes twice: it may be on the bus twice.
    async fn settle(&mut self, report: Settlement) -> anyhow::Result<()> {
        let reports = [report];
        let times = if self.random.below(4) == 0 { 2 } else { 1 };
        for _ in 0..times {
            let stored = self.store.settle(&reports).await?;
            let discovered = match &reports[0] {
                Settlement::Completed { discovered, .. } => &discovered[..],
                Settlement::Died { .. } => &[],
            };
            for settled in &stored.answers {
                for (row, answer) in discovered.iter().zip(&settled.discovered) {
                    if *answer == Inserted::New {
                        self.arrives(row.task.clone());
                    }
                }
            }
            for row in stored.released {
                self.arrives(row.task);
            }
        }
        Ok(())
    }
}

fn new_row(task: TaskRow) -> NewRow {
    NewRow {
        task,
        unpublished: Unpublished::Fresh,
        due_unix_ms: i64::MAX,
    }
}

/// Numbers that follow from a seed: SplitMix64, by Steele, Lea and Flood.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        let bound = u64::try_from(bound).unwrap_or(u64::MAX).max(1);
        usize::try_from(mixed % bound).unwrap_or(0)
    }
}
