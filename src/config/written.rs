//! Converts between the values of settings and the forms in which people write them.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::builder::{Resettable, Str};

use super::{
    settings::Pipeline,
    units::{Address, ByteSize, Hosts, Pipelines, PriorityName, Time},
};
use crate::model::Priority;

/// A type that represents the written form of a `T`.
pub(super) trait Written<T>: Sized {
    fn value(self) -> T;

    /// The written form of `value`, or `None` if it has none.
    fn of(value: &T) -> Option<Self>;
}

/// Most values are their own written form.
impl<T: Clone> Written<T> for T {
    fn value(self) -> T {
        self
    }

    fn of(value: &T) -> Option<Self> {
        Some(value.clone())
    }
}

macro_rules! written {
    ($($form:ty as $type:ty: $value:expr, $of:expr;)*) => {
        $(impl Written<$type> for $form {
            fn value(self) -> $type {
                $value(self)
            }

            fn of(value: &$type) -> Option<Self> {
                $of(value)
            }
        })*
    };
}
written! {
    Time as Duration: |time: Self| time.0, |time: &Duration| Some(Self(*time));
    Vec<Time> as Vec<Duration>:
        |times: Self| times.into_iter().map(|time| time.0).collect(),
        |times: &Vec<Duration>| Some(times.iter().copied().map(Time).collect());
    ByteSize as u64: |size: Self| size.0, |size: &u64| Some(Self(*size));
    ByteSize as usize:
        |size: Self| usize::try_from(size.0).unwrap_or(usize::MAX),
        |size: &usize| Some(Self(*size as u64));
    Address as SocketAddr: |address: Self| address.0, |address: &SocketAddr| Some(Self(*address));
    Hosts as Vec<String>: |hosts: Self| hosts.0, |hosts: &Vec<String>| Some(Self(hosts.clone()));
    // An empty list has no written form: taskd does not run without a pipeline.
    Pipelines as Vec<Pipeline>:
        |list: Self| list.0,
        |list: &Vec<Pipeline>| (!list.is_empty()).then(|| Self(list.clone()));
    // An empty path means no path.
    PathBuf as Option<PathBuf>:
        |path: Self| Some(path).filter(|path| !path.as_os_str().is_empty()),
        |path: &Option<PathBuf>| Some(path.clone().unwrap_or_default());
    PriorityName as Priority: Priority::from, |priority: &Priority| Some((*priority).into());
}

/// Sets `target` to the value of `written`, if there is one.
pub(super) fn set<T, W: Written<T>>(target: &mut T, written: Option<W>) {
    if let Some(written) = written {
        *target = written.value();
    }
}

/// The written form of a value.
pub(super) fn text<T, W: Written<T>>(value: &T) -> Option<W> {
    W::of(value)
}

/// The heading of options in `--help`, or no heading if `text` is empty.
pub(super) fn heading(text: &'static str) -> Resettable<Str> {
    if text.is_empty() {
        Resettable::Reset
    } else {
        Resettable::Value(text.into())
    }
}

/// `TASKD_SOME_THING`, the environment variable of the option `some_thing`.
macro_rules! env_name {
    ($name:ident) => {{
        const LOWER: &str = concat!("TASKD_", stringify!($name));
        const UPPER: [u8; LOWER.len()] = crate::config::written::uppercase(LOWER);
        const NAME: &str = match std::str::from_utf8(&UPPER) {
            Ok(name) => name,
            Err(_) => panic!("names are ASCII"),
        };
        NAME
    }};
}
pub(super) use env_name;

pub(super) const fn uppercase<const N: usize>(text: &str) -> [u8; N] {
    let mut upper = [0; N];
    let mut at = 0;
    while at < N {
        upper[at] = text.as_bytes()[at].to_ascii_uppercase();
        at += 1;
    }
    upper
}
