//! Chromium from the system, driven by its own driver. Where either is missing, tests that need them say
//! so on stderr and are left out.

use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fantoccini::wd::WebDriverCompatibleCommand;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::stage::{Lab, PATIENCE};

/// A console as a process of its own.
pub struct Console {
    process: tokio::process::Child,
    /// The address with its ticket.
    pub entrance: String,
}

impl Console {
    /// `fiec console`.
    pub async fn start(lab: &Lab) -> Self {
        Self::start_with(lab, &[]).await
    }

    /// `fiec console`, with these words more.
    pub async fn start_with(lab: &Lab, more: &[&str]) -> Self {
        let words = ["console", "--listen", "127.0.0.1:0", "--json"];
        let mut command = lab.command(&[&words, more].concat());
        let mut process = command.stderr(Stdio::inherit()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        let line = line.unwrap().unwrap().expect("the address");
        let said: Value = serde_json::from_str(&line).unwrap();
        Self {
            process,
            entrance: said["console"].as_str().unwrap().to_owned(),
        }
    }

    /// Its address without the ticket.
    pub fn origin(&self) -> String {
        self.entrance.split("/enter").next().unwrap().to_owned()
    }

    /// Ends it by SIGTERM, also while browsers are connected.
    pub async fn end(mut self) {
        let pid = self.process.id().unwrap().cast_signed();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let ended = tokio::time::timeout(PATIENCE, self.process.wait()).await;
        assert_eq!(ended.expect("it ends").unwrap().code(), Some(0));
    }
}

/// A browser with a profile of its own.
pub struct Browser {
    driver: Option<Client>,
    process: Child,
    _profile: tempfile::TempDir,
}

fn installed(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    let mut places = std::env::split_paths(&folders).map(|folder| folder.join(name));
    places.find(|path| path.is_file())
}

/// Says on stderr why a test is left out. It is seen though the test passes.
fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

impl Browser {
    /// Starts one; none where there is no Chromium on this machine.
    pub async fn start() -> Option<Self> {
        let (Some(chromium), Some(driver)) = (installed("chromium"), installed("chromedriver"))
        else {
            skip("the console in a browser: `chromium` and `chromedriver` are not installed");
            return None;
        };
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let profile = tempfile::tempdir().unwrap();
        let process = Command::new(driver)
            .arg(format!("--port={port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let options = json!({
            "binary": chromium,
            "args": [
                "--headless=new",
                // The tests run as root in a container, where Chromium cannot make its own walls.
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--disable-gpu",
                "--force-device-scale-factor=1",
                "--hide-scrollbars",
                format!("--user-data-dir={}", profile.path().display()),
            ],
        });
        let mut builder = ClientBuilder::new(HttpConnector::new());
        builder.capabilities(
            [("goog:chromeOptions".to_owned(), options)]
                .into_iter()
                .collect(),
        );
        let address = format!("http://127.0.0.1:{port}");
        let until = Instant::now() + PATIENCE;
        let driver = loop {
            match builder.connect(&address).await {
                Ok(driver) => break driver,
                Err(error) if Instant::now() > until => panic!("no browser: {error}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        };
        let browser = Self {
            driver: Some(driver),
            process,
            _profile: profile,
        };
        browser.size(1280, 900).await;
        Some(browser)
    }

    /// To find elements and press them.
    pub fn driver(&self) -> &Client {
        self.driver.as_ref().unwrap()
    }

    /// Ends it.
    pub async fn end(mut self) {
        self.driver.take().unwrap().close().await.unwrap();
    }

    /// The size of the page in pixels.
    pub async fn size(&self, width: u32, height: u32) {
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}),
        )
        .await;
    }

    /// Light or dark.
    pub async fn scheme(&self, name: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": name}]});
        self.devtools("Emulation.setEmulatedMedia", features).await;
    }

    async fn devtools(&self, command: &'static str, params: Value) {
        let command = Devtools { command, params };
        self.driver().issue_cmd(command).await.unwrap();
    }

    /// Opens an address.
    pub async fn open(&self, address: &str) {
        self.driver().goto(address).await.unwrap();
    }

    /// What the page says.
    pub async fn text(&self) -> String {
        let body = self.driver().find(Locator::Css("body")).await.unwrap();
        body.text().await.unwrap()
    }

    /// The result of a script.
    pub async fn script(&self, text: &str) -> Value {
        self.driver().execute(text, Vec::new()).await.unwrap()
    }

    /// What a script gives to its last argument, a function.
    pub async fn later(&self, text: &str) -> Value {
        self.driver().execute_async(text, Vec::new()).await.unwrap()
    }

    /// Waits until a script returns true.
    #[track_caller]
    pub fn until<'a>(&'a self, what: &'a str, script: &'a str) -> impl Future<Output = ()> + 'a {
        let at = std::panic::Location::caller();
        async move {
            let until = Instant::now() + PATIENCE;
            while self.script(script).await != true {
                if Instant::now() > until {
                    panic!("{at}: waited in vain until {what}:\n{}", self.text().await);
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    /// Pictures of the whole page, for people: at three widths, light and dark. None may be wider than
    /// the screen.
    pub async fn pictures(&self, name: &str) {
        if std::env::var_os("FIEC_SCREENSHOTS").is_none() {
            return;
        }
        for (width, scheme) in [
            (1400, "light"),
            (1400, "dark"),
            (800, "light"),
            (400, "light"),
            (400, "dark"),
        ] {
            self.size(width, 900).await;
            self.scheme(scheme).await;
            // Curves are drawn in the size that the page has when it is loaded.
            self.driver().refresh().await.unwrap();
            tokio::time::sleep(Duration::from_millis(1_200)).await;
            // What a move was made for tells the most.
            let open = "document.querySelector('#moves .move')?.setAttribute('open', '')";
            self.script(open).await;
            let height = self
                .script("return document.documentElement.scrollHeight")
                .await;
            let height = height.as_u64().unwrap().clamp(600, 2_400);
            self.size(width, u32::try_from(height).unwrap()).await;
            tokio::time::sleep(Duration::from_millis(250)).await;
            self.picture(&format!("{name}-{width}-{scheme}")).await;
            let wide = "return document.documentElement.scrollWidth - innerWidth";
            let wide = self.script(wide).await;
            assert!(
                wide.as_i64().unwrap() <= 0,
                "{name} at {width}: {wide} pixels too wide"
            );
        }
        self.size(1280, 900).await;
        self.scheme("light").await;
    }

    /// A picture of the page, for people.
    pub async fn picture(&self, name: &str) {
        let Some(folder) = std::env::var_os("FIEC_SCREENSHOTS") else {
            return;
        };
        let path = PathBuf::from(folder).join(format!("{name}.png"));
        std::fs::write(path, self.driver().screenshot().await.unwrap()).unwrap();
    }
}

/// A command of the browser's own tools, which its driver passes on.
#[derive(Debug)]
struct Devtools {
    command: &'static str,
    params: Value,
}

impl WebDriverCompatibleCommand for Devtools {
    fn endpoint(
        &self,
        base: &url::Url,
        session: Option<&str>,
    ) -> Result<url::Url, url::ParseError> {
        let session = session.unwrap_or_default();
        base.join(&format!("session/{session}/goog/cdp/execute"))
    }

    fn method_and_body(&self, _: &url::Url) -> (http::Method, Option<String>) {
        let body = json!({"cmd": self.command, "params": self.params});
        (http::Method::POST, Some(body.to_string()))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The driver and the browser, which is in its group.
        if let Some(group) = rustix::process::Pid::from_raw(self.process.id().cast_signed()) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.process.wait();
    }
}
