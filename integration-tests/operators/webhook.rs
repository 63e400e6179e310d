//! Webhooks: each end is posted, signed, until the other side takes it, also after a kill.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use fiec_schemas::subjects;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::stage::{Lab, until, workers};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// A post as it came.
#[derive(Debug, Clone)]
struct Post {
    headers: HashMap<String, String>,
    body: String,
}

impl Post {
    fn id(&self) -> &str {
        &self.headers["webhook-id"]
    }

    fn value(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// The other side: refuses each notice once, then takes it. `gone`: wants no more.
#[derive(Default)]
struct Receiver {
    posts: Mutex<Vec<Post>>,
    gone: std::sync::atomic::AtomicBool,
}

impl Receiver {
    async fn start() -> (Arc<Self>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let receiver = Arc::new(Self::default());
        let serving = Arc::clone(&receiver);
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(Arc::clone(&serving).serve(socket));
            }
        });
        (receiver, addr)
    }

    async fn serve(self: Arc<Self>, mut socket: TcpStream) {
        let mut buffer = Vec::new();
        loop {
            let Some(end) = find(&buffer, b"\r\n\r\n") else {
                match socket.read_buf(&mut buffer).await {
                    Ok(1..) => continue,
                    _ => return,
                }
            };
            let head = String::from_utf8(buffer[..end].to_vec()).unwrap();
            let lines = head
                .lines()
                .skip(1)
                .filter_map(|line| line.split_once(": "));
            let headers: HashMap<String, String> = lines
                .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
                .collect();
            let length: usize = headers["content-length"].parse().unwrap();
            while buffer.len() < end + 4 + length {
                if socket.read_buf(&mut buffer).await.unwrap_or(0) == 0 {
                    return;
                }
            }
            let body = String::from_utf8(buffer[end + 4..end + 4 + length].to_vec()).unwrap();
            buffer.drain(..end + 4 + length);
            let status = self.take(Post { headers, body });
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
            if socket.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
        }
    }

    fn take(&self, post: Post) -> &'static str {
        let mut posts = self.posts.lock().unwrap();
        let is_first = posts.iter().all(|other| other.id() != post.id());
        posts.push(post);
        match (
            self.gone.load(std::sync::atomic::Ordering::Relaxed),
            is_first,
        ) {
            (true, _) => "410 Gone",
            (false, true) => "503 Service Unavailable",
            (false, false) => "204 No Content",
        }
    }

    /// The posts about an execution, by the id that its client gave it.
    fn about(&self, id: &str) -> Vec<Post> {
        let posts = self.posts.lock().unwrap();
        let is = |post: &&Post| post.value()["data"]["id"] == id;
        posts.iter().filter(is).cloned().collect()
    }
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// The signature as Python computes it.
fn signature(post: &Post) -> String {
    let words = "import base64, hashlib, hmac, sys; key = base64.b64decode(sys.argv[1]); \
                 print('v1,' + base64.b64encode(hmac.new(key, sys.argv[2].encode(), hashlib.sha256).digest()).decode())";
    let signed = format!(
        "{}.{}.{}",
        post.id(),
        post.headers["webhook-timestamp"],
        post.body
    );
    let key = SECRET.strip_prefix("whsec_").unwrap();
    let output = std::process::Command::new("python3")
        .args(["-c", words, key, &signed])
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn start(lab: &Lab, addr: SocketAddr, secret: &Path) -> tokio::process::Child {
    let url = format!("http://{addr}/hook?token=x");
    let secret = secret.display().to_string();
    let mut command = lab.command(&["webhook", "--url", &url, "--secret-file", &secret]);
    command.stderr(Stdio::null()).spawn().unwrap()
}

#[tokio::test]
async fn ends_are_posted_signed_until_they_are_taken_also_after_a_kill() {
    let lab = Lab::start(workers(1)).await;
    let (receiver, addr) = Receiver::start().await;
    let secret = lab.file("secret", SECRET);
    let mut webhook = start(&lab, addr, &secret);
    let stream = lab
        .broker
        .js
        .get_stream(subjects::LEDGER_STREAM)
        .await
        .unwrap();
    until("it has its place in the stream", async || {
        stream.consumer_info("webhook-lab-default").await.ok()
    })
    .await;

    let good = lab
        .publish("good", "synthetic@1", &json!({"capsules": 2}))
        .await;
    lab.journal.ended(good, "completed").await;
    let strict = json!({"matrix": {"poisson2d": {"n": 20}}, "max_iterations": 1});
    let bad = lab.publish("bad", "cg@1", &strict).await;
    lab.journal.ended(bad, "failed").await;
    let posts = |id: &'static str, count| {
        let receiver = &receiver;
        until("it is posted again", async move || {
            Some(receiver.about(id)).filter(|posts| posts.len() >= count)
        })
    };
    let twice = posts("good", 2).await;
    assert_eq!(twice[0].id(), twice[1].id());
    assert_eq!(twice[0].body, twice[1].body);
    let value = twice[1].value();
    assert_eq!(value["type"], "execution.completed");
    assert_eq!(value["data"]["result"]["capsules"], 2);
    assert_eq!(twice[1].headers["webhook-signature"], signature(&twice[1]));
    let failed = posts("bad", 2).await.pop().unwrap().value();
    assert_eq!(failed["type"], "execution.failed");
    assert_eq!(failed["data"]["fault_of"], "program");

    // An execution ends while the webhook is away: it is posted once the webhook is back.
    webhook.kill().await.unwrap();
    let away = lab
        .publish("away", "synthetic@1", &json!({"capsules": 1}))
        .await;
    lab.journal.ended(away, "completed").await;
    let mut webhook = start(&lab, addr, &secret);
    posts("away", 2).await;
    assert_eq!(
        receiver.about("good").len(),
        2,
        "what was taken comes no more"
    );

    // One that wants no more ends it.
    receiver
        .gone
        .store(true, std::sync::atomic::Ordering::Relaxed);
    let last = lab
        .publish("last", "synthetic@1", &json!({"capsules": 1}))
        .await;
    lab.journal.ended(last, "completed").await;
    let status = tokio::time::timeout(crate::stage::PATIENCE, webhook.wait()).await;
    assert_eq!(status.unwrap().unwrap().code(), Some(1));
    lab.end().await;
}

#[tokio::test]
async fn a_bad_secret_or_a_url_in_the_clear_is_refused_with_the_rule() {
    let lab = Lab::start(workers(0)).await;
    let secret = lab.file("secret", "whsec_short").display().to_string();
    let good = lab.file("good", SECRET).display().to_string();
    for (url, file, words) in [
        ("https://example.org/", secret.as_str(), "24 to 64 bytes"),
        ("http://example.org/", good.as_str(), "https://"),
    ] {
        let ran = lab
            .fiec(&["webhook", "--url", url, "--secret-file", file])
            .await;
        let ran = ran.expect(2);
        assert!(ran.stderr.contains(words), "{}", ran.stderr);
    }
    lab.end().await;
}
