//! Access tokens, the acts of operators, and which Redis holds the tasks of the database.

pub(crate) mod holder;
pub(crate) mod tokens;

use async_trait::async_trait;
use uuid::Uuid;

use crate::{
    model::{AccessToken, Act, SecretHash},
    store::{
        Access, AddedToken, Result,
        sql::{SqlStore, backend::Backend, meta},
    },
};

#[async_trait]
impl<DB: Backend> Access for SqlStore<DB> {
    async fn tokens_version(&self) -> Result<u64> {
        meta::read(&self.sql, tokens::VERSION, tokens::VERSION).await
    }

    async fn tokens(&self) -> Result<Vec<(SecretHash, AccessToken)>> {
        tokens::tokens(&self.sql).await
    }

    async fn add_token(
        &self,
        hash: SecretHash,
        token: &AccessToken,
        act: &Act,
    ) -> Result<AddedToken> {
        self.sql
            .run(
                "add_token",
                (hash, token.clone(), act.clone()),
                |session, (hash, token, act)| Box::pin(tokens::add(session, hash, token, act)),
            )
            .await
    }

    async fn revoke_token(&self, name: &str, act: &Act) -> Result<bool> {
        self.sql
            .run(
                "revoke_token",
                (name.to_owned(), act.clone()),
                |session, (name, act)| Box::pin(tokens::revoke(session, name, act)),
            )
            .await
    }

    async fn acts(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<Act>> {
        tokens::acts(&self.sql, before, limit).await
    }

    async fn holder(&self) -> Result<String> {
        meta::read(&self.sql, "holder", "redis").await
    }

    async fn replace_holder(&self, seen: &str, holder: &str) -> Result<bool> {
        holder::replace_holder(&self.sql, seen, holder).await
    }
}
