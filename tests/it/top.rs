//! `taskd top` and `taskd stats` on a terminal of 80 columns, as a user has one.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use nix::{
    pty::{Winsize, openpty},
    sys::{
        signal::{Signal, kill},
        termios::{LocalFlags, SpecialCharacterIndices, tcgetattr},
    },
    unistd::Pid,
};
use serde_json::json;

use crate::{
    columns::access::token,
    support::{daemon::Daemon, until},
};

const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";
/// The beginning of a screen, and the end of one of `top`.
const HOME: &str = "\x1b[H";
const END: &str = "\x1b[J";

/// A command on a terminal of its own.
pub(crate) struct Terminal {
    child: Child,
    /// The keys go in here. It keeps the terminal open, too.
    keys: File,
    /// The side of the command, to ask how the terminal is set.
    side: File,
    written: Arc<Mutex<String>>,
}

impl Terminal {
    pub(crate) fn start(args: &[&str]) -> Self {
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = openpty(Some(&size), None).unwrap();
        let (keys, side) = (File::from(pty.master), File::from(pty.slave));
        let own =
            std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
        let of_command = || Stdio::from(side.try_clone().unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
        let command = command.env_clear().envs(own).args(args);
        let child = command
            .stdin(of_command())
            .stdout(of_command())
            .stderr(of_command())
            .spawn()
            .unwrap();
        let (written, mut output) = (Arc::<Mutex<String>>::default(), keys.try_clone().unwrap());
        let into = Arc::clone(&written);
        // Ends with the terminal.
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut bytes) {
                into.lock()
                    .unwrap()
                    .push_str(&String::from_utf8_lossy(&bytes[..length]));
            }
        });
        Self {
            child,
            keys,
            side,
            written,
        }
    }

    pub(crate) fn written(&self) -> String {
        self.written.lock().unwrap().clone()
    }

    /// The last whole screen, without the signs that clear what was there.
    fn screen(&self) -> String {
        let written = self.written();
        let mut screens: Vec<_> = written.split(HOME).collect();
        let last = screens.pop().unwrap_or_default();
        let whole = if last.ends_with(END) {
            last
        } else {
            screens.pop().unwrap_or_default()
        };
        whole.replace("\x1b[K", "").replace(END, "")
    }

    async fn shows(&self, what: &str) {
        until(&format!("the screen shows {what:?}"), async || {
            self.screen().contains(what)
        })
        .await;
    }

    fn press(&mut self, key: u8) {
        self.keys.write_all(&[key]).unwrap();
    }

    /// True while keys come at once and are not shown.
    fn is_raw(&self) -> bool {
        !tcgetattr(&self.side)
            .unwrap()
            .local_flags
            .intersects(LocalFlags::ICANON | LocalFlags::ECHO)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    pub(crate) async fn end(&mut self) -> ExitStatus {
        let mut ended = None;
        until("the command ends", async || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        })
        .await;
        ended.unwrap()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The queues of a screen, from top to bottom.
fn queues(screen: &str) -> Vec<String> {
    let rows = screen
        .lines()
        .skip_while(|line| !line.starts_with("queue"))
        .skip(1);
    rows.map(|row| row.split_whitespace().next().unwrap_or_default().to_owned())
        .collect()
}

#[tokio::test]
async fn top_shows_queues_takes_keys_and_leaves_the_terminal_as_it_was() {
    let mut daemon = Daemon::start("auth = \"tokens\"\n", &[]).await;
    let reader = token(&daemon, "reader", &["--roles", "read"]).await;
    let admin = token(&daemon, "admin", &["--roles", "admin"]).await;
    let tasks =
        json!([{"queue": "a", "key": "1"}, {"queue": "b", "key": "1"}, {"queue": "b", "key": "2"}]);
    let insert = crate::support::http_client().post(format!("{}/v1/tasks", daemon.http()));
    assert_eq!(
        insert
            .bearer_auth(&admin)
            .json(&tasks)
            .send()
            .await
            .unwrap()
            .status(),
        200
    );

    let server = daemon.http();
    let mut top = Terminal::start(&[
        "top", "--server", &server, "--token", &reader, "--every", "100ms",
    ]);
    top.shows("by waiting").await;
    top.shows("calls/s").await;
    until("the longer queue is the first", async || {
        queues(&top.screen()) == ["b", "a"]
    })
    .await;
    let screen = top.screen();
    assert!(
        screen
            .lines()
            .all(|line| line.trim_end_matches('\r').chars().count() <= 80)
            && screen.lines().count() <= 24,
        "{screen}"
    );
    assert!(top.is_raw());
    assert_eq!(
        tcgetattr(&top.side).unwrap().control_chars[SpecialCharacterIndices::VQUIT as usize],
        0
    );
    top.press(b's');
    top.shows("by leases").await;
    top.press(b'p');
    top.shows("paused").await;
    top.press(b'p');
    top.shows("every 100ms").await;
    top.press(b'q');
    assert!(top.end().await.success());
    until("the terminal is left", async || {
        top.written().ends_with(LEAVE)
    })
    .await;
    assert!(
        top.written().contains(ENTER) && !top.is_raw(),
        "{:?}",
        top.written()
    );

    // A signal ends it in the same way.
    let mut top = Terminal::start(&["top", "--server", &server, "--token", &reader]);
    top.shows("taskd top").await;
    top.signal(Signal::SIGTERM);
    assert!(top.end().await.success());
    until("the terminal is left", async || {
        top.written().ends_with(LEAVE)
    })
    .await;
    assert!(!top.is_raw());

    // A mistake is one line, and no screen.
    let mut top = Terminal::start(&["top", "--server", &server, "--token", "taskd_wrong"]);
    assert_eq!(top.end().await.code(), Some(2));
    until("it says why", async || {
        top.written().contains("give the command one with --token")
    })
    .await;
    assert!(
        !top.written().contains(ENTER) && top.written().trim_end().lines().count() == 1,
        "{}",
        top.written()
    );
    assert!(daemon.stop().await.success());
}

#[tokio::test]
async fn stats_live_on_a_terminal() {
    let mut daemon = Daemon::start("", &[]).await;
    let mut once = Terminal::start(&["stats", "--server", &daemon.http(), "--once"]);
    until("it says that there is no queue", async || {
        once.written().trim_end() == "none"
    })
    .await;
    assert!(once.end().await.success());
    daemon.insert(&[json!({"queue": "q", "key": "1"})]).await;
    let mut stats = Terminal::start(&["stats", "--server", &daemon.http(), "--every", "100ms"]);
    stats.shows("oldest").await;
    // Later looks have rates: a queue has a cell more for each.
    until("there are rates", async || {
        let screen = stats.screen();
        screen.lines().any(|line| {
            line.trim_start().starts_with("q ") && line.split_whitespace().count() >= 10
        })
    })
    .await;
    // Not SIGINT: the background job of a shell ignores it.
    stats.signal(Signal::SIGTERM);
    stats.end().await;
    assert!(daemon.stop().await.success());
}

#[test]
fn top_without_a_terminal_is_one_line_of_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command.arg("top").stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), said.lines().count()),
        (Some(2), 1),
        "{said}"
    );
    assert!(
        said.contains("top needs a terminal") && said.contains("taskd stats"),
        "{said}"
    );
    assert!(output.stdout.is_empty());
}

#[tokio::test]
async fn a_table_cuts_a_key_on_a_terminal_only_and_says_so() {
    let daemon = Daemon::start("", &[]).await;
    let key = "k".repeat(100);
    daemon.insert(&[json!({"queue": "q", "key": key})]).await;
    let args = ["tasks", "--queue", "q", "--server", &daemon.http()];
    let mut terminal = Terminal::start(&args);
    assert!(terminal.end().await.success());
    until("the table is read", async || {
        terminal.written().contains('…')
    })
    .await;
    assert!(
        !terminal.written().contains(&"k".repeat(60)),
        "{}",
        terminal.written()
    );
    let piped = Command::new(env!("CARGO_BIN_EXE_taskd"))
        .args(args)
        .output()
        .unwrap();
    assert!(String::from_utf8(piped.stdout).unwrap().contains(&key));
}
