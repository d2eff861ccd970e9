//! The greeting: what runs where, and what to try next.

use std::{
    io::{IsTerminal, Write},
    net::SocketAddr,
};

use super::connect::store_name;
use crate::config::Settings;

/// Logs that the process is up. A terminal gets more.
pub(super) fn greet(settings: &Settings, http: SocketAddr, grpc: SocketAddr) {
    let pipelines: Vec<_> = settings.pipelines.iter().map(|pipeline| pipeline.as_str()).collect();
    tracing::info!(pipelines = pipelines.join(","), %http, %grpc, "taskd is up: http {http}, grpc {grpc}");
    if !std::io::stdout().is_terminal() {
        return;
    }
    let redis = settings.redis_url.as_ref();
    let redis = redis
        .map_or_else(|| format!("redis-server of its own in {}", settings.data_dir.display()), ToString::to_string);
    let bus = settings.bus_url.as_ref().map_or_else(|| "Redis Streams in that Redis".to_owned(), ToString::to_string);
    let (pipelines, store) = (pipelines.join(", "), store_name(settings));
    let scheme = if settings.tls.cert_file.is_some() { "https" } else { "http" };
    let text = format!(
        r#"
  taskd runs {pipelines}
  http   {scheme}://{http}
  grpc   {scheme}://{grpc}
  queue  {redis}
  store  {store}
  bus    {bus}

  Try next:
    curl --json '{{"queue":"demo","key":"hello"}}' {scheme}://{http}/v1/tasks
    curl --json '{{"worker":"me","queues":["demo"],"wait":"10s"}}' {scheme}://{http}/v1/tasks:get
    curl {scheme}://{http}/v1/queues

"#
    );
    // A terminal that went away is no reason to stop.
    drop(std::io::stdout().write_all(text.as_bytes()));
}
