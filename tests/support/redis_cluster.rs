//! Real Redis Clusters: one shared by the whole run, and private ones for tests that kill nodes or
//! move slots.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::sync::OnceCell;

/// The URL `redis+cluster://…` of the cluster that all tests share: the one in
/// `TASKD_TEST_REDIS_CLUSTER`, or else one that `scripts/start-redis-cluster` starts and leaves
/// running. Each test uses its own prefix there.
pub async fn shared() -> &'static str {
    static CLUSTER: OnceCell<String> = OnceCell::const_new();
    let start = || async {
        match std::env::var("TASKD_TEST_REDIS_CLUSTER") {
            Ok(url) if !url.is_empty() => url,
            _ => tokio::task::spawn_blocking(|| run_script(None))
                .await
                .expect("the script"),
        }
    };
    CLUSTER.get_or_init(start).await
}

/// A prefix that is unique to one test.
pub fn own_prefix() -> String {
    format!("t{}", uuid::Uuid::now_v7().simple())
}

/// Three masters with one replica each, which takes over about two seconds after its master dies.
/// Dropping it stops all nodes and removes their folder.
pub struct RedisCluster {
    dir: TempDir,
    url: String,
}

/// A line of the output of CLUSTER NODES.
struct Node {
    /// The index of the node in the URL.
    index: usize,
    id: String,
    is_master: bool,
    slots: Vec<(u16, u16)>,
}

impl RedisCluster {
    /// The number of nodes.
    pub const NODES: usize = 6;

    pub async fn start() -> Self {
        let start = || {
            let dir = tempfile::Builder::new()
                .prefix("taskd-cluster-")
                .tempdir_in("/tmp")
                .expect("a folder");
            let url = run_script(Some(dir.path()));
            Self { dir, url }
        };
        tokio::task::spawn_blocking(start).await.expect("a cluster")
    }

    /// The URL `redis+cluster://` with all nodes.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The index of the master that has the key's slot, according to the live nodes.
    pub fn master_of(&self, key: &str) -> usize {
        let slot = self.slot_of(key);
        let master = self
            .masters()
            .into_iter()
            .find(|node| node.slots.iter().any(|(a, b)| (*a..=*b).contains(&slot)));
        master
            .unwrap_or_else(|| panic!("nobody has slot {slot} of {key}"))
            .index
    }

    pub fn slot_of(&self, key: &str) -> u16 {
        self.ask_anybody(&["cluster", "keyslot", key])
            .trim()
            .parse()
            .expect("a slot")
    }

    /// Kills the master that has the key's slot with SIGKILL, and waits until it is gone. Returns
    /// its index. Its replica has everything that the master had before this call.
    pub fn kill9_master_of(&self, key: &str) -> usize {
        let index = self.replicated_master_of(key);
        self.kill9_node(index);
        index
    }

    /// Waits until the replica of the key's master has everything that the master has now, and
    /// returns the master's index. A replica whose link is up receives nothing before its first
    /// acknowledgement after the full copy; if the master dies within this second, everything is
    /// lost.
    pub fn replicated_master_of(&self, key: &str) -> usize {
        let index = self.master_of(key);
        let offsets = || {
            let info = self.must(index, &["info", "replication"]);
            let number = |after: &str| -> Option<u64> {
                let rest = &info[info.find(after)? + after.len()..];
                rest.split(|end: char| !end.is_ascii_digit())
                    .next()?
                    .parse()
                    .ok()
            };
            let replica = info
                .contains("state=online")
                .then(|| number(",offset="))
                .flatten();
            (
                number("master_repl_offset:").expect("an offset"),
                replica.unwrap_or(0),
            )
        };
        let (now, _) = offsets();
        wait("the replica has caught up", || offsets().1 >= now);
        index
    }

    /// Stops the replica of this master and cuts its connection, so that it misses everything that
    /// the master does from now on. Returns its index. SIGCONT lets it continue.
    pub fn cut_off_replica_of(&self, master: usize) -> usize {
        let info = self.must(master, &["info", "replication"]);
        let port = info
            .split("port=")
            .nth(1)
            .and_then(|rest| rest.split(',').next())
            .expect("a replica");
        let replica = self
            .ports()
            .iter()
            .position(|known| known.to_string() == port)
            .expect("a node");
        self.signal(replica, Signal::SIGSTOP);
        self.must(master, &["client", "kill", "type", "replica"]);
        replica
    }

    pub fn kill9_node(&self, index: usize) {
        self.signal(index, Signal::SIGKILL);
        wait("the node is gone", || !self.is_alive(index));
    }

    /// Sends a signal to a node. After SIGSTOP, connections stay open, but nothing is answered
    /// before SIGCONT.
    pub fn signal(&self, index: usize, signal: Signal) {
        kill(Pid::from_raw(self.pid(index)), signal).expect("the node is ours");
    }

    /// Starts a node again after [`Self::kill9_node`], with its existing data; it is a replica if
    /// another has taken over. Returns when it answers.
    pub fn restart_node(&self, index: usize) {
        // In a session of its own and without a parent, like the nodes that the script started.
        let config = self.folder(index).join("redis.conf");
        let command = "setsid redis-server \"$0\" > /dev/null 2>&1 < /dev/null &";
        let status = Command::new("sh")
            .args(["-c", command])
            .arg(config)
            .status()
            .expect("a shell");
        assert!(status.success(), "{status}");
        wait("the node answers", || {
            self.ask(index, &["ping"])
                .is_some_and(|answer| answer.trim() == "PONG")
        });
    }

    /// Waits until all live nodes agree that every slot is served.
    pub fn wait_until_ok(&self) {
        let is_ok = |index| {
            self.ask(index, &["cluster", "info"])
                .is_some_and(|info| info.contains("cluster_state:ok"))
        };
        wait("the cluster is ok", || {
            (0..Self::NODES)
                .filter(|index| self.is_alive(*index))
                .all(is_ok)
        });
    }

    /// Waits until a node other than `index` is the master of the key's slot.
    pub fn wait_for_failover(&self, key: &str, index: usize) {
        let slot = self.slot_of(key);
        wait("another master has the slot", || {
            self.masters().iter().any(|node| {
                node.index != index
                    && node
                        .slots
                        .iter()
                        .any(|(first, last)| (*first..=*last).contains(&slot))
            })
        });
    }

    /// Moves the key's slot to another master, key by key like `redis-cli --cluster reshard`.
    /// Returns the index of that master.
    pub fn move_slot_of(&self, key: &str) -> usize {
        let slot = self.slot_of(key).to_string();
        let from = self.master_of(key);
        let masters = self.masters();
        let id = |index| {
            masters
                .iter()
                .find(|node| node.index == index)
                .expect("a master")
                .id
                .as_str()
        };
        let to = masters
            .iter()
            .find(|node| node.index != from)
            .expect("another master")
            .index;
        self.must(to, &["cluster", "setslot", &slot, "importing", id(from)]);
        self.must(from, &["cluster", "setslot", &slot, "migrating", id(to)]);
        let port = self.ports()[to].to_string();
        loop {
            let keys = self.must(from, &["cluster", "getkeysinslot", &slot, "1"]);
            let Some(key) = keys.lines().next().filter(|key| !key.is_empty()) else {
                break;
            };
            let moved = self.must(from, &["migrate", "127.0.0.1", &port, key, "0", "5000"]);
            assert!(moved.contains("OK") || moved.contains("NOKEY"), "{moved}");
        }
        for index in std::iter::once(to).chain(
            masters
                .iter()
                .map(|node| node.index)
                .filter(|index| *index != to),
        ) {
            self.must(index, &["cluster", "setslot", &slot, "node", id(to)]);
        }
        to
    }

    /// The index of a node with a subscriber of the channel.
    pub fn subscribed_to(&self, channel: &str) -> usize {
        let count = |index| {
            self.ask(index, &["pubsub", "numsub", channel])
                .unwrap_or_default()
        };
        let listens = |index: &usize| {
            count(*index)
                .lines()
                .last()
                .is_some_and(|count| count != "0")
        };
        (0..Self::NODES).find(listens).expect("a listener")
    }

    /// The process ids of the live nodes, by index.
    pub fn pids(&self) -> BTreeMap<usize, i32> {
        (0..Self::NODES)
            .filter(|index| self.is_alive(*index))
            .map(|index| (index, self.pid(index)))
            .collect()
    }

    pub fn ports(&self) -> Vec<u16> {
        self.url
            .split(',')
            .map(|node| {
                node.rsplit(':')
                    .next()
                    .unwrap_or_default()
                    .parse()
                    .expect("a port")
            })
            .collect()
    }

    fn folder(&self, index: usize) -> PathBuf {
        self.dir.path().join(index.to_string())
    }

    fn pid(&self, index: usize) -> i32 {
        let pid = fs::read_to_string(self.folder(index).join("pid")).expect("a pid");
        pid.trim().parse().expect("a pid")
    }

    /// A zombie counts as dead.
    fn is_alive(&self, index: usize) -> bool {
        super::process_of(&self.folder(index).join("pid"), &self.folder(index)).is_some()
    }

    fn masters(&self) -> Vec<Node> {
        let ports = self.ports();
        let nodes = self.ask_anybody(&["cluster", "nodes"]);
        let node = |line: &str| {
            let words: Vec<_> = line.split(' ').collect();
            let port: u16 = words[1]
                .split('@')
                .next()?
                .rsplit(':')
                .next()?
                .parse()
                .ok()?;
            let index = ports.iter().position(|known| *known == port)?;
            let range = |word: &&str| {
                let (first, last) = word.split_once('-').unwrap_or((word, word));
                Some((first.parse().ok()?, last.parse().ok()?))
            };
            let slots = words[8..].iter().filter_map(range).collect();
            Some(Node {
                index,
                id: words[0].to_owned(),
                is_master: words[2].contains("master"),
                slots,
            })
        };
        nodes
            .lines()
            .filter_map(node)
            .filter(|node| node.is_master && !node.slots.is_empty())
            .collect()
    }

    fn ask_anybody(&self, command: &[&str]) -> String {
        let mut answers = (0..Self::NODES)
            .filter(|index| self.is_alive(*index))
            .filter_map(|index| self.ask(index, command));
        answers.next().expect("a node that answers")
    }

    fn must(&self, index: usize, command: &[&str]) -> String {
        let answer = self
            .ask(index, command)
            .unwrap_or_else(|| panic!("node {index} does not answer"));
        assert!(!answer.starts_with("ERR"), "{command:?}: {answer}");
        answer
    }

    /// Returns `None` if the node does not answer within two seconds.
    fn ask(&self, index: usize, command: &[&str]) -> Option<String> {
        let port = self.ports()[index].to_string();
        let output = Command::new("timeout")
            .args(["2", "redis-cli", "-p", &port])
            .args(command)
            .stderr(Stdio::null())
            .output()
            .expect("redis-cli is installed");
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for RedisCluster {
    fn drop(&mut self) {
        for pid in self.pids().into_values() {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
        if std::thread::panicking() {
            self.dir.disable_cleanup(true);
            eprintln!("the nodes' files are kept in {}", self.dir.path().display());
        }
    }
}

fn run_script(dir: Option<&Path>) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/start-redis-cluster");
    let mut command = Command::new(script);
    if let Some(dir) = dir {
        command.arg(dir).env("TASKD_REDIS_NODE_TIMEOUT", "2000");
    }
    let output = command.output().expect(script);
    assert!(
        output.status.success(),
        "{script}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout)
        .expect("a URL")
        .trim()
        .to_owned()
}

fn wait(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(
            began.elapsed() < super::PATIENCE,
            "waited in vain until {what}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
