//! Programs that are not built in: the patterns that this node allows, and their records in the
//! registry.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fiec_broker::{Broker, registry};
use fiec_kit::foreign::container::Engine;
use fiec_kit::frames::{self, Report};
use fiec_kit::launch::Values;
use fiec_schemas::package::{
    Manifest, ProgramName, ProgramRecord, Protocol, is_built_in, matches, unregistered,
};
use fiec_schemas::{Digest, programs};
use tokio::sync::OnceCell;

use crate::cache::{Cache, Held, NotCached};
use crate::containers::Containers;
use crate::package_store::PackageStore;

/// Program records that are remembered.
const RECORDS: usize = 1_024;
/// Time limit of the registry's answer.
const ANSWER: Duration = Duration::from_secs(5);

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
    store: PackageStore,
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
            store: PackageStore::new(broker, Arc::clone(&cache)),
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
        let name: ProgramName = program
            .parse()
            .map_err(NotCached::because("no program can be named so"))?;
        let record = self.record(&name).await?;
        if let Some(reason) = self.containers.refuse(&record.manifest) {
            return Err(NotCached(format!("{program}: {reason}")));
        }
        if record.manifest.image.is_some() {
            self.engine(program).await?;
        }
        let held = self.store.get(&record).await?;
        self.remember(&name, &record)?;
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

    fn records(&self) -> MutexGuard<'_, HashMap<String, ProgramRecord>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn record(&self, name: &ProgramName) -> Result<ProgramRecord, NotCached> {
        let program = &name.to_string();
        if let Some(record) = self.records().get(program) {
            return Ok(record.clone());
        }
        let unknown = |error: &dyn std::fmt::Display| {
            NotCached(format!(
                "the registry cannot be asked for {program}: {error}"
            ))
        };
        let asked = tokio::time::timeout(ANSWER, registry::find(&self.broker, name));
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
        self.compare(name, record.artifact)?;
        Ok(record)
    }

    /// Refuses another artifact than the one that has run here under this version. Returns whether
    /// one has.
    fn compare(&self, name: &ProgramName, artifact: Digest) -> Result<bool, NotCached> {
        let file = self.cache.version(name);
        let known = match std::fs::read_to_string(&file) {
            Ok(text) => text.trim().parse::<Digest>().map_err(|e| e.to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => Err(error.to_string()),
        };
        let what = format!("{}, which names the artifact of {name}", file.display());
        let known = known.map_err(NotCached::because(&what))?;
        if known == artifact {
            return Ok(true);
        }
        Err(NotCached(format!(
            "{name} has the artifact {artifact} in the registry, but it has run here as {known}: a \
             version never changes. Push the other artifact under a new version. If {known} was \
             the wrong one, remove {} on this node",
            file.display()
        )))
    }

    /// Remembers the artifact of a version, also for the node's next life.
    fn remember(&self, name: &ProgramName, record: &ProgramRecord) -> Result<(), NotCached> {
        let mut records = self.records();
        let known = records.get(&record.program);
        if known.is_some_and(|known| known.artifact == record.artifact) {
            return Ok(());
        }
        // Under the lock: of two artifacts that were fetched at once, one is refused.
        if !self.compare(name, record.artifact)? {
            let path = self.cache.new_path();
            std::fs::write(&path, record.artifact.to_string())
                .and_then(|()| std::fs::rename(&path, self.cache.version(name)))
                .map_err(NotCached::because("cannot write into the node's cache"))?;
        }
        if records.len() >= RECORDS {
            records.clear();
        }
        records.insert(name.to_string(), record.clone());
        Ok(())
    }
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
