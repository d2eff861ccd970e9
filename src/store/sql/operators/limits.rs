//! Own limits of limit keys.
//!
//! Each change raises `meta.limits_version`, whose row stays locked until the transaction ends, so
//! changes are serialized, and no process reads a version before all lower ones are committed.

use crate::{
    model::{Act, ChangedLimits, OwnLimits, OwnValues, QueueName},
    store::{
        CLEARED_LIMITS_STAY, LimitSetting, MOST_OWN_LIMITS, Result,
        sql::{
            access::tokens,
            backend::Backend,
            meta,
            rows::{corrupt, queue_name},
            runner::Runner,
            session::Session,
            statement::Statement,
        },
    },
};

pub(crate) const VERSION: &str = "limits_version";

/// The columns of own limits.
const COLUMNS: &str =
    "queue, limit_key, at_a_time, pace, burst, hold_ms, at_ms, who, version, cleared";

type Columns = (
    String,
    Vec<u8>,
    i64,
    String,
    i64,
    i64,
    i64,
    String,
    i64,
    i64,
);

fn read(columns: Columns) -> Result<ChangedLimits> {
    let (queue, limit_key, at_a_time, pace, burst, hold_ms, at_unix_ms, who, version, cleared) =
        columns;
    let pace = match pace.as_str() {
        "" => None,
        pace => Some(pace.parse().map_err(corrupt)?),
    };
    Ok(ChangedLimits {
        version: u64::try_from(version).map_err(|_| corrupt("a version is not negative"))?,
        limits: OwnLimits {
            queue: queue_name(&queue)?,
            limit_key: String::from_utf8(limit_key).map_err(|_| corrupt("a limit key is text"))?,
            values: OwnValues {
                at_a_time: u32::try_from(at_a_time).ok(),
                pace,
                burst: u32::try_from(burst).ok().filter(|burst| *burst > 0),
                hold_until_unix_ms: Some(hold_ms).filter(|at| *at > 0),
            },
            at_unix_ms,
            who,
        },
        is_cleared: cleared != 0,
    })
}

pub(crate) async fn changed<DB: Backend>(
    sql: &Runner<DB>,
    after: u64,
    limit: u32,
) -> Result<Vec<ChangedLimits>> {
    let select = format!("SELECT {COLUMNS} FROM limits WHERE version > ? ORDER BY version LIMIT ?");
    let rows = Statement::new(select).bind(after).bind(limit);
    let rows: Vec<Columns> = sql.read("changed_limits", rows).await?;
    rows.into_iter().map(read).collect()
}

pub(crate) async fn of_queue<DB: Backend>(
    sql: &Runner<DB>,
    queue: &QueueName,
    after: Option<&str>,
    limit: u32,
) -> Result<Vec<OwnLimits>> {
    let select = format!(
        "SELECT {COLUMNS} FROM limits WHERE queue = ? AND limit_key > ? AND cleared = 0 \
         ORDER BY limit_key LIMIT ?"
    );
    let rows = Statement::new(select)
        .bind(queue)
        .bind(after.unwrap_or_default().as_bytes())
        .bind(limit);
    let rows: Vec<Columns> = sql.read("own_limits", rows).await?;
    rows.into_iter().map(|row| Ok(read(row)?.limits)).collect()
}

pub(crate) async fn of_key<DB: Backend>(
    sql: &Runner<DB>,
    queue: &QueueName,
    limit_key: &str,
) -> Result<Option<OwnLimits>> {
    let select =
        format!("SELECT {COLUMNS} FROM limits WHERE queue = ? AND limit_key = ? AND cleared = 0");
    let row = Statement::new(select)
        .bind(queue)
        .bind(limit_key.as_bytes());
    let rows: Vec<Columns> = sql.read("own_limits_of", row).await?;
    rows.into_iter()
        .next()
        .map(|row| Ok(read(row)?.limits))
        .transpose()
}

pub(crate) async fn set<S: Session>(
    session: &mut S,
    limits: &OwnLimits,
    act: &Act,
) -> Result<LimitSetting> {
    meta::raise(session, VERSION).await?;
    // The call is being repeated, because the response to its COMMIT was lost.
    if tokens::is_recorded(session, act).await? {
        return Ok(LimitSetting::Done);
    }
    let all = Statement::new("SELECT COUNT(*) FROM limits WHERE cleared = 0");
    if !is_set(session, &limits.queue, &limits.limit_key).await?
        && tokens::count(session, all).await? >= i64::from(MOST_OWN_LIMITS)
    {
        return Ok(LimitSetting::NoRoom);
    }
    put(session, limits, false).await?;
    tokens::keep(session, act).await?;
    Ok(LimitSetting::Done)
}

pub(crate) async fn clear<S: Session>(
    session: &mut S,
    limits: &OwnLimits,
    act: &Act,
) -> Result<LimitSetting> {
    meta::raise(session, VERSION).await?;
    if tokens::is_recorded(session, act).await? {
        return Ok(LimitSetting::Done);
    }
    if !is_set(session, &limits.queue, &limits.limit_key).await? {
        return Ok(LimitSetting::Already);
    }
    put(session, limits, true).await?;
    tokens::keep(session, act).await?;
    Ok(LimitSetting::Done)
}

async fn is_set<S: Session>(session: &mut S, queue: &QueueName, limit_key: &str) -> Result<bool> {
    let same = "SELECT COUNT(*) FROM limits WHERE queue = ? AND limit_key = ? AND cleared = 0";
    let same = Statement::new(same).bind(queue).bind(limit_key.as_bytes());
    Ok(tokens::count(session, same).await? > 0)
}

/// Writes the row in the present version, and removes rows that were cleared long ago.
async fn put<S: Session>(session: &mut S, limits: &OwnLimits, is_cleared: bool) -> Result<()> {
    let version: u64 = meta::value(session, VERSION).await?;
    let values = &limits.values;
    let pace = values.pace.map(|pace| pace.to_string());
    let row = [
        (&limits.queue).into(),
        limits.limit_key.as_bytes().into(),
        values.at_a_time.map_or(-1, i64::from).into(),
        pace.unwrap_or_default().into(),
        values.burst.unwrap_or(0).into(),
        values.hold_until_unix_ms.unwrap_or(0).into(),
        limits.at_unix_ms.into(),
        limits.who.as_str().into(),
        version.into(),
        is_cleared.into(),
    ];
    let changing = [
        "at_a_time",
        "pace",
        "burst",
        "hold_ms",
        "at_ms",
        "who",
        "version",
        "cleared",
    ];
    let insert = Statement::new(format!("INSERT INTO limits ({COLUMNS})"))
        .values([row].into_iter())
        .sql(&S::replace("queue, limit_key", &changing));
    session.execute(insert).await?;
    let stay = i64::try_from(CLEARED_LIMITS_STAY.as_millis()).unwrap_or(i64::MAX);
    let remove = Statement::new("DELETE FROM limits WHERE cleared = 1 AND at_ms < ?")
        .bind(limits.at_unix_ms.saturating_sub(stay));
    session.execute(remove).await.map(drop)
}
