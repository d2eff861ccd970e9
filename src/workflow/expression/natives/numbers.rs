//! Functions of numbers.

use jaq_core::RunPtr;
use jaq_core::native::{Filter, bome, v};

use super::signatures::{Data, binary};
use crate::workflow::expression::number::Number;
use crate::workflow::expression::value::{Val, ValR};

pub(super) fn all() -> Vec<Filter<RunPtr<Data>>> {
    vec![
        ("infinite", v(0), |_| bome(float(f64::INFINITY))),
        ("nan", v(0), |_| bome(float(f64::NAN))),
        ("isnan", v(0), |cv| {
            bome(cv.1.as_number().map(|number| Val::Bool(number.is_nan())))
        }),
        ("floor", v(0), |cv| bome(rounded(&cv.1, f64::floor))),
        ("ceil", v(0), |cv| bome(rounded(&cv.1, f64::ceil))),
        ("round", v(0), |cv| bome(rounded(&cv.1, f64::round))),
        ("trunc", v(0), |cv| bome(rounded(&cv.1, f64::trunc))),
        ("abs", v(0), |cv| {
            bome(cv.1.as_number().map(|number| Val::Num(absolute(number))))
        }),
        ("fabs", v(0), |cv| {
            bome(cv.1.as_number().map(|number| Val::Num(absolute(number))))
        }),
        ("sqrt", v(0), |cv| bome(applied(&cv.1, f64::sqrt))),
        ("cbrt", v(0), |cv| bome(applied(&cv.1, f64::cbrt))),
        ("exp", v(0), |cv| bome(applied(&cv.1, f64::exp))),
        ("exp2", v(0), |cv| bome(applied(&cv.1, f64::exp2))),
        ("exp10", v(0), |cv| bome(applied(&cv.1, |x| 10_f64.powf(x)))),
        ("log", v(0), |cv| bome(applied(&cv.1, f64::ln))),
        ("log2", v(0), |cv| bome(applied(&cv.1, f64::log2))),
        ("log10", v(0), |cv| bome(applied(&cv.1, f64::log10))),
        ("sin", v(0), |cv| bome(applied(&cv.1, f64::sin))),
        ("cos", v(0), |cv| bome(applied(&cv.1, f64::cos))),
        ("tan", v(0), |cv| bome(applied(&cv.1, f64::tan))),
        ("asin", v(0), |cv| bome(applied(&cv.1, f64::asin))),
        ("acos", v(0), |cv| bome(applied(&cv.1, f64::acos))),
        ("atan", v(0), |cv| bome(applied(&cv.1, f64::atan))),
        ("pow", v(2), |cv| {
            binary(cv, |_, x, y| applied_to(&x, &y, f64::powf))
        }),
        ("atan2", v(2), |cv| {
            binary(cv, |_, x, y| applied_to(&x, &y, f64::atan2))
        }),
        ("fmin", v(2), |cv| {
            binary(cv, |_, x, y| applied_to(&x, &y, f64::min))
        }),
        ("fmax", v(2), |cv| {
            binary(cv, |_, x, y| applied_to(&x, &y, f64::max))
        }),
        ("fmod", v(2), |cv| {
            binary(cv, |_, x, y| applied_to(&x, &y, |x, y| x % y))
        }),
    ]
}

pub(super) fn absolute(number: Number) -> Number {
    match number {
        Number::Int(value) => Number::int(value.abs()),
        Number::Float(value) => Number::Float(value.abs()),
    }
}

fn float(value: f64) -> ValR {
    Ok(Val::Num(Number::Float(value)))
}

fn applied(value: &Val, apply: fn(f64) -> f64) -> ValR {
    let value = apply(value.as_number()?.as_f64());
    Ok(Val::Num(Number::whole(value)))
}

fn applied_to(left: &Val, right: &Val, apply: fn(f64, f64) -> f64) -> ValR {
    let value = apply(left.as_number()?.as_f64(), right.as_number()?.as_f64());
    Ok(Val::Num(Number::whole(value)))
}

fn rounded(value: &Val, round: fn(f64) -> f64) -> ValR {
    match value.as_number()? {
        Number::Int(value) => Ok(Val::Num(Number::Int(value))),
        Number::Float(value) => Ok(Val::Num(Number::whole(round(value)))),
    }
}
