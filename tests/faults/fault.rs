//! The faults that can be injected into a world.

use std::{fmt, fs, time::Duration};

use nix::sys::signal::Signal;

use crate::{
    hostile::Hostile,
    servers::Server,
    support::proxy::{Mode, Proxy},
    world::{Bus, PROCESSES, World},
};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Which {
    Redis,
    Sql,
    Kafka(usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    KillTaskd(usize),
    KillAllTaskd,
    StopTaskd(usize),
    /// Processes leave and join again, one per second.
    RebalanceStorm,
    Kill(Which),
    /// SIGSTOP: connections stay open, but nothing is answered.
    Stop(Which),
    /// Redis is out of memory: it refuses commands that would need more.
    RedisIsFull,
    /// Redis cannot save its snapshot: it refuses every write.
    RedisCannotSave,
    FlushAll,
    /// SIGKILL of a master in the Redis Cluster; its replica takes over.
    KillMaster,
    /// The connection from one process, or from all of them, to a server. Connections to Kafka are
    /// shared.
    Cut(Option<usize>, Which, Mode),
    /// All current connections to a server go silent forever; new ones work.
    Silence(Which),
    /// The disk of this server is full.
    DiskFull(Which),
    /// Misbehaving clients, in addition to the honest ones.
    HostileClients,
    /// The clock of one process is wrong by this many hours.
    Clock(usize, i32),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KillTaskd(n) => write!(f, "SIGKILL of process {n}"),
            Self::KillAllTaskd => write!(f, "SIGKILL of all processes"),
            Self::StopTaskd(n) => write!(f, "SIGSTOP of process {n}"),
            Self::RebalanceStorm => write!(f, "processes leave and join every second"),
            Self::Kill(which) => write!(f, "SIGKILL of {which:?}"),
            Self::Stop(which) => write!(f, "SIGSTOP of {which:?}"),
            Self::RedisIsFull => write!(f, "Redis has no memory left"),
            Self::RedisCannotSave => write!(f, "Redis cannot save and refuses writes"),
            Self::FlushAll => write!(f, "FLUSHALL"),
            Self::KillMaster => write!(f, "SIGKILL of a cluster's master"),
            Self::Cut(Some(n), which, mode) => write!(f, "process {n} to {which:?}: {mode:?}"),
            Self::Cut(None, which, mode) => write!(f, "all processes to {which:?}: {mode:?}"),
            Self::Silence(which) => write!(f, "the connections to {which:?} fall silent"),
            Self::DiskFull(which) => write!(f, "the disk of {which:?} is full"),
            Self::HostileClients => write!(f, "hostile clients"),
            Self::Clock(n, hours) => {
                write!(f, "the clock of process {n} goes wrong by {hours:+} h")
            }
        }
    }
}

pub(crate) use crate::support::faketime;

impl Fault {
    /// Injects the fault. What was killed is started again by [`Self::heal`]. `alone` says that no
    /// other fault is active at the same time.
    pub(crate) async fn inject(&self, world: &mut World<'_>, alone: bool) {
        match *self {
            Self::KillTaskd(n) => world.daemons[n].kill9(),
            Self::KillAllTaskd => world.daemons.iter_mut().for_each(|daemon| daemon.kill9()),
            Self::StopTaskd(n) => world.signal(n, Signal::SIGSTOP),
            Self::RebalanceStorm => storm(world, alone).await,
            Self::Kill(which) => tokio::task::block_in_place(|| world.server(which).kill9()),
            Self::Stop(which) => world.server(which).signal(Signal::SIGSTOP),
            Self::RedisIsFull => redis(world, &["CONFIG", "SET", "maxmemory", "1mb"]).await,
            Self::RedisCannotSave => {
                // A folder takes the place of the snapshot file, so that saving fails.
                fs::create_dir(world.servers.redis.dir().join("dump.rdb")).unwrap();
                redis(world, &["CONFIG", "SET", "save", "3600 1000000"]).await;
                redis(world, &["BGSAVE", "SCHEDULE"]).await;
            }
            Self::FlushAll => {
                world.ledger.redis_loses();
                redis(world, &["FLUSHALL"]).await;
                world.ledger.redis_loses();
            }
            Self::KillMaster => {
                // Its last writes may not have been replicated.
                world.ledger.redis_loses();
                let cluster = world.servers.cluster.as_ref().expect("there is one");
                let (master, _) = cluster.masters().await.swap_remove(0);
                tokio::task::block_in_place(|| cluster.node(master).kill9());
            }
            Self::Cut(who, which, mode) => {
                ways(world, who, which).for_each(|proxy| proxy.set(mode))
            }
            Self::Silence(which) => ways(world, None, which).for_each(|proxy| _ = proxy.silence()),
            Self::DiskFull(which) => crate::disk::fill(world, which),
            Self::HostileClients => world.hostile = Some(Hostile::start(&world.daemons)),
            Self::Clock(n, hours) => {
                let maps =
                    fs::read_to_string(format!("/proc/{}/maps", world.daemons[n].pid())).unwrap();
                assert!(
                    maps.contains("libfaketime"),
                    "process {n} has the clock of this machine"
                );
                fs::write(world.clock_file(n), format!("{:+}", hours * 3600)).unwrap();
            }
        }
    }

    pub(crate) async fn heal(&self, world: &mut World<'_>) {
        match *self {
            Self::KillTaskd(n) => world.daemons[n].start_again(),
            Self::KillAllTaskd => world
                .daemons
                .iter_mut()
                .for_each(|daemon| daemon.start_again()),
            Self::StopTaskd(n) => world.signal(n, Signal::SIGCONT),
            Self::RebalanceStorm | Self::FlushAll | Self::Silence(_) => {}
            Self::Kill(which) => tokio::task::block_in_place(|| world.server(which).start()),
            Self::Stop(which) => world.server(which).signal(Signal::SIGCONT),
            Self::RedisIsFull => redis(world, &["CONFIG", "SET", "maxmemory", "0"]).await,
            Self::RedisCannotSave => {
                redis(world, &["CONFIG", "SET", "save", ""]).await;
                fs::remove_dir(world.servers.redis.dir().join("dump.rdb")).unwrap();
                redis(world, &["BGSAVE", "SCHEDULE"]).await;
            }
            Self::KillMaster => {
                let cluster = world.servers.cluster.as_mut().expect("there is one");
                tokio::task::block_in_place(|| cluster.start_again());
                world.ledger.redis_loses();
            }
            Self::Cut(who, which, _) => {
                ways(world, who, which).for_each(|proxy| proxy.set(Mode::Pass))
            }
            Self::DiskFull(which) => {
                tokio::task::block_in_place(|| crate::disk::empty(world, which))
            }
            Self::HostileClients => world.hostile_have_harmed_nobody().await,
            Self::Clock(n, _) => fs::write(world.clock_file(n), "+0").unwrap(),
        }
    }

    /// True if the fault lasts until it is healed; the others are over at once.
    pub(crate) fn lasts(&self) -> bool {
        !matches!(
            self,
            Self::RebalanceStorm | Self::FlushAll | Self::Silence(_)
        )
    }

    /// True if both faults can be active at once without disturbing each other's healing.
    pub(crate) fn may_meet(&self, other: &Self) -> bool {
        // Their healing waits for work, which another fault may block.
        if [self, other].contains(&&Self::HostileClients) {
            return false;
        }
        let apart = |a: Option<usize>, b: Option<usize>| a.is_none() || b.is_none() || a != b;
        let whole = [Self::KillAllTaskd, Self::RebalanceStorm];
        let either_whole = whole.contains(self) || whole.contains(other);
        let processes = (self.process(), other.process());
        let servers = (self.server(), other.server());
        apart(processes.0, processes.1)
            && !(either_whole && (processes.0.is_some() || processes.1.is_some()))
            && !(whole.contains(self) && whole.contains(other))
            && (servers.0.is_none() || servers.0 != servers.1)
    }

    /// The server that is affected.
    fn server(&self) -> Option<Which> {
        match *self {
            Self::Kill(which)
            | Self::Stop(which)
            | Self::Cut(_, which, _)
            | Self::Silence(which)
            | Self::DiskFull(which) => Some(which),
            Self::RedisIsFull | Self::RedisCannotSave | Self::FlushAll | Self::KillMaster => {
                Some(Which::Redis)
            }
            _ => None,
        }
    }

    fn process(&self) -> Option<usize> {
        match *self {
            Self::KillTaskd(n) | Self::StopTaskd(n) => Some(n),
            _ => None,
        }
    }
}

async fn redis(world: &World<'_>, command: &[&str]) {
    world
        .servers
        .redis
        .command(command)
        .await
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
}

async fn storm(world: &mut World<'_>, alone: bool) {
    for round in 0..6 {
        let daemon = &mut world.daemons[round % PROCESSES];
        daemon.signal(Signal::SIGTERM);
        tokio::time::sleep(Duration::from_secs(1)).await;
        // Stopping may take longer than the second between two steps.
        let status = daemon.ended().await;
        // If another fault is active, the grace period may end before the work in hand does, and
        // then the process exits with an error.
        let is_sound = status.success() || !alone && status.code() == Some(1);
        assert!(is_sound, "a process that left ended with {status}");
        daemon.start_again();
    }
}

/// The proxies between a process, or all of them, and a server.
fn ways<'a>(
    world: &'a World<'_>,
    who: Option<usize>,
    which: Which,
) -> impl Iterator<Item = &'a Proxy> {
    let processes = who.map_or(0..PROCESSES, |n| n..n + 1);
    let (own, shared) = match which {
        Which::Redis => (Some(0), None),
        Which::Sql => (Some(1), None),
        Which::Kafka(n) => (None, Some(&world.servers.kafka_proxies[n])),
    };
    let own = own
        .into_iter()
        .flat_map(move |server| processes.clone().map(move |n| &world.proxies[n][server]));
    own.chain(shared)
}

/// All faults that are possible in this world, to choose from.
pub(crate) fn all(world: &World<'_>) -> Vec<Fault> {
    use Fault::*;
    let mut servers = vec![Which::Sql];
    let mut all = vec![KillAllTaskd, RebalanceStorm, HostileClients];
    if world.plan.cluster {
        all.push(KillMaster);
    } else {
        servers.push(Which::Redis);
        all.extend([RedisIsFull, RedisCannotSave, FlushAll]);
    }
    if world.plan.bus == Bus::Kafka {
        servers.extend((0..world.servers.kafka.len()).map(Which::Kafka));
    }
    for n in 0..PROCESSES {
        all.extend([KillTaskd(n), StopTaskd(n)]);
        if world.plan.clocks {
            all.extend([Clock(n, 1), Clock(n, -1)]);
        }
    }
    for which in servers {
        all.extend([Kill(which), Stop(which)]);
        if world.plan.proxied {
            let who = (0..PROCESSES)
                .map(Some)
                .chain([None])
                .filter(|who| who.is_none() || !matches!(which, Which::Kafka(_)));
            let modes = [Mode::Stall, Mode::Drop, Mode::Refuse];
            all.extend(who.flat_map(|who| modes.map(|mode| Cut(who, which, mode))));
            all.push(Silence(which));
        }
        if crate::disk::is_small(world, which) {
            all.push(DiskFull(which));
        }
    }
    all
}
