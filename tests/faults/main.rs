//! Checks taskd's promises while everything around it breaks. Three processes run under one fault
//! after another; inserts continue, and some of the twenty workers lie, crash, stall and repeat
//! themselves. At the end, every accepted task was completed by exactly NUM workers, or is dead
//! with a reason. Every answer holds in SQL, and nothing is left over. Every record that was stored
//! has one task in each subscription, those of a key in order. Every execution of a workflow that was
//! started completes, with one task for each of its steps. Every tree of a topology ends once, with one
//! task of each stage for each page, and each join has what its stages sent.
//!
//! This does not use cargo's test harness: the scenarios share servers that they kill, so they run
//! sequentially, and print how long taskd took to recover. `cargo test --test faults redis` runs
//! those with "redis" in their name, and `TASKD_SEED=7` sets the seed. With `TASKD_SOAK`, this is
//! `make soak`.

// Every spawned task is awaited or aborted by its test.
#![allow(clippy::disallowed_methods)]

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod check;
mod crowd;
mod dice;
mod disk;
mod executions;
mod fault;
mod hostile;
mod ledger;
mod pushed;
mod records;
mod servers;
mod soak;
mod tenant;
mod topologies;
mod world;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::{Duration, Instant},
};

use fault::{Fault, Which};
use world::{Bus, Plan, Servers, Wanted, World};

struct Scenario {
    name: &'static str,
    bus: Bus,
    fault: Fault,
    lasting: Duration,
}

impl Scenario {
    fn on_cluster(&self) -> bool {
        self.fault == Fault::KillMaster
    }

    fn sets_clocks(&self) -> bool {
        matches!(self.fault, Fault::Clock(..))
    }

    /// True if the connections to Redis and SQL go through proxies.
    fn proxied(&self) -> bool {
        matches!(self.fault, Fault::Silence(_))
    }
}

const fn scenario(name: &'static str, bus: Bus, fault: Fault, seconds: u64) -> Scenario {
    Scenario {
        name,
        bus,
        fault,
        lasting: Duration::from_secs(seconds),
    }
}

const SCENARIOS: &[Scenario] = &[
    scenario(
        "one_taskd_is_killed_on_kafka",
        Bus::Kafka,
        Fault::KillTaskd(0),
        1,
    ),
    scenario(
        "all_taskd_are_killed_on_kafka",
        Bus::Kafka,
        Fault::KillAllTaskd,
        1,
    ),
    scenario(
        "all_taskd_are_killed_on_redis_streams",
        Bus::Streams,
        Fault::KillAllTaskd,
        1,
    ),
    scenario(
        "processes_leave_and_join",
        Bus::Kafka,
        Fault::RebalanceStorm,
        0,
    ),
    scenario(
        "redis_is_killed_on_kafka",
        Bus::Kafka,
        Fault::Kill(Which::Redis),
        2,
    ),
    scenario(
        "redis_is_killed_on_redis_streams",
        Bus::Streams,
        Fault::Kill(Which::Redis),
        2,
    ),
    scenario(
        "redis_is_full_on_redis_streams",
        Bus::Streams,
        Fault::RedisIsFull,
        5,
    ),
    scenario(
        "redis_cannot_save_on_kafka",
        Bus::Kafka,
        Fault::RedisCannotSave,
        5,
    ),
    scenario(
        "redis_stands_still_on_redis_streams",
        Bus::Streams,
        Fault::Stop(Which::Redis),
        5,
    ),
    scenario(
        "connections_to_redis_fall_silent",
        Bus::Streams,
        Fault::Silence(Which::Redis),
        0,
    ),
    scenario(
        "connections_to_mariadb_fall_silent",
        Bus::Streams,
        Fault::Silence(Which::Sql),
        0,
    ),
    scenario(
        "redis_loses_everything_on_kafka",
        Bus::Kafka,
        Fault::FlushAll,
        0,
    ),
    scenario(
        "redis_loses_everything_on_redis_streams",
        Bus::Streams,
        Fault::FlushAll,
        0,
    ),
    scenario(
        "a_cluster_master_is_killed",
        Bus::Streams,
        Fault::KillMaster,
        2,
    ),
    scenario("a_clock_is_set_forth", Bus::Streams, Fault::Clock(0, 1), 3),
    scenario("a_clock_is_set_back", Bus::Streams, Fault::Clock(0, -1), 3),
    scenario(
        "hostile_clients_harm_nobody",
        Bus::Streams,
        Fault::HostileClients,
        0,
    ),
    scenario(
        "kafka_is_killed",
        Bus::Kafka,
        Fault::Kill(Which::Kafka(0)),
        0,
    ),
    scenario("mariadb_is_killed", Bus::Kafka, Fault::Kill(Which::Sql), 2),
];

/// This scenario only needs the servers that taskd itself starts.
const TENANT: &str = "a_hostile_tenant_harms_nobody";

/// The default seed. Every other seed must pass as well.
const SEED: u64 = 20_251_121;

fn main() -> ExitCode {
    if let Ok(args) = std::env::var("TASKD_SOAK") {
        return soak::run(&args);
    }
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with("--"))
        .collect();
    let chosen =
        |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
    let with_tenant = chosen(TENANT);
    let chosen: Vec<_> = SCENARIOS
        .iter()
        .filter(|scenario| chosen(scenario.name))
        .collect();
    if std::env::args().any(|word| word == "--list") {
        if with_tenant {
            println!("{TENANT}: test");
        }
        chosen
            .iter()
            .for_each(|scenario| println!("{}: test", scenario.name));
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let seed = std::env::var("TASKD_SEED")
        .map_or(SEED, |seed| seed.parse().expect("TASKD_SEED is a number"));
    println!(
        "\nrunning {} scenarios with seed {seed} (TASKD_SEED={seed} repeats it)",
        chosen.len()
    );
    let tenant_passed = !with_tenant || run_tenant(&runtime);
    let outcome = run(&runtime, &chosen, seed);
    if tenant_passed {
        outcome
    } else {
        ExitCode::FAILURE
    }
}

fn run_tenant(runtime: &tokio::runtime::Runtime) -> bool {
    println!("scenario {TENANT}");
    let began = Instant::now();
    let passed = catch_unwind(AssertUnwindSafe(|| runtime.block_on(tenant::play()))).is_ok();
    let outcome = if passed { "ok" } else { "FAILED" };
    println!("    {outcome}, {:.1} s", began.elapsed().as_secs_f64());
    passed
}

fn run(runtime: &tokio::runtime::Runtime, chosen: &[&Scenario], seed: u64) -> ExitCode {
    if chosen.is_empty() {
        return ExitCode::SUCCESS;
    }
    let began = Instant::now();
    let with_kafka = chosen.iter().any(|scenario| scenario.bus == Bus::Kafka);
    let wanted = Wanted {
        redis_program: "redis-server".into(),
        sql_script: "start-mariadb",
        brokers: usize::from(with_kafka),
        cluster: chosen.iter().any(|scenario| scenario.on_cluster()),
        proxied: false,
    };
    let mut servers = runtime.block_on(Servers::start(&wanted));
    println!(
        "servers are up after {:.1} s",
        began.elapsed().as_secs_f64()
    );
    let mut failed = Vec::new();
    for scenario in chosen {
        println!("scenario {}", scenario.name);
        let began = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            runtime.block_on(play(&mut servers, scenario, seed))
        }));
        match outcome {
            Ok(()) => println!("    ok, {:.1} s", began.elapsed().as_secs_f64()),
            Err(_) => {
                println!(
                    "    FAILED; again: TASKD_SEED={seed} cargo test --test faults {}",
                    scenario.name
                );
                failed.push(scenario.name);
                servers
                    .kafka
                    .iter()
                    .for_each(|broker| println!("    {}", broker.last_words()));
                // Repair the servers, so that damage does not fail the next scenario.
                runtime.block_on(servers.recover());
            }
        }
    }
    println!(
        "\n{} scenarios, {} failed, {:.0} s",
        chosen.len(),
        failed.len(),
        began.elapsed().as_secs_f64()
    );
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    servers.keep();
    ExitCode::FAILURE
}

async fn play(servers: &mut Servers, scenario: &Scenario, seed: u64) {
    let plan = Plan {
        bus: scenario.bus,
        cluster: scenario.on_cluster(),
        proxied: scenario.proxied(),
        clocks: scenario.sets_clocks(),
        seed,
    };
    let mut world = World::start(servers, plan).await;
    world.work(300).await;
    world.suffer(&[scenario.fault], scenario.lasting).await;
    world.work(100).await;
    let ledger = std::sync::Arc::clone(&world.ledger);
    world.end().await;
    println!("    {}", world::summary(&ledger));
}
