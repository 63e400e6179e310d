//! `examples/slurm` in a real Slurm of one node: `munged`, `slurmctld` and `slurmd`, private to the
//! test. If one is missing, the test says so on stderr.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fiec_schemas::ExecutionId;
use serde_json::{Value, json};

use crate::stage::python::{root, say, success};
use crate::stage::{BINARY, Lab, digest_of, slots, undisturbed_synthetic, until, workers};

/// Folders of Slurm's daemons that are not on every user's `PATH`.
const SYSTEM: [&str; 2] = ["/usr/sbin", "/usr/local/sbin"];
/// Time for the node to join, in s.
const JOIN: Duration = Duration::from_secs(20);

fn find(program: &str) -> Option<PathBuf> {
    let of_system = SYSTEM
        .iter()
        .map(|folder| PathBuf::from(folder).join(program));
    fiec::lab::on_path(program).or_else(|| of_system.into_iter().find(|file| file.is_file()))
}

/// A cluster of Slurm with this machine as its node. It ends with the test.
struct Slurm {
    folder: tempfile::TempDir,
    daemons: Vec<Child>,
    host: String,
}

impl Slurm {
    /// None, with the reason on stderr, if this machine cannot run it.
    fn start() -> Option<Self> {
        let skipped = |why: &str| {
            say(&format!("SKIPPED: FIEC is not tested in Slurm: {why}"));
            None
        };
        for program in [
            "munged",
            "slurmctld",
            "slurmd",
            "sbatch",
            "squeue",
            "scancel",
        ] {
            if find(program).is_none() {
                return skipped(&format!("{program} is missing (Debian: slurm-wlm, munge)"));
            }
        }
        if !rustix::process::geteuid().is_root() {
            return skipped("slurmd needs root");
        }
        let host = rustix::system::uname();
        let mut slurm = Self {
            folder: tempfile::tempdir().unwrap(),
            daemons: Vec::new(),
            host: host.nodename().to_string_lossy().into_owned(),
        };
        slurm.configure();
        slurm.launch();
        let deadline = Instant::now() + JOIN;
        while Instant::now() < deadline {
            if slurm.ask("sinfo", &["--noheader", "--format=%T"]).trim() == "idle" {
                return Some(slurm);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        skipped(&format!("the node did not join:\n{}", slurm.logs()))
    }

    fn configure(&self) {
        let folder = self.folder.path().display();
        let ports = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let [controller, node] = ports.map(|listener| listener.local_addr().unwrap().port());
        let host = &self.host;
        let processors = std::thread::available_parallelism().unwrap();
        let text = format!(
            "ClusterName=test\n\
             SlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}\nSlurmdPort={node}\n\
             AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\n\
             SlurmUser=root\nSlurmdUser=root\n\
             StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n\
             SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.pid\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             JobAcctGatherType=jobacct_gather/none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU_Memory\nMpiDefault=none\n\
             NodeName={host} NodeAddr=127.0.0.1 CPUs={processors} RealMemory=2000 State=UNKNOWN\n\
             PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"
        );
        std::fs::write(self.folder.path().join("slurm.conf"), text).unwrap();
        for name in ["state", "spool", "tmp"] {
            std::fs::create_dir(self.folder.path().join(name)).unwrap();
        }
        let mut key = vec![0; 1_024];
        let random = File::open("/dev/urandom").unwrap();
        std::io::Read::read_exact(&mut &random, &mut key).unwrap();
        let file = self.folder.path().join("munge.key");
        std::fs::write(&file, key).unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(file, private).unwrap();
    }

    fn launch(&mut self) {
        let own = |option: &str, name: &str| {
            format!("--{option}={}", self.folder.path().join(name).display())
        };
        let munge = [
            "--foreground".to_owned(),
            "--force".to_owned(),
            own("key-file", "munge.key"),
            own("socket", "munge.socket"),
            own("pid-file", "munge.pid"),
            own("log-file", "munge.log"),
            own("seed-file", "munge.seed"),
        ];
        let foreground = ["-D".to_owned()];
        for (program, words) in [
            ("munged", &munge[..]),
            ("slurmctld", &foreground),
            ("slurmd", &foreground),
        ] {
            let log = File::create(self.folder.path().join(program)).unwrap();
            let daemon = self
                .command(program)
                .args(words)
                .stdout(log.try_clone().unwrap())
                .stderr(log)
                .spawn()
                .unwrap();
            self.daemons.push(daemon);
            let socket = self.folder.path().join("munge.socket");
            let deadline = Instant::now() + JOIN;
            while !socket.exists() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(find(program).unwrap());
        command
            .env("SLURM_CONF", self.folder.path().join("slurm.conf"))
            .stdin(Stdio::null());
        command
    }

    /// What a command of Slurm prints; nothing if it fails.
    fn ask(&self, program: &str, words: &[&str]) -> String {
        let output = self.command(program).args(words).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn logs(&self) -> String {
        let ends = ["munged", "slurmctld", "slurmd"].map(|name| {
            let text = std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().rev().take(5).collect();
            format!(
                "{name}: {}",
                lines.into_iter().rev().collect::<Vec<_>>().join("\n")
            )
        });
        ends.join("\n")
    }

    /// Starts the script of the example for this cluster. Returns the job's id.
    fn submit(&self, lab: &Lab, options: &[&str]) -> String {
        let worker = lab.command(&["worker"]);
        let environment = worker.as_std().get_envs();
        let mut sbatch = self.command("sbatch");
        sbatch
            .envs(environment.filter_map(|(name, value)| Some((name, value?))))
            .env("FIEC", BINARY)
            .env("TMPDIR", self.folder.path().join("tmp"))
            .current_dir(self.folder.path())
            .args(["--parsable", "--cpus-per-task=1", "--mem=600M"])
            .args(options)
            .arg(root().join("examples/slurm/fiec-worker.sbatch"));
        // Without the number of slots, which the script sets.
        let output = sbatch.args(&slots(1)[2..]).output().unwrap();
        success(output).0.trim().to_owned()
    }

    /// Waits until the job has ended. Returns its state and what it printed.
    async fn ended(&self, job: &str) -> (String, String) {
        let state = until("the job of Slurm has ended", async || {
            let text = self.ask("scontrol", &["show", "job", job]);
            let mut words = text.split_whitespace();
            let state = words.find_map(|word| word.strip_prefix("JobState="))?;
            let is_over = !["PENDING", "CONFIGURING", "RUNNING", "COMPLETING"].contains(&state);
            is_over.then(|| state.to_owned())
        })
        .await;
        let log = self.folder.path().join(format!("fiec-worker-{job}.log"));
        (state, std::fs::read_to_string(log).unwrap_or_default())
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        self.ask("scancel", &["--user=root"]);
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.ask("squeue", &["--noheader"]).is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(100));
        }
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn body(id: &str, params: &Value) -> Value {
    json!({"id": id, "program": "synthetic@1", "params": params, "commit": {"every_ms": 700}})
}

/// An execution computes in the job, while the cluster's other node is taken. Then that is free again.
async fn computing_in(
    lab: &Lab,
    slurm: &Slurm,
    job: &str,
    client: &str,
    params: &Value,
) -> ExecutionId {
    let node = format!("{}-{job}", slurm.host);
    until("the worker in the allocation has joined", async || {
        lab.fiec(&["nodes"])
            .await
            .stdout
            .contains(&node)
            .then_some(())
    })
    .await;
    let id = lab.publish_json(&body(client, params)).await;
    assert_eq!(lab.journal.computing(id, 1).await.as_str(), node);
    lab.fiec(&["cancel", &format!("busy-{client}")])
        .await
        .expect(0);
    id
}

#[tokio::test]
async fn the_end_of_a_slurm_allocation_moves_its_executions_away_without_loss() {
    let Some(slurm) = Slurm::start() else { return };
    let lab = Lab::start(workers(1)).await;
    let params = json!({"capsules": 8_000, "rest_us": 5_000, "state_bytes": 1_024});
    for (client, options) in [
        // Slurm sends the signal up to a minute earlier than it is asked to.
        ("walltime", &["--time=1", "--signal=B:TERM@20"][..]),
        ("notice", &["--time=30", "--export=ALL,FIEC_SLURM_NOTICE=8"]),
    ] {
        let busy = json!({"capsules": 1_000_000, "rest_us": 5_000});
        let busy = lab
            .publish_json(&body(&format!("busy-{client}"), &busy))
            .await;
        lab.journal.computing(busy, 1).await;
        let job = slurm.submit(&lab, options);
        let id = computing_in(&lab, &slurm, &job, client, &params).await;
        if client == "notice" {
            // As an operator does it who wants the allocation back.
            slurm.ask("scancel", &["--batch", "--signal=TERM", &job]);
        }
        let last = lab.journal.ended(id, "completed").await;
        assert_eq!(lab.journal.causes(id), ["initial", "revoked"], "{client}");
        assert_eq!(digest_of(&last), undisturbed_synthetic(&params).await);

        let (state, log) = slurm.ended(&job).await;
        // Not TIMEOUT: the worker has left before.
        assert_eq!(state, "COMPLETED", "{client}: {log}");
        assert!(log.contains("the allocation ends"), "{client}: {log}");
        assert!(log.contains("worker has left"), "{client}: {log}");
        let left = std::fs::read_dir(slurm.folder.path().join("tmp")).unwrap();
        assert_eq!(left.count(), 0, "{client}: the run folder is removed");
    }
    lab.end().await;
}
