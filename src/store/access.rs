//! Access tokens, and the Redis that holds the tasks of the database.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::Result;
use crate::model::{AccessToken, Act, SecretHash};

/// The most access tokens. Each process keeps all of them in memory.
pub const MOST_TOKENS: u32 = 10_000;

/// How long an operator's act can be read.
pub const ACTS_STAY: Duration = Duration::from_secs(400 * 24 * 3600);

/// The answer to a new access token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedToken {
    Yes,
    /// Another token has the name.
    NameTaken,
    /// There are [`MOST_TOKENS`].
    NoRoom,
}

/// Who may do what, and which Redis holds the tasks of the database.
///
/// Every method is one transaction, and may be repeated as [`super::Store`] says.
#[async_trait]
pub trait Access: Send + Sync {
    /// A number that each change of the tokens raises.
    async fn tokens_version(&self) -> Result<u64>;

    /// All access tokens, by name. There are at most [`MOST_TOKENS`].
    async fn tokens(&self) -> Result<Vec<(SecretHash, AccessToken)>>;

    /// Adds a token, and records the act.
    async fn add_token(
        &self,
        hash: SecretHash,
        token: &AccessToken,
        act: &Act,
    ) -> Result<AddedToken>;

    /// Removes the token of that name, and records the act. Answers whether there was one.
    async fn revoke_token(&self, name: &str, act: &Act) -> Result<bool>;

    /// Acts before `before`, the latest first. They stay for [`ACTS_STAY`].
    async fn acts(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<Act>>;

    /// Answers what [`Self::replace_holder`] wrote last; empty before.
    async fn holder(&self) -> Result<String>;

    /// Writes another holder, of at most 255 bytes, in the place of `seen`. False if it is not
    /// `seen` any more.
    async fn replace_holder(&self, seen: &str, holder: &str) -> Result<bool>;
}
