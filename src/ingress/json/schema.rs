//! The schemas of the types that read and write their JSON by hand. All others derive theirs.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use super::{
    AtMost,
    backoff::Kind,
    text::{Instant, Priority, Time},
    value::Value,
};
use crate::model::{self, BulkState, ItemStatus, LetterKind, QueueName, Rfc3339, TaskId};

/// A type whose schema is written where it is used, without a name of its own.
macro_rules! inline {
    ($type:ty, $schema:tt) => {
        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    };
}

inline!(Time, {
    "type": "string",
    "pattern": r"^\s*\d+\s*[a-zA-Zµ]+(\s*\d+\s*[a-zA-Zµ]+)*\s*$",
    "examples": ["30s", "250ms", "1h 30m"],
});
inline!(Instant, { "type": "string", "format": "date-time", "examples": ["2030-01-31T12:00:00Z"] });
inline!(Rfc3339, { "type": "string", "format": "date-time", "examples": ["2030-01-31T12:00:00Z"] });
inline!(BulkState, { "type": "string", "enum": Self::ALL.map(Self::as_str) });
// Requests may use upper or lower case; answers use these forms.
inline!(Priority, { "type": "string", "enum": model::Priority::ALL.map(model::Priority::as_str) });
inline!(Kind, { "type": "string", "enum": model::BackoffKind::OWN.map(model::BackoffKind::as_str) });
inline!(model::Priority, { "type": "string", "enum": Self::ALL.map(Self::as_str) });
inline!(LetterKind, { "type": "string", "enum": Self::ALL.map(Self::as_str) });
inline!(ItemStatus, { "type": "string", "enum": Self::ALL.map(Self::as_str) });
inline!(TaskId, { "type": "string", "format": "uuid" });
inline!(QueueName, { "type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Za-z0-9._-]+$" });

/// Any JSON value.
impl JsonSchema for Value<'_> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Value".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        true.into()
    }
}

impl<T: JsonSchema, const N: usize> JsonSchema for AtMost<T, N> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("AtMost{N}{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "array", "items": generator.subschema_for::<T>(), "maxItems": N })
    }
}
