//! The files by which others run FIEC: Kubernetes manifests against Kubernetes' own schemas, the
//! compose file by compose's own loader, and both against the images and the command that they run.
//!
//! The validators come by pip and Go; what is left out where they cannot be had is said on stderr.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::stage::python::{fetch, root, say, success, tag};
use serde_json::Value;

/// It brings the schemas, and a reader of YAML.
const VALIDATOR: [&str; 1] = ["kubernetes-validate==1.37.0"];
const BINARY: &str = env!("CARGO_BIN_EXE_fiec-lab");

pub fn deployed() -> PathBuf {
    root().join("services/deploy")
}

/// `python3` that finds the validator; none, after saying so, where pip cannot get it.
pub fn python() -> Option<Command> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let name = format!("kubernetes-validate-{}", tag());
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fetch(&folder, &VALIDATOR).then_some(folder)
    });
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", folder.as_ref()?);
    Some(command)
}

/// The validator's word on a file, with nothing allowed that the schemas do not name.
pub fn validate(mut python: Command, file: &Path) -> Output {
    let words = ["-m", "kubernetes_validate", "--strict"];
    python.args(words).arg(file).output().unwrap()
}

/// The manifests, each with its file; none where there is nothing to read YAML with.
fn manifests() -> Option<Vec<(PathBuf, Vec<Value>)>> {
    let folder = deployed().join("kubernetes");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let read = |file: PathBuf| {
        let documents = documents(&file)?;
        Some((file, documents))
    };
    files.into_iter().map(read).collect()
}

/// The documents of a YAML file. None, with a line on stderr, if there is no reader of YAML.
pub fn documents(file: &Path) -> Option<Vec<Value>> {
    let script = "import json, sys, yaml; \
                  json.dump(list(yaml.safe_load_all(open(sys.argv[1]))), sys.stdout)";
    let output = python()?.args(["-c", script]).arg(file).output().unwrap();
    serde_json::from_str(&success(output).0).unwrap()
}

#[test]
fn manifests_pass_the_schemas_of_kubernetes_and_a_misspelt_field_does_not() {
    let Some(manifests) = manifests() else { return };
    let mut documents = 0;
    for (file, found) in &manifests {
        success(validate(python().unwrap(), file));
        documents += found.len();
    }
    let kinds: BTreeSet<&str> = manifests
        .iter()
        .flat_map(|(_, documents)| documents)
        .map(|document| document["kind"].as_str().unwrap())
        .collect();
    for kind in [
        "ConfigMap",
        "DaemonSet",
        "Deployment",
        "Job",
        "NetworkPolicy",
    ] {
        assert!(kinds.contains(kind), "{kinds:?} of {documents}");
    }
    let text = std::fs::read_to_string(deployed().join("kubernetes/workers.yaml")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let wrong = folder.path().join("wrong.yaml");
    let misspelt = text.replacen("readOnlyRootFilesystem", "readOnlyRootFileSystem", 1);
    assert_ne!(misspelt, text);
    std::fs::write(&wrong, misspelt).unwrap();
    let output = validate(python().unwrap(), &wrong);
    assert!(!output.status.success(), "{output:?}");
}

/// A line of a Containerfile that begins so, without that word.
fn line(file: &str, word: &str) -> String {
    let text = std::fs::read_to_string(root().join(file)).unwrap();
    let found = text.lines().find_map(|line| line.strip_prefix(word));
    found
        .unwrap_or_else(|| panic!("{file}: {word}"))
        .trim()
        .to_owned()
}

/// What `fiec COMMAND --help` says, as one line.
fn help(command: &str) -> String {
    let mut fiec = Command::new(BINARY);
    let (text, _) = success(fiec.args([command, "--help"]).output().unwrap());
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The image's Containerfile and the sub-command that a container runs.
fn what_it_runs(image: &str, arguments: &[&str]) -> (&'static str, String) {
    if image.contains("worker") {
        return ("workers/Containerfile", "worker".to_owned());
    }
    assert!(image.contains("services"), "{image}");
    ("services/Containerfile", arguments[0].to_owned())
}

fn words(value: &Value) -> Vec<&str> {
    let all = value.as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().map(|word| word.as_str().unwrap()).collect()
}

/// Every variable is one that the command reads, every flag one that it has.
fn understood(command: &str, names: &[&str], arguments: &[&str]) {
    let help = help(command);
    for name in names {
        let known = ["=", "]"]
            .iter()
            .any(|end| help.contains(&format!("[env: {name}{end}")));
        assert!(known, "`fiec {command}` does not read {name}:\n{help}");
    }
    for flag in arguments.iter().filter(|word| word.starts_with("--")) {
        assert!(
            help.contains(flag),
            "`fiec {command}` has no {flag}:\n{help}"
        );
    }
}

/// Variables of the ConfigMap and the Secret that not every command reads.
const SHARED: [&str; 1] = ["FIEC_HTTP"];

pub fn pod_is_walled_in(name: &str, pod: &Value, shared: &Value) {
    assert_eq!(pod["automountServiceAccountToken"], false, "{name}");
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{name}");
    let seccomp = &pod["securityContext"]["seccompProfile"]["type"];
    assert_eq!(seccomp, "RuntimeDefault", "{name}");
    for word in ["hostNetwork", "hostPID", "hostIPC"] {
        assert!(pod[word].is_null(), "{name}: {word}");
    }
    let container = &pod["containers"][0];
    let own = &container["securityContext"];
    assert_eq!(own["readOnlyRootFilesystem"], true, "{name}");
    assert_eq!(own["allowPrivilegeEscalation"], false, "{name}");
    assert_eq!(own["capabilities"]["drop"][0], "ALL", "{name}");
    assert!(
        container["resources"]["limits"]["memory"].is_string(),
        "{name}"
    );

    let arguments = words(&container["args"]);
    let image = container["image"].as_str().unwrap();
    let (file, command) = what_it_runs(image, &arguments);
    let user = &pod["securityContext"];
    let user = format!("{}:{}", user["runAsUser"], user["runAsGroup"]);
    assert_eq!(line(file, "USER"), user, "{name}");
    let given = container["env"].as_array().cloned().unwrap_or_default();
    let given = given.iter().map(|each| each["name"].as_str().unwrap());
    let serves = command != "setup";
    let of_all = shared.as_object().into_iter().flatten();
    let of_all = of_all.map(|(name, _)| name.as_str());
    let of_all = of_all.filter(|name| serves || !SHARED.contains(name));
    understood(
        &command,
        &given.chain(of_all).collect::<Vec<_>>(),
        &arguments,
    );
    if !serves {
        return;
    }
    assert_eq!(
        container["readinessProbe"]["httpGet"]["path"], "/healthz",
        "{name}"
    );
    assert!(container["livenessProbe"].is_object(), "{name}");
    let port = container["ports"][0]["containerPort"].to_string();
    if shared.is_object() {
        assert_eq!(line(file, "EXPOSE"), port, "{name}");
    }
    let own = container["env"].as_array().into_iter().flatten();
    let own = own.filter(|each| each["name"] == "FIEC_HTTP");
    let listens = own.map(|each| &each["value"]).next();
    let listens = listens.unwrap_or(&shared["FIEC_HTTP"]);
    assert_eq!(*listens, format!("0.0.0.0:{port}"));
}

#[test]
fn every_pod_is_walled_in_and_runs_what_its_image_has() {
    let Some(manifests) = manifests() else { return };
    let all: Vec<&Value> = manifests
        .iter()
        .flat_map(|(_, documents)| documents)
        .collect();
    let config = all.iter().find(|d| d["kind"] == "ConfigMap").unwrap();
    let mut pods = 0;
    for document in &all {
        let pod = &document["spec"]["template"]["spec"];
        let name = document["metadata"]["name"].as_str().unwrap();
        if pod.is_object() {
            pod_is_walled_in(name, pod, &config["data"]);
            pods += 1;
        }
        if document["kind"] == "DaemonSet" {
            let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
            let text = std::fs::read_to_string(root().join("workers/Containerfile")).unwrap();
            for mount in mounts {
                let path = mount["mountPath"].as_str().unwrap();
                assert!(
                    text.contains(path),
                    "{name} mounts {path}, which its image does not name"
                );
            }
            // Time to drain, as the worker's own deadline says.
            let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
            assert!(grace > 30, "{name}: {grace} s");
        }
    }
    assert_eq!(pods, 5);
    let gpu = all
        .iter()
        .find(|d| d["metadata"]["name"] == "fiec-worker-gpu")
        .unwrap();
    let pod = &gpu["spec"]["template"]["spec"];
    let limits = &pod["containers"][0]["resources"]["limits"];
    assert!(limits["nvidia.com/gpu"].as_u64().unwrap() > 0);
    assert_eq!(pod["tolerations"][0]["key"], "nvidia.com/gpu");
    // No secret is in a file of the project.
    assert!(!all.iter().any(|d| d["kind"] == "Secret"));
}

/// The checker of compose files, built by Go; none, after saying so, where that cannot be.
fn compose_check() -> Option<PathBuf> {
    let source = root().join("integration-tests/programs/compose-check");
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compose-check");
    let words = ["build", "-mod=readonly", "-o", made.to_str().unwrap(), "."];
    let mut go = Command::new("go");
    let why = match go.args(words).current_dir(source).output() {
        Ok(output) if output.status.success() => return Some(made),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => format!("go: {error}"),
    };
    say(&format!("SKIPPED: the compose file is not checked: {why}"));
    None
}

#[test]
fn the_compose_file_is_read_by_composes_own_loader() {
    let Some(check) = compose_check() else { return };
    let read = |database: Option<&str>| {
        let mut command = Command::new(&check);
        command.arg(deployed().join("compose.yaml"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FIEC_") {
                command.env_remove(name);
            }
        }
        command.env("FIEC_NATS_URL", "nats://nats.example:4222");
        if let Some(url) = database {
            command.env("FIEC_DATABASE_URL", url);
        }
        command.output().unwrap()
    };
    let without = read(None);
    let said = String::from_utf8_lossy(&without.stderr).into_owned();
    assert!(
        !without.status.success() && said.contains("FIEC_DATABASE_URL"),
        "{said}"
    );

    let (text, _) = success(read(Some("postgres://fiec@db.example/fiec")));
    let project: Value = serde_json::from_str(&text).unwrap();
    let services = project["services"].as_object().unwrap();
    let names: Vec<&str> = services.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        ["policy", "recorder", "setup", "worker", "worker-gpu"]
    );
    for (name, service) in services {
        assert_eq!(service["read_only"], true, "{name}");
        assert_eq!(service["cap_drop"][0], "ALL", "{name}");
        assert_eq!(
            service["security_opt"][0], "no-new-privileges:true",
            "{name}"
        );
        assert!(service["user"].is_null(), "{name} runs as its image says");
        let arguments = words(&service["command"]);
        let image = service["image"].as_str().unwrap();
        let (_, command) = what_it_runs(image, &arguments);
        let environment = service["environment"].as_object().unwrap();
        let names: Vec<&str> = environment.keys().map(String::as_str).collect();
        understood(&command, &names, &arguments);
        for mount in service["volumes"].as_array().into_iter().flatten() {
            let target = mount["target"].as_str().unwrap();
            let text = std::fs::read_to_string(root().join("workers/Containerfile")).unwrap();
            assert!(text.contains(target), "{name}: {target}");
        }
    }
    assert!(services["worker"]["mem_limit"].is_string());
    let devices = &services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"];
    assert_eq!(devices[0]["driver"], "nvidia");
}
