//! TLS on both ports of the running binary: whom it admits, new certificates, and files that are of
//! no use.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    sync::Arc,
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use serde_json::json;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    columns::workflows::deploy,
    support::{daemon::Daemon, until},
};

/// An authority, and a folder for the files that it makes.
struct Authority {
    dir: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        drop(rustls::crypto::ring::default_provider().install_default());
        let (dir, key) = (tempfile::tempdir().unwrap(), KeyPair::generate().unwrap());
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        fs::write(
            dir.path().join("ca.pem"),
            params.self_signed(&key).unwrap().pem(),
        )
        .unwrap();
        fs::write(dir.path().join("ca.key"), key.serialize_pem()).unwrap();
        Self {
            dir,
            issuer: Issuer::new(params, key),
        }
    }

    fn path(&self, file: &str) -> String {
        self.dir.path().join(file).to_str().unwrap().to_owned()
    }

    /// Writes `<name>.pem` and `<name>.key`, valid until the year.
    fn certify(&self, name: &str, until: i32) {
        let key = KeyPair::generate().unwrap();
        let mut params =
            CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        (params.not_before, params.not_after) =
            (date_time_ymd(2020, 1, 1), date_time_ymd(until, 1, 1));
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        // As a renewal does: each file comes whole.
        for (file, text) in [
            (format!("{name}.pem"), certificate.pem()),
            (format!("{name}.key"), key.serialize_pem()),
        ] {
            fs::write(self.path("new"), text).unwrap();
            fs::rename(self.path("new"), self.path(&file)).unwrap();
        }
    }

    fn settings(&self, name: &str) -> String {
        let [cert, key] = ["pem", "key"].map(|kind| self.path(&format!("{name}.{kind}")));
        format!("tls_cert_file = {cert:?}\ntls_key_file = {key:?}\n")
    }

    /// A connection, with the certificate `client` if there is one.
    async fn connect(
        &self,
        port: u16,
        client: Option<&str>,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots
            .add(certificate(Path::new(&self.path("ca.pem"))))
            .unwrap();
        let builder = ClientConfig::builder().with_root_certificates(roots);
        let config = match client {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let chain = vec![certificate(Path::new(&self.path(&format!("{name}.pem"))))];
                let key = PrivateKeyDer::from_pem_file(self.path(&format!("{name}.key"))).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        TlsConnector::from(Arc::new(config))
            .connect(ServerName::try_from("localhost").unwrap(), stream)
            .await
    }

    async fn ready(&self, daemon: &Daemon, client: Option<&str>) {
        until("taskd is ready", async || {
            let Ok(stream) = self.connect(daemon.http_port(), client).await else {
                return false;
            };
            get(stream, "/readyz").await.starts_with("HTTP/1.1 200")
        })
        .await;
    }
}

fn certificate(file: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(file).unwrap()
}

/// The answer, or nothing.
async fn get(mut stream: TlsStream<TcpStream>, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let mut answer = Vec::new();
    if stream.write_all(request.as_bytes()).await.is_ok() {
        drop(stream.read_to_end(&mut answer).await);
    }
    String::from_utf8(answer).unwrap()
}

/// Exit code and stderr of a command.
fn refused(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_taskd"))
        .args(args)
        .output()
        .unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

/// `taskd insert` of one task.
fn insert(grpc: &str, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command.args([
        "insert",
        "--queue",
        "q",
        "--give-up-after",
        "5s",
        "--server",
        grpc,
        "crates/taskd-proto/src/pb/sources.sha256",
    ]);
    command
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap()
}

#[tokio::test]
async fn both_ports_speak_tls_and_nothing_else() {
    let authority = Authority::new();
    authority.certify("server", 2100);
    let daemon = Daemon::begin(&authority.settings("server"), &[]);
    authority.ready(&daemon, None).await;
    let grpc = format!("https://localhost:{}", daemon.grpc_port());
    let inserted = insert(&grpc, &["--tls-ca", &authority.path("ca.pem")]);
    assert!(inserted.status.success(), "{inserted:?}");
    let mut work = Command::new(env!("CARGO_BIN_EXE_taskd"));
    work.args([
        "work",
        "--queue",
        "q",
        "--exit-when-idle",
        "5s",
        "--concurrency",
        "8",
        "--server",
        &grpc,
    ]);
    let worked = work
        .args(["--tls-ca", &authority.path("ca.pem"), "--", "true"])
        .output()
        .unwrap();
    let lines = String::from_utf8_lossy(&worked.stdout);
    assert!(
        worked.status.success() && lines.contains("\"status\":\"completed\""),
        "{worked:?}"
    );
    let explain = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        let server = format!("https://127.0.0.1:{}", daemon.http_port());
        command
            .args(["explain", "nobody", "key", "--server", &server])
            .args(more)
            .output()
            .unwrap()
    };
    let explained = explain(&["--tls-ca", &authority.path("ca.pem")]);
    assert_eq!(
        explained.status.code(),
        Some(1),
        "there is no such task: {explained:?}"
    );
    assert_eq!(
        explain(&[]).status.code(),
        Some(2),
        "an authority that nobody knows"
    );
    let stranger = insert(&grpc, &[]);
    assert_eq!(
        stranger.status.code(),
        Some(2),
        "an authority that nobody knows: {stranger:?}"
    );
    let plain = insert(&daemon.grpc(), &[]);
    assert_eq!(plain.status.code(), Some(2), "{plain:?}");
    let said = format!(
        "taskd: {} wants TLS; write https://127.0.0.1:{}\n",
        daemon.grpc(),
        daemon.grpc_port()
    );
    assert_eq!(String::from_utf8_lossy(&plain.stderr), said);
    for port in [daemon.http_port(), daemon.grpc_port()] {
        let mut plain = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        plain
            .write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .await
            .unwrap();
        let mut answer = Vec::new();
        drop(plain.read_to_end(&mut answer).await);
        assert!(
            !String::from_utf8_lossy(&answer).contains("HTTP"),
            "{answer:?}"
        );
    }
}

#[tokio::test]
async fn commands_say_why_there_is_no_tls_and_what_to_do() {
    let (authority, other) = (Authority::new(), Authority::new());
    authority.certify("server", 2100);
    fs::write(authority.path("text.pem"), "text").unwrap();
    let plain = Daemon::start("", &[]).await;
    let daemon = Daemon::begin(&authority.settings("server"), &[]);
    authority.ready(&daemon, None).await;
    let of_authority = Daemon::begin(&authority.settings("ca"), &[]);
    until("taskd listens", async || {
        TcpStream::connect(("127.0.0.1", of_authority.grpc_port()))
            .await
            .is_ok()
    })
    .await;
    let [ca, text, foreign] = [
        authority.path("ca.pem"),
        authority.path("text.pem"),
        other.path("ca.pem"),
    ];
    let nobody = "its authority is not trusted here; name it with --tls-ca".to_owned();
    let cases: [(&Daemon, &str, &[&str], String); 9] = [
        (&daemon, "https", &[], format!("the certificate of PLACE: {nobody}")),
        (&daemon, "https", &["--tls-ca", &foreign], format!("its authority is not that of {foreign}; name it with")),
        (&daemon, "https", &["--tls-ca", &text], format!("{text} has no certificate in PEM")),
        (
            &of_authority,
            "https",
            &["--tls-ca", &ca],
            "the certificate of PLACE is that of an authority (CA:TRUE); make one with basicConstraints=CA:FALSE"
                .into(),
        ),
        (&plain, "https", &[], "PLACE speaks no TLS; write http://PLACE\n".into()),
        (&plain, "https", &["--tls-ca", &ca], "PLACE speaks no TLS; write http://PLACE, without --tls-ca".into()),
        (&plain, "http", &["--tls-ca", "/nope"], "--tls-ca needs an https:// address; write https://PLACE\n".into()),
        (
            &plain,
            "http",
            &["--client-cert", "/nope", "--client-key", "/nope"],
            "--client-cert needs an https:// address; write https://PLACE\n".into(),
        ),
        (&plain, "ftp", &[], "\"ftp://PLACE\" is not an address; write host:port, http:// or https://".into()),
    ];
    for (daemon, scheme, args, want) in cases {
        for (command, flag, port) in [
            ("tasks", "--server", daemon.http_port()),
            ("stats", "--server", daemon.http_port()),
        ] {
            let (url, want) = (
                format!("{scheme}://127.0.0.1:{port}"),
                want.replace("PLACE", &format!("127.0.0.1:{port}")),
            );
            let (code, stderr) = refused(&[&[command, flag, &url], args].concat());
            assert_eq!(
                (code, stderr.lines().count()),
                (Some(2), 1),
                "{command} {url} {args:?}: {stderr}"
            );
            assert!(
                stderr.contains(&want),
                "{command} {url} {args:?}: {stderr:?} should say {want:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_client_that_is_silent_behind_tls_is_let_go() {
    let authority = Authority::new();
    authority.certify("server", 2100);
    let daemon = Daemon::begin(&authority.settings("server"), &[]);
    authority.ready(&daemon, None).await;
    let mut silent = authority.connect(daemon.grpc_port(), None).await.unwrap();
    let mut answer = Vec::new();
    // Only the frames with which a server begins.
    until("taskd hangs up", async || {
        silent
            .read_buf(&mut answer)
            .await
            .map_or(true, |bytes| bytes == 0)
    })
    .await;
}

#[tokio::test]
async fn a_stop_does_not_wait_for_handshakes() {
    let authority = Authority::new();
    authority.certify("server", 2100);
    let mut daemon = Daemon::begin(&authority.settings("server"), &[]);
    authority.ready(&daemon, None).await;
    let ports = [daemon.http_port(), daemon.grpc_port()];
    let silent = ports.map(|port| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap());
    assert!(daemon.stop().await.success());
    assert!(
        !daemon.log().contains("did not end within the grace period"),
        "{}",
        daemon.log()
    );
    drop(silent);
}

#[tokio::test]
async fn a_new_certificate_is_taken_and_a_useless_one_is_not() {
    let authority = Authority::new();
    authority.certify("server", 2100);
    let daemon = Daemon::begin(&authority.settings("server"), &[]);
    authority.ready(&daemon, None).await;
    let shown = async || {
        let stream = authority.connect(daemon.http_port(), None).await.unwrap();
        stream.get_ref().1.peer_certificates().unwrap()[0]
            .clone()
            .into_owned()
    };
    let first = shown().await;
    let old = authority.connect(daemon.http_port(), None).await.unwrap();

    fs::write(authority.path("server.key"), "no key").unwrap();
    until("taskd tells of the useless key", async || {
        daemon.log().contains("has no private key in PEM")
    })
    .await;
    assert!(
        daemon
            .log()
            .contains("; the certificate of before stays in use"),
        "{}",
        daemon.log()
    );
    let half = fs::read_to_string(authority.path("server.pem")).unwrap();
    fs::write(authority.path("server.pem"), &half[..half.len() / 2]).unwrap();
    let missing = "the line -----END CERTIFICATE----- is missing; the certificate of before";
    until("taskd tells of half a certificate", async || {
        daemon.log().contains(missing)
    })
    .await;
    assert_eq!(shown().await, first, "it goes on with the one that it has");
    authority.certify("server", 2021);
    until("taskd tells of the old one", async || {
        daemon.log().contains("expired at")
    })
    .await;
    assert_eq!(shown().await, first);

    authority.certify("server", 2101);
    until("the new certificate is shown", async || {
        shown().await != first
    })
    .await;
    assert_eq!(
        shown().await,
        certificate(Path::new(&authority.path("server.pem")))
    );
    assert!(
        get(old, "/readyz").await.starts_with("HTTP/1.1 200"),
        "a connection of before goes on"
    );
}

#[tokio::test]
async fn clients_show_a_certificate_where_they_must() {
    let (authority, other) = (Authority::new(), Authority::new());
    authority.certify("server", 2100);
    authority.certify("client", 2100);
    authority.certify("late", 2021);
    let ca = format!("tls_client_ca_file = {:?}\n", authority.path("ca.pem"));
    let daemon = Daemon::begin(&(authority.settings("server") + &ca), &[]);
    authority.ready(&daemon, Some("client")).await;
    other.certify("client", 2100);
    fs::copy(other.path("client.pem"), authority.path("other.pem")).unwrap();
    fs::copy(other.path("client.key"), authority.path("other.key")).unwrap();
    for client in [None, Some("late"), Some("other")] {
        // The server's verdict comes with the first answer.
        let answer = match authority.connect(daemon.http_port(), client).await {
            Ok(stream) => get(stream, "/readyz").await,
            Err(_) => String::new(),
        };
        assert_eq!(answer, "", "{client:?}");
    }
    let grpc = format!("https://localhost:{}", daemon.grpc_port());
    let [ca, cert, key] = ["ca.pem", "client.pem", "client.key"].map(|file| authority.path(file));
    let inserted = insert(
        &grpc,
        &[
            "--tls-ca",
            &ca,
            "--client-cert",
            &cert,
            "--client-key",
            &key,
        ],
    );
    assert!(inserted.status.success(), "{inserted:?}");
    assert_eq!(insert(&grpc, &["--tls-ca", &ca]).status.code(), Some(2));
}

#[test]
fn useless_files_are_one_line_and_nothing_starts() {
    let authority = Authority::new();
    authority.certify("server", 2100);
    authority.certify("other", 2100);
    authority.certify("late", 2021);
    fs::copy(authority.path("other.key"), authority.path("mixed.key")).unwrap();
    fs::copy(authority.path("server.pem"), authority.path("mixed.pem")).unwrap();
    fs::write(authority.path("text.pem"), "text").unwrap();
    fs::copy(authority.path("server.key"), authority.path("text.key")).unwrap();
    let data = authority.path("data");
    for (name, want) in [
        ("late", "expired at"),
        ("mixed", "do not go together"),
        ("text", "has no certificate in PEM"),
        ("missing", "cannot be read: No such file"),
    ] {
        let config = authority.path("taskd.toml");
        fs::write(&config, authority.settings(name)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        let output = command
            .args([
                "--pipelines",
                "all",
                "--config",
                &config,
                "--data-dir",
                &data,
            ])
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), stderr.lines().count()),
            (Some(2), 1),
            "{name}: {stderr}"
        );
        assert!(
            stderr.contains(want) && stderr.contains("tls_"),
            "{stderr:?} should say {want:?}"
        );
        assert!(!Path::new(&data).exists(), "nothing started");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_workflow_calls_only_servers_that_a_trusted_authority_vouches_for() {
    let authority = Authority::new();
    authority.certify("server", 2040);
    let server = Daemon::begin(&authority.settings("server"), &[]);
    authority.ready(&server, None).await;
    let text = format!(
        "
document: {{ dsl: '1.0.3', namespace: a, name: call, version: '1.0.0' }}
do:
  - call:
      call: http
      with: {{ method: get, endpoint: 'https://localhost:{}/readyz', output: response }}
      metadata: {{ taskd: {{ max_attempts: 1 }} }}
",
        server.http_port()
    );
    let trusts = vec![("SSL_CERT_FILE".to_owned(), authority.path("ca.pem"))];
    for (env, status) in [(trusts, "completed"), (vec![], "faulted")] {
        let config = "workflow_call_allow = \"localhost\"";
        let mut daemon = Daemon::begin_in(config, &[], env);
        daemon.ready().await;
        assert_eq!(deploy(&daemon, &text).await.0, 201);
        let start = "/v1/workflows/a/call/latest:start";
        let (_, ended) = daemon.post(start, &json!({"wait": "30s"})).await;
        assert_eq!(ended["status"], status, "{ended}");
        match status {
            "completed" => assert_eq!(ended["output"]["statusCode"], 200, "{ended}"),
            _ => assert!(ended.to_string().contains("certificate"), "{ended}"),
        }
    }
}
