//! What the commands print: no character of a key, a reason or a name that a terminal obeys, or
//! that cannot be seen.

use std::process::{Command, Stdio};

use serde_json::{Value, json};
use taskd::model::is_hidden;

use crate::{
    columns::dead_letters::{ONE_ATTEMPT, letters, reject_all},
    support::{daemon::Daemon, until},
};

/// ESC and BEL, CSI in one character, marks of direction, a line separator, characters of no width,
/// and a tag.
const HOSTILE: &str =
    "k\u{1b}]0;pwn\u{7}\u{9b}32m\u{202e}txt\u{2028}\u{2066}x\u{200b}\u{feff}\u{e0041}é";

fn is_bad(c: char) -> bool {
    (c.is_control() && !matches!(c, '\n' | '\t')) || is_hidden(c)
}

/// Stdout and stderr of a command, which has printed nothing that is bad.
fn printed(daemon: &Daemon, args: &[&str]) -> String {
    let own = std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("TASKD_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .env_clear()
        .envs(own)
        .env("TASKD_URL", daemon.http());
    let output = command.args(args).stdin(Stdio::null()).output().unwrap();
    let text = [output.stdout, output.stderr]
        .map(|bytes| String::from_utf8(bytes).unwrap())
        .concat();
    let bad: Vec<char> = text.chars().filter(|c| is_bad(*c)).collect();
    assert!(
        bad.is_empty(),
        "{args:?} printed {bad:?}:\n{}",
        text.escape_debug()
    );
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn no_command_prints_what_a_terminal_obeys_or_does_not_show() {
    let mut daemon = Daemon::start(ONE_ATTEMPT, &[]).await;
    let task = json!({"queue": "q", "key": HOSTILE, "payload": HOSTILE, "headers": {"a\u{202e}b": "v\u{2028}"}});
    let id = daemon.insert(&[task]).await.remove(0);
    reject_all(&daemon, "w", "q", 1, HOSTILE).await;
    let letter = letters(&daemon, "queue=q", 1).await.remove(0);
    let letter = letter["id"].as_str().unwrap();
    let open = daemon
        .insert(&[json!({"queue": "open", "key": HOSTILE, "payload": {"n": HOSTILE}})])
        .await
        .remove(0);
    let (_, bulk) = daemon
        .post(
            "/v1/tasks:cancel",
            &json!({"filter": {"queue": "open", "key_prefix": HOSTILE}, "yes": true}),
        )
        .await;
    let bulk = bulk["bulk"]["id"]
        .as_str()
        .or(bulk["id"].as_str())
        .map(ToOwned::to_owned);
    let (_, bulk_changes) = daemon.get("/v1/bulk").await;
    let bulk = bulk.unwrap_or_else(|| bulk_changes["bulk"][0]["id"].as_str().unwrap().to_owned());
    let file = tempfile::NamedTempFile::new().unwrap();
    let line = json!({"queue": "a\u{202e}b\u{9b}", "key": HOSTILE});
    std::fs::write(
        file.path(),
        format!(
            "{line}\n{{\"queue\": \"{0}\", \"{0}\": 1}}\n",
            "x\u{202e}\u{9b}"
        ),
    )
    .unwrap();
    let file = file.path().to_str().unwrap();
    let data = daemon.data();
    let data = data.to_str().unwrap();

    // Whether the output has the hostile text, and so an escape in its place.
    let commands: &[(&[&str], bool)] = &[
        (&["task", &id], true),
        (&["task", &id, "--json"], true),
        (&["task", "q", HOSTILE], true),
        (&["task", &open], true),
        (&["task", &open, "--json"], true),
        (&["task", "none", HOSTILE], true),
        (&["explain", &id], true),
        (&["explain", &id, "--json"], true),
        (&["explain", &id, "--worker", "w\u{202e}"], true),
        (&["tasks", "--queue", "q"], true),
        (&["tasks", "--queue", "q", "--json"], true),
        (&["tasks", "retry", "none", HOSTILE], true),
        (&["dead", "list"], true),
        (&["dead", "list", "--json"], true),
        (&["dead", "show", letter], true),
        (&["dead", "show", letter, "--json"], true),
        (&["dead", "retry", "none", HOSTILE], true),
        (&["bulk", "list"], false),
        (&["bulk", "list", "--json"], true),
        (&["bulk", "show", &bulk], false),
        (&["bulk", "show", &bulk, "--json"], true),
        (&["watch", &id], false),
        (&["watch", &id, "--json"], false),
        (&["watch", "q", HOSTILE], false),
        (&["watch", "none", HOSTILE], true),
        (&["cancel", "--queue", "none", "--key", HOSTILE], true),
        (
            &["cancel", "--queue", "none", "--key", HOSTILE, "--json"],
            true,
        ),
        (&["change", HOSTILE, "--priority", "high"], true),
        (&["requeue", HOSTILE, "--to", "w\u{202e}"], true),
        (&["pause", HOSTILE], true),
        (&["resume", HOSTILE], true),
        (&["dump", "open"], false),
        (&["dump", "open", "--json"], false),
        (&["dump", HOSTILE], true),
        (&["books"], false),
        (&["books", "--json"], false),
        (&["books", HOSTILE], true),
        (&["fsck"], false),
        (&["fsck", "--queue", HOSTILE], true),
        (&["stats", "--once"], false),
        (&["stats", "--once", "--json"], false),
        (&["insert", file], true),
        (&["insert", "--json", file], true),
        (&["acts", "--data-dir", data], false),
        (&["acts", "--json", "--data-dir", data], false),
        (
            &[
                "token",
                "create",
                HOSTILE,
                "--roles",
                "read",
                "--data-dir",
                data,
            ],
            true,
        ),
        (&["token", "list", "--data-dir", data], false),
    ];
    for (args, has_it) in commands {
        let text = printed(&daemon, args);
        let is_escaped = text.contains("\\u202e") || text.contains("\\u{202e}");
        assert!(is_escaped || !has_it, "{args:?}: {text}");
        if args.contains(&"--json") && text.starts_with(['{', '[']) {
            let values = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
            assert!(
                values.take_while(Result::is_ok).count() > 0,
                "{args:?}: {text}"
            );
        }
    }
    // The value of a key is the same for programs.
    let shown = printed(&daemon, &["task", &id, "--json"]);
    let shown: Value = serde_json::from_str(shown.lines().next().unwrap()).unwrap();
    assert_eq!(
        shown["task"]["key"].as_str().or(shown["key"].as_str()),
        Some(HOSTILE),
        "{shown}"
    );

    daemon
        .insert(&[json!({"queue": "work", "key": HOSTILE})])
        .await;
    let fails = [
        "work",
        "--queue",
        "work",
        "--exit-when-idle",
        "1s",
        "--",
        "sh",
        "-c",
        "echo {key} >&2; exit 1",
        "{key}",
    ];
    let text = printed(&daemon, &fails);
    assert!(
        text.contains("\\u202e") || text.contains("\\u{202e}"),
        "{text}"
    );
    until("the task is dead", async || {
        daemon.unfinished("work").await == 0
    })
    .await;

    // A table of another worker's name, a log line and an act cannot be spoiled by a name.
    for worker in [
        "w\u{202e}",
        "w\u{200b}",
        "\u{feff}w",
        "w\u{2028}",
        "w\u{9b}",
        "\u{2066}",
    ] {
        let (status, problem) = daemon
            .post("/v1/tasks:get", &json!({"worker": worker, "queues": ["q"]}))
            .await;
        assert_eq!(status, 400, "{problem}");
        assert!(
            !problem["detail"].as_str().unwrap().contains(is_bad),
            "{problem}"
        );
    }
    let (status, answer) = daemon
        .post(
            "/v1/tasks:get",
            &json!({"worker": "Jürgen 日本 🦀", "queues": ["q"]}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    assert!(
        !daemon.log().contains(is_bad),
        "{}",
        daemon.log().escape_debug()
    );
    assert!(daemon.stop().await.success());
}
