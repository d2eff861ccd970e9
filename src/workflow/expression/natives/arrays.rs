//! Functions of arrays.

use std::cmp::Ordering;

use jaq_core::native::{Filter, bome, unary, v};
use jaq_core::{Exn, RunPtr};

use super::signatures::{Cv, Data, call, f, once};
use crate::workflow::expression::meter::{self, Charge};
use crate::workflow::expression::value::{Failure, Text, Val, ValR};

type Keyed = Vec<(Val, Val)>;

pub(super) fn all() -> Vec<Filter<RunPtr<Data>>> {
    vec![
        ("add", v(0), |cv| bome(add(cv.1))),
        ("join", v(1), |cv| {
            unary(cv, |value, with| join(&value, &with))
        }),
        ("reverse", v(0), |cv| bome(reverse(cv.1))),
        ("flatten", v(1), |cv| {
            unary(cv, |value, depth| {
                let depth = depth.as_number()?.floor();
                if depth < 0 {
                    return Err(Failure::str("flatten depth must not be negative"));
                }
                let mut flat = Vec::new();
                flatten(&value, depth, &mut flat)?;
                Ok(Val::array(flat))
            })
        }),
        ("indices", v(1), |cv| {
            unary(cv, |value, part| value.indices(&part))
        }),
        ("bsearch", v(1), |cv| {
            unary(cv, |value, wanted| {
                let found = value
                    .as_array()?
                    .binary_search_by(|value| value.order(&wanted));
                Ok(Val::from(match found {
                    Ok(at) => at as isize,
                    Err(at) => -1 - at as isize,
                }))
            })
        }),
        ("sort", v(0), |cv| {
            bome(cv.1.into_elements().map(|mut values| {
                values.sort_by(Val::order);
                Val::array(values)
            }))
        }),
        ("unique", v(0), |cv| {
            bome(cv.1.into_elements().map(|mut values| {
                values.sort_by(Val::order);
                values.dedup_by(|left, right| left.order(right).is_eq());
                Val::array(values)
            }))
        }),
        ("min", v(0), |cv| bome(extreme(&cv.1, Ordering::is_lt))),
        ("max", v(0), |cv| bome(extreme(&cv.1, Ordering::is_ge))),
        ("sort_by", f(), |cv| {
            once(
                sorted(cv)
                    .map(|(sorted, _)| Val::array(sorted.into_iter().map(|(_, value)| value))),
            )
        }),
        ("group_by", f(), |cv| {
            once(sorted(cv).map(|(sorted, _)| group(sorted)))
        }),
        ("min_by", f(), |cv| once(extreme_by(cv, Ordering::is_lt))),
        ("max_by", f(), |cv| once(extreme_by(cv, Ordering::is_ge))),
    ]
}

fn add(value: Val) -> ValR {
    let values = match value {
        Val::Obj(object) => object.value.values().cloned().collect(),
        other => other.into_elements()?,
    };
    values
        .into_iter()
        .try_fold(Val::Null, |sum, value| sum + value)
}

fn join(value: &Val, with: &Val) -> ValR {
    let mut joined: Option<Text> = None;
    for value in value.as_array()? {
        let piece = match value {
            Val::Null => Text::new(""),
            Val::Arr(_) | Val::Obj(_) => {
                return Err(Failure::str(format_args!("{value} cannot be joined")));
            }
            other => other.to_text(),
        };
        joined = Some(match joined {
            None => Text::new("").append(piece.as_str()),
            Some(joined) => joined.append(with.as_text()?).append(piece.as_str()),
        });
    }
    Ok(Val::Str(joined.unwrap_or_else(|| Text::new(""))))
}

fn reverse(value: Val) -> ValR {
    match value {
        Val::Null => Ok(Val::array([])),
        Val::Str(text) => {
            meter::work(text.as_str().len());
            Ok(Val::text(text.as_str().chars().rev().collect::<String>()))
        }
        other => Ok(Val::array(other.into_elements()?.into_iter().rev())),
    }
}

fn flatten(value: &Val, depth: i64, flat: &mut Vec<Val>) -> Result<(), Failure> {
    let values = match value {
        Val::Obj(object) => object.value.values().cloned().collect(),
        other => other.as_array()?.to_vec(),
    };
    for value in values {
        // Shared values may be many more than there is memory for.
        meter::work(64);
        match value {
            Val::Arr(_) if depth > 0 => flatten(&value, depth - 1, flat)?,
            other => flat.push(other),
        }
    }
    Ok(())
}

fn extreme(value: &Val, better: fn(Ordering) -> bool) -> ValR {
    let mut values = value.as_array()?.iter();
    let Some(mut best) = values.next() else {
        return Ok(Val::Null);
    };
    for value in values {
        if better(value.order(best)) {
            best = value;
        }
    }
    Ok(best.clone())
}

/// Returns each element after the results of the function for it.
fn keyed<'a>(mut cv: Cv<'a>) -> Result<(Keyed, Charge), Exn<'a, Val>> {
    let function = cv.0.pop_fun();
    let mut charge = Charge::default();
    let mut keyed = Vec::new();
    for value in cv.1.into_elements()? {
        charge.add(size_of::<(Val, Val)>());
        let key = call(&function, value.clone()).collect::<Result<Val, _>>()?;
        keyed.push((key, value));
    }
    Ok((keyed, charge))
}

fn sorted<'a>(cv: Cv<'a>) -> Result<(Keyed, Charge), Exn<'a, Val>> {
    let (mut keyed, charge) = keyed(cv)?;
    keyed.sort_by(|(left, _), (right, _)| left.order(right));
    Ok((keyed, charge))
}

fn group(sorted: Keyed) -> Val {
    let groups = sorted.chunk_by(|(left, _), (right, _)| left.order(right).is_eq());
    Val::array(groups.map(|group| Val::array(group.iter().map(|(_, value)| value.clone()))))
}

fn extreme_by<'a>(cv: Cv<'a>, better: fn(Ordering) -> bool) -> Result<Val, Exn<'a, Val>> {
    let (keyed, _charge) = keyed(cv)?;
    let best = keyed.into_iter().reduce(|best, other| {
        if better(other.0.order(&best.0)) {
            other
        } else {
            best
        }
    });
    Ok(best.map_or(Val::Null, |(_, value)| value))
}
