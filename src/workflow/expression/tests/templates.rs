use serde_json::{Value, json};

use super::super::{Bounds, Error, Shape, Template};

fn read(text: &str, bare: bool) -> Result<Value, Error> {
    let template = Template::read(text, bare, &["name"])?;
    template.evaluate(
        &json!({"n": 1, "s": "x"}),
        &[&json!("Ann")],
        &mut Bounds::default(),
    )
}

#[test]
fn whole_expression_gives_its_value() {
    for text in ["${ .n }", "${.n}", "  ${ .n }\n", "${ .n # } }\n }"] {
        assert_eq!(read(text, false), Ok(json!(1)), "{text:?}");
        assert_eq!(read(text, true), Ok(json!(1)), "{text:?}");
    }
    assert_eq!(read("${ {a: {b: .n}} }", false), Ok(json!({"a": {"b": 1}})));
    assert_eq!(read("${ \"}\" }", false), Ok(json!("}")));
    assert_eq!(read("${ \"\\(\"}\")\" }", false), Ok(json!("}")));
}

#[test]
fn bare_expression_is_read_only_where_it_may_stand() {
    assert_eq!(read(".n == 1", true), Ok(json!(true)));
    assert_eq!(read(".n == 1", false), Ok(json!(".n == 1")));
    assert!(matches!(
        read("a text", true),
        Err(Error::Syntax { .. } | Error::Unknown { .. })
    ));
}

#[test]
fn expressions_in_a_text_become_text() {
    let cases = [
        ("n is ${ .n }, s is ${ .s }.", "n is 1, s is x."),
        ("${ .n }${ .s }", "1x"),
        ("${ $name }!", "Ann!"),
        ("a ${ {a: [1.0, null]} } b", "a {\"a\":[1.0,null]} b"),
        ("{petId} $ { } $$ costs 5$", "{petId} $ { } $$ costs 5$"),
        ("ä${ \"ö\" }ü", "äöü"),
    ];
    for (text, expected) in cases {
        assert_eq!(read(text, false), Ok(json!(expected)), "{text}");
    }
}

#[test]
fn template_errors_count_from_the_start_of_the_string() {
    let at = |text: &str| match read(text, false) {
        Err(Error::Syntax { at, .. } | Error::Unknown { at, .. }) => at,
        other => panic!("{text}: {other:?}"),
    };
    assert_eq!(at("${ foo }"), 3);
    assert_eq!(at("a ${ . } ${ foo }"), 12);
    assert_eq!(at("a ${ . "), 2);
    assert_eq!(at("a ${ (. } b"), 2);
    assert_eq!(at("a ${ \"} b"), 2);
}

#[test]
fn shape_evaluates_its_own_strings_and_no_others() {
    let shape =
        json!({"n": "${ .n }", "list": ["${ .s }", 1, {"x": "a ${ .n }"}], "k${ .n }": "t"});
    let shape = Shape::read(&shape, &[]).expect("it compiles");
    let input = json!({"n": "${ .s }", "s": ["${ 1 }", "$x"]});
    let value = shape.evaluate(&input, &[], &mut Bounds::default());
    let expected = json!({
        "n": "${ .s }",
        "list": [["${ 1 }", "$x"], 1, {"x": "a ${ .s }"}],
        "k${ .n }": "t",
    });
    assert_eq!(value, Ok(expected));
}

#[test]
fn shape_without_expressions_is_a_constant() {
    let value = json!({"a": [1, null, "x", {"b": true}]});
    let shape = Shape::read(&value, &[]).expect("it compiles");
    assert!(matches!(&shape, Shape::Constant(constant) if *constant == value));
    assert_eq!(
        shape.evaluate(&Value::Null, &[], &mut Bounds::default()),
        Ok(value)
    );
}

#[test]
fn shape_error_names_its_string() {
    let shape = json!({"a/b": ["x", {"~": "${ foo }"}]});
    let (pointer, error) = Shape::read(&shape, &[]).expect_err("foo is unknown");
    assert_eq!(pointer, "/a~1b/1/~0");
    assert!(matches!(error, Error::Unknown { .. }));
}

#[test]
fn output_bound_is_for_the_whole_value() {
    let shape = json!(["${ . }", "${ . }", "${ . } and ${ . }"]);
    let shape = Shape::read(&shape, &[]).expect("it compiles");
    let input = json!("x".repeat(100));
    let with = |output| {
        let mut bounds = Bounds {
            output,
            ..Bounds::default()
        };
        shape.evaluate(&input, &[], &mut bounds)
    };
    assert!(with(500).is_ok());
    assert_eq!(with(300), Err(Error::Output));
}
