//! Tests with schemas and payloads whose check would grow without bound, and tests that payloads
//! are read as JSON Schema specifies.

use proptest::{
    collection::vec,
    prelude::{Just, Strategy, any},
    prop_assert, prop_assert_eq, prop_oneof, proptest,
    test_runner::Config,
};
use serde_json::{Value, json};

use super::{MOST_STEPS, Misfit, PayloadCheck, PayloadSchema, STEPS_PER_BYTE, endless};
use crate::model::Encoding;

/// The schema of an expression tree: a union of node types that all have children.
fn tree(union: &str, types: &[&str]) -> Value {
    let node = |name: &&str| {
        json!({
            "type": "object",
            "properties": {
                "type": {"const": name},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "child": {"$ref": "#/$defs/node"},
            },
            "required": ["type"],
        })
    };
    let nodes: Vec<Value> = types.iter().map(node).collect();
    json!({"$ref": "#/$defs/node", "$defs": {"node": {union: nodes}}})
}

/// The same, but the discriminating name is sorted after the children, so that these are checked
/// first.
fn late_tree(union: &str, types: &[&str]) -> Value {
    let text = tree(union, types)
        .to_string()
        .replace("\"type\":{\"const\"", "\"zone\":{\"const\"");
    serde_json::from_str(&text.replace("[\"type\"]", "[\"zone\"]")).unwrap()
}

/// A payload of `depth` nested nodes. All have the type `inner`, except the innermost, which has
/// `leaf`.
fn nodes(name: &str, depth: usize, inner: &str, leaf: &str, is_list: bool) -> Value {
    let mut node = json!({name: leaf});
    for _ in 1..depth {
        node = if is_list {
            json!({name: inner, "children": [node]})
        } else {
            json!({name: inner, "child": node})
        };
    }
    node
}

fn compiled(schema: &Value) -> PayloadSchema {
    PayloadSchema::compile(&schema.to_string()).unwrap_or_else(|error| panic!("{error}: {schema}"))
}

fn misfit(schema: &PayloadSchema, payload: &Value) -> Option<Misfit> {
    let text = payload.to_string();
    let misfit = schema.misfit(text.as_bytes(), Encoding::Json);
    if let Some(misfit) = &misfit {
        assert!(
            misfit.says.len() < 1200 && misfit.logged.len() < 1200,
            "{misfit:?}"
        );
        assert_eq!(
            (misfit.says.lines().count(), misfit.logged.lines().count()),
            (1, 1),
            "{misfit:?}"
        );
    }
    misfit
}

#[test]
fn a_union_of_nodes_is_checked_whatever_its_depth() {
    let unions = ["anyOf", "oneOf"];
    let types: [&[&str]; 2] = [&["and", "or"], &["and", "or", "not"]];
    for (union, types) in unions
        .into_iter()
        .flat_map(|union| types.map(|types| (union, types)))
    {
        for (name, schema) in [
            ("type", tree(union, types)),
            ("zone", late_tree(union, types)),
        ] {
            let schema = compiled(&schema);
            for (depth, is_list) in [
                (1, true),
                (8, true),
                (12, true),
                (18, true),
                (59, true),
                (100, false),
            ] {
                let fits = nodes(name, depth, "or", "and", is_list);
                assert_eq!(misfit(&schema, &fits), None, "{union} {types:?} {depth}");
                for inner in ["bad", "or"] {
                    let bad = nodes(name, depth, inner, "bad", is_list);
                    let why = misfit(&schema, &bad).expect("a bad node does not fit");
                    assert!(
                        why.says.contains("does not fit the queue's payload_schema"),
                        "{why:?}"
                    );
                }
            }
        }
    }
}

/// The error names the first union that does not fit, even if it would take too long to say why
/// none of its branches fits.
#[test]
fn the_place_of_a_union_is_told() {
    let mut schema = tree("anyOf", &["and", "or", "not"]);
    let node = json!({"$ref": "#/$defs/node"});
    schema =
        json!({"properties": {"name": {"type": "string"}, "rule": node}, "$defs": schema["$defs"]});
    let schema = compiled(&schema);
    let payload = json!({"name": "x", "rule": nodes("type", 50, "or", "bad", true)});
    let why = misfit(&schema, &payload).unwrap();
    assert!(
        why.says
            .starts_with("payload at /rule does not fit the queue's payload_schema: {"),
        "{why:?}"
    );
    assert_eq!(
        why.logged,
        "the payload does not fit the queue's payload_schema at /$defs/node/anyOf"
    );
    // An error next to the union is reported first if the validator finds it first.
    let payload = json!({"name": 7, "rule": nodes("type", 50, "or", "bad", true)});
    assert!(
        misfit(&schema, &payload)
            .unwrap()
            .says
            .starts_with("payload at /name does not fit")
    );
}

/// Schemas that refer to themselves twice, in different ways.
fn doubled() -> Vec<(&'static str, Value)> {
    let below =
        |keyword: &str| json!({"properties": {"child": {keyword: [{"$ref": "#"}, {"$ref": "#"}]}}});
    let twice = json!({"properties": {"child": {"$ref": "#"}}});
    vec![
        ("anyOf of references", below("anyOf")),
        ("oneOf of references", below("oneOf")),
        ("allOf of references", below("allOf")),
        ("allOf", json!({"allOf": [twice, twice]})),
        (
            "anyOf",
            json!({"anyOf": [{"required": ["none"], "allOf": [twice]}, twice]}),
        ),
        (
            "oneOf",
            json!({"oneOf": [{"allOf": [twice], "required": ["none"]}, twice]}),
        ),
        ("not", json!({"not": {"not": twice}, "allOf": [twice]})),
        ("if", json!({"if": twice, "then": twice, "else": twice})),
        (
            "dependentSchemas",
            json!({"dependentSchemas": {"child": twice, "type": twice}}),
        ),
        (
            "unevaluatedProperties",
            json!({"allOf": [twice], "anyOf": [twice, true], "unevaluatedProperties": twice}),
        ),
        (
            "unevaluatedProperties that refer",
            json!({"properties": {"type": true}, "unevaluatedProperties": {"$ref": "#"}, "anyOf": [{
                "unevaluatedProperties": {"$ref": "#"}}, {"unevaluatedProperties": {"$ref": "#"}}]}),
        ),
        (
            "patternProperties",
            json!({"patternProperties": {"^c": {"$ref": "#"}, "d$": {"$ref": "#"}}}),
        ),
        (
            "additionalProperties",
            json!({"additionalProperties": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}),
        ),
        (
            "dynamicRef",
            json!({"$dynamicAnchor": "node", "properties": {"child": {"allOf": [
                {"$dynamicRef": "#node"}, {"$dynamicRef": "#node"}]}}}),
        ),
        (
            "contains",
            json!({"properties": {"children": {"contains": {"$ref": "#"}, "items": {"$ref": "#"}, "minContains": 1}}}),
        ),
        (
            "prefixItems",
            json!({"properties": {"children": {"prefixItems": [{"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}]}}}),
        ),
        (
            "unevaluatedItems",
            json!({"properties": {"children": {"anyOf": [{"contains": {"$ref": "#"}}, {"prefixItems": [{"$ref": "#"}]}],
                "unevaluatedItems": {"$ref": "#"}}}}),
        ),
        (
            "names",
            json!({"propertyNames": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "properties": {"child": {"$ref": "#"}}}),
        ),
        (
            "ring",
            json!({"$ref": "#/$defs/a", "$defs": {
                "a": {"properties": {"child": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]}}},
                "b": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}]},
                "c": {"oneOf": [{"$ref": "#/$defs/a"}, {"required": ["none"], "$ref": "#/$defs/b"}]}}}),
        ),
    ]
}

/// A deeply nested value, and a schema that takes many calls for each level: together they would
/// overflow the stack of a thread.
#[test]
fn a_check_does_not_overflow_the_stack() {
    let reference = |level: usize| json!({"$ref": format!("#/$defs/{level}")});
    let mut defs: serde_json::Map<String, Value> = (0..300)
        .map(|level| {
            (
                level.to_string(),
                json!({"allOf": [{"anyOf": [reference(level + 1)]}]}),
            )
        })
        .collect();
    defs.insert(
        "300".into(),
        json!({"properties": {"child": {"$ref": "#/$defs/0"}}}),
    );
    let schema = compiled(&json!({"$ref": "#/$defs/0", "$defs": defs}));
    let why = misfit(&schema, &nodes("type", 100, "x", "x", false)).expect("the check is given up");
    assert!(
        why.says
            .starts_with("holding the payload against the queue's payload_schema needs "),
        "{why:?}"
    );
    assert_eq!(misfit(&schema, &json!({})), None);
}

/// Each check ends, either with a result or with the message that it takes too long.
#[test]
fn schemas_that_refer_to_themselves_twice_end() {
    for (name, mut schema) in doubled() {
        // A requirement that a payload may violate at each level.
        schema["type"] = json!(["object", "string"]);
        let schema = compiled(&schema);
        for (depth, is_list) in [(3, false), (20, false), (50, true), (100, false)] {
            for last in ["good", "bad"] {
                let mut payload = nodes("type", depth, "x", "x", is_list);
                if last == "bad" {
                    let text = payload.to_string().replacen(
                        "{\"type\":\"x\"}",
                        "{\"type\":\"x\",\"child\":7}",
                        1,
                    );
                    payload = serde_json::from_str(&text).unwrap();
                }
                let text = payload.to_string();
                let most = MOST_STEPS + STEPS_PER_BYTE * text.len() as u64;
                let (_, steps) = schema.misfit_within(text.as_bytes(), Encoding::Json, most);
                assert!(steps <= most);
                #[allow(
                    clippy::print_stdout,
                    reason = "figures for whoever runs it with --nocapture"
                )]
                {
                    println!(
                        "{name}: depth {depth}, {last}: {steps} steps for {} bytes",
                        text.len()
                    );
                }
                misfit(&schema, &payload);
            }
        }
    }
}

#[test]
fn a_check_that_takes_too_long_is_given_up() {
    // Each level refers to the next one in two ways. No level refers to itself, so the validator
    // does not memoize anything.
    let mut defs = serde_json::Map::new();
    for level in 0..30 {
        let next = json!({"$ref": format!("#/$defs/{}", level + 1)});
        let forms = json!([{"not": {"not": next}}, {"allOf": [next]}]);
        defs.insert(
            level.to_string(),
            json!({"properties": {"child": {"anyOf": forms}}}),
        );
    }
    defs.insert("30".into(), json!({"type": "string"}));
    let schema = compiled(&json!({"$ref": "#/$defs/0", "$defs": defs}));
    let payload = nodes("type", 40, "x", "x", false);
    let text = payload.to_string();
    let why = misfit(&schema, &payload).unwrap();
    assert_eq!(why, endless(text.as_bytes()), "{why:?}");
    assert!(
        why.says
            .starts_with("holding the payload against the queue's payload_schema takes more than "),
        "{why:?}"
    );

    // It does not affect the checks of the payloads around it.
    let mut check = PayloadCheck::default();
    check.add(0, &schema, &"{}".into(), Encoding::Json);
    check.add(1, &schema, &text.into(), Encoding::Json);
    check.add(2, &schema, &"{}".into(), Encoding::Json);
    assert!(!check.advance_quickly());
    while !check.advance() {}
    assert_eq!(check.misfits().into_keys().collect::<Vec<_>>(), [1]);
}

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!(true)),
        Just(json!({"type": "string"})),
        Just(json!({"type": ["object", "array"]})),
        Just(json!({"required": ["a"]})),
        Just(json!({"const": 1})),
        Just(json!({"enum": [1.0, "a", [], {"a": 1}]})),
        (0..3).prop_map(|def| json!({"$ref": format!("#/$defs/{def}")})),
        (0..3).prop_map(|def| json!({"$ref": format!("#/$defs/{def}")})),
    ]
}

/// A schema that may refer to three definitions.
fn part() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(3, 12, 3, |inner| {
        let two = || vec(inner.clone(), 2..3);
        prop_oneof![
            two().prop_map(|parts| json!({"anyOf": parts})),
            two().prop_map(|parts| json!({"oneOf": parts})),
            two().prop_map(|parts| json!({"allOf": parts})),
            two().prop_map(|parts| json!({"if": parts[0], "then": parts[1]})),
            two().prop_map(|parts| json!({"if": parts[0], "else": parts[1]})),
            two().prop_map(|parts| json!({"properties": {"a": parts[0], "b": parts[1]}})),
            two().prop_map(
                |parts| json!({"properties": {"a": parts[0]}, "additionalProperties": parts[1]})
            ),
            two().prop_map(|parts| json!({"patternProperties": {"^a": parts[0], ".": parts[1]}})),
            two().prop_map(|parts| json!({"dependentSchemas": {"a": parts[0], "b": parts[1]}})),
            two().prop_map(|parts| json!({"prefixItems": [parts[0]], "items": parts[1]})),
            two().prop_map(
                |parts| json!({"anyOf": [parts[0], true], "unevaluatedProperties": parts[1]})
            ),
            two().prop_map(|parts| json!({"contains": parts[0], "unevaluatedItems": parts[1]})),
            inner.clone().prop_map(|part| json!({"not": part})),
            inner
                .clone()
                .prop_map(|part| json!({"items": part, "uniqueItems": true})),
            inner.prop_map(|part| json!({"propertyNames": part})),
        ]
    })
}

fn schema() -> impl Strategy<Value = Value> {
    vec(part(), 3).prop_map(
        |defs| json!({"$ref": "#/$defs/0", "$defs": {"0": defs[0], "1": defs[1], "2": defs[2]}}),
    )
}

fn value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-2..3_i64).prop_map(Value::from),
        Just(json!(1.0)),
        Just(json!(-0.0)),
        Just(json!(1e300)),
        Just(json!(u64::MAX)),
        "[ab\u{e9}\"\\\\]{0,3}".prop_map(Value::from),
    ];
    scalar.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            vec(("[ab]{1,2}", inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// A nested value that uses the same names at each level.
fn deep(depth: usize, is_list: bool) -> Value {
    (0..depth).fold(json!("a"), |inner, _| match is_list {
        true => json!({"a": [inner], "b": 1}),
        false => json!({"a": inner, "b": {"a": 1}}),
    })
}

/// Schemas without references that together use every way to query a value.
fn asking() -> Vec<Value> {
    vec![
        json!({"type": "integer"}),
        json!({"type": ["number", "null"]}),
        json!({"const": {"a": [1, {"b": null}]}}),
        json!({"enum": [null, 0, "a", [1.0], {"a": 1}]}),
        json!({"minimum": 1, "exclusiveMaximum": 2}),
        json!({"multipleOf": 0.5}),
        json!({"minLength": 1, "maxLength": 2}),
        json!({"pattern": "^a"}),
        json!({"minItems": 1, "maxItems": 2, "uniqueItems": true}),
        json!({"uniqueItems": true}),
        json!({"items": {"uniqueItems": true}}),
        json!({"minProperties": 1, "maxProperties": 2}),
        json!({"required": ["a", "b"]}),
        json!({"dependentRequired": {"a": ["b"]}}),
        json!({"properties": {"a": {"type": "string"}}, "additionalProperties": false}),
        json!({"patternProperties": {"^a": {"type": "number"}}, "additionalProperties": {"type": "array"}}),
        json!({"propertyNames": {"maxLength": 1}}),
        json!({"contains": {"type": "number"}, "maxContains": 1}),
        json!({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}, {"type": "number"}],
            "additionalItems": false}),
        json!({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 0,
            "exclusiveMinimum": true}),
    ]
}

fn plain(schema: &Value) -> jsonschema::Validator {
    jsonschema::options().offline().build(schema).unwrap()
}

proptest! {
    #![proptest_config(Config { cases: 300, ..Config::default() })]

    /// Both the number of steps of a check and the length of its message are bounded.
    #[test]
    fn generated_schemas_are_checked_within_their_steps(schema in schema(), depth in 1_usize..55, is_list in any::<bool>()) {
        let Ok(schema) = PayloadSchema::compile(&schema.to_string()) else { return Ok(()) };
        let payload = deep(depth, is_list);
        let text = payload.to_string();
        let (_, steps) = schema.misfit_within(text.as_bytes(), Encoding::Json, 50_000);
        prop_assert!(steps <= 50_000);
        misfit(&schema, &payload);
    }

    /// A payload fits if the same value fits in the validator's own representation.
    #[test]
    fn a_payload_fits_as_the_validators_own_value_does(schema in schema(), value in value(), depth in 1_usize..4) {
        let Ok(ours) = PayloadSchema::compile(&schema.to_string()) else { return Ok(()) };
        let plain = plain(&schema);
        for value in [value, deep(depth, true), deep(depth, false)] {
            let why = misfit(&ours, &value);
            prop_assert_eq!(why.is_none(), plain.is_valid(&value), "{} of {}: {:?}", schema, value, why);
        }
    }

    #[test]
    fn a_payload_is_asked_as_the_validators_own_value_is(value in value()) {
        for schema in asking() {
            let why = misfit(&compiled(&schema), &value);
            prop_assert_eq!(why.is_none(), plain(&schema).is_valid(&value), "{} of {}: {:?}", schema, value, why);
            let errors: Vec<_> = plain(&schema).iter_errors(&value).map(|error| error.to_owned()).collect();
            // If there are several errors, either may come first.
            if let (Some(why), [error]) = (why, &errors[..]) {
                let path = error.instance_path().as_str();
                let text = error.to_string();
                // If several names are not allowed, the check reports the first.
                let text = text.split_once(" were unexpected").map_or(&text[..], |_| " was unexpected)");
                prop_assert!(why.says.ends_with(text) && why.says.contains(path), "{:?} should say {} {}", why, path, text);
            }
        }
    }
}

#[test]
fn names_that_an_object_has_twice_are_refused() {
    let schema = compiled(&json!({"properties": {"url": {"pattern": "^https://"}}}));
    let many: Vec<String> = (0..100).map(|n| format!("\"{n}\":0")).collect();
    let many = many.join(",");
    let cases = [
        (
            r#"{"url":"https://x","other":{"url":1},"list":[{"url":2},{"url":3}]}"#.to_owned(),
            None,
        ),
        (format!("{{{many}}}"), None),
        (
            r#"{"url":"file:///etc/passwd","url":"https://x"}"#.to_owned(),
            Some("url"),
        ),
        (
            r#"{"url":"https://x","\u0075rl":"file:///etc/passwd"}"#.to_owned(),
            Some("url"),
        ),
        (
            r#"{"a":[{"b":{"c":1,"d":{},"c":1}}]}"#.to_owned(),
            Some("c"),
        ),
        (r#"{"":1,"":2}"#.to_owned(), Some("")),
        (format!("{{{many},\"7\":0}}"), Some("7")),
    ];
    for (payload, name) in cases {
        let why = schema.misfit(payload.as_bytes(), Encoding::Json);
        match name {
            None => assert_eq!(why, None, "{payload}"),
            Some(name) => {
                let why = why.expect("a name is there twice");
                let want = format!("the payload's name {name:?} is there twice in one object");
                assert!(why.says.starts_with(&want), "{why:?} should say {want}");
                assert!(
                    why.logged
                        .starts_with("a name of the payload is there twice in one object"),
                    "{why:?}"
                );
            }
        }
    }
}
