//! Access tokens and operators' acts.
//!
//! Each change raises `meta.tokens_version`, whose row stays locked until the transaction ends, so
//! changes are serialized. An act has the id of its call, by which a repeated call recognises that
//! it has already taken effect.

use std::{collections::HashSet, num::NonZeroU32};

use uuid::{Timestamp, Uuid};

use crate::{
    model::{AccessToken, Act, Roles, SecretHash, WorkerName},
    store::{
        ACTS_STAY, AddedToken, MOST_TOKENS, Result,
        sql::{
            backend::Backend,
            meta, pages,
            rows::{corrupt, number},
            runner::Runner,
            session::Session,
            statement::{Statement, lists, pieces},
        },
    },
};

pub(crate) const VERSION: &str = "tokens_version";
/// The maximum number of old acts that are removed when a new one is recorded.
const OLD_ACTS: u32 = 2000;

/// The columns of a token: its hash, and the fields of [`AccessToken`].
type TokenColumns = (Vec<u8>, String, i64, String, Vec<u8>, i64, i64, i64);
/// The columns of an [`Act`].
pub(crate) type ActColumns = (Vec<u8>, String, String, String);

pub(crate) async fn tokens<DB: Backend>(
    sql: &Runner<DB>,
) -> Result<Vec<(SecretHash, AccessToken)>> {
    const SELECT: &str = "SELECT hash, name, roles, queues, worker, calls_per_second, created_ms, expires_ms \
         FROM tokens ORDER BY name";
    let tokens = sql.read("tokens", Statement::new(SELECT)).await?;
    Ok(tokens.into_iter().filter_map(token_or_none).collect())
}

pub(crate) async fn acts<DB: Backend>(
    sql: &Runner<DB>,
    before: Option<Uuid>,
    limit: u32,
) -> Result<Vec<Act>> {
    let acts = Statement::new("SELECT id, who, what, target FROM acts ");
    sql.read("acts", pages::latest(acts, before, limit))
        .await?
        .into_iter()
        .map(act)
        .collect()
}

/// The token, or `None` if this taskd does not understand it. Such a token grants nothing, and does
/// not affect others.
fn token_or_none(columns: TokenColumns) -> Option<(SecretHash, AccessToken)> {
    let name = columns.1.clone();
    token(columns)
        .inspect_err(|error| tracing::warn!("the token {name:?} counts for nothing here: {error}"))
        .ok()
}

fn token(columns: TokenColumns) -> Result<(SecretHash, AccessToken)> {
    let (hash, name, roles, queues, worker, calls_per_second, created_unix_ms, expires_unix_ms) =
        columns;
    let hash = SecretHash(
        hash.try_into()
            .map_err(|_| corrupt("a token's hash has 32 bytes"))?,
    );
    let worker = String::from_utf8(worker).map_err(|_| corrupt("a token's worker is text"))?;
    let worker = (!worker.is_empty())
        .then(|| WorkerName::new(&worker))
        .transpose();
    let token = AccessToken {
        name,
        roles: Roles::from_bits(roles),
        scope: queues.parse().map_err(corrupt)?,
        worker: worker.map_err(|error| corrupt(error.to_string()))?,
        calls_per_second: NonZeroU32::new(number(calls_per_second)?),
        created_unix_ms,
        expires_unix_ms: (expires_unix_ms > 0).then_some(expires_unix_ms),
    };
    Ok((hash, token))
}

pub(crate) fn act((id, who, what, target): ActColumns) -> Result<Act> {
    Ok(Act {
        id: act_id(&id)?,
        who,
        what,
        target,
    })
}

fn act_id(id: &[u8]) -> Result<Uuid> {
    Uuid::from_slice(id).map_err(|_| corrupt("an act's id is a UUID"))
}

pub(crate) async fn add<S: Session>(
    session: &mut S,
    hash: &SecretHash,
    token: &AccessToken,
    act: &Act,
) -> Result<AddedToken> {
    meta::raise(session, VERSION).await?;
    if is_recorded(session, act).await? {
        return Ok(AddedToken::Yes);
    }
    let same =
        Statement::new("SELECT COUNT(*) FROM tokens WHERE name = ?").bind(token.name.as_str());
    if count(session, same).await? > 0 {
        return Ok(AddedToken::NameTaken);
    }
    if count(session, Statement::new("SELECT COUNT(*) FROM tokens")).await?
        >= i64::from(MOST_TOKENS)
    {
        return Ok(AddedToken::NoRoom);
    }
    let worker = token
        .worker
        .as_ref()
        .map_or(&[][..], |worker| worker.as_str().as_bytes());
    let row = [
        hash.into(),
        token.name.as_str().into(),
        token.roles.bits().into(),
        token.scope.to_string().into(),
        worker.into(),
        token.calls_per_second.map_or(0, NonZeroU32::get).into(),
        token.created_unix_ms.into(),
        token.expires_unix_ms.unwrap_or(0).into(),
    ];
    let insert = Statement::new(
        "INSERT INTO tokens (hash, name, roles, queues, worker, calls_per_second, created_ms, expires_ms)",
    );
    session.execute(insert.values([row].into_iter())).await?;
    record(session, act).await?;
    Ok(AddedToken::Yes)
}

pub(crate) async fn revoke<S: Session>(session: &mut S, name: &str, act: &Act) -> Result<bool> {
    meta::raise(session, VERSION).await?;
    if is_recorded(session, act).await? {
        return Ok(true);
    }
    let was_there = session
        .execute(Statement::new("DELETE FROM tokens WHERE name = ?").bind(name))
        .await?
        > 0;
    if was_there {
        record(session, act).await?;
    }
    Ok(was_there)
}

pub(crate) async fn is_recorded<S: Session>(session: &mut S, act: &Act) -> Result<bool> {
    Ok(count(
        session,
        Statement::new("SELECT COUNT(*) FROM acts WHERE id = ?").bind(&act.id),
    )
    .await?
        > 0)
}

/// The ids of those acts that are recorded.
pub(crate) async fn recorded<S: Session>(
    session: &mut S,
    acts: impl Iterator<Item = &Act>,
) -> Result<HashSet<Uuid>> {
    let (ids, mut recorded) = (acts.map(|act| act.id).collect::<Vec<_>>(), HashSet::new());
    for ids in lists(&ids) {
        let found = Statement::new("SELECT id FROM acts WHERE id IN ").list(ids);
        for (id,) in session.fetch::<(Vec<u8>,)>(found).await? {
            recorded.insert(act_id(&id)?);
        }
    }
    Ok(recorded)
}

/// Records an act that does not concern tokens, unless it is already recorded.
pub(crate) async fn keep<S: Session>(session: &mut S, act: &Act) -> Result<()> {
    if is_recorded(session, act).await? {
        Ok(())
    } else {
        record(session, act).await
    }
}

/// Records those acts that are not recorded yet.
pub(crate) async fn keep_all<S: Session>(session: &mut S, acts: &[Act]) -> Result<()> {
    for piece in pieces(acts, |_| 0) {
        let rows = piece.iter().map(|act| {
            [
                (&act.id).into(),
                act.who.as_str().into(),
                act.what.as_str().into(),
                act.target.as_str().into(),
            ]
        });
        let insert = Statement::new("INSERT INTO acts (id, who, what, target)").values(rows);
        session.execute(insert.sql(&S::keep_first("id"))).await?;
    }
    match acts.first() {
        Some(act) => remove_old(session, act).await,
        None => Ok(()),
    }
}

/// Records an act, and removes old ones.
async fn record<S: Session>(session: &mut S, act: &Act) -> Result<()> {
    let row = [
        (&act.id).into(),
        act.who.as_str().into(),
        act.what.as_str().into(),
        act.target.as_str().into(),
    ];
    let insert =
        Statement::new("INSERT INTO acts (id, who, what, target)").values([row].into_iter());
    session.execute(insert).await?;
    remove_old(session, act).await
}

/// Removes acts that are more than [`ACTS_STAY`] older than this one, at most [`OLD_ACTS`], which
/// is a thousand more than a call can add. A bulk change records an act for each task, so millions
/// may become old at the same time.
async fn remove_old<S: Session>(session: &mut S, act: &Act) -> Result<()> {
    let now: Vec<(i64,)> = session
        .fetch(Statement::new(format!("SELECT {}", S::NOW_MS)))
        .await?;
    let now = now
        .first()
        .map(|(now,)| *now)
        .ok_or_else(|| corrupt("no time"))?;
    // The clock of the process that recorded the act may be ahead.
    let at_ms = act.at_unix_ms().min(now);
    let old_ms = at_ms
        .unsigned_abs()
        .saturating_sub(ACTS_STAY.as_millis() as u64);
    let mut old = Uuid::new_v7(Timestamp::from_unix_time(old_ms / 1000, 0, 0, 0))
        .as_bytes()
        .to_vec();
    let too_many = Statement::new("SELECT id FROM acts WHERE id < ? ORDER BY id LIMIT 1 OFFSET ?");
    let too_many: Vec<(Vec<u8>,)> = session
        .fetch(too_many.bind(&old[..]).bind(OLD_ACTS))
        .await?;
    if let Some((first,)) = too_many.into_iter().next() {
        old = first;
    }
    session
        .execute(Statement::new("DELETE FROM acts WHERE id < ?").bind(&old[..]))
        .await
        .map(drop)
}

pub(crate) async fn count<S: Session>(session: &mut S, statement: Statement<'_>) -> Result<i64> {
    let rows: Vec<(i64,)> = session.fetch(statement).await?;
    rows.first()
        .map(|(count,)| *count)
        .ok_or_else(|| corrupt("a count has a row"))
}
