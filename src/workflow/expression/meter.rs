//! What an evaluation has used, and its end when that is too much.
//!
//! The interpreter and the built-in functions report here what they do. A refusal unwinds the
//! evaluation, so no `try` of the expression sees it, and functions that cannot fail (comparing,
//! collecting, cloning) can be refused, too. (So this needs `panic = "unwind"`.) The memory that counts is that of values; what the
//! interpreter itself allocates is bounded by the ticks.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;

use regex::Regex;

use super::{Bounds, Error, bounds::WORK_PER_FUEL};

/// Work of a tick, whatever its weight. It also bounds the lists that the interpreter builds by one
/// element a tick and frees by recursion.
const TICK: usize = 1_024;

/// How many compiled regular expressions an evaluation keeps.
const REGEXES: usize = 16;

#[derive(Clone, Copy, Debug)]
enum Refusal {
    Fuel,
    Memory,
    TooDeep,
}

struct Meter {
    fuel: Cell<u64>,
    work: Cell<u64>,
    /// Bytes of the values that are alive.
    memory: Cell<usize>,
    memory_limit: Cell<usize>,
    /// An address in the frame that began the evaluation.
    stack: Cell<usize>,
    stack_limit: Cell<usize>,
    regexes: RefCell<HashMap<String, Rc<Regex>>>,
}

thread_local! {
    static METER: Meter = Meter {
        fuel: Cell::new(0),
        work: Cell::new(0),
        memory: Cell::new(0),
        memory_limit: Cell::new(0),
        stack: Cell::new(0),
        stack_limit: Cell::new(0),
        regexes: RefCell::default(),
    };
}

/// Evaluates within the bounds, on at most `stack` bytes of stack plus what lies between two ticks.
/// No value outlives the call.
pub(super) fn within<T>(
    bounds: &mut Bounds,
    stack: usize,
    evaluate: impl FnOnce(&mut Bounds) -> Result<T, Error>,
) -> Result<T, Error> {
    let of_one = bounds.fuel.saturating_mul(WORK_PER_FUEL);
    let work = of_one.min(bounds.work);
    METER.with(|meter| {
        meter.fuel.set(bounds.fuel);
        meter.work.set(work);
        meter.memory.set(0);
        meter.memory_limit.set(bounds.memory);
        meter.stack.set(stack_address());
        meter.stack_limit.set(stack);
    });
    let result = caught(|| evaluate(bounds));
    METER.with(|meter| {
        bounds.work -= work - meter.work.get();
        debug_assert_eq!(meter.memory.get(), 0, "a value outlived its evaluation");
        meter.regexes.borrow_mut().clear();
    });
    if work < of_one && result.as_ref().err() == Some(&Error::Fuel) {
        bounds.work = 0;
    }
    result
}

/// Turns a refusal, or any other panic, into an error.
pub(super) fn caught<T>(run: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|payload| {
        Err(match payload.downcast_ref::<Refusal>() {
            Some(Refusal::Fuel) => Error::Fuel,
            Some(Refusal::Memory) => Error::Memory,
            Some(Refusal::TooDeep) => Error::TooDeep,
            None => Error::Internal(message(&*payload)),
        })
    })
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic").to_owned()
}

fn refuse(refusal: Refusal) -> ! {
    // It does not call the panic hook.
    panic::resume_unwind(Box::new(refusal))
}

/// Refuses what nests too deep.
pub(super) fn too_deep() -> ! {
    refuse(Refusal::TooDeep)
}

/// Counts a step of the expression: a call of a definition, a round of a loop. One without weight
/// takes no fuel, only work.
pub(super) fn tick(weight: u64) {
    work(TICK);
    METER.with(|meter| {
        match meter.fuel.get().checked_sub(weight) {
            Some(left) => meter.fuel.set(left),
            None => refuse(Refusal::Fuel),
        }
        if meter.stack.get().abs_diff(stack_address()) > meter.stack_limit.get() {
            refuse(Refusal::TooDeep);
        }
    });
}

/// Counts work of a built-in function, best before it is done.
pub(super) fn work(units: usize) {
    METER.with(|meter| match meter.work.get().checked_sub(units as u64) {
        Some(left) => meter.work.set(left),
        None => refuse(Refusal::Fuel),
    });
}

/// Returns a compiled regular expression, and keeps it for this evaluation.
pub(super) fn regex<E>(
    key: String,
    compile: impl FnOnce() -> Result<Regex, E>,
) -> Result<Rc<Regex>, E> {
    METER.with(|meter| {
        if let Some(regex) = meter.regexes.borrow().get(&key) {
            return Ok(Rc::clone(regex));
        }
        let regex = Rc::new(compile()?);
        let mut regexes = meter.regexes.borrow_mut();
        if regexes.len() >= REGEXES {
            regexes.clear();
        }
        regexes.insert(key, Rc::clone(&regex));
        Ok(regex)
    })
}

#[inline(never)]
fn stack_address() -> usize {
    let marker = 0_u8;
    std::ptr::from_ref(std::hint::black_box(&marker)).addr()
}

/// Memory that a value takes, until it is dropped.
#[derive(Debug, Default)]
pub(super) struct Charge(usize);

impl Charge {
    pub(super) fn new(bytes: usize) -> Charge {
        let mut charge = Charge::default();
        charge.add(bytes);
        charge
    }

    /// Takes more memory. Call it before the memory is allocated.
    pub(super) fn add(&mut self, bytes: usize) {
        METER.with(|meter| {
            let used = meter.memory.get().saturating_add(bytes);
            if used > meter.memory_limit.get() {
                refuse(Refusal::Memory);
            }
            meter.memory.set(used);
        });
        self.0 += bytes;
        work(bytes / 4);
    }
}

/// A copy takes the same again.
impl Clone for Charge {
    fn clone(&self) -> Charge {
        Charge::new(self.0)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        METER.with(|meter| meter.memory.set(meter.memory.get().saturating_sub(self.0)));
    }
}
