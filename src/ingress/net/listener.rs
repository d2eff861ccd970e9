//! Listeners: the port, and connections up to a limit.

use std::{
    collections::VecDeque,
    future, io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    connection::{self, Answering, Handlers},
    standing::{Connections, IsValid, Standing},
};
use crate::{
    config::{Auth, Settings},
    telemetry::metrics,
};

/// How long a client may be silent, in the head of a request or between two requests.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a client beyond the limit of connections may be silent.
const HASTE: Duration = Duration::from_secs(5);
/// How long a connection may stay without an accepted call, if calls need a token.
const STRANGERS_STAY: Duration = Duration::from_secs(30);
/// The most connections beyond the limit that taskd answers at a time. The oldest makes way for the
/// next.
const WITHOUT_ROOM: usize = 32;
/// The pause after a failed accept, because other connections have to end first.
const PAUSE: Duration = Duration::from_millis(100);
/// The least time between two log lines about refused connections.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// taskd cannot listen on its port.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr} ({what}): {}; choose another with --{what}-listen", why(.error))]
pub struct CannotListen {
    addr: SocketAddr,
    what: &'static str,
    /// Not a source, because the message contains its text.
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
    TcpListener::bind(addr)
        .await
        .map_err(|error| CannotListen { addr, what, error })
}

/// How long a connection may stay without an accepted call; `None` if it may stay until it has to
/// make way. Without tokens there is nothing by which a client could prove itself.
pub(in crate::ingress) fn strangers_stay(settings: &Settings) -> Option<Duration> {
    (settings.auth == Auth::Tokens).then_some(STRANGERS_STAY)
}

/// How a listener serves its clients.
pub(in crate::ingress) struct Door<H> {
    /// The listener's name in the log.
    pub(in crate::ingress) name: &'static str,
    pub(in crate::ingress) answering: Answering<H>,
    pub(in crate::ingress) max_connections: usize,
    /// How long a connection may stay without an accepted call; `None` if it may stay until it has
    /// to make way.
    pub(in crate::ingress) strangers_stay: Option<Duration>,
    pub(in crate::ingress) is_valid: IsValid,
    /// Answers clients beyond the limit; `None` if taskd hangs up on them.
    pub(in crate::ingress) without_room: Option<H>,
}

/// Serves until the stop, then finishes the requests in flight.
pub(in crate::ingress) async fn serve(listener: TcpListener, door: Door<impl Handlers>) {
    let connections = Connections::new(door.max_connections, door.is_valid.clone());
    let tasks = TaskTracker::new();
    let mut turned_away = VecDeque::new();
    let mut said = Said::default();
    let stop = door.answering.stop.clone();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
            () = a_stranger_stayed(&connections, door.strangers_stay) => continue,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                said.now_and_then(|| {
                    tracing::warn!("cannot accept connections over {}: {error}", door.name)
                });
                sleep(PAUSE).await;
                continue;
            }
        };
        let Some((place, made_way)) = connections.admit() else {
            metrics::refused_connection(door.answering.protocol);
            said.now_and_then(|| {
                tracing::warn!(
                    "{} connections over {}: no room for more",
                    door.max_connections,
                    door.name
                )
            });
            if let Some(handlers) = &door.without_room {
                let answering = Answering {
                    handlers: handlers.clone(),
                    ..door.answering.clone()
                };
                drop(tasks.spawn(brief(stream, answering, &mut turned_away)));
            }
            continue;
        };
        if made_way {
            metrics::refused_connection(door.answering.protocol);
            said.now_and_then(|| {
                tracing::warn!(
                    "{} connections over {}: the oldest without an accepted call makes way",
                    door.max_connections,
                    door.name
                )
            });
        }
        let answering = door.answering.clone();
        drop(tasks.spawn(async move {
            let standing = place.standing();
            tokio::select! {
                biased;
                () = standing.makes_way() => {}
                () = connection::serve(stream, answering, standing.clone(), PATIENCE) => {}
            }
            drop(place);
        }));
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// Waits until a connection has stayed for `stay` without an accepted call, and tells it to end.
async fn a_stranger_stayed(connections: &Connections, stay: Option<Duration>) {
    let Some((stay, since)) = stay.zip(connections.oldest_stranger()) else {
        return future::pending().await;
    };
    sleep_until((since + stay).into()).await;
    connections.end_strangers(stay);
}

/// Serves a connection beyond the limit. It makes way for later ones, so that silent clients do not
/// keep out probes.
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
        make_way
            .run_until_cancelled(connection::serve(
                stream,
                answering,
                Standing::without_place(),
                HASTE,
            ))
            .await;
    }
}

/// When the last line was logged.
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
        let taken = bind("127.0.0.1:0".parse().unwrap(), "http")
            .await
            .unwrap()
            .local_addr()
            .map(|addr| addr.port());
        let holder = bind(([127, 0, 0, 1], taken.unwrap()).into(), "http")
            .await
            .unwrap();
        let addr = holder.local_addr().unwrap();
        let error = bind(addr, "http").await.unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "cannot listen on {addr} (http): address in use; choose another with --http-listen"
            )
        );
    }
}
