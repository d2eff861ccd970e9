//! Values as JSON text.

use std::fmt::{self, Display, Write};

use super::{ELEMENT, Node, Text, Val};
use crate::workflow::expression::meter::{self, Charge};

/// How much of a value an error message shows.
const SHOWN: usize = 80;

/// A text that pays for each piece before it grows.
struct Metered(Node<String>);

impl Write for Metered {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        self.0.charge.add(piece.len());
        self.0.value.push_str(piece);
        Ok(())
    }
}

/// A text that fails when it is long enough.
struct Short(String);

impl Write for Short {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        for c in piece.chars() {
            if self.0.len() >= SHOWN {
                return Err(fmt::Error);
            }
            self.0.push(c);
        }
        Ok(())
    }
}

impl Val {
    /// Returns the value as JSON on one line.
    pub(in super::super) fn to_json_text(&self) -> Text {
        let mut text = Metered(Node {
            charge: Charge::new(super::NODE),
            depth: 0,
            value: String::new(),
        });
        // It does not fail.
        let _written = self.write(&mut text);
        Text(text.0.into())
    }

    /// Returns a string as it is, others as JSON.
    pub(in super::super) fn to_text(&self) -> Text {
        match self {
            Val::Str(text) => text.clone(),
            other => other.to_json_text(),
        }
    }

    fn write(&self, out: &mut dyn Write) -> fmt::Result {
        meter::work(ELEMENT);
        match self {
            Val::Null => out.write_str("null"),
            Val::Bool(value) => write!(out, "{value}"),
            Val::Num(number) => write!(out, "{number}"),
            Val::Str(text) => write_string(text.as_str(), out),
            Val::Arr(array) => {
                out.write_char('[')?;
                for (index, value) in array.value.iter().enumerate() {
                    if index > 0 {
                        out.write_char(',')?;
                    }
                    value.write(out)?;
                }
                out.write_char(']')
            }
            Val::Obj(object) => {
                out.write_char('{')?;
                for (index, (name, value)) in object.value.iter().enumerate() {
                    if index > 0 {
                        out.write_char(',')?;
                    }
                    write_string(name.as_str(), out)?;
                    out.write_char(':')?;
                    value.write(out)?;
                }
                out.write_char('}')
            }
        }
    }
}

/// Used by error messages only, so it is short.
impl Display for Val {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Short(String::new());
        match self.write(&mut text) {
            Ok(()) => f.write_str(&text.0),
            Err(_) => write!(f, "{}…", text.0),
        }
    }
}

fn write_string(text: &str, out: &mut dyn Write) -> fmt::Result {
    let special = |c: char| c < ' ' || c == '"' || c == '\\';
    out.write_char('"')?;
    let mut rest = text;
    while let Some(at) = rest.find(special) {
        out.write_str(&rest[..at])?;
        match rest.as_bytes()[at] {
            b'"' => out.write_str("\\\"")?,
            b'\\' => out.write_str("\\\\")?,
            b'\n' => out.write_str("\\n")?,
            b'\r' => out.write_str("\\r")?,
            b'\t' => out.write_str("\\t")?,
            0x08 => out.write_str("\\b")?,
            0x0c => out.write_str("\\f")?,
            other => write!(out, "\\u{other:04x}")?,
        }
        rest = &rest[at + 1..];
    }
    out.write_str(rest)?;
    out.write_char('"')
}
