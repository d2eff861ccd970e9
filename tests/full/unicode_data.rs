//! A twentieth of the lines of Debian's UnicodeData.txt as records, keyed by category. `awk` and `sort`
//! say what each of five subscriptions must have made of them.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};

use crate::support::{
    daemon::Daemon,
    subscriptions::{subscribe, subscription},
    until,
};

const DATA: &str = "/usr/share/unicode/UnicodeData.txt";
/// The categories that are processed in order: a few dozen records each.
const IN_ORDER: [&str; 4] = ["Nd", "Mc", "Lm", "Po"];

/// What a shell prints in a folder.
fn shell(folder: &Path, script: &str) -> String {
    let mut command = Command::new("sh");
    // Bytes decide the order.
    command.args(["-ec", script]).env("LC_ALL", "C");
    let output = command.current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{script}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Writes what a subscription got to a file, and returns it sorted by `sort`.
fn sorted(folder: &Path, name: &str, got: &[String]) -> String {
    let mut text = String::new();
    for line in got {
        text.push_str(line);
        text.push('\n');
    }
    fs::write(folder.join(name), text).unwrap();
    shell(folder, &format!("sort {name}"))
}

async fn publish(daemon: &Daemon, lines: &[String]) {
    for lines in lines.chunks(500) {
        let mut body = String::new();
        for line in lines {
            let category = line.split(';').nth(2).unwrap();
            let attributes = json!({"category": category});
            let record = json!({"key": category, "value": line, "attributes": attributes});
            body.push_str(&record.to_string());
            body.push('\n');
        }
        let path = "/v1/topics/unicode/records";
        let (status, answer) = daemon.post_text(path, "application/x-ndjson", body).await;
        assert_eq!(status, 200, "{answer}");
        for result in answer.as_array().unwrap() {
            assert_eq!(result["status"], "STORED", "{answer}");
        }
    }
}

/// A worker that appends each payload to a file of its category, in order.
fn worker(daemon: &Daemon, number: usize, files: &Path) -> Child {
    let name = format!("w{number}");
    let append = "line=$(cat); printf '%s\\n' \"$line\" >> \"$0/$TASKD_HEADER_CATEGORY\"";
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    command
        .args(["work", "ordered", "--server", &daemon.http()])
        .args(["--name", &name, "--lease", "1s", "--concurrency", "8"])
        .args(["--", "sh", "-c", append])
        .arg(files)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Processes a queue in order, with a worker that is killed as soon as it has begun, and then each
/// second.
async fn work_in_order(daemon: &Daemon, files: &Path) {
    let mut workers = 0;
    until("all is done in order", async || {
        workers += 1;
        let mut child = worker(daemon, workers, files);
        if workers == 1 {
            until("it has begun", async || {
                fs::read_dir(files).unwrap().next().is_some()
            })
            .await;
        } else {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let one = subscription(daemon, "ordered").await;
        one["behind"] == 0 && one["tasks"].as_u64() > Some(0) && one["done"] == one["tasks"]
    })
    .await;
    assert!(workers > 1, "no worker was killed before the end");
}

/// Processes all tasks of a queue. Returns their payloads.
async fn work(daemon: &Daemon, queue: &str) -> Vec<String> {
    let mut got = Vec::new();
    until(&format!("{queue} is done"), async || {
        let tasks = daemon.lease("w", queue, 1000, "100ms").await;
        for task in &tasks {
            got.push(task["payload"].as_str().unwrap().to_owned());
        }
        for status in daemon.complete("w", &tasks).await {
            assert_eq!(status, "OK");
        }
        let one = subscription(daemon, queue).await;
        tasks.is_empty() && one["behind"] == 0 && one["done"] == one["tasks"]
    })
    .await;
    got
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_subscriptions_see_of_unicode_data_what_awk_and_sort_say() {
    let folder = tempfile::Builder::new()
        .prefix("taskd-full-")
        .tempdir_in("/tmp")
        .unwrap();
    let folder = folder.path();
    assert!(
        Path::new(DATA).exists(),
        "no {DATA}: scripts/install-deps test"
    );
    let lines = shell(folder, &format!("awk 'NR % 20 == 0' {DATA} | tee lines"));
    let lines: Vec<String> = lines.lines().map(str::to_owned).collect();
    let half = lines.len() / 2;
    let three_quarters = lines.len() * 3 / 4;

    let daemon = Daemon::start("[topics.unicode]\npartitions = 4\n", &[]).await;
    let letters = json!({"category": {"prefix": "L"}});
    let few = json!({"category": IN_ORDER});
    for settings in [
        json!({"topic": "unicode", "queue": "all"}),
        json!({"topic": "unicode", "queue": "letters", "match": letters}),
        json!({"topic": "unicode", "queue": "ordered", "match": few, "sequence": "key"}),
    ] {
        let name = settings["queue"].as_str().unwrap().to_owned();
        subscribe(&daemon, &name, settings).await;
    }
    publish(&daemon, &lines[..half]).await;
    subscribe(&daemon, "half", json!({"topic": "unicode"})).await;
    publish(&daemon, &lines[half..three_quarters]).await;
    let since = SystemTime::now() + Duration::from_millis(5);
    until("all of this was published before", async || {
        SystemTime::now() > since
    })
    .await;
    publish(&daemon, &lines[three_quarters..]).await;
    let start = humantime::format_rfc3339_millis(since).to_string();
    subscribe(&daemon, "late", json!({"topic": "unicode", "start": start})).await;

    let files = folder.join("ordered");
    fs::create_dir(&files).unwrap();
    let others = async {
        let mut got = BTreeMap::new();
        for queue in ["all", "letters", "half", "late"] {
            got.insert(queue, work(&daemon, queue).await);
        }
        got
    };
    let (got, ()) = tokio::join!(others, work_in_order(&daemon, &files));

    let half = half + 1;
    let three_quarters = three_quarters + 1;
    for (name, script) in [
        ("all", "sort lines".to_owned()),
        ("letters", "awk -F';' '$3 ~ /^L/' lines | sort".to_owned()),
        ("half", format!("tail -n +{half} lines | sort")),
        ("late", format!("tail -n +{three_quarters} lines | sort")),
    ] {
        let expected = shell(folder, &script);
        assert!(!expected.is_empty(), "{script}");
        let got = sorted(folder, name, &got[name]);
        assert!(got == expected, "{name} is not what {script} says");
    }
    for category in IN_ORDER {
        let expected = shell(folder, &format!("awk -F';' '$3 == \"{category}\"' lines"));
        // A worker that was killed may have written a line that it did not report, or an empty one.
        let first = shell(
            folder,
            &format!("awk 'NF && !seen[$0]++' ordered/{category}"),
        );
        assert_eq!(first, expected, "the order of {category}");
    }
    let ordered: Value = subscription(&daemon, "ordered").await;
    assert_eq!(ordered["dead"], 0, "{ordered}");
}
