//! The built-in functions. The list is our own: none of them knows the environment, the clock, an
//! input, a log or the process.

mod arrays;
mod dates;
mod formats;
mod numbers;
mod regexes;
mod signatures;
mod texts;

use jaq_core::box_iter::box_once;
use jaq_core::native::{Filter, Fun, bome, run, unary, v};
use jaq_core::{Native, RunPtr};

use super::fence::{CALL, TICKS};
use super::meter;
use super::value::{Failure, Val, ValR};

pub(super) use signatures::Data;

/// Returns the functions that are written in Rust.
pub(super) fn all() -> Vec<Fun<Data>> {
    let own = [general(), arrays::all(), texts::all(), formats::all()];
    let more = [numbers::all(), regexes::all(), dates::all()];
    let own = own
        .into_iter()
        .chain(more)
        .flatten()
        .map(|own| run::<Data>(own));
    let mut all: Vec<_> = jaq_core::funs().chain(own).collect();
    all.extend(ticks());
    all
}

fn ticks() -> impl Iterator<Item = Fun<Data>> {
    let ticks: [Native<Data>; TICKS.len()] = [
        tick::<1>(),
        tick::<2>(),
        tick::<4>(),
        tick::<8>(),
        tick::<16>(),
        tick::<32>(),
        tick::<64>(),
        tick::<128>(),
        tick::<256>(),
        tick::<512>(),
    ];
    let ticks = TICKS.into_iter().zip(ticks);
    let ticks = ticks.chain([(CALL, tick::<0>())]);
    ticks.map(|(name, tick)| (name, v(0), tick))
}

/// Returns its input, and leads to it as `.` does.
fn tick<const WEIGHT: u64>() -> Native<Data> {
    Native::new(|cv| {
        meter::tick(WEIGHT);
        box_once(Ok(cv.1))
    })
    .with_paths(|cv| {
        meter::tick(WEIGHT);
        box_once(Ok(cv.1))
    })
    .with_update(|cv, update| {
        meter::tick(WEIGHT);
        update(cv.1)
    })
}

fn general() -> Vec<Filter<RunPtr<Data>>> {
    vec![
        ("null", v(0), |_| bome(Ok(Val::Null))),
        ("true", v(0), |_| bome(Ok(Val::Bool(true)))),
        ("false", v(0), |_| bome(Ok(Val::Bool(false)))),
        ("type", v(0), |cv| bome(Ok(Val::text(cv.1.type_name())))),
        ("length", v(0), |cv| bome(length(&cv.1))),
        ("contains", v(1), |cv| {
            unary(cv, |value, part| contains(&value, &part).map(Val::Bool))
        }),
        ("has", v(1), |cv| {
            unary(cv, |value, name| has(&value, &name))
        }),
        ("keys", v(0), |cv| bome(keys(&cv.1))),
        ("to_json_text", v(0), |cv| {
            bome(Ok(Val::Str(cv.1.to_json_text())))
        }),
        ("fromjson", v(0), |cv| bome(from_json_text(&cv.1))),
        ("delpaths", v(1), |cv| {
            unary(cv, |value, paths| value.delete_paths(&paths))
        }),
    ]
}

fn length(value: &Val) -> ValR {
    match value {
        Val::Null => Ok(Val::int(0)),
        Val::Bool(_) => Err(Failure::str(format_args!("{value} has no length"))),
        Val::Num(number) => Ok(Val::Num(numbers::absolute(*number))),
        Val::Str(text) => {
            meter::work(text.as_str().len() / 4);
            Ok(Val::int(text.as_str().chars().count()))
        }
        Val::Arr(array) => Ok(Val::int(array.value.len())),
        Val::Obj(object) => Ok(Val::int(object.value.len())),
    }
}

fn contains(value: &Val, part: &Val) -> Result<bool, Failure> {
    meter::work(8);
    match (value, part) {
        (Val::Obj(value), Val::Obj(part)) => {
            for (name, part) in &part.value {
                match value.value.get(name) {
                    Some(value) if contains(value, part)? => {}
                    _ => return Ok(false),
                }
            }
            Ok(true)
        }
        (Val::Arr(value), Val::Arr(part)) => {
            for part in &part.value {
                let mut found = false;
                for value in &value.value {
                    if value.type_name() == part.type_name() && contains(value, part)? {
                        found = true;
                        break;
                    }
                }
                if !found {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (Val::Str(value), Val::Str(part)) => {
            meter::work(value.as_str().len());
            Ok(value.as_str().contains(part.as_str()))
        }
        _ if value.type_name() == part.type_name() => Ok(value == part),
        _ => Err(Failure::str(format_args!(
            "{} {value} and {} {part} cannot have their containment checked",
            value.type_name(),
            part.type_name()
        ))),
    }
}

fn has(value: &Val, name: &Val) -> ValR {
    match (value, name) {
        (Val::Obj(object), Val::Str(name)) => Ok(Val::Bool(object.value.contains_key(name))),
        (Val::Arr(array), Val::Num(index)) => {
            let index = index.floor();
            let within = usize::try_from(index).is_ok_and(|index| index < array.value.len());
            Ok(Val::Bool(within))
        }
        _ => Err(Failure::index(value.clone(), name.clone())),
    }
}

fn keys(value: &Val) -> ValR {
    match value {
        Val::Arr(array) => Ok(Val::array((0..array.value.len()).map(Val::int))),
        other => {
            let names = super::value::sorted_names(other.as_object()?);
            Ok(Val::array(names.into_iter().cloned().map(Val::Str)))
        }
    }
}

fn from_json_text(value: &Val) -> ValR {
    let text = value.as_text()?;
    meter::work(text.len() * 2);
    super::value::parse(text)
        .map_err(|error| Failure::str(format_args!("{value} cannot be parsed as JSON: {error}")))
}
