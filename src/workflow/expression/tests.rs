mod fence;
mod jq;
mod templates;

use serde_json::json;

use super::*;

const VARIABLES: &[&str] = &["context"];

fn evaluate(text: &str, input: &Value, mut bounds: Bounds) -> Result<Value, Error> {
    let context = json!({"color": "red"});
    Expression::compile(text, VARIABLES)?.evaluate(input, &[&context], &mut bounds)
}

fn result(text: &str) -> Result<Value, Error> {
    evaluate(text, &json!({"a": [1, 2, {"b": "x"}]}), Bounds::default())
}

#[test]
fn expression_sees_its_input_and_its_variables() {
    assert_eq!(result(".a[2].b"), Ok(json!("x")));
    assert_eq!(result("$context.color"), Ok(json!("red")));
    let expression = Expression::compile(".", VARIABLES).expect("it compiles");
    let missing = expression.evaluate(&Value::Null, &[], &mut Bounds::default());
    assert_eq!(missing, Err(Error::Variables));
}

#[test]
fn variables_keep_the_order_of_their_names() {
    let expression = Expression::compile("[$x, $y, $z]", &["x", "y", "z"]).expect("it compiles");
    let values = [json!(1), json!(2), json!(3)];
    let values: Vec<_> = values.iter().collect();
    let result = expression.evaluate(&Value::Null, &values, &mut Bounds::default());
    assert_eq!(result, Ok(json!([1, 2, 3])));
}

#[test]
fn expression_has_one_result_or_none() {
    assert_eq!(result("empty"), Ok(Value::Null));
    assert_eq!(result("1, 2"), Err(Error::SeveralOutputs));
    assert_eq!(result(".a[]"), Err(Error::SeveralOutputs));
    assert_eq!(
        result("1, error(\"no\")"),
        Err(Error::Raised("no".to_owned()))
    );
}

#[test]
fn expression_errors_say_what_and_where() {
    let syntax = |message: &str, at| {
        let message = message.to_owned();
        Err(Error::Syntax { message, at })
    };
    assert_eq!(
        result(".a["),
        syntax("expected closing bracket at the end", 3)
    );
    assert_eq!(result("1 +"), syntax("expected term at the end", 3));
    assert_eq!(result("1 )"), syntax("expected token instead of \")\"", 2));
    let unknown = |name: &str, at| {
        let name = name.to_owned();
        Err(Error::Unknown { name, at })
    };
    assert_eq!(result("1 | foo"), unknown("function foo", 4));
    assert_eq!(result("1 | foo(1; 2)"), unknown("function foo/2", 4));
    assert_eq!(result("1 | $foo"), unknown("variable $foo", 4));
    assert_eq!(result("break $foo"), unknown("label $foo", 6));
    assert_eq!(
        result(".a.b"),
        Err(Error::Raised(
            "cannot index [1,2,{\"b\":\"x\"}] with \"b\"".to_owned()
        ))
    );
    assert_eq!(
        result("error({a: 1})"),
        Err(Error::Raised("{\"a\":1}".to_owned()))
    );
    for text in ["", "  ", "# nothing"] {
        assert!(
            matches!(result(text), Err(Error::Syntax { .. })),
            "{text:?}"
        );
    }
}

#[test]
fn numbers_are_exact_as_far_as_json_carries_them() {
    let numbers = json!([
        18_446_744_073_709_551_615_u64,
        i64::MIN,
        9_007_199_254_740_993_i64
    ]);
    assert_eq!(
        evaluate(".", &numbers, Bounds::default()),
        Ok(numbers.clone())
    );
    assert_eq!(
        evaluate("map(. + 0)", &numbers, Bounds::default()),
        Ok(numbers)
    );
    let same = [
        ("9007199254740993 - 1", json!(9_007_199_254_740_992_i64)),
        (
            "9223372036854775807 + 1",
            json!(9_223_372_036_854_775_808_u64),
        ),
        (
            "18446744073709551615 + 1",
            json!(18_446_744_073_709_551_616_f64),
        ),
        ("9007199254740993 == 9007199254740992", json!(false)),
        ("9007199254740993 > 9007199254740992.0", json!(true)),
        ("1 == 1.0", json!(true)),
        ("4 / 2", json!(2)),
        ("1 / 2", json!(0.5)),
        ("-5 % 3", json!(-2)),
        ("5.9 % 3", json!(2)),
        ("9 | sqrt", json!(3)),
        (
            "[nan < nan, nan == nan, nan > nan]",
            json!([true, false, false]),
        ),
        ("[nan] | sort", json!([null])),
        ("infinite", json!(f64::MAX)),
        ("\"1e3\" | tonumber", json!(1000.0)),
    ];
    for (text, expected) in same {
        assert_eq!(result(text), Ok(expected), "{text}");
    }
    let printed = result("[1.0, 1, 1.0 * 2, 1e3] | tojson");
    assert_eq!(
        printed,
        Ok(json!("[1.0,1,2.0,1000.0]")),
        "a double stays one, unlike in jq"
    );
}

#[test]
fn results_do_not_depend_on_the_order_of_evaluations() {
    let expression = Expression::compile("[.[] | . * 2]", &[]).expect("it compiles");
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let expression = expression.clone();
            scope.spawn(move || {
                let result = expression.evaluate(&json!([thread]), &[], &mut Bounds::default());
                assert_eq!(result, Ok(json!([thread * 2])));
            });
        }
    });
}

#[test]
fn one_stack_serves_many_expressions() {
    let values = with_stack(|| {
        let name = std::thread::current().name().map(str::to_owned);
        (
            name,
            result("1 + 1"),
            std::thread::current().name().map(str::to_owned),
        )
    });
    let name = Some("expression".to_owned());
    assert_eq!(values, Ok((name.clone(), Ok(json!(2)), name)));
}

#[test]
fn results_do_not_depend_on_what_is_copied() {
    let input = json!({"a": {"b": [1, 2]}, "b": "a", "c": null, "d": {"e": {"a": 5}}});
    let texts = [
        ".a",
        ".a.b",
        ".a.b[0]",
        ".a[.b]?",
        ".[.b]",
        ".a | .b",
        ".a, .b | tojson",
        "{a}",
        "{a, b}",
        "{(.b): 1}",
        "{\"a\"}",
        r#"{"x\(.b)"}"#,
        "[.[]]",
        "keys",
        ".a as $x | .b",
        ". as {a: $x} | $x",
        "if .c then .a else .b end",
        "if .c then .a end",
        ".c // .b",
        "-(.a.b[0])",
        r#""\(.b)""#,
        r#"@base64 "\(.b)""#,
        "reduce .a.b[] as $x (0; . + $x)",
        "reduce .a.b[] as $x (.b; . + \"x\")",
        "def f: .b; f",
        "def f: .b; .d | f",
        "[.a.b[] as $x | .b]",
        "try .b.c catch .",
        ".x",
        ".x.y",
        ".d.e | .a",
        "[label $f | .b, break $f]",
        ".a = 1",
        "del(.a)",
        ".a |= 1",
        "..|=.",
        "true",
        "$v",
        "$v.a",
        "$v.a.b",
        "$v.b, .b",
        "$v | .b",
        "$v[.b]",
        "$v[\"b\"]",
        "{$v}",
        "$v | keys",
        "[$v.b, $v.c, ($v | length)]",
        ".a.b[$v.d.e.a - 5]",
        ".a.b[.a.b[0]:]",
        "[.. | numbers]",
        ".b as $v | $v",
        "$v as {a: $x} | $x",
        "$v as {(.b): $x} | $x",
        "def f($v): $v; f(.b)",
        "getpath([\"a\", \"b\"])",
        "path(.a.b)",
        "input_a?",
        "$v.b.c",
        ".b.c",
        ".b[1:]",
        ".[\"a\", \"b\"]",
    ];
    for text in texts {
        let evaluate = |text: &str| {
            let expression = Expression::compile(text, &["v"])?;
            let result = expression.evaluate(&input, &[&input], &mut Bounds::default());
            result.map_err(|error| Error::Raised(error.to_string()))
        };
        // This way all is copied.
        let whole = evaluate(&format!(
            "(. | length) as $all | ($v | length) as $all | ({text})"
        ));
        match (evaluate(text), whole) {
            (Err(Error::Unknown { .. }), Err(Error::Unknown { .. })) => {}
            (ours, whole) => assert_eq!(ours, whole, "{text}"),
        }
    }
    for input in [json!([1]), json!("x"), json!(1), json!(null)] {
        for text in [".a", ".a.b", "$v.a", "{a}"] {
            let expression = Expression::compile(text, &["v"]).expect("it compiles");
            let result = expression.evaluate(&input, &[&input], &mut Bounds::default());
            let whole = format!("(. | length) as $all | ($v | length) as $all | ({text})");
            let whole = Expression::compile(&whole, &["v"]).expect("it compiles");
            assert_eq!(
                result,
                whole.evaluate(&input, &[&input], &mut Bounds::default()),
                "{text}"
            );
        }
    }
}

#[test]
fn only_what_is_read_counts_as_memory() {
    let input = json!({"small": 1, "large": "x".repeat(10_000)});
    let bounds = Bounds {
        memory: 5_000,
        ..Bounds::default()
    };
    assert_eq!(evaluate(".small + 1", &input, bounds), Ok(json!(2)));
    assert_eq!(evaluate("$context.color", &input, bounds), Ok(json!("red")));
    assert_eq!(evaluate(".large", &input, bounds), Err(Error::Memory));
}
