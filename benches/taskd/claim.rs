//! The cost of one claim, depending on how many tasks wait and where the worker's pointer is; also
//! of the completion, and of an enqueue.

use std::{future::Future, sync::Arc, time::Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use futures::future;
use prost::Message as _;
use tokio::task::JoinSet;

use taskd::{
    model::{Offset, QueueName, ShardId, TaskId, WorkerName},
    queue::{
        Claim, Code, Completion, Enqueue, EnqueueTask, Enqueued, Leased, Queue, Shard, Source,
        keys::ShardKeys,
    },
    redis_pool::{Connection, Redis},
    wire::pb,
};

use crate::{
    progress::Progress,
    redis_server::RedisServer,
    report::{Row, Runs, Table, Unit, quantile},
    scale::Scale,
};

const PREFIX: &str = "bench";
/// Tasks per enqueue call, as in the fanout.
const ENQUEUE: usize = 1000;
/// The most bytes that a claim asks for.
const MAX_BYTES: usize = 8 << 20;
/// At most 1/PART of a queue is taken before it is refilled, so that its length stays close to what
/// the row says.
const PART: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Each claim is made by a new worker, which starts at the tail.
    Tail,
    /// One worker makes all claims, starting in the middle of the elements.
    Middle,
}

/// One measured case, with its µs in each run.
struct Cell {
    replicas: u32,
    place: Place,
    /// Tasks per claim.
    most: usize,
    waiting: usize,
    claim: Cost,
    complete: Cost,
}

/// The costs of a call.
#[derive(Default)]
struct Cost {
    /// Time until the caller has its answer.
    call: Runs,
    /// Time inside the server.
    script: Runs,
    /// The number of script calls.
    scripts: Runs,
    /// Time of a trivial script that is called just before.
    bare: Runs,
}

/// The cost of filling a queue.
#[derive(Default)]
struct Fill {
    waiting: usize,
    /// µs per task, in the last batches.
    micros: Runs,
    /// Redis memory per waiting task.
    bytes: Runs,
}

pub(crate) struct Bed {
    server: RedisServer,
    redis: Redis,
    queue: Queue,
    body: Bytes,
    /// Calls the script `return 1`.
    bare: redis::Cmd,
    queues: usize,
}

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let mut bed = Bed::start().await?;
    let mut cells = cells(scale);
    let mut lengths: Vec<_> = cells.iter().map(|cell| cell.waiting).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let mut fills: Vec<_> = lengths
        .into_iter()
        .map(|waiting| Fill {
            waiting,
            ..Fill::default()
        })
        .collect();
    for run in 1..=scale.runs {
        for replicas in [1, 3] {
            for fill in &mut fills {
                let waiting = fill.waiting;
                progress.step(format!(
                    "claim, run {run} of {}: NUM {replicas}, {waiting} tasks wait",
                    scale.runs
                ));
                // Claims at the tail only take from the tail, so both places can share a large
                // queue.
                let here = cells
                    .iter_mut()
                    .filter(|cell| cell.replicas == replicas && cell.waiting == waiting);
                let here: Vec<_> = here.collect();
                let filled = if waiting >= 100 * ENQUEUE {
                    bed.large(scale, here).await?
                } else {
                    bed.small(scale, here).await?
                };
                if let Some((micros, bytes)) = filled.filter(|_| replicas == 1) {
                    fill.micros.push(micros);
                    fill.bytes.push(bytes);
                }
            }
        }
    }
    let body = bed.body.len();
    Ok(vec![claim_table(&cells), fill_table(&fills, body)])
}

fn cells(scale: &Scale) -> Vec<Cell> {
    let mut cells = Vec::new();
    for replicas in [1, 3] {
        for place in [Place::Tail, Place::Middle] {
            for most in [1, 100] {
                for waiting in &scale.waiting {
                    // A claim of a hundred needs a hundred tasks ahead of it, even from the middle.
                    let waiting = if *waiting < 2 * most {
                        2 * most
                    } else {
                        *waiting
                    };
                    let (claim, complete) = (Cost::default(), Cost::default());
                    cells.push(Cell {
                        replicas,
                        place,
                        most,
                        waiting,
                        claim,
                        complete,
                    });
                }
            }
        }
    }
    cells
}

impl Bed {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let server = RedisServer::start().await?;
        // The fsync of a disk would hide the cost of the script. The table of `command` includes
        // it.
        server.set("appendfsync", "everysec").await?;
        let redis = Redis::connect(server.url(), PREFIX).await?;
        let queue = Queue::new(redis.clone());
        let payload = Bytes::from_static(&[b'x'; 100]);
        let key = Bytes::from_static(b"https://www.example.org/pages/000000000000");
        let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned();
        let body = pb::TaskBody {
            key,
            payload,
            traceparent,
            ..Default::default()
        };
        let body = body.encode_to_vec().into();
        let record = pb::PipelineRecord {
            priority: 2,
            max_attempts: 5,
            lease_ms: 30_000,
            body,
            ..Default::default()
        };
        let sha: String = redis::cmd("SCRIPT")
            .arg("LOAD")
            .arg("return 1")
            .query_async(&mut redis.conn())
            .await?;
        let mut bare = redis::cmd("EVALSHA");
        bare.arg(sha).arg(0);
        Ok(Self {
            server,
            redis,
            queue,
            body: taskd::wire::body_blob(&record),
            bare,
            queues: 0,
        })
    }

    /// Creates a queue with this many tasks; returns how long each batch took, in µs.
    pub(crate) async fn fill(
        &mut self,
        replicas: u32,
        waiting: usize,
    ) -> anyhow::Result<(ShardId, Vec<f64>)> {
        self.queues += 1;
        let shard = ShardId {
            queue: QueueName::new(&format!("q{}", self.queues))?,
            number: 0,
        };
        self.queue
            .upkeep
            .open_shard(&shard, 1, "bench", None)
            .await?;
        self.queue.add_shard(&shard);
        let (mut filled, mut micros, mut predecessor) = (0, Vec::new(), None);
        while filled < waiting {
            let count = ENQUEUE.min(waiting - filled);
            let tasks: Vec<_> = (filled + 1..=filled + count)
                .map(|n| self.task(replicas, n as u64))
                .collect();
            let upto = Offset {
                major: (filled + count) as u64,
                minor: 0,
            };
            let batch = Enqueue {
                source: Source::Partition {
                    topic_generation: "bench",
                    epoch: 1,
                    predecessor,
                    upto,
                    again: false,
                },
                tasks: &tasks,
                high_water_tasks: u64::MAX >> 16,
                high_water_bytes: u64::MAX >> 16,
                live_tasks_max: u64::MAX,
            };
            let began = Instant::now();
            let answer = self.queue.enqueuer.enqueue(&shard, &batch).await?;
            micros.push(began.elapsed().as_secs_f64() * 1e6);
            ensure!(
                answer
                    == Enqueued::Done {
                        dealt_with: count,
                        added: count,
                        crowded: Vec::new(),
                    },
                "enqueue answered {answer:?}"
            );
            (filled, predecessor) = (filled + count, Some(upto));
        }
        Ok((shard, micros))
    }

    fn task(&self, replicas: u32, number: u64) -> EnqueueTask {
        EnqueueTask {
            offset: Offset {
                major: number,
                minor: 0,
            },
            id: TaskId::new(),
            replicas,
            not_before_unix_ms: 0,
            body: self.body.clone(),
            credited: Vec::new(),
            epoch: 0,
        }
    }

    /// Measures all cells in one queue; returns µs and bytes per task of filling it.
    async fn large(
        &mut self,
        scale: &Scale,
        cells: Vec<&mut Cell>,
    ) -> anyhow::Result<Option<(f64, f64)>> {
        self.empty().await?;
        let (waiting, replicas) = match cells.first() {
            Some(cell) => (cell.waiting, cell.replicas),
            None => return Ok(None),
        };
        let before = self.used_memory().await?;
        let (shard, micros) = self.fill(replicas, waiting).await?;
        let bytes = (self.used_memory().await? - before) / waiting as f64;
        self.rewritten().await?;
        for cell in cells {
            let mut samples = (Samples::default(), Samples::default());
            // All cells of a queue together must take less than one part of it.
            let claims = scale.claims.min(waiting / PART / 4 / cell.most);
            self.claims(&shard, cell, claims, &mut samples).await?;
            samples.0.into(&mut cell.claim);
            samples.1.into(&mut cell.complete);
        }
        Ok(Some((last_micros(&micros), bytes)))
    }

    /// Measures each cell in small queues, with a few claims in each.
    async fn small(
        &mut self,
        scale: &Scale,
        cells: Vec<&mut Cell>,
    ) -> anyhow::Result<Option<(f64, f64)>> {
        let mut filled = None;
        for cell in cells {
            self.empty().await?;
            let mut samples = (Samples::default(), Samples::default());
            while samples.0.micros.len() < scale.claims {
                let (shard, micros) = self.fill(cell.replicas, cell.waiting).await?;
                let claims = (cell.waiting / PART / cell.most)
                    .clamp(1, scale.claims - samples.0.micros.len());
                self.claims(&shard, cell, claims, &mut samples).await?;
                filled = Some(micros);
            }
            samples.0.into(&mut cell.claim);
            samples.1.into(&mut cell.complete);
        }
        Ok(filled.map(|micros| (last_micros(&micros), f64::NAN)))
    }

    async fn claims(
        &self,
        shard: &ShardId,
        cell: &Cell,
        claims: usize,
        (claim_samples, complete_samples): &mut (Samples, Samples),
    ) -> anyhow::Result<()> {
        let known = self.shard(shard)?;
        let middle = WorkerName::new(&format!("middle-{}", cell.most))?;
        let start = match cell.place {
            Place::Tail => None,
            Place::Middle => Some(self.put_in_the_middle(shard, &middle, cell.most).await?),
        };
        let mut claimed = Vec::new();
        for number in 0..claims {
            let worker = match cell.place {
                Place::Tail => WorkerName::new(&format!("tail-{}-{number}", cell.most))?,
                Place::Middle => middle.clone(),
            };
            let tasks = claim_samples
                .time(self, self.claim(&known, &worker, cell.most))
                .await?;
            claimed.push((worker, tasks));
        }
        if let Some(start) = start {
            let (at, passed) = (self.pointer(shard, &middle).await?, claims * cell.most);
            ensure!(
                at == Some(start + passed),
                "the pointer went from {start} to {at:?}, past {passed} elements"
            );
        }
        for (worker, tasks) in claimed {
            complete_samples
                .time(self, self.complete(&worker, tasks))
                .await?;
        }
        Ok(())
    }

    pub(crate) fn shard(&self, shard: &ShardId) -> anyhow::Result<Arc<Shard>> {
        self.queue
            .shards_of(&shard.queue)
            .into_iter()
            .next()
            .context("the shard was added")
    }

    pub(crate) async fn used_memory(&self) -> anyhow::Result<f64> {
        self.server.info("memory", "used_memory:").await
    }

    pub(crate) async fn claim(
        &self,
        shard: &Shard,
        worker: &WorkerName,
        most: usize,
    ) -> anyhow::Result<Vec<Leased>> {
        let tasks = self.claim_some(shard, worker, most).await?;
        ensure!(
            tasks.len() == most,
            "a claim got {} tasks instead of {most}",
            tasks.len()
        );
        Ok(tasks)
    }

    async fn claim_some(
        &self,
        shard: &Shard,
        worker: &WorkerName,
        most: usize,
    ) -> anyhow::Result<Vec<Leased>> {
        let claim = Claim {
            worker: worker.clone(),
            max_tasks: most,
            max_bytes: MAX_BYTES,
            is_first: true,
            lease: None,
            priority: None,
        };
        Ok(self.queue.worker.claim(shard, claim).await?.deliver())
    }

    pub(crate) async fn complete(
        &self,
        worker: &WorkerName,
        tasks: Vec<Leased>,
    ) -> anyhow::Result<()> {
        let calls = tasks.into_iter().map(|task| {
            let report = Bytes::from_static(&[b'r'; 80]);
            self.queue.worker.complete(Completion {
                id: task.id,
                token: task.token,
                worker: worker.clone(),
                report,
                limit: Default::default(),
            })
        });
        let codes = future::try_join_all(calls).await?;
        ensure!(
            codes.iter().all(|code| *code == Code::Ok),
            "completions were answered {codes:?}"
        );
        Ok(())
    }

    /// Sets the worker's pointer. This is safe from outside: it is only a cursor, and which tasks
    /// the worker skips does not matter to a claim.
    async fn put_in_the_middle(
        &self,
        shard: &ShardId,
        worker: &WorkerName,
        most: usize,
    ) -> anyhow::Result<usize> {
        let mut pipe = redis::pipe();
        pipe.cmd("GET")
            .arg(lane(shard, "C")?)
            .cmd("LLEN")
            .arg(lane(shard, "T")?);
        let (gone, length): (Option<usize>, usize) =
            pipe.query_async(&mut self.redis.conn()).await?;
        // In a shared queue, keep single claims apart from where the larger ones take.
        let aside = if most == 1 { length / 1000 } else { 0 };
        let pointer = gone.unwrap_or(0) + length / 2 - aside;
        redis::cmd("HSET")
            .arg(lane(shard, "P")?)
            .arg(worker.as_str())
            .arg(pointer)
            .exec_async(&mut self.redis.conn())
            .await?;
        Ok(pointer)
    }

    async fn pointer(&self, shard: &ShardId, worker: &WorkerName) -> anyhow::Result<Option<usize>> {
        let mut get = redis::cmd("HGET");
        get.arg(lane(shard, "P")?).arg(worker.as_str());
        Ok(get.query_async::<Option<usize>>(&mut self.conn()).await?)
    }

    fn conn(&self) -> Connection {
        self.redis.conn()
    }

    pub(crate) async fn empty(&self) -> anyhow::Result<()> {
        Ok(redis::cmd("FLUSHALL")
            .arg("SYNC")
            .exec_async(&mut self.conn())
            .await?)
    }

    /// Waits until the append-only file is not being rewritten: the fork would distort the
    /// measurement.
    async fn rewritten(&self) -> anyhow::Result<()> {
        while self
            .server
            .info("persistence", "aof_rewrite_in_progress:")
            .await?
            > 0.0
            || self
                .server
                .info("persistence", "aof_rewrite_scheduled:")
                .await?
                > 0.0
        {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        Ok(())
    }
}

/// Claims and completions by taskd's own scripts, with fsync always, but without gRPC and SQL.
/// Returns tasks per second.
pub(crate) async fn cycle(callers: usize, batch: usize, tasks: usize) -> anyhow::Result<f64> {
    let mut bed = Bed::start().await?;
    bed.server.set("appendfsync", "always").await?;
    let (shard, _) = bed.fill(1, tasks).await?;
    let (shard, bed) = (bed.shard(&shard)?, Arc::new(bed));
    let mut workers = JoinSet::new();
    let began = Instant::now();
    for number in 0..callers {
        let (shard, bed, worker) = (
            Arc::clone(&shard),
            Arc::clone(&bed),
            WorkerName::new(&format!("worker-{number}"))?,
        );
        workers.spawn(async move {
            let mut done = 0;
            loop {
                let tasks = bed.claim_some(&shard, &worker, batch).await?;
                if tasks.is_empty() {
                    return anyhow::Ok(done);
                }
                done += tasks.len();
                bed.complete(&worker, tasks).await?;
            }
        });
    }
    let mut done = 0;
    while let Some(ended) = workers.join_next().await {
        done += ended??;
    }
    let seconds = began.elapsed().as_secs_f64();
    ensure!(
        done == tasks,
        "the scripts completed {done} of {tasks} tasks"
    );
    Ok(tasks as f64 / seconds)
}

/// A key of the lane of medium priority.
fn lane(shard: &ShardId, which: &str) -> anyhow::Result<String> {
    let keys = ShardKeys::new(PREFIX, shard);
    let end = format!(":m:{which}");
    keys.lanes()
        .iter()
        .find(|key| key.ends_with(&end))
        .cloned()
        .context("a lane has these keys")
}

/// µs per task, in the last ten batches.
fn last_micros(batches: &[f64]) -> f64 {
    let last = &batches[batches.len().saturating_sub(10)..];
    quantile(last, 0.5) / ENQUEUE as f64
}

#[derive(Default)]
struct Samples {
    micros: Vec<f64>,
    script_micros: Vec<f64>,
    scripts: Vec<f64>,
    bare: Vec<f64>,
}

impl Samples {
    /// Times a call. The server has just run a script, so every call finds it in the same state.
    async fn time<T>(
        &mut self,
        bed: &Bed,
        call: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        let mut conn = bed.conn();
        let began = Instant::now();
        bed.bare.exec_async(&mut conn).await?;
        self.bare.push(began.elapsed().as_secs_f64() * 1e6);
        let before = bed.server.scripts().await?;
        let began = Instant::now();
        let answer = call.await?;
        self.micros.push(began.elapsed().as_secs_f64() * 1e6);
        let after = bed.server.scripts().await?;
        self.script_micros.push(after.micros - before.micros);
        self.scripts.push(after.calls - before.calls);
        Ok(answer)
    }

    fn into(self, cost: &mut Cost) {
        cost.call.push(quantile(&self.micros, 0.5));
        cost.script.push(quantile(&self.script_micros, 0.5));
        cost.bare.push(quantile(&self.bare, 0.5));
        cost.scripts
            .push(self.scripts.iter().sum::<f64>() / self.scripts.len() as f64);
    }
}

fn claim_table(cells: &[Cell]) -> Table {
    let bare = cells.first().map(|cell| {
        row(
            "limit: EVALSHA `return 1`",
            &cell.claim.bare,
            [None, None, None],
        )
    });
    let claims = cells.iter().map(|cell| {
        let place = if cell.place == Place::Tail {
            "tail"
        } else {
            "middle"
        };
        let figure = format!(
            "NUM {}, {place}, {} a claim, {} wait",
            cell.replicas, cell.most, cell.waiting
        );
        compared(&figure, cell, cells, |cell| &cell.claim)
    });
    let completions = cells
        .iter()
        .filter(|cell| cell.place == Place::Tail && cell.replicas == 1)
        .map(|cell| {
            let figure = format!(
                "complete {} ({:.2} scripts), {} wait",
                cell.most,
                cell.complete.scripts.median(),
                cell.waiting
            );
            compared(&figure, cell, cells, |cell| &cell.complete)
        });
    Table {
        bench: "claim",
        title: "claim: µs of one call by how many tasks wait",
        conditions: "`taskd::queue::Queue` on a redis-server of its own, appendfsync everysec (a claim's fsync would \
                     hide its cost; `command` has it in), one connection, one call at a time, the median call of each \
                     run. tail: workers that never claimed; middle: a worker that has passed half of the elements."
            .into(),
        references: vec!["fewest wait".into(), "fewest wait, inside Redis".into(), "EVALSHA".into()],
        rows: bare.into_iter().chain(claims).chain(completions).collect(),
    }
}

/// Compares a cell with the cell of the same kind that has the fewest waiting tasks, and with a
/// trivial script.
fn compared(figure: &str, cell: &Cell, cells: &[Cell], cost: impl Fn(&Cell) -> &Cost) -> Row {
    let alike = |other: &&Cell| {
        (other.replicas, other.place, other.most) == (cell.replicas, cell.place, cell.most)
    };
    let fewest = cells.iter().filter(alike).min_by_key(|other| other.waiting);
    let fewest = fewest
        .filter(|fewest| fewest.waiting != cell.waiting)
        .map(&cost);
    let cost = cost(cell);
    let call = fewest.map(|fewest| cost.call.over(&fewest.call));
    let script = fewest.map(|fewest| cost.script.over(&fewest.script));
    row(
        figure,
        &cost.call,
        [call, script, Some(cost.call.over(&cost.bare))],
    )
}

fn row(figure: &str, runs: &Runs, ratios: [Option<Runs>; 3]) -> Row {
    Row {
        figure: figure.to_owned(),
        unit: Unit::Micros,
        runs: runs.clone(),
        ratios: ratios.to_vec(),
    }
}

fn fill_table(fills: &[Fill], body: usize) -> Table {
    let mut rows = Vec::new();
    let full: Vec<_> = fills
        .iter()
        .filter(|fill| fill.waiting >= ENQUEUE)
        .collect();
    for fill in &full {
        let base = full.first().filter(|base| base.waiting != fill.waiting);
        let ratios = vec![base.map(|base| fill.micros.over(&base.micros)), None];
        let figure = format!("enqueue, a task, {} wait", fill.waiting);
        rows.push(Row {
            figure,
            unit: Unit::Micros,
            runs: fill.micros.clone(),
            ratios,
        });
    }
    for fill in full
        .iter()
        .filter(|fill| fill.bytes.0.iter().all(|bytes| bytes.is_finite()))
    {
        let of_body = Runs(
            fill.bytes
                .0
                .iter()
                .map(|bytes| bytes / body as f64)
                .collect(),
        );
        let figure = format!("Redis memory, a task, {} wait", fill.waiting);
        rows.push(Row {
            figure,
            unit: Unit::Bytes,
            runs: fill.bytes.clone(),
            ratios: vec![None, Some(of_body)],
        });
    }
    Table {
        bench: "claim",
        title: "enqueue: µs and bytes of one task",
        conditions: format!(
            "The same queues while they were filled: {ENQUEUE} tasks a call, bodies of {body} bytes, the last ten \
             calls; used_memory."
        ),
        references: vec!["fewest wait".into(), "body".into()],
        rows,
    }
}
