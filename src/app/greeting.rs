//! The greeting: what runs where, and what to try next.

use std::{
    env,
    io::{IsTerminal, Write},
    net::SocketAddr,
};

use super::connect::store_name;
use crate::config::{Auth, Settings};

/// The address at which commands look for a taskd by default.
const DEFAULT_SERVER: &str = "http://127.0.0.1:7600";

/// Logs that the process is up. Prints more if stdout is a terminal.
pub(super) fn greet(settings: &Settings, http: SocketAddr, grpc: SocketAddr) {
    let pipelines: Vec<_> = settings
        .pipelines
        .iter()
        .map(|pipeline| pipeline.as_str())
        .collect();
    tracing::info!(pipelines = pipelines.join(","), %http, %grpc, "taskd is up: http {http}, grpc {grpc}");
    if !std::io::stdout().is_terminal() {
        return;
    }
    let redis = settings.redis_url.as_ref();
    let redis = redis.map_or_else(
        || format!("redis-server of its own in {}", settings.data_dir.display()),
        ToString::to_string,
    );
    let bus = settings.bus_url.as_ref().map_or_else(
        || "Redis Streams in that Redis".to_owned(),
        ToString::to_string,
    );
    let pipelines = pipelines.join(", ");
    let store = store_name(settings);
    let scheme = if settings.tls.cert_file.is_some() {
        "https"
    } else {
        "http"
    };
    let taskd = command();
    let grpc = format!("{scheme}://{grpc}");
    let server = format!("{scheme}://{http}");
    let at = if server == DEFAULT_SERVER {
        String::new()
    } else {
        format!(" --server {server}")
    };
    let token = match settings.auth {
        Auth::Tokens => " --oauth2-bearer $TASKD_TOKEN",
        Auth::None => "",
    };
    let text = format!(
        r#"
  taskd runs {pipelines}
  http   {server}
  grpc   {grpc}
  queue  {redis}
  store  {store}
  bus    {bus}

  Try next, in another terminal: insert a task, do it, look at the queue.
    curl{token} --json '{{"queue":"demo","key":"root-'$(date +%s)'","payload":{{"depth":2}}}}' {server}/v1/tasks
    {taskd} work --queue demo --exit-when-idle 3s{at} -- echo {{key}}
    curl{token} {server}/v1/queues

"#
    );
    // A terminal that went away is no reason to stop.
    drop(std::io::stdout().write_all(text.as_bytes()));
}

/// What to type to start this program: its name if the shell finds it by that, else its path.
fn command() -> String {
    let name = "taskd";
    let Ok(own) = env::current_exe() else {
        return name.to_owned();
    };
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file());
    if found.and_then(|file| file.canonicalize().ok()).as_ref() == Some(&own) {
        return name.to_owned();
    }
    // In quotes, in case the path contains a blank.
    let text = own.display().to_string();
    if text.contains(|c: char| !c.is_ascii_alphanumeric() && !"/._-+".contains(c)) {
        format!("'{text}'")
    } else {
        text
    }
}
