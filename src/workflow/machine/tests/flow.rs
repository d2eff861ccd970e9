//! Tasks, and where the flow goes after them.

use super::*;

const COLORS: &str = r#"
do:
  - first: { set: { seen: '${ .seen + ["first"] }' } }
  - second: { set: { seen: '${ .seen + ["second"] }' } }
"#;

#[test]
fn tasks_run_in_order_and_set_replaces_the_value() {
    let ended = run(COLORS, json!({ "other": 1 }));
    assert_eq!(*ended.completed(), json!({ "seen": ["first", "second"] }));
    assert_eq!(ended.calls, 1, "tasks that do not wait are one append");
    assert_eq!(
        ended.kinds(),
        [
            "started",
            "task_started",
            "task_completed",
            "task_started",
            "task_completed",
            "completed"
        ]
    );
}

#[test]
fn then_jumps_exits_and_ends() {
    let text = r#"
do:
  - a: { set: { seen: [a] }, then: c }
  - b: { set: { seen: '${ .seen + ["b"] }' }, then: outer }
  - c: { set: { seen: '${ .seen + ["c"] }' }, then: b }
  - outer:
      do:
        - d: { set: { seen: '${ .seen + ["d"] }' }, then: exit }
        - skipped: { raise: { error: { type: https://example.com/no, status: 400 } } }
  - last:
      do:
        - e: { set: { seen: '${ .seen + ["e"] }' }, then: end }
        - skipped: { raise: { error: { type: https://example.com/no, status: 400 } } }
      output: { as: '. + { as: true }' }
  - never: { set: { seen: [] } }
"#;
    let ended = run(text, json!({}));
    assert_eq!(
        *ended.completed(),
        json!({ "seen": ["a", "c", "b", "d", "e"], "as": true }),
        "the tasks around the end still make their outputs"
    );
}

#[test]
fn false_condition_skips_the_task_and_its_then() {
    let text = r#"
do:
  - a: { if: '.n > 1', set: { n: 0 }, then: end }
  - b: { if: '${ .n == 1 }', set: { n: '${ .n + 1 }' } }
"#;
    let ended = run(text, json!({ "n": 1 }));
    assert_eq!(*ended.completed(), json!({ "n": 2 }));
    assert_eq!(ended.kinds()[1], "task_skipped");
    assert_eq!(run(text, json!({ "n": 5 })).started(), ["a"]);
    assert_eq!(*run(text, json!({ "n": 0 })).completed(), json!({ "n": 0 }));
}

#[test]
fn switch_takes_the_first_case_that_is_true() {
    let text = r#"
do:
  - choose:
      switch:
        - small: { when: .n < 10, then: small }
        - medium: { when: .n < 100, then: medium }
        - none: { when: .n == null, then: exit }
      then: end
  - small: { set: { is: small }, then: end }
  - medium: { set: { is: medium }, then: end }
"#;
    assert_eq!(
        *run(text, json!({ "n": 1 })).completed(),
        json!({ "is": "small" })
    );
    assert_eq!(
        *run(text, json!({ "n": 50 })).completed(),
        json!({ "is": "medium" })
    );
    assert_eq!(
        *run(text, json!({ "n": 500 })).completed(),
        json!({ "n": 500 }),
        "no match goes on by the task's own directive"
    );
    let text = text.replace("when: .n == null, ", "");
    assert_eq!(
        *run(&text, json!({ "n": 500 })).completed(),
        json!({ "n": 500 })
    );
}

#[test]
fn for_passes_each_output_to_the_next_round() {
    let text = r#"
do:
  - loop:
      for: { each: pet, at: n, in: .pets }
      while: .sum < 10
      do:
        - add: { set: { sum: '${ .sum + $pet }', pets: [], last: '${ $n }' } }
      output: { as: '. + { rounds: (.last + 1) }' }
"#;
    let input = json!({ "pets": [1, 4, 7, 100], "sum": 0 });
    assert_eq!(
        *run(text, input).completed(),
        json!({ "sum": 12, "pets": [], "last": 2, "rounds": 3 }),
        "`in` is evaluated once, `while` before each round"
    );
    let ended = run(text, json!({ "pets": [], "sum": 1, "last": -1 }));
    assert_eq!(
        *ended.completed(),
        json!({ "pets": [], "sum": 1, "last": -1, "rounds": 0 })
    );
    let ended = run(text, json!({ "pets": {}, "sum": 1 }));
    assert_eq!(kind(ended.fault()), "expression");
    assert_eq!(ended.fault().instance.as_deref(), Some("/do/0/loop"));
}

#[test]
fn nested_loops_and_exit_of_a_round() {
    let text = r#"
do:
  - outer:
      for: { each: x, in: '[1, 2]' }
      do:
        - inner:
            for: { each: y, in: '[10, 20, 30]', at: i }
            do:
              - odd:
                  switch:
                    - skip: { when: $i == 1, then: exit }
              - add: { set: { got: '${ .got + [$x + $y + $index] }' } }
"#;
    let ended = run(text, json!({ "got": [] }));
    assert_eq!(*ended.completed(), json!({ "got": [11, 31, 13, 33] }));
    let text = text.replace("then: exit", "then: end");
    let ended = run(&text, json!({ "got": [] }));
    assert_eq!(
        *ended.completed(),
        json!({ "got": [11] }),
        "end leaves all loops"
    );
}

#[test]
fn inline_array_is_looped_over() {
    let text = r#"
do:
  - loop:
      for: { each: color, in: [{ name: red }, { name: blue }] }
      do:
        - add: { set: { names: '${ .names + [$color.name] }' } }
"#;
    let ended = run(text, json!({}));
    assert_eq!(*ended.completed(), json!({ "names": ["red", "blue"] }));
}

#[test]
fn fork_gives_outputs_in_declared_order() {
    let text = r#"
do:
  - both:
      fork:
        branches:
          - slow: { call: work, with: { after: 100, gives: 1 } }
          - fast: { call: work, with: { after: 10, gives: 2 } }
          - now: { set: '${ .n }' }
"#;
    let ended = run_with(text, json!({ "n": 3 }), slow);
    assert_eq!(*ended.completed(), json!([1, 2, 3]));
    assert_eq!(ended.took, 100);
    assert_eq!(
        ended.issued[0].key.to_string(),
        "/do/0/both/fork/branches/0/slow#0.0"
    );
}

#[test]
fn fork_that_competes_takes_the_first_success() {
    let text = r#"
do:
  - race:
      fork:
        compete: true
        branches:
          - fails: { call: work, with: { after: 5, dies: no } }
          - slow: { do: [{ inner: { call: work, with: { after: 50, gives: 1 } } }] }
          - wins: { call: work, with: { after: 20, gives: 2 } }
          - waits: { wait: { seconds: 9 } }
"#;
    let ended = run_with(text, json!({}), slow);
    assert_eq!(*ended.completed(), json!(2));
    assert_eq!(ended.took, 20);
    let kinds = ended.kinds();
    let cancelled = kinds
        .iter()
        .filter(|kind| *kind == "task_cancelled")
        .count();
    assert_eq!(cancelled, 2);
}

#[test]
fn fork_that_competes_fails_if_all_branches_fail() {
    let text = r#"
do:
  - race:
      fork:
        compete: true
        branches:
          - first: { call: work, with: { after: 50, dies: first } }
          - second: { call: work, with: { after: 20, dies: second } }
"#;
    let ended = run_with(text, json!({}), slow);
    assert_eq!(ended.fault().detail.as_deref(), Some("first"));
    assert_eq!(ended.took, 50);
}

#[test]
fn failing_branch_cancels_the_others() {
    let text = r#"
do:
  - both:
      fork:
        branches:
          - slow: { call: work, with: { after: 5000, gives: 1 } }
          - fails: { call: work, with: { after: 20, dies: no } }
"#;
    let ended = run_with(text, json!({}), slow);
    assert_eq!(
        ended.fault().instance.as_deref(),
        Some("/do/0/both/fork/branches/1/fails")
    );
    assert_eq!(ended.took, 20);
}

#[test]
fn end_in_a_branch_ends_the_workflow() {
    let text = r#"
do:
  - both:
      fork:
        branches:
          - slow: { call: work, with: { after: 5000, gives: 1 } }
          - ends: { call: work, with: { after: 20, gives: 7 }, then: end }
  - never: { set: { never: true } }
"#;
    let ended = run_with(text, json!({}), slow);
    assert_eq!(*ended.completed(), json!(7));
    assert_eq!(ended.took, 20);
}

#[test]
fn forks_nest_in_loops_and_forks() {
    let text = r#"
do:
  - loop:
      for: { each: x, in: '[1, 2]' }
      do:
        - outer:
            fork:
              branches:
                - left:
                    fork:
                      branches:
                        - a: { call: work, with: { after: 30, gives: '${ $x }' } }
                        - b: { call: work, with: { after: 20, gives: '${ $x * 10 }' } }
                - right: { call: work, with: { after: 10, gives: '${ . }' } }
"#;
    let ended = run_with(text, json!(0), slow);
    let first = json!([[1, 10], 0]);
    assert_eq!(*ended.completed(), json!([[2, 20], first]));
    let keys: Vec<_> = ended.issued.iter().map(|step| step.key.round).collect();
    assert_eq!(keys, [0, 0, 0, 1, 1, 1], "each round has steps of its own");
}

#[test]
fn raise_gives_its_error_with_the_place() {
    let text = r#"
use:
  errors:
    broken: { type: https://example.com/errors/broken, status: 422, title: 'Item ${ .n } is broken' }
do:
  - outer:
      do:
        - check: { set: { n: 7 } }
        - a/b~c: { raise: { error: broken } }
"#;
    let ended = run(text, json!({}));
    assert_eq!(
        ended.fault().to_value(),
        json!({
            "type": "https://example.com/errors/broken",
            "status": 422,
            "title": "Item 7 is broken",
            "instance": "/do/0/outer/do/1/a~1b~0c",
        })
    );
}

#[test]
fn emit_completes_the_event() {
    let text = r#"
do:
  - say: { emit: { event: { with: { type: greeted, data: { to: '${ .name }' } } } } }
"#;
    let ended = run(text, json!({ "name": "Ada" }));
    let event = ended.completed();
    assert_eq!(event["specversion"], "1.0");
    assert_eq!(event["source"], "/test/test/1.0.0");
    assert_eq!(event["data"], json!({ "to": "Ada" }));
    assert_eq!(event["time"], "2023-11-14T22:13:20Z");
    assert_eq!(event["id"].as_str().unwrap().len(), 36);
    let again = run(text, json!({ "name": "Ada" }));
    assert_eq!(again.completed()["id"], event["id"]);
    assert!(ended.kinds().contains(&"emitted".to_owned()));
}

#[test]
fn cancel_ends_steps_and_timers() {
    let text = r#"
do:
  - both:
      fork:
        branches:
          - step: { call: work, with: { after: 5000 } }
          - wait: { wait: PT1H }
"#;
    let mut fake = fake(text, slow);
    fake.cancel_at = Some(fake::START + 100);
    let ended = fake.run(json!({}));
    assert_eq!(ended.status, Status::Cancelled);
    assert_eq!(ended.took, 100);
    assert_eq!(ended.kinds().last().unwrap(), "cancelled");
}
