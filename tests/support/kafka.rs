//! A real Kafka broker: one for the whole run, or one of a test's own where it is killed.

use std::{
    net::TcpStream,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use tokio::sync::OnceCell;

/// `host:port` of the broker that all tests share: `TASKD_TEST_KAFKA`, else one that `scripts/start-kafka` starts and leaves running.
pub async fn shared() -> &'static str {
    static BROKER: OnceCell<String> = OnceCell::const_new();
    let start = || async {
        match std::env::var("TASKD_TEST_KAFKA") {
            Ok(brokers) if !brokers.is_empty() => brokers,
            _ => run_script(None).await,
        }
    };
    BROKER.get_or_init(start).await
}

/// A broker that may be killed. Ends with its folder when dropped.
pub struct KafkaServer {
    dir: TempDir,
    brokers: String,
}

impl KafkaServer {
    pub async fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("taskd-kafka-").tempdir().expect("a folder for kafka");
        let brokers = run_script(Some(dir.path())).await;
        Self { dir, brokers }
    }

    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// SIGKILL; nobody listens any more when this returns.
    pub fn kill9(&self) {
        kill(pid(self.dir.path()).expect("the broker has a pid"), Signal::SIGKILL).expect("the broker is ours");
        let deadline = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(&self.brokers).is_ok() {
            assert!(Instant::now() < deadline, "the broker lives on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// After [`Self::kill9`], at its old place with its old records.
    pub async fn restart(&self) {
        let brokers = run_script(Some(self.dir.path())).await;
        assert_eq!(brokers, self.brokers);
    }
}

impl Drop for KafkaServer {
    fn drop(&mut self) {
        if let Some(pid) = pid(self.dir.path()) {
            kill(pid, Signal::SIGKILL).ok();
        }
    }
}

fn pid(dir: &Path) -> Option<Pid> {
    let text = std::fs::read_to_string(dir.join("pid")).ok()?;
    text.trim().parse().ok().map(Pid::from_raw)
}

/// In the script's own folder unless another is given.
async fn run_script(dir: Option<&Path>) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/start-kafka");
    let dir = dir.map(Path::to_owned);
    let run = move || Command::new(script).args(dir).output().expect("scripts/start-kafka runs");
    let output = tokio::task::spawn_blocking(run).await.expect("it does not panic");
    assert!(output.status.success(), "no kafka: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("host:port").trim().to_owned()
}
