//! Eras, by which a bulk change finds exactly the tasks that were counted.
//!
//! `meta.era` is a number that each count raises. A transaction that inserts tasks or changes which
//! filters they match stamps their rows with the number, and keeps others from raising it until
//! the transaction has ended. So when a count has its number, each transaction with a lower one is
//! visible, and each later one stamps that number or a higher one: from then on, rows with a lower
//! number only become fewer.
//!
//! Times cannot do that. `updated_ms` is when something happened, which may be long before SQL
//! learns of it, and a transaction commits after the time that it has written.

use super::super::{meta, session::Session, statement::Statement};
use crate::store::Result;

const NAME: &str = "era";

/// Begins a new era: the first one that is later than the last, and not before `now_ms`.
pub(crate) async fn begin<S: Session>(session: &mut S, now_ms: i64) -> Result<i64> {
    const RAISE: &str = "UPDATE meta SET value = CAST(CASE WHEN CAST(value AS SIGNED) < ? THEN ? \
         ELSE CAST(value AS SIGNED) + 1 END AS CHAR) WHERE name = ?";
    let raise = Statement::new(RAISE).bind(now_ms).bind(now_ms).bind(NAME);
    session.execute(raise).await?;
    let era = meta::value(session, NAME).await?;
    session.enter_era(era);
    Ok(era)
}
