//! Measures taskd with a more distant Redis: a proxy between them delays what taskd sends.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    command::{bench, latency_of, rate_of},
    daemon::Daemon,
    progress::Progress,
    redis_server::RedisServer,
    report::{Row, Runs, Table, Unit},
    scale::Scale,
};

/// The delays added to each round trip, in ms.
const DELAYS: [u64; 3] = [0, 1, 2];
const CONFIG: &str = "[queues.default]\nhigh_water_tasks = 1000000\n";

/// The figures with one delay.
#[derive(Default)]
struct Figures {
    claimable: Runs,
    completed: Runs,
    completed_one: Runs,
    p50: Runs,
    p99: Runs,
}

pub(crate) async fn run(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Table>> {
    let mut all = DELAYS.map(|_| Figures::default());
    let tasks = scale.delayed.to_string();
    for run in 1..=scale.runs {
        let redis = RedisServer::start().await?;
        let way = Way::open(redis.url())?;
        let daemon =
            Daemon::start_as("all", &["--redis-url".to_owned(), way.url()], CONFIG).await?;
        for (figures, millis) in all.iter_mut().zip(DELAYS) {
            progress.step(format!("delay, run {run} of {}: {millis} ms", scale.runs));
            way.delay.store(millis, Relaxed);
            let there = [
                &daemon.arguments()[..],
                &["--redis", redis.url(), "--tasks", &tasks],
            ]
            .concat();
            let many = bench(&[&["insert", "process", "latency"], &there[..]].concat()).await?;
            let one = bench(&[&["process", "--batch", "1"], &there[..]].concat()).await?;
            figures
                .claimable
                .push(rate_of(&many, "insert", "claimable")?);
            figures
                .completed
                .push(rate_of(&many, "process", "completed")?);
            figures
                .completed_one
                .push(rate_of(&one, "process", "completed")?);
            figures
                .p50
                .push(latency_of(&many, "insert to handler", "p50")?);
            figures
                .p99
                .push(latency_of(&many, "insert to handler", "p99")?);
        }
        daemon.stop().await?;
    }
    Ok(vec![table(scale, &all)])
}

fn table(scale: &Scale, all: &[Figures]) -> Table {
    let row = |figure: &str, millis: u64, unit, runs: &Runs, near: &Runs| {
        let ratios = vec![(millis > 0).then(|| runs.over(near))];
        Row {
            figure: format!("{figure}, {millis} ms"),
            unit,
            runs: runs.clone(),
            ratios,
        }
    };
    let rows = all.iter().zip(DELAYS).flat_map(|(figures, millis)| {
        let near = &all[0];
        [
            row(
                "insert → claimable",
                millis,
                Unit::PerSecond,
                &figures.claimable,
                &near.claimable,
            ),
            row(
                "process → completed, 100 a call",
                millis,
                Unit::PerSecond,
                &figures.completed,
                &near.completed,
            ),
            row(
                "process → completed, 1 a call",
                millis,
                Unit::PerSecond,
                &figures.completed_one,
                &near.completed_one,
            ),
            row(
                "insert → handler, p50",
                millis,
                Unit::Micros,
                &figures.p50,
                &near.p50,
            ),
            row(
                "insert → handler, p99",
                millis,
                Unit::Micros,
                &figures.p99,
                &near.p99,
            ),
        ]
    });
    Table {
        bench: "delay",
        title: "delay: a Redis that is further away",
        conditions: format!(
            "`taskd bench` with {} tasks. taskd reaches its Redis (appendfsync always) through a TCP connection that \
             delays all that taskd sends by so many ms; 0 ms takes the same way.",
            scale.delayed
        ),
        references: vec!["0 ms".into()],
        rows: rows.collect(),
    }
}

/// A proxy on a loopback port, in front of the socket of a redis-server. It lives as long as the
/// benchmark.
struct Way {
    port: u16,
    /// For how many ms received data is held back.
    delay: Arc<AtomicU64>,
}

impl Way {
    fn open(redis: &str) -> anyhow::Result<Self> {
        let socket = url::Url::parse(redis)?.path().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (port, delay) = (listener.local_addr()?.port(), Arc::<AtomicU64>::default());
        let held = Arc::clone(&delay);
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                // The redis-server has ended, so nothing needs the proxy any more.
                let Ok(far) = UnixStream::connect(&socket) else {
                    return;
                };
                connect(near, far, &held);
            }
        });
        Ok(Self { port, delay })
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

/// Forwards data in both directions. It uses threads, because they sleep with a precision of a
/// tenth of a millisecond, while tokio's timers have a resolution of one millisecond.
fn connect(mut near: TcpStream, mut far: UnixStream, delay: &Arc<AtomicU64>) {
    let (Ok(mut from_near), Ok(mut from_far)) = (near.try_clone(), far.try_clone()) else {
        return;
    };
    near.set_nodelay(true).ok();
    let (sender, late) = mpsc::channel::<(Instant, Vec<u8>)>();
    let delay = Arc::clone(delay);
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from_near.read(&mut buffer) {
            let due = Instant::now() + Duration::from_millis(delay.load(Relaxed));
            if sender.send((due, buffer[..count].to_vec())).is_err() {
                return;
            }
        }
    });
    thread::spawn(move || {
        for (due, bytes) in late {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if far.write_all(&bytes).is_err() {
                return;
            }
        }
        far.shutdown(Shutdown::Both).ok();
    });
    thread::spawn(move || {
        drop(std::io::copy(&mut from_far, &mut near));
        near.shutdown(Shutdown::Both).ok();
    });
}
