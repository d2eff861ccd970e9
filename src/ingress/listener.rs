//! Listeners: the port, and connections up to a limit.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::sleep,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::connection::{self, Answering, Handlers};
use crate::telemetry::metrics;

/// The longest silence of a client, in the head of a request or between two requests.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest silence of a client beyond the limit of connections.
const HASTE: Duration = Duration::from_secs(5);
/// The connections beyond the limit that taskd answers at a time. The oldest makes way for the next.
const WITHOUT_ROOM: usize = 32;
/// The pause after a failed accept: other connections have to end first.
const PAUSE: Duration = Duration::from_millis(100);
/// The time between two log lines about refused connections.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// taskd cannot listen on its port.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr} ({what}): {}; choose another with --{what}-listen", why(.error))]
pub struct CannotListen {
    addr: SocketAddr,
    what: &'static str,
    /// No source, because the message has its text.
    error: io::Error,
}

fn why(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => "address in use".to_owned(),
        io::ErrorKind::AddrNotAvailable => "this machine has no such address".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}

/// Listens on `addr`; `what` is `http` or `grpc`, as in `--http-listen`.
pub async fn bind(addr: SocketAddr, what: &'static str) -> Result<TcpListener, CannotListen> {
    TcpListener::bind(addr).await.map_err(|error| CannotListen { addr, what, error })
}

/// A listener's rules.
pub(super) struct Door<H> {
    /// The listener's name in the log.
    pub(super) name: &'static str,
    pub(super) answering: Answering<H>,
    pub(super) max_connections: usize,
    /// Answers clients beyond the limit; `None`: taskd hangs up on them.
    pub(super) without_room: Option<H>,
}

/// Serves until the stop, then answers the requests in hand.
pub(super) async fn serve(listener: TcpListener, door: Door<impl Handlers>) {
    let (room, connections) = (Arc::new(Semaphore::new(door.max_connections)), TaskTracker::new());
    let (mut turned_away, mut said) = (VecDeque::new(), Said::default());
    let stop = door.answering.stop.clone();
    while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                said.now_and_then(|| tracing::warn!("cannot accept connections over {}: {error}", door.name));
                sleep(PAUSE).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&room).try_acquire_owned() else {
            metrics::refused_connection(door.answering.protocol);
            said.now_and_then(|| {
                tracing::warn!("{} connections over {}: no room for more", door.max_connections, door.name)
            });
            if let Some(handlers) = &door.without_room {
                let answering = Answering { handlers: handlers.clone(), ..door.answering.clone() };
                drop(connections.spawn(brief(stream, answering, &mut turned_away)));
            }
            continue;
        };
        let answering = door.answering.clone();
        drop(connections.spawn(async move {
            connection::serve(stream, answering, PATIENCE).await;
            drop(place);
        }));
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// Serves a connection beyond the limit. It makes way for later ones, so that silent clients do not keep out probes.
fn brief<H: Handlers>(
    stream: TcpStream,
    answering: Answering<H>,
    others: &mut VecDeque<CancellationToken>,
) -> impl Future<Output = ()> + Send + use<H> {
    let make_way = CancellationToken::new();
    others.push_back(make_way.clone());
    if others.len() > WITHOUT_ROOM
        && let Some(oldest) = others.pop_front()
    {
        oldest.cancel();
    }
    async move {
        make_way.run_until_cancelled(connection::serve(stream, answering, HASTE)).await;
    }
}

/// The time of the last log line.
#[derive(Default)]
struct Said(Option<Instant>);

impl Said {
    fn now_and_then(&mut self, say: impl FnOnce()) {
        if self.0.is_none_or(|last| last.elapsed() >= TELL_EVERY) {
            say();
            self.0 = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_taken_address_is_answered_with_the_flag_that_helps() {
        let taken = bind("127.0.0.1:0".parse().unwrap(), "http").await.unwrap().local_addr().map(|addr| addr.port());
        let holder = bind(([127, 0, 0, 1], taken.unwrap()).into(), "http").await.unwrap();
        let addr = holder.local_addr().unwrap();
        let error = bind(addr, "http").await.unwrap_err().to_string();
        assert_eq!(error, format!("cannot listen on {addr} (http): address in use; choose another with --http-listen"));
    }
}
