//! Agreement between processes, with a clock that the tests move.

use std::{sync::Arc, time::Duration};

use taskd::{
    bus::redis_streams::RedisStreams,
    config::Settings,
    coordination::{Coordination, Error},
    model::Presence,
    redis_pool::Redis,
    runtime::{Clock, Supervisor},
};

use crate::support::{
    PATIENCE,
    process::Process,
    redis::{Fsync, RedisServer},
    sqlite::SqliteFile,
    store_contract::Database as _,
    until,
};

const LEASE: Duration = Duration::from_secs(3600);

struct Fixture {
    redis: Redis,
    clock: Clock,
    _server: RedisServer,
}

impl Fixture {
    async fn start() -> Self {
        let server = RedisServer::start(Fsync::EverySecond);
        let redis = Redis::connect(&server.url(), "t").await.unwrap();
        Self {
            redis,
            clock: Clock::of_this_machine(),
            _server: server,
        }
    }

    fn process(&self, name: &str) -> Coordination {
        Coordination::new(self.redis.clone(), name, self.clock.clone())
    }
}

#[tokio::test]
async fn the_lease_of_a_silent_holder_is_taken_over_when_it_ends() {
    let fixture = Fixture::start().await;
    let (a, b) = (fixture.process("a"), fixture.process("b"));
    assert!(a.lease("work", LEASE).await.unwrap());
    fixture.clock.advance(LEASE / 2);
    assert!(!b.lease("work", LEASE).await.unwrap());
    assert!(a.lease("work", LEASE).await.unwrap(), "its holder keeps it");
    fixture.clock.advance(LEASE / 2);
    assert!(!b.lease("work", LEASE).await.unwrap());
    fixture.clock.advance(LEASE / 2);
    assert!(b.lease("work", LEASE).await.unwrap());
    assert!(!a.lease("work", LEASE).await.unwrap());
    a.release("work").await.unwrap();
    assert!(
        !a.lease("work", LEASE).await.unwrap(),
        "another's lease is not given back"
    );
    b.release("work").await.unwrap();
    assert!(a.lease("work", LEASE).await.unwrap());
}

#[tokio::test]
async fn redis_keeps_its_name_until_it_loses_its_data() {
    let fixture = Fixture::start().await;
    let (a, b) = (fixture.process("a"), fixture.process("b"));
    let name = a.redis_name().await.unwrap();
    assert_eq!(
        (b.redis_name().await.unwrap(), a.redis_name().await.unwrap()),
        (name.clone(), name.clone())
    );
    redis::cmd("FLUSHALL")
        .query_async::<()>(&mut fixture.redis.conn())
        .await
        .unwrap();
    assert_ne!(b.redis_name().await.unwrap(), name);
}

#[tokio::test]
async fn redis_belongs_to_one_database() {
    let fixture = Fixture::start().await;
    let (a, b) = (fixture.process("a"), fixture.process("b"));
    a.own("one").await.unwrap();
    b.own("one").await.unwrap();
    let refused = b.own("two").await.unwrap_err();
    assert!(
        matches!(&refused, Error::OfAnother { owner, .. } if owner == "one"),
        "{refused}"
    );
    assert!(!refused.is_transient());
}

#[tokio::test]
async fn a_lost_ownership_key_ends_the_round() {
    let fixture = Fixture::start().await;
    let (a, supervisor) = (
        fixture.process("a"),
        Supervisor::with_clock(fixture.clock.clone()),
    );
    a.own("one").await.unwrap();
    a.watch_owner("one".to_owned(), &supervisor);
    redis::cmd("FLUSHALL")
        .query_async::<()>(&mut fixture.redis.conn())
        .await
        .unwrap();
    let given_up = async {
        let moving = async {
            loop {
                fixture.clock.advance(Duration::from_secs(1));
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            error = supervisor.given_up() => error.to_string(),
            () = moving => unreachable!("it moves for ever"),
        }
    };
    let error = tokio::time::timeout(PATIENCE, given_up).await.unwrap();
    assert_eq!(error, "redis has forgotten whose tasks it holds");
    supervisor.wait().await;
}

#[tokio::test]
async fn epochs_rise_and_a_redis_that_fell_back_is_raised_again() {
    let fixture = Fixture::start().await;
    let (a, b) = (fixture.process("a"), fixture.process("b"));
    assert_eq!(a.take_epoch(0).await.unwrap(), 1);
    assert_eq!(b.take_epoch(0).await.unwrap(), 2);
    assert_eq!(b.take_epoch(1).await.unwrap(), 1);
    a.epoch_is_at_least(0, 9).await.unwrap();
    a.epoch_is_at_least(0, 5).await.unwrap();
    assert_eq!(b.take_epoch(0).await.unwrap(), 10);
}

/// A watchdog whose bus is in a Redis of its own, on the clock of the fixture.
struct Watchdog {
    supervisor: Supervisor,
    bus: RedisServer,
    _database: SqliteFile,
}

impl Watchdog {
    async fn start(fixture: &Fixture, name: &str) -> Self {
        let (server, database) = (
            RedisServer::start(Fsync::EverySecond),
            SqliteFile::create().await,
        );
        let bus = Redis::connect(&server.url(), "t").await.unwrap();
        let bus = Arc::new(RedisStreams::open(bus, "", 1).await.unwrap());
        let clock = fixture.clock.clone();
        let process = Process::named(
            name,
            &fixture.redis,
            &database.open().await,
            bus,
            clock.clone(),
        );
        let supervisor = Supervisor::with_clock(clock);
        process.watchdog(&Arc::new(Settings::default()), &supervisor);
        Self {
            supervisor,
            bus: server,
            _database: database,
        }
    }

    async fn stop(self) {
        self.supervisor.stop();
        self.supervisor.wait().await;
    }
}

impl Fixture {
    async fn leader(&self) -> Option<String> {
        redis::cmd("GET")
            .arg("t:lease:watchdog")
            .query_async(&mut self.redis.conn())
            .await
            .unwrap()
    }

    /// Waits until `name` leads, and moves the clock meanwhile.
    async fn leads(&self, name: &str) {
        until(&format!("{name} leads"), async || {
            self.clock.advance(Duration::from_millis(100));
            self.leader().await.as_deref() == Some(name)
        })
        .await;
    }
}

#[tokio::test]
async fn a_watchdog_takes_over_when_the_leader_has_died() {
    let fixture = Fixture::start().await;
    assert!(
        fixture
            .process("dead")
            .lease("watchdog", Duration::from_secs(4))
            .await
            .unwrap()
    );
    let watchdog = Watchdog::start(&fixture, "a").await;
    assert_eq!(fixture.leader().await.as_deref(), Some("dead"));
    fixture.leads("a").await;
    watchdog.stop().await;
    assert_eq!(
        fixture.leader().await,
        None,
        "a leader that stops gives the lease back"
    );
}

#[tokio::test]
async fn a_leader_whose_bus_hangs_makes_way_for_another() {
    let fixture = Fixture::start().await;
    let stalled = Watchdog::start(&fixture, "stalled").await;
    fixture.leads("stalled").await;
    let other = Watchdog::start(&fixture, "other").await;
    stalled.bus.stop();
    fixture.leads("other").await;
    stalled.bus.cont();
    stalled.stop().await;
    other.stop().await;
}

/// A process that is killed says nothing more.
#[tokio::test]
async fn a_silent_process_leaves_the_list_of_those_that_live() {
    let fixture = Fixture::start().await;
    let (a, b) = (fixture.process("a"), fixture.process("b"));
    let presence = |process: &str| Presence {
        process: process.to_owned(),
        ..Presence::default()
    };
    let living = async || {
        let processes = a.processes().await.unwrap();
        let mut names: Vec<String> = processes.into_iter().map(|one| one.process).collect();
        names.sort();
        names
    };
    assert!(living().await.is_empty());
    a.announce(&presence("a")).await.unwrap();
    b.announce(&presence("b")).await.unwrap();
    assert_eq!(living().await, ["a", "b"]);
    fixture.clock.advance(Duration::from_secs(10));
    b.announce(&presence("b")).await.unwrap();
    assert_eq!(living().await, ["a", "b"]);
    fixture.clock.advance(Duration::from_secs(10));
    assert_eq!(living().await, ["b"]);
    b.leave("b").await.unwrap();
    assert!(living().await.is_empty());
}
