//! What flows through tasks: input, output, context, schemas and variables.

use super::*;

#[test]
fn input_and_output_are_made_and_checked_in_order() {
    let text = r#"
input:
  schema: { document: { type: object, required: [user] } }
  from: .user
output:
  as: '{ final: . }'
  schema: { document: { required: [final] } }
do:
  - a:
      input: { schema: { document: { required: [name] } }, from: '.name' }
      set: { n: '${ . }', i: '${ $input }', raw: '${ $task.input }' }
      output: { as: '. + { input: $input }', schema: { document: { required: [input] } } }
"#;
    let ended = run(text, json!({ "user": { "name": "Ada" } }));
    assert_eq!(
        *ended.completed(),
        json!({ "final": { "n": "Ada", "i": "Ada", "raw": { "name": "Ada" }, "input": "Ada" } })
    );
    let ended = run(text, json!({}));
    assert_eq!(kind(ended.fault()), "validation");
    assert_eq!(ended.fault().status, 400);
    assert_eq!(ended.fault().instance.as_deref(), Some("/"));
    assert_eq!(ended.kinds(), ["started", "faulted"]);
    let ended = run(text, json!({ "user": {} }));
    assert_eq!(ended.fault().instance.as_deref(), Some("/do/0/a"));
}

#[test]
fn misfit_output_and_context_are_errors_of_the_task() {
    let text = r#"
do:
  - a: { set: { n: 1 }, output: { schema: { document: { required: [m] } } } }
"#;
    assert_eq!(kind(run(text, json!({})).fault()), "validation");
    let text = r#"
do:
  - a: { set: { n: 1 }, export: { as: .n, schema: { document: { type: string } } } }
"#;
    let ended = run(text, json!({}));
    assert_eq!(kind(ended.fault()), "validation");
    assert_eq!(ended.fault().instance.as_deref(), Some("/do/0/a"));
}

#[test]
fn export_replaces_the_context() {
    let text = r#"
do:
  - a: { set: { n: 1 }, export: { as: '{ a: .n, before: $context }' } }
  - b: { set: { n: 2 }, export: { as: { b: '${ $output.n }', old: '${ $context }' } } }
  - c: { set: '${ $context }' }
"#;
    let old = json!({ "a": 1, "before": null });
    assert_eq!(
        *run(text, json!({})).completed(),
        json!({ "b": 2, "old": old })
    );
}

#[test]
fn branches_export_at_the_join_in_declared_order() {
    let text = r#"
do:
  - start: { set: {}, export: { as: '["start"]' } }
  - both:
      fork:
        branches:
          - slow:
              do:
                - a: { call: work, with: { after: 50 }, export: { as: '$context + ["a"]' } }
                - b: { set: '${ $context }', export: { as: '$context + ["b"]' } }
          - fast: { call: work, with: { after: 5 }, export: { as: '$context + ["fast"]' } }
          - none: { set: '${ $context }' }
  - see: { set: { outputs: '${ . }', context: '${ $context }' } }
"#
    .replace("set: {}", "set: { x: 1 }");
    let ended = run_with(&text, json!({}), slow);
    assert_eq!(
        *ended.completed(),
        json!({
            "outputs": [["start", "a"], null, ["start"]],
            "context": ["start", "fast"],
        }),
        "a branch sees the context as of the fork; the last one that exports replaces it"
    );
    let text = text.replace(
        "        branches",
        "        compete: true\n        branches",
    );
    let text = text.replace("          - none: { set: '${ $context }' }\n", "");
    let ended = run_with(&text, json!({}), slow);
    assert_eq!(ended.completed()["context"], json!(["start", "fast"]));
}

#[test]
fn expressions_know_task_workflow_and_runtime() {
    let text = r#"
do:
  - a:
      set:
        task: '${ [$task.name, $task.reference, $task.definition.metadata.mine] }'
        workflow: '${ [$workflow.id, $workflow.input.n, $workflow.definition.document.name] }'
        started: '${ $workflow.startedAt.epoch.milliseconds }'
        runtime: '${ $runtime.name }'
      metadata: { mine: 5 }
"#;
    assert_eq!(
        *run(text, json!({ "n": 1 })).completed(),
        json!({
            "task": ["a", "/do/0/a", 5],
            "workflow": ["execution-1", 1, "test"],
            "started": fake::START,
            "runtime": "taskd",
        })
    );
}

#[test]
fn expressions_in_data_are_never_evaluated() {
    let text = r#"
do:
  - a: { set: { x: '${ .evil }', y: 'is ${ .evil }' } }
  - b: { set: '${ . }' }
"#;
    let ended = run(text, json!({ "evil": "${ 1 + 1 }" }));
    assert_eq!(
        *ended.completed(),
        json!({ "x": "${ 1 + 1 }", "y": "is ${ 1 + 1 }" })
    );
}

#[test]
fn failing_expression_is_an_error_of_its_task() {
    let text = "
do:
  - a: { do: [{ b: { set: { x: '${ .n.m }' } } }] }
";
    let ended = run(text, json!({ "n": "text" }));
    assert_eq!(kind(ended.fault()), "expression");
    assert_eq!(ended.fault().status, 400);
    assert_eq!(ended.fault().instance.as_deref(), Some("/do/0/a/do/0/b"));
    assert!(ended.fault().detail.as_ref().unwrap().starts_with("set: "));
}

#[test]
fn function_is_inlined_and_sees_only_its_arguments() {
    let text = r#"
use:
  functions:
    double:
      input: { schema: { document: { required: [n] } } }
      do:
        - twice: { set: { n: '${ .n * 2 }', then: '${ .other }' } }
      output: { as: .n }
do:
  - loop:
      for: { each: x, in: '[1, 2]' }
      do:
        - call: { call: double, with: { n: '${ $x + .base }' }, output: { as: '{ base: . }' } }
  - plain: { call: double, input: { from: '{ n: .base }' } }
"#;
    let ended = run(text, json!({ "base": 10, "other": 1 }));
    assert_eq!(*ended.completed(), json!(96));
    let text = text.replace("n: '${ $x + .base }'", "m: 1");
    let ended = run(&text, json!({ "base": 10 }));
    assert_eq!(kind(ended.fault()), "validation");
    assert_eq!(
        ended.fault().instance.as_deref(),
        Some("/do/0/loop/do/0/call/call")
    );
}
