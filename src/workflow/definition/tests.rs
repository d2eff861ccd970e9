use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::{Map, Value, json};

use super::*;
use crate::model::{BackoffKind, Priority};

/// Every kind of task that is done.
const ORDER: &str = r#"# An order.
document:
  dsl: '1.0.3'
  namespace: shop
  name: order
  version: 1.2.0-rc.1+b
  title: An order
  summary: Charges and ships
  tags: { team: sales }
  metadata: { owner: me }
evaluate: { language: jq, mode: strict }
input:
  schema:
    format: json
    document: { type: object, required: [ items ] }
  from: .order
use:
  secrets: [ bank ]
  authentications:
    bank: { basic: { use: bank } }
  errors:
    empty: { type: https://example.com/errors/empty, status: 400, title: "Order ${ .id } is empty", detail: nothing }
  timeouts:
    short: { after: PT1M0.5S }
  retries:
    often:
      when: $err.status >= 500
      delay: { seconds: 1, milliseconds: 500 }
      backoff: { linear: {} }
      limit: { attempt: { count: 3, duration: PT10S }, duration: P1DT12H }
      jitter: { from: { seconds: 0 }, to: PT0.25S }
  functions:
    check:
      call: http
      with:
        method: get
        endpoint: { uri: "https://example.com/{id}", authentication: { use: bank } }
        headers: { accept: application/json }
        query: ${ .query }
        output: response
        redirect: true
      metadata: { taskd: { priority: high, max_attempts: 2 }, other: 1 }
do:
  - isEmpty:
      switch:
        - none: { when: (.items | length) == 0, then: refuse }
        - default: { then: continue }
  - each:
      for: { each: item, in: .items, at: place }
      while: $place < 10
      do:
        - look: { call: check, with: { id: "${ $item.id }" } }
      then: both
  - refuse:
      raise: { error: empty }
  - both:
      fork:
        compete: false
        branches:
          - charge:
              call: charge
              with: { amount: "${ .sum }" }
              metadata:
                taskd: { queue: bank, replicas: 3, agree: majority, lease: 2m, finish_within: 1h, backoff: { kind: linear, initial: 1s } }
          - note:
              emit: { event: { with: { type: com.example.ordered, time: "2026-01-31T12:00:00+01:00", data: { id: "${ .id }" }, key: a } } }
              then: exit
  - ship:
      if: .ship
      input: { from: .address }
      timeout: short
      try:
        - call: { call: openapi, with: { document: { name: d, endpoint: https://example.com/api.json }, operationId: ship, parameters: { to: . }, authentication: { bearer: { token: "${ .token }" } } } }
      catch:
        errors: { with: { type: https://example.com/errors/busy, status: 503 } }
        as: err
        exceptWhen: $err.detail == "closed"
        retry: often
        do:
          - rest: { wait: { hours: 1 } }
        then: both
      output: { as: { shipped: . } }
      export: { as: '$context + { shipped: true }' }
  - last:
      do:
        - set: { set: { done: true, text: "${ .a } and ${ .b }" } }
      then: end
timeout: { after: { days: 3 } }
output: { as: .done }
"#;

fn order() -> Definition {
    let read = Definition::read(ORDER);
    read.unwrap_or_else(|mistakes| panic!("{}", lines(&mistakes)))
        .definition
}

fn lines(mistakes: &[Mistake]) -> String {
    let lines: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

fn mistakes(text: &str) -> String {
    lines(&Definition::read(text).expect_err(text))
}

/// A definition with these lines after its document, which has four.
fn with(text: &str) -> String {
    format!(
        "document: {{ dsl: '1.0.3',\n  namespace: n,\n  name: w,\n  version: '1.0.0' }}\n{text}\n"
    )
}

/// The mistakes of a definition whose only task has these fields. They are in line 6.
fn task(fields: &str) -> String {
    mistakes(&with(&format!("do:\n- a: {fields}")))
}

#[test]
fn a_text_becomes_a_definition() {
    let order = order();
    assert_eq!(order.document.name, "order");
    assert_eq!(order.document.version, "1.2.0-rc.1+b");
    assert_eq!(order.timeout.unwrap().after, Period::Fixed(3 * 86_400_000));
    let names: Vec<&str> = order.do_.iter().map(|task| &*task.name).collect();
    assert_eq!(names, ["isEmpty", "each", "refuse", "both", "ship", "last"]);
    let [is_empty, each, refuse, both, ship, last] = &order.do_[..] else {
        panic!();
    };
    let TaskKind::Switch(cases) = &is_empty.kind else {
        panic!("{is_empty:?}");
    };
    assert_eq!(cases[0].then, Then::Task("refuse".to_owned(), 2));
    assert_eq!(
        (cases[1].when.as_ref(), &cases[1].then),
        (None, &Then::Continue)
    );
    let TaskKind::For(for_) = &each.kind else {
        panic!("{each:?}");
    };
    assert_eq!(
        (&*for_.each, &*for_.at, &for_.in_),
        ("item", "place", &json!(".items"))
    );
    assert_eq!(for_.do_[0].place.pointer, "/do/1/each/do/0/look");
    assert_eq!(each.then, Some(Then::Task("both".to_owned(), 3)));
    let TaskKind::Raise(error) = &refuse.kind else {
        panic!("{refuse:?}");
    };
    assert_eq!(
        (error.status, error.detail.as_deref()),
        (400, Some("nothing"))
    );
    let TaskKind::Fork(fork) = &both.kind else {
        panic!("{both:?}");
    };
    let TaskKind::CallFunction(charge) = &fork.branches[0].kind else {
        panic!("{fork:?}");
    };
    assert_eq!(charge.step.queue.as_ref().unwrap().as_str(), "bank");
    assert_eq!(
        (charge.step.replicas, charge.step.agree),
        (Some(3), Agree::Majority)
    );
    assert_eq!(charge.step.lease, Some(Duration::from_secs(120)));
    assert_eq!(charge.step.finish_within, Some(Duration::from_secs(3600)));
    assert_eq!(charge.step.backoff.unwrap().kind, BackoffKind::Linear);
    let TaskKind::Try(try_) = &ship.kind else {
        panic!("{ship:?}");
    };
    assert_eq!(ship.timeout.as_ref().unwrap().after, Period::Fixed(60_500));
    assert_eq!(
        ship.place,
        Place {
            pointer: "/do/4/ship".to_owned(),
            line: 68,
            column: 5
        }
    );
    let retry = try_.catch.retry.as_ref().unwrap();
    assert_eq!(retry.delay, Some(Period::Fixed(1500)));
    assert_eq!(retry.duration, Some(Period::Fixed(36 * 3_600_000)));
    assert_eq!(
        (retry.attempts, retry.backoff),
        (Some(3), Some(RetryBackoff::Linear))
    );
    assert_eq!(try_.catch.then, Some(Then::Task("both".to_owned(), 3)));
    assert!(matches!(&last.kind, TaskKind::Do(tasks) if tasks.len() == 1));
    let TaskKind::CallHttp(check) = &order.use_.functions["check"].kind else {
        panic!();
    };
    let bank = Authentication::BasicSecret("bank".to_owned());
    assert_eq!(check.endpoint.authentication, Some(bank));
    assert_eq!((check.output, check.redirect), (HttpOutput::Response, true));
    assert_eq!(
        (check.step.priority, check.step.max_attempts),
        (Some(Priority::High), Some(2))
    );
}

#[test]
fn canonical_json_does_not_depend_on_the_form() {
    let yaml = Definition::read(ORDER).unwrap();
    let json = serde_json::to_string_pretty(&yaml.json).unwrap();
    let json = Definition::read(&json.replace("  ", "\t")).unwrap();
    assert_eq!(Canonical::of(&yaml.json), Canonical::of(&json.json));
    let small = Canonical::of(&json!({"b": [1, 1.5, null, "\u{1}\""], "a": {"é": true}}));
    assert_eq!(
        small.text,
        "{\"a\":{\"é\":true},\"b\":[1,1.5,null,\"\\u0001\\\"\"]}"
    );
    assert_eq!(small.hex().len(), 64);
    assert_ne!(small.hash, Canonical::of(&json!({})).hash);
    let escaped = Definition::read(&with(
        "do: [{\"a\": {\"set\": {\"x\": \"\\ud83d\\ude00\\/\"}}}]",
    ));
    assert_eq!(escaped.unwrap().json["do"][0]["a"]["set"]["x"], "😀/");
}

#[test]
fn every_mistake_is_named_with_its_place() {
    let mut others = Vec::new();
    for (fields, said) in [
        (
            "{ sett: { b: 1 } }",
            "6:8: unknown kind of task \"sett\"; did you mean set? expected call, do, emit, for, fork, listen, raise, run, set, switch, try, wait",
        ),
        (
            "{ if: .b }",
            "6:3: the task is of no kind; expected one of call, do, emit, for, fork, listen, raise, run, set, switch, try, wait",
        ),
        (
            "{ set: { b: 1 }, wait: PT1S }",
            "6:23: a task is of one kind; this one has set and wait",
        ),
        (
            "{ set: { b: 1 }, than: end }",
            "6:23: unknown field \"than\"; did you mean then? expected set, if, input, output, export, timeout, then, metadata",
        ),
        (
            "{ set: { b: 1 }, while: .b }",
            "6:23: while belongs to for; this task is set",
        ),
        (
            "{ set: { b: 1 }, then: b }",
            "6:29: then is \"b\"; expected continue, exit, end or a task of the same list",
        ),
        (
            "{ set: [ 1 ] }",
            "6:13: set must be an object or an expression; this is a list",
        ),
        (
            "{ set: {} }",
            "6:13: set must have a field: set: { name: value }",
        ),
        (
            "{ set: { b: 1 }, if: 5 }",
            "6:27: if must be a text; this is a number: put it in quotes",
        ),
        (
            "{ wait: P1M }",
            "6:14: wait: \"P1M\" has years or months, whose length varies: write days, such as P30D",
        ),
        (
            "{ wait: 1h }",
            "6:14: wait: \"1h\" is no duration: write it in ISO 8601, such as PT30S or P1DT12H",
        ),
        (
            "{ wait: { months: 1 } }",
            "6:16: wait: unknown unit \"months\"; expected days, hours, minutes, seconds, milliseconds",
        ),
        (
            "{ wait: { seconds: -1 } }",
            "6:25: wait: seconds must be a whole number, 0 or more",
        ),
        (
            "{ wait: {} }",
            "6:14: wait: a duration needs a unit: { seconds: 30 }",
        ),
        (
            "{ wait: P3651D }",
            "6:14: wait: a duration must be at most 3650 days",
        ),
        (
            "{ wait: 5 }",
            "6:14: wait must be a duration: { seconds: 30 }, or PT30S in ISO 8601",
        ),
        (
            "{ set: { b: 1 }, timeout: short }",
            "6:32: there is no use.timeouts \"short\"; there is none",
        ),
        (
            "{ set: { b: 1 }, timeout: { after: PT1S, x: 1 } }",
            "6:47: unknown field \"x\"; expected after",
        ),
        (
            "{ raise: { error: gone } }",
            "6:24: there is no use.errors \"gone\"; there is none",
        ),
        (
            "{ raise: { error: { status: 400 } } }",
            "6:17: type is missing: a URI, such as https://example.com/errors/out-of-stock",
        ),
        (
            "{ raise: { error: { type: a b, status: 400 } } }",
            "6:32: type is \"a b\", which is no URI",
        ),
        (
            "{ raise: { error: { type: a, status: '400' } } }",
            "6:43: status must be a whole number",
        ),
        (
            "{ try: [], catch: { retry: often } }",
            "6:33: there is no use.retries \"often\"; there is none",
        ),
        (
            "{ try: [] }",
            "6:3: catch is missing: catch: {} catches every error",
        ),
        (
            "{ try: [], catch: { as: $e } }",
            "6:30: as is \"$e\"; a variable has 1 to 128 letters, digits and _, without $",
        ),
        (
            "{ try: [], catch: { as: input } }",
            "6:30: as is \"input\", a variable that is there already",
        ),
        (
            "{ try: [], catch: { retry: { backoff: { linear: {}, constant: {} } } } }",
            "6:58: backoff is one of constant, linear, exponential; this is a second one",
        ),
        (
            "{ try: [], catch: { retry: { backoff: { linear: { x: 1 } } } } }",
            "6:56: unknown field \"x\"; linear has none: linear: {}",
        ),
        (
            "{ try: [], catch: { then: nowhere } }",
            "6:32: then is \"nowhere\"; expected continue, exit, end or a task of the same list",
        ),
        ("{ switch: [] }", "6:16: switch must have a case"),
        (
            "{ switch: [ { b: { when: .x } } ] }",
            "6:20: then is missing: continue, exit, end or the name of a task",
        ),
        (
            "{ switch: [ { b: { then: end } }, { c: { then: exit } } ] }",
            "6:42: case \"c\" is never reached: \"b\" before it has no when",
        ),
        (
            "{ for: { in: .x } }",
            "6:3: do is missing: the tasks of each round",
        ),
        (
            "{ for: { in: [ 1 ] }, do: [] }",
            "6:21: in must be a list of objects; of other values make an expression: '${ [1, 2] }'",
        ),
        (
            "{ for: { each: x, at: x, in: .x }, do: [] }",
            "6:28: each and at have one name",
        ),
        (
            "{ fork: { branches: [] } }",
            "6:26: branches must have a task",
        ),
        (
            "{ fork: { branches: [ { b: { set: { c: 1 }, then: c } }, { c: { set: { c: 1 } } } ] } }",
            "6:30: a branch goes to no other: its then may be continue, exit or end",
        ),
        (
            "{ do: [ { b: { set: { c: 1 } } }, { b: { set: { c: 1 } } } ] }",
            "6:42: task \"b\" is in this list already: two of one name",
        ),
        (
            "{ do: [ { b: { set: { c: 1 } }, c: { set: { c: 1 } } } ] }",
            "6:38: a task must be an object with one field, its name: - name: …; this is a second one",
        ),
        (
            "{ emit: { event: { with: { source: https://example.com } } } }",
            "6:25: type is missing: type: com.example.order.placed.v1",
        ),
        (
            "{ emit: { event: { with: { type: t, dataType: x } } } }",
            "6:42: attribute \"dataType\": CloudEvents has names of a-z 0-9; put other data into data",
        ),
        (
            "{ call: http }",
            "6:3: with is missing: method and endpoint",
        ),
        (
            "{ call: http, with: { method: get, endpoint: example.com } }",
            "6:51: endpoint is \"example.com\"; expected http://… or https://…",
        ),
        (
            "{ call: http, with: { method: get, endpoint: 'http://a', query: { b: 1 } } }",
            "6:75: query.b must be a text; this is a number: put it in quotes",
        ),
        (
            "{ call: http, with: { method: get, endpoint: { uri: 'http://a', authentication: { use: b } } } }",
            "6:93: there is no use.authentications \"b\"; there is none",
        ),
        (
            "{ call: http, with: { method: get, endpoint: { uri: 'http://a', authentication: { basic: { use: b } } } } }",
            "6:102: there is no use.secrets \"b\"; there is none",
        ),
        (
            "{ call: http, with: { method: get, endpoint: { uri: 'http://a', authentication: { basic: { username: b } } } } }",
            "6:88: password is missing: or use: the name of a secret",
        ),
        (
            "{ call: http, with: { method: get, endpoint: 'http://a' }, metadata: { taskd: { queue: q } } }",
            "6:86: queue is for calls of functions; taskd makes this call itself",
        ),
        (
            "{ call: a b }",
            "6:14: \"a b\" is no function of use.functions and no name of a queue: name one in metadata.taskd.queue",
        ),
        (
            "{ call: b, metadata: { taskd: { replicas: 0 } } }",
            "6:48: replicas is 0; must be 1 to 10000",
        ),
        (
            "{ call: b, metadata: { taskd: { lease: 1ms } } }",
            "6:45: lease is 1ms; must be 100ms to 30days",
        ),
        (
            "{ call: b, metadata: { taskd: { max_attempts: 1001 } } }",
            "6:52: max_attempts is 1001; must be 1 to 1000",
        ),
        (
            "{ call: b, metadata: { taskd: { priorty: low } } }",
            "6:38: unknown field \"priorty\"; did you mean priority? expected queue, replicas, agree, lease, priority, max_attempts, backoff, finish_within",
        ),
        (
            "{ call: b, metadata: { taskd: { priority: urgent } } }",
            "6:48: priority is \"urgent\"; expected high, medium, low",
        ),
        (
            "{ call: b, metadata: { taskd: { backoff: { kind: linear } } } }",
            "6:47: backoff.initial is missing: the wait after the first failure",
        ),
        (
            "{ set: { b: 1 }, metadata: { taskd: { queue: q } } }",
            "6:35: metadata.taskd belongs to tasks that call something",
        ),
        (
            "{ set: { b: 1 }, input: { schema: { document: { type: 5 } } } }",
            "6:52: schema.document: ",
        ),
        (
            "{ set: { b: 1 }, output: { as: [] } }",
            "6:37: output.as must be an expression or an object; this is a list",
        ),
        // What later versions have.
        (
            "{ listen: { to: { any: [] } } }",
            "6:8: this version of taskd does not do listen yet; a call of a function waits for the result of a worker",
        ),
        (
            "{ run: { shell: { command: ls } } }",
            "6:8: this version of taskd does not do run yet; call a function: it is a task for your own workers",
        ),
        (
            "{ call: grpc, with: {} }",
            "6:14: this version of taskd does not do call: grpc yet; call http, openapi, or a function: a task for your own workers",
        ),
        (
            "{ call: 'log:1.0.0@global' }",
            "6:14: this version of taskd does not do functions of catalogs yet; write it in use.functions",
        ),
        (
            "{ call: http, with: { method: get, endpoint: { uri: 'http://a', authentication: { oauth2: {} } } } }",
            "6:88: this version of taskd does not do authentication oauth2 yet; basic and bearer work",
        ),
        (
            "{ set: { b: 1 }, input: { schema: { resource: { endpoint: 'http://a' } } } }",
            "6:42: this version of taskd does not do schemas from elsewhere yet; write the schema itself: document: { type: object }",
        ),
    ] {
        let found = task(fields);
        // What a compiler of schemas says is its own.
        let is_said = match said.ends_with(": ") {
            true => found.starts_with(said) && !found.contains('\n'),
            false => found == said,
        };
        if !is_said {
            others.push(format!("{fields}\n said {found}\n want {said}\n"));
        }
    }
    assert!(others.is_empty(), "{}", others.join("\n"));
}

#[test]
fn mistakes_around_the_tasks_have_places() {
    let mut others = Vec::new();
    let set = "do: [ { a: { set: { b: 1 } } } ]";
    for (text, said) in [
        (with(""), "1:1: do is missing: the list of the tasks"),
        (with("do: 5"), "5:5: do must be a list; this is a number"),
        (String::new(), "1:1: the definition is empty"),
        (
            "- a".to_owned(),
            "1:1: a definition must be an object; this is a list",
        ),
        (
            with(&format!("{set}\nmetadata: {{}}")),
            "6:1: metadata belongs into document",
        ),
        (
            with(&format!("{set}\nouput: {{}}")),
            "6:1: unknown field \"ouput\"; did you mean output? expected document, input, use, do, timeout, output, evaluate",
        ),
        (
            with(&format!("{set}\nschedule: {{}}")),
            "6:1: this version of taskd does not do schedules yet; start executions yourself, for example from cron",
        ),
        (
            with(&format!("{set}\nuse: {{ catalogs: {{}} }}")),
            "6:8: this version of taskd does not do catalogs yet; write functions in use.functions",
        ),
        (
            with(&format!("{set}\nuse: {{ extensions: [] }}")),
            "6:8: this version of taskd does not do extensions yet; write the tasks where they are to happen",
        ),
        (
            with(&format!("{set}\nuse: {{ function: {{}} }}")),
            "6:8: unknown field \"function\"; did you mean functions? expected authentications, errors, functions, retries, secrets, timeouts",
        ),
        (
            with(&format!("{set}\nuse: {{ secrets: [ a, a ] }}")),
            "6:22: secret \"a\" is there already",
        ),
        (
            with(&format!("{set}\nevaluate: {{ language: js }}")),
            "6:23: evaluate.language is \"js\"; expected jq",
        ),
        (
            with(&format!("{set}\nevaluate: {{ mode: loose }}")),
            "6:19: this version of taskd does not do evaluate.mode loose yet; wrap expressions: ${ … }",
        ),
        (
            with(&format!(
                "{set}\ntimeout: shrt\nuse: {{ timeouts: {{ short: {{ after: PT1S }} }} }}"
            )),
            "6:10: there is no use.timeouts \"shrt\"; did you mean short? there is short",
        ),
        (
            with(
                "do: [ { a: { call: f } } ]\nuse: { functions: { f: { call: g }, g: { do: [ { b: { call: f } } ] } } }",
            ),
            "6:50: function \"f\" calls itself",
        ),
        (
            with("do: []\nuse: { functions: { f: { set: { a: 1 }, then: b } } }"),
            "6:47: then is \"b\"; expected continue, exit, end or a task of the same list",
        ),
        (
            with(set).replace("1.0.3", "2.0.0"),
            "1:18: dsl is \"2.0.0\"; expected 1.0.0, 1.0.1, 1.0.2, 1.0.3",
        ),
        (
            with(set).replace("'1.0.0'", "1.0"),
            "4:12: version must be a text; this is a number: put it in quotes",
        ),
        (
            with(set).replace("'1.0.0'", "v1"),
            "4:12: version \"v1\" is no semantic version of at most 64 characters, such as '1.0.0'",
        ),
        (
            with(set).replace("name: w", "name: a_b"),
            "3:9: name \"a_b\": it has 1 to 63 characters of A-Z a-z 0-9 -, and no - at its ends",
        ),
        (
            with(set).replace("name: w", &format!("name: {}", "a".repeat(64))),
            "3:9: name \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\": it has 1 to 63 characters of A-Z a-z 0-9 -, and no - at its ends",
        ),
        (
            with(set).replace("namespace: n,", ""),
            "1:1: namespace is missing: namespace: default",
        ),
    ] {
        let found = mistakes(&text);
        if found != said {
            others.push(format!("{text} said {found}\n want {said}\n"));
        }
    }
    assert!(others.is_empty(), "{}", others.join("\n"));
    let long = format!("do: [ {{ {}: {{ set: {{ b: 1 }} }} }} ]", "a".repeat(129));
    assert!(
        mistakes(&with(&long)).ends_with("a name has 1 to 128 bytes without control characters")
    );
}

#[test]
fn expressions_are_checked_with_their_variables() {
    for fields in [
        "{ set: { b: '${ .x | length }' } }",
        "{ for: { each: c, in: .x }, while: $index < 3, do: [ { b: { set: { d: '${ $c }' } } } ] }",
        "{ try: [], catch: { as: e, when: $e.status == 404, do: [ { b: { set: '${ $e }' } } ] } }",
        "{ if: $context.x and $workflow.id and $task.name and $runtime.name, set: { b: $e } }",
        "{ if: '${ .x }', set: { b: '.x | ] is text' }, output: { as: '{ ids: [ $input, $output ] }' } }",
    ] {
        let text = with(&format!("do:\n- a: {fields}"));
        let read = Definition::read(&text);
        read.unwrap_or_else(|mistakes| panic!("{fields}: {}", lines(&mistakes)));
    }
    for (fields, said) in [
        (
            "{ if: '.x |', set: { b: 1 } }",
            "6:12: not a jq expression: ",
        ),
        (
            "{ set: { b: '${ .x | nosuch }' } }",
            "6:18: unknown function nosuch",
        ),
        (
            "{ set: { b: [ '${ $e }' ] } }",
            "6:20: unknown variable $e; there are $context, $input, $task, $workflow, $runtime",
        ),
        (
            "{ try: [], catch: { as: e, retry: { when: $error } } }",
            "6:48: unknown variable $error; there are $context, $input, $task, $workflow, $runtime, $e",
        ),
        (
            "{ set: { b: '${ $secrets.x }' } }",
            "6:18: this version of taskd does not do $secrets in expressions yet; authentication takes a secret by use: NAME",
        ),
        ("{ wait: '${ env }' }", "6:14: unknown function env"),
    ] {
        let found = task(fields);
        assert!(
            found.starts_with(said) && !found.contains('\n'),
            "{fields}: {found}"
        );
    }
    let brackets = format!(
        "{{ if: '{}{}', set: {{ b: 1 }} }}",
        "[".repeat(2000),
        "]".repeat(2000)
    );
    let found = task(&brackets);
    assert_eq!(found, "6:12: an expression may nest brackets 128 deep");
}

#[test]
fn all_mistakes_are_named_at_once() {
    let text = with(
        "do:\n- a: { sett: 1, if: 5 }\n- b: { wait: P1Y, then: c }\n- d: { call: grpc }\nschedule: {}",
    )
    .replace("'1.0.3'", "'0.8'");
    let found = Definition::read(&text).unwrap_err();
    let places: Vec<_> = found
        .iter()
        .map(|one| (one.line, one.column, one.pointer.as_str()))
        .collect();
    assert_eq!(
        places,
        [
            (1, 18, "/document/dsl"),
            (6, 8, "/do/0/a/sett"),
            (6, 21, "/do/0/a/if"),
            (7, 14, "/do/1/b/wait"),
            (7, 25, "/do/1/b/then"),
            (8, 14, "/do/2/d/call"),
            (9, 1, "/schedule"),
        ]
    );
    let many = format!("do:\n{}", "- { x: { y: 1 } }\n".repeat(150));
    assert_eq!(Definition::read(&with(&many)).unwrap_err().len(), 100);
}

#[test]
fn what_is_no_yaml_is_refused_in_one_line() {
    for (text, said) in [
        ("a: [1\nb: 2", "2:2: this is no YAML: "),
        (
            "a: ${ {b: 1} }",
            "1:9: this is no YAML: mapping values are not allowed in this context: put a text with a colon in quotes, or mend the indentation",
        ),
        (
            "a: @b",
            "1:4: this is no YAML: unexpected character: `@': put the text in quotes",
        ),
        (
            "a: 1\n---\nb: 1",
            "2:1: a second document begins: one definition in a file",
        ),
        (
            "a: *b",
            "1:4: this is no YAML: while parsing node, found unknown anchor",
        ),
        (
            "a: &b [ *b ]",
            "1:9: this alias is inside of what it stands for",
        ),
        ("? [ a ]\n: b", "1:3: the name of a field must be a text"),
    ] {
        let found = Definition::read(text).unwrap_err();
        assert_eq!(found.len(), 1, "{text}: {}", lines(&found));
        let found = found[0].to_string();
        assert!(found.starts_with(said), "{text}: {found}");
    }
    let set = |value: &str| task(&format!("{{ set: {{ b: {value} }} }}"));
    for (value, said) in [
        (
            "1, b: 2",
            "6:21: this name is there already: two of one name",
        ),
        (
            "&x { c: 1 }, <<: *x",
            "6:31: YAML 1.2 has no merge keys (<<): write the fields out",
        ),
        (".inf", "6:18: JSON has no number .inf"),
        (
            "1e999",
            "6:18: the number 1e999 does not fit: put it in quotes",
        ),
        (
            "18446744073709551616",
            "6:18: the number 18446744073709551616 does not fit: put it in quotes",
        ),
        ("!env X", "6:23: tag !env means nothing here: leave it out"),
    ] {
        assert_eq!(set(value), said, "{value}");
    }
}

#[test]
fn scalars_are_those_of_yaml_1_2() {
    let text = with(
        "do: [ a: { set: { a: yes, b: TRUE, c: 0x1F, d: 0o17, e: 010, f: 1., g: ~, h: '5', i: -7, j: .5, k: 1e3,\n  l: !!str 5, m: 18446744073709551615, n: 1_000, o: 2026-01-31 } } ]",
    );
    let read = Definition::read(&text).unwrap_or_else(|mistakes| panic!("{}", lines(&mistakes)));
    assert_eq!(
        read.json["do"][0]["a"]["set"],
        json!({
            "a": "yes", "b": true, "c": 31, "d": 15, "e": 10, "f": 1.0, "g": null, "h": "5", "i": -7,
            "j": 0.5, "k": 1000.0, "l": "5", "m": u64::MAX, "n": "1_000", "o": "2026-01-31",
        })
    );
}

#[test]
fn bombs_are_refused_in_one_line() {
    let one_line = |text: &str, said: &str| {
        let found = Definition::read(text).unwrap_err();
        assert_eq!(found.len(), 1, "{}", lines(&found));
        let found = found[0].to_string();
        assert!(found.contains(said) && found.len() < 200, "{found}");
    };
    let mut laughs = "a0: &a0 [ x, x, x, x, x, x, x, x, x, x ]\n".to_owned();
    for level in 1..12 {
        let alias = format!("*a{}, ", level - 1);
        laughs += &format!("a{level}: &a{level} [ {} ]\n", alias.repeat(10));
    }
    one_line(&laughs, "more than 50000 values");
    let long = format!(
        "a: &a {}\nb: [ {} ]",
        "x".repeat(200_000),
        "*a, ".repeat(100)
    );
    one_line(&long, "bytes with its aliases written out");
    let nested: String = (0..119).map(|level| format!("&a{level} [ ")).collect();
    let nested = format!("{nested}{}{}", "1, ".repeat(40_000), " ]".repeat(119));
    one_line(&nested, "more than 50000 values");
    let doubled: String = (1..200)
        .map(|level| format!("a{level}: &a{level} [ *a{} ]\n", level - 1))
        .collect();
    one_line(
        &format!("a0: &a0 1\n{doubled}"),
        "more than 120 deep in each other",
    );
    for deep in [
        "[".repeat(100_000),
        "- ".repeat(100_000),
        "{a: ".repeat(50_000),
    ] {
        one_line(&deep, "more than 120 deep in each other");
    }
    one_line(&" ".repeat(300_000), "has 300000 bytes; at most 262144");
    let long = format!("? {}\n: 1", "x".repeat(5000));
    one_line(&long, "this name has more than 4096 bytes");
    let hungry = format!(
        "do: [ a: {{ set: {{ b: '{}' }} }} ]",
        "${ . }".repeat(10_001)
    );
    one_line(&with(&hungry), "more than 10000 expressions");
    let flat = format!("[ {} ]", "1,".repeat(60_000));
    one_line(&flat, "more than 50000 values");
}

#[test]
fn tasks_and_functions_have_bounds() {
    let nested = |levels: usize| {
        let open: String = "[{a: {do: ".repeat(levels);
        with(&format!("do: {open}[]{}", "}}]".repeat(levels)))
    };
    assert!(Definition::read(&nested(35)).is_ok());
    assert!(mistakes(&nested(45)).contains("more than 120 deep in each other"));
    // Each function calls the next, once or twice.
    let chain = |calls: &str, count: usize| {
        let functions: String = (0..count)
            .map(|at| {
                let next = calls.replace("NEXT", &format!("f{}", at + 1));
                format!("    f{at}: {{ do: [ {next} ] }}\n")
            })
            .collect();
        with(&format!(
            "do: [ {{ a: {{ call: f0 }} }} ]\nuse:\n  functions:\n{functions}"
        ))
    };
    let once = "{ a: { call: NEXT } }";
    let twice = "{ a: { call: NEXT } }, { b: { call: NEXT } }";
    assert!(Definition::read(&chain(once, 20)).is_ok());
    assert!(mistakes(&chain(once, 2000)).contains("tasks are more than 64 deep in each other"));
    assert!(Definition::read(&chain(twice, 10)).is_ok());
    let many = mistakes(&chain(twice, 15));
    assert!(many.contains("tasks; at most 10000"), "{many}");
}

#[test]
fn durations_are_exact() {
    for (text, ms) in [
        ("PT0S", 0),
        ("PT30S", 30_000),
        ("P1DT12H", 129_600_000),
        ("P1W", 604_800_000),
        ("P0.5D", 43_200_000),
        ("PT1M0.0001S", 60_001),
        ("PT0.1S", 100),
        ("P1W2DT3H4M5.678S", 788_645_678),
        ("P3650D", 315_360_000_000),
    ] {
        assert_eq!(Period::read(&json!(text)), Ok(ms), "{text}");
    }
    for text in [
        "",
        "P",
        "PT",
        "P1DT",
        "1D",
        "P1",
        "PTS",
        "PT1S1H",
        "P1D1D",
        "PT1D",
        "P1H",
        "P-1D",
        "P1.D",
        "P.5D",
        "P1.2.3D",
        "P1Y",
        "P1M",
        "P0M",
        "pt1s",
        "PT1S ",
        "P99999999999999999999D",
        "PTT1S",
    ] {
        assert!(Period::read(&json!(text)).is_err(), "{text}");
    }
    assert_eq!(
        Period::read(&json!({"days": 1, "milliseconds": 5})),
        Ok(86_400_005)
    );
    for value in [
        json!({}),
        json!({"days": 1.5}),
        json!({"months": 1}),
        json!(5),
        json!(null),
    ] {
        assert!(Period::read(&value).is_err(), "{value}");
    }
}

/// The files of the specification, if they are there.
fn specification(folder: &str) -> Option<PathBuf> {
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/swf-spec/1.0-main");
    let folder = shared.join(folder);
    if !folder.exists() {
        return None;
    }
    Some(folder)
}

fn examples() -> BTreeMap<String, String> {
    let folder = specification("examples");
    let files = folder
        .iter()
        .flat_map(|folder| fs::read_dir(folder).unwrap());
    files
        .map(|file| {
            let path = file.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, fs::read_to_string(path).unwrap())
        })
        .collect()
}

#[test]
fn examples_are_read_or_refused_with_their_lines() {
    let examples = examples();
    if examples.is_empty() {
        return;
    }
    let mut read = Vec::new();
    let mut refused = BTreeMap::new();
    for (name, text) in &examples {
        match Definition::read(text) {
            Ok(_) => read.push(name.as_str()),
            Err(mistakes) => {
                for mistake in &mistakes {
                    let says = &mistake.says;
                    assert!(
                        says.starts_with("this version of taskd does not do "),
                        "{name}: {mistake}"
                    );
                    let line = text.lines().nth(mistake.line - 1).unwrap();
                    let what = [
                        "listen",
                        "run:",
                        "schedule",
                        "call:",
                        "extensions",
                        "catalogs",
                        "oauth2",
                        "oidc",
                        "digest",
                    ];
                    assert!(
                        what.iter().any(|what| line.contains(what)),
                        "{name}: {line}"
                    );
                }
                refused.insert(name.as_str(), lines(&mistakes));
            }
        }
    }
    assert_eq!(
        (read.len(), refused.len()),
        (28, 40),
        "{read:#?} {refused:#?}"
    );
}

/// All values that differ from one in one place: a field is missing or has another name, or a value
/// is one of `others`.
fn mutations(value: &Value, others: &[Value], of: &mut dyn FnMut(Value)) {
    for other in others.iter().filter(|other| *other != value) {
        of(other.clone());
    }
    match value {
        Value::Object(fields) => {
            for (name, inner) in fields {
                let mut rest = fields.clone();
                rest.remove(name);
                of(Value::Object(rest.clone()));
                rest.insert(format!("{name}x"), inner.clone());
                of(Value::Object(rest));
                mutations(inner, others, &mut |inner| {
                    let mut fields: Map<String, Value> = fields.clone();
                    fields.insert(name.clone(), inner);
                    of(Value::Object(fields));
                });
            }
            let mut more = fields.clone();
            more.insert("zusatz".to_owned(), json!(1));
            of(Value::Object(more));
        }
        Value::Array(values) => {
            for (place, inner) in values.iter().enumerate() {
                let mut rest = values.clone();
                rest.remove(place);
                of(Value::Array(rest));
                mutations(inner, others, &mut |inner| {
                    let mut values = values.clone();
                    values[place] = inner;
                    of(Value::Array(values));
                });
            }
        }
        _ => {}
    }
}

#[test]
fn what_the_schema_refuses_is_refused() {
    let Some(folder) = specification("schema") else {
        return;
    };
    let text = fs::read_to_string(folder.join("workflow.yaml")).unwrap();
    let (schema, mistakes) = yaml::read(&text);
    assert_eq!(mistakes, []);
    let schema = jsonschema::options()
        .offline()
        .build(&schema.unwrap().to_value())
        .unwrap();
    let mut bases = examples();
    bases.retain(|_, text| Definition::read(text).is_ok());
    bases.insert("order".to_owned(), ORDER.to_owned());
    let mut refused = 0;
    let mut accepted = Vec::new();
    let mut stricter = BTreeMap::new();
    for (name, text) in &bases {
        let value = Definition::read(text).unwrap().json;
        assert!(
            schema.is_valid(&value),
            "{name}: {:?}",
            schema.validate(&value)
        );
        let mut compare = |mutant: Value| {
            // Expressions are not the schema's business, and take their time.
            let read = document::read(&mutant.to_string(), |_, _, _| Ok(()));
            match (schema.is_valid(&mutant), read) {
                (false, Ok(_)) => accepted.push(format!("{name}: {mutant}")),
                (false, Err(_)) => refused += 1,
                (true, Err(mistakes)) => {
                    *stricter.entry(mistakes[0].says.clone()).or_insert(0) += 1;
                }
                (true, Ok(_)) => {}
            }
        };
        // All examples have the same document.
        let is_example = name != "order";
        let Value::Object(fields) = &value else {
            panic!("{value}");
        };
        if !is_example {
            let others = [json!(null), json!(5), json!("a b"), json!([]), json!({})];
            mutations(&value, &others, &mut compare);
            continue;
        }
        for (name, inner) in fields.iter().filter(|(name, _)| *name != "document") {
            mutations(inner, &[json!(null), json!("a b")], &mut |inner| {
                let mut fields = fields.clone();
                fields.insert(name.clone(), inner);
                compare(Value::Object(fields));
            });
        }
    }
    assert!(
        accepted.is_empty(),
        "{} of {}:\n{}",
        accepted.len(),
        refused,
        accepted[..accepted.len().min(20)].join("\n")
    );
    assert!(refused > 1000, "{refused}");
    if std::env::var_os("SHOW").is_some() {}
}
