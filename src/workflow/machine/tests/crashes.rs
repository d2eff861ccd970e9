//! Replay: the log gives the state, and a process that dies after any append changes nothing.

use super::*;
use crate::workflow::machine::{BadHistory, Entry, Event, Input, Limits, Next, State, step};

/// Uses every kind of event but those of cancelled executions.
const EVERYTHING: &str = r#"
timeout: { after: P1D }
input: { from: '. + { more: null }' }
do:
  - skipped: { if: 'false', set: { never: true } }
  - loop:
      for: { each: x, in: '[1, null, 3]' }
      do:
        - add: { set: { sum: '${ .sum + $x }' }, export: { as: .sum } }
  - race:
      fork:
        compete: true
        branches:
          - slow: { call: work, with: { after: 500 } }
          - fast: { call: work, with: { after: 5, gives: '${ . }' } }
  - both:
      timeout: { after: PT1H }
      fork:
        branches:
          - waits: { wait: PT1S }
          - calls: { call: double, with: null }
  - again:
      try: [{ fails: { call: work, with: { dies: no } } }]
      catch:
        retry: { delay: PT1S, limit: { attempt: { count: 2, duration: PT1M } } }
        do: [{ say: { emit: { event: { with: { type: failed, data: '${ $error.detail }' } } } } }]
  - last: { set: null, output: { as: '{ null: null, context: $context }' } }
use:
  functions:
    double: { set: '${ . }' }
"#;

fn everything() -> Fake {
    let text = EVERYTHING
        .replace("with: null", "with: { n: null }")
        .replace("set: null", "set: '${ null }'");
    fake(&text, slow)
}

#[test]
fn crash_after_every_append_changes_nothing() {
    let whole = everything().run(json!({ "sum": 0 }));
    whole.completed();
    let mut crashing = everything();
    crashing.crashes = true;
    let crashed = crashing.run(json!({ "sum": 0 }));
    assert_eq!(crashed.log, whole.log);
    assert_eq!(crashed.issued, whole.issued);
    // The same in the smallest appends.
    let mut crashing = everything();
    crashing.crashes = true;
    crashing.limits.batch_events = 1;
    let crashed = crashing.run(json!({ "sum": 0 }));
    assert_eq!(crashed.completed(), whole.completed());
    assert!(crashed.calls > whole.calls);
}

#[test]
fn entries_are_the_same_in_json_and_msgpack() {
    let ended = everything().run(json!({ "sum": 0 }));
    let mut kinds = ended.kinds();
    kinds.sort();
    kinds.dedup();
    assert_eq!(
        kinds.len(),
        17,
        "all but the ends of other executions: {kinds:?}"
    );
    for entry in &ended.log {
        let json = serde_json::to_vec(entry).unwrap();
        assert_eq!(serde_json::from_slice::<Entry>(&json).unwrap(), *entry);
        let packed = rmp_serde::to_vec_named(entry).unwrap();
        assert_eq!(rmp_serde::from_slice::<Entry>(&packed).unwrap(), *entry);
    }
}

#[test]
fn names_of_events_are_stable() {
    let completed = Event::TaskCompleted {
        path: "/do/0/a".to_owned(),
        output: Some(Value::Null),
        context: None,
        next: Next::Task("/do/1/b".to_owned()),
    };
    assert_eq!(
        serde_json::to_value(Entry {
            at: 5,
            event: completed
        })
        .unwrap(),
        json!({ "at": 5, "kind": "task_completed", "path": "/do/0/a", "output": null, "next": { "task": "/do/1/b" } })
    );
    assert_eq!(
        serde_json::to_value(Entry {
            at: 5,
            event: Event::Cancelled
        })
        .unwrap(),
        json!({ "at": 5, "kind": "cancelled" })
    );
}

#[test]
fn every_prefix_of_a_log_folds() {
    let ended = everything().run(json!({ "sum": 0 }));
    let mut state = State::new();
    for (number, entry) in ended.log.iter().enumerate() {
        assert_eq!(State::fold(&ended.log[..number]).unwrap(), state);
        state.apply(entry).unwrap();
    }
    assert_eq!(state.output(), Some(&ended.output));
    assert!(state.status().is_final());
}

#[test]
fn history_that_does_not_fit_is_refused() {
    let ended = everything().run(json!({ "sum": 0 }));
    assert_eq!(
        State::fold(&ended.log[1..]),
        Err(BadHistory {
            event: 1,
            reason: "the execution is Pending".to_owned()
        })
    );
    let mut log = ended.log;
    log.push(log[1].clone());
    let bad = State::fold(&log).unwrap_err();
    assert_eq!(bad.reason, "the execution is Completed");
    let removed = log
        .iter()
        .position(|entry| matches!(entry.event, Event::TaskStarted { .. }));
    log.remove(removed.unwrap());
    assert!(
        State::fold(&log)
            .unwrap_err()
            .reason
            .contains("does not run")
    );
}

#[test]
fn inputs_that_come_too_late_change_nothing() {
    let text = "do: [{ a: { call: work } }, { b: { wait: PT1S } }]";
    let program = program(&definition(text), &Default::default());
    let limits = Limits::default();
    let mut state = State::new();
    let mut take = |input: Input| step(&program, &limits, &mut state, input, 5).unwrap();
    assert_eq!(
        take(Input::Cancel),
        Default::default(),
        "it has not started"
    );
    let start = Input::Start {
        execution: "e".to_owned(),
        input: json!({}),
    };
    assert_eq!(take(start.clone()).entries.len(), 3);
    assert_eq!(take(start), Default::default());
    let mut key = workflow::machine::StepKey {
        path: "/do/0/a".to_owned(),
        round: 1,
        attempt: 0,
    };
    let end = || workflow::machine::StepEnd::Cancelled;
    let ended = |key: &workflow::machine::StepKey| Input::StepEnded {
        key: key.clone(),
        end: end(),
    };
    assert_eq!(take(ended(&key)), Default::default(), "another round");
    key.round = 0;
    assert_eq!(take(Input::TimerFired { timer: 0 }), Default::default());
    assert_eq!(take(Input::Resume), Default::default());
    assert_eq!(
        take(ended(&key)).commands,
        [workflow::machine::Command::Finish(Status::Faulted)]
    );
    assert_eq!(take(ended(&key)), Default::default());
    assert_eq!(take(Input::Cancel), Default::default());
}

#[test]
fn state_says_what_it_waits_for() {
    let text = "do: [{ a: { call: work, timeout: { after: PT1S } } }]";
    let program = program(&definition(text), &Default::default());
    let mut state = State::new();
    let start = Input::Start {
        execution: "e".to_owned(),
        input: json!({}),
    };
    step(&program, &Limits::default(), &mut state, start, 5).unwrap();
    assert_eq!(state.status(), Status::Waiting);
    let waits: Vec<_> = state
        .waits()
        .into_iter()
        .map(|wait| (wait.path, wait.since, wait.until))
        .collect();
    assert_eq!(
        waits,
        [
            ("/do/0/a".to_owned(), 5, None),
            ("/do/0/a".to_owned(), 5, Some(1005))
        ]
    );
    assert_eq!(state.program(), program.hash);
}
