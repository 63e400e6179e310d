//! Idle children, kept so that the next execution of the same program and tenant starts at once.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fiec_kit::frames::Order;
use fiec_kit::start::NotStarted;
use fiec_schemas::ExecutionId;
use fiec_schemas::hardware::StuckProcess;

use crate::child_process::{Child, Key, Setting, Spawner};
use crate::logs::Logs;
use crate::packages::Package;

/// Idle children of a node.
pub struct Pool {
    /// The child with the longest idle time comes first.
    idle: Mutex<VecDeque<Child>>,
    /// Most idle children.
    limit: usize,
    /// Most idle children that hold the context of the same device.
    contexts: usize,
    spawner: Spawner,
    /// Makes a new child's logs.
    logs: Box<dyn Fn() -> Logs + Send + Sync>,
}

/// How well an idle child fits; the least is taken.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    /// It was prepared for this execution.
    Prepared,
    /// It has served the same key, and holds the device's context.
    Known,
    /// It is new, and holds the device's context.
    Warm,
    /// It has served the same key.
    Used,
    /// It is new.
    New,
}

impl Pool {
    /// A pool of at most `limit` children, and at most `contexts` with the context of each device.
    pub fn new(
        (limit, contexts): (usize, usize),
        spawner: Spawner,
        logs: impl Fn() -> Logs + Send + Sync + 'static,
    ) -> Self {
        Self {
            idle: Mutex::default(),
            limit,
            contexts,
            spawner,
            logs: Box::new(logs),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Child>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(
        &self,
        key: &Key,
        execution: ExecutionId,
        own: bool,
        setting: &Setting,
    ) -> Option<Child> {
        let device = setting.device.as_deref();
        let mut idle = self.lock();
        let fit = |child: &Child| {
            let holds = child.context.is_some() && child.context.as_deref() == device;
            // A context is reserved for an execution on its device. A package's own process counts
            // more than that.
            let other = child.context.is_some() && !holds && !own;
            match &child.key {
                // What a package's own process sees is settled when it starts.
                Some(_) if own && child.sees.as_ref() != Some(setting) => None,
                Some(of) if of == key => match child.prepared_for {
                    Some(prepared) => (prepared == execution).then_some(Fit::Prepared),
                    None if holds => Some(Fit::Known),
                    None => (!other).then_some(Fit::Used),
                },
                None if own || other => None,
                None if holds => Some(Fit::Warm),
                None => Some(Fit::New),
                Some(_) => None,
            }
        };
        // Among equal fits, the child with the shortest idle time.
        let fits = idle.iter().enumerate().rev();
        let fits = fits.filter_map(|(at, child)| Some((fit(child)?, at)));
        let (_, at) = fits.min_by(|(a, _), (b, _)| a.cmp(b))?;
        idle.remove(at)
    }

    /// Returns a child for this key: an idle one, a new idle one, or one that is started now.
    /// `package` is the program, unless it is built in. A child that holds the context of the
    /// setting's device is preferred.
    ///
    /// # Errors
    /// When no child can be started.
    pub async fn take(
        &self,
        key: &Key,
        execution: ExecutionId,
        package: Option<&Arc<Package>>,
        setting: &Setting,
    ) -> Result<Child, NotStarted> {
        let own = package.is_some_and(|p| p.command().is_some());
        let mut child = match self.find(key, execution, own, setting) {
            Some(child) => child,
            None => self.start(package, setting).await?,
        };
        child.confine(&[]);
        child.key = Some(key.clone());
        child.prepared_for = None;
        child.package = package.cloned();
        Ok(child)
    }

    /// Starts a child for this key, in place of one that just died idle.
    ///
    /// # Errors
    /// When no child can be started.
    pub async fn fresh(
        &self,
        key: &Key,
        package: Option<&Arc<Package>>,
        setting: &Setting,
    ) -> Result<Child, NotStarted> {
        let mut child = self.start(package, setting).await?;
        child.key = Some(key.clone());
        Ok(child)
    }

    async fn start(
        &self,
        package: Option<&Arc<Package>>,
        setting: &Setting,
    ) -> Result<Child, NotStarted> {
        self.spawner.spawn(package, setting, (self.logs)()).await
    }

    /// Starts a new idle child.
    pub async fn warm(&self) {
        match self.start(None, &Setting::default()).await {
            Ok(child) => self.give(child),
            Err(error) => tracing::warn!(%error, "cannot start a child ahead of time"),
        }
    }

    /// Starts new idle children until `count` of them hold this device's context.
    pub async fn heat(&self, device: &str, count: usize) {
        let new = |c: &Child| c.key.is_none() && c.context.as_deref() == Some(device);
        let there = self.lock().iter().filter(|child| new(child)).count();
        for _ in there..count.min(self.contexts) {
            let heated = async {
                let mut child = self.start(None, &Setting::default()).await?;
                let device = device.to_owned();
                let order = Order::Heat { device };
                let sent = child.order(&order, &[]).await;
                sent.map_err(io::Error::other)?;
                Ok::<_, NotStarted>(child)
            };
            match heated.await {
                Ok(mut child) => {
                    child.context = Some(device.to_owned());
                    self.give(child);
                }
                Err(error) => {
                    return tracing::warn!(%error, device, "cannot make a context ahead of time");
                }
            }
        }
    }

    /// Whether one more child may hold this device's context, for an execution that will come. An
    /// idle child without a reservation is ended to make room.
    pub fn makes_room(&self, device: &str) -> bool {
        let mut idle = self.lock();
        let holds = |c: &Child| c.context.as_deref() == Some(device);
        while idle.iter().filter(|child| holds(child)).count() >= self.contexts.max(1) {
            let free = |c: &Child| holds(c) && c.prepared_for.is_none();
            let Some(at) = idle.iter().position(free) else {
                return false;
            };
            drop(idle.remove(at));
        }
        true
    }

    /// Ends the idle children that hold this device's context, because its memory is needed.
    pub fn cool(&self, device: &str) {
        self.lock()
            .retain(|child| child.context.as_deref() != Some(device));
    }

    /// Takes a child back. Over a limit the oldest is ended: over the limit of all, or of those
    /// with the same device's context.
    /// One that has left processes behind is ended with them: the next run is another's.
    pub fn give(&self, mut child: Child) {
        if child.has_left_others() {
            return;
        }
        child.idle_since = Instant::now();
        child.logs.idle();
        child.link.idle();
        let mut idle = self.lock();
        let device = child.context.clone();
        idle.push_back(child);
        if let Some(device) = device {
            let holds = |c: &Child| c.context.as_ref() == Some(&device);
            let too_many = |idle: &VecDeque<Child>| {
                idle.iter().filter(|child| holds(child)).count() > self.contexts.max(1)
            };
            while too_many(&idle)
                && let Some(at) = idle.iter().position(holds)
            {
                drop(idle.remove(at));
            }
        }
        while idle.len() > self.limit {
            idle.pop_front();
        }
    }

    /// Ends children that were idle for longer than `longest`, except one. Also ends children that
    /// hold a device's context for longer than `with_context`, except `standing` new ones per
    /// device.
    pub fn sweep(&self, longest: Duration, with_context: Duration, standing: usize) {
        let mut idle = self.lock();
        let mut kept: HashMap<String, usize> = HashMap::new();
        idle.retain(|child| {
            let Some(device) = &child.context else {
                return true;
            };
            if child.key.is_none() {
                let kept = kept.entry(device.clone()).or_default();
                *kept += 1;
                return *kept <= standing || child.idle_since.elapsed() <= with_context;
            }
            child.idle_since.elapsed() <= with_context
        });
        let is_old = |c: &Child| c.context.is_none() && c.idle_since.elapsed() > longest;
        while idle.iter().filter(|c| c.context.is_none()).count() > 1
            && let Some(at) = idle.iter().position(is_old)
        {
            drop(idle.remove(at));
        }
    }

    /// Number of idle children that hold this device's context.
    pub fn contexts(&self, device: &str) -> usize {
        let holds = |c: &&Child| c.context.as_deref() == Some(device);
        self.lock().iter().filter(holds).count()
    }

    /// The processes of programs that SIGKILL does not end; at most 16.
    pub fn stuck(&self) -> Vec<StuckProcess> {
        self.spawner.stuck()
    }

    /// Slots that such processes cost.
    pub fn lost_slots(&self) -> u32 {
        self.spawner.lost_slots()
    }

    /// Ends all idle children.
    pub fn clear(&self) {
        self.lock().clear();
    }
}
