//! `payload_schema`: a file, or the schema itself.

use std::fs;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::model::PayloadSchema;

/// A larger schema is a mistake, such as the path of another file.
const MAX_BYTES: u64 = 4 << 20;

/// A schema, and the text that specifies it in the configuration file. Text that begins with `{` is
/// the schema itself, other text is a path, and empty text means no schema.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamedSchema {
    written: String,
    pub schema: Option<PayloadSchema>,
}

impl NamedSchema {
    fn read(written: &str) -> Result<Self, String> {
        let written = written.trim();
        if written.is_empty() {
            return Ok(Self::default());
        }
        if written.starts_with('{') {
            let schema =
                PayloadSchema::compile(written).map_err(|why| format!("the schema: {why}"))?;
            return Ok(Self {
                written: schema.text().to_owned(),
                schema: Some(schema),
            });
        }
        let text = read_file(written)
            .map_err(|why| format!("cannot read the schema {written:?}: {why}"))?;
        let schema = PayloadSchema::compile(&text).map_err(|why| format!("{written}: {why}"))?;
        Ok(Self {
            written: written.to_owned(),
            schema: Some(schema),
        })
    }
}

fn read_file(path: &str) -> Result<String, String> {
    let bytes = fs::metadata(path).map_err(|error| error.to_string())?.len();
    if bytes > MAX_BYTES {
        return Err(format!("it has {bytes} bytes; at most {MAX_BYTES}"));
    }
    fs::read_to_string(path).map_err(|error| error.to_string())
}

impl<'de> Deserialize<'de> for NamedSchema {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::read(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl Serialize for NamedSchema {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_is_a_file_or_stands_in_the_settings() {
        assert_eq!(NamedSchema::read(" ").unwrap(), NamedSchema::default());
        let inline = NamedSchema::read("{\n \"type\": \"object\"\n}").unwrap();
        assert_eq!(inline.written, r#"{"type":"object"}"#);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page.json");
        let path = path.to_str().unwrap();
        let error = NamedSchema::read(path).unwrap_err();
        assert!(
            error.starts_with("cannot read the schema \"") && error.lines().count() == 1,
            "{error}"
        );
        fs::write(path, "{\"type\": \"object\"}").unwrap();
        let named = NamedSchema::read(path).unwrap();
        assert_eq!((&named.written[..], named.schema), (path, inline.schema));
        fs::write(path, "{\"type\": 3}").unwrap();
        let error = NamedSchema::read(path).unwrap_err();
        assert!(error.starts_with(&format!("{path}: at /type: ")), "{error}");
    }
}
