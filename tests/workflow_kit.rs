//! The specification's conformance kit, unchanged, on the machine with a store in memory and a
//! stand-in for the two hosts that it calls.
//!
//! Its files are in `../shared/swf-spec`. Where they are missing, the test passes and says so.

use std::{fmt, path::Path, process::ExitCode};

use cucumber::{StatsWriter as _, World as _, gherkin::Step, given, then, when};
use serde_json::{Map, Value, json};
use taskd::workflow::{
    self,
    definition::Definition,
    machine::{HttpAuthentication, HttpRequest},
    program::{Documents, Program},
};

use self::fake::{Answer, Ended, Fake};

#[path = "../src/workflow/machine/tests/fake.rs"]
#[allow(dead_code, reason = "the tests of the machine use all of it")]
mod fake;

const SCENARIOS: usize = 21;

#[derive(Default, cucumber::World)]
struct World {
    definition: String,
    input: Value,
    ended: Option<Ended>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = self.ended.as_ref();
        let ended = ended.map(|ended| (ended.status, &ended.output, &ended.error));
        write!(f, "{}\n{}\n{ended:#?}", self.definition, self.input)
    }
}

impl World {
    fn ended(&self) -> &Ended {
        self.ended.as_ref().expect("the workflow was executed")
    }

    /// The value of a property of the output, such as `error.type`.
    fn property(&self, path: &str) -> Option<&Value> {
        let mut names = path.split('.');
        names.try_fold(&self.ended().output, |value, name| value.get(name))
    }

    /// The place of a task among those that started.
    fn place(&self, task: &str) -> usize {
        let started = self.ended().started();
        let place = started.iter().position(|name| *name == task);
        place.unwrap_or_else(|| panic!("{task} did not run: {started:?}"))
    }
}

/// The text of a step, without the media type in its first line.
fn text(step: &Step) -> &str {
    let text = step.docstring.as_deref().expect("the step has a text");
    let text = text.strip_prefix("yaml").unwrap_or(text);
    text.trim_start_matches('\n')
}

/// Reads YAML by the reader of definitions: as the constant that a task sets.
fn value(step: &Step) -> Value {
    let indented = text(step).replace('\n', "\n          ");
    let text = format!(
        "document: {{ dsl: '1.0.3', namespace: a, name: a, version: '1.0.0' }}\ndo:\n  - a:\n      set:\n        value:\n          {indented}\n"
    );
    let read = Definition::read(&text).unwrap_or_else(|mistakes| panic!("{mistakes:?}\n{text}"));
    read.json["do"][0]["a"]["set"]["value"].clone()
}

/// Whether two values are equal, with numbers compared as numbers.
fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => one.as_f64() == other.as_f64(),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            let is_same = |(name, value): (&String, &Value)| {
                other.get(name).is_some_and(|other| same(value, other))
            };
            one.len() == other.len() && one.iter().all(is_same)
        }
        _ => one == other,
    }
}

#[given("a workflow with definition:")]
fn a_definition(world: &mut World, step: &Step) {
    world.definition = text(step).to_owned();
}

#[given("given the workflow input is:")]
fn an_input(world: &mut World, step: &Step) {
    world.input = value(step);
}

#[when("the workflow is executed")]
fn executed(world: &mut World) {
    let read = Definition::read(&world.definition).unwrap();
    let uris = Program::documents_of(&read.definition);
    let documents: Documents = uris.into_iter().map(|uri| (uri, petstore())).collect();
    let program = Program::compile(&read, &documents).unwrap();
    let mut fake = Fake::new(program, |step| {
        serve(&serde_json::from_value(step.payload["request"].clone()).unwrap())
    });
    fake.crashes = true;
    world.ended = Some(fake.run(world.input.clone()));
}

#[then("the workflow should complete")]
fn completes(world: &mut World) {
    world.ended().completed();
}

#[then("the workflow should complete with output:")]
fn completes_with(world: &mut World, step: &Step) {
    let (output, expected) = (world.ended().completed(), value(step));
    assert!(same(output, &expected), "{output} is not {expected}");
}

#[then("the workflow should fault")]
fn faults(world: &mut World) {
    world.ended().fault();
}

#[then("the workflow should fault with error:")]
fn faults_with(world: &mut World, step: &Step) {
    let (error, expected) = (world.ended().fault().to_value(), value(step));
    assert!(same(&error, &expected), "{error} is not {expected}");
}

#[then(regex = r"^the workflow output should have properties (.+)$")]
fn has_properties(world: &mut World, names: String) {
    for name in names.split(", ") {
        let name = name.trim_matches('\'');
        assert!(world.property(name).is_some(), "there is no {name}");
    }
}

#[then(regex = r"^the workflow output should have a '(.+)' property with value:$")]
fn has_value(world: &mut World, name: String, step: &Step) {
    let (found, expected) = (world.property(&name), value(step));
    assert!(
        found.is_some_and(|found| same(found, &expected)),
        "{found:?} is not {expected}"
    );
}

#[then(regex = r"^the workflow output should have a '(.+)' property containing (\d+) items$")]
fn has_items(world: &mut World, name: String, items: usize) {
    let found = world.property(&name).and_then(Value::as_array);
    assert_eq!(found.map(Vec::len), Some(items));
}

#[then(regex = r"^(\w+) should run first$")]
fn runs_first(world: &mut World, task: String) {
    assert_eq!(world.place(&task), 0);
}

#[then(regex = r"^(\w+) should run last$")]
fn runs_last(world: &mut World, task: String) {
    assert_eq!(world.ended().started().last(), Some(&task.as_str()));
}

#[then(regex = r"^(\w+) should run after (\w+)$")]
fn runs_after(world: &mut World, task: String, before: String) {
    assert!(world.place(&task) > world.place(&before));
}

/// The part of the pet store's document that the kit uses.
fn petstore() -> Value {
    json!({
        "swagger": "2.0",
        "host": "petstore.swagger.io",
        "basePath": "/v2",
        "schemes": ["https", "http"],
        "paths": {
            "/pet/findByStatus": { "get": {
                "operationId": "findPetsByStatus",
                "parameters": [{ "name": "status", "in": "query", "required": true, "type": "array" }],
            } },
            "/pet/{petId}": { "get": {
                "operationId": "getPetById",
                "parameters": [{ "name": "petId", "in": "path", "required": true, "type": "integer" }],
            } },
        },
    })
}

/// Answers as the hosts that the kit calls.
fn serve(request: &HttpRequest) -> Answer {
    assert_eq!(request.method, "GET");
    let pet = |id: u32| json!({ "id": id, "name": "Milou", "status": "available" });
    let content = match request.uri.as_str() {
        "https://petstore.swagger.io/v2/pet/findByStatus?status=available" => {
            json!([pet(1), pet(2)])
        }
        "https://petstore.swagger.io/v2/pet/1" => pet(1),
        "https://petstore.swagger.io/v2/pet/2" => pet(2),
        "https://petstore.swagger.io/v2/pet/getPetByName/Milou" => {
            return Answer::dead(
                json!({
                    "type": "https://open-workflow-specification.org/spec/1.0.0/errors/communication",
                    "status": 404,
                    "detail": "GET /v2/pet/getPetByName/Milou: 404 Not Found",
                })
                .to_string(),
            );
        }
        "https://httpbin.org/basic-auth/serverless-workflow/conformance-test" => {
            let expected = HttpAuthentication::Basic {
                username: "serverless-workflow".to_owned(),
                password: "conformance-test".to_owned(),
            };
            assert_eq!(request.authentication, Some(expected));
            json!({ "authenticated": true })
        }
        uri => panic!("nothing answers at {uri}"),
    };
    Answer::result(match request.output.as_str() {
        "response" => json!({
            "request": { "method": request.method, "uri": request.uri, "headers": Map::new() },
            "statusCode": 200,
            "headers": { "content-type": "application/json" },
            "content": content,
        }),
        _ => content,
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let features =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/swf-spec/1.0-main/ctk/features");
    if !features.is_dir() {
        println!("skipped: there is no {}", features.display());
        return ExitCode::SUCCESS;
    }
    let ran = World::cucumber()
        .fail_on_skipped()
        .with_default_cli()
        .run(features)
        .await;
    let passed = ran.scenarios_stats().passed;
    println!("{passed} of {SCENARIOS} scenarios passed");
    match passed == SCENARIOS && !ran.execution_has_failed() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
