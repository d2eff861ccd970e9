//! Makes programs of definitions.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::{Value, json};

use super::{
    Documents, HTTP_QUEUE, Program,
    code::{Code, Names, Variable},
    openapi::Operation,
    task::{
        Answer, Authentication, Case, Export, For, Fork, HttpCall, Input, Kind, Length, List, Next,
        OpenApiCall, Output, Raise, Retry, Task, Try, Uri,
    },
    uri::UriTemplate,
};
use crate::{
    model::{PayloadSchema, QueueName},
    workflow::{
        definition::{self, Canonical, Definition, Mistake, Period, Place, ReadDefinition, Then},
        expression,
    },
};

/// How deep functions may call each other.
const MOST_CALLS: usize = 64;

impl Program {
    /// Compiles a definition. `documents` has those that [`Definition::documents`] names. Returns all
    /// mistakes that compiling finds.
    pub fn compile(read: &ReadDefinition, documents: &Documents) -> Result<Self, Vec<Mistake>> {
        let definition = &read.definition;
        let hash = match documents.is_empty() {
            true => Canonical::of(&read.json),
            false => Canonical::of(&json!({ "definition": read.json, "documents": documents })),
        };
        let mut compiler = Compiler {
            definition,
            source: &read.json,
            documents,
            tasks: BTreeMap::new(),
            branches: BTreeMap::new(),
            queues: BTreeSet::new(),
            calls: Vec::new(),
            mistakes: Vec::new(),
        };
        let names = Names::everywhere();
        let place = Place {
            pointer: String::new(),
            line: 1,
            column: 1,
        };
        let input = compiler.input(definition.input.as_ref(), &place, &names);
        let output = compiler.output(definition.output.as_ref(), &place, &names);
        let after = definition.timeout.as_ref().map(|timeout| &timeout.after);
        let timeout = after.and_then(|after| compiler.length(after, &place, &names));
        let list = compiler.list("/do", &definition.do_, &names);
        if !compiler.mistakes.is_empty() {
            compiler.mistakes.sort();
            return Err(compiler.mistakes);
        }
        Ok(Self {
            hash: hash.hex(),
            namespace: definition.document.namespace.clone(),
            name: definition.document.name.clone(),
            version: definition.document.version.clone(),
            queues: compiler.queues,
            source: Arc::new(read.json.clone()),
            input,
            output,
            timeout,
            list,
            tasks: compiler.tasks,
            branches: compiler.branches,
        })
    }
}

struct Compiler<'a> {
    definition: &'a Definition,
    source: &'a Value,
    documents: &'a Documents,
    tasks: BTreeMap<Arc<str>, Task>,
    branches: BTreeMap<Arc<str>, Arc<str>>,
    queues: BTreeSet<QueueName>,
    /// The functions that are being inlined.
    calls: Vec<&'a str>,
    mistakes: Vec<Mistake>,
}

impl<'a> Compiler<'a> {
    fn mistake(&mut self, place: &Place, field: &str, says: impl ToString) {
        self.mistakes.push(Mistake {
            line: place.line,
            column: place.column,
            pointer: format!("{}{field}", place.pointer),
            says: says.to_string(),
        });
    }

    /// Compiles a list whose tasks have paths inside `path`.
    fn list(&mut self, path: &str, tasks: &'a [definition::Task], names: &Names) -> List {
        let path_of = |(number, task): (usize, &definition::Task)| -> Arc<str> {
            format!("{path}/{number}/{}", escaped(&task.name)).into()
        };
        let paths: List = tasks.iter().enumerate().map(path_of).collect();
        for (number, task) in tasks.iter().enumerate() {
            self.task(&paths, number, task, names);
        }
        paths
    }

    /// Compiles the task `number` of a list.
    fn task(&mut self, paths: &List, number: usize, task: &'a definition::Task, names: &Names) {
        let path = paths[number].clone();
        let place = &task.place;
        let following = match paths.get(number + 1) {
            Some(path) => Next::Task(path.to_string()),
            None => Next::Exit,
        };
        let next_of = |then: &Then| match then {
            Then::Continue => following.clone(),
            Then::Exit => Next::Exit,
            Then::End => Next::End,
            Then::Task(_, number) => match paths.get(*number) {
                Some(path) => Next::Task(path.to_string()),
                None => Next::Exit,
            },
        };
        let outputs = names.with("output", Variable::Output);
        let next = next_of(task.then.as_ref().unwrap_or(&Then::Continue));
        let compiled = Task {
            name: task.name.clone(),
            definition: Arc::new(
                self.source
                    .pointer(&place.pointer)
                    .cloned()
                    .unwrap_or_default(),
            ),
            if_: self.bare(task.if_.as_deref(), place, "/if", names),
            input: self.input(task.input.as_ref(), place, names),
            output: self.output(task.output.as_ref(), place, names),
            export: task.export.as_ref().map(|export| Export {
                as_: self.bare_or_value(export.as_.as_ref(), place, "/export/as", &outputs),
                schema: self.schema(export.schema.as_ref(), place, "/export/schema"),
            }),
            timeout: task
                .timeout
                .as_ref()
                .and_then(|timeout| self.length(&timeout.after, place, names)),
            kind: match self.kind(&path, task, &next_of, &next, names) {
                Some(kind) => kind,
                None => return,
            },
            next,
            next_if_skipped: following,
        };
        self.tasks.insert(path, compiled);
    }

    fn kind(
        &mut self,
        path: &Arc<str>,
        task: &'a definition::Task,
        next_of: &dyn Fn(&Then) -> Next,
        next: &Next,
        names: &Names,
    ) -> Option<Kind> {
        use definition::TaskKind as Written;
        let place = &task.place;
        Some(match &task.kind {
            Written::Do(tasks) => Kind::Do(self.list(&format!("{path}/do"), tasks, names)),
            Written::Set(value) => Kind::Set(self.value(value, place, "/set", names)?),
            Written::Switch(cases) => {
                let mut compiled = Vec::new();
                for case in cases {
                    compiled.push(Case {
                        when: self.bare(case.when.as_deref(), &case.place, "/when", names),
                        next: next_of(&case.then),
                    });
                }
                Kind::Switch(compiled)
            }
            Written::For(for_) => {
                let inner = names
                    .with(&for_.each, Variable::Item(path.clone()))
                    .with(&for_.at, Variable::Index(path.clone()));
                Kind::For(For {
                    in_: self.bare_or_value(Some(&for_.in_), place, "/for/in", names)?,
                    while_: self.bare(for_.while_.as_deref(), place, "/while", &inner),
                    list: self.list(&format!("{path}/do"), &for_.do_, &inner),
                })
            }
            Written::Fork(fork) => {
                let mut branches = Vec::new();
                for (number, task) in fork.branches.iter().enumerate() {
                    let branch: Arc<str> = format!("{path}/fork/branches/{number}").into();
                    let inner: Arc<str> = format!("{branch}/{}", escaped(&task.name)).into();
                    self.task(&vec![inner.clone()], 0, task, names);
                    self.branches.insert(branch.clone(), inner);
                    branches.push(branch);
                }
                Kind::Fork(Fork {
                    compete: fork.compete,
                    branches,
                })
            }
            Written::Try(try_) => Kind::Try(Box::new(self.try_(path, try_, next_of, next, names))),
            Written::Raise(error) => {
                let mut text = |text: &Option<String>, field: &str| {
                    self.text(
                        text.as_deref(),
                        place,
                        &format!("/raise/error/{field}"),
                        names,
                    )
                };
                let title = text(&error.title, "title");
                let detail = text(&error.detail, "detail");
                let instance = text(&error.instance, "instance");
                Kind::Raise(Raise {
                    type_: text(&Some(error.type_.clone()), "type")?,
                    status: error.status,
                    instance,
                    title,
                    detail,
                })
            }
            Written::Wait(period) => Kind::Wait(self.length(period, place, names)?),
            Written::Emit(emit) => {
                let with = Value::Object(emit.with.clone());
                Kind::Emit(self.value(&with, place, "/emit/event/with", names)?)
            }
            Written::CallHttp(call) => self.http(call, place, names)?,
            Written::CallOpenApi(call) => self.openapi(call, place, names)?,
            Written::CallFunction(call) => self.function(path, call, place, names)?,
        })
    }

    fn try_(
        &mut self,
        path: &Arc<str>,
        try_: &'a definition::Try,
        next_of: &dyn Fn(&Then) -> Next,
        next: &Next,
        names: &Names,
    ) -> Try {
        let list = self.list(&format!("{path}/try"), &try_.try_, names);
        let catch = &try_.catch;
        let place = &catch.place;
        let names = names.with(&catch.as_, Variable::Caught(path.clone()));
        let retry = catch.retry.as_ref().map(|retry| Retry {
            when: self.bare(retry.when.as_deref(), place, "/retry/when", &names),
            except_when: self.bare(
                retry.except_when.as_deref(),
                place,
                "/retry/exceptWhen",
                &names,
            ),
            delay: self.optional_length(retry.delay.as_ref(), place, &names),
            backoff: retry.backoff.unwrap_or(definition::RetryBackoff::Constant),
            attempts: retry.attempts,
            attempt_duration: self.optional_length(retry.attempt_duration.as_ref(), place, &names),
            duration: self.optional_length(retry.duration.as_ref(), place, &names),
            jitter: retry.jitter.as_ref().and_then(|(from, to)| {
                Some((
                    self.length(from, place, &names)?,
                    self.length(to, place, &names)?,
                ))
            }),
        });
        Try {
            list,
            errors: catch.errors.clone(),
            when: self.bare(catch.when.as_deref(), place, "/when", &names),
            except_when: self.bare(catch.except_when.as_deref(), place, "/exceptWhen", &names),
            retry,
            catch: match &catch.do_ {
                Some(tasks) => self.list(&format!("{path}/catch/do"), tasks, &names),
                None => List::new(),
            },
            next: catch.then.as_ref().map_or_else(|| next.clone(), next_of),
        }
    }

    fn http(&mut self, call: &definition::CallHttp, place: &Place, names: &Names) -> Option<Kind> {
        let uri = &call.endpoint.uri;
        let uri = match uri.contains("${") {
            true => Uri::Code(self.text(Some(uri), place, "/with/endpoint", names)?),
            false => Uri::Template(UriTemplate::read(uri)),
        };
        let queue = self.http_queue(&call.step);
        Some(Kind::Http(HttpCall {
            method: call.method.to_ascii_uppercase(),
            uri,
            headers: self.optional_value(call.headers.as_ref(), place, "/with/headers", names),
            query: self.optional_value(call.query.as_ref(), place, "/with/query", names),
            body: self.optional_value(call.body.as_ref(), place, "/with/body", names),
            answer: Answer {
                authentication: self.authentication(
                    call.endpoint.authentication.as_ref(),
                    place,
                    names,
                ),
                output: call.output,
                redirect: call.redirect,
            },
            queue,
            options: call.step.clone(),
        }))
    }

    fn openapi(
        &mut self,
        call: &definition::CallOpenApi,
        place: &Place,
        names: &Names,
    ) -> Option<Kind> {
        let uri = &call.document.uri;
        let Some(document) = self.documents.get(uri) else {
            self.mistake(
                place,
                "/with/document",
                format!("there is no document {uri}"),
            );
            return None;
        };
        let operation = match Operation::find(document, &call.operation_id, uri) {
            Ok(operation) => operation,
            Err(says) => {
                self.mistake(place, "/with/operationId", says);
                return None;
            }
        };
        for name in operation.required() {
            if !call.parameters.contains_key(name) {
                let says = format!("{} needs the parameter {name:?}", call.operation_id);
                self.mistake(place, "/with/parameters", says);
            }
        }
        let mut parameters = Vec::new();
        for (name, value) in &call.parameters {
            let field = format!("/with/parameters/{}", escaped(name));
            if operation.part(name).is_none() {
                let says = format!("{} has no parameter {name:?}", call.operation_id);
                self.mistake(place, &field, says);
            }
            parameters.push((name.clone(), self.value(value, place, &field, names)?));
        }
        let queue = self.http_queue(&call.step);
        Some(Kind::OpenApi(OpenApiCall {
            operation,
            parameters,
            answer: Answer {
                authentication: self.authentication(call.authentication.as_ref(), place, names),
                output: call.output,
                redirect: call.redirect,
            },
            queue,
            options: call.step.clone(),
        }))
    }

    fn function(
        &mut self,
        path: &Arc<str>,
        call: &'a definition::CallFunction,
        place: &Place,
        names: &Names,
    ) -> Option<Kind> {
        let with = call.with.clone().map(Value::Object);
        let with = self.optional_value(with.as_ref(), place, "/with", names);
        let definition: &'a Definition = self.definition;
        let Some(function) = definition.use_.functions.get(&call.function) else {
            let queue = match &call.step.queue {
                Some(queue) => queue.clone(),
                None => match QueueName::new(&call.function) {
                    Ok(queue) => queue,
                    Err(error) => {
                        self.mistake(place, "/call", error);
                        return None;
                    }
                },
            };
            self.queues.insert(queue.clone());
            return Some(Kind::Step {
                with,
                queue,
                options: call.step.clone(),
            });
        };
        if self.calls.contains(&call.function.as_str()) || self.calls.len() == MOST_CALLS {
            let says = format!("the function {} calls itself", call.function);
            self.mistake(place, "/call", says);
            return None;
        }
        self.calls.push(&call.function);
        let body: Arc<str> = format!("{path}/call").into();
        // A function sees its arguments only, not the loops and errors around its call.
        self.task(&vec![body.clone()], 0, function, &Names::everywhere());
        self.calls.pop();
        Some(Kind::Function { with, body })
    }

    fn http_queue(&mut self, options: &definition::StepOptions) -> QueueName {
        let queue = options.queue.clone();
        let queue =
            queue.unwrap_or_else(|| QueueName::new(HTTP_QUEUE).expect("it is a valid name"));
        self.queues.insert(queue.clone());
        queue
    }

    fn authentication(
        &mut self,
        written: Option<&definition::Authentication>,
        place: &Place,
        names: &Names,
    ) -> Option<Authentication> {
        use definition::Authentication as Written;
        let field = "/with/endpoint/authentication";
        Some(match written? {
            Written::Basic { username, password } => Authentication::Basic {
                username: self.text(Some(username), place, field, names)?,
                password: self.text(Some(password), place, field, names)?,
            },
            Written::Bearer { token } => {
                Authentication::Bearer(self.text(Some(token), place, field, names)?)
            }
            Written::BasicSecret(name) => Authentication::BasicSecret(name.clone()),
            Written::BearerSecret(name) => Authentication::BearerSecret(name.clone()),
        })
    }

    fn input(&mut self, input: Option<&definition::Input>, place: &Place, names: &Names) -> Input {
        let Some(input) = input else {
            return Input::default();
        };
        Input {
            schema: self.schema(input.schema.as_ref(), place, "/input/schema"),
            from: self.bare_or_value(input.from.as_ref(), place, "/input/from", names),
        }
    }

    fn output(
        &mut self,
        output: Option<&definition::Output>,
        place: &Place,
        names: &Names,
    ) -> Output {
        let Some(output) = output else {
            return Output::default();
        };
        let names = names.with("output", Variable::Output);
        Output {
            as_: self.bare_or_value(output.as_.as_ref(), place, "/output/as", &names),
            schema: self.schema(output.schema.as_ref(), place, "/output/schema"),
        }
    }

    fn schema(
        &mut self,
        schema: Option<&definition::Schema>,
        place: &Place,
        field: &str,
    ) -> Option<PayloadSchema> {
        match PayloadSchema::compile(&schema?.0.to_string()) {
            Ok(schema) => Some(schema),
            Err(says) => {
                self.mistake(place, field, says);
                None
            }
        }
    }

    fn optional_length(
        &mut self,
        period: Option<&Period>,
        place: &Place,
        names: &Names,
    ) -> Option<Length> {
        self.length(period?, place, names)
    }

    fn length(&mut self, period: &Period, place: &Place, names: &Names) -> Option<Length> {
        Some(match period {
            Period::Fixed(ms) => Length::Fixed(*ms),
            Period::Expression(text) => Length::Code(self.text(Some(text), place, "", names)?),
        })
    }

    fn bare(
        &mut self,
        text: Option<&str>,
        place: &Place,
        field: &str,
        names: &Names,
    ) -> Option<Code> {
        let code = Code::bare(text?, names);
        self.compiled(code.map_err(|error| (String::new(), error)), place, field)
    }

    fn text(
        &mut self,
        text: Option<&str>,
        place: &Place,
        field: &str,
        names: &Names,
    ) -> Option<Code> {
        let code = Code::text(text?, names);
        self.compiled(code.map_err(|error| (String::new(), error)), place, field)
    }

    fn bare_or_value(
        &mut self,
        value: Option<&Value>,
        place: &Place,
        field: &str,
        names: &Names,
    ) -> Option<Code> {
        self.compiled(Code::bare_or_value(value?, names), place, field)
    }

    fn optional_value(
        &mut self,
        value: Option<&Value>,
        place: &Place,
        field: &str,
        names: &Names,
    ) -> Option<Code> {
        self.value(value?, place, field, names)
    }

    fn value(&mut self, value: &Value, place: &Place, field: &str, names: &Names) -> Option<Code> {
        self.compiled(Code::value(value, names), place, field)
    }

    fn compiled(
        &mut self,
        code: Result<Code, (String, expression::Error)>,
        place: &Place,
        field: &str,
    ) -> Option<Code> {
        match code {
            Ok(code) => Some(code),
            Err((pointer, error)) => {
                self.mistake(place, &format!("{field}{pointer}"), error);
                None
            }
        }
    }
}

/// A name as a segment of a JSON pointer.
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}
