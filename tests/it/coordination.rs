//! Agreement between processes, with a clock that the tests move.

use std::time::Duration;

use taskd::{
    coordination::{Coordination, Error},
    redis_pool::Redis,
    runtime::{Clock, Supervisor},
};

use crate::support::redis::{Fsync, RedisServer};

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
        Self { redis, clock: Clock::of_this_machine(), _server: server }
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
    assert!(!a.lease("work", LEASE).await.unwrap(), "another's lease is not given back");
    b.release("work").await.unwrap();
    assert!(a.lease("work", LEASE).await.unwrap());
}

#[tokio::test]
async fn redis_belongs_to_one_database() {
    let fixture = Fixture::start().await;
    let (a, b) = (fixture.process("a"), fixture.process("b"));
    a.own("one").await.unwrap();
    b.own("one").await.unwrap();
    let refused = b.own("two").await.unwrap_err();
    assert!(matches!(&refused, Error::OfAnother { owner, .. } if owner == "one"), "{refused}");
    assert!(!refused.is_transient());
}

#[tokio::test]
async fn a_lost_ownership_key_ends_the_round() {
    let fixture = Fixture::start().await;
    let (a, supervisor) = (fixture.process("a"), Supervisor::with_clock(fixture.clock.clone()));
    a.own("one").await.unwrap();
    a.watch_owner("one".to_owned(), &supervisor);
    redis::cmd("FLUSHALL").query_async::<()>(&mut fixture.redis.conn()).await.unwrap();
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
    let error = tokio::time::timeout(Duration::from_secs(10), given_up).await.unwrap();
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
