//! Regular expressions, by the crate `regex`: unlike jq's they know no look-around and no
//! back-references, and take time in proportion to the text.

use jaq_core::RunPtr;
use jaq_core::native::{Filter, bome, v};
use regex::{Captures, Match, Regex, RegexBuilder};

use super::signatures::{Cv, Data};
use crate::workflow::expression::meter;
use crate::workflow::expression::value::{Failure, Text, Val, ValR};

/// How long a pattern may be.
const PATTERN: usize = 4_096;
/// Memory of a compiled pattern.
const COMPILED: usize = 1 << 20;
/// Work of compiling a pattern, and per byte of it.
const COMPILE: usize = 100_000;
const COMPILE_BYTE: usize = 1_000;

pub(super) fn all() -> Vec<Filter<RunPtr<Data>>> {
    vec![("matches", v(3), |cv| bome(matches(cv)))]
}

/// What the letters of jq's flags ask for.
#[derive(Default)]
struct Flags {
    global: bool,
    insensitive: bool,
    extended: bool,
    dot_newline: bool,
    skip_empty: bool,
}

impl Flags {
    fn read(value: &Val) -> Result<Flags, Failure> {
        let mut flags = Flags::default();
        if let Val::Null = value {
            return Ok(flags);
        }
        for flag in value.as_text()?.chars() {
            match flag {
                'g' => flags.global = true,
                'i' => flags.insensitive = true,
                'x' => flags.extended = true,
                's' => flags.dot_newline = true,
                'n' => flags.skip_empty = true,
                'p' => {
                    flags.dot_newline = true;
                    flags.skip_empty = true;
                }
                other => {
                    let message = "is not a flag of regular expressions";
                    return Err(Failure::str(format_args!("{other} {message}")));
                }
            }
        }
        Ok(flags)
    }

    fn compile(&self, pattern: &str) -> Result<std::rc::Rc<Regex>, Failure> {
        if pattern.len() > PATTERN {
            return Err(Failure::str(format_args!(
                "a regular expression may have {PATTERN} bytes"
            )));
        }
        let switch = |on: bool| if on { '1' } else { '0' };
        let switches = [self.insensitive, self.extended, self.dot_newline];
        let key: String = switches
            .map(switch)
            .into_iter()
            .chain(pattern.chars())
            .collect();
        meter::regex(key, || {
            meter::work(COMPILE + COMPILE_BYTE * pattern.len());
            RegexBuilder::new(pattern)
                .case_insensitive(self.insensitive)
                .ignore_whitespace(self.extended)
                .dot_matches_new_line(self.dot_newline)
                .size_limit(COMPILED)
                .dfa_size_limit(COMPILED)
                .nest_limit(64)
                .build()
        })
        .map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => Failure::str(format_args!(
                "the regular expression {pattern} is too large"
            )),
            _ => Failure::str(format_args!("{pattern} is not a regular expression")),
        })
    }
}

/// `matches($re; $flags; $test)`: the matches as jq describes them, or whether there is one.
fn matches(mut cv: Cv<'_>) -> ValR {
    let test = cv.0.pop_var();
    let flags = Flags::read(&cv.0.pop_var())?;
    let pattern = cv.0.pop_var();
    let regex = flags.compile(pattern.as_text()?)?;
    let text = cv.1.as_text()?;
    meter::work(256 + text.len() * 4);
    if test.is_true() {
        return Ok(Val::Bool(regex.is_match(text)));
    }
    let names: Vec<_> = regex.capture_names().skip(1).collect();
    let mut place = Place {
        text,
        at: 0,
        characters: 0,
    };
    let mut found = Vec::new();
    for captures in regex.captures_iter(text) {
        // The search for one match may go to the end of the text.
        meter::work(256 + (text.len() - place.at) / 4);
        let empty = captures.get(0).is_none_or(|found| found.is_empty());
        if !(flags.skip_empty && empty) {
            found.push(describe(&captures, &names, &mut place));
        }
        if !flags.global {
            break;
        }
    }
    Ok(Val::array(found))
}

/// Counts characters up to a byte, from the byte of the last match on.
struct Place<'t> {
    text: &'t str,
    at: usize,
    characters: usize,
}

impl Place<'_> {
    fn of(&self, at: usize) -> usize {
        let (low, high) = (self.at.min(at), self.at.max(at));
        let between = self.text[low..high].chars().count();
        meter::work((high - low) / 4);
        if at < self.at {
            self.characters - between
        } else {
            self.characters + between
        }
    }

    fn advance(&mut self, at: usize) {
        self.characters = self.of(at);
        self.at = at;
    }
}

fn describe(captures: &Captures<'_>, names: &[Option<&str>], place: &mut Place<'_>) -> Val {
    let whole = captures.get(0);
    if let Some(whole) = whole {
        place.advance(whole.start());
    }
    let groups = names.iter().enumerate().map(|(index, name)| {
        let mut properties = properties(captures.get(index + 1), place);
        let name = name.map_or(Val::Null, Val::text);
        properties.push((Text::new("name"), name));
        Val::object(properties)
    });
    let groups = Val::array(groups);
    let mut properties = properties(whole, place);
    properties.push((Text::new("captures"), groups));
    Val::object(properties)
}

fn properties(found: Option<Match<'_>>, place: &Place<'_>) -> Vec<(Text, Val)> {
    let (offset, length, string) = match found {
        Some(found) => {
            meter::work(found.len() / 4);
            let offset = Val::int(place.of(found.start()));
            let length = Val::int(found.as_str().chars().count());
            (offset, length, Val::text(found.as_str()))
        }
        None => (Val::from(-1_isize), Val::int(0), Val::Null),
    };
    vec![
        (Text::new("offset"), offset),
        (Text::new("length"), length),
        (Text::new("string"), string),
    ]
}
