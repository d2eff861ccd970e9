//! The same answers as jq, if it is installed; and where they differ on purpose.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::super::{Bounds, Error, Expression, Template};
use super::result;

type Results = Vec<Result<Value, ()>>;

/// Returns jq's results for one input, all by one process, because it takes long to start.
fn jq(texts: &[&str], input: &Value, variables: &[(&str, Value)]) -> Option<Results> {
    let mut command = Command::new("jq");
    command.arg("-n").arg("-c");
    for (name, value) in variables {
        command.args(["--argjson", name, &value.to_string()]);
    }
    command.args(["--argjson", "jq_input", &input.to_string()]);
    let tried: Vec<_> = texts
        .iter()
        .map(|text| format!("(try [$jq_input | ({text}\n)] catch \"failed\")"))
        .collect();
    command.arg(format!("[{}]", tried.join(",\n")));
    let output = command.output().ok()?;
    let message = String::from_utf8_lossy(&output.stderr);
    let results: Vec<Value> = serde_json::from_slice(&output.stdout).expect(&message);
    let single = |results: Value| match results {
        Value::Array(results) if results.is_empty() => Ok(Value::Null),
        Value::Array(results) if results.len() == 1 => Ok(results[0].clone()),
        _ => Err(()),
    };
    Some(results.into_iter().map(single).collect())
}

/// Compares numbers as numbers: jq writes `1.0` as `1`.
fn same(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => left.as_f64() == right.as_f64(),
        (Value::Array(left), Value::Array(right)) => {
            left.len() == right.len() && left.iter().zip(right).all(|(l, r)| same(l, r))
        }
        (Value::Object(left), Value::Object(right)) => {
            left.len() == right.len()
                && left
                    .iter()
                    .all(|(name, value)| right.get(name).is_some_and(|other| same(value, other)))
        }
        _ => left == right,
    }
}

/// Returns what differs. Without jq nothing does.
fn differences(texts: &[&str], input: &Value, variables: &[(&str, Value)]) -> Vec<String> {
    let names: Vec<_> = variables.iter().map(|(name, _)| *name).collect();
    let values: Vec<_> = variables.iter().map(|(_, value)| value).collect();
    let Some(theirs) = jq(texts, input, variables) else {
        return Vec::new();
    };
    assert_eq!(texts.len(), theirs.len());
    let mut wrong = Vec::new();
    for (text, theirs) in texts.iter().zip(theirs) {
        let ours = Expression::compile(text, &names)
            .and_then(|expression| expression.evaluate(input, &values, &mut Bounds::default()));
        let equal = match (&ours, &theirs) {
            (Ok(ours), Ok(theirs)) => same(ours, theirs),
            (Err(Error::Raised(_) | Error::SeveralOutputs), Err(())) => true,
            _ => false,
        };
        if !equal {
            wrong.push(format!("{text} on {input}: {ours:?}, jq: {theirs:?}"));
        }
    }
    wrong
}

#[test]
fn expressions_give_the_results_of_jq() {
    let input = json!({
        "s": "a,b, c", "n": -3.5, "i": 7, "t": true, "z": null, "e": [], "o": {"x": 1, "y": [2, {"z": 3}]},
        "l": [3, 1, 2, 1], "m": [{"k": "b", "v": 2}, {"k": "a", "v": 1}, {"k": "b", "v": 0}],
        "u": "häß<&'\">\t\n", "d": "2015-03-05T23:51:47Z", "b": "aGVsbG8=",
    });
    let lines = include_str!("agreed.jq").lines();
    let texts: Vec<_> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    let wrong = differences(&texts, &input, &[]);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn expressions_of_the_specification_give_the_results_of_jq() {
    let texts = specification();
    let input = json!({
        "temperature": 39, "bpm": 61, "token": "t", "searchQuery": "q", "message": "m", "petId": 1,
        "pet": {"id": 2}, "room": {"number": 3}, "patient": {"fullName": "A B"}, "status": "s",
        "colors": ["red"], "processed": {"colors": [], "indexes": []}, "username": "u",
        "user": {"preferredDisplayName": "U"}, "configuration": {"size": 1, "fill": "f"},
        "orderType": "electronic", "counter": 5, "pets": [{"id": 1}, {"id": 2}], "numbers": [1, 2],
    });
    let names = [
        "context",
        "input",
        "output",
        "secrets",
        "authorization",
        "task",
        "workflow",
        "runtime",
        "error",
        "err",
        "item",
        "index",
        "color",
        "pet",
        "message",
        "event",
        "number",
        "at",
    ];
    let value = json!({
        "input": [{"data": {"timestamp": 1, "patient": {"name": "p"}}}], "consumedMessages": [1],
        "color": "red", "status": 503, "userId": 1, "homeworld": "h", "id": 5, "details": null,
    });
    let variables: Vec<_> = names.iter().map(|name| (*name, value.clone())).collect();
    let mut known = Vec::new();
    for text in &texts {
        match Expression::compile(text, &names) {
            Ok(_) => known.push(text.as_str()),
            // An event or a loop may give more names than are in the list above.
            Err(Error::Unknown { name, .. }) if name.starts_with("variable") => {}
            Err(error) => panic!("{text}: {error}"),
        }
    }
    let mut wrong = differences(&known, &input, &variables);
    wrong.extend(differences(&known, &Value::Null, &variables));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The expressions of the specification's examples and of its kit, if they are there.
fn specification() -> BTreeSet<String> {
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/swf-spec");
    let mut texts = BTreeSet::new();
    for folder in [
        "1.0-main/examples",
        "1.0-main/ctk/features",
        "1.0-2026-01/examples",
    ] {
        let Ok(files) = fs::read_dir(shared.join(folder)) else {
            continue;
        };
        for file in files {
            let text = fs::read_to_string(file.unwrap().path()).unwrap();
            texts.extend(text.lines().flat_map(of_line));
        }
    }
    texts
}

fn of_line(line: &str) -> Vec<String> {
    let value = line
        .split_once(": ")
        .map_or(line, |(_, value)| value)
        .trim();
    let value = if value.starts_with('"') && value.len() > 1 {
        serde_json::from_str(value).unwrap_or_default()
    } else {
        value.trim_matches('\'').replace("''", "'")
    };
    let name = line
        .trim()
        .trim_start_matches("- ")
        .split(':')
        .next()
        .unwrap_or_default();
    let bare = ["if", "when", "exceptWhen", "while", "in", "from", "until"].contains(&name)
        && value.starts_with(['.', '$', '(']);
    if !bare && !value.contains("${") {
        return Vec::new();
    }
    let names = ["context"];
    match Template::read(&value, bare, &names) {
        Ok(Template::Whole(expression)) => vec![expression.text().to_owned()],
        Ok(_) => Vec::new(),
        // Other variables: the text between the first and the last brace.
        Err(_) => {
            let text = value
                .trim()
                .strip_prefix("${")
                .and_then(|text| text.strip_suffix('}'));
            text.or(bare.then_some(&*value))
                .map(str::to_owned)
                .into_iter()
                .collect()
        }
    }
}

#[test]
fn differences_from_jq_are_known() {
    let same = [
        // Of jaq, too.
        ("\"1.0 \\(1.0)\"", json!("1.0 1.0")),
        ("\"1.5\" | test(\"(?<n>[0-9]+)[.]5\")", json!(true)),
        ("[1, 2] | .[1.7]", json!(2)),
        ("ltrimstr(\"x\") | type", json!("object")),
        // Of jq 1.6 only.
        ("[limit(3; 1 | repeat(. * 2))]", json!([1, 2, 4])),
        ("[limit(0; 1, 2)]", json!([])),
        ("\"aaa\" | indices(\"aa\")", json!([0, 1])),
        ("try error(null) catch .", json!(null)),
        (
            "[{name: 1, value: 2}, {key: null}] | from_entries",
            json!({"1": 2, "null": null}),
        ),
        ("\"a'b\" | @uri, empty", json!("a%27b")),
        ("\"a'b\" | @html", json!("a&#39;b")),
        ("\"ab\" | gsub(\"\"; \"-\")", json!("-a-b-")),
        (
            "{b: 1, a: 2} | walk(.) | tojson",
            json!("{\"b\":1,\"a\":2}"),
        ),
        // Of jq 1.7 and later.
        ("[1, null] | toarray", json!([1, null])),
        ("\" x \" | trim", json!("x")),
        ("-1 | abs", json!(1)),
        ("{a: {b: 1, c: 2}} | pick(.a.b)", json!({"a": {"b": 1}})),
        ("$__loc__", json!({"file": "<top-level>", "line": 1})),
        ("1 |\n\n$__loc__.line", json!(3)),
    ];
    for (text, expected) in same {
        assert_eq!(result(text), Ok(expected), "{text}");
    }
    for text in [
        "{} | .[0]",
        "\"x\" | test(\"(?=x)\")",
        "\"x\" | test(\"(x)\\\\1\")",
        "[] | .a",
    ] {
        assert!(
            matches!(result(text), Err(Error::Raised(_))),
            "{text}: {:?}",
            result(text)
        );
    }
}
