//! A redis-server with custom options, such as TLS, users or replicas. It can also run a compatible
//! program.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use super::port::Port;

/// A running server. Dropping it stops it and removes its folder.
pub struct PrivateRedis {
    dir: TempDir,
    port: Port,
    child: Child,
}

impl PrivateRedis {
    /// Starts a server. `options` are lines of its configuration, in which `PORT` stands for its
    /// port. Unless an option mentions the port, the server listens on it without TLS.
    pub fn start(options: &[&str]) -> Self {
        Self::start_program("redis-server", options)
    }

    pub fn start_program(program: &str, options: &[&str]) -> Self {
        let mut log = String::new();
        for _ in 0..10 {
            let dir = tempfile::Builder::new()
                .prefix("taskd-redis-")
                .tempdir_in("/tmp")
                .expect("a folder");
            // A cluster bus also needs the port that is 10,000 higher.
            let port = Port::reserve(12_000..20_000);
            let of_port = if options.iter().any(|option| option.contains("PORT")) {
                "port 0"
            } else {
                "port PORT"
            };
            let lines: Vec<_> = [
                "bind 127.0.0.1",
                "save \"\"",
                "appendonly yes",
                "unixsocket redis.sock",
                of_port,
            ]
            .iter()
            .chain(options)
            .map(|line| line.replace("PORT", &port.number.to_string()))
            .collect();
            std::fs::write(dir.path().join("redis.conf"), lines.join("\n"))
                .expect("a configuration");
            let stdout = std::fs::File::create(dir.path().join("redis.log")).expect("a log");
            let child = Command::new(program)
                .arg("redis.conf")
                .current_dir(dir.path())
                .stdout(stdout)
                .spawn();
            let mut server = Self {
                dir,
                port,
                child: child.expect(program),
            };
            if server.is_up() {
                return server;
            }
            log = std::fs::read_to_string(server.dir.path().join("redis.log")).unwrap_or_default();
        }
        panic!("{program} does not come up with {options:?}:\n{log}");
    }

    pub fn port(&self) -> u16 {
        self.port.number
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port.number)
    }

    /// Runs a command over the socket, as the default user.
    pub fn run(&self, command: &[&str]) -> String {
        let socket = self.dir.path().join("redis.sock");
        let output = Command::new("redis-cli")
            .arg("-s")
            .arg(socket)
            .args(command)
            .output()
            .expect("redis-cli");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).expect("the child is ours");
    }

    /// Waits until it answers. Returns false if it has ended, perhaps because its port was taken.
    fn is_up(&mut self) -> bool {
        let began = Instant::now();
        let answers = ["PONG", "NOAUTH"];
        while !answers
            .iter()
            .any(|answer| self.run(&["ping"]).starts_with(answer))
        {
            if self.child.try_wait().expect("our child").is_some() {
                return false;
            }
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "it does not come up"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

impl Drop for PrivateRedis {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A certificate authority, and a certificate for 127.0.0.1 that it signed: `ca.pem`, `server.pem`,
/// `server.key`.
pub struct Certificates(TempDir);

impl Certificates {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("taskd-tls-")
            .tempdir_in("/tmp")
            .expect("a folder");
        let openssl = |args: &str| {
            let mut command = Command::new("openssl");
            let status = command
                .args(args.split(' '))
                .current_dir(dir.path())
                .stderr(Stdio::null())
                .status();
            assert!(
                status.expect("openssl is installed").success(),
                "openssl {args}"
            );
        };
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        openssl(&format!(
            "req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=taskd-test-ca"
        ));
        openssl(&format!(
            "req {key} -keyout server.key -out server.csr -subj /CN=127.0.0.1"
        ));
        std::fs::write(dir.path().join("ext"), "subjectAltName=IP:127.0.0.1").expect("a file");
        openssl(
            "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -days 2 -extfile ext",
        );
        Self(dir)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The options of a server that only accepts TLS on its port.
    pub fn options(&self) -> Vec<String> {
        let path = |path: &Path| path.display().to_string();
        vec![
            "tls-port PORT".into(),
            format!("tls-cert-file {}", path(&self.file("server.pem"))),
            format!("tls-key-file {}", path(&self.file("server.key"))),
            format!("tls-ca-cert-file {}", path(&self.file("ca.pem"))),
        ]
    }
}
