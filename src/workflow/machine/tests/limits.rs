//! Executions that go beyond a limit.

use super::*;

fn fault(text: &str, input: Value, change: impl FnOnce(&mut Fake)) -> String {
    let mut fake = fake(text, slow);
    change(&mut fake);
    let ended = fake.run(input);
    assert_eq!(kind(ended.fault()), "runtime");
    assert_eq!(ended.kinds().last().unwrap(), "faulted");
    ended.fault().detail.clone().unwrap()
}

const ENDLESS: &str = "
do:
  - a:
      try:
        - a: { set: { n: '${ .n + 1 }' } }
        - b: { set: { n: '${ .n }' }, then: a }
      catch: { do: [{ never: { set: { caught: true } } }] }
";

#[test]
fn endless_loop_without_waits_faults_and_is_not_caught() {
    let says = fault(ENDLESS, json!({ "n": 0 }), |fake| fake.limits.steps = 100);
    assert_eq!(says, "more than 100 tasks ran without a wait");
    let says = fault(ENDLESS, json!({ "n": 0 }), |fake| {
        fake.limits.batch_events = 7
    });
    assert_eq!(says, "more than 10000 tasks ran without a wait");
}

#[test]
fn retries_without_waits_are_counted() {
    let text = "
do:
  - a:
      try: [{ a: { if: '.x.y', set: { n: 1 } } }]
      catch: { retry: {} }
";
    let says = fault(text, json!({ "x": 1 }), |fake| fake.limits.steps = 100);
    assert_eq!(says, "more than 100 tasks ran without a wait");
}

#[test]
fn loop_with_waits_ends_at_the_events() {
    let text = "
do:
  - a: { call: work, with: { after: 5 } }
  - b: { set: { n: 1 }, then: a }
";
    let mut fake = fake(text, slow);
    fake.limits.events = 1_000;
    let ended = fake.run(json!({}));
    assert_eq!(
        ended.fault().detail.as_deref(),
        Some("its history has more than 1000 events")
    );
    assert_eq!(ended.log.len(), 1_000);
}

#[test]
fn large_state_faults() {
    let text = "
do:
  - a: { set: { text: '${ .text + .text }' } }
  - b: { wait: PT1S, then: a }
";
    let says = fault(text, json!({ "text": "0123456789" }), |fake| {
        fake.limits.state = 100_000;
    });
    assert_eq!(says, "its state has more than 100000 bytes");
}

#[test]
fn value_that_tasks_share_counts_once() {
    let text = "do: [{ a: { do: [{ b: { do: [{ c: { wait: PT1S } }] } }] } }]";
    let mut fake = fake(text, slow);
    fake.limits.state = 1_100;
    let ended = fake.run(json!("x".repeat(1_000)));
    ended.completed();
}

#[test]
fn deep_tasks_fault() {
    let mut text = "{ a: { set: { n: 1 } } }".to_owned();
    for _ in 0..9 {
        text = format!("{{ a: {{ do: [{text}] }} }}");
    }
    let text = format!("do: [{text}]");
    let says = fault(&text, json!({}), |fake| fake.limits.depth = 9);
    assert_eq!(says, "its tasks are more than 9 deep");
    let mut fake = fake(&text, slow);
    fake.limits.depth = 10;
    fake.run(json!({})).completed();
}

#[test]
fn many_branches_run() {
    let branches: Vec<_> = (0..300)
        .map(|n| format!("{{ b{n}: {{ call: work, with: {{ gives: {n} }} }} }}"))
        .collect();
    let text = format!(
        "do: [{{ a: {{ fork: {{ branches: [{}] }} }} }}]",
        branches.join(", ")
    );
    let ended = run_with(&text, json!({}), slow);
    let expected: Vec<_> = (0..300).collect();
    assert_eq!(*ended.completed(), json!(expected));
}

#[test]
fn costly_expressions_of_one_task_fault_and_are_not_caught() {
    let costly = "'(reduce range(900) as $i (0; . + 1)) < 0'";
    let cases: Vec<_> = (0..600)
        .map(|n| format!("{{ c{n}: {{ when: {costly}, then: exit }} }}"))
        .collect();
    let text = format!(
        "do: [{{ a: {{ try: [{{ b: {{ switch: [{}] }} }}], catch: {{ do: [] }} }} }}]",
        cases.join(", ")
    );
    let says = fault(&text, json!({}), |fake| {
        fake.limits.expressions = Bounds::new(2_000, 1 << 20, 1 << 20);
    });
    assert_eq!(
        says,
        "the expressions of one task take too many steps (expr_fuel)"
    );
}

#[test]
fn costly_tasks_run_in_several_calls() {
    let text = "
do:
  - a: { if: '(reduce range(900) as $i (0; . + 1)) < 0', set: { n: 0 } }
  - b: { set: { n: '${ .n + 1 }' } }
  - c: { switch: [{ again: { when: .n < 20, then: a } }] }
";
    let mut fake = fake(text, slow);
    fake.limits.batch_work = 1;
    let ended = fake.run(json!({ "n": 0 }));
    assert_eq!(ended.completed(), &json!({ "n": 20 }));
}

#[test]
fn history_of_many_bytes_faults() {
    let text = "
do:
  - a: { set: { text: '${ \"x\" * 10000 }' } }
  - b: { wait: PT1S, then: a }
";
    let says = fault(text, json!({}), |fake| fake.limits.history = 100_000);
    assert_eq!(says, "its history has more than 100000 bytes");
}

#[test]
fn texts_of_errors_count() {
    let text = "
do:
  - a:
      try:
        - b: { raise: { error: { type: 'https://a', status: 400, detail: '${ \"x\" * 10000 }' } } }
      catch: { do: [{ c: { wait: PT1S, then: exit } }] }
      then: a
";
    let says = fault(text, json!({}), |fake| fake.limits.history = 100_000);
    assert_eq!(says, "its history has more than 100000 bytes");
    let says = fault(text, json!({}), |fake| fake.limits.state = 5_000);
    assert_eq!(says, "its state has more than 5000 bytes");
}

#[test]
fn errors_of_branches_count() {
    let branch = |n: usize| {
        let error = "{ type: 'https://a', status: 400, detail: '${ \"x\" * 1000 }' }";
        format!("{{ b{n}: {{ raise: {{ error: {error} }} }} }}")
    };
    let branches: Vec<_> = (0..30).map(branch).collect();
    let text = format!(
        "do: [{{ a: {{ fork: {{ compete: true, branches: [{}] }} }} }}]",
        branches.join(", ")
    );
    let says = fault(&text, json!({}), |fake| fake.limits.state = 20_000);
    assert_eq!(says, "its state has more than 20000 bytes");
}

#[test]
fn deep_values_are_never_in_a_log() {
    let deep = |levels| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    // A text that is too deep to be read again stays a text.
    for (levels, is_text) in [(120, false), (121, true), (127, true)] {
        let result = StepEnd::result(deep(levels).as_bytes());
        assert_eq!(result.is_string(), is_text, "{levels}");
    }
    let text = "
do:
  - a: { call: work, with: {}, metadata: { taskd: { agree: all } } }
";
    let fake = fake(text, move |_| {
        Answer::result(StepEnd::result(deep(120).as_bytes()))
    });
    let ended = fake.run(json!({}));
    assert_eq!(
        ended.fault().detail.as_deref(),
        Some("a value has more than 120 levels")
    );
    let log = serde_json::to_string(&ended.log).unwrap();
    assert!(serde_json::from_str::<Vec<Entry>>(&log).is_ok());
}

#[test]
fn deep_input_of_a_workflow_is_an_error_of_its_start() {
    let mut from = "'${ . }'".to_owned();
    for _ in 0..30 {
        from = format!("{{ a: {from} }}");
    }
    let text = format!("input: {{ from: {from} }}\ndo: [{{ a: {{ set: {{ n: 1 }} }} }}]");
    let mut input = json!(1);
    for _ in 0..100 {
        input = json!([input]);
    }
    let mut deep = input.clone();
    for _ in 0..21 {
        deep = json!([deep]);
    }
    for (text, input) in [(text.as_str(), input), ("do: []", deep)] {
        let ended = fake(text, slow).run(input);
        assert_eq!(ended.kinds(), ["started", "faulted"]);
        assert_eq!(
            ended.fault().detail.as_deref(),
            Some("a value has more than 120 levels")
        );
    }
}
