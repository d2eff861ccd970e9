//! `/openapi.json` and the page that shows it. tests/full/openapi.rs calls every operation by the
//! document.

use std::collections::{BTreeMap, BTreeSet};

use reqwest::{Response, header};
use serde_json::Value;
use taskd::{
    config::Auth,
    ingress::{self, http},
};

use crate::{ingress_http::idle_state, support::daemon::Daemon};

/// A process that runs no pipeline: its URL.
async fn start(auth: Auth) -> String {
    let state = idle_state(|settings| settings.auth = auth);
    let listener = ingress::bind(([127, 0, 0, 1], 0).into(), "http")
        .await
        .unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(http::serve(listener, state));
    url
}

async fn get(url: &str, path: &str) -> Response {
    let answer = crate::support::http_client()
        .get(format!("{url}{path}"))
        .send()
        .await
        .unwrap();
    assert_eq!(answer.status(), 200, "{path}");
    answer
}

async fn document(auth: Auth) -> Value {
    let answer = get(&start(auth).await, "/openapi.json").await;
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/json");
    answer.json().await.unwrap()
}

/// The operations of a document, by method and path.
fn operations(document: &Value) -> BTreeMap<(String, String), Value> {
    let mut operations = BTreeMap::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            operations.insert((method.to_uppercase(), path.clone()), operation.clone());
        }
    }
    operations
}

#[tokio::test]
async fn every_route_is_described_and_nothing_else() {
    let document = document(Auth::Tokens).await;
    let described = operations(&document);
    let mut routes = BTreeSet::new();
    for one in ingress::operations() {
        let Some(route) = one.http else {
            continue;
        };
        let (method, path) = (route.method, route.path);
        let key = (method.to_string(), path.to_owned());
        let operation = described
            .get(&key)
            .unwrap_or_else(|| panic!("{method} {path}"));
        routes.insert(key);
        let Some(role) = one.role else {
            assert_eq!(operation["security"], serde_json::json!([]), "{path}");
            continue;
        };
        let summary = operation["summary"].as_str().unwrap();
        assert!(!summary.is_empty(), "{method} {path}");
        let said = operation["description"].as_str().unwrap();
        assert!(
            said.contains(&format!("`{role}`")),
            "{method} {path}: {said}"
        );
        assert_eq!(
            operation["security"][0]["token"],
            serde_json::json!([]),
            "{method} {path}"
        );
        let takes_body = !operation["requestBody"].is_null();
        assert_eq!(
            takes_body && (method == "POST" || method == "PUT"),
            takes_body,
            "{method} {path}"
        );
        for status in ["200", "400", "401", "403", "421", "429", "503"] {
            assert!(
                operation["responses"].get(status).is_some(),
                "{method} {path} {status}"
            );
        }
    }
    assert_eq!(described.into_keys().collect::<BTreeSet<_>>(), routes);
    let ids: Vec<_> = operations(&document)
        .into_values()
        .map(|operation| operation["operationId"].clone())
        .collect();
    let distinct: BTreeSet<_> = ids.iter().map(|id| id.as_str().unwrap()).collect();
    assert_eq!(distinct.len(), ids.len(), "{ids:?}");
}

/// A new operation, or a role that changed, is seen in the documents by a reader.
#[test]
fn the_table_of_docs_api_md_has_every_operation() {
    let mut table = String::from(
        "| HTTP | gRPC (`taskd.v1`, with reflection and health) | role | |\n|---|---|---|---|\n",
    );
    for one in ingress::operations() {
        let http = one
            .http
            .map(|route| format!("`{} {}`", route.method, route.path))
            .unwrap_or_default();
        let grpc = one
            .grpc
            .map(|method| {
                format!(
                    "`{}`",
                    method.trim_start_matches("taskd.v1.").replace('/', ".")
                )
            })
            .unwrap_or_default();
        let role = one.role.map_or("none", |role| role.as_str());
        table.push_str(&format!("| {http} | {grpc} | {role} | {} |\n", one.summary));
    }
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/api.md");
    let text = std::fs::read_to_string(page).unwrap();
    assert!(
        text.contains(&table),
        "write this as the table of {page}:\n{table}"
    );
}

/// All places of a document that name another place in it.
fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(object) => {
            found.extend(object.get("$ref").and_then(Value::as_str));
            object.values().for_each(|value| references(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

#[tokio::test]
async fn every_named_schema_is_there_and_used() {
    let document = document(Auth::None).await;
    let mut used = BTreeSet::new();
    references(&document, &mut used);
    for place in &used {
        assert!(
            document.pointer(place.trim_start_matches('#')).is_some(),
            "{place}"
        );
    }
    for name in document["components"]["schemas"]
        .as_object()
        .unwrap()
        .keys()
    {
        assert!(
            used.contains(format!("#/components/schemas/{name}").as_str()),
            "{name} is used nowhere"
        );
        assert!(
            !name.ends_with(|end: char| end.is_ascii_digit()),
            "two types have the name of {name}"
        );
    }
}

/// All schemas of a document that have a default, with their places.
fn defaults(value: &Value, place: &str, found: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(object) => {
            if object.contains_key("default")
                && (object.contains_key("type") || object.contains_key("$ref"))
            {
                found.push((place.to_owned(), value.clone()));
            }
            for (name, value) in object {
                defaults(value, &format!("{place}/{name}"), found);
            }
        }
        Value::Array(values) => values
            .iter()
            .for_each(|value| defaults(value, place, found)),
        _ => {}
    }
}

#[tokio::test]
async fn every_default_is_a_value_that_its_schema_allows() {
    let document = document(Auth::None).await;
    let mut found = Vec::new();
    defaults(&document, "", &mut found);
    assert!(
        found
            .iter()
            .any(|(place, _)| place == "/components/schemas/NewTask/properties/key"),
        "{found:?}"
    );
    for (place, schema) in found {
        let value = schema["default"].clone();
        let mut whole = schema.clone();
        whole["components"] = document["components"].clone();
        let validator =
            jsonschema::validator_for(&whole).unwrap_or_else(|error| panic!("{place}: {error}"));
        assert!(validator.is_valid(&value), "{place}: {schema}");
    }
}

#[tokio::test]
async fn the_schemas_say_what_the_readers_take() {
    let document = document(Auth::None).await;
    let schema = |name: &str| document["components"]["schemas"][name].clone();
    let task = schema("NewTask");
    assert_eq!(
        (&task["additionalProperties"], &task["required"]),
        (&false.into(), &serde_json::json!(["queue"]))
    );
    assert_eq!(task["properties"]["headers"]["maxProperties"], 1000);
    assert_eq!(task["properties"]["not_before"]["format"], "date-time");
    let get = schema("GetTasks");
    assert_eq!(
        (&get["required"], &get["properties"]["queues"]["maxItems"]),
        (&serde_json::json!(["queues"]), &100.into())
    );
    let complete = schema("CompleteTasks");
    assert_eq!(
        complete["properties"]["completions"]["items"]["$ref"],
        "#/components/schemas/Completion"
    );
    assert_eq!(
        schema("Completion")["required"],
        serde_json::json!(["id", "lease_token"])
    );
    let leased = schema("LeasedTask");
    assert!(
        leased["required"]
            .as_array()
            .unwrap()
            .contains(&"lease_token".into()),
        "{leased}"
    );
    assert_eq!(
        leased["properties"]["payload_encoding"]["$ref"],
        "#/components/schemas/EncodingName"
    );
    // Answers leave out what is not there, so nothing in them is null.
    assert_eq!(schema("Task")["properties"]["not_before"]["type"], "string");
    let security = &document["paths"]["/v1/tasks"]["post"]["security"];
    assert_eq!(
        security,
        &serde_json::json!([{}, {"token": []}]),
        "without tokens none is needed"
    );
}

#[tokio::test]
async fn a_limit_has_the_bounds_that_it_says() {
    let daemon = Daemon::start("", &[]).await;
    let (_, document) = daemon.get("/openapi.json").await;
    let put = crate::support::http_client()
        .put(format!("{}/v1/topics/t", daemon.http()))
        .json(&serde_json::json!({}));
    assert_eq!(put.send().await.unwrap().status(), 200);
    let mut limits = 0;
    for ((_, path), operation) in operations(&document) {
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        for limit in parameters.filter(|one| one["name"] == "limit") {
            let [least, most] =
                ["minimum", "maximum"].map(|bound| limit["schema"][bound].as_u64().unwrap());
            let queue = if path == "/v1/dump" { "queue=q&" } else { "" };
            let path = path.replace("{queue}", "q").replace("{topic}", "t");
            for (value, expected) in [(least, 200), (most, 200), (most + 1, 400)] {
                let (status, answer) = daemon.get(&format!("{path}?{queue}limit={value}")).await;
                assert_eq!(status, expected, "{path} {value}: {answer}");
            }
            limits += 1;
        }
    }
    assert_eq!(limits, 10);
}

#[tokio::test]
async fn the_page_loads_nothing_from_elsewhere() {
    let url = start(Auth::Tokens).await;
    let index = get(&url, "/").await.text().await.unwrap();
    for path in [
        "grpcurl -plaintext",
        "/openapi.json",
        "/docs/",
        "/v1/bulk/{id}:stop",
        "/v1/queues/{queue}:pause, :resume",
    ] {
        assert!(index.contains(path), "{index}");
    }
    // The redirect leads to the page.
    let page = get(&url, "/docs").await;
    assert!(page.url().path() == "/docs/", "{}", page.url());
    let policy = page.headers()[header::CONTENT_SECURITY_POLICY]
        .to_str()
        .unwrap()
        .to_owned();
    assert!(
        policy.contains("default-src 'none'") && policy.contains("script-src 'self';"),
        "{policy}"
    );
    assert!(
        policy.contains("connect-src 'self'") && policy.contains("frame-ancestors 'none'"),
        "{policy}"
    );
    let page = page.text().await.unwrap();
    let files = scraper::Html::parse_document(&page);
    for (tag, attribute) in [("script", "src"), ("link", "href")] {
        for element in files.select(&scraper::Selector::parse(tag).unwrap()) {
            let file = element
                .attr(attribute)
                .expect("no script is within the page");
            if file != "data:," {
                assert!(!file.contains('/'), "{file}");
                let answer = get(&url, &format!("/docs/{file}")).await;
                let kind = if file.ends_with(".css") {
                    "text/css"
                } else {
                    "text/javascript"
                };
                let content_type = answer.headers()[header::CONTENT_TYPE].to_str().unwrap();
                assert!(
                    answer.status() == 200 && content_type.starts_with(kind),
                    "{file}: {content_type}"
                );
            }
        }
    }
    // The page shows this taskd's own description.
    let start = get(&url, "/docs/start.js").await.text().await.unwrap();
    assert!(
        start.contains("\"../openapi.json\"") || start.contains("'../openapi.json'"),
        "{start}"
    );
    let script = get(&url, "/docs/swagger-ui.js").await;
    assert_eq!(script.headers()[header::CONTENT_ENCODING], "gzip");
    let gzip = script.bytes().await.unwrap();
    assert!(
        gzip.starts_with(&[0x1f, 0x8b, 8]) && gzip.len() > 300_000,
        "{}",
        gzip.len()
    );
    let script = gunzip(&gzip);
    assert!(script.windows(15).any(|text| text == b"SwaggerUIBundle"));
}

/// Unpacks it with the gzip of this machine, which checks the checksum and the size.
fn gunzip(gzip: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(gzip).unwrap();
    let input = std::fs::File::open(file.path()).unwrap();
    let output = std::process::Command::new("gzip")
        .args(["-d", "-c"])
        .stdin(input)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

#[tokio::test]
async fn pages_of_other_sites_reach_neither() {
    let url = start(Auth::None).await;
    for path in ["/openapi.json", "/docs/", "/docs/swagger-ui.js"] {
        let request = crate::support::http_client().get(format!("{url}{path}"));
        let foreign = request
            .header("sec-fetch-site", "cross-site")
            .header("sec-fetch-mode", "no-cors");
        assert_eq!(foreign.send().await.unwrap().status(), 403, "{path}");
        let rebound = crate::support::http_client()
            .get(format!("{url}{path}"))
            .header(header::HOST, "evil.example");
        assert_eq!(rebound.send().await.unwrap().status(), 421, "{path}");
    }
}
