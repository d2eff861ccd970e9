//! Dead letters: converts messages of the service `Operator`.

use super::{
    pb,
    time::{timestamp, unix_ms},
};
use crate::model::{
    ChangeLetters, ChosenLetters, LetterCursor, LetterFilter, LetterId, LetterKind, LetterPage,
    LetterPages, LetterReason, LetterReasons, LettersChanged, QueueName, StoredLetter,
};

fn filter(filter: pb::LetterFilter) -> Result<LetterFilter, String> {
    let queue = Some(&filter.queue).filter(|queue| !queue.is_empty());
    let kind = match filter.kind {
        0 => None,
        number => Some(
            LetterKind::from_number(number.into())
                .ok_or_else(|| format!("kind {number} is unknown"))?,
        ),
    };
    Ok(LetterFilter {
        queue: queue
            .map(|queue| QueueName::new(queue))
            .transpose()
            .map_err(|error| error.to_string())?,
        kind,
        since_unix_ms: filter.since.map(unix_ms),
        until_unix_ms: filter.until.map(unix_ms),
        reason: filter.reason,
    })
}

fn cursor(text: &str) -> Result<Option<LetterCursor>, String> {
    if text.is_empty() {
        Ok(None)
    } else {
        text.parse().map(Some)
    }
}

fn cursor_text(cursor: Option<LetterCursor>) -> String {
    cursor.map(|cursor| cursor.to_string()).unwrap_or_default()
}

impl TryFrom<pb::ListDeadLettersRequest> for LetterPages {
    type Error = String;

    fn try_from(request: pb::ListDeadLettersRequest) -> Result<Self, String> {
        let filter = filter(request.filter.unwrap_or_default())?;
        Ok(Self {
            filter,
            limit: request.limit,
            after: cursor(&request.cursor)?,
        })
    }
}

impl TryFrom<pb::CountDeadLettersRequest> for LetterPages {
    type Error = String;

    fn try_from(request: pb::CountDeadLettersRequest) -> Result<Self, String> {
        Ok(Self {
            filter: filter(request.filter.unwrap_or_default())?,
            ..Self::default()
        })
    }
}

impl From<LetterReasons> for pb::CountDeadLettersResponse {
    fn from(reasons: LetterReasons) -> Self {
        let reason = |reason: LetterReason| pb::LetterReason {
            reason: reason.reason,
            prefix: reason.prefix,
            count: reason.count,
            first_at: Some(timestamp(reason.first_unix_ms)),
            last_at: Some(timestamp(reason.last_unix_ms)),
        };
        Self {
            reasons: reasons.reasons.into_iter().map(reason).collect(),
            looked_at: reasons.looked_at,
            at_least: reasons.at_least,
        }
    }
}

impl TryFrom<pb::ChangeDeadLettersRequest> for ChangeLetters {
    type Error = String;

    fn try_from(request: pb::ChangeDeadLettersRequest) -> Result<Self, String> {
        let pb::ChangeDeadLettersRequest {
            ids,
            filter: by,
            dry_run,
            yes,
            limit,
            cursor: after,
        } = request;
        let pages = by.map(|by| {
            Ok::<_, String>(LetterPages {
                filter: filter(by)?,
                limit,
                after: cursor(&after)?,
            })
        });
        Ok(Self {
            chosen: ChosenLetters::new(ids, pages.transpose()?)?,
            dry_run,
            yes,
        })
    }
}

impl From<LetterPage> for pb::ListDeadLettersResponse {
    fn from(page: LetterPage) -> Self {
        Self {
            letters: page.letters.into_iter().map(Into::into).collect(),
            cursor: cursor_text(page.next),
        }
    }
}

impl From<StoredLetter> for pb::Letter {
    fn from(StoredLetter { id, kind, letter }: StoredLetter) -> Self {
        let attempt = |failure: crate::model::Failure| pb::LetterAttempt {
            at: Some(timestamp(failure.at_unix_ms)),
            worker: failure.worker,
            error: failure.reason,
        };
        Self {
            id: id.to_string(),
            kind: kind as i32,
            queue: letter.queue,
            reason: letter.reason,
            at: Some(timestamp(letter.at_unix_ms)),
            attempts: letter.attempts,
            history: letter.history.into_iter().map(attempt).collect(),
            task: letter.task.map(Into::into),
            parent_id: letter
                .parent_id
                .map(|id| id.to_string())
                .unwrap_or_default(),
            topic: letter.topic,
            partition: letter.partition,
            offset: letter.offset,
            value: letter.value,
        }
    }
}

impl From<LettersChanged> for pb::ChangeDeadLettersResponse {
    fn from(changed: LettersChanged) -> Self {
        let failure = |(id, error): (LetterId, String)| pb::LetterFailure {
            id: id.to_string(),
            error,
        };
        Self {
            matched: changed.matched,
            changed: changed.changed,
            failed: changed.failed.into_iter().map(failure).collect(),
            cursor: cursor_text(changed.next),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kinds_of_the_model_are_those_of_the_message() {
        for kind in LetterKind::ALL {
            let name = pb::LetterKind::try_from(kind as i32).unwrap().as_str_name();
            assert_eq!(
                name,
                format!("LETTER_KIND_{}", kind.as_str().to_uppercase())
            );
        }
    }

    #[test]
    fn a_wrong_request_is_named() {
        let change =
            |request: pb::ChangeDeadLettersRequest| ChangeLetters::try_from(request).unwrap_err();
        let filter = |filter: pb::LetterFilter| {
            change(pb::ChangeDeadLettersRequest {
                filter: Some(filter),
                ..Default::default()
            })
        };
        assert_eq!(
            filter(pb::LetterFilter {
                kind: 9,
                ..Default::default()
            }),
            "kind 9 is unknown"
        );
        assert!(
            filter(pb::LetterFilter {
                queue: "a b".into(),
                ..Default::default()
            })
            .contains("contains ' '")
        );
        assert_eq!(
            change(Default::default()),
            "name letters by ids or by a filter"
        );
        let wrong_id = pb::ChangeDeadLettersRequest {
            ids: vec!["x".into()],
            ..Default::default()
        };
        assert_eq!(change(wrong_id), "ids[0]: \"x\" is not a letter's id");
    }
}
