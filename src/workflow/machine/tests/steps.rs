//! Steps: tasks in queues.

use super::*;
use crate::workflow::{machine::StepEnd, program::Documents};

#[test]
fn step_carries_its_place_input_and_settings() {
    let text = r#"
do:
  - charge:
      call: charge-card
      with: { amount: '${ .total }' }
      metadata: { taskd: { queue: billing, max_attempts: 3 } }
      output: { as: '{ receipt: . }' }
  - ship: { call: ship }
"#;
    let ended = run(text, json!({ "total": 5 }));
    assert_eq!(*ended.completed(), json!({ "receipt": { "amount": 5 } }));
    let [charge, ship] = &ended.issued[..] else {
        panic!("{:?}", ended.issued);
    };
    assert_eq!(charge.queue.as_str(), "billing");
    assert_eq!(charge.options.max_attempts, Some(3));
    assert_eq!(
        charge.payload,
        json!({
            "workflow": { "namespace": "test", "name": "test", "version": "1.0.0" },
            "path": "/do/0/charge",
            "input": { "amount": 5 },
        })
    );
    assert_eq!(ship.queue.as_str(), "ship");
    assert_eq!(ship.payload["input"], json!({ "receipt": { "amount": 5 } }));
    let program = program(&definition(text), &Documents::new());
    let queues: Vec<_> = program.queues.iter().map(|queue| queue.as_str()).collect();
    assert_eq!(queues, ["billing", "ship"]);
}

#[test]
fn death_is_an_error_of_type_runtime() {
    let text = "do: [{ a: { call: work } }]";
    let ended = run_with(text, json!({}), |_| Answer::dead("disk full"));
    assert_eq!(
        ended.fault().to_value(),
        json!({
            "type": "https://open-workflow-specification.org/spec/1.0.0/errors/runtime",
            "status": 500,
            "title": "Runtime Error",
            "detail": "disk full",
            "instance": "/do/0/a",
        })
    );
}

#[test]
fn problem_document_as_reason_is_the_error() {
    let text = "do: [{ a: { call: work } }]";
    let reason =
        r#"{ "type": "https://example.com/declined", "status": 402, "title": "Declined" }"#;
    let ended = run_with(text, json!({}), move |_| Answer::dead(reason));
    assert_eq!(
        ended.fault().to_value(),
        json!({
            "type": "https://example.com/declined",
            "status": 402,
            "title": "Declined",
            "instance": "/do/0/a",
        })
    );
    let reason = r#"{ "type": "https://example.com/declined" }"#;
    let ended = run_with(text, json!({}), move |_| Answer::dead(reason));
    assert_eq!(ended.fault().detail.as_deref(), Some(reason));
    assert_eq!(kind(ended.fault()), "runtime");
}

#[test]
fn step_that_an_operator_cancels_is_an_error() {
    let text = "do: [{ a: { call: work } }]";
    let ended = run_with(text, json!({}), |_| Answer {
        after: 1,
        end: StepEnd::Cancelled,
    });
    assert_eq!(kind(ended.fault()), "runtime");
    assert_eq!(ended.fault().detail.as_deref(), Some("cancelled"));
}

#[test]
fn results_of_several_workers_become_one() {
    let agree = |agree: &str, results: Value| {
        let text = format!(
            "do: [{{ a: {{ call: work, metadata: {{ taskd: {{ replicas: 3, agree: {agree} }} }} }} }}]"
        );
        run_with(&text, json!({}), move |step| {
            assert_eq!(step.options.replicas, Some(3));
            Answer::results(results.as_array().unwrap().clone())
        })
    };
    assert_eq!(*agree("first", json!([3, 1, 1])).completed(), json!(3));
    assert_eq!(*agree("majority", json!([3, 1, 1])).completed(), json!(1));
    assert_eq!(
        *agree("all", json!([3, 1, 1])).completed(),
        json!([3, 1, 1])
    );
    assert_eq!(kind(agree("majority", json!([3, 2, 1])).fault()), "runtime");
}

#[test]
fn result_is_json_or_a_text() {
    assert_eq!(StepEnd::result(b"{\"a\": 1}"), json!({ "a": 1 }));
    assert_eq!(StepEnd::result(b"plain"), json!("plain"));
    assert_eq!(StepEnd::result(b""), Value::Null);
}

#[test]
fn http_call_is_a_request_for_the_queue_of_calls() {
    let text = r#"
do:
  - get:
      call: http
      with:
        method: get
        endpoint:
          uri: https://example.com/pets/{id}/of/{nobody}?a={q}
          authentication: { basic: { username: '${ .user }', password: secret } }
        headers: { X-Number: '${ .id }' }
        query: { tag: '${ .tags }', sort: up }
        body: { sent: '${ .q }', text: .q }
        output: response
        redirect: true
"#;
    let input = json!({ "id": 7, "q": "ä b&c", "user": "ada", "tags": ["x", "y"] });
    let ended = run(text, input);
    let [step] = &ended.issued[..] else {
        panic!("{:?}", ended.issued);
    };
    assert_eq!(step.queue.as_str(), "wf.http");
    assert_eq!(
        step.payload["request"],
        json!({
            "method": "GET",
            "uri": "https://example.com/pets/7/of/?a=%C3%A4%20b%26c&sort=up&tag=x&tag=y",
            "headers": { "X-Number": "7" },
            "body": { "sent": "ä b&c", "text": ".q" },
            "authentication": { "basic": { "username": "ada", "password": "secret" } },
            "output": "response",
            "redirect": true,
        })
    );
}

const PETS: &str = r##"{
  "swagger": "2.0", "host": "pets.example.com", "basePath": "/v2", "schemes": ["https", "http"],
  "paths": {
    "/pet/{petId}": {
      "parameters": [{ "name": "petId", "in": "path", "required": true }],
      "get": { "operationId": "getPet" },
      "post": {
        "operationId": "updatePet",
        "parameters": [{ "name": "name", "in": "formData" }, { "$ref": "#/parameters/trace" }]
      }
    },
    "/pets": { "get": { "operationId": "findPets", "parameters": [{ "name": "status", "in": "query" }] } },
    "/pet": { "post": { "operationId": "addPet", "parameters": [{ "name": "pet", "in": "body" }] } }
  },
  "parameters": { "trace": { "name": "X-Trace", "in": "header" } }
}"##;

const SHOP: &str = r##"{
  "openapi": "3.0.1",
  "servers": [{ "url": "/api/{version}", "variables": { "version": { "default": "v3" } } }],
  "paths": {
    "/orders": {
      "post": {
        "operationId": "order",
        "parameters": [{ "name": "dry", "in": "query" }],
        "requestBody": { "content": { "application/json": {} } }
      }
    }
  }
}"##;

/// The request of a call of an operation.
fn openapi(document: &str, operation: &str, parameters: &str) -> Value {
    let text = definition(&format!(
        "do: [{{ a: {{ call: openapi, with: {{ document: {{ endpoint: https://docs.example.com/spec/api.json }}, operationId: {operation}, parameters: {parameters} }} }} }}]"
    ));
    let document = serde_json::from_str(document).unwrap();
    let documents = Documents::from([(
        "https://docs.example.com/spec/api.json".to_owned(),
        document,
    )]);
    let program = program(&text, &documents);
    let fake = Fake::new(program, |_| Answer::result(Value::Null));
    fake.run(json!({ "n": 7 })).issued[0].payload["request"].clone()
}

#[test]
fn swagger_2_operation_becomes_a_request() {
    assert_eq!(
        openapi(PETS, "getPet", "{ petId: '${ .n }' }"),
        json!({ "method": "GET", "uri": "https://pets.example.com/v2/pet/7", "output": "content", "redirect": false })
    );
    let request = openapi(PETS, "updatePet", "{ petId: 1, name: a b, X-Trace: t }");
    assert_eq!(request["body"], "name=a%20b");
    assert_eq!(
        request["headers"],
        json!({ "X-Trace": "t", "content-type": "application/x-www-form-urlencoded" })
    );
    let request = openapi(PETS, "findPets", "{ status: [a, b] }");
    assert_eq!(
        request["uri"],
        "https://pets.example.com/v2/pets?status=a&status=b"
    );
    let request = openapi(PETS, "addPet", "{ pet: { name: '${ .n }' } }");
    assert_eq!(request["body"], json!({ "name": 7 }));
}

#[test]
fn openapi_3_operation_becomes_a_request() {
    let request = openapi(SHOP, "order", "{ dry: true, item: x, count: 2 }");
    assert_eq!(
        request["uri"],
        "https://docs.example.com/api/v3/orders?dry=true"
    );
    assert_eq!(request["body"], json!({ "item": "x", "count": 2 }));
    let request = openapi(SHOP, "order", "{ body: [1] }");
    assert_eq!(request["body"], json!([1]));
}
