use serde_json::json;

use super::*;
use crate::workflow::definition::Definition;

fn compile(rest: &str, documents: &Documents) -> Result<Program, Vec<String>> {
    let document = "{ dsl: '1.0.3', namespace: test, name: test, version: '1.0.0' }";
    let text = format!("document: {document}\n{rest}");
    let read = Definition::read(&text)
        .map_err(|mistakes| mistakes.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    Program::compile(&read, documents).map_err(|mistakes| {
        let show = |mistake| format!("{mistake:?}");
        mistakes.iter().map(show).collect()
    })
}

fn mistake(rest: &str, documents: &Documents) -> String {
    let mistakes = compile(rest, documents)
        .map(|program| program.hash)
        .unwrap_err();
    assert_eq!(mistakes.len(), 1, "{mistakes:#?}");
    mistakes[0].clone()
}

#[test]
fn paths_are_pointers_into_the_definition() {
    let text = "
do:
  - a: { do: [{ b: { set: { n: 1 } } }] }
  - c: { for: { in: '[1]' }, do: [{ d: { set: { n: 1 } } }] }
  - e:
      try: [{ f: { set: { n: 1 } } }]
      catch: { do: [{ g: { set: { n: 1 } } }] }
  - h: { fork: { branches: [{ i: { set: { n: 1 } } }] } }
  - a/b~c: { call: function }
use: { functions: { function: { do: [{ j: { set: { n: 1 } } }] } } }
";
    let program = compile(text, &Documents::new()).unwrap();
    let paths: Vec<&str> = program.tasks.keys().map(|path| &**path).collect();
    assert_eq!(
        paths,
        [
            "/do/0/a",
            "/do/0/a/do/0/b",
            "/do/1/c",
            "/do/1/c/do/0/d",
            "/do/2/e",
            "/do/2/e/catch/do/0/g",
            "/do/2/e/try/0/f",
            "/do/3/h",
            "/do/3/h/fork/branches/0/i",
            "/do/4/a~1b~0c",
            "/do/4/a~1b~0c/call",
            "/do/4/a~1b~0c/call/do/0/j",
        ]
    );
    for path in paths.iter().filter(|path| !path.contains("/call")) {
        let task = program.task(path).unwrap();
        assert_eq!(
            program.source.pointer(path),
            Some(&*task.definition),
            "{path}"
        );
        assert!(!task.definition.is_null());
    }
    let inlined = program.task("/do/4/a~1b~0c/call/do/0/j").unwrap();
    assert_eq!(*inlined.definition, json!({ "set": { "n": 1 } }));
}

#[test]
fn hash_depends_on_the_definition_and_its_documents() {
    let hash = |rest: &str| compile(rest, &Documents::new()).unwrap().hash;
    let one = hash("do: [{ a: { set: { n: 1, m: 2 } } }]");
    assert_eq!(one.len(), 64);
    assert_eq!(
        one,
        hash("do:\n  - a:\n      set:\n        m: 2\n        n: 1\n")
    );
    assert_ne!(one, hash("do: [{ a: { set: { n: 1, m: 3 } } }]"));
    let text = "do: [{ a: { call: openapi, with: { document: { endpoint: https://example.com/a }, operationId: o } } }]";
    let hash = |path: &str| {
        let operation = json!({ "get": { "operationId": "o" } });
        let document = json!({ "openapi": "3.0.0", "paths": { path: operation } });
        let documents = Documents::from([("https://example.com/a".to_owned(), document)]);
        compile(text, &documents).unwrap().hash
    };
    assert_ne!(hash("/a"), hash("/b"));
}

#[test]
fn unknown_variables_are_refused_where_they_do_not_exist() {
    for (text, name) in [
        ("do: [{ a: { if: $item, set: { n: 1 } } }]", "item"),
        ("do: [{ a: { set: { n: '${ $output }' } } }]", "output"),
        ("do: [{ a: { set: { n: '${ $secrets }' } } }]", "secrets"),
        (
            "do: [{ a: { try: [{ b: { set: { n: '${ $error }' } } }], catch: {} } }]",
            "error",
        ),
        (
            "do: [{ a: { for: { in: '[1]' }, do: [{ f: { call: f } }] } }]\nuse: { functions: { f: { set: { n: '${ $item }' } } } }",
            "item",
        ),
    ] {
        assert!(mistake(text, &Documents::new()).contains(name), "{text}");
    }
}

#[test]
fn function_that_calls_itself_is_refused() {
    let text = "
do: [{ a: { call: f } }]
use: { functions: { f: { do: [{ b: { call: g } }] }, g: { call: f } } }
";
    assert!(compile(text, &Documents::new()).is_err());
}

#[test]
fn calls_of_operations_are_checked() {
    let call = |operation: &str, parameters: &str| {
        let text = format!(
            "do: [{{ a: {{ call: openapi, with: {{ document: {{ endpoint: https://example.com/a }}, operationId: {operation}, parameters: {parameters} }} }} }}]"
        );
        let parameters = json!([{ "name": "id", "in": "path", "required": true }]);
        let operation = json!({ "operationId": "getPet", "parameters": parameters });
        let document = json!({ "swagger": "2.0", "paths": { "/pet/{id}": { "get": operation } } });
        let documents = Documents::from([("https://example.com/a".to_owned(), document)]);
        mistake(&text, &documents)
    };
    assert!(call("other", "{}").contains("has no operation other"));
    assert!(call("getPet", "{}").contains("needs the parameter"));
    assert!(call("getPet", "{ id: 1, name: x }").contains("has no parameter"));
    let text = "do: [{ a: { call: openapi, with: { document: { endpoint: https://example.com/a }, operationId: o } } }]";
    assert!(mistake(text, &Documents::new()).contains("there is no document"));
    let read = Definition::read(&format!(
        "document: {{ dsl: '1.0.3', namespace: a, name: a, version: '1.0.0' }}\n{text}"
    ));
    let definition = read.unwrap().definition;
    let documents = definition.documents();
    let documents = documents
        .iter()
        .map(|(place, endpoint)| (&*place.pointer, &*endpoint.uri));
    assert_eq!(
        documents.collect::<Vec<_>>(),
        [("/do/0/a", "https://example.com/a")]
    );
}
