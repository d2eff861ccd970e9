//! Real Kafka brokers: one shared by the whole run, and private ones for tests that kill them.

use std::{
    net::TcpStream,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;
use tokio::sync::OnceCell;

use super::{
    kill9_process_of,
    port::Port,
    process_of,
    proxy::{Proxy, Upstream},
};

/// `host:port` of the broker that all tests share: the one in `TASKD_TEST_KAFKA`, or else one that
/// `scripts/start-kafka` starts and leaves running.
pub async fn shared() -> &'static str {
    static BROKER: OnceCell<String> = OnceCell::const_new();
    let start = || async {
        match std::env::var("TASKD_TEST_KAFKA") {
            Ok(brokers) if !brokers.is_empty() => brokers,
            _ => run_script(&[]).await,
        }
    };
    BROKER.get_or_init(start).await
}

/// A private broker that may be killed. Dropping it stops it and removes its folder.
pub struct KafkaServer {
    dir: TempDir,
    brokers: String,
    /// The reserved port, if the broker was absent at first.
    port: Option<Port>,
}

impl KafkaServer {
    pub async fn start() -> Self {
        let mut server = Self::reserve();
        server.brokers = run_script(&[server.dir.path()]).await;
        server
    }

    /// Starts a cluster of three brokers with the ids 1 to 3.
    pub async fn start_three() -> Self {
        let mut server = Self::reserve();
        server.brokers =
            run_script_with(&[server.dir.path()], &[("TASKD_TEST_KAFKA_BROKERS", "3")]).await;
        server
    }

    /// Starts a broker that clients can only reach through this proxy.
    pub async fn start_behind(proxy: &Proxy) -> Self {
        let mut server = Self::reserve();
        let port = proxy.port().to_string();
        let address = run_script_with(
            &[server.dir.path()],
            &[("TASKD_TEST_KAFKA_ADVERTISED", &port)],
        )
        .await;
        proxy.lead_to(Upstream::Tcp(address));
        server.brokers = format!("127.0.0.1:{port}");
        server
    }

    /// Starts a broker with a second listener, for TLS and passwords: see `scripts/start-kafka`.
    pub async fn start_secured() -> Self {
        let mut server = Self::reserve();
        server.brokers = run_script(&[server.dir.path(), Path::new("sasl-ssl")]).await;
        server
    }

    /// Reserves the address of a broker, which is not started before [`Self::restart`].
    pub fn absent() -> Self {
        let mut server = Self::reserve();
        let port = Port::reserve(12_000..20_000);
        std::fs::write(server.dir.path().join("port"), port.number.to_string())
            .expect("the folder is ours");
        server.brokers = format!("127.0.0.1:{}", port.number);
        server.port = Some(port);
        server
    }

    fn reserve() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("taskd-kafka-")
            .tempdir()
            .expect("a folder for kafka");
        Self {
            dir,
            brokers: String::new(),
            port: None,
        }
    }

    /// `host:port` of the listener with TLS and passwords.
    pub fn secured_brokers(&self) -> String {
        let port = std::fs::read_to_string(self.dir.path().join("tls-port"))
            .expect("it was started with it");
        format!("127.0.0.1:{}", port.trim())
    }

    /// The certificate authority of its certificate.
    pub fn ca(&self) -> std::path::PathBuf {
        self.dir.path().join("ca.pem")
    }

    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// Kills it with SIGKILL; returns when the port is closed.
    pub fn kill9(&self) {
        kill9(self.dir.path());
        let deadline = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(&self.brokers).is_ok() {
            assert!(Instant::now() < deadline, "the broker lives on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills one of three brokers with SIGKILL.
    pub fn kill9_of_three(&self, id: usize) {
        kill9(&self.dir.path().join(format!("broker-{id}")));
    }

    /// Starts the broker after [`Self::kill9`] or [`Self::absent`], at the same address and with
    /// its existing records.
    pub async fn restart(&self) {
        let brokers = run_script(&[self.dir.path()]).await;
        assert_eq!(brokers, self.brokers);
    }
}

impl Drop for KafkaServer {
    fn drop(&mut self) {
        let of_three = (1..=3).map(|id| self.dir.path().join(format!("broker-{id}")));
        for dir in of_three.chain([self.dir.path().to_owned()]) {
            kill9_process_of(&dir.join("pid"), &dir);
        }
    }
}

/// Kills the broker of this folder with SIGKILL.
fn kill9(dir: &Path) {
    let broker = process_of(&dir.join("pid"), dir).expect("the broker runs");
    kill(broker, Signal::SIGKILL).expect("the broker is ours");
}

/// Runs the script, which uses its own folder unless `args` has another.
async fn run_script(args: &[&Path]) -> String {
    run_script_with(args, &[]).await
}

async fn run_script_with(args: &[&Path], env: &[(&str, &str)]) -> String {
    let mut script =
        Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/start-kafka"));
    script.args(args).envs(env.iter().copied());
    let run = move || script.output().expect("scripts/start-kafka runs");
    let output = tokio::task::spawn_blocking(run)
        .await
        .expect("it does not panic");
    assert!(
        output.status.success(),
        "no kafka: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout)
        .expect("host:port")
        .trim()
        .to_owned()
}
