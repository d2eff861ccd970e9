//! The Redis that holds the tasks of this database: a row of `meta`.

use async_trait::async_trait;

use crate::store::sql::{
    SqlStore, backend::Backend, meta, session::Session as _, statement::Statement,
};
use crate::store::{Holders, Result};

#[async_trait]
impl<DB: Backend> Holders for SqlStore<DB> {
    async fn holder(&self) -> Result<String> {
        meta::read(&self.sql, "holder", "redis").await
    }

    async fn replace_holder(&self, seen: &str, holder: &str) -> Result<bool> {
        let input = (seen.to_owned(), holder.to_owned());
        let replace = self
            .sql
            .run("replace_holder", input, |session, (seen, holder)| {
                let replace = Statement::new("UPDATE meta SET value = ?").bind(&**holder);
                let replace = replace
                    .sql(" WHERE name = 'redis' AND value = ?")
                    .bind(&**seen);
                Box::pin(async move { Ok(session.execute(replace).await? == 1) })
            });
        replace.await
    }
}
