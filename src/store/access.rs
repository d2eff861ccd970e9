//! Access tokens, and which Redis holds the tasks of the database.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::Result;
use crate::model::{AccessToken, Act, SecretHash};

/// The maximum number of access tokens. Each process keeps all of them in memory.
pub const MOST_TOKENS: u32 = 10_000;

/// How long an operator's act is kept.
pub const ACTS_STAY: Duration = Duration::from_secs(400 * 24 * 3600);

/// The outcome of adding an access token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedToken {
    Yes,
    /// Another token already has this name.
    NameTaken,
    /// There are [`MOST_TOKENS`] already.
    NoRoom,
}

/// Stores who may do what, and which Redis holds the tasks of the database.
///
/// Every method is one transaction and may be repeated: see [`super::Store`].
#[async_trait]
pub trait Access: Send + Sync {
    /// A number that increases with each change of the tokens.
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

    /// Removes the token with this name, and records the act. Returns whether there was one.
    async fn revoke_token(&self, name: &str, act: &Act) -> Result<bool>;

    /// Acts before `before`, latest first. They are kept for [`ACTS_STAY`].
    async fn acts(&self, before: Option<Uuid>, limit: u32) -> Result<Vec<Act>>;

    /// Returns what [`Self::replace_holder`] wrote last, or an empty string.
    async fn holder(&self) -> Result<String>;

    /// Replaces the holder `seen` by another one of at most 255 bytes. Returns false if the holder
    /// is no longer `seen`.
    async fn replace_holder(&self, seen: &str, holder: &str) -> Result<bool>;
}
