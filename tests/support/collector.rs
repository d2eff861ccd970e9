//! A real OpenTelemetry Collector in a process of its own: it receives spans over OTLP, and
//! forwards them to a [`Receiver`].
//!
//! [`Receiver`]: super::spans::Receiver

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;
use tokio::net::TcpStream;

use super::{port::Port, until};

pub(crate) struct Collector {
    child: Child,
    port: Port,
    dir: TempDir,
}

impl Collector {
    /// Starts a collector that forwards spans to this address.
    pub(crate) async fn start(to: SocketAddr) -> Self {
        let program = tokio::task::spawn_blocking(program).await.unwrap();
        let (dir, port) = (tempfile::tempdir().unwrap(), Port::reserve(12_000..20_000));
        let config = format!(
            "receivers: {{otlp: {{protocols: {{grpc: {{endpoint: '127.0.0.1:{}'}}}}}}}}\n\
             exporters: {{otlp: {{endpoint: '{to}', compression: none, tls: {{insecure: true}}}}}}\n\
             service:\n  telemetry: {{metrics: {{level: none}}}}\n  \
             pipelines: {{traces: {{receivers: [otlp], exporters: [otlp]}}}}\n",
            port.number
        );
        let file = dir.path().join("config.yaml");
        fs::write(&file, config).unwrap();
        let log = File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new(program);
        command
            .arg("--config")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = command.spawn().unwrap();
        let mut collector = Self { child, port, dir };
        until("the collector listens", async || {
            let ended = collector.child.try_wait().unwrap();
            assert!(ended.is_none(), "the collector ended: {}", collector.log());
            TcpStream::connect(("127.0.0.1", collector.port.number))
                .await
                .is_ok()
        })
        .await;
        collector
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port.number)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The path of the program that `scripts/collector` provides. On the first call on a machine, the
/// script builds it.
fn program() -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/collector");
    let output = Command::new(script)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "scripts/collector: {}",
        output.status
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
