//! The OpenAPI documents of a definition, which are fetched when it is deployed.

use std::{collections::BTreeMap, time::Duration};

use futures::{StreamExt as _, stream};
use hyper::{
    HeaderMap, Method,
    header::{ACCEPT, AUTHORIZATION, HeaderValue, USER_AGENT},
};
use serde_json::Value;
use tokio::time::timeout;
use url::Url;

use crate::{
    model::{ECHO, shorten},
    outbound::{self, Failure, Outbound, Outgoing},
    workflow::{
        definition::{Authentication, Definition, Endpoint, Mistake},
        machine::HttpAuthentication,
        program::Documents,
    },
};

/// The most documents of a definition, and the most bytes of each.
const MOST: usize = 16;
const MOST_BYTES: usize = 4 << 20;
/// How long a server may take to answer.
const WITHIN: Duration = Duration::from_secs(20);
const AT_ONCE: usize = 4;

/// Fetches the documents of a definition. Those that cannot be fetched are mistakes.
pub(super) async fn fetch(
    outbound: &Outbound,
    definition: &Definition,
) -> Result<Documents, Vec<Mistake>> {
    let calls = definition.documents();
    let mut wanted: BTreeMap<String, Endpoint> = BTreeMap::new();
    for (_, endpoint) in &calls {
        let first = || Endpoint::clone(endpoint);
        wanted.entry(endpoint.uri.clone()).or_insert_with(first);
    }
    let mut mistakes = Vec::new();
    let mut mistake = |uri: Option<&str>, says: &str| {
        let of = calls
            .iter()
            .filter(|(_, endpoint)| uri.is_none_or(|uri| endpoint.uri == uri));
        mistakes.extend(of.map(|(place, _)| Mistake {
            line: place.line,
            column: place.column,
            pointer: format!("{}/with/document", place.pointer),
            says: says.to_owned(),
        }));
    };
    if wanted.len() > MOST {
        let says = format!(
            "the definition refers to {} documents; at most {MOST}",
            wanted.len()
        );
        mistake(None, &says);
        return Err(mistakes);
    }
    let fetched = wanted.into_values().map(|endpoint| async move {
        let fetched = Box::pin(document(outbound, &endpoint)).await;
        (endpoint.uri, fetched)
    });
    let mut documents = Documents::new();
    let fetched: Vec<_> = stream::iter(fetched).buffered(AT_ONCE).collect().await;
    for (uri, fetched) in fetched {
        match fetched {
            Ok(document) => drop(documents.insert(uri, document)),
            Err(why) => {
                let shown = shorten(&uri, ECHO);
                mistake(
                    Some(&uri),
                    &format!("cannot fetch the document {shown}: {why}"),
                );
            }
        }
    }
    match mistakes.is_empty() {
        true => Ok(documents),
        false => Err(mistakes),
    }
}

async fn document(outbound: &Outbound, endpoint: &Endpoint) -> Result<Value, String> {
    let url = Url::parse(&endpoint.uri).map_err(|error| error.to_string())?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err("its URI has a user or a password; use authentication".to_owned());
    }
    let mut headers = HeaderMap::from_iter([
        (ACCEPT, HeaderValue::from_static("application/json")),
        (USER_AGENT, HeaderValue::from_static(outbound::USER_AGENT)),
    ]);
    let authorization = match &endpoint.authentication {
        Some(authentication) => Some(outbound.authorization(&constant(authentication)?)?),
        None => None,
    };
    if let Some(authorization) = &authorization {
        headers.insert(AUTHORIZATION, authorization.header.clone());
    }
    let request = Outgoing {
        method: Method::GET,
        url,
        headers,
        body: Vec::new().into(),
        follows: true,
    };
    let sending = Box::pin(outbound.send(request, MOST_BYTES));
    let answer = match timeout(WITHIN, sending).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(Failure::TooLarge)) => return Err(format!("it has more than {MOST_BYTES} bytes")),
        Ok(Err(failure)) => return Err(failure.to_string()),
        Err(_) => return Err(format!("no answer within {}s", WITHIN.as_secs())),
    };
    if !answer.status.is_success() {
        return Err(format!("its server answered {}", answer.status));
    }
    let mut document =
        serde_json::from_slice(&answer.body).map_err(|error| format!("it is no JSON: {error}"))?;
    if let Some(authorization) = &authorization {
        authorization.hide_in(&mut document);
    }
    Ok(document)
}

/// What authenticates while no execution is there to evaluate expressions.
fn constant(authentication: &Authentication) -> Result<HttpAuthentication, String> {
    let constant = |text: &String| match text.contains("${") {
        true => Err("its authentication must be without expressions".to_owned()),
        false => Ok(text.clone()),
    };
    Ok(match authentication {
        Authentication::Basic { username, password } => HttpAuthentication::Basic {
            username: constant(username)?,
            password: constant(password)?,
        },
        Authentication::Bearer { token } => HttpAuthentication::Bearer {
            token: constant(token)?,
        },
        Authentication::BasicSecret(name) => HttpAuthentication::BasicSecret(name.clone()),
        Authentication::BearerSecret(name) => HttpAuthentication::BearerSecret(name.clone()),
    })
}
