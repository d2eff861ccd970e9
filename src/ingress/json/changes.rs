//! Changes of live work.

use bytes::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;

use super::{super::tally::Tally, AtMost, Unread, object};

/// The most tasks of a call.
const MAX_IDS: usize = 1000;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object with ids")]
pub(in crate::ingress) struct Ids {
    ids: AtMost<String, MAX_IDS>,
}

/// Reads the ids of tasks.
pub(in crate::ingress) fn ids(body: &Bytes, tally: &mut Tally<'_>) -> Result<Vec<String>, Unread> {
    let Ids { ids } = object(body)?;
    for _ in &ids.0 {
        tally.item()?;
    }
    Ok(ids.0)
}

#[cfg(test)]
mod tests {
    use super::{
        super::testing::{share, tally},
        *,
    };

    #[test]
    fn ids_are_a_list_and_nothing_else() {
        let read = |text: &'static str| ids(&Bytes::from(text), &mut tally(&share())).map_err(|e| e.to_string());
        assert_eq!(read(r#"{"ids":["a","b"]}"#).unwrap(), ["a", "b"]);
        for (text, why) in [
            (r#"{"ids":"a"}"#, "expected a list"),
            (r#"{"id":["a"]}"#, "unknown field `id`"),
            ("{}", "missing field `ids`"),
            (r#"["a"]"#, "expected a JSON object"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(why), "{said:?} should say {why:?}");
        }
    }
}
