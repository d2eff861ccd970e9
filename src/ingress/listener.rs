//! Listening: a port bound with an error that says what to do, and as many connections as there is room for.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::Router;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::sleep,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::connection::{self, Answering};

/// A client may take so long for the head of its request, or between two requests.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same where there is no room for it.
const HASTE: Duration = Duration::from_secs(5);
/// Connections without room that are answered at a time; the oldest makes way for the next.
const WITHOUT_ROOM: usize = 32;
/// The pause after an accept that failed: other connections have to end first.
const PAUSE: Duration = Duration::from_millis(100);
/// The time between two lines about connections that are turned away.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// A port that taskd cannot have.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr} ({what}): {}; choose another with --{what}-listen", why(.error))]
pub struct CannotListen {
    addr: SocketAddr,
    what: &'static str,
    /// Not a source: the message says it already.
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
pub(super) struct Door {
    /// For the log.
    pub(super) name: &'static str,
    pub(super) answering: Answering,
    pub(super) max_connections: usize,
    /// Answers clients for whom there is no room; `None`: taskd hangs up on them.
    pub(super) without_room: Option<Router>,
}

/// Serves until the stop, then until the requests in hand are answered.
pub(super) async fn serve(listener: TcpListener, door: Door) {
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
            said.now_and_then(|| {
                tracing::warn!("{} connections over {}: no room for more", door.max_connections, door.name)
            });
            if let Some(router) = &door.without_room {
                let answering = Answering { router: router.clone(), ..door.answering.clone() };
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

/// A connection for which there is no room. It makes way for those that come after it, so that silent ones do not keep
/// out probes.
fn brief(
    stream: TcpStream,
    answering: Answering,
    others: &mut VecDeque<CancellationToken>,
) -> impl Future<Output = ()> + Send + use<> {
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

/// When something was last in the log.
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
