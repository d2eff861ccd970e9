//! The first steps, as README.md, docs/workers.md, the READMEs of the packages and the greeting of
//! taskd print them.

mod rust;

use std::{
    collections::BTreeSet,
    env,
    fs::{self, File},
    os::unix::{fs::symlink, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    support::{daemon::Daemon, port::Port, until},
    top::Terminal,
};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const PAGES: [&str; 6] = [
    "README.md",
    "docs/workers.md",
    "docs/any-language.md",
    "clients/go/README.md",
    "clients/python/README.md",
    "clients/typescript/README.md",
];
/// The languages of programs and commands. Others show data.
const RUN: [&str; 7] = ["bash", "go", "js", "python", "rust,no_run", "sh", "ts"];
const GO_PART: &str = "clients/go/readme_test.go sees to it that it is compiled or run";
const PYTHON_PART: &str =
    "a part of a program, which clients/python/tests/test_readme.py completes";
const TYPESCRIPT_PART: &str = "a part of a program, whose calls clients/typescript/test makes";

/// The blocks that do not run here: their page, how they begin, and why.
const LEFT_OUT: &[(&str, &str, &str)] = &[
    (
        "README.md",
        "make run",
        "builds taskd; this test runs the one that is built",
    ),
    (
        "README.md",
        "ls *.md | taskd topology run",
        "has a taskd of its own; the tests of topologies run it",
    ),
    (
        "docs/workers.md",
        "python3 -m venv",
        "fetches from PyPI; scripts/check-python installs the package",
    ),
    (
        "docs/workers.md",
        "taskd work thumbs",
        "needs images; the command of README.md runs",
    ),
    (
        "docs/workers.md",
        "use taskd_client::pb",
        "a part of a program, which the tests of the documents compile",
    ),
    (
        "docs/any-language.md",
        "go run github.com",
        "fetches a generator; scripts/check-openapi runs it",
    ),
    (
        "clients/go/README.md",
        "go mod init",
        "fetches modules; the worker is built in the module itself",
    ),
    (
        "clients/go/README.md",
        "package main\n\nimport (\n\t\"context\"\n\t\"fmt\"\n\t\"log\"\n\t\"time\"",
        GO_PART,
    ),
    ("clients/go/README.md", "go func()", GO_PART),
    (
        "clients/go/README.md",
        "package main\n\nimport (\n\t\"testing\"",
        GO_PART,
    ),
    (
        "clients/python/README.md",
        "python3 -m venv",
        "fetches from PyPI; scripts/check-python installs the package",
    ),
    ("clients/python/README.md", "@dataclass", PYTHON_PART),
    (
        "clients/python/README.md",
        "@worker.handler(queue=\"images\"",
        PYTHON_PART,
    ),
    (
        "clients/python/README.md",
        "@worker.handler\ndef fetch(task):",
        PYTHON_PART,
    ),
    (
        "clients/python/README.md",
        "from taskd_client import Client, NewTask",
        PYTHON_PART,
    ),
    (
        "clients/python/README.md",
        "from taskd_client import AsyncClient",
        PYTHON_PART,
    ),
    (
        "clients/python/README.md",
        "from taskd_client import TLS",
        "needs a name and certificates",
    ),
    (
        "clients/python/README.md",
        "from taskd_client.testing",
        PYTHON_PART,
    ),
    (
        "clients/python/README.md",
        "context = TraceContext",
        "needs OpenTelemetry",
    ),
    (
        "clients/typescript/README.md",
        "(cd clients/typescript",
        "fetches from npm; package.test.ts packs and installs",
    ),
    (
        "clients/typescript/README.md",
        "npm install @grpc",
        "fetches from npm",
    ),
    (
        "clients/typescript/README.md",
        "import { Worker } from \"@taskd/client\";\nimport { Stream",
        TYPESCRIPT_PART,
    ),
    (
        "clients/typescript/README.md",
        "import { Client } from",
        TYPESCRIPT_PART,
    ),
    (
        "clients/typescript/README.md",
        "await client.insert(",
        TYPESCRIPT_PART,
    ),
    (
        "clients/typescript/README.md",
        "const backoff =",
        TYPESCRIPT_PART,
    ),
    (
        "clients/typescript/README.md",
        "const { taskStatus, results }",
        TYPESCRIPT_PART,
    ),
    (
        "clients/typescript/README.md",
        "for await (const { status, at }",
        TYPESCRIPT_PART,
    ),
    (
        "clients/typescript/README.md",
        "import { Agent, fetch }",
        "needs certificates",
    ),
    (
        "clients/typescript/README.md",
        "import { MockSource, runHandler }",
        TYPESCRIPT_PART,
    ),
];

/// A block of code of a page.
struct Block {
    page: &'static str,
    language: String,
    code: String,
}

/// The blocks of a page in order.
fn blocks(page: &'static str) -> Vec<Block> {
    let text = fs::read_to_string(Path::new(ROOT).join(page)).unwrap();
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for line in text.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(language)) => {
                open = Some(Block {
                    page,
                    language: language.to_owned(),
                    code: String::new(),
                });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(block), None) => {
                block.code.push_str(line);
                block.code.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{page}: a block has no end");
    blocks
}

/// True if the block is of the list, or shows data.
fn is_left_out(block: &Block) -> bool {
    !RUN.contains(&block.language.as_str())
        || LEFT_OUT
            .iter()
            .any(|(page, begin, _)| *page == block.page && block.code.starts_with(begin))
}

/// A taskd, and a folder in which somebody tries what the pages say.
struct Newcomer {
    daemon: Daemon,
    folder: TempDir,
    /// The programs that the packages need, or `None` where this machine lacks them.
    python: Option<PathBuf>,
    node: Option<PathBuf>,
    go: Option<PathBuf>,
}

impl Newcomer {
    async fn start() -> Self {
        let daemon = Daemon::start("", &[]).await;
        let folder = tempfile::Builder::new()
            .prefix("taskd-docs-")
            .tempdir_in("/tmp")
            .unwrap();
        let (python, node) = (python(), node_with_package(folder.path()));
        Self {
            daemon,
            folder,
            python,
            node,
            go: go(),
        }
    }

    /// What is printed, with the ports of this taskd in place of the default ones.
    fn with_ports(&self, code: &str) -> String {
        let [http, grpc] =
            [self.daemon.http_port(), self.daemon.grpc_port()].map(|port| port.to_string());
        code.replace("7600", &http).replace("7601", &grpc)
    }

    /// A command in the folder that finds `taskd`, and this taskd where no address is printed.
    fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        let taskd = Path::new(env!("CARGO_BIN_EXE_taskd"))
            .parent()
            .unwrap()
            .to_owned();
        let path = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths([taskd].into_iter().chain(env::split_paths(&path))).unwrap();
        for (name, _) in
            env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TASKD_"))
        {
            command.env_remove(name);
        }
        command
            .env("PATH", path)
            .env("TASKD_URL", self.daemon.http())
            .env("TASKD_WORKER", format!("w-{}", uuid::Uuid::new_v4()))
            .env("PYTHONDONTWRITEBYTECODE", "1");
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    /// Runs commands that end by themselves, and that must succeed.
    async fn run(&self, code: &str) -> String {
        let mut command = self.command("bash");
        command.args(["-euo", "pipefail", "-c", &self.with_ports(code)]);
        let Output {
            status,
            stdout,
            stderr,
        } = tokio::task::spawn_blocking(move || command.output().unwrap())
            .await
            .unwrap();
        let said = String::from_utf8_lossy(&stdout).into_owned();
        assert!(
            status.success(),
            "{code}\n{said}{}",
            String::from_utf8_lossy(&stderr)
        );
        said
    }

    /// Inserts a task as the page says. The key has the time in seconds, and this test does not
    /// take longer.
    async fn insert(&self, code: &str) {
        until("a new key is inserted", async || {
            self.run(code).await.contains("\"CREATED\"")
        })
        .await;
    }

    /// Starts the worker of a block, as its page says. `None` if this machine lacks what it needs.
    fn worker(&self, block: &Block) -> Option<Program> {
        let save = |name: &str| {
            let file = self.folder.path().join(name);
            fs::write(&file, self.with_ports(&block.code)).unwrap();
            file
        };
        let mut command = match block.language.as_str() {
            "python" if block.code.contains("from taskd_client import") => {
                let mut command = self.command(self.python.as_ref()?);
                command
                    .arg(save("worker.py"))
                    .env("PYTHONPATH", Path::new(ROOT).join("clients/python/src"));
                command
            }
            "python" => {
                let mut command = self.command("python3");
                command.arg(save("worker.py"));
                command
            }
            "go" => {
                let program = self.folder.path().join("worker-go");
                build_go_worker(self.go.as_ref()?, &save("worker.go"), &program);
                self.command(program)
            }
            "js" => {
                let mut command = self.command(self.node.as_ref()?);
                command.arg(save("worker.mjs"));
                command
            }
            "rust,no_run" => {
                let mut command = self.command(env::current_exe().unwrap());
                let worker = rust::worker(block.page, &block.code);
                command.args(["--exact", worker, "--ignored", "--nocapture"]);
                command.env(rust::ADDRESS, self.daemon.grpc());
                command
            }
            _ => {
                let mut command = self.command("bash");
                command.args(["-c", &self.with_ports(&block.code)]);
                command
            }
        };
        // Workers of several languages may run at the same time.
        let output = format!("output-{}", block.language.replace(',', "-"));
        Some(Program::start(
            &mut command,
            self.folder.path().join(output),
        ))
    }

    /// Inserts a task that becomes 127.
    async fn plant(&self, key: &str) {
        let task = json!({"queue": "demo", "key": key, "payload": {"depth": 6}});
        self.daemon.insert(&[task]).await;
    }

    /// The keys of the tasks that have a result of this worker.
    async fn completed_by(&self, worker: &str) -> Vec<String> {
        let mut keys = Vec::new();
        let mut cursor = String::new();
        loop {
            let path =
                format!("/v1/tasks?queue=demo&status=COMPLETED&worker={worker}&limit=1000{cursor}");
            let (status, answer) = self.daemon.get(&path).await;
            assert_eq!(status, 200, "{answer}");
            for task in answer["tasks"].as_array().unwrap() {
                assert_eq!(task["completed"], 1, "{task}");
                keys.push(task["key"].as_str().unwrap().to_owned());
            }
            let Some(next) = answer["cursor"].as_str() else {
                return keys;
            };
            cursor = format!("&cursor={next}");
        }
    }

    /// Lets a worker do a task of the page, and one without a payload.
    async fn work(&self, block: &Block, insert: &str) {
        let completed = async || {
            self.daemon.queue("demo").await["completed"]
                .as_u64()
                .unwrap_or(0)
        };
        let before = completed().await;
        self.insert(insert).await;
        self.daemon
            .insert(&[json!({"queue": "demo", "key": uuid::Uuid::new_v4().to_string()})])
            .await;
        let Some(mut program) = self.worker(block) else {
            eprintln!(
                "left out: this machine lacks what this needs ({}):\n{}",
                block.page, block.code
            );
            self.daemon.drain("instead", "demo").await;
            return;
        };
        // The first task becomes seven where the worker reads its depth.
        let tasks = if block.code.contains("depth") { 8 } else { 2 };
        until(
            &format!(
                "the worker does its tasks: {}\n{}",
                block.code,
                program.said()
            ),
            async || {
                assert!(
                    program.runs(),
                    "it has ended: {}\n{}",
                    block.code,
                    program.said()
                );
                completed().await >= before + tasks && self.daemon.unfinished("demo").await == 0
            },
        )
        .await;
        assert!(
            program.runs(),
            "it has ended: {}\n{}",
            block.code,
            program.said()
        );
        let has_package = [
            "from taskd_client import",
            "@taskd/client",
            "taskd_client",
            "taskd/clients/go",
        ]
        .iter()
        .any(|of| block.code.contains(of));
        if has_package {
            let said = program.said();
            assert!(
                said.contains("takes tasks of demo from ") && said.contains("127.0.0.1:"),
                "{said}"
            );
        }
        program.end().await;
        let queue = self.daemon.queue("demo").await;
        assert_eq!(queue["dead"], 0, "{queue}");
    }
}

/// A program that runs until it is told to end, with all processes that it starts.
struct Program {
    child: Child,
    output: PathBuf,
}

impl Program {
    fn start(command: &mut Command, output: PathBuf) -> Self {
        let file = File::create(&output).unwrap();
        let child = command
            .process_group(0)
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .unwrap();
        Self { child, output }
    }

    /// What it has printed.
    fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap()).into_owned()
    }

    /// The name of the worker, which it prints at its start.
    fn worker(&self) -> Option<String> {
        let said = self.said();
        let (before, _) = said.split_once(" takes tasks of demo from ")?;
        before
            .split_ascii_whitespace()
            .next_back()
            .map(str::to_owned)
    }

    fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    fn signal(&self, signal: Signal) {
        // Nobody is left to hear it.
        killpg(Pid::from_raw(self.child.id().try_into().unwrap()), signal).ok();
    }

    async fn end(mut self) {
        self.signal(Signal::SIGTERM);
        let began = Instant::now();
        until("the worker ends", async || {
            if began.elapsed() > Duration::from_secs(30) {
                self.signal(Signal::SIGKILL);
            }
            !self.runs()
        })
        .await;
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().ok();
    }
}

/// The folders that scripts have made for tools, whose names begin so.
fn tools(begin: &str) -> Vec<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    let Ok(entries) = fs::read_dir(cache.unwrap_or_default().join("taskd")) else {
        return Vec::new();
    };
    let folders = entries.filter_map(Result::ok).map(|entry| entry.path());
    let is_one = |folder: &PathBuf| {
        folder.join(".complete").exists()
            && folder
                .file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(begin))
    };
    folders.filter(is_one).collect()
}

/// A Python with the packages that the client needs: scripts/check-python installs them.
fn python() -> Option<PathBuf> {
    let pythons = tools("python-")
        .into_iter()
        .map(|folder| folder.join("bin/python3"));
    let works = |python: &PathBuf| {
        let output = Command::new(python)
            .args(["-c", "import grpc, google.protobuf"])
            .output();
        output.is_ok_and(|output| output.status.success())
    };
    pythons.filter(|python| python.exists()).find(works)
}

/// The folder of the Go module.
fn go_module() -> PathBuf {
    Path::new(ROOT).join("clients/go")
}

/// A Go that builds the module without fetching anything: scripts/check-go fetches what it needs.
fn go() -> Option<PathBuf> {
    let fetched = tools("go-").into_iter().map(|folder| folder.join("bin/go"));
    let installed = [PathBuf::from("go"), PathBuf::from("/usr/local/go/bin/go")];
    let builds = |go: &PathBuf| {
        let output = Command::new(go)
            .args(["build", "./..."])
            .env("GOPROXY", "off")
            .env("GOTOOLCHAIN", "local")
            .current_dir(go_module())
            .output();
        output.is_ok_and(|output| output.status.success())
    };
    installed.into_iter().chain(fetched).find(builds)
}

/// Builds the worker of README.md with this source in place of that in the module.
fn build_go_worker(go: &Path, source: &Path, program: &Path) {
    let replaced = go_module().join("internal/readme/worker/main.go");
    let overlay = source.with_extension("overlay.json");
    fs::write(
        &overlay,
        json!({"Replace": {replaced.to_str().unwrap(): source}}).to_string(),
    )
    .unwrap();
    let output = Command::new(go)
        .args(["build", "-overlay", overlay.to_str().unwrap()])
        .args(["-o", program.to_str().unwrap(), "./internal/readme/worker"])
        .env("GOTOOLCHAIN", "local")
        .current_dir(go_module())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A Node.js, with the package installed for programs in this folder: scripts/check-typescript
/// fetches the compiler.
fn node_with_package(folder: &Path) -> Option<PathBuf> {
    let fetched = tools("node-")
        .into_iter()
        .map(|folder| folder.join("programs/node"));
    let is_new = |node: &PathBuf| {
        let output = Command::new(node)
            .args(["-p", "process.versions.node.split('.')[0] >= 20"])
            .output();
        output.is_ok_and(|output| output.stdout == b"true\n")
    };
    let node = [PathBuf::from("node")]
        .into_iter()
        .chain(fetched)
        .find(is_new)?;
    let modules = tools("typescript-")
        .into_iter()
        .find(|folder| folder.join("node_modules/typescript").exists())?;
    let package = folder.join("node_modules/@taskd/client");
    fs::create_dir_all(&package).unwrap();
    for file in [
        "src",
        "package.json",
        "tsconfig.json",
        "tsconfig.build.json",
    ] {
        symlink(
            Path::new(ROOT).join("clients/typescript").join(file),
            package.join(file),
        )
        .unwrap();
    }
    symlink(modules.join("node_modules"), package.join("node_modules")).unwrap();
    let mut compile = Command::new(&node);
    compile.args([
        "--preserve-symlinks-main",
        "node_modules/typescript/bin/tsc",
        "-p",
        "tsconfig.build.json",
    ]);
    let compiled = compile
        .args(["--preserveSymlinks"])
        .current_dir(&package)
        .output()
        .unwrap();
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stdout)
    );
    Some(node)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_printed_steps_work_in_order_and_twice() {
    let newcomer = Newcomer::start().await;
    for _ in 0..2 {
        for page in PAGES {
            let blocks: Vec<_> = blocks(page)
                .into_iter()
                .filter(|block| !is_left_out(block))
                .collect();
            let insert = blocks
                .iter()
                .find(|block| block.code.contains("/v1/tasks\n"))
                .expect("a page inserts a task");
            for block in &blocks {
                let ends = block.language == "sh" && block.code.starts_with("curl ");
                match (ends, block.code == insert.code) {
                    (true, true) => newcomer.insert(&block.code).await,
                    (true, false) => drop(newcomer.run(&block.code).await),
                    (false, _) => newcomer.work(block, &insert.code).await,
                }
            }
        }
    }
}

/// The workers that the pages print, side by side on one queue.
#[tokio::test(flavor = "multi_thread")]
async fn workers_of_four_languages_share_a_queue_while_taskd_is_killed() {
    const KILLS: usize = 2;
    /// The tasks that one of this depth becomes.
    const TREE: usize = 127;
    let mut newcomer = Newcomer::start().await;
    let mut programs = Vec::new();
    for (page, language) in [
        ("docs/workers.md", "rust,no_run"),
        ("clients/go/README.md", "go"),
        ("clients/python/README.md", "python"),
        ("clients/typescript/README.md", "js"),
    ] {
        let block = blocks(page)
            .into_iter()
            .find(|block| block.language == language && !is_left_out(block))
            .unwrap();
        match newcomer.worker(&block) {
            Some(program) => programs.push((language, program)),
            None => eprintln!("left out: this machine lacks what the worker of {page} needs"),
        }
    }
    let mut roots = 0;
    for round in 0..=KILLS {
        let prefix = format!("root-{round}-");
        let mut is_first = true;
        until("each worker does a task of this round", async || {
            for (language, program) in &mut programs {
                assert!(program.runs(), "{language} has ended: {}", program.said());
            }
            // A fast worker may have done all before a slow one came back.
            if is_first || newcomer.daemon.unfinished("demo").await == 0 {
                is_first = false;
                newcomer.plant(&format!("{prefix}{roots}")).await;
                roots += 1;
            }
            programs
                .iter()
                .all(|(_, program)| program.said().contains(&prefix))
        })
        .await;
        until("taskd workers lists each of them", async || {
            let listed = newcomer.run("taskd workers demo --json").await;
            let listed: BTreeSet<String> = listed
                .lines()
                .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
                .map(|worker| worker["worker"].as_str().unwrap().to_owned())
                .collect();
            let names = programs.iter().map(|(_, program)| program.worker());
            let names: Option<BTreeSet<String>> = names.collect();
            names.is_some_and(|names| names.len() == programs.len() && names.is_subset(&listed))
        })
        .await;
        if round < KILLS {
            newcomer.plant(&format!("{prefix}{roots}")).await;
            roots += 1;
            newcomer.daemon.kill9_and_restart();
            newcomer.daemon.ready().await;
        }
    }
    let stored = roots * TREE;
    until(&format!("all {stored} tasks are completed"), async || {
        let queue = newcomer.daemon.queue("demo").await;
        assert!(queue.is_null() || queue["dead"] == 0, "{queue}");
        queue["completed"] == stored && newcomer.daemon.unfinished("demo").await == 0
    })
    .await;
    let mut done = BTreeSet::new();
    for (language, program) in &mut programs {
        assert!(program.runs(), "{language} has ended: {}", program.said());
        for line in program.said().lines() {
            // The test harness around the Rust worker may have begun the line.
            let key = line.split(' ').next_back().unwrap_or_default();
            if key.starts_with("root-") {
                done.insert(key.to_owned());
            }
        }
    }
    assert_eq!(done.len(), stored);
    // Each has the result of one of these workers, and counts as completed once.
    let mut credited = BTreeSet::new();
    for (_, program) in &programs {
        let worker = program.worker().expect("it has said its name");
        credited.extend(newcomer.completed_by(&worker).await);
    }
    assert_eq!(credited, done);
    for (_, program) in programs {
        program.end().await;
    }
}

#[test]
fn each_block_that_is_left_out_is_there() {
    let all: Vec<_> = PAGES.into_iter().flat_map(blocks).collect();
    for (page, begin, why) in LEFT_OUT {
        let found = all
            .iter()
            .filter(|block| block.page == *page && block.code.starts_with(begin))
            .count();
        assert_eq!(found, 1, "{page}: {begin} ({why})");
    }
    let languages: BTreeSet<_> = all.iter().map(|block| block.language.as_str()).collect();
    let known: BTreeSet<_> = RUN.into_iter().chain(["json", "text", "toml"]).collect();
    assert!(languages.is_subset(&known), "{languages:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_the_greeting_work_twice() {
    let folder = tempfile::Builder::new()
        .prefix("taskd-docs-")
        .tempdir_in("/tmp")
        .unwrap();
    let [http, grpc] = [0, 1].map(|_| Port::reserve(12_000..20_000));
    let [http_at, grpc_at] = [&http, &grpc].map(|port| format!("127.0.0.1:{}", port.number));
    let data = folder.path().join("data");
    let data = data.to_str().unwrap();
    let mut taskd = Terminal::start(&[
        "--pipelines",
        "all",
        "--data-dir",
        data,
        "--http-listen",
        &http_at,
        "--grpc-listen",
        &grpc_at,
    ]);
    until("taskd greets", async || {
        taskd.written().contains("/v1/queues")
    })
    .await;
    let written = taskd.written().replace('\r', "");
    let (_, steps) = written.split_once("Try next").expect("it says what to try");
    let steps: Vec<_> = steps
        .lines()
        .skip(1)
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    assert_eq!(steps.len(), 3, "{written}");
    for round in 1..=2 {
        let mut said = Vec::new();
        for step in &steps {
            let run = async || {
                let mut command = Command::new("bash");
                command
                    .args(["-euo", "pipefail", "-c", step])
                    .current_dir(folder.path())
                    .stdin(Stdio::null());
                for (name, _) in
                    env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TASKD_"))
                {
                    command.env_remove(name);
                }
                command.env("TASKD_WORKER", format!("w-{}", uuid::Uuid::new_v4()));
                let output = tokio::task::spawn_blocking(move || command.output().unwrap())
                    .await
                    .unwrap();
                assert!(
                    output.status.success(),
                    "{step}: {}",
                    String::from_utf8_lossy(&output.stderr)
                );
                String::from_utf8(output.stdout).unwrap()
            };
            let mut output = run().await;
            if said.is_empty() {
                // The key has the time in seconds.
                until("the key is a new one", async || {
                    if !output.contains("\"CREATED\"") {
                        output = run().await;
                    }
                    output.contains("\"CREATED\"")
                })
                .await;
            }
            said.push(output);
        }
        let queues: serde_json::Value = serde_json::from_str(&said[2]).unwrap();
        let queue = &queues["queues"][0];
        assert_eq!(
            (&queue["queue"], &queue["completed"], &queue["dead"]),
            (&json!("demo"), &json!(round), &json!(0))
        );
    }
    taskd.signal(Signal::SIGTERM);
    assert!(taskd.end().await.success());
}

#[tokio::test]
async fn a_rust_worker_says_that_its_taskd_is_away() {
    let folder = tempfile::tempdir().unwrap();
    let nobody = Port::reserve(12_000..20_000);
    let address = format!("http://127.0.0.1:{}", nobody.number);
    for page in ["README.md", "docs/workers.md"] {
        let block = blocks(page)
            .into_iter()
            .find(|block| block.language == "rust,no_run")
            .unwrap();
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([
            "--exact",
            rust::worker(page, &block.code),
            "--ignored",
            "--nocapture",
        ]);
        let program = Program::start(
            command.env(rust::ADDRESS, &address),
            folder.path().join("output"),
        );
        let away = format!("taskd is away at {address}, trying again: ");
        until("it says that taskd is away", async || {
            program.said().contains(&away)
        })
        .await;
        let line = format!("worker rs-1 takes tasks of demo from {address}\n");
        assert!(program.said().contains(&line), "{}", program.said());
    }
}

/// The units of a build for a release: package, target, features and profile.
fn units(packages: &[&str]) -> BTreeSet<String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "build",
        "--release",
        "--locked",
        "--offline",
        "--unit-graph",
        "-Z",
        "unstable-options",
    ]);
    cargo.args(packages.iter().flat_map(|package| ["--package", package]));
    let output = cargo
        .env("RUSTC_BOOTSTRAP", "1")
        .current_dir(ROOT)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let graph: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let units = graph["units"].as_array().unwrap().iter();
    let parts = [
        "pkg_id", "target", "mode", "features", "profile", "platform",
    ];
    units
        .map(|unit| parts.map(|part| unit[part].to_string()).join(" "))
        .collect()
}

#[test]
fn the_demo_compiles_nothing_of_taskd_again() {
    let demo = fs::read_to_string(Path::new(ROOT).join("scripts/demo")).unwrap();
    let build = demo
        .lines()
        .find(|line| line.starts_with("cargo build "))
        .expect("it builds the crawler");
    let packages: Vec<_> = build.split(" --package ").skip(1).collect();
    let built = units(&[]);
    let more: Vec<_> = units(&packages)
        .into_iter()
        .filter(|unit| !built.contains(unit))
        .collect();
    let is_crawler =
        |unit: &String| unit.contains("/examples/crawl#") || unit.contains("#html5gum@");
    assert!(more.len() == 2 && more.iter().all(is_crawler), "{more:#?}");
}

#[test]
fn each_package_has_the_licences() {
    for file in ["LICENSE-MIT", "LICENSE-APACHE"] {
        let of_root = fs::read_to_string(Path::new(ROOT).join(file)).unwrap();
        for package in [
            "clients/go",
            "clients/rust",
            "clients/python",
            "clients/typescript",
        ] {
            let own = fs::read_to_string(Path::new(ROOT).join(package).join(file)).unwrap();
            assert_eq!(own, of_root, "{package}/{file}");
        }
    }
}
