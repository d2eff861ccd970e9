//! Runs a command for a task: starts it without a shell, feeds it, watches it, and kills it
//! together with all processes that it started.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, PipeReader, Write as _},
    os::{
        fd::OwnedFd,
        unix::{
            ffi::{OsStrExt as _, OsStringExt as _},
            fs::{OpenOptionsExt as _, PermissionsExt as _},
            process::ExitStatusExt as _,
        },
    },
    path::{Path, PathBuf},
    pin::pin,
    process::{ExitStatus, Stdio},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use command_fds::{CommandFdExt as _, FdMapping};
use nix::{
    errno::Errno,
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use taskd_client::{Done, Failure, Stop, Task};
use tokio::{net::unix::pipe, process::Command, time::timeout};
use uuid::Uuid;

use super::{
    args::Work,
    capture::{self, Excess},
    found::{self, Found, Goal},
    show::Show,
};
use crate::{cli::print::say, config::Time};

/// The time between SIGTERM and SIGKILL; also how long a process left behind by the command may
/// hold an output open.
pub(super) const KILL_AFTER: Duration = Duration::from_secs(5);
/// The time within which a started command certainly has its own process group.
const START: Duration = Duration::from_secs(1);
/// How many bytes from the end of stderr become the failure reason.
const REASON_BYTES: usize = 1000;
const FOUND_BYTES: u64 = 32 << 20;
/// The minimum delay of a task that is put off.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
/// The file descriptor on which a command lists discovered tasks.
const FOUND_FD: i32 = 3;

/// The command, and how to run it for each task.
pub(super) struct Plan {
    command: Vec<OsString>,
    has_file: bool,
    timeout: Duration,
    dead_code: u8,
    put_off_code: u8,
    put_off: Duration,
    throttles: bool,
    max_output: u64,
    is_json: bool,
    has_found: bool,
    prefix: Option<String>,
    queue: Option<String>,
    port: Option<String>,
    unusable: OnceLock<String>,
}

impl Plan {
    /// Fails if the command does not exist.
    pub(super) fn new(args: &Work) -> anyhow::Result<Self> {
        let command = args.command.clone();
        look_for(command.first().context("no command is given")?)?;
        let wants = &args.commands;
        Ok(Self {
            has_file: command
                .iter()
                .any(|part| contains(part.as_bytes(), b"{file}")),
            command,
            timeout: args.timeout.0,
            dead_code: wants.dead_code,
            put_off_code: wants.put_off_code,
            put_off: wants.put_off.0,
            throttles: wants.throttle,
            max_output: wants.max_output.0,
            is_json: wants.json_result,
            has_found: wants.discover_fd,
            prefix: wants.discover_prefix.clone(),
            queue: wants.discover_queue.clone(),
            port: wants.discover_port.clone(),
            unusable: OnceLock::new(),
        })
    }

    /// Why the command cannot start, whatever the task, if that is so.
    pub(super) fn unusable(&self) -> Option<&str> {
        self.unusable.get().map(String::as_str)
    }

    /// Handles a failed start. If the cause is not this task, the task is given back at no cost.
    fn failed_to_start(&self, error: &io::Error) -> Failure {
        let failure = Failure::new(format!("cannot start the command: {error}"));
        let Some(program) = self.command.first().filter(|program| !is_of_task(program)) else {
            return failure;
        };
        let advice = match Errno::from_raw(error.raw_os_error().unwrap_or_default()) {
            Errno::ENOEXEC => "a script needs a first line such as #!/bin/sh",
            Errno::ENOENT => {
                "it is gone, or the program that its first line (#!) names is not there"
            }
            Errno::EACCES => {
                "this user may not run it, or the program that its first line (#!) names"
            }
            // The arguments of this task are too long, or the system is out of some resource.
            _ => return failure,
        };
        self.unusable
            .set(format!(
                "cannot start {}: {error}; {advice}",
                program.display()
            ))
            .ok();
        failure.not_started()
    }
}

/// Runs the command of a task. If the command cannot start for any task, stops the worker.
pub(super) async fn run(
    plan: Arc<Plan>,
    stop: Stop,
    show: Arc<Show>,
    task: Task,
) -> Result<Done, Failure> {
    let done = work(&plan, &show, &task).await;
    if plan.unusable().is_some() {
        stop.drain();
    }
    done
}

async fn work(plan: &Plan, show: &Show, task: &Task) -> Result<Done, Failure> {
    if task.key_bytes().contains(&0) {
        return Err(Failure::new("the key has a zero byte, which no command takes").never_again());
    }
    let file = if plan.has_file {
        Some(PayloadFile::write(&task.payload)?)
    } else {
        None
    };
    let file = file.as_ref().map(|file| file.0.as_path());
    let mut ended = run_once(plan, task, file).await?;
    if ended.met_a_signal_at_its_start() {
        ended = run_once(plan, task, file).await?;
    }
    finish(plan, show, task, &ended)
}

/// A command that has ended.
struct Ended {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// What the command wrote to [`FOUND_FD`]: lines with discovered tasks.
    named: Vec<u8>,
    after: Duration,
}

impl Ended {
    /// True if a signal to taskd's own process group may have ended the command. A terminal sends
    /// SIGINT to the whole group, which includes a command until it has a group of its own.
    fn met_a_signal_at_its_start(&self) -> bool {
        let ended_by = self
            .status
            .signal()
            .and_then(|signal| Signal::try_from(signal).ok());
        let is_silent = self.stdout.is_empty() && self.stderr.is_empty() && self.named.is_empty();
        matches!(ended_by, Some(Signal::SIGINT | Signal::SIGTERM))
            && is_silent
            && self.after < START
    }
}

async fn run_once(plan: &Plan, task: &Task, file: Option<&Path>) -> Result<Ended, Failure> {
    let started = Instant::now();
    let (mut child, found) = start(plan, task, file)?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    // From here on, every return kills the group.
    let group = Group(pid.map(Pid::from_raw));
    let stdin = child.stdin.take();
    let stdout = child.stdout.take();
    let stderr = child.stderr.take();
    let (Some(stdout), Some(stderr)) = (stdout, stderr) else {
        return Err(Failure::new("the command has no output"));
    };
    let mut outputs = pin!(async {
        let fed = async {
            if let Some(stdin) = stdin {
                capture::feed(stdin, &task.payload).await;
            }
            Ok(())
        };
        let named = async {
            match found {
                Some(found) => capture::all(found, FOUND_BYTES)
                    .await
                    .map_err(|why| excess(&why, "discovered", FOUND_BYTES)),
                None => Ok(Vec::new()),
            }
        };
        let stdout = async {
            capture::all(stdout, plan.max_output)
                .await
                .map_err(|why| excess(&why, "stdout", plan.max_output))
        };
        let stderr = async {
            capture::tail(stderr, REASON_BYTES)
                .await
                .map_err(Failure::from)
        };
        let ((), stdout, stderr, named) = tokio::try_join!(fed, stdout, stderr, named)?;
        Ok::<_, Failure>((stdout, stderr, named))
    });
    let ended = timeout(plan.timeout, async {
        let mut output = None;
        let status = tokio::select! {
            status = child.wait() => status?,
            read = &mut outputs => {
                output = Some(read?);
                child.wait().await?
            }
        };
        Ok::<_, Failure>((status, output))
    });
    let (status, output) = match ended.await {
        Ok(ended) => ended?,
        Err(_) => {
            group.signal(Signal::SIGTERM);
            timeout(KILL_AFTER, child.wait()).await.ok();
            return Err(Failure::new(format!(
                "it took longer than {}",
                humantime::format_duration(plan.timeout)
            )));
        }
    };
    let after = started.elapsed();
    let (stdout, stderr, named) = match output {
        Some(output) => output,
        // A process left behind by the command may hold an output open.
        None => match timeout(KILL_AFTER, &mut outputs).await {
            Ok(output) => output?,
            Err(_) => {
                return Err(Failure::new(
                    "a process that it left behind keeps its output open",
                ));
            }
        },
    };
    Ok(Ended {
        status,
        stdout,
        stderr,
        named,
        after,
    })
}

fn excess(excess: &Excess, which: &str, most: u64) -> Failure {
    match excess {
        Excess::TooMuch => Failure::new(format!("it wrote more than {most} bytes ({which})")),
        Excess::Unreadable(error) => {
            Failure::new(format!("its output ({which}) cannot be read: {error}"))
        }
    }
}

fn start(
    plan: &Plan,
    task: &Task,
    file: Option<&Path>,
) -> Result<(tokio::process::Child, Option<pipe::Receiver>), Failure> {
    let mut parts = plan.command.iter().map(|part| fill(part, task, file));
    let mut command = Command::new(parts.next().unwrap_or_default());
    command
        .args(parts)
        .env_remove("TASKD_TOKEN")
        .envs(environment(task));
    command.stdin(if file.is_some() {
        Stdio::null()
    } else {
        Stdio::piped()
    });
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    let found = if plan.has_found {
        let (reader, writer): (PipeReader, _) = std::io::pipe()?;
        let mapping = FdMapping {
            parent_fd: OwnedFd::from(writer),
            child_fd: FOUND_FD,
        };
        command.fd_mappings(vec![mapping])?;
        Some(pipe::Receiver::from_owned_fd(OwnedFd::from(reader))?)
    } else {
        None
    };
    let child = command
        .spawn()
        .map_err(|error| plan.failed_to_start(&error))?;
    // Dropping the command closes our copy of the pipe's write end; otherwise reading would never
    // reach the end.
    Ok((child, found))
}

/// Replaces the placeholders in an argument with the values of the task. It makes a single pass,
/// because a key may itself contain a placeholder.
fn fill(part: &OsStr, task: &Task, file: Option<&Path>) -> OsString {
    let attempt = task.attempt().to_string();
    let file = file
        .map(|file| file.as_os_str().as_bytes())
        .unwrap_or_default();
    let values: [(&[u8], &[u8]); 5] = [
        (b"{key}", task.key_bytes()),
        (b"{id}", task.id().as_bytes()),
        (b"{queue}", task.queue().as_bytes()),
        (b"{attempt}", attempt.as_bytes()),
        (b"{file}", file),
    ];
    let mut rest = part.as_bytes();
    let mut filled = Vec::new();
    while let Some(&first) = rest.first() {
        match values.iter().find(|(name, _)| rest.starts_with(name)) {
            Some((name, value)) => {
                filled.extend_from_slice(value);
                rest = &rest[name.len()..];
            }
            None => {
                filled.push(first);
                rest = &rest[1..];
            }
        }
    }
    OsString::from_vec(filled)
}

fn environment(task: &Task) -> Vec<(OsString, OsString)> {
    let text = |name: &str, value: &str| (OsString::from(name), OsString::from(value));
    let mut all = vec![
        text("TASKD_ID", task.id()),
        (
            OsString::from("TASKD_KEY"),
            OsStr::from_bytes(task.key_bytes()).to_owned(),
        ),
        text("TASKD_QUEUE", task.queue()),
        text("TASKD_ATTEMPT", &task.attempt().to_string()),
        text("TRACEPARENT", task.traceparent()),
    ];
    // A zero byte in a variable would make the start fail.
    let headers = task
        .headers()
        .iter()
        .filter(|(_, value)| !value.contains('\0'));
    all.extend(headers.map(|(name, value)| {
        let name: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        text(&format!("TASKD_HEADER_{}", name.to_uppercase()), value)
    }));
    all
}

fn finish(plan: &Plan, show: &Show, task: &Task, ended: &Ended) -> Result<Done, Failure> {
    let Ended {
        status,
        stdout,
        stderr,
        named,
        ..
    } = ended;
    if !status.success() {
        let said = String::from_utf8_lossy(stderr);
        let said = said.trim();
        let how = match status.code() {
            Some(code) => format!("exit code {code}"),
            None => status.to_string(),
        };
        let failure = Failure::new(if said.is_empty() {
            how
        } else {
            format!("{how}: {said}")
        });
        let is_code = |code: u8| status.code() == Some(code.into());
        return Err(if is_code(plan.dead_code) {
            failure.never_again()
        } else if is_code(plan.put_off_code) {
            let wait = asked_wait(stdout)
                .unwrap_or(plan.put_off)
                .max(SHORTEST_WAIT);
            let failure = if plan.throttles {
                failure.throttle(wait)
            } else {
                failure.put_off(wait)
            };
            // The others of its limit key wait, too.
            match task.limit_key() {
                "" => failure,
                _ => failure.hold(wait),
            }
        } else {
            failure
        });
    }
    let (result, lines) = found::split(stdout, plan.prefix.as_deref());
    show.printed(task, &result);
    let goal = match &plan.port {
        Some(port) => Goal::Port(port),
        None => Goal::Queue(plan.queue.as_deref().unwrap_or(task.queue())),
    };
    let named = named.split(|byte| *byte == b'\n');
    let discovered = Found::read(lines.into_iter().chain(named), goal);
    if let Some(complaint) = discovered.complaint() {
        if plan.port.is_some() {
            // Without its outputs, what the command printed would be one.
            return Err(Failure::new(complaint));
        }
        show.not_stored(task, &complaint);
    }
    let done = if plan.is_json {
        let value: &serde_json::value::RawValue = serde_json::from_slice(&result)
            .map_err(|error| Failure::new(format!("its output is not JSON: {error}")))?;
        Done::json(value)?
    } else {
        match String::from_utf8(result) {
            Ok(text) => Done::text(text.strip_suffix('\n').unwrap_or(&text)),
            Err(error) => Done::bytes(Bytes::from(error.into_bytes())),
        }
    };
    Ok(done.discover(discovered.tasks))
}

/// The delay that a command asks for, if the last line of its output is a time.
fn asked_wait(stdout: &[u8]) -> Option<Duration> {
    let text = std::str::from_utf8(stdout).ok()?;
    let time: Time = text.lines().last()?.trim().parse().ok()?;
    Some(time.0)
}

/// The process group of a command. Dropping it kills all of its processes, including when the
/// handler itself is dropped.
struct Group(Option<Pid>);

impl Group {
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.0 {
            // The signal fails if no process of the group is left.
            killpg(group, signal).ok();
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
    }
}

/// A temporary file with the payload, removed when dropped. Only this user can read it.
struct PayloadFile(PathBuf);

impl PayloadFile {
    fn write(payload: &[u8]) -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("taskd-work-{}", Uuid::new_v4().simple()));
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        let written = Self(path);
        file.write_all(payload)?;
        Ok(written)
    }
}

impl Drop for PayloadFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            say(format_args!(
                "taskd: cannot remove {}: {error}",
                self.0.display()
            ));
        }
    }
}

/// Fails if the program evidently cannot be started.
fn look_for(program: &OsStr) -> anyhow::Result<()> {
    let is_file = |path: &Path| path.metadata().is_ok_and(|file| file.is_file());
    let may_run = |path: &Path| {
        path.metadata()
            .is_ok_and(|file| file.permissions().mode() & 0o111 != 0)
    };
    let path = Path::new(program);
    let is_there = if is_of_task(program) {
        true
    } else if program.as_bytes().contains(&b'/') {
        ensure!(
            !is_file(path) || may_run(path),
            "{0} is not executable: chmod +x {0}",
            path.display()
        );
        is_file(path)
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let mut paths = std::env::split_paths(&folders).map(|folder| folder.join(program));
        paths.any(|path| is_file(&path) && may_run(&path))
    };
    ensure!(
        is_there,
        "there is no command {program:?}; taskd work runs a program, not a line of a shell"
    );
    Ok(())
}

/// True if the program depends on the task.
fn is_of_task(program: &OsStr) -> bool {
    contains(program.as_bytes(), b"{")
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}
