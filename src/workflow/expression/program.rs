//! Compiles the text of an expression, with as much of the built-in functions as it uses, and runs
//! it.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use jaq_core::compile::Undefined;
use jaq_core::load::lex::{Lexer, StrPart, Tok, Token};
use jaq_core::load::parse::{Def, Parser, Term};
use jaq_core::load::{self, Arena, File, Loader};
use jaq_core::{Compiler, Ctx, Exn, Filter, Vars};
use serde_json::Value as Json;

use super::fence::Names;
use super::natives::{self, Data};
use super::need::Need;
use super::value::Val;
use super::{Bounds, Error, meter, stack};

/// How many bytes, tokens and nested brackets a text may have. The last two count the expression
/// and those in its strings.
const BYTES: usize = 65_536;
const TOKENS: usize = 4_096;
const NESTING: usize = 128;

/// The name under which an expression stands behind the built-in functions.
const MAIN: &str = "_expression";

/// A definition of the built-in functions, with its ticks and the functions that it calls.
struct Builtin {
    definition: Def<&'static str>,
    functions: BTreeSet<(&'static str, usize)>,
}

static BUILTINS: LazyLock<Vec<Builtin>> = LazyLock::new(|| {
    let definitions = load::parse(include_str!("prelude.jq"), |parser| parser.defs());
    let definitions = definitions.unwrap_or_default().into_iter();
    let fenced = definitions.map(|definition| {
        let mut names = Names::default();
        let definition = names.fence(definition);
        Builtin {
            definition,
            functions: names.functions,
        }
    });
    fenced.collect()
});

/// A compiled expression.
pub(super) struct Program {
    filter: Filter<Data>,
    /// What the expression reads of its input.
    input: Need,
    /// What it reads of each variable.
    variables: Vec<Need>,
}

impl Program {
    /// Needs a large stack.
    pub(super) fn compile(text: &str, variables: &[&str]) -> Result<Program, Error> {
        meter::caught(|| compile(text, variables))
    }

    /// Needs a large stack.
    pub(super) fn run(
        &self,
        input: &Json,
        variables: &[&Json],
        bounds: &mut Bounds,
    ) -> Result<Json, Error> {
        meter::within(bounds, stack::USABLE, |bounds| {
            let result = self.result(input, variables)?;
            result.to_json(&mut bounds.output).ok_or(Error::Output)
        })
    }

    /// Needs a large stack. Returns the result as text, strings as they are.
    pub(super) fn run_to_text(
        &self,
        input: &Json,
        variables: &[&Json],
        bounds: &mut Bounds,
    ) -> Result<String, Error> {
        meter::within(bounds, stack::USABLE, |bounds| {
            let result = self.result(input, variables)?;
            let text = result.to_text();
            bounds.spend(text.as_str().len())?;
            Ok(text.as_str().to_owned())
        })
    }

    fn result(&self, input: &Json, variables: &[&Json]) -> Result<Val, Error> {
        if variables.len() != self.variables.len() {
            return Err(Error::Variables);
        }
        let input = self.input.copy(input);
        let variables = variables.iter().zip(&self.variables);
        let variables = variables.map(|(variable, need)| need.copy(variable));
        let context = Ctx::<Data>::new(&self.filter.lut, Vars::new(variables));
        let mut results = self.filter.id.run((context, input));
        let Some(first) = results.next() else {
            return Ok(Val::Null);
        };
        let first = first.map_err(raised)?;
        match results.next() {
            None => Ok(first),
            Some(Ok(_)) => Err(Error::SeveralOutputs),
            Some(Err(error)) => Err(raised(error)),
        }
    }
}

fn raised(error: Exn<'_, Val>) -> Error {
    match error.get_err() {
        Ok(error) => Error::Raised(match error.into_val() {
            Val::Str(message) => shortened(message.as_str()),
            other => other.to_string(),
        }),
        Err(_) => Error::Raised("break without its label".to_owned()),
    }
}

/// The message of an error stands on one line and in a history.
fn shortened(message: &str) -> String {
    const SHOWN: usize = 1_000;
    match message.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &message[..at]),
        None => message.to_owned(),
    }
}

fn compile(text: &str, variables: &[&str]) -> Result<Program, Error> {
    let arena = Arena::default();
    let parsed = parse(text)?;
    let variables: Vec<_> = variables.iter().map(|name| format!("${name}")).collect();
    let variables: Vec<_> = variables.iter().map(String::as_str).collect();
    let input = Need::of(&parsed);
    let mut names = Names::of(text, &arena);
    let main = names.fence(Def {
        name: MAIN,
        args: variables.clone(),
        body: parsed,
    });
    let needs = variables.iter();
    let needs = needs
        .map(|name| names.variables.remove(name).unwrap_or_default())
        .collect();
    let mut definitions = Vec::new();
    // Each definition refers only to those above it.
    for builtin in BUILTINS.iter().rev() {
        let definition = &builtin.definition;
        if names.calls(definition.name, definition.args.len()) {
            names.functions.extend(&builtin.functions);
            definitions.push(definition.clone());
        }
    }
    definitions.reverse();
    definitions.push(main);
    let natives = natives::all().into_iter();
    let natives = natives.filter(|(name, arguments, _)| names.calls(name, arguments.len()));
    let call = if variables.is_empty() {
        MAIN.to_owned()
    } else {
        format!("{MAIN}({})", variables.join(";"))
    };
    let file = File {
        code: call.as_str(),
        path: (),
    };
    let internal = |what: &str| Error::Internal(format!("{what} of an expression"));
    let modules = Loader::new(definitions)
        .load(&arena, file)
        .map_err(|_| internal("the call"))?;
    let filter = Compiler::default()
        .with_funs(natives)
        .with_global_vars(variables.iter().copied())
        .compile(modules)
        .map_err(|errors| {
            let first = errors.first().and_then(|(_, errors)| errors.first());
            match first {
                Some((name, undefined)) => unknown(text, name, undefined),
                None => internal("the names"),
            }
        })?;
    Ok(Program {
        filter,
        input,
        variables: needs,
    })
}

fn parse(text: &str) -> Result<Term<&str>, Error> {
    let openers = text.bytes().filter(|byte| b"([{".contains(byte)).count();
    if text.len() > BYTES || openers > TOKENS {
        return Err(Error::TooLong { limit: TOKENS });
    }
    let tokens = Lexer::new(text).lex().map_err(|errors| {
        let error = errors.first();
        syntax(text, error.map(|(expected, at)| (expected.as_str(), *at)))
    })?;
    let mut count = 0;
    measure(&tokens, 0, &mut count)?;
    Parser::new(&tokens)
        .parse(|parser| parser.term())
        .map_err(|errors| {
            let error = errors.first();
            let error =
                error.map(|(expected, found)| (expected.as_str(), Token::opt_as_str(*found, text)));
            syntax(text, error)
        })
}

/// Counts tokens, and fails if they are too many or nest too deep.
fn measure(tokens: &[Token<&str>], nesting: usize, count: &mut usize) -> Result<(), Error> {
    if nesting > NESTING {
        return Err(Error::TooNested { limit: NESTING });
    }
    for Token(_, token) in tokens {
        *count += 1;
        match token {
            Tok::Block(tokens) => measure(tokens, nesting + 1, count)?,
            Tok::Str(parts) => {
                for part in parts {
                    if let StrPart::Term(token) = part {
                        // It is in parentheses, which count themselves.
                        measure(std::slice::from_ref(token), nesting, count)?;
                    }
                }
                *count += parts.len();
            }
            _ => {}
        }
    }
    if *count > TOKENS {
        return Err(Error::TooLong { limit: TOKENS });
    }
    Ok(())
}

fn syntax(text: &str, error: Option<(&str, &str)>) -> Error {
    let (expected, rest) = error.unwrap_or(("something else", ""));
    let found: String = rest.chars().take(20).collect();
    let found = found.split_whitespace().next().unwrap_or_default();
    let message = if found.is_empty() {
        format!("expected {expected} at the end")
    } else {
        format!("expected {expected} instead of {found:?}")
    };
    let at = offset(text, rest);
    Error::Syntax { message, at }
}

fn unknown(text: &str, name: &str, undefined: &Undefined) -> Error {
    let name_of = |what: &str| format!("{what} {name}");
    Error::Unknown {
        at: offset(text, name),
        name: match undefined {
            Undefined::Filter(0) => name_of("function"),
            Undefined::Filter(arguments) => format!("function {name}/{arguments}"),
            other => name_of(other.as_str()),
        },
    }
}

/// Returns where a part of the text stands in it; the end for a part of something else.
fn offset(text: &str, part: &str) -> usize {
    let all = text.as_bytes().as_ptr_range();
    if all.contains(&part.as_ptr()) {
        load::span(text, part).start
    } else {
        text.len()
    }
}
