//! The header `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header): the idempotency key of
//! a request whose body is one task.

use axum::http::HeaderMap;

use super::problem::Problem;
use crate::ingress::json::insert::NewTasks;

const HEADER: &str = "idempotency-key";

/// Gives the task of a request the idempotency key from its header.
pub(super) fn adopt(headers: &HeaderMap, asked: &mut NewTasks) -> Result<(), Problem> {
    let Some(key) = given(headers)? else {
        return Ok(());
    };
    if !asked.is_single {
        return Err(not_for_many());
    }
    for task in asked.tasks.iter_mut().flatten() {
        if !task.idempotency_key.is_empty() && task.idempotency_key != key {
            return Err(Problem::bad_request(
                "Idempotency-Key and idempotency_key are both given, and differ",
            ));
        }
        task.idempotency_key.clone_from(&key);
    }
    Ok(())
}

/// Refuses the header for a body of lines.
pub(super) fn refuse(headers: &HeaderMap) -> Result<(), Problem> {
    given(headers)?.map_or(Ok(()), |_| Err(not_for_many()))
}

fn not_for_many() -> Problem {
    Problem::bad_request(
        "Idempotency-Key is for a body of one task; of several tasks, give each an idempotency_key of its own",
    )
}

/// Returns the key. The draft puts it in quotes; most clients do not.
fn given(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut given = headers.get_all(HEADER).iter();
    let Some(first) = given.next() else {
        return Ok(None);
    };
    if given.next().is_some() {
        return Err(Problem::bad_request("Idempotency-Key comes twice"));
    }
    let text = first
        .to_str()
        .map_err(|_| Problem::bad_request("Idempotency-Key is not ASCII text"))?
        .trim();
    let key = match text
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'))
    {
        Some(quoted) => unescaped(quoted),
        None => text.to_owned(),
    };
    if key.is_empty() {
        return Err(Problem::bad_request("Idempotency-Key is empty"));
    }
    Ok(Some(key))
}

/// Unescapes a string of structured fields (RFC 8941), in which quotes and backslashes have a
/// backslash before them.
fn unescaped(quoted: &str) -> String {
    let (mut text, mut characters) = (String::with_capacity(quoted.len()), quoted.chars());
    while let Some(character) = characters.next() {
        text.push(if character == '\\' {
            characters.next().unwrap_or(character)
        } else {
            character
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn key(values: &[&'static str]) -> Result<Option<String>, String> {
        let headers = values
            .iter()
            .map(|value| (HEADER.parse().unwrap(), HeaderValue::from_static(value)));
        given(&headers.collect()).map_err(|problem| problem.detail().to_owned())
    }

    #[test]
    fn the_key_is_read_with_quotes_and_without() {
        assert_eq!(key(&[]), Ok(None));
        for (value, expected) in [
            ("abc", "abc"),
            (" \"a b\" ", "a b"),
            (r#""a\"b\\""#, r#"a"b\"#),
            ("\"", "\""),
        ] {
            assert_eq!(key(&[value]), Ok(Some(expected.into())), "{value}");
        }
        assert_eq!(key(&["\"\""]).unwrap_err(), "Idempotency-Key is empty");
        assert_eq!(key(&["a", "a"]).unwrap_err(), "Idempotency-Key comes twice");
    }
}
