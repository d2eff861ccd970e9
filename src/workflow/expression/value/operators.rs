//! `+ - * / %` of values, as jq has them.

use std::ops::{Add, Div, Mul, Neg, Rem, Sub};
use std::rc::Rc;

use jaq_core::ops::Math;

use super::{ELEMENT, Failure, Map, NODE, Node, Text, Val, ValR};
use crate::workflow::expression::meter;
use crate::workflow::expression::meter::Charge;

/// Work of an operation on two numbers.
const OPERATION: usize = 16;

impl Add for Val {
    type Output = ValR;

    fn add(self, other: Val) -> ValR {
        meter::work(OPERATION);
        match (self, other) {
            (Val::Null, other) | (other, Val::Null) => Ok(other),
            (Val::Num(left), Val::Num(right)) => Ok(Val::Num(left.add(right))),
            (Val::Str(left), Val::Str(right)) => Ok(Val::Str(left.append(right.as_str()))),
            (Val::Arr(mut left), Val::Arr(right)) => {
                let array: &mut Node<Vec<Val>> = Rc::make_mut(&mut left);
                for value in &right.value {
                    array.push(value.clone());
                }
                Ok(Val::Arr(left))
            }
            (Val::Obj(mut left), Val::Obj(right)) => {
                let object: &mut Node<Map> = Rc::make_mut(&mut left);
                for (name, value) in &right.value {
                    object.insert(name.clone(), value.clone());
                }
                Ok(Val::Obj(left))
            }
            (left, right) => Err(Failure::math(left, Math::Add, right)),
        }
    }
}

impl Sub for Val {
    type Output = ValR;

    fn sub(self, other: Val) -> ValR {
        meter::work(OPERATION);
        match (self, other) {
            (Val::Num(left), Val::Num(right)) => Ok(Val::Num(left.sub(right))),
            (Val::Arr(left), Val::Arr(right)) => {
                let kept = left
                    .value
                    .iter()
                    .filter(|value| !right.value.contains(value));
                Ok(Val::array(kept.cloned()))
            }
            (left, right) => Err(Failure::math(left, Math::Sub, right)),
        }
    }
}

impl Mul for Val {
    type Output = ValR;

    fn mul(self, other: Val) -> ValR {
        meter::work(OPERATION);
        match (self, other) {
            (Val::Num(left), Val::Num(right)) => Ok(Val::Num(left.mul(right))),
            (Val::Str(text), Val::Num(times)) | (Val::Num(times), Val::Str(text)) => {
                Ok(repeat(text.as_str(), times.ceil()))
            }
            (Val::Obj(left), Val::Obj(right)) => Ok(merge(left, &right.value)),
            (left, right) => Err(Failure::math(left, Math::Mul, right)),
        }
    }
}

impl Div for Val {
    type Output = ValR;

    fn div(self, other: Val) -> ValR {
        meter::work(OPERATION);
        match (self, other) {
            (Val::Num(left), Val::Num(right)) => match left.div(right) {
                Some(value) => Ok(Val::Num(value)),
                None => Err(by_zero(left, Math::Div)),
            },
            (Val::Str(left), Val::Str(right)) => Ok(split(left.as_str(), right.as_str())),
            (left, right) => Err(Failure::math(left, Math::Div, right)),
        }
    }
}

impl Rem for Val {
    type Output = ValR;

    fn rem(self, other: Val) -> ValR {
        meter::work(OPERATION);
        match (self, other) {
            (Val::Num(left), Val::Num(right)) => match left.rem(right) {
                Some(value) => Ok(Val::Num(value)),
                None => Err(by_zero(left, Math::Rem)),
            },
            (left, right) => Err(Failure::math(left, Math::Rem, right)),
        }
    }
}

impl Neg for Val {
    type Output = ValR;

    fn neg(self) -> ValR {
        meter::work(OPERATION);
        self.as_number().map(|number| Val::Num(number.neg()))
    }
}

fn by_zero(left: super::Number, operation: Math) -> Failure {
    let operation = operation.as_str();
    Failure::str(format_args!("cannot calculate {left} {operation} 0"))
}

fn repeat(text: &str, times: i64) -> Val {
    let times = usize::try_from(times).unwrap_or_default();
    if times == 0 {
        return Val::Null;
    }
    let charge = Charge::new(text.len().saturating_mul(times).saturating_add(NODE));
    Val::Str(Text(Rc::new(Node {
        charge,
        depth: 0,
        value: text.repeat(times),
    })))
}

/// Splits as jq does: an empty text has no parts, an empty separator splits into characters.
pub(in super::super) fn split(text: &str, separator: &str) -> Val {
    meter::work(text.len());
    if text.is_empty() {
        Val::array([])
    } else if separator.is_empty() {
        Val::array(text.chars().map(Val::text))
    } else {
        Val::array(text.split(separator).map(Val::text))
    }
}

/// Merges objects that both have under a name, else takes the value of the right.
fn merge(mut left: Rc<Node<Map>>, right: &Map) -> Val {
    let object: &mut Node<Map> = Rc::make_mut(&mut left);
    for (name, value) in right {
        meter::work(ELEMENT);
        let merged = match (object.value.get_mut(name), value) {
            (Some(Val::Obj(mine)), Val::Obj(theirs)) => {
                let mine = std::mem::replace(mine, Rc::new(Node::empty()));
                merge(mine, &theirs.value)
            }
            _ => value.clone(),
        };
        object.insert(name.clone(), merged);
    }
    Val::Obj(left)
}
