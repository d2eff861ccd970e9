//! The schemas of what requests and answers carry.

use schemars::{Schema, SchemaGenerator, generate::SchemaSettings, transform::RecursiveTransform};
use serde_json::{Map, Value};

/// The places of named schemas.
pub(super) const SCHEMAS: &str = "#/components/schemas/";

/// The generators of schemas: a request and an answer of one type differ in the fields that must be there.
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
                settings.transforms.push(Box::new(RecursiveTransform(as_object)));
            })
        };
        let answers = settings().for_serialize().with_transform(RecursiveTransform(without_null));
        Self { requests: settings().for_deserialize().into_generator(), answers: answers.into_generator() }
    }

    /// The named schemas.
    pub(super) fn into_components(mut self) -> Map<String, Value> {
        let mut schemas = self.requests.take_definitions(true);
        schemas.extend(self.answers.take_definitions(true));
        schemas
    }
}

/// Writes `{}` for any value: not every program knows the schema `true`.
fn as_object(schema: &mut Schema) {
    if schema.as_bool() == Some(true) {
        schema.ensure_object();
    }
}

/// An answer leaves out what is not there.
fn without_null(schema: &mut Schema) {
    let Some(object) = schema.as_object_mut() else { return };
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
