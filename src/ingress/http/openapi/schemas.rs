//! The JSON schemas of requests and answers in the OpenAPI document.

use schemars::{Schema, SchemaGenerator, generate::SchemaSettings, transform::RecursiveTransform};
use serde_json::{Map, Value};

/// The prefix of a reference to a named schema.
pub(super) const SCHEMAS: &str = "#/components/schemas/";

/// The schema generators. There are two, because a type has other required fields in a request
/// than in an answer.
pub(super) struct Schemas {
    pub(super) requests: SchemaGenerator,
    pub(super) answers: SchemaGenerator,
}

impl Schemas {
    pub(super) fn new() -> Self {
        let settings = || {
            SchemaSettings::draft2020_12().with(|settings| {
                settings.definitions_path = "/components/schemas".into();
                settings.meta_schema = None;
                settings
                    .transforms
                    .push(Box::new(RecursiveTransform(as_object)));
                settings
                    .transforms
                    .push(Box::new(RecursiveTransform(as_enum)));
            })
        };
        let answers = settings()
            .for_serialize()
            .with_transform(RecursiveTransform(without_null));
        Self {
            requests: settings().for_deserialize().into_generator(),
            answers: answers.into_generator(),
        }
    }

    /// Returns the named schemas of both.
    pub(super) fn into_components(mut self) -> Map<String, Value> {
        let mut schemas = self.requests.take_definitions(true);
        schemas.extend(self.answers.take_definitions(true));
        schemas
    }
}

/// Replaces the schema `true` (any value) with `{}`, because not every tool supports it.
fn as_object(schema: &mut Schema) {
    if schema.as_bool() == Some(true) {
        schema.ensure_object();
    }
}

/// Removes `null` from a schema, because answers omit absent values.
fn without_null(schema: &mut Schema) {
    let Some(object) = schema.as_object_mut() else {
        return;
    };
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = &types[..] {
            let only = only.clone();
            object.insert("type".into(), only);
        }
    }
    if let Some(Value::Array(values)) = object.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    if let Some(Value::Array(choices)) = object.get_mut("anyOf") {
        choices.retain(|choice| choice.get("type").is_none_or(|name| name != "null"));
        if let [Value::Object(only)] = &choices[..] {
            let only = only.clone();
            object.remove("anyOf");
            object.extend(only);
        }
    }
}

/// Turns a `oneOf` of strings with a description each into one `enum`, and lists the descriptions
/// in its own: few tools understand the `oneOf`.
fn as_enum(schema: &mut Schema) {
    let Some(object) = schema.as_object_mut() else {
        return;
    };
    let Some(Value::Array(choices)) = object.get("oneOf") else {
        return;
    };
    let (mut values, mut said) = (Vec::new(), Vec::new());
    said.extend(
        object
            .get("description")
            .and_then(Value::as_str)
            .map(ToOwned::to_owned),
    );
    for choice in choices {
        let of_choice = match (choice.get("const"), choice.get("enum")) {
            (Some(value), _) => vec![value.clone()],
            (None, Some(Value::Array(values))) => values.clone(),
            (None, _) => return,
        };
        let description = choice.get("description").and_then(Value::as_str);
        if let (Some(description), [Value::String(value)]) = (description, &of_choice[..]) {
            said.push(format!("- `{value}`: {description}"));
        }
        values.extend(of_choice);
    }
    if !values.iter().all(Value::is_string) {
        return;
    }
    object.remove("oneOf");
    object.insert("type".into(), "string".into());
    object.insert("enum".into(), values.into());
    if !said.is_empty() {
        object.insert("description".into(), said.join("\n").into());
    }
}
