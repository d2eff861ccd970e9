//! Authenticates a request by the token in its head.

use axum::http::{Extensions, HeaderMap, header};

use super::{net::budget::Share, net::standing::Standing};
use crate::{
    api::{Api, Error},
    model::{Caller, Client, Role},
};

/// Gives a request its [`Caller`] if its token has the role. A request without a caller reaches no
/// operation. From then on its connection counts for the token.
pub(super) async fn authenticate(
    api: &Api,
    headers: &HeaderMap,
    extensions: &mut Extensions,
    role: Role,
) -> Result<(), Error> {
    let authorization = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok());
    admit(api, authorization, extensions, role).await
}

/// Like [`authenticate`], by a text as the header `Authorization` has it.
pub(super) async fn admit(
    api: &Api,
    authorization: Option<&str>,
    extensions: &mut Extensions,
    role: Role,
) -> Result<(), Error> {
    let access = api.authenticate(authorization, role).await?;
    let client: &Client = extensions
        .get()
        .expect("the connection gives each request its client");
    if let Some(share) = extensions.get::<Share>() {
        share.belongs_to(&access);
    }
    let caller = Caller {
        client: *client,
        access,
    };
    let standing: &Standing = extensions
        .get()
        .expect("the connection gives each request its standing");
    standing
        .called_by(&caller.access)
        .map_err(Error::ManyConnections)?;
    extensions.insert(caller);
    Ok(())
}
