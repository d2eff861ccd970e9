//! JSON text as values, which pay for themselves while they are read.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{Map, Node, Number, Text, Val};

/// Reads one JSON document.
pub(in super::super) fn parse(text: &str) -> Result<Val, serde_json::Error> {
    serde_json::from_str(text)
}

impl<'de> Deserialize<'de> for Val {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Val, D::Error> {
        deserializer.deserialize_any(ValVisitor)
    }
}

struct ValVisitor;

impl<'de> Visitor<'de> for ValVisitor {
    type Value = Val;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Val, E> {
        Ok(Val::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Val, E> {
        Ok(Val::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Val, E> {
        Ok(Val::Num(Number::Int(value.into())))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Val, E> {
        Ok(Val::Num(Number::Int(value.into())))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Val, E> {
        Ok(Val::Num(Number::Float(value)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Val, E> {
        Ok(Val::text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Val, A::Error> {
        let mut array = Node::<Vec<Val>>::empty();
        while let Some(value) = values.next_element()? {
            array.push(value);
        }
        Ok(Val::Arr(array.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut properties: A) -> Result<Val, A::Error> {
        let mut object = Node::<Map>::empty();
        while let Some(name) = properties.next_key::<String>()? {
            let value = properties.next_value()?;
            object.insert(Text::new(name), value);
        }
        Ok(Val::Obj(object.into()))
    }
}
