//! How built-in functions take their arguments.

use jaq_core::box_iter::box_once;
use jaq_core::compile::TermId;
use jaq_core::data::JustLut;
use jaq_core::native::bome;
use jaq_core::{Bind, Ctx, Exn, ValXs};

use crate::workflow::expression::value::{Val, ValR};

/// What the interpreter is instantiated with.
pub(in super::super) type Data = JustLut<Val>;

pub(super) type Cv<'a> = jaq_core::Cv<'a, Data>;

/// Runs a function that an expression gave as an argument, for one of several values.
pub(super) fn call<'a>(function: &(TermId, Ctx<'a, Data>), value: Val) -> ValXs<'a, Val> {
    function.0.run((function.1.clone(), value))
}

/// A parameter that is a function, where `v(1)` is one that is a value.
pub(super) fn f() -> Box<[Bind]> {
    [Bind::Fun(())].into()
}

/// Takes two arguments that are values.
pub(super) fn binary<'a>(mut cv: Cv<'a>, apply: impl Fn(Val, Val, Val) -> ValR) -> ValXs<'a, Val> {
    let second = cv.0.pop_var();
    let first = cv.0.pop_var();
    bome(apply(cv.1, first, second))
}

/// Passes on what a function given as an argument raised, too.
pub(super) fn once<'a>(result: Result<Val, Exn<'a, Val>>) -> ValXs<'a, Val> {
    box_once(result)
}
