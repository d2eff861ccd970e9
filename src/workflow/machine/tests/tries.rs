//! Errors that are caught and tried again.

use super::*;
use crate::workflow::machine::{Event, tries::jitter};

/// A step that dies with a status of 503 until it was tried so often.
fn flaky(deaths: u32) -> impl FnMut(&Step) -> Answer {
    move |step| {
        if step.key.attempt < deaths {
            let type_ = "https://serverlessworkflow.io/spec/1.0.0/errors/communication";
            Answer::dead(json!({ "type": type_, "status": 503 }).to_string())
        } else {
            Answer::result(json!({ "attempt": step.key.attempt }))
        }
    }
}

/// The waits before the retries.
fn waits(ended: &Ended) -> Vec<u64> {
    let wait = |entry: &workflow::machine::Entry| match entry.event {
        Event::TaskRetried { wait, .. } => Some(wait),
        _ => None,
    };
    ended.log.iter().filter_map(wait).collect()
}

fn retrying(retry: &str) -> String {
    format!(
        "
do:
  - a:
      try: [{{ work: {{ call: work }} }}]
      catch:
        errors: {{ with: {{ status: 503 }} }}
        retry: {retry}
        do: [{{ b: {{ set: {{ caught: '${{ $error.status }}', input: '${{ . }}' }} }} }}]
"
    )
}

#[test]
fn waits_grow_as_the_backoff_says() {
    let retry = |backoff: &str| {
        retrying(&format!(
            "{{ delay: PT2S, backoff: {{ {backoff}: {{}} }}, limit: {{ attempt: {{ count: 4 }} }} }}"
        ))
    };
    for (backoff, expected) in [
        ("constant", [2000, 2000, 2000, 2000]),
        ("linear", [2000, 4000, 6000, 8000]),
        ("exponential", [2000, 4000, 8000, 16000]),
    ] {
        let ended = run_with(&retry(backoff), json!({}), flaky(4));
        assert_eq!(*ended.completed(), json!({ "attempt": 4 }));
        assert_eq!(waits(&ended), expected);
        assert_eq!(
            ended.took,
            i64::try_from(expected.iter().sum::<u64>()).unwrap() + 50
        );
        let ended = run_with(&retry(backoff), json!(1), flaky(5));
        assert_eq!(
            *ended.completed(),
            json!({ "caught": 503, "input": 1 }),
            "the count is one of retries; then the error is caught"
        );
        assert_eq!(ended.issued.len(), 5);
        let keys: Vec<_> = ended
            .issued
            .iter()
            .map(|step| step.key.to_string())
            .collect();
        assert_eq!(keys[0], "/do/0/a/try/0/work#0.0");
        assert_eq!(keys[4], "/do/0/a/try/0/work#4.4");
    }
}

#[test]
fn error_without_retry_is_caught_at_once() {
    let text = retrying("{ limit: { attempt: { count: 0 } } }");
    let ended = run_with(&text, json!(1), flaky(9));
    assert_eq!(*ended.completed(), json!({ "caught": 503, "input": 1 }));
    assert_eq!(ended.took, 10);
}

#[test]
fn retry_without_delay_begins_at_once() {
    let text = retrying("{ limit: { attempt: { count: 3 } } }");
    let ended = run_with(&text, json!(1), flaky(3));
    assert_eq!(*ended.completed(), json!({ "attempt": 3 }));
    assert_eq!(ended.took, 40);
}

#[test]
fn retries_end_with_their_duration() {
    let text = retrying("{ delay: PT2S, limit: { duration: PT5S } }");
    let ended = run_with(&text, json!(1), flaky(9));
    assert_eq!(ended.completed()["caught"], 503);
    assert_eq!(waits(&ended), [2000, 2000]);
}

#[test]
fn attempt_that_takes_too_long_is_tried_again() {
    let text = "
do:
  - a:
      try: [{ work: { call: work } }]
      catch:
        retry: { delay: PT1S, limit: { attempt: { count: 2, duration: PT3S } } }
        do: [{ b: { set: { caught: '${ $error }' } } }]
";
    let slow_at_first = |step: &Step| {
        let after = if step.key.attempt < 2 { 60_000 } else { 10 };
        Answer::result(json!(step.key.attempt)).after(after)
    };
    let ended = run_with(text, json!({}), slow_at_first);
    assert_eq!(*ended.completed(), json!(2));
    assert_eq!(ended.took, 8010);
    let never = |_: &Step| Answer::result(json!(0)).after(60_000);
    let ended = run_with(text, json!({}), never);
    assert_eq!(ended.completed()["caught"]["status"], 408);
    assert_eq!(ended.completed()["caught"]["instance"], "/do/0/a");
    assert_eq!(ended.took, 11_000);
}

#[test]
fn jitter_is_added_and_always_the_same() {
    let text = retrying(
        "{ delay: PT2S, jitter: { from: PT1S, to: PT3S }, limit: { attempt: { count: 3 } } }",
    );
    let ended = run_with(&text, json!(1), flaky(9));
    let found = waits(&ended);
    assert_eq!(found.len(), 3);
    assert!(
        found.iter().all(|wait| (3000..=5000).contains(wait)),
        "{found:?}"
    );
    assert_eq!(found, waits(&run_with(&text, json!(1), flaky(9))));
    assert_ne!(found[0], found[1]);
    assert_eq!(jitter("e", "p", 1, 5, 5), 5);
    assert_eq!(jitter("e", "p", 1, 7, 5), 7);
    let all: Vec<_> = (0..100).map(|n| jitter("e", "p", n, 0, 9)).collect();
    assert!((0..=9).all(|number| all.contains(&number)));
}

#[test]
fn error_that_the_filter_rejects_goes_on_up() {
    let text = "
do:
  - outer:
      try:
        - inner:
            try: [{ work: { call: work } }]
            catch: { errors: { with: { status: 404 } }, do: [{ no: { set: { no: 1 } } }] }
      catch:
        as: err
        when: $err.status == 503
        exceptWhen: $err.title == \"Other\"
        do: [{ yes: { set: { at: '${ $err.instance }', title: '${ $err.title }' } } }]
";
    let ended = run_with(text, json!({}), flaky(1));
    assert_eq!(
        *ended.completed(),
        json!({ "at": "/do/0/outer/try/0/inner/try/0/work", "title": "Communication Error" })
    );
    let text = text.replace("Other", "Communication Error");
    let ended = run_with(&text, json!({}), flaky(1));
    assert_eq!(ended.fault().status, 503);
    let text = text.replace("$err.status == 503", "'false'");
    assert_eq!(run_with(&text, json!({}), flaky(1)).fault().status, 503);
}

#[test]
fn types_match_by_name_under_both_namespaces() {
    let run = |type_: &str| {
        let text = format!(
            "
do:
  - a:
      try: [{{ work: {{ call: work }} }}]
      catch: {{ errors: {{ with: {{ type: '{type_}' }} }} }}
"
        );
        run_with(&text, json!({}), flaky(1)).status
    };
    for host in ["open-workflow-specification.org", "serverlessworkflow.io"] {
        for folder in ["spec/1.0.0/errors", "dsl/errors/types", "errors/types"] {
            let type_ = format!("https://{host}/{folder}/communication");
            assert_eq!(run(&type_), Status::Completed);
            let type_ = format!("https://{host}/{folder}/timeout");
            assert_eq!(run(&type_), Status::Faulted);
        }
    }
    assert_eq!(run("https://example.com/communication"), Status::Faulted);
}

#[test]
fn catch_goes_on_where_it_says() {
    let text = "
do:
  - a:
      try: [{ work: { call: work } }]
      catch: { then: failed }
      then: ok
  - ok: { set: { is: ok }, then: end }
  - failed: { set: { is: failed, input: '${ . }' }, then: end }
";
    assert_eq!(
        *run_with(text, json!(1), flaky(0)).completed(),
        json!({ "is": "ok" })
    );
    assert_eq!(
        *run_with(text, json!(1), flaky(1)).completed(),
        json!({ "is": "failed", "input": 1 }),
        "without `do`, the input of the try is its output"
    );
}

#[test]
fn error_in_the_handler_is_not_caught_by_it() {
    let text = "
do:
  - a:
      try: [{ work: { call: work } }]
      catch:
        do: [{ again: { raise: { error: { type: https://example.com/x, status: 400 } } } }]
";
    let ended = run_with(text, json!(1), flaky(1));
    assert_eq!(
        ended.fault().instance.as_deref(),
        Some("/do/0/a/catch/do/0/again")
    );
}

#[test]
fn retry_conditions_decide() {
    let text = retrying("{ when: $error.status == 500, limit: { attempt: { count: 3 } } }");
    assert_eq!(
        run_with(&text, json!(1), flaky(1)).completed()["caught"],
        503
    );
    let text = retrying("{ exceptWhen: $error.status == 503, limit: { attempt: { count: 3 } } }");
    assert_eq!(
        run_with(&text, json!(1), flaky(1)).completed()["caught"],
        503
    );
    let text = retrying("{ when: $error.status == 503, limit: { attempt: { count: 3 } } }");
    assert_eq!(
        run_with(&text, json!(1), flaky(1)).completed()["attempt"],
        1
    );
}

#[test]
fn retry_begins_with_the_input_of_the_try() {
    let text = "
do:
  - a:
      try:
        - count: { set: { n: '${ .n + 1 }' } }
        - work: { call: work }
      catch: { retry: { limit: { attempt: { count: 3 } } } }
";
    let ended = run_with(text, json!({ "n": 0 }), flaky(2));
    let inputs: Vec<_> = ended
        .issued
        .iter()
        .map(|step| &step.payload["input"]["n"])
        .collect();
    assert_eq!(inputs, [1, 1, 1]);
}
