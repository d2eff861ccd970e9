//! Functions of strings.

use jaq_core::RunPtr;
use jaq_core::native::{Filter, bome, unary, v};

use super::signatures::Data;
use crate::workflow::expression::meter;
use crate::workflow::expression::number::Number;
use crate::workflow::expression::value::{Failure, Val, ValR, split};

pub(super) fn all() -> Vec<Filter<RunPtr<Data>>> {
    vec![
        ("utf8bytelength", v(0), |cv| {
            bome(cv.1.as_text().map(|text| Val::int(text.len())))
        }),
        ("explode", v(0), |cv| {
            bome(
                cv.1.as_text()
                    .map(|text| Val::array(text.chars().map(|c| Val::int(c as usize)))),
            )
        }),
        ("implode", v(0), |cv| bome(implode(&cv.1))),
        ("ascii_downcase", v(0), |cv| {
            changed(&cv.1, str::to_ascii_lowercase)
        }),
        ("ascii_upcase", v(0), |cv| {
            changed(&cv.1, str::to_ascii_uppercase)
        }),
        ("trim", v(0), |cv| {
            changed(&cv.1, |text| text.trim().to_owned())
        }),
        ("ltrim", v(0), |cv| {
            changed(&cv.1, |text| text.trim_start().to_owned())
        }),
        ("rtrim", v(0), |cv| {
            changed(&cv.1, |text| text.trim_end().to_owned())
        }),
        ("startswith", v(1), |cv| {
            unary(cv, |text, start| {
                Ok(Val::Bool(text.as_text()?.starts_with(start.as_text()?)))
            })
        }),
        ("endswith", v(1), |cv| {
            unary(cv, |text, end| {
                Ok(Val::Bool(text.as_text()?.ends_with(end.as_text()?)))
            })
        }),
        ("ltrimstr", v(1), |cv| {
            unary(cv, |text, start| {
                Ok(without(text, &start, |text, start| {
                    text.strip_prefix(start)
                }))
            })
        }),
        ("rtrimstr", v(1), |cv| {
            unary(cv, |text, end| {
                Ok(without(text, &end, |text, end| text.strip_suffix(end)))
            })
        }),
        ("split_text", v(1), |cv| {
            unary(cv, |text, separator| {
                Ok(split(text.as_text()?, separator.as_text()?))
            })
        }),
        ("tonumber", v(0), |cv| bome(to_number(cv.1))),
        ("toboolean", v(0), |cv| bome(to_boolean(cv.1))),
    ]
}

fn changed<'a>(value: &Val, change: fn(&str) -> String) -> jaq_core::ValXs<'a, Val> {
    bome(value.as_text().map(|text| {
        meter::work(text.len());
        Val::text(change(text))
    }))
}

/// As in jq, what is no string or does not begin or end so stays as it is.
fn without(value: Val, part: &Val, strip: for<'t> fn(&'t str, &str) -> Option<&'t str>) -> Val {
    match (&value, part) {
        (Val::Str(text), Val::Str(part)) => match strip(text.as_str(), part.as_str()) {
            Some(rest) => Val::text(rest),
            None => value,
        },
        _ => value,
    }
}

fn implode(value: &Val) -> ValR {
    let mut text = String::new();
    for code in value.as_array()? {
        let c = u32::try_from(code.as_number()?.floor())
            .ok()
            .and_then(char::from_u32);
        let fail = || Failure::str(format_args!("{code} is no character"));
        text.push(c.ok_or_else(fail)?);
    }
    Ok(Val::text(text))
}

fn to_number(value: Val) -> ValR {
    if let Val::Num(_) = value {
        return Ok(value);
    }
    let text = value.as_text()?.trim();
    let plain = text
        .bytes()
        .all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b));
    let number = Some(text).filter(|_| plain).and_then(Number::parse);
    let fail = || Failure::str(format_args!("{value} cannot be parsed as a number"));
    number.map(Val::Num).ok_or_else(fail)
}

fn to_boolean(value: Val) -> ValR {
    match &value {
        Val::Bool(_) => return Ok(value),
        Val::Str(text) if text.as_str() == "true" => return Ok(Val::Bool(true)),
        Val::Str(text) if text.as_str() == "false" => return Ok(Val::Bool(false)),
        _ => {}
    }
    Err(Failure::str(format_args!(
        "{value} cannot be parsed as a boolean"
    )))
}
