//! Requests to explain a task.

use super::{Unread, query};
use crate::model::ExplainTask;

/// Reads the request from the query of the URL: `id=…`, or `queue=…&key=…`; and `worker=…`.
pub(in crate::ingress) fn question(text: &str) -> Result<ExplainTask, Unread> {
    let mut question = ExplainTask::default();
    for (name, value) in query::parameters(text).map_err(Unread::Invalid)? {
        match &*name {
            "id" => question.id = value,
            "queue" => question.queue = value,
            "key" => question.key = value.into(),
            "worker" => question.worker = value,
            // The route has refused all other parameters.
            _ => {}
        }
    }
    Ok(question)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_read_from_the_query() {
        let read = question("queue=q&key=https%3A%2F%2Fa%2F%3Fb+c&worker=w").unwrap();
        assert_eq!(
            (&read.queue[..], &read.key[..], &read.worker[..]),
            ("q", &b"https://a/?b c"[..], "w")
        );
        assert_eq!(question("").unwrap(), ExplainTask::default());
        let refused = question("id=1&id=2").unwrap_err().to_string();
        assert_eq!(refused, "the parameter \"id\" is given twice");
    }
}
