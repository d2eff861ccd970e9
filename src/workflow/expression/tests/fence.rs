//! Nothing that an expression does harms the process.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::{Bounds, Error, Expression};
use super::{evaluate, result};

/// Far more than any takes, even where others use the machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether the fence ended it.
fn is_refused(result: &Result<Value, Error>) -> bool {
    let ended = [Error::Fuel, Error::Memory, Error::TooDeep, Error::Output];
    ended
        .iter()
        .any(|error| result.as_ref().err() == Some(error))
}

#[track_caller]
fn assert_refused(text: &str, bounds: Bounds) {
    let start = Instant::now();
    let result = evaluate(text, &json!([[1], {"a": 2}]), bounds);
    let shown = &text[..text.len().min(200)];
    assert!(is_refused(&result), "{shown}: {result:?}");
    assert!(start.elapsed() < PATIENCE, "{shown}: {:?}", start.elapsed());
}

#[test]
fn endless_loops_and_recursions_end() {
    for text in include_str!("hostile.jq").lines() {
        if !text.is_empty() && !text.starts_with('#') {
            assert_refused(
                text,
                Bounds {
                    fuel: 1_000,
                    ..Bounds::default()
                },
            );
        }
    }
}

#[test]
fn deep_recursion_ends_with_the_default_bounds() {
    for text in [
        "def f: [f]; f",
        "def f: 1 + f; f",
        "def f: try f catch .; f",
        "def f: {a: f}; f",
    ] {
        assert_refused(text, Bounds::default());
        assert_refused(
            text,
            Bounds {
                fuel: u64::MAX / 4_096,
                ..Bounds::default()
            },
        );
    }
}

#[test]
fn calls_of_given_functions_pay_without_fuel() {
    let text =
        "def f(g; $n): if $n == 0 then path(g) else f(g | g; $n - 1) end; null | f(.[0]; 60)";
    assert_refused(text, Bounds::default());
    let input = json!((0..30_000).collect::<Vec<_>>());
    let text = "map(. + 1) | map(select(. == 30000)) | length";
    assert_eq!(
        evaluate(
            text,
            &input,
            Bounds {
                fuel: 80_000,
                ..Bounds::default()
            }
        ),
        Ok(json!(1))
    );
}

#[test]
fn long_bodies_pay_for_their_length() {
    let repeated = |before: &str, middle: &str, after: &str, times: usize| {
        let (before, after) = (before.repeat(times), after.repeat(times));
        format!("def f: {before}{middle}{after}; f")
    };
    let bodies = [
        repeated("- ", "f", "", 3_500),
        repeated(".|", "f", "", 1_900),
        repeated(". as $x | ", "f", "", 700),
        repeated("try ", "f", "", 3_500),
        repeated("if . then ", "f", " end", 900),
        repeated("first(", "f", ")", 120),
        repeated("[limit(1; ", "f", ")]", 60),
        repeated("(. |= ", "f", ")", 120),
        repeated("\"\\(", "f", ")\"", 120),
        repeated("", "f", " + .", 1_900),
        repeated("", ".", "[0]?", 1_000).replace("; f", "[f]?; f"),
    ];
    for body in bodies {
        assert_refused(
            &body,
            Bounds {
                fuel: 1_000,
                ..Bounds::default()
            },
        );
    }
}

#[test]
fn branching_without_functions_ends() {
    let pipes = ["(., .)"; 600].join(" | ");
    assert_refused(&format!("[{pipes}]"), Bounds::default());
    assert_refused(&format!("{pipes} | empty"), Bounds::default());
    let loops: Vec<_> = (0..300)
        .map(|index| format!("(1, 2) as $x{index} | "))
        .collect();
    assert_refused(&format!("{} empty", loops.concat()), Bounds::default());
}

#[test]
fn try_does_not_catch_the_fence() {
    for text in [
        "try (def f: f; f) catch 1",
        "try (\"x\" * 1e9) catch 1",
        "[.[] | (def f: f; f)?] // 1",
        "label $out | (def f: f; f), break $out",
        "first((def f: f; f), 1)",
        "isvalid(def f: f; f)",
        "(def f: f; f) // 1",
    ] {
        assert_refused(text, Bounds::default());
    }
}

#[test]
fn long_and_nested_texts_are_refused_before_they_are_parsed() {
    let long = Err(Error::TooLong { limit: 4_096 });
    let nested = Err(Error::TooNested { limit: 128 });
    let around = |open: &str, inner: &str, close: &str, times: usize| {
        format!("{}{inner}{}", open.repeat(times), close.repeat(times))
    };
    for (open, inner, close) in [
        ("[", "", "]"),
        ("(", ".", ")"),
        ("{a:", ".", "}"),
        ("\"\\(", "1", ")\""),
    ] {
        assert_eq!(result(&around(open, inner, close, 2_000)), nested);
        assert_eq!(result(&around(open, inner, close, 129)), nested);
        let text = around(open, inner, close, 60);
        assert!(result(&text).is_ok(), "{text}: {:?}", result(&text));
    }
    assert_eq!(result(&around("(", ".", ")", 128)), result("."));
    assert_eq!(result(&format!(".{}", "|.".repeat(20_000))), long);
    assert_eq!(result(&format!("\"{}\"", "x".repeat(100_000))), long);
    assert_eq!(result(&"[".repeat(50_000)), long);
    for text in [
        "- ".repeat(4_000) + "1",
        "try ".repeat(4_000) + "1",
        ".|".repeat(2_000) + ".",
        ".+".repeat(1_500) + "null",
        "1,".repeat(2_000) + "empty",
        ". as $x | ".repeat(800) + "1",
        "def f: 1; ".repeat(800) + "1",
        "def f: ".repeat(800) + "1" + &"; 1".repeat(800),
        "if . then ".repeat(1_000) + "1" + &" end".repeat(1_000),
        "label $x | ".repeat(1_300) + "1",
        format!("[{}]", "1,".repeat(2_000) + "1"),
        format!(".{}", "[0]?".repeat(1_000)),
    ] {
        let result = result(&text);
        let fine = matches!(
            result,
            Ok(_) | Err(Error::Raised(_) | Error::SeveralOutputs)
        );
        assert!(fine, "{:.40}: {result:?}", text);
    }
}

#[test]
fn nothing_outside_of_the_evaluation_can_be_named() {
    for text in [
        "env",
        "$ENV",
        "$ENV.PATH",
        "env.PATH",
        "now",
        "halt",
        "halt(1)",
        "halt_error",
        "halt_error(1)",
        "input",
        "inputs",
        "debug",
        "debug(1)",
        "stderr",
        "localtime",
        "strflocaltime(\"%H\")",
        "input_filename",
        "input_line_number",
        "get_search_list",
        "$__prog_args",
        "getpath(env)",
        "modulemeta",
        "builtins",
        "import \"a\" as a; .",
        "include \"a\"; .",
        "a::b",
        "@foo \"x\"",
        "splits(env)",
        "input_line_number",
        "ltrimstr(now)",
        "error_empty2",
        "repl",
        "$__prog_name",
    ] {
        let refused = matches!(
            result(text),
            Err(Error::Unknown { .. } | Error::Syntax { .. })
        );
        assert!(refused, "{text}: {:?}", result(text));
    }
}

#[test]
fn memory_of_values_is_bounded_and_given_back() {
    let small = Bounds {
        memory: 10_000,
        ..Bounds::default()
    };
    assert!(is_refused(&evaluate("[range(1000)]", &Value::Null, small)));
    assert!(is_refused(&evaluate("\"x\" * 10000", &Value::Null, small)));
    assert_eq!(
        evaluate(".", &json!("x".repeat(10_000)), small),
        Err(Error::Memory)
    );
    // What is no longer alive does not count.
    let text = "reduce range(1000) as $i (0; . + ([range(100)] | length))";
    assert_eq!(evaluate(text, &Value::Null, small), Ok(json!(100_000)));
    let text = "reduce range(1000) as $i ({}; .a = [range(50)]) | .a | length";
    assert_eq!(evaluate(text, &Value::Null, small), Ok(json!(50)));
}

#[test]
fn result_is_bounded() {
    let small = Bounds {
        output: 100,
        ..Bounds::default()
    };
    assert_eq!(
        evaluate("[range(100)]", &Value::Null, small),
        Err(Error::Output)
    );
    assert_eq!(
        evaluate("\"x\" * 200", &Value::Null, small),
        Err(Error::Output)
    );
    assert_eq!(
        evaluate("\"x\" * 90 | length", &Value::Null, small),
        Ok(json!(90))
    );
}

#[test]
fn values_nest_a_hundred_deep() {
    let nested = |depth: usize| format!("reduce range({depth}) as $i (1; [.])");
    assert!(result(&nested(100)).is_ok());
    assert_eq!(result(&nested(101)), Err(Error::TooDeep));
    assert!(result(&format!("{} | tojson | fromjson", nested(100))).is_ok());
    let mut input = json!(1);
    for _ in 0..101 {
        input = json!([input]);
    }
    assert_eq!(
        evaluate(".", &input, Bounds::default()),
        Err(Error::TooDeep)
    );
}

#[test]
fn errors_of_large_values_are_short() {
    let text = "reduce range(40) as $i (0; [., .]) | .a";
    let Err(Error::Raised(message)) = result(text) else {
        panic!("{:?}", result(text));
    };
    assert!(message.len() < 300, "{message}");
    let Err(Error::Raised(message)) = result("error(\"x\" * 10000)") else {
        panic!("no error");
    };
    assert!(message.len() < 1_100, "{}", message.len());
}

/// Random expressions, many of them endless.
fn expressions() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec![
        ".",
        ".a",
        ".[0]",
        ".[]?",
        "1",
        "-1",
        "1e18",
        "null",
        "\"x\"",
        "[]",
        "{}",
        "$context",
        "f",
        "f",
        "empty",
        "..",
        "keys?",
        "tojson",
        "length?",
        "add?",
        "reverse?",
        "tostream",
        "paths",
        "error(\"e\")",
        "range(1e9)",
        "repeat(.)",
        "explode?",
        "flatten?",
        "to_entries?",
        "@base64",
        "\"x\" * 1e6",
        "[range(1e4)]",
        "nan",
        "infinite",
        "transpose?",
        "combinations?",
        "fromjson?",
    ]);
    let leaf = leaf.prop_map(str::to_owned);
    leaf.prop_recursive(6, 48, 3, |inner| {
        let two = (inner.clone(), inner.clone());
        let three = (inner.clone(), inner.clone(), inner.clone());
        let operators = vec![
            "|", ",", "+", "-", "*", "/", "%", "//", "==", "<", "and", "or",
        ];
        let updates = vec!["|=", "=", "+=", "//="];
        let functions = vec![
            "map",
            "first",
            "last",
            "path",
            "del",
            "sort_by",
            "group_by",
            "select",
            "recurse",
            "any",
            "walk",
            "map_values",
            "isempty",
            "with_entries",
            "min_by",
            "tojson|test",
            "INDEX",
            "paths",
        ];
        prop_oneof![
            (prop::sample::select(operators), two.clone())
                .prop_map(|(operator, (left, right))| format!("({left} {operator} {right})")),
            (prop::sample::select(updates), two.clone())
                .prop_map(|(operator, (left, right))| format!("({left} {operator} {right})")),
            (prop::sample::select(functions), inner.clone())
                .prop_map(|(function, inner)| format!("{function}({inner})")),
            inner.clone().prop_map(|inner| format!("[{inner}]")),
            inner.clone().prop_map(|inner| format!("({inner})?")),
            inner.clone().prop_map(|inner| format!("\"a\\({inner})\"")),
            two.clone()
                .prop_map(|(name, value)| format!("{{({name}): {value}}}")),
            two.clone()
                .prop_map(|(body, call)| format!("(def f: {body}; {call})")),
            two.clone()
                .prop_map(|(tried, caught)| format!("(try {tried} catch {caught})")),
            two.clone()
                .prop_map(|(value, body)| format!("({value} as [$x, {{a: $y}}] | {body})")),
            two.clone()
                .prop_map(|(value, body)| format!("({value} as $x | {body})")),
            two.prop_map(|(from, to)| format!(".[{from}:{to}]")),
            three
                .clone()
                .prop_map(|(over, from, body)| format!("reduce {over} as $x ({from}; {body})")),
            three
                .clone()
                .prop_map(|(over, from, body)| format!("[foreach {over} as $x ({from}; {body})]")),
            three.prop_map(|(when, then, other)| format!(
                "(if {when} then {then} else {other} end)"
            )),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_expressions_end_the_same_way_twice(text in expressions()) {
        let text = format!("def f: .; {text}");
        let Ok(expression) = Expression::compile(&text, &["context"]) else {
            return Ok(());
        };
        let bounds = Bounds::new(500, 4 << 20, 1 << 20);
        let input = json!({"a": [1, "x", null, {"b": [true]}]});
        let context = json!([1, 2]);
        let start = Instant::now();
        let first = expression.evaluate(&input, &[&context], &mut { bounds });
        prop_assert!(start.elapsed() < PATIENCE);
        prop_assert!(!matches!(first, Err(Error::Internal(_) | Error::Thread(_))), "{:?}", first);
        prop_assert_eq!(first, expression.evaluate(&input, &[&context], &mut { bounds }));
    }

    #[test]
    fn random_texts_never_panic(text in "[\\[\\](){}.|,:;\"\\\\$@#?a-c0-9 +*/<=!-]{0,60}") {
        let compiled = Expression::compile(&text, &["a"]);
        prop_assert!(!matches!(compiled, Err(Error::Internal(_) | Error::Thread(_))), "{:?}", compiled);
    }
}
