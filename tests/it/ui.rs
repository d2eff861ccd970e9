//! The dashboard, by the pages of the running binary.

use reqwest::{Method, StatusCode, header};
use scraper::{Html, Selector};
use serde_json::{Value, json};
use taskd::{ingress::ui_routes, model::Role};

use crate::{
    columns::access::{TOKENS, taskd, token},
    support::{daemon::Daemon, http_client, until},
};

/// A browser: it keeps a cookie, and follows no redirect.
struct Browser<'a> {
    daemon: &'a Daemon,
    client: reqwest::Client,
    cookie: Option<String>,
}

struct Page {
    status: StatusCode,
    headers: header::HeaderMap,
    text: String,
}

impl Page {
    fn has(&self, selector: &str) -> bool {
        self.count(selector) > 0
    }

    fn count(&self, selector: &str) -> usize {
        let page = Html::parse_document(&self.text);
        page.select(&Selector::parse(selector).unwrap()).count()
    }

    /// The visible text of the first such element.
    fn of(&self, selector: &str) -> String {
        let page = Html::parse_document(&self.text);
        let selector = Selector::parse(selector).unwrap();
        let element = page.select(&selector).next();
        let element = element.unwrap_or_else(|| panic!("no {selector:?} in {}", self.text));
        let text: String = element.text().collect();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn values(&self, selector: &str, attribute: &str) -> Vec<String> {
        let page = Html::parse_document(&self.text);
        let selector = Selector::parse(selector).unwrap();
        let found = page.select(&selector);
        found
            .filter_map(|element| element.value().attr(attribute).map(str::to_owned))
            .collect()
    }

    fn location(&self) -> &str {
        self.headers[header::LOCATION].to_str().unwrap()
    }
}

impl<'a> Browser<'a> {
    fn new(daemon: &'a Daemon) -> Self {
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .pool_max_idle_per_host(0)
            .build()
            .unwrap();
        Self {
            daemon,
            client,
            cookie: None,
        }
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: String,
    ) -> Page {
        let url = format!("{}{path}", self.daemon.http());
        let mut request = self.client.request(method, url).body(body);
        if let Some(cookie) = &self.cookie {
            request = request.header("cookie", format!("other=1; taskd={cookie}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = request.send().await.unwrap();
        let status = answer.status();
        let headers = answer.headers().clone();
        // A stream of events does not end.
        let is_stream = headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind == "text/event-stream");
        let text = if is_stream {
            String::new()
        } else {
            answer.text().await.unwrap()
        };
        Page {
            status,
            headers,
            text,
        }
    }

    async fn get(&self, path: &str) -> Page {
        self.ask(Method::GET, path, &[], String::new()).await
    }

    /// Sends a form of one of taskd's pages.
    async fn post(&self, path: &str, fields: &[(&str, &str)]) -> Page {
        let body = form(fields);
        let headers = [
            ("sec-fetch-site", "same-origin"),
            ("content-type", "application/x-www-form-urlencoded"),
        ];
        self.ask(Method::POST, path, &headers, body).await
    }
}

fn form(fields: &[(&str, &str)]) -> String {
    let encode = |text: &str| {
        text.bytes()
            .map(|byte| format!("%{byte:02X}"))
            .collect::<String>()
    };
    let pairs: Vec<String> = fields
        .iter()
        .map(|(name, value)| format!("{}={}", encode(name), encode(value)))
        .collect();
    pairs.join("&")
}

/// A path of a route for things that are there.
fn example(path: &str, id: &str) -> String {
    let path = path.replace("{queue}", "q").replace("{name}", "x");
    let path = path.replace("tasks/{id}/{act}", "tasks/{id}/priority");
    path.replace("{act}", "retry").replace("{id}", id)
}

#[tokio::test]
async fn every_page_asks_for_its_role_and_no_form_is_forged() {
    let daemon = Daemon::start(TOKENS, &[]).await;
    let admin = token(&daemon, "ops", &["--roles", "admin"]).await;
    let read = token(&daemon, "eyes", &["--roles", "read"]).await;
    let insert = token(&daemon, "producer", &["--roles", "insert,work"]).await;
    let (status, answer) = crate::columns::access::post(
        &daemon,
        "/v1/tasks",
        &admin,
        json!([{"queue": "q", "key": "k"}]),
    )
    .await;
    assert_eq!(status, 200, "{answer}");
    let id = answer["results"][0]["id"].as_str().unwrap().to_owned();
    let mut browser = Browser::new(&daemon);
    let mut asked = 0;
    for route in ui_routes() {
        let path = example(route.path, &id);
        let name = format!("{} {path}", route.method);
        let Some(role) = route.role else {
            continue;
        };
        asked += 1;
        assert_eq!(
            route.method == Method::POST,
            role == Role::Admin && route.method == Method::POST
        );
        let same = [("sec-fetch-site", "same-origin")];
        // Without a token, a page leads to the login, and a form is refused.
        browser.cookie = None;
        let page = browser
            .ask(route.method.clone(), &path, &same, String::new())
            .await;
        if route.method == Method::GET {
            assert_eq!(page.status, 303, "{name}");
            assert!(
                page.location().contains("login"),
                "{name}: {}",
                page.location()
            );
        } else {
            assert_eq!(page.status, 401, "{name}");
        }
        for (who, cookie, may) in [
            ("nobody", "taskd_wrong", false),
            ("producer", &insert[..], false),
            ("eyes", &read[..], role == Role::Read),
        ] {
            browser.cookie = Some(cookie.to_owned());
            let page = browser
                .ask(route.method.clone(), &path, &same, String::new())
                .await;
            let status = page.status.as_u16();
            let is_login = status == 303 && page.location().contains("login");
            let is_right = match who {
                _ if may => !is_login && status < 500 && !matches!(status, 401 | 403),
                "nobody" if route.method == Method::GET => is_login,
                "nobody" => status == 401,
                _ => status == 403,
            };
            assert!(is_right, "{who} {name}: {status} {}", page.text);
            assert_eq!(page.headers["x-content-type-options"], "nosniff", "{name}");
            let policy = page.headers["content-security-policy"].to_str().unwrap();
            assert!(
                policy.starts_with("default-src 'none'") && !policy.contains("unsafe"),
                "{policy}"
            );
        }
        browser.cookie = Some(admin.clone());
        if route.method == Method::GET {
            let page = browser.get(&path).await;
            let is_there = matches!(page.status.as_u16(), 200 | 303 | 400 | 404);
            assert!(is_there, "{name}: {} {}", page.status, page.text);
            let page = browser.get(&format!("{path}?other=1")).await;
            assert_eq!(page.status, 400, "{name}");
        } else {
            for forged in [
                vec![],
                vec![("origin", "https://evil.example")],
                vec![("origin", "null")],
                vec![("sec-fetch-site", "cross-site")],
                vec![("sec-fetch-site", "same-site")],
                vec![("sec-fetch-site", "none")],
            ] {
                let page = browser
                    .ask(Method::POST, &path, &forged, String::new())
                    .await;
                assert_eq!(page.status, 403, "{name} {forged:?}");
            }
        }
        for method in [Method::PUT, Method::DELETE, Method::PATCH] {
            let page = browser
                .ask(method.clone(), &path, &same, String::new())
                .await;
            assert_eq!(page.status, 405, "{method} {path}");
        }
    }
    assert!(asked > 20, "{asked} routes");
    let bearer = Some(&admin[..]);
    let queue = async || {
        crate::columns::access::call(&daemon, Method::GET, "/v1/queues/q", bearer, Value::Null)
            .await
            .1
    };
    let view = queue().await;
    assert_eq!(
        (&view["waiting"], &view["paused"]),
        (&json!(1), &json!(false)),
        "{view}"
    );

    // The API never reads the cookie.
    let page = browser.get("/v1/queues").await;
    assert_eq!(page.status, 401);
    let openapi = http_client().get(format!("{}/openapi.json", daemon.http()));
    let openapi = openapi.send().await.unwrap().text().await.unwrap();
    assert!(!openapi.contains("/ui/"), "the pages are no operations");

    // A login takes the token, and a revoked one is out.
    browser.cookie = None;
    let page = browser.get("/ui/queues/q?did=pause").await;
    assert_eq!(page.location(), "../login?to=queues%2Fq%3Fdid%3Dpause");
    let page = browser.get("/ui/login?to=queues%2Fq").await;
    assert_eq!(page.values("input[name=to]", "value"), ["queues/q"]);
    let page = browser
        .post("/ui/login", &[("token", "taskd_wrong"), ("to", "")])
        .await;
    assert_eq!(page.status, 401);
    assert!(
        page.of("[role=alert]").contains("not known"),
        "{}",
        page.text
    );
    let page = browser
        .post("/ui/login", &[("token", &insert), ("to", "")])
        .await;
    assert_eq!(page.status, 403);
    let page = browser
        .post("/ui/login", &[("token", &read), ("to", "queues/q")])
        .await;
    assert_eq!((page.status.as_u16(), page.location()), (303, "./queues/q"));
    let cookie = page.headers[header::SET_COOKIE].to_str().unwrap();
    let want = format!("taskd={read}; HttpOnly; SameSite=Strict");
    assert_eq!(cookie, want, "no path, so only this folder gets it");
    browser.cookie = Some(read.clone());
    assert_eq!(browser.get("/ui/queues/q").await.status, 200);
    // A link on another site comes without the cookie, so the page of the login asks again.
    let linked = [
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "navigate"),
    ];
    let cookie = browser.cookie.take();
    let page = browser
        .ask(
            Method::GET,
            "/ui/login?to=queues%2Fq",
            &linked,
            String::new(),
        )
        .await;
    assert_eq!(
        (page.status.as_u16(), &page.headers[header::REFRESH]),
        (200, &"0".parse().unwrap())
    );
    browser.cookie = cookie;
    let page = browser.get("/ui/login?to=queues%2Fq").await;
    assert_eq!((page.status.as_u16(), page.location()), (303, "./queues/q"));
    let (code, _, stderr) = taskd(&daemon, &["token", "revoke", "eyes"]);
    assert_eq!(code, 0, "{stderr}");
    until("the token is out", async || {
        browser.get("/ui/queues/q").await.status == 303
    })
    .await;
    let page = browser.post("/ui/logout", &[]).await;
    let cookie = page.headers[header::SET_COOKIE].to_str().unwrap();
    assert!(cookie.contains("Max-Age=0"), "{cookie}");
}

#[tokio::test]
async fn a_dashboard_may_be_read_only_or_off() {
    let daemon = Daemon::start(
        "dashboard = \"read-only\"\ndashboard_payloads = false\n",
        &[],
    )
    .await;
    let ids = daemon
        .insert(&[json!({"queue": "q", "key": "k", "payload": "secret thing", "headers": {"h": "secret value"}})])
        .await;
    let browser = Browser::new(&daemon);
    for route in ui_routes().into_iter().filter(|route| route.role.is_some()) {
        let path = example(route.path, &ids[0]);
        if route.method == Method::POST {
            let page = browser.post(&path, &[]).await;
            assert_eq!(page.status, 403, "{path}");
            assert!(page.text.contains("read-only"), "{}", page.text);
        } else {
            let page = browser.get(&path).await;
            let status = page.status.as_u16();
            let is_payload = path.ends_with("/payload") || path.ends_with("/result");
            let is_right = match is_payload {
                true => status == 403,
                false => matches!(status, 200 | 303 | 400 | 404),
            };
            assert!(is_right, "{path}: {status} {}", page.text);
            assert!(!page.text.contains("secret"), "{path}: {}", page.text);
            let is_question = route.role == Some(Role::Admin);
            assert!(is_question || !page.has("main form[method=post]"), "{path}");
        }
    }
    assert_eq!(
        browser
            .get(&format!("/ui/tasks/{}/payload", ids[0]))
            .await
            .status,
        403
    );
    assert_eq!(daemon.queue("q").await["paused"], false);

    let daemon = Daemon::start("dashboard = \"off\"\n", &[]).await;
    let browser = Browser::new(&daemon);
    assert_eq!(browser.get("/ui/").await.status, 404);
    assert_eq!(browser.get("/ui/tasks").await.status, 404);
    let html = [("accept", "text/html,*/*")];
    let page = browser.ask(Method::GET, "/", &html, String::new()).await;
    assert!(
        page.status == 200 && page.text.starts_with("taskd:"),
        "{}",
        page.text
    );
}

#[tokio::test]
async fn the_overview_shows_queues_and_a_queue_is_paused_there() {
    let daemon = Daemon::start("", &[]).await;
    let browser = Browser::new(&daemon);
    let html = [("accept", "text/html,application/xhtml+xml")];
    let page = browser.ask(Method::GET, "/", &html, String::new()).await;
    assert_eq!((page.status.as_u16(), page.location()), (303, "ui/"));
    let page = browser.get("/").await;
    assert!(page.text.starts_with("taskd:"), "curl gets the text");

    let page = browser.get("/ui/").await;
    assert_eq!(page.status, 200);
    assert!(
        page.of("#frame").contains("No queue has a task"),
        "{}",
        page.text
    );
    let address = daemon.http();
    assert!(
        page.text.contains(&format!("curl {address}/v1/tasks")),
        "{}",
        page.text
    );

    let mut tasks = vec![json!({"queue": "mail", "key": "1"})];
    tasks.extend((0..5).map(|key| json!({"queue": "crawl.pages", "key": key.to_string()})));
    tasks.extend((0..2).map(|key| json!({"queue": "crawl.images", "key": key.to_string()})));
    daemon.insert(&tasks).await;
    until("the overview has the queues", async || {
        browser.get("/ui/").await.has("#q-mail")
    })
    .await;
    until("the group adds its queues up", async || {
        let page = browser.get("/ui/").await;
        page.has("[id='g-crawl']") && page.of("[id='g-crawl']").contains(" 7 ")
    })
    .await;
    let page = browser.get("/ui/").await;
    assert_eq!(page.count("tbody tr"), 2, "{}", page.text);
    assert!(page.of("#q-mail .state").contains("ok"), "{}", page.text);
    assert!(
        page.of(".health").starts_with("All is well: 1 process"),
        "{}",
        page.text
    );
    let page = browser.get("/ui/?group=crawl&sort=-waiting").await;
    let rows = page.values("tbody tr", "id");
    assert_eq!(rows, ["q-crawl.pages", "q-crawl.images"]);
    let page = browser.get("/ui/?group=crawl&sort=waiting").await;
    assert_eq!(
        page.values("tbody tr", "id"),
        ["q-crawl.images", "q-crawl.pages"]
    );
    assert!(page.has("th[aria-sort=ascending]"));
    let page = browser.get("/ui/?q=mai").await;
    assert_eq!(page.values("tbody tr", "id"), ["q-mail"]);

    let page = browser.get("/ui/queues/mail").await;
    assert!(page.of(".flow").contains("1 to claim"), "{}", page.text);
    assert!(
        page.of("main").contains("Why are the oldest not done?"),
        "{}",
        page.text
    );
    let page = browser.post("/ui/queues/mail/pause", &[]).await;
    assert_eq!(
        (page.status.as_u16(), page.location()),
        (303, "../../queues/mail?did=pause")
    );
    assert_eq!(daemon.queue("mail").await["paused"], true);
    until("the page says so", async || {
        let page = browser.get("/ui/queues/mail?did=pause").await;
        page.has("form[action='mail/resume']") && page.of(".did").contains("paused")
    })
    .await;
    browser.post("/ui/queues/mail/resume", &[]).await;
    assert_eq!(daemon.queue("mail").await["paused"], false);
    assert_eq!(browser.get("/ui/queues/never").await.status, 404);

    // A frame is the live part only, and nothing if it is the same.
    let first = browser
        .ask(
            Method::GET,
            "/ui/bulk",
            &[("taskd-frame", "none")],
            String::new(),
        )
        .await;
    assert!(
        first.status == 200 && !first.text.contains("<html"),
        "{}",
        first.text
    );
    let version = first.headers["taskd-frame"].to_str().unwrap();
    let same = browser
        .ask(
            Method::GET,
            "/ui/bulk",
            &[("taskd-frame", version)],
            String::new(),
        )
        .await;
    assert_eq!((same.status.as_u16(), &same.text[..]), (204, ""));
}

#[tokio::test]
async fn a_task_is_found_and_changed_and_its_results_are_compared() {
    let daemon = Daemon::start("", &[]).await;
    let browser = Browser::new(&daemon);
    let payload = json!({"n": 1, "text": "x"});
    let ids = daemon
        .insert(&[
            json!({"queue": "q", "key": "a/b c", "payload": payload, "replicas": 3}),
            json!({"queue": "q", "key": "other"}),
        ])
        .await;
    let page = browser.get("/ui/tasks?queue=q").await;
    assert_eq!(page.count("tbody tr"), 2, "{}", page.text);
    let page = browser
        .get("/ui/tasks?queue=q&key_prefix=a%2F&status=UNFINISHED")
        .await;
    assert_eq!(page.count("tbody tr"), 1, "{}", page.text);
    let page = browser.get("/ui/dead?queue=q").await;
    assert!(
        page.of("main").contains("No dead letter matches"),
        "{}",
        page.text
    );
    let page = browser.get("/ui/tasks?status=DEAD").await;
    assert_eq!(page.status, 400);
    assert!(page.of("main").contains("needs a queue"), "{}", page.text);
    let page = browser.get("/ui/tasks?queue=q&status=DEAD").await;
    assert!(
        page.has("#frame ul a"),
        "one part of the filter can be dropped: {}",
        page.text
    );
    let page = browser.get(&format!("/ui/find?q={}", ids[0])).await;
    assert_eq!(page.location(), format!("./tasks/{}", ids[0]));
    until("the box finds the key", async || {
        let page = browser.get("/ui/find?q=a%2Fb%20c").await;
        page.status == 303 && page.location() == format!("./tasks/{}", ids[0])
    })
    .await;

    for (worker, result) in [
        ("w1", json!({"sha": "9f", "status": 200})),
        ("w2", json!({"sha": "9f", "status": 200})),
        ("w3", json!({"status": 200, "sha": "1c"})),
    ] {
        let leased = daemon.lease_all(worker, "q", 2).await;
        let mine = leased.iter().find(|task| task["id"] == ids[0]).unwrap();
        let item = json!({"id": mine["id"], "lease_token": mine["lease_token"], "result": result});
        let (status, answer) = daemon
            .post(
                "/v1/tasks:complete",
                &json!({"worker": worker, "completions": [item]}),
            )
            .await;
        assert_eq!(status, 200, "{answer}");
        let others: Vec<&Value> = leased.iter().filter(|task| task["id"] != ids[0]).collect();
        for other in others {
            let item = json!({"id": other["id"], "lease_token": other["lease_token"], "reason": "not now"});
            let body = json!({"worker": worker, "rejections": [item]});
            assert_eq!(daemon.post("/v1/tasks:reject", &body).await.0, 200);
        }
    }
    let task = format!("/ui/tasks/{}", ids[0]);
    until("the page has three results", async || {
        browser.get(&task).await.text.contains("2 of 3 agree")
    })
    .await;
    let page = browser.get(&task).await;
    assert_eq!(page.count(".result"), 2, "{}", page.text);
    assert_eq!(page.count("svg rect"), 3, "a bar for each attempt");
    let shown = page.of("pre[aria-label=Payload]");
    assert!(shown.contains("\"text\""), "{shown}");
    let page = browser.get(&format!("{task}/result?worker=w3")).await;
    assert!(page.text.contains("1c"), "{}", page.text);
    let disposition = page.headers[header::CONTENT_DISPOSITION].to_str().unwrap();
    assert!(disposition.starts_with("attachment"), "{disposition}");

    let other = format!("/ui/tasks/{}", ids[1]);
    let page = browser.get(&format!("{other}/cancel")).await;
    assert!(
        page.has("form[method=post][action=cancel]"),
        "{}",
        page.text
    );
    let page = browser
        .post(&format!("{other}/num"), &[("replicas", "many")])
        .await;
    assert_eq!(page.status, 400);
    let page = browser
        .post(&format!("{other}/num"), &[("replicas", "2")])
        .await;
    assert_eq!(page.status, 303, "{}", page.text);
    let page = browser
        .post(&format!("{other}/priority"), &[("priority", "high")])
        .await;
    assert_eq!(page.status, 303, "{}", page.text);
    let (_, changed) = daemon.get(&format!("/v1/tasks/{}", ids[1])).await;
    assert_eq!(
        (&changed["priority"], &changed["replicas"]),
        (&json!("high"), &json!(2))
    );
    let page = browser.post(&format!("{other}/cancel"), &[]).await;
    assert_eq!(page.status, 303, "{}", page.text);
    until("the task is cancelled", async || {
        daemon.get(&format!("/v1/tasks/{}", ids[1])).await.1["status"] == "CANCELLED"
    })
    .await;
    let page = browser.post(&format!("{other}/cancel"), &[]).await;
    assert_eq!(page.status, 303, "it is cancelled already: {}", page.text);

    // All that match, after a count.
    let page = browser.get("/ui/bulk/new?what=retry&queue=q").await;
    assert!(page.of("main").contains("1 task match"), "{}", page.text);
    let hidden = |name: &str| {
        page.values(&format!("input[name={name}]"), "value")
            .remove(0)
    };
    let [matched, as_of] = ["matched", "as_of"].map(hidden);
    let fields = [
        ("what", "retry"),
        ("queue", "q"),
        ("matched", &matched),
        ("as_of", &as_of),
    ];
    let page = browser.post("/ui/bulk/new", &fields).await;
    assert_eq!(page.status, 303, "{}", page.text);
    let bulk = page.location().replace("../", "/ui/");
    until("the bulk change is done", async || {
        browser.get(&bulk).await.text.contains("DONE")
    })
    .await;
    let page = browser.get(&bulk).await;
    assert!(
        page.of(".says").starts_with("1 tasks changed"),
        "{}",
        page.text
    );
    let fields = [
        ("what", "cancel"),
        ("queue", "q"),
        ("matched", "101"),
        ("typed", "100"),
        ("as_of", "1"),
    ];
    let page = browser.post("/ui/bulk/new", &fields).await;
    assert_eq!(page.status, 400, "the number typed is another one");
    // The box finds the keys of queues in which nothing waits, too.
    let page = browser.get("/ui/find?q=other").await;
    assert_eq!(
        page.location(),
        format!("./tasks/{}", ids[1]),
        "{}",
        page.text
    );
    daemon
        .insert(&[json!({"queue": "r", "key": "other"})])
        .await;
    let page = browser.get("/ui/find?q=other").await;
    assert_eq!(page.count("#frame li"), 2, "{}", page.text);
    let page = browser.get("/ui/find?q=nowhere").await;
    assert!(
        page.of("main").contains("No task has this key"),
        "{}",
        page.text
    );
    let page = browser.get("/ui/acts").await;
    assert!(page.count("tbody tr") >= 4, "{}", page.text);
    for path in [
        "/ui/workers",
        "/ui/processes",
        "/ui/books",
        "/ui/bulk",
        "/ui/dead",
    ] {
        assert_eq!(browser.get(path).await.status, 200, "{path}");
    }
    let page = browser.post("/ui/books", &[]).await;
    assert!(page.of("main").contains("0 differences"), "{}", page.text);
}

#[tokio::test]
async fn the_last_hour_of_a_queue_is_kept_and_shown() {
    let mut daemon = Daemon::start(TOKENS, &[]).await;
    let admin = token(&daemon, "ops", &["--roles", "admin,insert,work"]).await;
    let mine = token(&daemon, "mine", &["--roles", "read", "--queues", "mine.*"]).await;
    let tasks = json!([
        {"queue": "q", "key": "1"},
        {"queue": "q", "key": "2"},
        {"queue": "q", "key": "3"},
        {"queue": "mine.a", "key": "1"},
    ]);
    let post = crate::columns::access::post;
    assert_eq!(post(&daemon, "/v1/tasks", &admin, tasks).await.0, 200);
    async fn history(daemon: &Daemon, token: &str, query: &str) -> (u16, Value) {
        let path = format!("/v1/history{query}");
        crate::columns::access::call(daemon, Method::GET, &path, Some(token), Value::Null).await
    }
    /// The last point of the last hour.
    async fn last(daemon: &Daemon, token: &str, query: &str) -> Value {
        let (status, mut answer) = history(daemon, token, query).await;
        assert_eq!(status, 200, "{answer}");
        let points = answer["hour"].as_array_mut().unwrap();
        points.pop().unwrap_or_default()
    }
    until("the leader has written the depths", async || {
        last(&daemon, &admin, "?queue=q").await["waiting"] == 3
    })
    .await;
    until("the second queue is written", async || {
        last(&daemon, &mine, "").await["inserted"] == 1
    })
    .await;
    let got = json!({"worker": "w", "queues": ["q"], "max_tasks": 1});
    let (_, leased) = post(&daemon, "/v1/tasks:get", &admin, got).await;
    let task = &leased["tasks"][0];
    let item = json!({"id": task["id"], "lease_token": task["lease_token"]});
    let done = json!({"worker": "w", "completions": [item]});
    assert_eq!(
        post(&daemon, "/v1/tasks:complete", &admin, done).await.0,
        200
    );
    daemon.kill9_and_restart();
    daemon.ready().await;
    until("the points go on", async || {
        let point = last(&daemon, &admin, "?queue=q").await;
        point["completed"] == 1 && point["waiting"] == 2
    })
    .await;
    let (_, all) = history(&daemon, &admin, "").await;
    let points = all["hour"].as_array().unwrap();
    assert!(
        points.len() > 1 && points[0]["at"].as_str() < points[1]["at"].as_str(),
        "{all}"
    );
    assert_eq!(points.last().unwrap()["inserted"], 4);
    let days = all["day"].as_array().unwrap();
    assert_eq!(
        days.len(),
        1,
        "one for five minutes, of two processes: {all}"
    );
    assert_eq!(last(&daemon, &mine, "").await["inserted"], 1);
    assert_eq!(last(&daemon, &mine, "?queue=mine.a").await["inserted"], 1);
    assert_eq!(history(&daemon, &mine, "?queue=q").await.0, 403);
    let (_, none) = history(&daemon, &admin, "?queue=never").await;
    assert_eq!(none, json!({"hour": [], "day": []}));

    let mut browser = Browser::new(&daemon);
    browser.cookie = Some(admin);
    let label = |page: &Page, selector: &str| page.values(selector, "aria-label").remove(0);
    until("the overview has a line", async || {
        browser.get("/ui/").await.has("#q-q svg[role=img]")
    })
    .await;
    let page = browser.get("/ui/").await;
    let says = label(&page, "#q-q svg");
    assert!(
        says.starts_with("Waiting in the last hour: at most"),
        "{says}"
    );
    let page = browser.get("/ui/queues/q").await;
    // The day has the queue only if the first entry was not written before the tasks came.
    assert!(page.count("figure svg[role=img]") >= 1, "{}", page.text);
    let says = label(&page, "figure svg");
    assert!(
        says.starts_with("Waiting in the last hour: at most 3"),
        "{says}"
    );
}

#[tokio::test]
async fn a_worker_loses_its_tasks_from_the_list_of_workers() {
    let daemon = Daemon::start("", &[]).await;
    let browser = Browser::new(&daemon);
    daemon
        .insert(&[
            json!({"queue": "q", "key": "1"}),
            json!({"queue": "q", "key": "2"}),
        ])
        .await;
    assert_eq!(daemon.lease_all("bad one", "q", 2).await.len(), 2);
    let page = browser.get("/ui/workers?queue=q").await;
    let links = page.values("tbody a[href*=away_from]", "href");
    assert_eq!(links.len(), 1, "{}", page.text);
    let asks = browser
        .get(&format!("/ui/{}", links[0].trim_start_matches("./")))
        .await;
    assert!(
        asks.of("main").contains("kept from worker bad one"),
        "{}",
        asks.text
    );
    let names = asks.values("form.form input", "name");
    let values = asks.values("form.form input", "value");
    let fields: Vec<(&str, &str)> = names
        .iter()
        .zip(&values)
        .map(|(name, value)| (&name[..], &value[..]))
        .collect();
    let page = browser.post("/ui/bulk/new", &fields).await;
    assert_eq!(page.status, 303, "{}", page.text);
    until("others may have the tasks", async || {
        daemon.queue("q").await["waiting"] == 2
    })
    .await;
    assert_eq!(daemon.lease("bad one", "q", 2, "0s").await.len(), 0);
    assert_eq!(daemon.lease_all("good one", "q", 2).await.len(), 2);
}

/// However many others are newer. A key may look like an id.
#[tokio::test]
async fn letters_of_an_old_reason_and_keys_like_ids_are_found() {
    let daemon = Daemon::start("", &[]).await;
    let browser = Browser::new(&daemon);
    let digest = "d41d8cd98f00b204e9800998ecf8427e";
    let mut tasks = vec![json!({"queue": "q", "key": digest})];
    tasks.extend((0..60).map(|n| json!({"queue": "q", "key": n.to_string()})));
    let ids = daemon.insert(&tasks).await;
    let leased = daemon.lease_all("w", "q", 61).await;
    let (old, new): (Vec<_>, Vec<_>) = leased.into_iter().partition(|one| one["id"] == ids[0]);
    for (reason, tasks) in [("took longer than 5 s", old), ("refused", new)] {
        let reject = |task: &Value| json!({"id": task["id"], "lease_token": task["lease_token"], "reason": reason, "retry": false});
        let rejections: Vec<Value> = tasks.iter().map(reject).collect();
        let body = json!({"worker": "w", "rejections": rejections});
        let (status, answer) = daemon.post("/v1/tasks:reject", &body).await;
        assert_eq!(status, 200, "{answer}");
        until("they are dead", async || {
            daemon.queue("q").await["dead"].as_u64() >= Some(tasks.len() as u64)
        })
        .await;
    }
    let page = browser.get("/ui/dead?queue=q&reason=took").await;
    assert_eq!(page.values("tbody tr[id]", "id").len(), 1, "{}", page.text);
    assert!(page.has("p.acts a[href*=purge]"), "{}", page.text);
    let page = browser.get(&format!("/ui/find?q={digest}")).await;
    assert_eq!(page.status, 303, "{}", page.text);
    assert!(page.location().ends_with(&ids[0]), "{}", page.location());
}

impl Browser<'_> {
    async fn frame(&self, path: &str) -> Page {
        let headers = [("taskd-frame", "none")];
        self.ask(Method::GET, path, &headers, String::new()).await
    }
}

/// A frame has no large results. It says so, and does not lose the heading.
#[tokio::test]
async fn results_that_become_large_keep_their_heading() {
    let daemon = Daemon::start("", &[]).await;
    let browser = Browser::new(&daemon);
    let tasks =
        [json!({"queue": "q", "key": "k", "payload": "p", "headers": {"h": "v"}, "replicas": 3})];
    let ids = daemon.insert(&tasks).await;
    let task = format!("/ui/tasks/{}", ids[0]);
    let report = async |worker: &str, result: &str| {
        let leased = daemon.lease_all(worker, "q", 1).await;
        let item = json!({"id": ids[0], "lease_token": leased[0]["lease_token"], "result": result});
        let body = json!({"worker": worker, "completions": [item]});
        let (status, answer) = daemon.post("/v1/tasks:complete", &body).await;
        assert_eq!(status, 200, "{answer}");
    };
    report("w1", "small").await;
    until("the frame has the result", async || {
        browser.frame(&task).await.text.contains("One result.")
    })
    .await;
    let frame = browser.frame(&task).await;
    let after = frame.headers["taskd-frame-after"].to_str().unwrap();
    assert!(after.parse::<u64>().unwrap() >= 2000, "{after}");
    report("w2", &"x".repeat(300 << 10)).await;
    until("the frame says that there are two", async || {
        browser.frame(&task).await.text.contains("2 results of 300")
    })
    .await;
    let frame = browser.frame(&task).await.text;
    assert!(
        frame.contains("<h2>Results</h2>") && frame.contains("load this page again"),
        "{frame}"
    );
    let page = browser.get(&task).await;
    assert!(
        page.of("#content").contains("None of 2 agree"),
        "{}",
        page.text
    );
    assert_eq!(page.of("pre[aria-label=Payload]"), "p");
}

/// What is done to a reason is done to all that begin alike, so the page says how many these are.
#[tokio::test]
async fn a_question_names_the_reasons_that_begin_alike() {
    let daemon = Daemon::start("", &[]).await;
    let browser = Browser::new(&daemon);
    let tasks: Vec<Value> = (0..4)
        .map(|n| json!({"queue": "q", "key": n.to_string()}))
        .collect();
    daemon.insert(&tasks).await;
    let leased = daemon.lease_all("w", "q", 4).await;
    let reasons = [
        "error 1 in parse",
        "error 2 in fetch",
        "error 3 in fetch",
        "gone",
    ];
    let rejections: Vec<Value> = leased
        .iter()
        .zip(reasons)
        .map(|(task, reason)| json!({"id": task["id"], "lease_token": task["lease_token"], "reason": reason, "retry": false}))
        .collect();
    let body = json!({"worker": "w", "rejections": rejections});
    assert_eq!(daemon.post("/v1/tasks:reject", &body).await.0, 200);
    until("they are dead", async || {
        daemon.queue("q").await["dead"] == 4
    })
    .await;
    let page = browser.get("/ui/dead?queue=q").await;
    let text = page.of("main");
    assert!(
        text.contains("with 2 of other reasons") && text.contains("with 1 of other reasons"),
        "{text}"
    );
    assert_eq!(text.matches("all that begin so").count(), 4, "{text}");
    let (status, counted) = daemon.get("/v1/dead-letters:reasons?queue=q").await;
    assert_eq!(
        (status, &counted["reasons"][0]["workers"]),
        (200, &json!(["w"]))
    );
    for path in [
        "dead/purge?queue=q&reason=error%20",
        "bulk/new?what=retry&status=DEAD&queue=q&reason=error%20",
    ] {
        let page = browser.get(&format!("/ui/{path}")).await;
        let named = page.of("#reasons");
        assert_eq!(named, "2 error # in fetch 1 error # in parse", "{path}");
    }
    // Letters cannot tell which of these tasks have such a key.
    let path = "bulk/new?what=retry&status=DEAD&queue=q&reason=error%20&key_prefix=0";
    let page = browser.get(&format!("/ui/{path}")).await;
    assert!(page.text.contains("1 task match"), "{}", page.text);
    assert!(!page.has("#reasons"), "{}", page.text);
}

/// While Redis is away, what SQL knows goes on. What Redis said last is marked as old.
#[tokio::test]
async fn a_server_that_is_away_greys_its_own_numbers_only() {
    let daemon = Daemon::start("", &[]).await;
    let browser = Browser::new(&daemon);
    daemon.insert(&[json!({"queue": "q", "key": "1"})]).await;
    until("the overview has the queue", async || {
        browser.get("/ui/").await.has("#q-q")
    })
    .await;
    assert!(daemon.signal_redis(nix::sys::signal::Signal::SIGSTOP));
    until("the page says that Redis is away", async || {
        browser.get("/ui/").await.has("[data-alert=Redis] time")
    })
    .await;
    let page = browser.get("/ui/").await;
    assert_eq!(page.count("#q-q td.old"), 3, "{}", page.text);
    assert!(page.has("#q-q td:nth-child(3).old"), "the waiting ones");
    assert!(!page.text.contains("All is well"), "{}", page.text);
    assert!(daemon.signal_redis(nix::sys::signal::Signal::SIGCONT));
    until("the numbers are new again", async || {
        let page = browser.get("/ui/").await;
        page.has("#q-q") && !page.has(".old")
    })
    .await;
}

/// All viewers share what is known of workers, and each sees those of its queues.
#[tokio::test]
async fn workers_and_processes_are_shown_to_whom_they_concern() {
    let daemon = Daemon::start(TOKENS, &[]).await;
    let admin = token(&daemon, "ops", &["--roles", "admin,insert,work"]).await;
    let mine = token(&daemon, "mine", &["--roles", "read", "--queues", "mine.*"]).await;
    let post = crate::columns::access::post;
    let tasks = json!([{"queue": "q", "key": "1"}, {"queue": "mine.a", "key": "1"}]);
    assert_eq!(post(&daemon, "/v1/tasks", &admin, tasks).await.0, 200);
    for (worker, queue) in [("theirs", "q"), ("ours", "mine.a")] {
        let got = json!({"worker": worker, "queues": [queue], "max_tasks": 1, "wait": "10s"});
        let (status, leased) = post(&daemon, "/v1/tasks:get", &admin, got).await;
        assert_eq!(
            (status, leased["tasks"].as_array().unwrap().len()),
            (200, 1)
        );
    }
    let mut browser = Browser::new(&daemon);
    browser.cookie = Some(admin);
    until("both are heard", async || {
        browser.get("/ui/workers").await.count("tbody tr") == 2
    })
    .await;
    until("the process leads", async || {
        let page = browser.get("/ui/processes").await;
        page.of("tbody .state.ok") == "leads"
    })
    .await;
    browser.cookie = Some(mine);
    let page = browser.get("/ui/workers").await;
    assert_eq!(page.values("tbody tr", "id"), ["w-ours"], "{}", page.text);
    assert!(page.of("tbody tr").contains("working"), "{}", page.text);
    assert_eq!(browser.get("/ui/workers?queue=q").await.status, 403);
    assert_eq!(browser.get("/ui/processes").await.status, 403);
    let one = token(&daemon, "one", &["--roles", "read", "--worker", "ours"]).await;
    browser.cookie = Some(one);
    let page = browser.get("/ui/workers").await;
    assert_eq!(page.values("tbody tr", "id"), ["w-ours"], "{}", page.text);
}

/// The stream of a queue's live tab comes with the cookie, and needs the queue's scope.
#[tokio::test]
async fn the_live_tab_hears_the_events_of_its_queue() {
    let daemon = Daemon::start(TOKENS, &[]).await;
    let admin = token(&daemon, "ops", &["--roles", "admin,insert"]).await;
    let mine = token(&daemon, "mine", &["--roles", "read", "--queues", "mine.*"]).await;
    let insert = async |key: &str| {
        let task = json!([{"queue": "q", "key": key}]);
        let (status, _) = crate::columns::access::post(&daemon, "/v1/tasks", &admin, task).await;
        assert_eq!(status, 200);
    };
    insert("first").await;
    let mut browser = Browser::new(&daemon);
    browser.cookie = Some(mine);
    assert_eq!(browser.get("/ui/queues/q/events").await.status, 403);
    browser.cookie = Some(admin.clone());
    let page = browser.get("/ui/queues/q/live").await;
    assert_eq!(
        page.values("table", "data-events"),
        ["events"],
        "{}",
        page.text
    );
    assert_eq!(browser.get("/ui/queues/never/live").await.status, 404);
    let url = format!("{}/ui/queues/q/events", daemon.http());
    let stream = browser
        .client
        .get(url)
        .header("cookie", format!("taskd={admin}"));
    let mut stream = stream.send().await.unwrap();
    assert_eq!(stream.headers()[header::CONTENT_TYPE], "text/event-stream");
    insert("<second>").await;
    let mut heard = String::new();
    while !heard.contains("<second>") {
        let chunk = stream.chunk().await.unwrap().expect("the stream goes on");
        heard.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(heard.contains("event: status"), "{heard}");
}

const HOSTILE: &str = "<img src=x onerror=alert(1)>\"><script>alert(2)</script>\u{202e}'";

#[tokio::test]
async fn a_tree_is_found_explained_and_cancelled() {
    let daemon = Daemon::start("", &[]).await;
    let browser = Browser::new(&daemon);
    let page = browser.get("/ui/trees").await;
    assert!(page.of("main").contains("--tree new"), "{}", page.text);
    let root = json!({"queue": "crawl", "key": "root", "tree": {"then": "reports"}});
    let ids = daemon.insert(&[root]).await;
    let id = &ids[0];
    let child = json!({"queue": "pages", "key": "child", "tree": id});
    daemon.insert(&[child]).await;
    let leased = daemon.lease_all("w7", "crawl", 1).await;
    let page = browser.get(&format!("/ui/tasks/{id}")).await;
    let link = format!("../trees/{id}");
    assert!(page.has(&format!("a[href='{link}']")), "{}", page.text);
    let page = browser.get("/ui/trees?state=OPEN&queue=crawl").await;
    assert!(
        page.of(&format!("#t-{id}")).contains("OPEN"),
        "{}",
        page.text
    );
    let page = browser.get("/ui/trees?state=DONE").await;
    assert!(page.of("main").contains("No tree matches"), "{}", page.text);
    let page = browser.get(&format!("/ui/trees/{id}")).await;
    assert!(
        page.of("[aria-label='What it waits for'] tbody tr")
            .contains("Worker w7 holds it."),
        "{}",
        page.text
    );
    let links = page.values("[aria-label='Tasks by queue'] td a", "href");
    let pages = links.iter().find(|link| link.contains("queue=pages"));
    let list = pages.unwrap().trim_start_matches("../");
    let list = browser.get(&format!("/ui/{list}")).await;
    assert!(list.of("tbody").contains("child"), "{}", list.text);
    // A bulk change of this list is only about the tree.
    let changes = list.values(".acts a", "href");
    assert!(!changes.is_empty(), "{}", list.text);
    assert!(
        changes
            .iter()
            .all(|link| link.contains(&format!("tree={id}")))
    );
    let asks = browser.get(&format!("/ui/{}", changes[0])).await;
    assert!(asks.of("dl.facts").contains(id), "{}", asks.text);
    let asks = browser.get(&format!("/ui/trees/{id}/cancel")).await;
    assert!(
        asks.of("main").contains("2 unfinished tasks"),
        "{}",
        asks.text
    );
    let page = browser
        .post(&format!("/ui/trees/{id}/cancel"), &[("number", "2")])
        .await;
    assert_eq!(page.status, 303, "{}", page.text);
    assert!(page.location().contains("bulk/"), "{}", page.location());
    until("the tree has ended", async || {
        let page = browser.get(&format!("/ui/trees/{id}")).await;
        page.of(".tiles").contains("FAILED")
    })
    .await;
    let asks = browser.get(&format!("/ui/trees/{id}/cancel")).await;
    assert!(!asks.has("form.form button"), "there is nothing to cancel");
    assert_eq!(leased.len(), 1);
}

/// Nobody's text becomes markup, or changes how other text is shown.
#[tokio::test]
async fn texts_of_strangers_are_inert_on_every_page() {
    let daemon = Daemon::start("[queues.default]\nmax_attempts = 1\n", &[]).await;
    let browser = Browser::new(&daemon);
    let worker = "<img src=x onerror=alert(3)>\"'";
    let tasks = [
        json!({"queue": "q", "key": HOSTILE, "payload": HOSTILE, "headers": {"evil": HOSTILE}}),
        json!({"queue": "q", "key": "done", "payload_base64": "/v8A"}),
    ];
    let ids = daemon.insert(&tasks).await;
    let leased = daemon.lease_all(worker, "q", 2).await;
    for task in &leased {
        let mut item = json!({"id": task["id"], "lease_token": task["lease_token"]});
        let (path, list) = if task["id"] == ids[0] {
            item["reason"] = json!(HOSTILE);
            item["retry"] = json!(false);
            ("/v1/tasks:reject", "rejections")
        } else {
            item["result"] = json!(HOSTILE);
            ("/v1/tasks:complete", "completions")
        };
        let (status, answer) = daemon
            .post(path, &json!({"worker": worker, list: [item]}))
            .await;
        assert_eq!(status, 200, "{answer}");
    }
    until("the task is dead", async || {
        daemon.get(&format!("/v1/tasks/{}", ids[0])).await.1["status"] == "DEAD"
    })
    .await;
    let encoded: String = HOSTILE.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let paths = [
        "/ui/".to_owned(),
        format!("/ui/?q={encoded}"),
        format!("/ui/?sort={encoded}&group={encoded}"),
        "/ui/queues/q".to_owned(),
        format!("/ui/queues/{encoded}"),
        "/ui/tasks?queue=q".to_owned(),
        format!("/ui/tasks?queue=q&key_prefix={encoded}"),
        format!("/ui/tasks?queue={encoded}"),
        format!("/ui/find?q={encoded}"),
        format!("/ui/find?q=x{encoded}"),
        format!("/ui/tasks/{}", ids[0]),
        format!("/ui/tasks/{}", ids[1]),
        format!("/ui/tasks/{encoded}"),
        format!("/ui/tasks/{}/retry", ids[0]),
        format!("/ui/trees?queue={encoded}&since={encoded}"),
        format!("/ui/trees/{encoded}"),
        "/ui/dead".to_owned(),
        format!("/ui/dead?queue=q&reason={encoded}"),
        format!("/ui/dead/{}", ids[0]),
        format!("/ui/dead/{}/purge", ids[0]),
        "/ui/dead/purge?queue=q".to_owned(),
        "/ui/workers".to_owned(),
        "/ui/workers?queue=q".to_owned(),
        "/ui/processes".to_owned(),
        "/ui/books".to_owned(),
        "/ui/bulk/new?what=retry&queue=q".to_owned(),
        format!("/ui/bulk/new?what={encoded}&queue=q"),
        "/ui/acts".to_owned(),
        format!("/ui/login?to={encoded}"),
        format!("/ui/{encoded}"),
    ];
    let mut shown = 0;
    for path in &paths {
        let page = browser.get(path).await;
        assert!(
            page.status.as_u16() < 500,
            "{path}: {} {}",
            page.status,
            page.text
        );
        assert!(
            !page.text.contains('\u{202e}'),
            "{path} has a mark of direction: {}",
            page.text
        );
        assert!(!page.has("img[src=x]"), "{path}: {}", page.text);
        let scripts = page.values("script", "src").len();
        assert_eq!(page.count("script"), scripts, "{path} has an inline script");
        let attributes = Html::parse_document(&page.text);
        for element in attributes
            .tree
            .values()
            .filter_map(|node| node.as_element())
        {
            for (name, _) in element.attrs() {
                assert!(!name.starts_with("on") && name != "style", "{path}: {name}");
            }
        }
        shown += usize::from(page.text.contains("&#60;img src=x onerror=alert(1)"));
    }
    assert!(shown > 8, "{shown} pages show the text");
    let page = browser.get(&format!("/ui/tasks/{}", ids[1])).await;
    assert!(
        page.text.contains("fe ff 00") || page.text.contains("\\xfe\\xff"),
        "{}",
        page.text
    );
    let bytes = http_client().get(format!("{}/ui/tasks/{}/payload", daemon.http(), ids[1]));
    let bytes = bytes.send().await.unwrap().bytes().await.unwrap();
    assert_eq!(&bytes[..], [0xfe, 0xff, 0x00], "byte for byte");
    let link_names = browser.get("/ui/tasks?queue=q").await;
    assert!(
        link_names
            .of("tbody")
            .contains("<img src=x onerror=alert(1)>"),
        "it is text"
    );
}

/// Every link of every page leads somewhere.
#[tokio::test]
async fn every_link_resolves() {
    let daemon = Daemon::start("", &[]).await;
    let browser = Browser::new(&daemon);
    daemon
        .insert(&[
            json!({"queue": "q", "key": "1"}),
            json!({"queue": "a.b", "key": "2"}),
            json!({"queue": "a.c", "key": "3", "tree": "new"}),
        ])
        .await;
    until("the overview has the queues", async || {
        browser.get("/ui/").await.has("#q-q")
    })
    .await;
    let mut left = vec!["/ui/".to_owned()];
    let mut seen = std::collections::BTreeSet::from(["/ui/".to_owned()]);
    let base = reqwest::Url::parse(&daemon.http()).unwrap();
    while let Some(path) = left.pop() {
        let page = browser.get(&path).await;
        assert_eq!(page.status, 200, "{path}: {}", page.text);
        if page.headers[header::CONTENT_TYPE] != "text/html; charset=utf-8"
            || !path.starts_with("/ui")
        {
            continue;
        }
        let here = base.join(&path).unwrap();
        let mut links = page.values("a[href], link[href]", "href");
        links.extend(page.values("script[src], img[src]", "src"));
        for link in links {
            assert!(
                !link.starts_with('/') && !link.contains("://"),
                "{path}: {link} is not relative"
            );
            let mut to = here.join(&link).unwrap();
            to.set_fragment(None);
            let to = to.as_str().replace(base.as_str().trim_end_matches('/'), "");
            let is_new = seen.len() < 150 && seen.insert(to.clone());
            if is_new {
                left.push(to);
            }
        }
    }
    assert!(seen.len() > 30, "{seen:?}");
}
