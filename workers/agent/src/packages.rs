//! Programs that are not built in: the patterns that this node allows, and a package's way from the
//! registry to an unpacked folder.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fiec_broker::{Broker, registry, store};
use fiec_kit::foreign::container::Engine;
use fiec_kit::frames::{self, Report};
use fiec_kit::launch::Values;
use fiec_schemas::package::{
    ARTIFACT_LIMIT, MANIFEST_FILE, Manifest, ProgramName, ProgramRecord, Protocol, is_built_in,
    matches, unregistered,
};
use fiec_schemas::programs;
use tokio::sync::OnceCell;

use crate::cache::{Cache, Fetched, Held, Kind, NotCached};
use crate::containers::Containers;
use crate::unpack::unpack;

/// Program records that are remembered. A version never changes.
const RECORDS: usize = 1_024;
/// Time limit of the registry's answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Pause before a failed fetch is retried once: a push may have been replacing the artifact.
const AGAIN: Duration = Duration::from_millis(500);

/// A program that can be run here.
#[derive(Debug, Clone)]
pub enum Program {
    /// One of FIEC's own.
    BuiltIn,
    /// A pushed program. Its folder stays while this lives.
    Package(Arc<Package>),
}

/// An unpacked package.
#[derive(Debug)]
pub struct Package {
    /// The package, without variables.
    pub told: frames::Package,
    _held: Held,
}

impl Program {
    /// The package, if it is one.
    pub fn package(&self) -> Option<&Arc<Package>> {
        match self {
            Self::BuiltIn => None,
            Self::Package(package) => Some(package),
        }
    }
}

impl Package {
    /// The package as a child receives it that runs it with these variables.
    pub fn told(&self, values: &Values) -> frames::Package {
        let mut told = self.told.clone();
        if self.command().is_none() {
            told.values = values.clone();
        }
        told
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.told.manifest
    }

    /// The command of a package that speaks frames by itself. None for packages that run in our own
    /// child.
    pub fn command(&self) -> Option<Vec<String>> {
        let manifest = self.manifest();
        if manifest.protocol != Protocol::Frames {
            return None;
        }
        let mut command = manifest.entry.clone();
        let program = command.first_mut()?;
        if program.contains('/') {
            *program = self.told.folder.join(&*program).display().to_string();
        }
        Some(command)
    }

    /// Checks that the manifest declares a report's outputs. Returns the first that it does not.
    pub fn breaks(&self, report: &Report) -> Option<String> {
        let (program, manifest) = (&self.told.program, self.manifest());
        let outputs = match report {
            Report::Boundary(boundary) => &boundary.outputs,
            Report::Completed { outputs, .. } => outputs,
            _ => return None,
        };
        let undeclared = outputs.iter().find(|o| !manifest.declares(&o.name))?;
        Some(format!(
            "limit outputs: {program} made the output {:?}, which its manifest does not declare \
             (outputs: {:?})",
            undeclared.name, manifest.outputs
        ))
    }

    /// Removes digests from a report, so that the agent computes them: it trusts a foreign
    /// program's bytes and nothing else.
    pub fn distrust(&self, report: &mut Report) {
        if self.manifest().protocol != Protocol::Frames {
            return;
        }
        let outputs = match report {
            Report::Boundary(boundary) => {
                boundary.digest = None;
                &mut boundary.outputs
            }
            Report::Completed { outputs, .. } => outputs,
            // With a fault of its choice a program could escape its `retries`.
            Report::Failed { fault, .. } => {
                *fault = None;
                return;
            }
            _ => return,
        };
        outputs.iter_mut().for_each(|output| output.digest = None);
    }
}

/// The packages of a node.
pub struct Packages {
    broker: Broker,
    cache: Arc<Cache>,
    allowed: Vec<String>,
    /// What the containers of programs may have.
    containers: Containers,
    /// Set once a container engine has answered.
    engine: OnceCell<()>,
    records: Mutex<HashMap<String, ProgramRecord>>,
}

/// The programs that a node offers: the built-in ones, and the patterns of allowed packages.
pub fn offered(allowed: &[String]) -> Vec<String> {
    let built_in = programs::BUILT_IN.iter().map(|name| (*name).to_owned());
    built_in.chain(allowed.iter().cloned()).collect()
}

impl Packages {
    /// Packages that one of the patterns allows.
    pub fn new(
        broker: &Broker,
        cache: Arc<Cache>,
        allowed: Vec<String>,
        containers: Containers,
    ) -> Self {
        Self {
            broker: broker.clone(),
            cache,
            allowed,
            containers,
            engine: OnceCell::new(),
            records: Mutex::default(),
        }
    }

    /// Returns a program that is ready to run. Fetches and unpacks it if it is not here yet.
    ///
    /// # Errors
    /// The reason why it cannot run on this node, for people.
    pub async fn find(&self, program: &str) -> Result<Program, NotCached> {
        if is_built_in(program) {
            return Ok(Program::BuiltIn);
        }
        if !self.allowed.iter().any(|p| matches(p, program)) {
            return Err(NotCached(format!(
                "{program} is not allowed on this node: it runs {} (`fiec worker \
                 --allow-program {program}`)",
                offered(&self.allowed).join(", ")
            )));
        }
        // Boxed: a built-in program does not come this far.
        Box::pin(self.package(program)).await
    }

    async fn package(&self, program: &str) -> Result<Program, NotCached> {
        let record = self.record(program).await?;
        if let Some(reason) = self.containers.refuse(&record.manifest) {
            return Err(NotCached(format!("{program}: {reason}")));
        }
        if record.manifest.image.is_some() {
            self.engine(program).await?;
        }
        let held = match self.fetch(&record).await {
            Ok(held) => held,
            Err(first) => {
                tracing::warn!(program, %first, "cannot have a package; trying once more");
                tokio::time::sleep(AGAIN).await;
                self.fetch(&record).await?
            }
        };
        let told = frames::Package {
            folder: held.path(),
            manifest: record.manifest,
            program: program.to_owned(),
            values: Values::default(),
        };
        Ok(Program::Package(Arc::new(Package { told, _held: held })))
    }

    /// Checks that containers can run here. A success is remembered.
    async fn engine(&self, program: &str) -> Result<(), NotCached> {
        let find = async || match tokio::task::spawn_blocking(Engine::find).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(reason)) => Err(reason),
            Err(error) => Err(error.to_string()),
        };
        let found = self.engine.get_or_try_init(find).await;
        let what = format!("{program} runs in a container");
        found.copied().map_err(NotCached::because(&what))
    }

    async fn record(&self, program: &str) -> Result<ProgramRecord, NotCached> {
        let known = || self.records.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = known().get(program) {
            return Ok(record.clone());
        }
        let name: ProgramName = program
            .parse()
            .map_err(NotCached::because("no program can be named so"))?;
        let unknown = |error: &dyn std::fmt::Display| {
            NotCached(format!(
                "the registry cannot be asked for {program}: {error}"
            ))
        };
        let asked = tokio::time::timeout(ANSWER, registry::find(&self.broker, &name));
        let found = match asked.await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return Err(unknown(&error)),
            Err(_) => return Err(unknown(&format!("no answer within {ANSWER:?}"))),
        };
        let record = found.ok_or_else(|| NotCached(unregistered(program).reason))?;
        record
            .manifest
            .check()
            .map_err(NotCached::because("its manifest breaks a rule"))?;
        let mut records = known();
        if records.len() >= RECORDS {
            records.clear();
        }
        records.insert(program.to_owned(), record.clone());
        Ok(record)
    }

    async fn fetch(&self, record: &ProgramRecord) -> Result<Held, NotCached> {
        let key = (Kind::Program, record.artifact);
        // The tar and its contents.
        let wanted = record.bytes.saturating_mul(2);
        let (broker, cache, record) = (self.broker.clone(), self.cache.clone(), record.clone());
        let fetch = move || fetch(broker, cache, record);
        self.cache.get_or_fetch(key, wanted, fetch).await
    }
}

async fn fetch(
    broker: Broker,
    cache: Arc<Cache>,
    record: ProgramRecord,
) -> Result<Fetched, NotCached> {
    let (tar, folder) = (cache.new_path(), cache.new_path());
    let result = fetch_to(&broker, &record, &tar, &folder).await;
    // The leftovers of a failed fetch are removed with the agent's temporary folder at the latest.
    let _ = tokio::fs::remove_file(&tar).await;
    if result.is_err() {
        let _ = tokio::fs::remove_dir_all(&folder).await;
    }
    result
}

async fn fetch_to(
    broker: &Broker,
    record: &ProgramRecord,
    tar: &Path,
    folder: &Path,
) -> Result<Fetched, NotCached> {
    let program = &record.program;
    let limit = record.bytes.min(ARTIFACT_LIMIT);
    let what = format!("the artifact of {program} cannot be fetched");
    let because = || NotCached::because(&what);
    let mut file = tokio::fs::File::create(tar).await.map_err(because())?;
    store::get_data_to(broker, record.artifact, limit, &mut file, |_| {})
        .await
        .map_err(NotCached::because(&what))?;
    drop(file);
    let (tar, folder, record) = (tar.to_owned(), folder.to_owned(), record.clone());
    let unpacked = tokio::task::spawn_blocking(move || {
        let artifact = BufReader::new(File::open(tar).map_err(|e| e.to_string())?);
        let bytes = unpack(artifact, &folder, record.bytes).map_err(|e| e.to_string())?;
        let file = File::open(folder.join(MANIFEST_FILE))
            .map_err(|error| format!("{MANIFEST_FILE}: {error}"))?;
        match Manifest::read(file) {
            Ok(manifest) if manifest == record.manifest => Ok(Fetched {
                path: folder,
                bytes,
            }),
            Ok(_) => Err(format!("its {MANIFEST_FILE} is not the registered one")),
            Err(error) => Err(format!("{MANIFEST_FILE}: {error}")),
        }
    });
    let what = format!("the artifact of {program} cannot be used");
    unpacked
        .await
        .map_err(NotCached::because(&what))?
        .map_err(NotCached::because(&what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_offers_the_built_in_programs_and_its_patterns() {
        let offered = offered(&["train@*".to_owned()]);
        assert!(offered.contains(&"cg@1".to_owned()));
        assert_eq!(offered.last().unwrap(), "train@*");
    }
}
