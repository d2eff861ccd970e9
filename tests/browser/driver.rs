//! A Chromium with its own profile, driven over WebDriver.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    sync::LazyLock,
    time::{Duration, Instant},
};

use fantoccini::{Client, ClientBuilder, wd::WebDriverCompatibleCommand};
use hyper_util::client::legacy::connect::HttpConnector;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use reqwest::{Method, Url};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::support::until;

/// How long a browser that was told to end may take.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// Counts what goes wrong from the first line of a page on, for all pages of a window; the page's own
/// script begins later.
const EARLY: &str = "window.countsFaults = true; \
    for (const name of ['error', 'unhandledrejection', 'securitypolicyviolation']) \
    addEventListener(name, () => { \
    sessionStorage.setItem('faults', Number(sessionStorage.getItem('faults')) + 1); });";

/// The source of axe-core.
static AXE: LazyLock<String> = LazyLock::new(|| {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/axe");
    let output = Command::new(script).stderr(Stdio::inherit()).output();
    let output = output.unwrap();
    assert!(output.status.success(), "scripts/axe failed");
    let path = String::from_utf8(output.stdout).unwrap();
    std::fs::read_to_string(path.trim_end()).unwrap()
});

pub(crate) struct Browser {
    driver: Child,
    pub(crate) client: Client,
    /// The pages that were opened.
    root: String,
    profile: TempDir,
}

#[derive(Debug)]
struct DevTools(Value);

impl WebDriverCompatibleCommand for DevTools {
    fn endpoint(
        &self,
        base: &Url,
        session: Option<&str>,
    ) -> Result<Url, <Url as std::str::FromStr>::Err> {
        base.join(&format!(
            "session/{}/goog/cdp/execute",
            session.unwrap_or_default()
        ))
    }

    fn method_and_body(&self, _: &Url) -> (Method, Option<String>) {
        (Method::POST, Some(self.0.to_string()))
    }
}

impl Browser {
    /// Starts a browser for the pages below `root`, which ends with `/ui/`.
    pub(crate) async fn start(root: &str) -> Self {
        let profile = tempfile::tempdir().unwrap();
        // If this thread ends in whatever way, the kernel kills the driver, and Chromium ends when the
        // driver's end of the pipe is closed.
        let mut driver = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "chromedriver", "--port=0"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver is missing: scripts/install-deps test");
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines();
        let port = lines.find_map(|line| {
            let line = line.ok()?;
            let (_, port) = line.split_once("successfully on port ")?;
            Some(port.trim_end_matches('.').to_owned())
        });
        let port = port.expect("chromedriver says its port");
        // What it says further must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let mut args = vec![
            "--headless=new".to_owned(),
            "--remote-debugging-pipe".to_owned(),
            "--disable-background-networking".to_owned(),
            "--no-first-run".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            format!("--user-data-dir={}", profile.path().display()),
        ];
        // Chromium refuses to run its sandbox as root.
        if std::fs::metadata("/proc/self").unwrap().uid() == 0 {
            args.push("--no-sandbox".to_owned());
        }
        let options = json!({"args": args});
        let capabilities = Map::from_iter([("goog:chromeOptions".to_owned(), options)]);
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities)
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .unwrap();
        let browser = Self {
            driver,
            client,
            root: root.to_owned(),
            profile,
        };
        browser.count_faults().await;
        browser.look(1280, "light").await;
        browser
    }

    /// In this window, from the next page on.
    async fn count_faults(&self) {
        let early = json!({"source": EARLY});
        self.tool("Page.addScriptToEvaluateOnNewDocument", early)
            .await;
    }

    /// Goes to a new window.
    pub(crate) async fn window(&self) {
        let window = self.client.new_window(false).await.unwrap();
        self.client.switch_to_window(window.handle).await.unwrap();
        self.count_faults().await;
    }

    pub(crate) fn profile(&self) -> &Path {
        self.profile.path()
    }

    async fn tool(&self, name: &str, params: Value) {
        let command = DevTools(json!({"cmd": name, "params": params}));
        self.client.issue_cmd(command).await.unwrap();
    }

    /// Sets the width of the page and the theme of the system.
    pub(crate) async fn look(&self, width: u32, theme: &str) {
        let size = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false});
        self.tool("Emulation.setDeviceMetricsOverride", size).await;
        let theme = json!({"features": [{"name": "prefers-color-scheme", "value": theme}]});
        self.tool("Emulation.setEmulatedMedia", theme).await;
    }

    /// Opens a page by its way from `/ui/`.
    pub(crate) async fn open(&self, path: &str) {
        self.no_fault().await;
        let url = format!("{}{path}", self.root);
        self.client.goto(&url).await.unwrap();
    }

    /// Runs the body of a function in the page.
    pub(crate) async fn run(&self, script: &str, args: Vec<Value>) -> Value {
        self.client.execute(script, args).await.unwrap()
    }

    /// The visible text of an element, or nothing.
    pub(crate) async fn text(&self, selector: &str) -> String {
        let script = "const found = document.querySelector(arguments[0]); \
            return found ? found.innerText : '';";
        let text = self.run(script, vec![json!(selector)]).await;
        text.as_str().unwrap().to_owned()
    }

    pub(crate) async fn has(&self, selector: &str) -> bool {
        let script = "return document.querySelector(arguments[0]) !== null;";
        self.run(script, vec![json!(selector)]).await == true
    }

    /// Waits until an element has a text.
    pub(crate) async fn shows(&self, selector: &str, text: &str) {
        until(&format!("{selector} shows {text:?}"), async || {
            self.text(selector).await.contains(text)
        })
        .await;
    }

    pub(crate) async fn click(&self, selector: &str) {
        let found = self
            .client
            .find(fantoccini::Locator::Css(selector))
            .await
            .unwrap_or_else(|error| panic!("{selector}: {error}"));
        found.click().await.unwrap();
    }

    pub(crate) async fn write(&self, selector: &str, text: &str) {
        let found = self.client.find(fantoccini::Locator::Css(selector)).await;
        found.unwrap().send_keys(text).await.unwrap();
    }

    /// The path of the page, with its query.
    pub(crate) async fn path(&self) -> String {
        let path = self.run("return location.pathname + location.search;", vec![]);
        path.await.as_str().unwrap().to_owned()
    }

    /// Fails if a script of a page of this window failed, or if one broke its own policy.
    pub(crate) async fn no_fault(&self) {
        let script = "if (!location.protocol.startsWith('http')) return ['none', true, 0, 0]; \
            return [location.href, window.countsFaults === true, \
            Number(sessionStorage.getItem('faults')), \
            Number(document.documentElement.dataset.faults || 0)];";
        let counts = self.run(script, vec![]).await;
        let found = [&counts[1], &counts[2], &counts[3]];
        assert_eq!(found, [&json!(true), &json!(0), &json!(0)], "{counts}");
    }

    /// Fails if axe-core finds a violation on this page, or if the page is wider than the window.
    pub(crate) async fn is_accessible(&self) {
        self.run(&AXE, vec![]).await;
        let script = "const done = arguments[arguments.length - 1]; \
            axe.run(document, {resultTypes: ['violations']}).then((found) => done( \
            found.violations.map((one) => [one.id, one.help, one.nodes.slice(0, 3).map((node) => node.html + ' ' + \
            node.failureSummary)])), (error) => done(String(error)));";
        let found = self.client.execute_async(script, vec![]).await.unwrap();
        let place = self.path().await;
        assert_eq!(found, json!([]), "{place}: {found:#}");
        let script = "return [document.documentElement.scrollWidth, innerWidth];";
        let widths = self.run(script, vec![]).await;
        let [page, window] = [0, 1].map(|at| widths[at].as_i64().unwrap());
        assert!(page <= window, "{place}: {page} in a window of {window}");
    }

    /// Ends the browser after a last check.
    pub(crate) async fn end(self) {
        self.no_fault().await;
        self.client.clone().close().await.unwrap();
    }
}

/// How many processes have this profile: Chromium's own, and those of its pages.
pub(crate) fn processes_of(profile: &Path) -> usize {
    let argument = format!("--user-data-dir={}", profile.display());
    let has_argument = |entry: std::fs::DirEntry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0)
            .any(|part| part == argument.as_bytes())
    };
    let all = std::fs::read_dir("/proc").unwrap();
    all.filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok())
        .map(has_argument)
        .filter(|has| *has)
        .count()
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It ends its Chromium, too.
        let pid = Pid::from_raw(i32::try_from(self.driver.id()).unwrap());
        let _is_over = kill(pid, Signal::SIGTERM);
        let began = Instant::now();
        while matches!(self.driver.try_wait(), Ok(None)) {
            if began.elapsed() > ENDS_WITHIN {
                let _is_over = self.driver.kill();
                let _is_over = self.driver.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
