//! Which Redis holds the tasks of this database, stored in a row of `meta`.

use crate::store::{
    Result,
    sql::{backend::Backend, runner::Runner, session::Session as _, statement::Statement},
};

pub(crate) async fn replace_holder<DB: Backend>(
    sql: &Runner<DB>,
    seen: &str,
    holder: &str,
) -> Result<bool> {
    let input = (seen.to_owned(), holder.to_owned());
    let replace = sql.run("replace_holder", input, |session, (seen, holder)| {
        let replace = Statement::new("UPDATE meta SET value = ?").bind(&**holder);
        let replace = replace
            .sql(" WHERE name = 'redis' AND value = ?")
            .bind(&**seen);
        Box::pin(async move { Ok(session.execute(replace).await? == 1) })
    });
    replace.await
}
