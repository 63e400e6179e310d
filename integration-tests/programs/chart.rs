//! The Helm chart: rendered by Helm, then checked as the manifests are.
//!
//! Helm is the one on `PATH`, or it is built by Go from the pinned versions in `helm/go.mod`. Without
//! either, the tests say so on stderr.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

use super::manifests::{deployed, documents, pod_is_walled_in, python, validate};
use crate::stage::python::{root, say, success};

const WITH_URL: [&str; 2] = ["--set", "nats.url=nats://nats.nats.svc:4222"];

/// `helm`. None, with a line on stderr, if it is not there and cannot be built.
fn helm() -> Option<Command> {
    static HELM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let helm = HELM.get_or_init(|| {
        if let Some(found) = fiec::lab::on_path("helm") {
            return Some(found);
        }
        let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("helm");
        let source = root().join("integration-tests/programs/helm");
        // Not optimized: it renders one chart.
        let plain = "-gcflags=all=-N -l";
        let words = [
            "build",
            "-mod=readonly",
            plain,
            "-o",
            made.to_str().unwrap(),
        ];
        let mut go = Command::new("go");
        go.args(words).arg("helm.sh/helm/v3/cmd/helm");
        let why = match go.current_dir(source).output() {
            Ok(output) if output.status.success() => return Some(made),
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => format!("go: {error}"),
        };
        say(&format!("SKIPPED: the chart is not rendered: {why}"));
        None
    });
    Some(Command::new(helm.as_ref()?))
}

/// Runs a command of Helm on the chart.
fn run(command: &[&str], options: &[&str]) -> Option<Output> {
    let mut helm = helm()?;
    // A Helm that Go builds takes an old version of Kubernetes as its default.
    helm.args(command).arg(deployed().join("helm"));
    helm.args(["--kube-version", "1.32.0"]).args(options);
    Some(helm.output().unwrap())
}

fn template(options: &[&str]) -> Option<Output> {
    run(&["template", "site", "--namespace", "fiec"], options)
}

/// The file with every value, as an option.
fn every_value() -> [String; 2] {
    let file = deployed().join("helm/ci/every-value-values.yaml");
    ["--values".to_owned(), file.to_str().unwrap().to_owned()]
}

/// The rendered documents by kind and name, after Kubernetes' schemas have accepted them.
fn rendered(options: &[&str]) -> Option<BTreeMap<String, Value>> {
    let (text, _) = success(template(options)?);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rendered.yaml");
    std::fs::write(&file, text).unwrap();
    success(validate(python()?, &file));
    let named = |document: Value| {
        let kind = document["kind"].as_str().unwrap();
        let name = document["metadata"]["name"].as_str().unwrap();
        (format!("{kind}/{name}"), document)
    };
    let all = documents(&file)?.into_iter().filter(|d| !d.is_null());
    Some(all.map(named).collect())
}

fn container<'a>(all: &'a BTreeMap<String, Value>, name: &str) -> &'a Value {
    let document = all
        .get(name)
        .unwrap_or_else(|| panic!("{name}: {:?}", all.keys()));
    &document["spec"]["template"]["spec"]["containers"][0]
}

/// The entry of a variable in a container.
fn variable<'a>(container: &'a Value, name: &str) -> &'a Value {
    let all = container["env"].as_array().unwrap();
    all.iter()
        .find(|v| v["name"] == name)
        .unwrap_or(&Value::Null)
}

#[test]
fn the_chart_renders_what_the_schemas_of_kubernetes_accept() {
    let full = every_value();
    let full: Vec<&str> = full.iter().map(String::as_str).collect();
    for options in [&WITH_URL[..], &full] {
        let Some(lint) = run(&["lint", "--strict"], options) else {
            return;
        };
        success(lint);
        let Some(all) = rendered(options) else { return };
        let mut pods = 0;
        for (name, document) in &all {
            assert_ne!(document["kind"], "Secret", "{name}");
            let pod = &document["spec"]["template"]["spec"];
            if pod.is_object() {
                pod_is_walled_in(name, pod, &Value::Null);
                let selects = &document["spec"]["selector"]["matchLabels"];
                let labels = &document["spec"]["template"]["metadata"]["labels"];
                assert!(selects.is_null() || selects == labels, "{name}");
                pods += 1;
            }
        }
        // setup, policy, recorder; the worker of the defaults, or three groups.
        assert_eq!(pods, if options == WITH_URL { 4 } else { 6 });
    }
}

#[test]
fn the_defaults_of_the_chart_are_the_pods_of_the_manifests() {
    let Some(mut all) = rendered(&[&WITH_URL[..], &["--set", "workers.gpu.enabled=true"]].concat())
    else {
        return;
    };
    let folder = deployed().join("kubernetes");
    let files = ["services.yaml", "workers.yaml"].map(|file| documents(&folder.join(file)));
    let mut compared = 0;
    for of_manifest in files.into_iter().flatten().flatten() {
        let name = of_manifest["metadata"]["name"].as_str().unwrap();
        let name = match name {
            "fiec-worker" => "site-worker-cpu".to_owned(),
            "fiec-worker-gpu" => "site-worker-gpu".to_owned(),
            other => other.replace("fiec-", "site-"),
        };
        let name = format!("{}/{name}", of_manifest["kind"].as_str().unwrap());
        let of_chart = all.remove(&name).unwrap_or_else(|| panic!("{name}"));
        let pods = [&of_manifest, &of_chart].map(|d| &d["spec"]["template"]["spec"]);
        for field in [
            "securityContext",
            "automountServiceAccountToken",
            "shareProcessNamespace",
            "terminationGracePeriodSeconds",
            "tolerations",
            "volumes",
            "restartPolicy",
        ] {
            assert_eq!(pods[0][field], pods[1][field], "{name}: {field}");
        }
        let containers = pods.map(|pod| &pod["containers"][0]);
        for field in [
            "image",
            "resources",
            "securityContext",
            "volumeMounts",
            "readinessProbe",
            "livenessProbe",
            "ports",
        ] {
            assert_eq!(
                containers[0][field], containers[1][field],
                "{name}: {field}"
            );
        }
        compared += 1;
    }
    assert_eq!(compared, 5);
    let rest: Vec<_> = all.keys().map(String::as_str).collect();
    assert_eq!(
        rest,
        ["NetworkPolicy/site", "NetworkPolicy/site-history"],
        "the chart has no other objects"
    );
}

#[test]
fn values_reach_the_workers_the_servers_and_the_images() {
    let full = every_value();
    let Some(all) = rendered(&full.each_ref().map(String::as_str)) else {
        return;
    };
    let cpu = container(&all, "DaemonSet/site-worker-cpu");
    let arguments: Vec<&str> = cpu["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|word| word.as_str().unwrap())
        .collect();
    let line = arguments.join(" ");
    for given in ["--slots 2", "--label rack=7", "--allow-program train@*"] {
        assert!(line.contains(given), "{given}: {line}");
    }
    let gpu = &all["DaemonSet/site-worker-gpu"]["spec"]["template"]["spec"];
    assert_eq!(gpu["terminationGracePeriodSeconds"], 75);
    assert_eq!(
        gpu["containers"][0]["resources"]["limits"]["nvidia.com/gpu"],
        1
    );

    let burst = &all["Deployment/site-worker-burst"];
    assert_eq!(burst["spec"]["replicas"], 5);
    let burst = container(&all, "Deployment/site-worker-burst");
    let path = |name| &variable(burst, name)["valueFrom"]["fieldRef"]["fieldPath"];
    assert_eq!(path("FIEC_NODE"), "metadata.name");
    assert!(variable(cpu, "FIEC_NODE").is_null());

    let policy = container(&all, "Deployment/site-policy");
    assert_eq!(policy["image"], "registry.example/fiec-services:0.0.9");
    assert!(variable(policy, "FIEC_DATABASE_URL").is_null());
    let key = |container, name| &variable(container, name)["valueFrom"]["secretKeyRef"]["key"];
    for (name, role) in [
        ("Job/site-setup", "owner"),
        ("Deployment/site-recorder", "recorder"),
    ] {
        assert_eq!(key(container(&all, name), "FIEC_DATABASE_URL"), role);
        assert_eq!(key(container(&all, name), "FIEC_NATS_URL"), "url");
    }
}

#[test]
fn a_wrong_value_is_refused_by_its_name() {
    for (set, said) in [
        ("workers.cpu.slot=2", "slot"),
        ("workers.cpu.kind=StatefulSet", "/workers/cpu/kind"),
        ("nats.url=nats://me:secret@nats:4222", "/nats/url"),
        ("nats.urlSecret.name=both", "not both"),
        ("nats.url=", "set nats.url"),
    ] {
        let Some(output) = template(&[&WITH_URL[..], &["--set", set]].concat()) else {
            return;
        };
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && printed.contains(said),
            "{set}: {printed}"
        );
    }
}
