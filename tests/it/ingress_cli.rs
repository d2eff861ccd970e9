//! The binary as a user meets it: exit codes, one line per error, and a configuration that says
//! where it came from.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::{PermissionsExt, symlink},
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use taskd::{
    ingress,
    wire::pb::{
        self,
        discovery_server::{Discovery, DiscoveryServer},
    },
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::support::{daemon::Daemon, until};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    // The person who runs the tests may have settings of their own.
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    command.env_clear().envs(own).args(args);
    command
}

fn taskd(args: &[&str], env: &[(&str, &str)]) -> Output {
    command(args).envs(env.iter().copied()).output().unwrap()
}

/// Exit code, stdout, stderr.
fn run(args: &[&str], env: &[(&str, &str)]) -> (i32, String, String) {
    let output = taskd(args, env);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap(),
        text(output.stdout),
        text(output.stderr),
    )
}

fn file(text: &str) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("taskd.toml");
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (dir, path)
}

#[test]
fn nothing_named_is_answered_with_what_to_try() {
    let (code, stdout, stderr) = run(&[], &[]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains("taskd --pipelines all"), "{stderr}");
}

#[test]
fn a_command_whose_stdout_is_closed_ends_quietly_with_its_own_exit_code() {
    let unread = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command
            .args(args)
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
            .wait_with_output();
        let Output { status, stderr, .. } = output.unwrap();
        (status.code().unwrap(), String::from_utf8(stderr).unwrap())
    };
    for args in [&["completions", "bash"][..], &["check-config"]] {
        assert_eq!(unread(args), (0, String::new()), "{args:?}");
    }
    // Its mistakes are still mistakes.
    let (code, stderr) = unread(&[
        "check-config",
        "--tls-cert-file",
        "/no/such",
        "--tls-key-file",
        "/no/such",
    ]);
    assert!(code == 2 && stderr.lines().count() == 1, "{code} {stderr}");
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command
        .arg("check-config")
        .stdout(full)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
        .wait_with_output();
    let Output { status, stderr, .. } = output.unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(2));
    assert!(
        stderr.starts_with("taskd: cannot write to stdout: No space left"),
        "{stderr}"
    );
}

#[test]
fn check_config_warns_of_a_setting_that_does_nothing() {
    let (_dir, path) = file("trace_sample = 0.1\n[queues.q]\nenrich_failures = 3\n");
    let (code, _, stderr) = run(&["check-config", "--config", &path], &[]);
    let want = format!(
        "taskd: warning: trace_sample ({path}:1) does nothing without otlp_endpoint\n\
         taskd: warning: queues.q.enrich_failures ({path}:3) does nothing without enrich_url\n"
    );
    assert_eq!((code, stderr), (0, want));
}

#[test]
fn what_commands_print_has_no_secrets() {
    let (_dir, path) = file("[queues.q]\nenrich_url = \"https://h/e?key=s3cret\"\n");
    let shown = |args: &[&str], env: &[(&str, &str)], code: i32| {
        let (got, stdout, stderr) = run(args, env);
        assert_eq!(got, code, "{stderr}");
        assert!(
            !stdout.contains("s3cret") && !stderr.contains("s3cret"),
            "{stdout}{stderr}"
        );
        stdout + &stderr
    };
    let urls = [
        ("TASKD_OTLP_ENDPOINT", "https://u:s3cret@h:4318?key=s3cret"),
        ("TASKD_REDIS_URL", "redis://:s3cret%3Fs3cret@h"),
    ];
    let printed = shown(&["check-config", "--config", &path], &urls, 0);
    for url in [
        "https://h/e?***",
        "https://u:***@h:4318?***",
        "redis://:***@h",
    ] {
        assert!(
            printed.contains(&format!("{url:?}")),
            "{url} is not in {printed}"
        );
    }
    let printed = shown(
        &["check-config"],
        &[("TASKD_REDIS_URL", "redis://:s3cret?s3cret@h")],
        2,
    );
    assert!(
        printed.contains("redis_url = \"redis://:***@h\" is not usable"),
        "{printed}"
    );
    let printed = shown(&["check-config"], &[("TASKD_OTLP_HEADERS", "s3cret")], 2);
    assert!(
        printed.contains("'***' for TASKD_OTLP_HEADERS: header 1 is not name=value"),
        "{printed}"
    );
    let printed = shown(
        &["check-config"],
        &[("TASKD_KAFKA_SASL_PASSWORT", "s3cret")],
        2,
    );
    assert!(
        printed.contains("kafka.sasl.passwort = \"***\""),
        "{printed}"
    );
    let printed = shown(
        &["stats", "--server", "http://u:s3cret@127.0.0.1:1"],
        &[],
        2,
    );
    assert!(
        printed.contains("cannot reach taskd at http://u:***@127.0.0.1:1"),
        "{printed}"
    );
}

#[test]
fn nothing_is_asked_of_a_folder_in_which_no_taskd_has_run() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("elsewhere");
    let cases = [
        (&["token", "list"][..], 2),
        (&["token", "revoke", "ci"], 2),
        (&["acts"], 2),
        (&["partitions", "2"], 2),
    ];
    for (args, expected) in cases {
        let (code, stdout, stderr) = run(args, &[("TASKD_DATA_DIR", folder.to_str().unwrap())]);
        assert_eq!(
            (code, stdout.as_str(), stderr.lines().count()),
            (expected, "", 1),
            "{args:?}: {stderr}"
        );
        assert!(
            stderr.contains("no taskd has run in") && stderr.contains("--data-dir"),
            "{stderr}"
        );
        assert!(!folder.exists(), "{args:?}");
    }
}

#[test]
fn nothing_is_asked_of_a_file_of_sqlite_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        // From another folder the path means another file.
        let mut command = command(args);
        let command = command
            .env("TASKD_DATABASE_URL", "sqlite://elsewhere.db")
            .current_dir(dir.path());
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code().unwrap(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let path = dir.path().canonicalize().unwrap().join("elsewhere.db");
    for args in [
        &["token", "list"][..],
        &["token", "revoke", "leaked"],
        &["acts"],
        &["partitions", "2"],
    ] {
        let (code, stdout, stderr) = run(args);
        assert_eq!(
            (code, stdout.as_str(), stderr.lines().count()),
            (2, "", 1),
            "{args:?}: {stderr}"
        );
        let said = format!(
            "taskd: there is no database {}; --database-url or --config",
            path.display()
        );
        assert!(stderr.starts_with(&said), "{args:?}: {stderr}");
        assert!(!path.exists(), "{args:?}");
    }
    let (code, stdout, stderr) = run(&["migrate"]);
    assert_eq!(
        (code, stdout.as_str()),
        (0, "the database is new: sqlite://elsewhere.db\n"),
        "{stderr}"
    );
    assert_eq!(
        run(&["migrate"]).1,
        "the database is up to date: sqlite://elsewhere.db\n"
    );
    assert_eq!(run(&["token", "list"]).0, 0);
}

#[test]
fn the_partitions_of_a_folder_without_topics_name_the_setting_of_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let env = [("TASKD_DATA_DIR", dir.path().to_str().unwrap())];
    assert_eq!(run(&["migrate"], &env).0, 0);
    let (code, _, stderr) = run(&["partitions", "12"], &env);
    let said = "there is no topic pipeline: data_dir and topic_prefix must be those of a taskd that has run";
    assert!(code == 1 && stderr.contains(said), "{code} {stderr}");
}

#[test]
fn help_teaches_and_version_answers() {
    let (code, stdout, _) = run(&["--help"], &[]);
    assert_eq!(code, 0);
    for wanted in [
        "taskd --pipelines all",
        "insert",
        "check-config",
        "Backends:",
        "--redis-url",
        "TASKD_HTTP_LISTEN",
    ] {
        assert!(stdout.contains(wanted), "{wanted} is not in\n{stdout}");
    }
    let (code, stdout, _) = run(&["--version"], &[]);
    assert_eq!(
        (code, stdout.trim()),
        (0, concat!("taskd ", env!("BUILD_VERSION")))
    );
}

#[test]
fn shells_complete_every_command_and_each_has_a_manual_page() {
    let help = run(&["--help"], &[]).1;
    let commands = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty());
    // A long description goes on in a line of its own, farther to the right.
    let names = commands
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next());
    let commands: Vec<&str> = names.collect();
    assert!(
        commands.contains(&"insert") && commands.contains(&"completions"),
        "{commands:?}"
    );
    for shell in ["bash", "zsh", "fish"] {
        let (code, stdout, _) = run(&["completions", shell], &[]);
        assert_eq!(code, 0);
        commands.iter().for_each(|command| {
            assert!(
                stdout.contains(command),
                "{shell} does not complete {command}"
            )
        });
    }
    assert_eq!(run(&["completions", "tcsh"], &[]).0, 2);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("man1");
    assert_eq!(run(&["man", folder.to_str().unwrap()], &[]).0, 0);
    for command in commands {
        assert!(
            folder.join(format!("taskd-{command}.1")).is_file(),
            "{command} has no page"
        );
    }
    let (code, _, stderr) = run(&["man", "/dev/null/x"], &[]);
    assert_eq!((code, stderr.lines().count()), (1, 1), "{stderr}");
}

#[tokio::test]
async fn stats_of_no_terminal_are_json_and_the_front_page_says_where_to_go() {
    let daemon = Daemon::start("", &[]).await;
    daemon
        .insert(&[serde_json::json!({"queue": "q", "key": "1"})])
        .await;
    let (code, stdout, _) = run(&["stats", "--server", &daemon.http()], &[]);
    let shown: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        (code, &shown["queues"][0]["queue"]),
        (0, &serde_json::json!("q"))
    );
    let (code, _, stderr) = run(&["stats", "--server", "127.0.0.1:1"], &[]);
    assert_eq!((code, stderr.lines().count()), (2, 1), "{stderr}");
    let closed = Daemon::start("auth = \"tokens\"\n", &[]).await;
    let (code, _, stderr) = run(
        &["stats", "--server", &closed.http(), "--token", "wrong"],
        &[],
    );
    assert!(
        code == 2 && stderr.contains("--token or TASKD_TOKEN") && !stderr.contains('{'),
        "{stderr}"
    );
    let page = reqwest::get(daemon.http())
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    for operation in ingress::operations() {
        let (Some(role), Some(route)) = (operation.role, operation.http) else {
            continue;
        };
        // A path with a parameter may have several verbs.
        let (path, verb) = match route.path.rsplit_once("}:") {
            Some((path, verb)) => (path, verb),
            None => (route.path, ""),
        };
        let is_listed = |line: &str| {
            [route.method.as_str(), path, verb, role.as_str()]
                .iter()
                .all(|part| line.contains(part))
        };
        assert!(
            page.lines().any(is_listed),
            "{} is not in\n{page}",
            route.path
        );
    }
}

#[test]
fn a_wrong_configuration_is_one_line_and_exit_code_2() {
    let (_dir, path) = file("pipelines = \"all\"\npartitons = 3\n");
    let unknown_key =
        format!("taskd: {path}:2: unknown key \"partitons\"; did you mean partitions? ");
    // A mistake that a backend finds has its place, too, and comes before anything is printed.
    let (_dir, kafka) = file("bus_url = \"kafka://h:9092\"\n[kafka]\nfoo.bar = 1\n");
    let (_dir, tls) = file("tls_key_file = \"/nope\"\ntls_cert_file = \"/nope\"\n");
    let no_property = format!("taskd: {kafka}:3: kafka: foo.bar: No such configuration property");
    let no_certificate =
        format!("taskd: {tls}:2: tls_cert_file = \"/nope\" cannot be read: No such file");
    type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a str);
    let cases: [Case<'_>; 12] = [
        (
            &["--pipelines", "all,foo"],
            &[],
            "unknown pipeline \"foo\"; expected all, ",
        ),
        (
            &["--pipelines", "all,tasks"],
            &[],
            "\"all\" stands alone; write all, or a list of discovery, fanout, ",
        ),
        (
            &["--pipelines", "fnout"],
            &[],
            "unknown pipeline \"fnout\"; expected all, discovery, fanout, watchdog, tasks, workflow",
        ),
        (
            &["--pipelines", "all"],
            &[("TASKD_PARTITIONS", "x")],
            "taskd: invalid value 'x' for TASKD_PARTITIONS: ",
        ),
        (
            &["--pipelines", "all"],
            &[("TASKD_PARTITIONS", "0")],
            "taskd: partitions = 0 (TASKD_PARTITIONS) must be 1 to 1024",
        ),
        (
            &["token", "list", "--partitions", "0"],
            &[],
            "taskd: partitions = 0 (--partitions) must be 1 to 1024",
        ),
        (
            &["check-config"],
            &[("TASKD_PARTITONS", "3")],
            "taskd: unknown variable TASKD_PARTITONS in the environment; ",
        ),
        (&["--config", &path], &[], &unknown_key),
        (&["check-config", "--config", &kafka], &[], &no_property),
        (&["check-config", "--config", &tls], &[], &no_certificate),
        (
            &["--pipelines", "all", "--config", &tls],
            &[],
            &no_certificate,
        ),
        (
            &["check-config", "--config", "/no/such"],
            &[],
            "taskd: cannot read the configuration file /no/such: ",
        ),
    ];
    for (args, env, want) in cases {
        let (code, stdout, stderr) = run(args, env);
        assert_eq!((code, stdout.as_str()), (2, ""), "{args:?}");
        assert!(stderr.contains(want), "{stderr:?} should say {want:?}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

#[test]
fn a_data_folder_of_others_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let start = || {
        let listen = [
            "--http-listen",
            "127.0.0.1:0",
            "--grpc-listen",
            "127.0.0.1:0",
        ];
        run(
            &[&["--pipelines", "all", "--data-dir", path][..], &listen].concat(),
            &[],
        )
    };
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (code, _, stderr) = start();
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("other users may write to it (mode 777); chmod 700 it"),
        "{stderr}"
    );
    assert!(!dir.path().join("lock").exists(), "nothing is made there");

    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    fs::create_dir_all(dir.path().join("redis/appendonlydir")).unwrap();
    for name in [
        "lock",
        "redis.pid",
        "redis.log",
        "taskd.db-lock",
        "of any name",
        "redis/dump.rdb",
    ] {
        let link = dir.path().join(name);
        symlink(&victim, &link).unwrap();
        let (code, _, stderr) = start();
        assert!(
            code == 1 && stderr.contains(&format!("{name} in it is a link")),
            "{stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        fs::remove_file(link).unwrap();
    }
    fs::remove_dir_all(dir.path().join("redis")).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    symlink(elsewhere.path(), dir.path().join("redis")).unwrap();
    let (code, _, stderr) = start();
    assert!(
        code == 1 && stderr.contains("redis in it is a link"),
        "{stderr}"
    );
    assert_eq!(
        fs::read_dir(elsewhere.path()).unwrap().count(),
        0,
        "nothing is made there"
    );
}

#[test]
fn what_is_stored_is_its_users_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (code, stdout, stderr) = run(
        &["migrate", "--data-dir", dir.path().to_str().unwrap()],
        &[],
    );
    assert_eq!(code, 0, "{stdout}{stderr}");
    for file in fs::read_dir(dir.path()).unwrap() {
        let file = file.unwrap();
        let mode = file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{:?}", file.path());
    }
}

#[test]
fn a_url_of_sqlite_means_what_it_says_or_is_refused() {
    for (url, want) in [
        ("sqlite:foo.db", "needs two slashes"),
        ("sqlite://", "names no file"),
        ("sqlite://:memory:", "would be lost with the process"),
        ("sqlite://rel.db?mode=ro", "takes no parameters"),
    ] {
        let (code, _, stderr) = run(&["check-config", "--database-url", url], &[]);
        assert!(
            code == 2 && stderr.lines().count() == 1 && stderr.contains(want),
            "{url}: {stderr}"
        );
    }
    let (code, _, stderr) = run(&["check-config", "--database-url", "sqlite://foo.db"], &[]);
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn an_empty_variable_is_one_that_is_not_set() {
    let env = [
        "TASKD_HTTP_LISTEN",
        "TASKD_PARTITIONS",
        "TASKD_REDIS_URL",
        "TASKD_LOG_FORMAT",
        "TASKD_PIPELINES",
    ];
    let env = env.map(|name| (name, ""));
    let (code, stdout, stderr) = run(&["check-config"], &env);
    assert_eq!(code, 0, "{stderr}");
    assert!(
        stdout.contains("http_listen = \"127.0.0.1:7600\"\n"),
        "{stdout}"
    );
    let (code, _, stderr) = run(
        &["insert", "--server", "http://127.0.0.1:1", "-"],
        &[("TASKD_URL", "")],
    );
    assert_eq!(code, 2);
    assert!(stderr.contains("http://127.0.0.1:1"), "{stderr}");
}

#[test]
fn check_config_shows_what_counts_and_where_it_came_from() {
    let (_dir, path) = file(
        "partitions = 8\nmax_items = 10\nmax_replicas = 20\ndatabase_url = \"mysql://u:sesame@db/taskd\"\n\
         [queues.crawl]\nreplicas = 3\n",
    );
    let env = [
        ("TASKD_CONFIG", path.as_str()),
        ("TASKD_MAX_ITEMS", "11"),
        ("TASKD_PARTITIONS", "9"),
    ];
    let (code, stdout, stderr) = run(&["check-config", "--partitions", "16"], &env);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let wanted = [
        "partitions = 16 # --partitions\n".to_owned(),
        "max_items = 11 # TASKD_MAX_ITEMS\n".to_owned(),
        format!("max_replicas = 20 # {path}:3\n"),
        format!("database_url = \"mysql://u:***@db/taskd\" # {path}:4\n"),
        format!("replicas = 3 # {path}:6\n"),
        "http_listen = \"127.0.0.1:7600\"\n".to_owned(),
    ];
    for line in wanted {
        assert!(stdout.contains(&line), "{line} is not in\n{stdout}");
    }
    assert!(!stdout.contains("sesame"));
    toml::from_str::<toml::Table>(&stdout).unwrap();
}

#[test]
fn properties_of_kafka_come_from_file_and_environment_and_hide_secrets() {
    let (_dir, path) = file(
        "bus_url = \"kafka://h:9092\"\n[kafka]\nsecurity.protocol = \"SASL_SSL\"\n\"sasl.password\" = \"in-file\"\n\
         sasl.mechanism = \"PLAIN\"\n",
    );
    let check = |env: &[(&str, &str)]| run(&["check-config", "--config", &path], env);
    let (code, stdout, stderr) = check(&[
        ("TASKD_KAFKA_SASL_USERNAME", "taskd"),
        ("TASKD_KAFKA_SASL_PASSWORD", "sesame"),
    ]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let wanted = [
        "\"sasl.password\" = \"***\" # TASKD_KAFKA_SASL_PASSWORD\n".to_owned(),
        "\"sasl.username\" = \"taskd\" # TASKD_KAFKA_SASL_USERNAME\n".to_owned(),
        format!("\"security.protocol\" = \"SASL_SSL\" # {path}:3\n"),
    ];
    for line in wanted {
        assert!(stdout.contains(&line), "{line} is not in\n{stdout}");
    }
    assert!(
        !stdout.contains("sesame") && !stdout.contains("in-file"),
        "{stdout}"
    );
    toml::from_str::<toml::Table>(&stdout).unwrap();

    let cases = [
        (
            ("TASKD_KAFKA_ACKS", "1"),
            "kafka.acks = \"1\" (TASKD_KAFKA_ACKS) cannot be set: taskd writes with acks=all",
        ),
        (
            ("TASKD_KAFKA_SASL_MECHANISM", "OAUTHBEARER"),
            "cannot be set: this taskd has no way to get a token",
        ),
        (
            ("TASKD_KAFKA_STATISTICS_INTERVAL_MS", "1000"),
            "cannot be set: taskd does not read librdkafka's statistics",
        ),
        (
            ("TASKD_KAFKA_FETCH_MAX_BYTES", "1048576"),
            "kafka: `fetch.max.bytes` must be >= `message.max.bytes`",
        ),
        (
            ("TASKD_KAFKA_SASL_PASWORD", "secret"),
            "kafka: sasl.pasword: No such configuration property",
        ),
        (
            ("TASKD_KAFKA_SECURITY_PROTOCOL", "TLS"),
            "kafka: security.protocol: Invalid value",
        ),
        (
            ("TASKD_KAFKA_SASL_PASSWORD_FILE", "/no/such"),
            "(TASKD_KAFKA_SASL_PASSWORD_FILE) cannot be read: No such file",
        ),
    ];
    for (variable, want) in cases {
        let (code, _, stderr) = check(&[variable]);
        assert_eq!((code, stderr.lines().count()), (2, 1), "{stderr}");
        assert!(
            stderr.contains(want) && !stderr.contains("secret"),
            "{stderr:?} should say {want:?}"
        );
        let (code, _, stderr) = run(&["--pipelines", "all", "--config", &path], &[variable]);
        assert_eq!(code, 2, "nothing is started: {stderr}");
    }
}

#[test]
fn a_wrong_question_is_told_without_a_server() {
    let (_dir, lines) = file("a\nb\n");
    let cases: [(&[&str], &str); 6] = [
        (
            &["insert", "--queue", "q", "--replicas", "0", &lines],
            "taskd: the flags suit no task: replicas is 0; must be 1 to 10000\n",
        ),
        (
            &["insert", "--queue", "a b", &lines],
            "the flags suit no task: queue \"a b\" contains ' '",
        ),
        (
            &[
                "insert",
                "--queue",
                "q",
                "--deadline",
                "2000-01-01T00:00:00Z",
                &lines,
            ],
            "the flags suit no task: the deadline of 2000-01-01T00:00:00.000Z passed\n",
        ),
        (
            &[
                "insert",
                "--queue",
                "q",
                "--backoff",
                "{\"kind\": \"linear\"}",
                &lines,
            ],
            "backoff.initial is missing",
        ),
        (
            &["explain", "demo"],
            "taskd: \"demo\" is not the id of a task; to name it by its key: taskd explain demo KEY\n",
        ),
        (
            &["token", "create", "x", "--roles", "work", "--queues", "a*b"],
            "a * may only stand at the end, as in crawl.*\n",
        ),
    ];
    for (args, want) in cases {
        let (code, stdout, stderr) = run(args, &[("TASKD_URL", "127.0.0.1:1")]);
        assert_eq!(
            (code, stdout.as_str(), stderr.lines().count()),
            (2, "", 1),
            "{args:?}: {stderr}"
        );
        assert!(
            stderr.contains(want),
            "{args:?}: {stderr:?} should say {want:?}"
        );
    }
}

#[test]
fn a_mistake_of_a_variable_names_the_variable() {
    for (env, want) in [
        (
            [("TASKD_URL", "127.0.0.1:1"), ("TASKD_TLS_CA", "/nope")],
            "taskd: TASKD_TLS_CA needs an https:// address;",
        ),
        (
            [("TASKD_URL", "ftp://a"), ("TASKD_LOG", "")],
            "taskd: invalid value 'ftp://a' for TASKD_URL: ",
        ),
    ] {
        let (code, _, stderr) = run(&["tasks"], &env);
        assert!(
            code == 2 && stderr.starts_with(want),
            "{stderr:?} should say {want:?}"
        );
    }
}

#[test]
fn commands_name_the_variable_of_their_address() {
    let flag = "--server";
    let variable = "TASKD_URL";
    for command in ["tasks", "stats"] {
        let (_, help, _) = run(&[command, "--help"], &[(variable, "127.0.0.1:1")]);
        assert!(
            help.contains(&format!("[env: {variable}]")) && help.contains(flag),
            "{help}"
        );
        let env = [
            ("TASKD_GRPC", "127.0.0.1:2"),
            ("TASKD_MINE", "x"),
            (variable, "127.0.0.1:1"),
        ];
        let (code, stdout, stderr) = run(&[command], &env);
        let lines: Vec<&str> = stderr.lines().collect();
        let said = format!(
            "taskd: nothing reads the variable TASKD_GRPC; this command takes its address from {variable}"
        );
        assert_eq!(
            (code, stdout.as_str(), lines.len(), lines[0]),
            (2, "", 2, said.as_str())
        );
        assert!(
            lines[1].contains(&format!("{flag} ({variable}) names another place")),
            "{stderr}"
        );
    }
}

#[test]
fn insert_without_a_server_says_so_with_exit_code_2() {
    let (_dir, path) = file("https://example.org/\n");
    // Port 1 is reserved and never served.
    let (code, _, stderr) = run(
        &[
            "insert",
            "--queue",
            "q",
            "--server",
            "http://127.0.0.1:1",
            &path,
        ],
        &[],
    );
    assert_eq!(code, 2);
    assert!(
        stderr.starts_with("taskd: cannot reach taskd at http://127.0.0.1:1: "),
        "{stderr}"
    );
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

/// A server that answers as it is told; remembers the keys of each call.
struct Scripted {
    insert: Insert,
    calls: Arc<Mutex<Vec<String>>>,
    /// The events of each watch, that of the last one first.
    watches: Mutex<Vec<Events>>,
    /// The answers to questions where a task is, the last first.
    explains: Mutex<Vec<Result<pb::TaskExplanation, Status>>>,
    /// The answers to cancels, the last first.
    cancels: Mutex<Vec<Result<pb::CancelTasksResponse, Status>>>,
}

type Events = Vec<Result<pb::TaskEvent, Status>>;

/// The answer to an insert, by the number of the call and its tasks.
type Insert =
    Box<dyn Fn(usize, &[pb::NewTask]) -> Result<Vec<pb::InsertResult>, Status> + Send + Sync>;

/// By the number of the call, the tasks in it.
type Answer = Result<Vec<pb::InsertStatus>, Status>;

impl Scripted {
    fn new(insert: Insert) -> Self {
        let (calls, watches) = (Arc::default(), Mutex::default());
        Self {
            insert,
            calls,
            watches,
            explains: Mutex::default(),
            cancels: Mutex::default(),
        }
    }

    /// One that tells nothing but statuses.
    fn of_statuses(answer: impl Fn(usize, usize) -> Answer + Send + Sync + 'static) -> Self {
        let result = |status: pb::InsertStatus| pb::InsertResult {
            status: status.into(),
            ..Default::default()
        };
        Self::new(Box::new(move |call, tasks| {
            Ok(answer(call, tasks.len())?.into_iter().map(result).collect())
        }))
    }

    /// One that takes no task.
    fn of_nothing() -> Self {
        Self::of_statuses(|_, _| Err(Status::unimplemented("")))
    }
}

#[tonic::async_trait]
impl Discovery for Scripted {
    async fn insert_tasks(
        &self,
        request: Request<pb::InsertTasksRequest>,
    ) -> Result<Response<pb::InsertTasksResponse>, Status> {
        let tasks = request.into_inner().tasks;
        let keys: Vec<_> = tasks
            .iter()
            .map(|task| String::from_utf8(task.key.to_vec()).unwrap())
            .collect();
        let call = {
            let mut calls = self.calls.lock().unwrap();
            calls.push(keys.join(" "));
            calls.len() - 1
        };
        Ok(Response::new(pb::InsertTasksResponse {
            results: (self.insert)(call, &tasks)?,
        }))
    }

    async fn get_task(
        &self,
        _request: Request<pb::GetTaskRequest>,
    ) -> Result<Response<pb::Task>, Status> {
        Err(Status::unimplemented(""))
    }

    type WatchTaskStream = tokio_stream::Iter<<Events as IntoIterator>::IntoIter>;

    async fn watch_task(
        &self,
        _request: Request<pb::WatchTaskRequest>,
    ) -> Result<Response<Self::WatchTaskStream>, Status> {
        // Behind the last event a stream has nothing.
        let events = self.watches.lock().unwrap().pop().unwrap_or_default();
        Ok(Response::new(tokio_stream::iter(events)))
    }

    type WatchQueueStream = tokio_stream::Iter<<Events as IntoIterator>::IntoIter>;

    async fn watch_queue(
        &self,
        _request: Request<pb::WatchQueueRequest>,
    ) -> Result<Response<Self::WatchQueueStream>, Status> {
        match self.watches.lock().unwrap().pop() {
            Some(events) => Ok(Response::new(tokio_stream::iter(events))),
            None => Err(Status::not_found("no more")),
        }
    }

    async fn list_tasks(
        &self,
        _request: Request<pb::ListTasksRequest>,
    ) -> Result<Response<pb::ListTasksResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn explain_task(
        &self,
        _request: Request<pb::ExplainTaskRequest>,
    ) -> Result<Response<pb::TaskExplanation>, Status> {
        self.explains
            .lock()
            .unwrap()
            .pop()
            .unwrap()
            .map(Response::new)
    }

    async fn cancel_tasks(
        &self,
        _: Request<pb::CancelTasksRequest>,
    ) -> Result<Response<pb::CancelTasksResponse>, Status> {
        self.cancels
            .lock()
            .unwrap()
            .pop()
            .unwrap()
            .map(Response::new)
    }
}

/// Serves `answer` and inserts the keys a, b and c: where, what came of it, and the keys of each
/// call.
async fn insert_into(
    answer: impl Fn(usize, usize) -> Answer + Send + Sync + 'static,
    args: &'static [&'static str],
) -> (String, (i32, String, String), Vec<String>) {
    let server = Scripted::of_statuses(answer);
    let calls = Arc::clone(&server.calls);
    let url = serve(server).await;
    let outcome = insert_at(url.clone(), args).await;
    let calls = calls.lock().unwrap().clone();
    (url, outcome, calls)
}

async fn serve(server: Scripted) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let incoming = TcpListenerStream::new(listener);
    let server = tonic::transport::Server::builder().add_service(DiscoveryServer::new(server));
    tokio::spawn(server.serve_with_incoming(incoming));
    url
}

/// Runs it beside the test's own server.
async fn run_beside(args: &[&str]) -> (i32, String, String) {
    let args: Vec<String> = args.iter().map(ToString::to_string).collect();
    let command = move || run(&args.iter().map(String::as_str).collect::<Vec<_>>(), &[]);
    tokio::task::spawn_blocking(command).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_watched_again_without_an_event_has_a_gap() {
    let cut = || Err(Status::unavailable("stopping"));
    let event = |id: &str| {
        Ok(pb::TaskEvent {
            id: id.into(),
            event_id: id.into(),
            ..Default::default()
        })
    };
    let watches = Mutex::new(vec![
        vec![event("2"), cut()],
        vec![event("1"), cut()],
        vec![cut()],
        vec![cut()],
    ]);
    let url = serve(Scripted {
        watches,
        ..Scripted::of_nothing()
    })
    .await;
    let (code, stdout, stderr) = run_beside(&["watch", "--queue", "q", "--server", &url]).await;
    assert_eq!(code, 1, "{stderr}");
    let lines: Vec<serde_json::Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (gap, ids) = (
        serde_json::json!({"gap": true}),
        [&lines[2]["id"], &lines[3]["id"]],
    );
    assert_eq!(
        (&lines[..2], ids, lines.len()),
        (&[gap.clone(), gap][..], [&"1".into(), &"2".into()], 4),
        "{stdout}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_waits_for_a_taskd_that_starts_and_ends_with_the_task() {
    let id = "0190a5c2-0000-7000-8000-000000000000";
    for named in [&[id][..], &["q", "k"]] {
        let task = Some(pb::Task {
            id: id.into(),
            ..Default::default()
        });
        let found = pb::TaskExplanation {
            task,
            ..Default::default()
        };
        let explains = Mutex::new(vec![Ok(found), Err(Status::unavailable("starting"))]);
        let completed = pb::TaskStatus::Completed.into();
        let event = Ok(pb::TaskEvent {
            id: id.into(),
            event_id: "1".into(),
            status: completed,
            ..Default::default()
        });
        // The stream breaks behind the last event.
        let watches = Mutex::new(vec![vec![event, Err(Status::unavailable("killed"))]]);
        let url = serve(Scripted {
            explains,
            watches,
            ..Scripted::of_nothing()
        })
        .await;
        let (code, stdout, stderr) =
            run_beside(&[&["watch", "--server", &url], named].concat()).await;
        assert_eq!((code, stderr.as_str()), (0, ""), "{named:?}: {stdout}");
        assert!(
            stdout.lines().count() == 1 && stdout.contains(r#""status":"COMPLETED""#),
            "{stdout}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_whose_answer_was_lost_is_not_told_as_refused() {
    let cancelled = pb::ItemStatus::Cancelled.into();
    let id = "0190a5c2-0000-7000-8000-000000000000";
    let error = "it was cancelled before".to_owned();
    let result = pb::ItemResult {
        id: id.to_owned(),
        status: cancelled,
        error,
        ..Default::default()
    };
    let before = pb::CancelTasksResponse {
        results: vec![result],
        ..Default::default()
    };
    let perhaps = "1 of these were perhaps changed by a call whose answer was lost\n";
    for (lost, said) in [(Some(Status::unavailable("killed")), perhaps), (None, "")] {
        let cancels = Mutex::new(
            [Ok(before.clone())]
                .into_iter()
                .chain(lost.map(Err))
                .collect(),
        );
        let url = serve(Scripted {
            cancels,
            ..Scripted::of_nothing()
        })
        .await;
        let (code, _, stderr) = run_beside(&["tasks", "cancel", id, "--server", &url]).await;
        assert_eq!(
            (code, stderr),
            (1, format!("{id}: it was cancelled before\n{said}"))
        );
    }
}

/// The answer to a task that taskd has, with its status and a result of it.
fn found(
    task: &pb::NewTask,
    status: pb::TaskStatus,
    result: Option<&'static str>,
) -> pb::InsertResult {
    let result = result.map(|text| {
        let encoding = pb::Encoding::Text.into();
        pb::TaskResult {
            result: text.into(),
            result_encoding: encoding,
            ..Default::default()
        }
    });
    pb::InsertResult {
        status: pb::InsertStatus::Duplicate.into(),
        id: String::from_utf8(task.key.to_vec()).unwrap(),
        task_status: status.into(),
        results: result.into_iter().collect(),
        ..Default::default()
    }
}

/// The lines that `insert --wait` prints, by their numbers, and its exit code.
fn by_line(stdout: &str) -> Vec<serde_json::Value> {
    let mut lines: Vec<serde_json::Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    lines.sort_by_key(|line| line["line"].as_u64());
    lines
}

#[tokio::test(flavor = "multi_thread")]
async fn an_insert_that_waits_asks_again_for_results_that_were_left_out() {
    use pb::TaskStatus::Completed;
    // Each answer has room for one result, and none for those of `a`, which are too large.
    let server = Scripted::new(Box::new(|_, tasks| {
        let room = tasks
            .first()
            .filter(|first| first.key != "a")
            .map(|first| first.key.clone());
        let result = |task: &pb::NewTask| (Some(&task.key) == room.as_ref()).then_some("done");
        Ok(tasks
            .iter()
            .map(|task| found(task, Completed, result(task)))
            .collect())
    }));
    let calls = Arc::clone(&server.calls);
    let (code, stdout, stderr) = insert_at(serve(server).await, &["--wait", "1m"]).await;
    assert_eq!(code, 0, "{stderr}");
    let lines = by_line(&stdout);
    let results = lines.iter().map(|line| {
        (
            line["key"].as_str().unwrap(),
            line["results"][0]["result"].as_str(),
        )
    });
    assert_eq!(
        results.collect::<Vec<_>>(),
        [("a", None), ("b", Some("done")), ("c", Some("done"))],
        "{stdout}"
    );
    assert!(
        stderr
            .starts_with("line 1: taskd left out the results; GET /v1/tasks/a/results has them\n"),
        "{stderr}"
    );
    assert_eq!(
        calls.lock().unwrap()[..4],
        ["a b c", "a b c", "b c a", "c a"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_insert_that_waits_forgets_no_end_that_it_has_heard() {
    // taskd has no room for results, is away, and cannot read SQL, all behind the end of the time.
    let server = Scripted::new(Box::new(|call, tasks| {
        let try_later = pb::InsertResult {
            status: pb::InsertStatus::TryLater.into(),
            ..Default::default()
        };
        match call {
            0 | 1 => Ok(tasks
                .iter()
                .map(|task| found(task, pb::TaskStatus::Completed, None))
                .collect()),
            2 => Err(Status::unavailable("restarting")),
            3 => Ok(vec![try_later; tasks.len()]),
            _ => Ok(tasks
                .iter()
                .map(|task| found(task, pb::TaskStatus::Completed, Some("done")))
                .collect()),
        }
    }));
    let (code, stdout, stderr) = insert_at(serve(server).await, &["--wait", "1ms"]).await;
    assert_eq!(code, 0, "{stderr}");
    let lines = by_line(&stdout);
    let done = |line: &serde_json::Value| {
        line["status"] == "COMPLETED" && line["results"][0]["result"] == "done"
    };
    assert!(lines.len() == 3 && lines.iter().all(done), "{stdout}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_insert_that_waits_tells_of_a_task_whose_deadline_passes_meanwhile() {
    // It passes behind the first call.
    let server = Scripted::new(Box::new(|call, tasks| {
        let answer = |task: &pb::NewTask| match (call, &*task.key, &task.deadline) {
            (0, b"c", _) | (1.., _, Some(_)) => {
                let (status, error) = (
                    pb::InsertStatus::Rejected.into(),
                    "the deadline passed".to_owned(),
                );
                pb::InsertResult {
                    status,
                    error,
                    ..Default::default()
                }
            }
            (0 | 1, _, _) => found(task, pb::TaskStatus::Queued, None),
            (_, b"b", _) => pb::InsertResult {
                status: pb::InsertStatus::Rejected.into(),
                ..Default::default()
            },
            _ => found(task, pb::TaskStatus::Dead, None),
        };
        Ok(tasks.iter().map(answer).collect())
    }));
    let (code, stdout, stderr) = insert_at(
        serve(server).await,
        &["--wait", "1m", "--deadline", "2100-01-01T00:00:00Z"],
    )
    .await;
    assert_eq!(code, 1, "{stderr}");
    let lines = by_line(&stdout);
    let statuses: Vec<_> = lines
        .iter()
        .map(|line| (&line["line"], &line["status"]))
        .collect();
    let (dead, unknown) = (serde_json::json!("DEAD"), serde_json::Value::Null);
    assert_eq!(
        statuses,
        [(&1.into(), &dead), (&2.into(), &unknown)],
        "{stdout}"
    );
    assert!(
        stderr.contains("line 3: the deadline passed\n") && stderr.contains("line 2: "),
        "{stderr}"
    );
}

async fn insert_at(grpc: String, args: &'static [&'static str]) -> (i32, String, String) {
    let insert = move || {
        let (_dir, path) = file("a\nb\nc\n");
        let all = ["insert", "--queue", "q", "--json", "--server", &grpc, &path];
        run(&[&all, args].concat(), &[])
    };
    tokio::task::spawn_blocking(insert).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_sends_again_what_had_no_room() {
    let room_for_one = |_, tasks| {
        let mut statuses = vec![pb::InsertStatus::TryLater; tasks];
        statuses[0] = pb::InsertStatus::Created;
        Ok(statuses)
    };
    let (_, (code, stdout, stderr), calls) = insert_into(room_for_one, &[]).await;
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(
        stdout.contains(r#""lines":3,"created":3,"duplicate":0,"#)
            && stdout.contains(r#""rejected":0,"#),
        "{stdout}"
    );
    assert_eq!(calls, ["a b c", "b c", "c"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_says_that_it_waits_and_that_taskd_is_back() {
    let away_twice = |call, tasks| match call {
        0 | 1 => Err(Status::unavailable("restarting")),
        _ => Ok(vec![pb::InsertStatus::Created; tasks]),
    };
    let (url, (code, stdout, stderr), _) = insert_into(away_twice, &[]).await;
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(
        stderr,
        format!("waiting for taskd at {url}: restarting\ntaskd is back\n")
    );
    assert!(stdout.contains(r#""created":3"#), "{stdout}");
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_gives_up_with_the_summary_of_what_was_stored() {
    let gone_after_one = |call, tasks| match call {
        0 => Ok([
            vec![pb::InsertStatus::Created],
            vec![pb::InsertStatus::TryLater; tasks - 1],
        ]
        .concat()),
        _ => Err(Status::unavailable("gone")),
    };
    let (url, (code, stdout, stderr), _) =
        insert_into(gone_after_one, &["--give-up-after", "2s"]).await;
    assert_eq!(code, 2, "{stderr}");
    assert!(stdout.contains(r#""lines":1,"created":1"#), "{stdout}");
    let gave_up = format!("taskd: gave up: taskd at {url} took no line for 2s: gone; ");
    let lines: Vec<&str> = stderr.lines().collect();
    assert_eq!(lines[0], format!("waiting for taskd at {url}: gone"));
    assert!(
        lines.len() == 2 && lines[1].starts_with(&gave_up),
        "{stderr}"
    );
}

/// Starts an insert of the keys a, b and c, whose stdin goes on.
fn endless_insert(url: &str) -> std::process::Child {
    let mut command = command(&["insert", "--queue", "q", "--json", "--server", url]);
    let mut insert = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    insert
        .stdin
        .as_mut()
        .unwrap()
        .write_all(b"a\nb\nc\n")
        .unwrap();
    insert
}

fn send_signal(child: &std::process::Child, signal: Signal) {
    kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_stops_at_a_signal_with_the_summary_of_what_taskd_answered() {
    for (signal, name, expected) in [
        (Signal::SIGINT, "SIGINT", 130),
        (Signal::SIGTERM, "SIGTERM", 143),
    ] {
        let (asked, is_asked) = tokio::sync::oneshot::channel();
        let (signalled, is_signalled) = std::sync::mpsc::channel();
        let state = Mutex::new((Some(asked), is_signalled));
        let after_the_signal = move |_, tasks| {
            let (asked, is_signalled) = &mut *state.lock().unwrap();
            asked.take().unwrap().send(()).unwrap();
            tokio::task::block_in_place(|| is_signalled.recv().unwrap());
            Ok(vec![pb::InsertStatus::Created; tasks])
        };
        let url = serve(Scripted::of_statuses(after_the_signal)).await;
        let mut insert = endless_insert(&url);
        let _open = insert.stdin.take();
        is_asked.await.unwrap();
        send_signal(&insert, signal);
        signalled.send(()).unwrap();
        let output = tokio::task::spawn_blocking(|| insert.wait_with_output().unwrap())
            .await
            .unwrap();
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert_eq!(output.status.code(), Some(expected), "{stderr}");
        assert!(stdout.contains(r#""lines":3,"created":3"#), "{stdout}");
        let said = format!(
            "taskd: stopped by {name}, and read no further; inserting the same file again makes no task twice\n"
        );
        assert_eq!(stderr, said);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_signal_ends_an_insert_at_once() {
    let busy = |_, tasks| Ok(vec![pb::InsertStatus::TryLater; tasks]);
    let server = Scripted::of_statuses(busy);
    let calls = Arc::clone(&server.calls);
    let url = serve(server).await;
    let mut insert = endless_insert(&url);
    let _open = insert.stdin.take();
    until("taskd is asked", async || !calls.lock().unwrap().is_empty()).await;
    until("it ends", async || {
        send_signal(&insert, Signal::SIGINT);
        insert.try_wait().unwrap().is_some()
    })
    .await;
    let output = tokio::task::spawn_blocking(|| insert.wait_with_output().unwrap())
        .await
        .unwrap();
    assert_eq!(
        (output.status.code(), output.stdout),
        (Some(130), Vec::new())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_says_that_nobody_takes_its_summary() {
    let stores = |_, tasks| Ok(vec![pb::InsertStatus::Created; tasks]);
    let url = serve(Scripted::of_statuses(stores)).await;
    let insert = move || {
        let (_dir, path) = file("a\n");
        let full = fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let mut command = command(&["insert", "--queue", "q", "--server", &url, &path]);
        command
            .stdout(full)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
            .wait_with_output()
            .unwrap()
    };
    let output = tokio::task::spawn_blocking(insert).await.unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr.starts_with("taskd: cannot write to stdout: No space left"),
        "{stderr}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_gives_up_on_a_server_that_never_answers() {
    // The system takes the connection; nobody reads from it.
    let deaf = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", deaf.local_addr().unwrap());
    let (code, stdout, stderr) = insert_at(url, &["--give-up-after", "300ms"]).await;
    assert_eq!(code, 2, "{stderr}");
    assert_eq!(stdout, "");
    assert!(
        stderr.contains("cannot reach taskd at") && stderr.contains("no answer"),
        "{stderr}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_take_host_and_port_and_say_when_it_is_not_that_for_grpc() {
    let listener = ingress::bind(([127, 0, 0, 1], 0).into(), "http")
        .await
        .unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async { axum::serve(listener, axum::Router::new()).await.unwrap() });
    // A server that speaks HTTP/1 answers in this way; one that speaks nothing may be a proxy whose
    // taskd is away.
    for args in [
        &["fsck"][..],
        &["insert", "--queue", "q", "/dev/null"],
        &["work", "--queue", "q", "--", "true"],
    ] {
        let args = [&args[..1], &["--server", &address], &args[1..]].concat();
        let (code, stdout, stderr) = tokio::task::block_in_place(|| run(&args, &[]));
        assert_eq!((code, stdout.as_str()), (2, ""), "{args:?}");
        let said = format!(
            "taskd: http://{address} does not answer as taskd does; --server (TASKD_URL) names taskd"
        );
        assert!(
            stderr.starts_with(&said) && stderr.lines().count() == 1,
            "{args:?}: {stderr}"
        );
    }
    let closing = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = closing.local_addr().unwrap().to_string();
    tokio::spawn(async move { while closing.accept().await.is_ok() {} });
    let (code, _, stderr) = insert_at(address.clone(), &["--give-up-after", "300ms"]).await;
    assert_eq!(code, 2, "{stderr}");
    assert!(
        stderr.starts_with(&format!("waiting for taskd at http://{address}: ")),
        "{stderr}"
    );
    assert!(stderr.contains("is that taskd?"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_does_not_make_keys_of_json() {
    let mut daemon = Daemon::start("", &[]).await;
    let insert = async |text: &'static str, format: &'static str| {
        insert_bytes(&daemon, text.as_bytes(), format).await
    };
    let (code, stdout, stderr) =
        insert("\u{feff}{\"key\":\"marked\",\"payload\":[1]}\n", "auto").await;
    assert!(
        code == 0 && stdout.contains("\"created\":1"),
        "{stdout}{stderr}"
    );
    let (code, stdout, stderr) = insert("[{\"queue\":\"q\",\"key\":\"x\"}]\n", "auto").await;
    assert!(
        code == 2 && stdout.contains("\"created\":0"),
        "{stdout}{stderr}"
    );
    assert!(
        stderr.contains("a JSON array is not taken; send a task per line"),
        "{stderr}"
    );
    let (code, _, stderr) = insert("[1]\n", "keys").await;
    assert_eq!(code, 0, "{stderr}");
    let (code, _, stderr) = insert("\u{feff}first\n second \n", "auto").await;
    assert_eq!(code, 0, "{stderr}");
    let mut tasks = daemon.lease_all("w", "q", 4).await;
    tasks.sort_by_key(|task| task["key"].to_string());
    let shown: Vec<_> = tasks
        .iter()
        .map(|task| (task["key"].as_str().unwrap(), task["payload"].clone()))
        .collect();
    let none = serde_json::Value::Null;
    let wanted = [
        (" second ", none.clone()),
        ("[1]", none.clone()),
        ("first", none),
        ("marked", serde_json::json!([1])),
    ];
    assert_eq!(shown, wanted);
    assert!(daemon.stop().await.success());
}

/// Inserts a file with these bytes into queue q.
async fn insert_bytes(
    daemon: &Daemon,
    bytes: &'static [u8],
    format: &'static str,
) -> (i32, String, String) {
    let grpc = daemon.grpc();
    let insert = move || {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        fs::write(&path, bytes).unwrap();
        let path = path.to_str().unwrap();
        run(
            &[
                "insert", "--queue", "q", "--json", "--format", format, "--server", &grpc, path,
            ],
            &[],
        )
    };
    tokio::task::spawn_blocking(insert).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn insert_makes_no_keys_of_what_is_no_text() {
    let mut daemon = Daemon::start("", &[]).await;
    let files: [(&[u8], &str); 3] = [
        (b"\x1f\x8b\x08\x00\n\x00\n", "zcat FILE | taskd insert -"),
        (
            b"\xff\xfe1\x00\n\x002\x00\n\x00",
            "iconv -f UTF-16 -t UTF-8 FILE | taskd insert -",
        ),
        (
            b"\xfe\xff\x001\x00\n\x002\x00\n",
            "iconv -f UTF-16 -t UTF-8 FILE | taskd insert -",
        ),
    ];
    for (bytes, why) in files {
        let (code, stdout, stderr) = insert_bytes(&daemon, bytes, "auto").await;
        assert!(
            code == 2 && stdout.contains("\"created\":0"),
            "{code} {stdout}{stderr}"
        );
        assert!(
            stderr.contains(why) && stderr.lines().count() == 1,
            "{stderr}"
        );
    }
    // The mark alone in its line says nothing about the format.
    for bytes in [
        &b"\xef\xbb\xbf\r\n{\"key\":\"marked\"}\r\n"[..],
        b"\xef\xbb\xbf\n",
        b"\xef\xbb\xbf",
    ] {
        let (code, stdout, stderr) = insert_bytes(&daemon, bytes, "auto").await;
        assert!(
            code == 0 && stdout.contains("\"rejected\":0"),
            "{code} {stdout}{stderr}"
        );
    }
    let (code, _, stderr) = insert_bytes(&daemon, b"\x1f\x8b\n", "keys").await;
    assert_eq!(code, 0, "{stderr}");
    let tasks = daemon.lease_all("w", "q", 2).await;
    assert!(
        tasks.iter().any(|task| task["key"] == "marked"),
        "{tasks:?}"
    );
    assert!(daemon.stop().await.success());
}
