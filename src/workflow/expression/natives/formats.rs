//! What `@csv`, `@uri` and the others do.

use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use jaq_core::RunPtr;
use jaq_core::native::{Filter, bome, v};

use super::signatures::Data;
use crate::workflow::expression::meter::{self, Charge};
use crate::workflow::expression::value::{Failure, Val, ValR};

pub(super) fn all() -> Vec<Filter<RunPtr<Data>>> {
    vec![
        ("to_csv", v(0), |cv| bome(row(&cv.1, ",", csv_cell))),
        ("to_tsv", v(0), |cv| bome(row(&cv.1, "\t", tsv_cell))),
        ("to_sh", v(0), |cv| bome(shell(&cv.1))),
        ("escape_html", v(0), |cv| bome(escape(&cv.1, html))),
        ("escape_uri", v(0), |cv| bome(escape(&cv.1, uri))),
        ("encode_base64", v(0), |cv| {
            bome(cv.1.as_text().map(|text| {
                meter::work(text.len() * 2);
                Val::text(STANDARD.encode(text))
            }))
        }),
        ("decode_base64", v(0), |cv| bome(decode_base64(&cv.1))),
    ]
}

fn escape(value: &Val, escape: fn(char, &mut String)) -> ValR {
    let text = value.as_text()?;
    // A character becomes six at most.
    let _charge = Charge::new(text.len() * 6);
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        escape(c, &mut escaped);
    }
    Ok(Val::text(escaped))
}

fn html(c: char, out: &mut String) {
    match c {
        '<' => out.push_str("&lt;"),
        '>' => out.push_str("&gt;"),
        '&' => out.push_str("&amp;"),
        '\'' => out.push_str("&#39;"),
        '"' => out.push_str("&quot;"),
        other => out.push(other),
    }
}

fn uri(c: char, out: &mut String) {
    if c.is_ascii_alphanumeric() || "-_.~".contains(c) {
        out.push(c);
        return;
    }
    for byte in c.encode_utf8(&mut [0; 4]).bytes() {
        // Writing to a string does not fail.
        let _written = write!(out, "%{byte:02X}");
    }
}

fn row(value: &Val, separator: &str, cell: fn(&Val) -> Result<String, Failure>) -> ValR {
    let mut line = String::new();
    let mut charge = Charge::default();
    for (index, value) in value.as_array()?.iter().enumerate() {
        let cell = cell(value)?;
        charge.add(cell.len() + separator.len());
        if index > 0 {
            line.push_str(separator);
        }
        line.push_str(&cell);
    }
    Ok(Val::text(line))
}

fn csv_cell(value: &Val) -> Result<String, Failure> {
    match value {
        Val::Str(text) => Ok(format!("\"{}\"", text.as_str().replace('"', "\"\""))),
        other => plain_cell(other, "csv"),
    }
}

fn tsv_cell(value: &Val) -> Result<String, Failure> {
    match value {
        Val::Str(text) => {
            let text = text.as_str().replace('\\', "\\\\").replace('\t', "\\t");
            Ok(text.replace('\n', "\\n").replace('\r', "\\r"))
        }
        other => plain_cell(other, "tsv"),
    }
}

fn plain_cell(value: &Val, format: &str) -> Result<String, Failure> {
    match value {
        Val::Null => Ok(String::new()),
        Val::Bool(value) => Ok(value.to_string()),
        Val::Num(number) => Ok(number.to_string()),
        other => Err(Failure::str(format_args!(
            "{} {other} is not valid in a {format} row",
            other.type_name()
        ))),
    }
}

fn shell(value: &Val) -> ValR {
    let words = match value {
        Val::Arr(array) => array.value.as_slice(),
        other => std::slice::from_ref(other),
    };
    let mut line = String::new();
    let mut charge = Charge::default();
    for (index, word) in words.iter().enumerate() {
        let word = match word {
            Val::Str(text) => format!("'{}'", text.as_str().replace('\'', "'\\''")),
            Val::Null => "null".to_owned(),
            Val::Bool(_) | Val::Num(_) => plain_cell(word, "shell")?,
            other => {
                return Err(Failure::str(format_args!(
                    "{} {other} cannot be escaped for a shell",
                    other.type_name()
                )));
            }
        };
        charge.add(word.len() + 1);
        if index > 0 {
            line.push(' ');
        }
        line.push_str(&word);
    }
    Ok(Val::text(line))
}

fn decode_base64(value: &Val) -> ValR {
    let text = value.as_text()?;
    meter::work(text.len() * 2);
    let bytes = STANDARD_NO_PAD.decode(text.trim_end_matches('='));
    let fail = || Failure::str(format_args!("{value} is not valid base64 data"));
    let bytes = bytes.map_err(|_| fail())?;
    Ok(Val::text(String::from_utf8_lossy(&bytes)))
}
