//! Waits and timeouts.

use super::*;

#[test]
fn wait_takes_its_time_and_passes_its_input() {
    let text = r#"
do:
  - a: { wait: { minutes: 1, seconds: 1 } }
  - b: { wait: PT0.5S }
  - c: { wait: '${ .until }' }
  - d: { wait: PT0S }
"#;
    let ended = run(text, json!({ "until": "PT2S" }));
    assert_eq!(*ended.completed(), json!({ "until": "PT2S" }));
    assert_eq!(ended.took, 63_500);
    assert_eq!(ended.calls, 4, "a wait for nothing is none");
    let ended = run(text, json!({ "until": "soon" }));
    assert_eq!(kind(ended.fault()), "expression");
}

#[test]
fn task_that_takes_too_long_is_a_timeout() {
    let text = r#"
do:
  - a:
      timeout: { after: { seconds: 2 } }
      do:
        - quick: { call: work, with: { after: 100 } }
        - slow: { call: work, with: { after: 10000 } }
"#;
    let ended = run_with(text, json!({}), slow);
    assert_eq!(kind(ended.fault()), "timeout");
    assert_eq!(ended.fault().status, 408);
    assert_eq!(ended.fault().instance.as_deref(), Some("/do/0/a"));
    assert_eq!(ended.took, 2000);
    assert!(ended.kinds().contains(&"task_cancelled".to_owned()));
}

#[test]
fn timeout_is_disarmed_when_the_task_ends() {
    let text = r#"
do:
  - a: { timeout: { after: PT1S }, call: work, with: { after: 100, gives: 1 } }
  - b: { wait: PT1H }
"#;
    let ended = run_with(text, json!({}), slow);
    assert_eq!(*ended.completed(), json!(1));
    let kinds = ended.kinds();
    let fired = kinds.iter().filter(|kind| *kind == "timer_fired").count();
    assert_eq!(fired, 1);
}

#[test]
fn timeout_can_be_caught() {
    let text = r#"
do:
  - a:
      try:
        - inner: { timeout: { after: PT1S }, wait: PT1H }
      catch:
        errors: { with: { type: https://serverlessworkflow.io/spec/1.0.0/errors/timeout } }
        do:
          - b: { set: { caught: '${ $error.instance }' } }
"#;
    let ended = run(text, json!({}));
    assert_eq!(
        *ended.completed(),
        json!({ "caught": "/do/0/a/try/0/inner" })
    );
    assert_eq!(ended.took, 1000);
}

#[test]
fn workflow_that_takes_too_long_faults() {
    let text = r#"
timeout: { after: PT5S }
do:
  - a:
      try: [{ b: { wait: PT1H } }]
      catch: { do: [{ c: { set: { caught: true } } }] }
"#;
    let ended = run(text, json!({}));
    assert_eq!(kind(ended.fault()), "timeout");
    assert_eq!(ended.took, 5000);
}
