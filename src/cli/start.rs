//! Starts executions of workflows, and waits for their ends: for several commands.

use std::{
    fs,
    io::Read as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use axum::body::Bytes;
use hyper::Method;
use serde_json::{Map, Value};
use tokio::time::sleep;
use url::form_urlencoded;

use super::{
    ask::{ask, ask_with, printable, read},
    http::HttpPort,
    print::say,
};

const JSON: &str = "application/json";
/// The exit code if an execution faulted or was cancelled.
const FAULTED: u8 = 3;
/// The exit code if it has not ended.
const NOT_ENDED: u8 = 1;
/// How long one question waits for the end of an execution.
const WAIT: Duration = Duration::from_secs(20);
/// The pause before the next question: a taskd that stops answers at once.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The path of a version of a workflow, or of a verb of it. Without a version, the latest is meant.
pub(super) fn workflow_path(workflow: &str, verb: &str) -> anyhow::Result<String> {
    let parts: Vec<&str> = workflow.split('/').collect();
    let (namespace, name, version) = match parts[..] {
        [namespace, name] => (namespace, name, "latest"),
        [namespace, name, version] => (namespace, name, version),
        _ => bail!("{workflow:?} is no workflow; write NAMESPACE/NAME or NAMESPACE/NAME/VERSION"),
    };
    let encode =
        |text: &str| -> String { form_urlencoded::byte_serialize(text.as_bytes()).collect() };
    let [namespace, name, version] =
        [namespace, name, version].map(|text| encode(text).replace('+', "%20"));
    Ok(format!("/v1/workflows/{namespace}/{name}/{version}{verb}"))
}

/// The path of an execution, or of a verb of it.
pub(super) fn execution_path(id: &str, verb: &str) -> String {
    let encoded: String = form_urlencoded::byte_serialize(id.as_bytes()).collect();
    format!("/v1/executions/{}{verb}", encoded.replace('+', "%20"))
}

/// Reads the input of an execution: a file, stdin, or the argument itself.
pub(super) fn read_input(input: &str) -> anyhow::Result<Value> {
    let mut text = String::new();
    if input == "-" {
        let read = std::io::stdin().read_to_string(&mut text);
        read.context("cannot read stdin")?;
    } else if input.starts_with(['{', '[']) {
        text.push_str(input);
    } else {
        text = fs::read_to_string(input).with_context(|| format!("cannot read {input}"))?;
    }
    serde_json::from_str(&text).context("the input is not JSON")
}

/// Starts an execution. `None`: there is no such workflow, which stderr says.
pub(super) async fn begin(
    server: &HttpPort,
    path: &str,
    input: Option<Value>,
    id: Option<String>,
) -> anyhow::Result<Option<(Bytes, Value)>> {
    let mut body = Map::new();
    if let Some(input) = input {
        body.insert("input".to_owned(), input);
    }
    if let Some(id) = id {
        body.insert("id".to_owned(), id.into());
    }
    let body = Some((JSON, Bytes::from(serde_json::to_vec(&Value::from(body))?)));
    let Some(body) = ask_with(server, Method::POST, path, body).await? else {
        return Ok(None);
    };
    let execution = read(server, &body)?;
    Ok(Some((body, execution)))
}

/// Waits until an execution has ended, at most until this time. Returns it as it is then, or `None`
/// if there is no such execution, which stderr says.
pub(super) async fn when_ended(
    server: &HttpPort,
    id: &str,
    until: Option<Instant>,
) -> anyhow::Result<Option<(Bytes, Value)>> {
    loop {
        let left = until.map_or(WAIT, |until| {
            until.saturating_duration_since(Instant::now()).min(WAIT)
        });
        let path = execution_path(id, &format!("?wait={}ms", left.as_millis()));
        let Some((body, execution)) = ask::<Value>(server, &path).await? else {
            return Ok(None);
        };
        let is_over = until.is_some_and(|until| Instant::now() >= until);
        if is_over || execution["ended_at"].is_string() {
            return Ok(Some((body, execution)));
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Says on stderr what became of an execution that has not completed. Returns the exit code.
pub(super) fn outcome(execution: &Value) -> u8 {
    let text = |value: &Value| printable(value.as_str().unwrap_or_default());
    let id = text(&execution["id"]);
    match execution["status"].as_str().unwrap_or_default() {
        "completed" => 0,
        "cancelled" => {
            say(format_args!("taskd: execution {id} was cancelled"));
            FAULTED
        }
        "faulted" => {
            let error = &execution["error"];
            let mut says = format!("{} ({})", text(&error["type"]), error["status"]);
            if error["instance"].is_string() {
                says.push_str(&format!(" at {}", text(&error["instance"])));
            }
            for field in ["title", "detail"] {
                if error[field].is_string() {
                    says.push_str(&format!(": {}", text(&error[field])));
                }
            }
            say(format_args!("taskd: execution {id} faulted: {says}"));
            FAULTED
        }
        status => {
            say(format_args!(
                "taskd: execution {id} has not ended: it is {}; taskd execution show says what it waits for",
                printable(status)
            ));
            NOT_ENDED
        }
    }
}
