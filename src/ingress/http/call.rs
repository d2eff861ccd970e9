//! A call that was authenticated. Its handler reads the query, the headers and the body from it.

use std::{convert::Infallible, mem};

use axum::{
    body::Body,
    extract::{FromRequest, Query, Request},
    http::{HeaderMap, Uri},
};
use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::{
    super::{State, json::Unread, net::budget::Share, tally::Tally},
    problem::Problem,
    request::{JSON, json_body, whole},
};
use crate::model::Caller;

pub(in crate::ingress) struct Call {
    pub(super) state: State,
    pub(super) caller: Caller,
    pub(super) share: Share,
    pub(super) headers: HeaderMap,
    uri: Uri,
    pub(super) body: Body,
}

impl FromRequest<State> for Call {
    type Rejection = Infallible;

    async fn from_request(request: Request, state: &State) -> Result<Self, Infallible> {
        let (mut head, body) = request.into_parts();
        let caller = head
            .extensions
            .remove()
            .expect("each call was authenticated");
        let share = head.extensions.remove().expect("each request has a share");
        Ok(Self {
            state: state.clone(),
            caller,
            share,
            headers: head.headers,
            uri: head.uri,
            body,
        })
    }
}

impl Call {
    pub(super) fn query(&self) -> &str {
        self.uri.query().unwrap_or_default()
    }

    /// Parses the query.
    pub(super) fn fields<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        let fields = Query::try_from_uri(&self.uri)
            .map_err(|error| Problem::bad_request(error.body_text()))?;
        Ok(fields.0)
    }

    /// Reads a body that is small once it is decoded.
    pub(super) async fn json<T>(
        &mut self,
        read: impl FnOnce(&Bytes) -> Result<T, Unread>,
    ) -> Result<T, Problem> {
        Ok(read(&self.text(JSON).await?)?)
    }

    /// Like [`Self::json`], for a body that may have other types: `expected` names all of them.
    pub(super) async fn json_or<T>(
        &mut self,
        expected: &str,
        read: impl FnOnce(&Bytes) -> Result<T, Unread>,
    ) -> Result<T, Problem> {
        Ok(read(&self.text(expected).await?)?)
    }

    /// Reads a body of any type.
    pub(super) async fn whole(&mut self) -> Result<Bytes, Problem> {
        let limit = self.state.settings.limits.max_request_bytes;
        whole(&self.headers, mem::take(&mut self.body), limit).await
    }

    /// Reads a body and counts its parts, which stay in the request's share of the budget.
    pub(super) async fn counted<T>(
        &mut self,
        read: impl FnOnce(&Bytes, &mut Tally<'_>) -> Result<T, Unread>,
    ) -> Result<T, Problem> {
        self.counted_or(JSON, read).await
    }

    /// Like [`Self::counted`], for a body that may have other types: `expected` names all of them.
    pub(super) async fn counted_or<T>(
        &mut self,
        expected: &str,
        read: impl FnOnce(&Bytes, &mut Tally<'_>) -> Result<T, Unread>,
    ) -> Result<T, Problem> {
        let text = self.text(expected).await?;
        let mut tally = Tally::new(&self.state.settings, &self.share, text.len());
        let parts = read(&text, &mut tally)?;
        tally.keep();
        Ok(parts)
    }

    async fn text(&mut self, expected: &str) -> Result<Bytes, Problem> {
        json_body(
            &self.state,
            &self.headers,
            mem::take(&mut self.body),
            expected,
        )
        .await
    }
}
