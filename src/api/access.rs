//! Admits calls: checks their token, whether it has the role, and which queues it reaches.
//!
//! A process knows the tokens as SQL had them a quarter of a second ago, and asks again about a
//! token that it does not know. While SQL is away it keeps using the tokens that it knows, so that
//! workers keep working.

use std::{
    collections::HashMap,
    future,
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::BoxFuture;
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use parking_lot::RwLock;
use tokio::{
    sync::{Mutex, Semaphore, watch},
    time::{sleep, timeout},
};

use crate::{
    model::{
        Access, AccessToken, Batch, Caller, Completion, ECHO, GetTasks, ItemAnswer, LeaseToken,
        NewTask, OpenSession, QueueName, Role, Roles, SecretHash, TaskFilter, WorkerName, shorten,
    },
    pipelines::admission::{Occupancy, Stages},
    runtime::{Clock, Supervisor},
    store,
};

/// How often a process checks whether the tokens have changed.
const EVERY: Duration = Duration::from_millis(250);
/// How often it reads all of them even so, because a database that was set back may show an old
/// version again.
const WHOLE_EVERY: Duration = Duration::from_secs(60);

/// How many calls with an unknown token may wait for SQL at the same time. Further ones are refused
/// at once.
const MOST_UNKNOWN: usize = 64;
/// How often per second all such calls together may ask SQL.
const LOOKS_PER_SECOND: NonZeroU32 = NonZeroU32::new(4).unwrap();
/// How long such a call waits.
const LOOK_WITHIN: Duration = Duration::from_secs(1);
/// How often such a call checks whether another one has asked SQL meanwhile.
const CHECK_EVERY: Duration = Duration::from_millis(25);
/// How often, at least, a call that waits checks whether its token has expired.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Why a call is refused.
#[derive(Debug, thiserror::Error)]
pub enum Denied {
    #[error("this taskd takes calls with a token: send it as \"Authorization: Bearer TOKEN\"")]
    NoToken,
    #[error("the token is not known here: it was revoked, or is not one of this taskd")]
    Unknown,
    #[error("the token {0:?} has expired")]
    Expired(String),
    #[error("the token {token:?} has the roles {has}, and this call needs {needs}")]
    Role {
        token: String,
        has: Roles,
        needs: Role,
    },
    #[error("the token {token:?} does not reach the queue {queue:?}")]
    Queue { token: String, queue: String },
    /// Does not name the queues, because those of another's session are none of the caller's
    /// business.
    #[error("the token {0:?} does not reach the queues of this session")]
    Session(String),
    #[error("the token {0:?} reaches only some queues, and this call is about all")]
    Scoped(String),
    #[error(
        "the token {0:?} does not reach all queues in which this tree has unfinished tasks: cancel it with a token that does"
    )]
    Tree(String),
    #[error("the token {token:?} is for the worker {own:?}: use its name instead of {other:?}")]
    Worker {
        token: String,
        own: String,
        other: String,
    },
    #[error("the token {token:?} may make {limit} calls a second; try again in a moment")]
    TooFast { token: String, limit: NonZeroU32 },
}

impl Denied {
    /// The label in metrics.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::NoToken => "no_token",
            Self::Unknown => "unknown",
            Self::Expired(_) => "expired",
            Self::Role { .. } => "role",
            Self::Queue { .. } | Self::Session(_) | Self::Scoped(_) | Self::Tree(_) => "queue",
            Self::Worker { .. } => "worker",
            Self::TooFast { .. } => "too_fast",
        }
    }

    fn queue(token: &AccessToken, queue: &str) -> Self {
        Self::Queue {
            token: token.name.clone(),
            queue: shorten(queue, ECHO).into_owned(),
        }
    }
}

/// How this process authenticates its callers. Cheap to clone.
#[derive(Clone)]
pub enum Authentication {
    /// Everybody may do everything.
    Open,
    ByToken(Tokens),
}

impl Authentication {
    /// Admits a call with this `Authorization` header if its token has the role.
    pub(super) async fn authenticate(
        &self,
        authorization: Option<&str>,
        role: Role,
    ) -> Result<Access, Denied> {
        let tokens = match self {
            Self::Open => return Ok(Access::Open),
            Self::ByToken(tokens) => tokens,
        };
        match tokens.authenticate(authorization, role) {
            Err(Denied::Unknown) => {
                // The token may have been made a moment ago.
                Box::pin(tokens.read_again()).await;
                tokens.authenticate(authorization, role)
            }
            known => known,
        }
    }

    /// Checks again in the middle of a call that may take long: its token may have been revoked
    /// meanwhile.
    pub(super) fn still_valid(&self, caller: &Caller) -> Result<(), Denied> {
        self.valid(&caller.access)
    }

    pub(super) fn valid(&self, access: &Access) -> Result<(), Denied> {
        match (self, access) {
            (Self::ByToken(tokens), Access::ByToken(hash, _)) => tokens.valid(hash).map(drop),
            _ => Ok(()),
        }
    }

    /// Waits until the token of this access is no longer valid. Without a token, waits for ever.
    pub(super) fn revoked(&self, access: &Access) -> BoxFuture<'static, Denied> {
        match (self, access) {
            (Self::ByToken(tokens), Access::ByToken(hash, _)) => {
                Box::pin(tokens.clone().revoked(*hash))
            }
            _ => Box::pin(future::pending()),
        }
    }
}

/// The tokens, as SQL had them a moment ago.
#[derive(Clone)]
pub struct Tokens {
    known: Arc<RwLock<HashMap<SecretHash, Arc<KnownToken>>>>,
    /// Notified when a token was changed or removed.
    lost: Arc<watch::Sender<()>>,
    clock: Clock,
    sync: Arc<Mutex<TokenSync>>,
    unknown: Arc<UnknownTokens>,
}

/// Limits calls with tokens that this process does not know, because a stranger can make any number
/// of them.
struct UnknownTokens {
    places: Semaphore,
    looks: DefaultDirectRateLimiter,
}

struct KnownToken {
    token: Arc<AccessToken>,
    limiter: Option<DefaultDirectRateLimiter>,
}

impl KnownToken {
    fn new(token: AccessToken) -> Self {
        let limiter = token
            .calls_per_second
            .map(|limit| RateLimiter::direct(Quota::per_second(limit)));
        Self {
            token: Arc::new(token),
            limiter,
        }
    }
}

/// Reads the tokens, and remembers how far it has read.
pub struct TokenSync {
    store: Arc<dyn store::Access>,
    /// Gets the scopes of the tokens.
    occupancy: Occupancy,
    known: Arc<RwLock<HashMap<SecretHash, Arc<KnownToken>>>>,
    lost: Arc<watch::Sender<()>>,
    clock: Clock,
    read: Option<(u64, Instant)>,
    /// When the last successful read began: `known` has all tokens that were made before.
    read_from: Option<Instant>,
}

impl TokenSync {
    /// Reads the tokens for the first time.
    pub async fn start(
        store: Arc<dyn store::Access>,
        occupancy: Occupancy,
        clock: Clock,
    ) -> store::Result<Self> {
        let mut sync = Self {
            store,
            occupancy,
            known: Arc::default(),
            lost: Arc::default(),
            clock,
            read: None,
            read_from: None,
        };
        sync.read().await?;
        Ok(sync)
    }

    /// Keeps reading until the stop.
    pub fn keep_on(self, supervisor: &Supervisor) -> Tokens {
        let known = Arc::clone(&self.known);
        let lost = Arc::clone(&self.lost);
        let clock = self.clock.clone();
        let sync = Arc::new(Mutex::new(self));
        let unknown = UnknownTokens {
            places: Semaphore::new(MOST_UNKNOWN),
            looks: RateLimiter::direct(Quota::per_second(LOOKS_PER_SECOND)),
        };
        let tokens = Tokens {
            known,
            lost,
            clock,
            sync: Arc::clone(&sync),
            unknown: Arc::new(unknown),
        };
        if tokens.known.read().is_empty() {
            tracing::warn!(
                "there is no token, so nobody can call: taskd token create NAME --roles admin makes one"
            );
        }
        supervisor.spawn_loop("tokens", sync, |sync, cx| async move {
            cx.every(EVERY, || async { sync.lock().await.read().await })
                .await
        });
        tokens
    }

    async fn read(&mut self) -> store::Result<()> {
        let from = Instant::now();
        // The version first, so that a change after it is noticed the next time.
        let version = self.store.tokens_version().await?;
        if self
            .read
            .is_some_and(|(read, at)| read == version && at.elapsed() < WHOLE_EVERY)
        {
            self.read_from = Some(from);
            return Ok(());
        }
        let stored = self.store.tokens().await?;
        self.occupancy.set_scopes(
            stored
                .iter()
                .map(|(_, token)| token.scope.clone())
                .collect(),
        );
        let mut known = self.known.write();
        let mut before = std::mem::take(&mut *known);
        let mut has_lost = false;
        for (hash, token) in stored {
            // An unchanged token keeps the count of its calls.
            let same = before.remove(&hash).filter(|known| *known.token == token);
            has_lost |= same.is_none();
            known.insert(
                hash,
                same.unwrap_or_else(|| Arc::new(KnownToken::new(token))),
            );
        }
        has_lost |= !before.is_empty();
        drop(known);
        if has_lost {
            self.lost.send_replace(());
        }
        self.read = Some((version, Instant::now()));
        self.read_from = Some(from);
        Ok(())
    }
}

impl Tokens {
    /// Reads the tokens again, so that a new one works at once. Returns without doing so if too
    /// many calls wait for it, if SQL does not answer in time, or if the read fails, which the loop
    /// will report.
    async fn read_again(&self) {
        let Ok(_place) = self.unknown.places.try_acquire() else {
            return;
        };
        let arrived = Instant::now();
        let read = async {
            loop {
                let mut sync = self.sync.lock().await;
                // Another call, or the loop, has read the tokens since.
                if sync.read_from.is_some_and(|from| from >= arrived) {
                    return;
                }
                if self.unknown.looks.check().is_ok() {
                    sync.read().await.ok();
                    return;
                }
                drop(sync);
                sleep(CHECK_EVERY).await;
            }
        };
        timeout(LOOK_WITHIN, read).await.ok();
    }

    fn authenticate(&self, authorization: Option<&str>, role: Role) -> Result<Access, Denied> {
        let secret = authorization.and_then(|value| {
            let (scheme, secret) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim())
        });
        let hash = SecretHash::of(secret.ok_or(Denied::NoToken)?);
        let known = self.valid(&hash)?;
        let token = &known.token;
        let name = || known.token.name.clone();
        // Calls that the token may not make count for the limit, too.
        if let (Some(limiter), Some(limit)) = (&known.limiter, token.calls_per_second)
            && limiter.check().is_err()
        {
            return Err(Denied::TooFast {
                token: name(),
                limit,
            });
        }
        if !token.roles.include(role) {
            return Err(Denied::Role {
                token: name(),
                has: token.roles,
                needs: role,
            });
        }
        Ok(Access::ByToken(hash, Arc::clone(token)))
    }

    fn valid(&self, hash: &SecretHash) -> Result<Arc<KnownToken>, Denied> {
        let known = self
            .known
            .read()
            .get(hash)
            .cloned()
            .ok_or(Denied::Unknown)?;
        if known.token.has_expired(self.clock.now_unix_ms()) {
            return Err(Denied::Expired(known.token.name.clone()));
        }
        Ok(known)
    }

    async fn revoked(self, hash: SecretHash) -> Denied {
        let mut lost = self.lost.subscribe();
        loop {
            let known = match self.valid(&hash) {
                Ok(known) => known,
                Err(denied) => return denied,
            };
            let left_ms = known
                .token
                .expires_unix_ms
                .map(|at| at.saturating_sub(self.clock.now_unix_ms()));
            let left = left_ms.map_or(LOOK_EVERY, |left| {
                Duration::from_millis(left.max(1).unsigned_abs())
            });
            tokio::select! {
                // Cannot fail: the sender lives as long as `self`.
                _ = lost.changed() => {}
                // Limited, because the shared clock may run faster than this machine's.
                () = sleep(left.min(LOOK_EVERY)) => {}
            }
        }
    }
}

/// Refuses a caller that does not reach all queues.
pub(super) fn reaches_everything(caller: &Caller) -> Result<(), Denied> {
    let scoped = caller.access.token().filter(|_| is_scoped(caller));
    scoped.map_or(Ok(()), |token| Err(Denied::Scoped(token.name.clone())))
}

pub(super) fn reaches(caller: &Caller, queue: &str) -> Result<(), Denied> {
    let out_of_reach = caller
        .access
        .token()
        .filter(|token| !token.scope.includes(queue));
    out_of_reach.map_or(Ok(()), |token| Err(Denied::queue(token, queue)))
}

/// Refuses a caller that does not reach all queues of a session.
pub(super) fn reaches_session(caller: &Caller, queues: &[QueueName]) -> Result<(), Denied> {
    let mut scoped = caller.access.token().into_iter();
    let denied = scoped.find(|token| {
        queues
            .iter()
            .any(|queue| !token.scope.includes(queue.as_str()))
    });
    denied.map_or(Ok(()), |token| Err(Denied::Session(token.name.clone())))
}

/// Refuses a caller that does not reach all queues of a tree.
pub(super) fn reaches_tree(caller: &Caller, queues: &[QueueName]) -> Result<(), Denied> {
    let mut scoped = caller.access.token().into_iter();
    let denied = scoped.find(|token| {
        queues
            .iter()
            .any(|queue| !token.scope.includes(queue.as_str()))
    });
    denied.map_or(Ok(()), |token| Err(Denied::Tree(token.name.clone())))
}

/// Refuses a caller that does not reach the queue of a filter, or all queues if it names none.
pub(super) fn reaches_all_of(caller: &Caller, queue: Option<&QueueName>) -> Result<(), Denied> {
    queue.map_or_else(
        || reaches_everything(caller),
        |queue| reaches(caller, queue.as_str()),
    )
}

/// Refuses a caller that may not use a filter, because of its queue or its worker.
pub(super) fn may_choose(caller: &Caller, filter: &TaskFilter) -> Result<(), Denied> {
    reaches_all_of(caller, filter.queue.as_ref())?;
    filter
        .worker
        .as_ref()
        .map_or(Ok(()), |worker| may_name(caller, worker))
}

/// Refuses a caller whose token is for another worker.
pub(super) fn may_name(caller: &Caller, worker: &WorkerName) -> Result<(), Denied> {
    as_worker(caller, &mut worker.as_str().to_owned())
}

/// True if the caller must not learn about queues outside its scope.
pub(super) fn is_scoped(caller: &Caller) -> bool {
    caller
        .access
        .token()
        .is_some_and(|token| !token.scope.is_everything())
}

/// The name of a caller as acts record it.
pub(super) fn who(caller: &Caller) -> &str {
    caller.access.token().map_or("anybody", |token| &token.name)
}

/// Checks the worker that a call names. A call with a worker's own token may leave the name out.
pub(super) fn as_worker(caller: &Caller, worker: &mut String) -> Result<(), Denied> {
    let Some((token, own)) = caller
        .access
        .token()
        .and_then(|token| Some((token, token.worker.as_ref()?)))
    else {
        return Ok(());
    };
    if worker.is_empty() {
        own.as_str().clone_into(worker);
    }
    if worker != own.as_str() {
        let other = shorten(worker, ECHO).into_owned();
        return Err(Denied::Worker {
            token: token.name.clone(),
            own: own.as_str().to_owned(),
            other,
        });
    }
    Ok(())
}

pub(super) fn authorize_get(caller: &Caller, request: &mut GetTasks) -> Result<(), Denied> {
    as_worker(caller, &mut request.worker)?;
    request
        .queues
        .iter()
        .try_for_each(|queue| reaches(caller, queue))
}

/// True if the caller's token is for one worker.
pub(super) fn is_one_worker(caller: &Caller) -> bool {
    caller
        .access
        .token()
        .is_some_and(|token| token.worker.is_some())
}

/// Checks that the caller may open such a session. A takeover ends all sessions of a worker, of any
/// queue.
pub(super) fn authorize_open(caller: &Caller, open: &mut OpenSession) -> Result<(), Denied> {
    as_worker(caller, &mut open.worker)?;
    open.queues
        .iter()
        .try_for_each(|queue| reaches(caller, queue))?;
    if open.takeover && !is_one_worker(caller) {
        reaches_everything(caller)
    } else {
        Ok(())
    }
}

/// Checks a report's worker, and refuses each item of a queue that the caller does not reach.
pub(super) fn authorize_reports<T>(caller: &Caller, batch: &mut Batch<T>) -> Result<(), Denied> {
    as_worker(caller, &mut batch.worker)?;
    if caller.access.reaches_everything() {
        return Ok(());
    }
    for item in &mut batch.items {
        let Ok(read) = item else { continue };
        // An invalid lease token is answered as such later.
        let Ok(lease) = read.lease_token.parse::<LeaseToken>() else {
            continue;
        };
        if let Err(denied) = reaches(caller, lease.shard.queue.as_str()) {
            *item = Err(ItemAnswer::invalid(
                std::mem::take(&mut read.id),
                denied.to_string(),
            ));
        }
    }
    Ok(())
}

/// Removes the discovered tasks of queues that the caller does not reach. The answers to their
/// completions name them. They do not become dead letters, because those would be in other callers'
/// queues.
///
/// Outputs of stages go where their topology says, which somebody has applied who reaches the queues.
pub(super) fn deny_foreign_discoveries(
    caller: &Caller,
    batch: &mut Batch<Completion>,
    stages: &Stages,
) {
    if caller.access.reaches_everything() {
        return;
    }
    for item in &mut batch.items {
        let Ok(read) = item else { continue };
        let Ok(completion) = &mut read.report else {
            continue;
        };
        let Completion {
            discovered,
            unreadable,
            not_stored,
            ..
        } = completion;
        let is_of_stage = || {
            let lease = read.lease_token.parse::<LeaseToken>();
            lease.is_ok_and(|lease| stages.of(lease.shard.queue.as_str()).is_some())
        };
        // A port that nobody knows yet makes the whole report invalid later.
        let is_output =
            |task: &NewTask| task.queue.is_empty() && (!task.port.is_empty() || is_of_stage());
        let mut may_go = |task: &NewTask| match reaches(caller, &task.queue) {
            Ok(()) => true,
            Err(_) if is_output(task) => true,
            Err(denied) => {
                not_stored.add(|| format!("a discovered task: {denied}"));
                false
            }
        };
        discovered.retain(|task| may_go(task));
        unreadable.retain(|unreadable| may_go(&unreadable.task));
    }
}
