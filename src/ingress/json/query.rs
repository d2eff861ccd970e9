//! The query of a URL. Each parameter must be known to the route and given only once, so that a
//! request does what it says.

use std::{collections::HashSet, time::Duration};

use super::text::Time;
use crate::api::{ECHO, shorten};

/// Stands for all names that begin with `header.`.
pub(in crate::ingress) const HEADERS: &str = "header.NAME";
const HEADER: &str = "header.";
/// How long a call waits for a queue to be drained, unless it says.
const DRAINED_WITHIN: Duration = Duration::from_secs(30);

/// Reads the parameters of a query. The error is about the first mistake.
pub(in crate::ingress) fn parameters(query: &str) -> Result<Vec<(String, String)>, String> {
    let mut parameters = Vec::new();
    let mut seen = HashSet::new();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let name = text(name)?;
        let value = text(value)?;
        if !seen.insert(name.clone()) {
            return Err(format!(
                "the parameter {:?} is given twice",
                shorten(&name, ECHO)
            ));
        }
        parameters.push((name, value));
    }
    Ok(parameters)
}

/// Refuses a query with a parameter that the route does not know.
pub(in crate::ingress) fn check(query: &str, known: &[&str]) -> Result<(), String> {
    for (name, _) in parameters(query)? {
        let is_header = name
            .strip_prefix(HEADER)
            .is_some_and(|header| !header.is_empty());
        if known.contains(&&*name) || is_header && known.contains(&HEADERS) {
            continue;
        }
        let expected = match known {
            [] => "this route takes none".to_owned(),
            [one] => format!("expected {one}"),
            several => format!("expected one of {}", several.join(", ")),
        };
        return Err(format!(
            "unknown parameter {:?}; {expected}",
            shorten(&name, ECHO)
        ));
    }
    Ok(())
}

/// How long a question about a queue waits until the queue is drained; `None`: it does not.
pub(in crate::ingress) fn wait_drained(query: &str) -> Result<Option<Duration>, String> {
    let parameters = parameters(query)?;
    let value = |name| {
        let found = parameters.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    };
    let timeout = value("timeout").map(str::parse::<Time>).transpose();
    let timeout = timeout.map_err(|why| format!("timeout: {why}"))?;
    match (value("wait"), timeout) {
        (Some("drained"), timeout) => Ok(Some(timeout.map_or(DRAINED_WITHIN, |time| time.0))),
        (Some(other), _) => Err(format!(
            "wait is {:?}; expected drained, and the time as timeout=30s",
            shorten(other, ECHO)
        )),
        (None, Some(_)) => Err("timeout is for wait=drained, which is missing".to_owned()),
        (None, None) => Ok(None),
    }
}

/// How long a question waits for an end; `None`: it does not.
pub(in crate::ingress) fn wait(query: &str) -> Result<Option<Duration>, String> {
    for (name, value) in parameters(query)? {
        if name == "wait" && !value.is_empty() {
            let wait: Time = value.parse().map_err(|why| format!("wait: {why}"))?;
            return Ok(Some(wait.0));
        }
    }
    Ok(None)
}

pub(super) fn not_a_number(name: &str, value: &str) -> String {
    format!("{name} {:?} is not a whole number", shorten(value, ECHO))
}

/// Returns the header that a parameter names.
pub(super) fn header(name: &str) -> Option<&str> {
    name.strip_prefix(HEADER)
}

/// Decodes a name or a value. Bytes that are not UTF-8 are refused rather than replaced: they would
/// choose other tasks.
fn text(encoded: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(encoded.len());
    let mut rest = encoded.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let mut ahead = rest.clone();
                let digits =
                    [ahead.next(), ahead.next()].map(|digit| char::from(digit?).to_digit(16));
                match digits {
                    [Some(high), Some(low)] => {
                        bytes.push(u8::try_from(high * 16 + low).unwrap_or_default());
                        rest = ahead;
                    }
                    // As browsers do: a `%` without two hex digits stands for itself.
                    _ => bytes.push(b'%'),
                }
            }
            other => bytes.push(other),
        }
    }
    String::from_utf8(bytes).map_err(|_| {
        format!(
            "the query has {:?}, which is not UTF-8",
            shorten(encoded, ECHO)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded() {
        let read =
            parameters("key=https%3A%2F%2Fa%2F%3Fb+c&e=%c3%a9&&n&p=100%&q=%zz&r=a=b").unwrap();
        let read: Vec<_> = read
            .iter()
            .map(|(name, value)| (&name[..], &value[..]))
            .collect();
        let want = [
            ("key", "https://a/?b c"),
            ("e", "é"),
            ("n", ""),
            ("p", "100%"),
            ("q", "%zz"),
            ("r", "a=b"),
        ];
        assert_eq!(read, want);
        assert_eq!(parameters(""), Ok(Vec::new()));
    }

    #[test]
    fn a_question_about_a_queue_waits_only_for_its_end() {
        for (query, wait) in [
            ("", Ok(None)),
            ("wait=drained", Ok(Some(DRAINED_WITHIN))),
            ("wait=drained&timeout=2s", Ok(Some(Duration::from_secs(2)))),
            (
                "wait=30s",
                Err("wait is \"30s\"; expected drained, and the time as timeout=30s"),
            ),
            (
                "timeout=2s",
                Err("timeout is for wait=drained, which is missing"),
            ),
            (
                "wait=drained&timeout=2",
                Err("timeout: \"2\" is not a duration; write \"250ms\", \"30s\" or \"1h 30m\""),
            ),
        ] {
            assert_eq!(wait_drained(query), wait.map_err(str::to_owned), "{query}");
        }
    }

    #[test]
    fn a_question_waits_for_an_end_as_long_as_it_says() {
        assert_eq!(wait(""), Ok(None));
        assert_eq!(wait("wait=2s"), Ok(Some(Duration::from_secs(2))));
        assert!(wait("wait=2").unwrap_err().starts_with("wait: "));
    }

    #[test]
    fn what_is_wrong_with_a_query_is_named() {
        for (query, known, why) in [
            (
                "queu=q",
                &["queue", "status"][..],
                "unknown parameter \"queu\"; expected one of queue, status",
            ),
            (
                "que=q",
                &["queue"],
                "unknown parameter \"que\"; expected queue",
            ),
            (
                "dry_run=true",
                &[],
                "unknown parameter \"dry_run\"; this route takes none",
            ),
            (
                "header.=x",
                &["queue", HEADERS],
                "unknown parameter \"header.\"; expected one of queue, header.NAME",
            ),
            (
                "header.a=x",
                &["queue"],
                "unknown parameter \"header.a\"; expected queue",
            ),
            (
                "queue=q&queue=r",
                &["queue"],
                "the parameter \"queue\" is given twice",
            ),
            (
                "queue=q&qu%65ue=r",
                &["queue"],
                "the parameter \"queue\" is given twice",
            ),
            (
                "key=%ff",
                &["key"],
                "the query has \"%ff\", which is not UTF-8",
            ),
            (
                "key=%ed%a0%80",
                &["key"],
                "the query has \"%ed%a0%80\", which is not UTF-8",
            ),
        ] {
            assert_eq!(check(query, known), Err(why.to_owned()), "{query}");
        }
        assert_eq!(
            check("queue=q&header.a=1&header.b=2", &["queue", HEADERS]),
            Ok(())
        );
    }
}
