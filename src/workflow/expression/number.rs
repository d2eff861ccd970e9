//! Numbers: integers are exact as far as JSON carries them here (64 bits, with or without a sign),
//! all others are doubles. `1.0` stays a double and is printed as `1.0`.

use std::cmp::Ordering;
use std::fmt;

use serde_json::Number as Json;

const LEAST: i128 = i64::MIN as i128;
const GREATEST: i128 = u64::MAX as i128;

#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    /// Between the least integer of 64 bits with a sign and the greatest without.
    Int(i128),
    Float(f64),
}

impl Number {
    /// Returns the integer, or the nearest double if it does not fit.
    pub(super) fn int(value: i128) -> Number {
        if (LEAST..=GREATEST).contains(&value) {
            Number::Int(value)
        } else {
            Number::Float(value as f64)
        }
    }

    /// Returns the integer if the double is one that fits, else the double.
    pub(super) fn whole(value: f64) -> Number {
        if value.fract() == 0.0 && value.abs() < 1e18 {
            Number::Int(value as i128)
        } else {
            Number::Float(value)
        }
    }

    pub(super) fn parse(text: &str) -> Option<Number> {
        if let Ok(value) = text.parse::<i128>() {
            return Some(Number::int(value));
        }
        text.parse::<f64>().ok().map(Number::Float)
    }

    pub(super) fn from_json(number: &Json) -> Number {
        if let Some(value) = number.as_i64() {
            Number::Int(value.into())
        } else if let Some(value) = number.as_u64() {
            Number::Int(value.into())
        } else {
            Number::Float(number.as_f64().unwrap_or(f64::NAN))
        }
    }

    /// Returns the number as JSON has it: as in jq, none for what is not a number, and the greatest
    /// double for infinity.
    pub(super) fn to_json(self) -> Option<Json> {
        match self {
            Number::Int(value) => Json::from_i128(value),
            Number::Float(value) if value.is_nan() => None,
            Number::Float(value) => Json::from_f64(value.clamp(f64::MIN, f64::MAX)),
        }
    }

    pub(super) fn as_f64(self) -> f64 {
        match self {
            Number::Int(value) => value as f64,
            Number::Float(value) => value,
        }
    }

    pub(super) fn is_nan(self) -> bool {
        self.as_f64().is_nan()
    }

    /// Returns the integer below, at the ends of the range where it is outside.
    pub(super) fn floor(self) -> i64 {
        match self {
            Number::Int(value) => i64::try_from(value).unwrap_or(i64::MAX),
            Number::Float(value) => value.floor() as i64,
        }
    }

    /// Returns the integer above, at the ends of the range where it is outside.
    pub(super) fn ceil(self) -> i64 {
        match self {
            Number::Int(value) => i64::try_from(value).unwrap_or(i64::MAX),
            Number::Float(value) => value.ceil() as i64,
        }
    }

    /// A total order, in which what is not a number comes first.
    pub(super) fn order(self, other: Number) -> Ordering {
        match (self, other) {
            (Number::Int(left), Number::Int(right)) => left.cmp(&right),
            (Number::Int(left), Number::Float(right)) => order_mixed(left, right),
            (Number::Float(left), Number::Int(right)) => order_mixed(right, left).reverse(),
            (Number::Float(left), Number::Float(right)) => {
                let nan = right.is_nan().cmp(&left.is_nan());
                left.partial_cmp(&right).unwrap_or(nan)
            }
        }
    }

    pub(super) fn add(self, other: Number) -> Number {
        self.apply(other, i128::checked_add, |left, right| left + right)
    }

    pub(super) fn sub(self, other: Number) -> Number {
        self.apply(other, i128::checked_sub, |left, right| left - right)
    }

    pub(super) fn mul(self, other: Number) -> Number {
        self.apply(other, i128::checked_mul, |left, right| left * right)
    }

    /// Two integers of which one divides the other give an integer.
    pub(super) fn div(self, other: Number) -> Option<Number> {
        if other.as_f64() == 0.0 {
            return None;
        }
        let exact = |left: i128, right: i128| (left % right == 0).then(|| left / right);
        Some(self.apply(other, exact, |left, right| left / right))
    }

    /// Both are cut to integers first, as in jq.
    pub(super) fn rem(self, other: Number) -> Option<Number> {
        let cut = |number| match number {
            Number::Int(value) => value,
            Number::Float(value) => (value as i128).clamp(LEAST, GREATEST),
        };
        if self.is_nan() || other.is_nan() {
            return Some(Number::Float(f64::NAN));
        }
        let divisor = cut(other).abs();
        (divisor != 0).then(|| Number::int(cut(self) % divisor))
    }

    pub(super) fn neg(self) -> Number {
        match self {
            Number::Int(value) => Number::int(-value),
            Number::Float(value) => Number::Float(-value),
        }
    }

    fn apply(
        self,
        other: Number,
        exact: impl Fn(i128, i128) -> Option<i128>,
        near: impl Fn(f64, f64) -> f64,
    ) -> Number {
        if let (Number::Int(left), Number::Int(right)) = (self, other)
            && let Some(value) = exact(left, right)
        {
            return Number::int(value);
        }
        Number::Float(near(self.as_f64(), other.as_f64()))
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_json() {
            Some(number) => number.fmt(f),
            None => f.write_str("null"),
        }
    }
}

fn order_mixed(left: i128, right: f64) -> Ordering {
    if right.is_nan() {
        return Ordering::Greater;
    }
    let below = right.floor();
    // A double outside the range of the type becomes its nearest end, which no integer here is.
    left.cmp(&(below as i128)).then_with(|| {
        if right > below {
            Ordering::Less
        } else {
            Ordering::Equal
        }
    })
}
