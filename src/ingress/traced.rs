//! The trace context of a request: `traceparent`, a header of HTTP and metadata of gRPC.

use axum::http::HeaderMap;

use crate::model::{NewTask, is_traceparent};

const TRACEPARENT: &str = "traceparent";

/// Returns the caller's context. W3C says to ignore an invalid one.
pub(super) fn caller_context(headers: &HeaderMap) -> Option<String> {
    let mut given = headers.get_all(TRACEPARENT).iter();
    let (first, second) = (given.next(), given.next());
    let text = first.filter(|_| second.is_none())?.to_str().ok()?.trim();
    // A task accepts none that is longer.
    (text.len() <= 256 && is_traceparent(text)).then(|| text.to_owned())
}

/// Gives the caller's context to the tasks that have none of their own.
pub(super) fn adopt(tasks: &mut [Result<NewTask, String>], context: Option<&str>) {
    let Some(context) = context else { return };
    for task in tasks
        .iter_mut()
        .flatten()
        .filter(|task| task.traceparent.is_empty())
    {
        context.clone_into(&mut task.traceparent);
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    const CONTEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_valid_context_is_for_tasks_without_their_own() {
        let headers = HeaderMap::from_iter([(
            TRACEPARENT.parse().unwrap(),
            HeaderValue::from_static(CONTEXT),
        )]);
        let context = caller_context(&headers);
        let own = NewTask {
            traceparent: "own".into(),
            ..Default::default()
        };
        let mut tasks = [Ok(NewTask::default()), Ok(own), Err("unreadable".into())];
        adopt(&mut tasks, context.as_deref());
        let traces: Vec<_> = tasks
            .iter()
            .flatten()
            .map(|task| task.traceparent.as_str())
            .collect();
        assert_eq!(traces, [CONTEXT, "own"]);
    }

    #[test]
    fn a_context_that_is_not_valid_or_given_twice_is_none() {
        let mut headers = HeaderMap::new();
        for wrong in ["", "x", "00-0-0-0", "\u{e9}"] {
            headers.insert(
                TRACEPARENT,
                HeaderValue::from_bytes(wrong.as_bytes()).unwrap(),
            );
            assert_eq!(caller_context(&headers), None, "{wrong:?}");
        }
        headers.insert(TRACEPARENT, HeaderValue::from_static(CONTEXT));
        headers.append(TRACEPARENT, HeaderValue::from_static(CONTEXT));
        assert_eq!(caller_context(&headers), None);
    }
}
