//! Formats errors for people.

use std::error::Error;

/// The error message followed by those of its causes, leaving out causes whose message is already
/// contained.
pub fn in_short(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_that_repeat_are_said_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("{0}")]
        struct Said(&'static str, #[source] Option<Box<Said>>);
        let because = |error, cause| Said(error, Some(Box::new(cause)));
        let error = because(
            "cannot open mysql",
            because("connecting: refused", Said("refused", None)),
        );
        assert_eq!(in_short(&error), "cannot open mysql: connecting: refused");
    }
}
