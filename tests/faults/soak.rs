//! `make soak`: all faults in random order, sometimes two at once, with a full check after each
//! round, for any length of time.

use std::{
    path::Path,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use crate::{
    dice::Dice,
    disk::SmallDisk,
    fault,
    servers::{Cluster, has_script},
    world::{self, Bus, Plan, Servers, Wanted, World},
};

/// A combination of servers; rounds alternate between them.
#[derive(Debug)]
struct Ground {
    bus: Bus,
    brokers: usize,
    cluster: bool,
    redis_program: String,
    sql_script: &'static str,
}

/// Runs with `--minutes N --seed N --only WORD`, given as one string. With `--only`, chooses only
/// faults with the word in their name.
pub(crate) fn run(args: &str) -> ExitCode {
    let words: Vec<_> = args.split_whitespace().collect();
    let number = |name: &str| {
        let at = words.iter().position(|word| *word == name)?;
        Some(
            words
                .get(at + 1)
                .and_then(|n| n.parse::<u64>().ok())
                .unwrap_or_else(|| panic!("{name} needs a number")),
        )
    };
    let only = words
        .iter()
        .position(|word| *word == "--only")
        .and_then(|at| words.get(at + 1))
        .copied()
        .unwrap_or("");
    let minutes = number("--minutes").unwrap_or(10);
    let seed =
        number("--seed").unwrap_or_else(|| uuid::Uuid::new_v4().as_u128() as u64 % 1_000_000);
    println!(
        "soak: {minutes} minutes, seed {seed}; again with: make soak ARGS=\"--minutes {minutes} --seed {seed}\""
    );
    let deadline = Instant::now() + Duration::from_secs(minutes * 60);
    let mut dice = Dice::new(seed, "soak");
    let clocks = fault::faketime().is_some();
    if !clocks {
        println!(
            "soak: no clock goes wrong: there is no libfaketime (apt-get install libfaketime)"
        );
    }
    let grounds = grounds();
    let mut rounds = 0;
    while rounds == 0 || Instant::now() < deadline {
        let ground = &grounds[rounds % grounds.len()];
        println!("soak: round {rounds} on {ground:?}");
        // Use a separate runtime, so that everything left over from a round ends with it.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap();
        let seed = seed + rounds as u64;
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            runtime.block_on(round(ground, clocks, only, seed, &mut dice, deadline));
        }));
        if outcome.is_err() {
            println!("soak: FAILED in round {rounds}, seed {seed}");
            return ExitCode::FAILURE;
        }
        rounds += 1;
    }
    println!("soak: {rounds} rounds passed");
    ExitCode::SUCCESS
}

/// The combinations that are possible on this machine.
fn grounds() -> Vec<Ground> {
    let ground = |bus, brokers, cluster, redis: &str, sql_script| {
        let redis_program = redis.to_owned();
        Ground {
            bus,
            brokers,
            cluster,
            redis_program,
            sql_script,
        }
    };
    let mut grounds = vec![
        ground(Bus::Kafka, 3, false, "redis-server", "start-mariadb"),
        ground(Bus::Streams, 0, false, "redis-server", "start-mariadb"),
    ];
    let mysql8 = has_script("start-mysql8").then_some("start-mysql8");
    let valkey = valkey();
    if mysql8.is_none() {
        println!("soak: no MySQL 8: there is no scripts/start-mysql8");
    }
    if valkey.is_none() {
        println!("soak: no Valkey: there is no scripts/start-valkey, or it found none");
    }
    if mysql8.is_some() || valkey.is_some() {
        let redis = valkey.as_deref().unwrap_or("redis-server");
        grounds.push(ground(
            Bus::Streams,
            0,
            false,
            redis,
            mysql8.unwrap_or("start-mariadb"),
        ));
        grounds.push(ground(
            Bus::Kafka,
            1,
            false,
            redis,
            mysql8.unwrap_or("start-mariadb"),
        ));
    }
    if has_script(Cluster::SCRIPT) {
        grounds.push(ground(
            Bus::Streams,
            0,
            true,
            "redis-server",
            "start-mariadb",
        ));
        grounds.push(ground(Bus::Kafka, 1, true, "redis-server", "start-mariadb"));
    } else {
        println!(
            "soak: no Redis Cluster: there is no scripts/{}",
            Cluster::SCRIPT
        );
    }
    grounds
}

/// The path of the valkey-server program.
fn valkey() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/start-valkey");
    let found = Command::new(script).arg("--program").output().ok()?;
    let program = String::from_utf8(found.stdout).ok()?.trim().to_owned();
    (found.status.success() && Path::new(&program).exists()).then_some(program)
}

/// Starts new servers and a new world, injects some faults, waits until all work is done, and
/// checks.
async fn round(
    ground: &Ground,
    clocks: bool,
    only: &str,
    seed: u64,
    dice: &mut Dice,
    deadline: Instant,
) {
    let root = tempfile::Builder::new()
        .prefix("taskd-soak-")
        .tempdir_in("/tmp")
        .unwrap();
    // The smallest size that the server can run with.
    let disks = [("redis", "96m"), ("sql", "640m")]
        .map(|(name, size)| SmallDisk::mount(&root.path().join(name), size));
    if disks.iter().any(Option::is_none) {
        println!("soak: no disk gets full: only root may mount a small one");
    }
    let wanted = Wanted {
        redis_program: ground.redis_program.clone(),
        sql_script: ground.sql_script,
        brokers: ground.brokers,
        cluster: ground.cluster,
        proxied: true,
    };
    let mut servers = Servers::start_in(root, &wanted).await;
    servers.disks.extend(disks.into_iter().flatten());
    let mut kept = Kept(servers);
    // librdkafka waits by the wall clock in a call that libfaketime does not intercept, so it could
    // sleep for an hour for no reason.
    let clocks = clocks && ground.bus == Bus::Streams;
    let plan = Plan {
        bus: ground.bus,
        cluster: ground.cluster,
        proxied: true,
        clocks,
        seed,
    };
    let mut world = World::start(&mut kept.0, plan).await;
    let mut possible = fault::all(&world);
    possible.retain(|fault| fault.to_string().contains(only));
    assert!(
        !possible.is_empty(),
        "no fault of this ground is named {only}"
    );
    for n in 0..8 {
        if n > 0 && Instant::now() > deadline {
            break;
        }
        world.work(200).await;
        let mut faults = vec![*dice.pick(&possible)];
        let second = *dice.pick(&possible);
        if dice.chance(30) && faults[0].may_meet(&second) {
            faults.push(second);
        }
        let lasting = match faults.iter().any(fault::Fault::lasts) {
            true => Duration::from_millis(500 + dice.below(9_500) as u64),
            false => Duration::ZERO,
        };
        world.suffer(&faults, lasting).await;
    }
    world.work(200).await;
    let ledger = std::sync::Arc::clone(&world.ledger);
    world.end().await;
    println!("    {}", world::summary(&ledger));
}

/// On failure, keeps the files of the servers; copies those on small disks, which are unmounted.
struct Kept(Servers);

impl Drop for Kept {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for disk in &self.0.disks {
            let copy = disk.at().with_extension("kept");
            Command::new("cp")
                .arg("-a")
                .args([disk.at(), &copy])
                .status()
                .ok();
        }
        self.0.keep();
    }
}
