//! What the interpreter asks of values: paths into them, and changes at these paths.

use std::ops::Range;
use std::rc::Rc;

use jaq_core::box_iter::{BoxIter, box_once};
use jaq_core::path::Opt;
use jaq_core::{Exn, ValT, ValX};

use super::{ELEMENT, Failure, Map, Node, Number, Text, Val, ValR};
use crate::workflow::expression::meter;

/// Work of following a path by one part, and of what the interpreter does for one of many values.
const STEP: usize = 32;

impl From<bool> for Val {
    fn from(value: bool) -> Val {
        Val::Bool(value)
    }
}

impl From<isize> for Val {
    fn from(value: isize) -> Val {
        Val::Num(Number::Int(value as i128))
    }
}

impl From<String> for Val {
    fn from(text: String) -> Val {
        Val::text(text)
    }
}

/// The part `[start:end]` of a path.
impl From<Range<Option<Val>>> for Val {
    fn from(range: Range<Option<Val>>) -> Val {
        Val::object([
            (Text::new("start"), range.start.unwrap_or(Val::Null)),
            (Text::new("end"), range.end.unwrap_or(Val::Null)),
        ])
    }
}

impl FromIterator<Val> for Val {
    fn from_iter<I: IntoIterator<Item = Val>>(values: I) -> Val {
        Val::array(values)
    }
}

impl ValT for Val {
    fn from_num(text: &str) -> ValR {
        let fail = || Failure::str(format_args!("{text} is not a number"));
        Number::parse(text).map(Val::Num).ok_or_else(fail)
    }

    fn from_map<I: IntoIterator<Item = (Val, Val)>>(properties: I) -> ValR {
        let mut object = Node::<Map>::empty();
        for (name, value) in properties {
            match name {
                Val::Str(name) => object.insert(name, value),
                other => {
                    let message = "object keys must be strings, not";
                    return Err(Failure::str(format_args!("{message} {other}")));
                }
            }
        }
        Ok(Val::Obj(Rc::new(object)))
    }

    fn key_values(self) -> BoxIter<'static, Result<(Val, Val), Failure>> {
        match self {
            Val::Arr(array) => Box::new((0..array.value.len()).map(move |index| {
                meter::work(STEP);
                Ok((Val::int(index), array.value[index].clone()))
            })),
            Val::Obj(object) => Box::new((0..object.value.len()).map(move |index| {
                meter::work(STEP);
                let (name, value) = &object.value.get_index(index).ok_or_else(gone)?;
                Ok((Val::Str((*name).clone()), (*value).clone()))
            })),
            other => box_once(Err(not_iterable(other))),
        }
    }

    fn values(self) -> BoxIter<'static, ValR> {
        match self {
            Val::Arr(array) => Box::new((0..array.value.len()).map(move |index| {
                meter::work(STEP);
                Ok(array.value[index].clone())
            })),
            Val::Obj(object) => Box::new((0..object.value.len()).map(move |index| {
                meter::work(STEP);
                let (_, value) = &object.value.get_index(index).ok_or_else(gone)?;
                Ok((*value).clone())
            })),
            other => box_once(Err(not_iterable(other))),
        }
    }

    fn index(self, index: &Val) -> ValR {
        meter::work(STEP);
        match (&self, index) {
            (Val::Null, Val::Null | Val::Str(_) | Val::Num(_)) => Ok(Val::Null),
            (Val::Obj(object), Val::Str(name)) => {
                Ok(object.value.get(name).cloned().unwrap_or(Val::Null))
            }
            (Val::Arr(array), Val::Num(index)) => {
                let value = element(*index, array.value.len()).map(|at| array.value[at].clone());
                Ok(value.unwrap_or(Val::Null))
            }
            (Val::Arr(_), Val::Arr(_)) => self.indices(index),
            (Val::Null | Val::Arr(_) | Val::Str(_), Val::Obj(range)) => {
                let start = range.value.get("start");
                let end = range.value.get("end");
                self.range(start..end)
            }
            _ => Err(Failure::index(self, index.clone())),
        }
    }

    fn range(self, range: Range<Option<&Val>>) -> ValR {
        meter::work(STEP);
        match &self {
            Val::Null => Ok(Val::Null),
            Val::Arr(array) => {
                let (from, to) = slice(range, array.value.len())?;
                Ok(Val::array(array.value[from..to].iter().cloned()))
            }
            Val::Str(text) => {
                meter::work(text.as_str().len());
                let text = text.as_str();
                let (from, to) = slice(range, text.chars().count())?;
                let part: String = text.chars().skip(from).take(to - from).collect();
                Ok(Val::text(part))
            }
            _ => Err(Failure::typ(self, "array or string")),
        }
    }

    fn map_values<'a, I: Iterator<Item = ValX<'a, Val>>>(
        self,
        opt: Opt,
        f: impl Fn(Val) -> I,
    ) -> ValX<'a, Val> {
        match self {
            Val::Arr(array) => {
                let mut changed = Node::<Vec<Val>>::empty();
                for value in Rc::unwrap_or_clone(array).value {
                    meter::work(ELEMENT);
                    if let Some(value) = f(value).next() {
                        changed.push(value?);
                    }
                }
                Ok(Val::Arr(Rc::new(changed)))
            }
            Val::Obj(object) => {
                let mut changed = Node::<Map>::empty();
                for (name, value) in Rc::unwrap_or_clone(object).value {
                    meter::work(ELEMENT);
                    if let Some(value) = f(value).next() {
                        changed.insert(name, value?);
                    }
                }
                Ok(Val::Obj(Rc::new(changed)))
            }
            other => opt.fail(other, |other| Exn::from(not_iterable(other))),
        }
    }

    fn map_index<'a, I: Iterator<Item = ValX<'a, Val>>>(
        self,
        index: &Val,
        opt: Opt,
        f: impl Fn(Val) -> I,
    ) -> ValX<'a, Val> {
        meter::work(STEP);
        match (self, index) {
            (value @ (Val::Null | Val::Arr(_)), Val::Obj(range)) => {
                let range = range.value.get("start")..range.value.get("end");
                value.map_range(range, opt, f)
            }
            (Val::Null, Val::Str(name)) => {
                let Some(value) = f(Val::Null).next().transpose()? else {
                    return Ok(Val::Null);
                };
                Ok(Val::object([(name.clone(), value)]))
            }
            (Val::Obj(mut object), Val::Str(name)) => {
                let node: &mut Node<Map> = Rc::make_mut(&mut object);
                // Taken out, so that it can be changed in place.
                let old = node.value.get_mut(name).map(std::mem::take);
                match f(old.unwrap_or_default()).next().transpose()? {
                    Some(value) => node.insert(name.clone(), value),
                    None => {
                        meter::work(node.value.len());
                        node.value.shift_remove(name);
                    }
                }
                Ok(Val::Obj(object))
            }
            (Val::Null, Val::Num(_)) => Val::array([]).map_index(index, opt, f),
            (Val::Arr(mut array), Val::Num(number)) => {
                let length = array.value.len();
                let node: &mut Node<Vec<Val>> = Rc::make_mut(&mut array);
                match element(*number, length) {
                    Some(at) => {
                        let old = std::mem::take(&mut node.value[at]);
                        match f(old).next().transpose()? {
                            Some(value) => {
                                node.hold(&value);
                                node.value[at] = value;
                            }
                            None => {
                                meter::work(length);
                                node.value.remove(at);
                            }
                        }
                    }
                    None => {
                        let Ok(at) = usize::try_from(number.floor()) else {
                            let message = format!("index {number} is out of bounds");
                            let fail = |_| Exn::from(Failure::str(message));
                            return opt.fail(Val::Arr(array), fail);
                        };
                        if let Some(value) = f(Val::Null).next().transpose()? {
                            for _ in length..at {
                                node.push(Val::Null);
                            }
                            node.push(value);
                        }
                    }
                }
                Ok(Val::Arr(array))
            }
            (value, index) => {
                let fail = |value| Exn::from(Failure::index(value, index.clone()));
                opt.fail(value, fail)
            }
        }
    }

    fn map_range<'a, I: Iterator<Item = ValX<'a, Val>>>(
        self,
        range: Range<Option<&Val>>,
        opt: Opt,
        f: impl Fn(Val) -> I,
    ) -> ValX<'a, Val> {
        meter::work(STEP);
        match self {
            Val::Null => Val::array([]).map_range(range, opt, f),
            Val::Arr(array) => {
                let (from, to) = slice(range, array.value.len()).map_err(Exn::from)?;
                let part = Val::array(array.value[from..to].iter().cloned());
                let changed = f(part).next().transpose()?;
                let changed = match changed {
                    Some(part) => part.into_elements().map_err(Exn::from)?,
                    None => Vec::new(),
                };
                let before = array.value[..from].iter().cloned();
                let after = array.value[to..].iter().cloned();
                Ok(Val::array(before.chain(changed).chain(after)))
            }
            other => opt.fail(other, |other| Exn::from(Failure::typ(other, "array"))),
        }
    }

    fn as_bool(&self) -> bool {
        self.is_true()
    }

    fn into_string(self) -> Val {
        Val::Str(self.to_text())
    }
}

impl Val {
    /// Returns where a part begins in an array, or where a value stands in it.
    pub(in super::super) fn indices(&self, part: &Val) -> ValR {
        match (self, part) {
            (Val::Null, _) => Ok(Val::Null),
            (Val::Str(text), Val::Str(part)) => {
                let text = text.as_str();
                let part = part.as_str();
                meter::work(text.len() * 2);
                if part.is_empty() {
                    return Ok(Val::array([]));
                }
                // Overlapping ones count; positions are in characters.
                let mut found = Vec::new();
                for (position, (at, _)) in text.char_indices().enumerate() {
                    if text[at..].starts_with(part) {
                        meter::work(part.len());
                        found.push(Val::int(position));
                    }
                }
                Ok(Val::array(found))
            }
            (Val::Arr(array), Val::Arr(part)) => {
                if part.value.is_empty() {
                    return Ok(Val::array([]));
                }
                let windows = array.value.windows(part.value.len()).enumerate();
                let found = windows.filter(|(_, window)| *window == part.value.as_slice());
                Ok(Val::array(found.map(|(at, _)| Val::int(at))))
            }
            (Val::Arr(array), part) => {
                let values = array.value.iter().enumerate();
                let found = values.filter(|(_, value)| *value == part);
                Ok(Val::array(found.map(|(at, _)| Val::int(at))))
            }
            _ => Err(Failure::index(self.clone(), part.clone())),
        }
    }
}

/// Returns the place of an element. Negative numbers count from the end.
pub(super) fn element(index: Number, length: usize) -> Option<usize> {
    if index.is_nan() {
        return None;
    }
    let at = index.floor();
    let at = if at < 0 {
        at.checked_add_unsigned(length as u64)?
    } else {
        at
    };
    usize::try_from(at).ok().filter(|at| *at < length)
}

/// Returns what an object with `start` and `end` means.
pub(super) fn slice_of(range: &Map, length: usize) -> Result<(usize, usize), Failure> {
    slice(range.get("start")..range.get("end"), length)
}

/// Returns from where to where a slice goes. It may be empty and is always within the length.
fn slice(range: Range<Option<&Val>>, length: usize) -> Result<(usize, usize), Failure> {
    let place = |bound: Option<&Val>, default: usize, round: fn(Number) -> i64| match bound {
        None | Some(Val::Null) => Ok(default),
        Some(Val::Num(number)) => {
            let at = i128::from(round(*number));
            let at = if at < 0 { at + length as i128 } else { at };
            Ok(usize::try_from(at.max(0)).unwrap_or(length).min(length))
        }
        Some(other) => Err(Failure::typ(other.clone(), "start or end of a slice")),
    };
    let from = place(range.start, 0, Number::floor)?;
    let to = place(range.end, length, Number::ceil)?;
    Ok((from, to.max(from)))
}

fn not_iterable(value: Val) -> Failure {
    Failure::str(format_args!(
        "cannot iterate over {} {value}",
        value.type_name()
    ))
}

/// The length was read before, and nothing changes a shared value.
fn gone() -> Failure {
    Failure::str("a property is gone")
}
