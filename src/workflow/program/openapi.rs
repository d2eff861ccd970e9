//! Operations of OpenAPI documents: Swagger 2 and OpenAPI 3.

use serde_json::Value;

use super::uri::UriTemplate;

/// An operation of a document.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Operation {
    pub(crate) method: String,
    pub(crate) uri: UriTemplate,
    parameters: Vec<Parameter>,
    /// Whether parameters that are not declared form the body.
    takes_body: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Parameter {
    name: String,
    part: Part,
    required: bool,
}

/// The part of a request that a parameter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Path,
    Query,
    Header,
    Cookie,
    /// The whole body.
    Body,
    /// A field of an object that is the body.
    Field,
    /// A field of a form that is the body.
    Form,
}

const METHODS: [&str; 8] = [
    "get", "put", "post", "delete", "options", "head", "patch", "trace",
];

/// The name of the parameter that is the whole body, unless the document declares it otherwise.
const BODY: &str = "body";

impl Operation {
    /// Finds an operation in a document, which was read from `from`.
    pub(crate) fn find(document: &Value, id: &str, from: &str) -> Result<Self, String> {
        let is_swagger = match (document.get("swagger"), document.get("openapi")) {
            (Some(Value::String(version)), _) if version.starts_with("2.") => true,
            (_, Some(Value::String(version))) if version.starts_with("3.") => false,
            _ => {
                return Err(format!(
                    "{from} is no document of Swagger 2 or OpenAPI 3: its field \"swagger\" or \"openapi\" must say so"
                ));
            }
        };
        let paths = document.get("paths").and_then(Value::as_object);
        for (path, item) in paths.into_iter().flatten() {
            let item = resolved(document, item);
            for method in METHODS {
                let Some(operation) = item.get(method) else {
                    continue;
                };
                if operation.get("operationId").and_then(Value::as_str) != Some(id) {
                    continue;
                }
                let base = match is_swagger {
                    true => swagger_base(document, operation, from),
                    false => server([operation, item, document], from),
                };
                let mut found = Self {
                    method: method.to_owned(),
                    uri: UriTemplate::read(&format!("{}{path}", base.trim_end_matches('/'))),
                    parameters: Vec::new(),
                    takes_body: false,
                };
                if let Some(body) = operation.get("requestBody") {
                    found.takes_body = true;
                    found.parameters.push(Parameter {
                        name: BODY.to_owned(),
                        part: Part::Body,
                        required: false,
                    });
                    let body = resolved(document, body);
                    if body
                        .pointer("/content/application~1x-www-form-urlencoded")
                        .is_some()
                        && body.pointer("/content/application~1json").is_none()
                    {
                        return Err(format!(
                            "{id} takes a form, which taskd cannot send yet; call it by `call: http`"
                        ));
                    }
                }
                for declared in [item, operation] {
                    found.declare(document, declared)?;
                }
                return Ok(found);
            }
        }
        Err(format!("{from} has no operation {id}"))
    }

    /// Adds the parameters of an operation or a path. Later ones replace earlier ones.
    fn declare(&mut self, document: &Value, declared: &Value) -> Result<(), String> {
        let parameters = declared.get("parameters").and_then(Value::as_array);
        for parameter in parameters.into_iter().flatten() {
            let parameter = resolved(document, parameter);
            let text = |name: &str| parameter.get(name).and_then(Value::as_str);
            let (Some(name), Some(place)) = (text("name"), text("in")) else {
                return Err("the document has a parameter without \"name\" or \"in\"".to_owned());
            };
            let part = match place {
                "path" => Part::Path,
                "query" => Part::Query,
                "header" => Part::Header,
                "cookie" => Part::Cookie,
                "body" => Part::Body,
                "formData" => Part::Form,
                _ => return Err(format!("the document has a parameter in {place:?}")),
            };
            let required = parameter.get("required") == Some(&Value::Bool(true));
            self.parameters
                .retain(|known| known.name != name || known.part != part);
            self.parameters.push(Parameter {
                name: name.to_owned(),
                part,
                required,
            });
        }
        Ok(())
    }

    /// The part of the request that a parameter belongs to, if there is a parameter of this name.
    pub(crate) fn part(&self, name: &str) -> Option<Part> {
        let declared = self
            .parameters
            .iter()
            .rev()
            .find(|known| known.name == name);
        match declared {
            Some(parameter) => Some(parameter.part),
            None => self.takes_body.then_some(Part::Field),
        }
    }

    /// Names of parameters that must be given.
    pub(crate) fn required(&self) -> impl Iterator<Item = &str> {
        self.parameters
            .iter()
            .filter(|parameter| parameter.required)
            .map(|parameter| parameter.name.as_str())
    }
}

/// Follows a reference inside the document.
fn resolved<'a>(document: &'a Value, value: &'a Value) -> &'a Value {
    let mut value = value;
    // References can form a circle.
    for _ in 0..16 {
        let reference = value.get("$ref").and_then(Value::as_str);
        let Some(target) = reference
            .and_then(|reference| reference.strip_prefix('#'))
            .and_then(|pointer| document.pointer(pointer))
        else {
            break;
        };
        value = target;
    }
    value
}

/// The URI before the paths of a Swagger 2 document.
fn swagger_base(document: &Value, operation: &Value, from: &str) -> String {
    let own = split_uri(from);
    let schemes = operation.get("schemes").or_else(|| document.get("schemes"));
    let schemes: Vec<&str> = schemes
        .and_then(Value::as_array)
        .map(|schemes| schemes.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    let scheme = match schemes.contains(&"https") {
        true => "https",
        false => schemes.first().copied().unwrap_or(own.0),
    };
    let host = document
        .get("host")
        .and_then(Value::as_str)
        .unwrap_or(own.1);
    let path = document
        .get("basePath")
        .and_then(Value::as_str)
        .unwrap_or("");
    format!("{scheme}://{host}{path}")
}

/// The URI before the paths of an OpenAPI 3 document: the first server of the nearest list.
fn server(places: [&Value; 3], from: &str) -> String {
    let (scheme, host, path) = split_uri(from);
    let servers = places.iter().find_map(|place| place.get("servers")?.get(0));
    let url = servers.and_then(|server| server.get("url")?.as_str());
    let mut url = url.unwrap_or("/").to_owned();
    let variables = servers.and_then(|server| server.get("variables")?.as_object());
    for (name, variable) in variables.into_iter().flatten() {
        if let Some(default) = variable.get("default").and_then(Value::as_str) {
            url = url.replace(&format!("{{{name}}}"), default);
        }
    }
    if url.contains("://") {
        return url;
    }
    if url.starts_with('/') {
        return format!("{scheme}://{host}{url}");
    }
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    format!("{scheme}://{host}{folder}/{url}")
}

/// The scheme, the host with its port, and the path of a URI.
fn split_uri(uri: &str) -> (&str, &str, &str) {
    let (scheme, rest) = uri.split_once("://").unwrap_or(("https", uri));
    let rest = rest.split(['?', '#']).next().unwrap_or(rest);
    match rest.find('/') {
        Some(at) => (scheme, &rest[..at], &rest[at..]),
        None => (scheme, rest, ""),
    }
}
