//! `taskd workflow check`, as docs/workflows.md shows it.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};

/// Runs a command of taskd. Returns its exit code and what it printed.
fn run(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taskd"));
    let output = command.args(args).current_dir(folder).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

/// The first block of docs/workflows.md in a language.
fn block(language: &str) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/workflows.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, rest) = page.split_once(&format!("```{language}\n")).unwrap();
    rest.split_once("```").unwrap().0.to_owned()
}

#[test]
fn definitions_are_checked_as_their_page_shows() {
    let folder = tempfile::tempdir().unwrap();
    let check = |args: &[&str]| run(folder.path(), &[&["workflow", "check"], args].concat());
    let right = block("yaml");
    fs::write(folder.path().join("right.yaml"), &right).unwrap();
    let said = "workflow shop/order 1.0.0: 4 tasks, queue charge, no mistakes\n";
    assert_eq!(check(&["right.yaml"]), (0, said.to_owned(), String::new()));
    let wrong = right
        .replace("lease: 2m", "lease: 120")
        .replace("then: wait }", "then: wiat }");
    fs::write(folder.path().join("order.yaml"), wrong).unwrap();
    let shown = block("text");
    let found = check(&["right.yaml", "order.yaml"]);
    assert_eq!(found, (1, said.to_owned(), shown.clone()));
    let (code, lines, stderr) = check(&["--json", "right.yaml", "order.yaml"]);
    assert_eq!((code, stderr.as_str()), (1, ""));
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), shown.lines().count());
    let (place, message) = shown.lines().next().unwrap().split_once(": ").unwrap();
    let numbers: Vec<u64> = place
        .split(':')
        .skip(1)
        .map(|n| n.parse().unwrap())
        .collect();
    let first = json!({
        "file": "order.yaml", "line": numbers[0], "column": numbers[1],
        "pointer": "/do/0/charge/metadata/taskd/lease", "message": message,
    });
    assert_eq!(lines[0], first);
    let (code, _, error) = check(&["missing.yaml"]);
    assert!(
        code == 2 && error.contains("cannot read missing.yaml"),
        "{code} {error}"
    );
}
