//! Questions to a redis-server, each on a connection of its own.

use std::time::Duration;

use redis::aio::MultiplexedConnection;

/// How long a server may take to exit after it was asked to.
pub(super) const STOP: Duration = Duration::from_secs(10);

/// Opens a connection for one question. Its time-outs keep a server that loads or hangs from
/// holding up the caller.
async fn connect(url: &str) -> redis::RedisResult<MultiplexedConnection> {
    const PATIENCE: Option<Duration> = Some(Duration::from_secs(2));
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(PATIENCE)
        .set_response_timeout(PATIENCE);
    redis::Client::open(url)?
        .get_multiplexed_async_connection_with_config(&config)
        .await
}

/// True if the server answers and has loaded its data, before which it refuses PING.
pub(super) async fn is_ready(url: &str) -> bool {
    let Ok(mut conn) = connect(url).await else {
        return false;
    };
    redis::cmd("PING")
        .query_async::<String>(&mut conn)
        .await
        .is_ok()
}

/// The folder in which the server at this URL keeps its data.
pub(super) async fn folder_of(url: &str) -> Option<String> {
    let mut conn = connect(url).await.ok()?;
    let answer: Vec<String> = redis::cmd("CONFIG")
        .arg("GET")
        .arg("dir")
        .query_async(&mut conn)
        .await
        .ok()?;
    answer.into_iter().nth(1)
}

/// Asks the server to exit without a snapshot, which is not needed with an append-only file.
/// Returns whether the server got the request.
pub(super) async fn ask_to_end(url: &str) -> bool {
    let Ok(mut conn) = connect(url).await else {
        return false;
    };
    // A server that obeys closes the connection without an answer.
    match redis::cmd("SHUTDOWN")
        .arg("NOSAVE")
        .query_async::<()>(&mut conn)
        .await
    {
        Ok(()) => true,
        Err(error) => error.is_io_error() || error.is_connection_dropped(),
    }
}
