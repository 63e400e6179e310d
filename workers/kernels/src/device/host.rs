//! A device in the host's memory. It counts and refuses memory as a real device does.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{
    About, Arithmetic, Buffer, CgLimits, CgScalars, CgStop, Device, DeviceError, Devices, Part,
    Usage,
};
use crate::cg::{self, CgProblem, CgState, CgWork};
use crate::dense::lu::LuError;
use crate::dense::{Into, Mat, MatMut, MatRef, gemm, lu, qr, triangular};
use crate::engine::Engine;

/// Statistics of opened devices, which outlive them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ledger {
    /// Devices that are open.
    pub open: u64,
    /// Devices that were opened.
    pub opened: u64,
    /// Bytes in use on all of them.
    pub held: u64,
    /// Most bytes ever in use on one.
    pub peak: u64,
    /// Bytes copied to a device.
    pub written: u64,
    /// Bytes copied from a device.
    pub read: u64,
    /// Products computed.
    pub products: u64,
    /// Iterations of solves.
    pub iterations: u64,
    /// Devices closed warm.
    pub kept_warm: u64,
    /// Contexts that were made.
    pub made: u64,
}

/// An event of a device's context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextEvent {
    /// It was made.
    Made,
    /// A device was opened with a warm one.
    Taken,
    /// It is kept warm.
    Kept,
    /// It was released.
    Gone,
}

type Told = Arc<dyn Fn(ContextEvent, &str) + Send + Sync>;

/// The contexts of a process's devices. At most one is kept warm, as with a real driver.
#[derive(Clone, Default)]
pub struct Contexts {
    warm: Arc<Mutex<Option<String>>>,
    told: Option<Told>,
}

impl std::fmt::Debug for Contexts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Contexts")
            .field("warm", &self.warm())
            .finish_non_exhaustive()
    }
}

impl Contexts {
    /// Reports each event of a context to `told`.
    #[must_use]
    pub fn telling(told: impl Fn(ContextEvent, &str) + Send + Sync + 'static) -> Self {
        Self {
            warm: Arc::default(),
            told: Some(Arc::new(told)),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.warm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device whose context is kept warm.
    #[must_use]
    pub fn warm(&self) -> Option<String> {
        self.lock().clone()
    }

    fn tell(&self, event: ContextEvent, uuid: &str) {
        if let Some(told) = &self.told {
            told(event, uuid);
        }
    }

    /// Takes the warm context if it belongs to this device. Another device's context is released.
    /// Returns whether a context must be made.
    fn take(&self, uuid: &str) -> bool {
        let kept = self.lock().take();
        match &kept {
            Some(kept) if kept == uuid => self.tell(ContextEvent::Taken, uuid),
            Some(other) => self.tell(ContextEvent::Gone, other),
            None => {}
        }
        kept.as_deref() != Some(uuid)
    }

    fn put(&self, uuid: &str) {
        let other = self.lock().replace(uuid.to_owned());
        if let Some(other) = other {
            self.tell(ContextEvent::Gone, &other);
        }
        self.tell(ContextEvent::Kept, uuid);
    }

    /// Releases the warm context, if there is one.
    pub fn cool(&self) {
        let kept = self.lock().take();
        if let Some(uuid) = kept {
            self.tell(ContextEvent::Gone, &uuid);
        }
    }
}

/// Opens devices in the host's memory.
#[derive(Debug, Clone, Default)]
pub struct HostDevices {
    /// Memory of each in bytes. A grant without a budget gets all of it.
    pub memory_bytes: u64,
    ledger: Arc<Mutex<Ledger>>,
    contexts: Contexts,
    wrong: bool,
}

impl HostDevices {
    /// Devices with this much memory each.
    #[must_use]
    pub fn new(memory_bytes: u64) -> Self {
        Self {
            memory_bytes,
            ledger: Arc::default(),
            contexts: Contexts::default(),
            wrong: false,
        }
    }

    /// Uses these contexts, which other devices may share.
    #[must_use]
    pub fn with_contexts(self, contexts: Contexts) -> Self {
        Self { contexts, ..self }
    }

    /// For tests: devices that compute one wrong bit in each product, triangular solve and
    /// iteration.
    #[must_use]
    pub fn computing_wrongly(self) -> Self {
        Self {
            wrong: true,
            ..self
        }
    }

    /// The statistics of these devices.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        *self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a context of this device, and makes it if none is warm.
    fn context(&self, uuid: &str) {
        if self.contexts.take(uuid) {
            let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
            ledger.made += 1;
            drop(ledger);
            self.contexts.tell(ContextEvent::Made, uuid);
        }
    }
}

impl Devices for HostDevices {
    fn heat(&self, uuid: &str) -> Result<(), DeviceError> {
        self.context(uuid);
        self.contexts.put(uuid);
        Ok(())
    }

    fn cool(&self) {
        self.contexts.cool();
    }

    fn open(&self, uuid: &str, memory_bytes: Option<u64>) -> Result<Box<dyn Device>, DeviceError> {
        let budget = memory_bytes.unwrap_or(self.memory_bytes);
        if budget > self.memory_bytes {
            return Err(DeviceError::Absent(format!(
                "{uuid} has {} bytes of memory, not the granted {budget}",
                self.memory_bytes
            )));
        }
        self.context(uuid);
        let device = HostDevice {
            about: About {
                uuid: uuid.to_owned(),
                name: "the host's memory".to_owned(),
                memory_bytes: self.memory_bytes,
            },
            usage: Usage {
                budget,
                ..Usage::default()
            },
            engine: Engine::default(),
            ledger: Arc::clone(&self.ledger),
            buffers: BTreeMap::new(),
            next: 0,
            solve: None,
            wrong: self.wrong,
            contexts: self.contexts.clone(),
            warm: false,
        };
        device.count(|ledger| {
            ledger.open += 1;
            ledger.opened += 1;
        });
        Ok(Box::new(device))
    }
}

struct Solve {
    problem: CgProblem,
    state: CgState,
    work: CgWork,
    bytes: u64,
}

/// A device in the host's memory.
pub struct HostDevice {
    about: About,
    usage: Usage,
    engine: Engine,
    ledger: Arc<Mutex<Ledger>>,
    buffers: BTreeMap<u64, Vec<f64>>,
    next: u64,
    solve: Option<Solve>,
    wrong: bool,
    contexts: Contexts,
    /// Its context is kept warm when it is closed.
    warm: bool,
}

impl std::fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostDevice")
            .field("usage", &self.usage)
            .finish_non_exhaustive()
    }
}

impl HostDevice {
    fn count(&self, f: impl FnOnce(&mut Ledger)) {
        f(&mut self.ledger.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn take(&mut self, bytes: u64) -> Result<(), DeviceError> {
        if bytes > self.usage.available() {
            return Err(DeviceError::Budget {
                wanted: bytes,
                held: self.usage.held,
                budget: self.usage.budget,
            });
        }
        self.usage.held += bytes;
        self.usage.peak = self.usage.peak.max(self.usage.held);
        let peak = self.usage.peak;
        self.count(|ledger| {
            ledger.held += bytes;
            ledger.peak = ledger.peak.max(peak);
        });
        Ok(())
    }

    fn give(&mut self, bytes: u64) {
        self.usage.held -= bytes;
        self.count(|ledger| ledger.held -= bytes);
    }

    /// Changes the last bit of the first element, if the device computes wrongly.
    fn spoil(&self, mut found: MatMut<'_>) {
        if self.wrong && found.rows() * found.cols() > 0 {
            let column = found.col_mut(0);
            column[0] = flipped(column[0]);
        }
    }

    /// Copies a part, with its transposition.
    fn copy(&self, part: Part) -> Mat {
        let stored = &self.buffers[&part.buffer()];
        Mat::from_fn(part.rows(), part.cols(), |i, j| {
            let (i, j) = if part.is_transposed() { (j, i) } else { (i, j) };
            stored[part.at() + i + j * part.stride()]
        })
    }

    fn put(&mut self, part: Part, from: MatRef<'_>) {
        assert!(!part.is_transposed(), "a destination that is transposed");
        let shape = (part.rows(), part.cols());
        assert_eq!((from.rows(), from.cols()), shape, "shape of a copy");
        if let Some(stored) = self.buffers.get_mut(&part.buffer()) {
            for j in 0..shape.1 {
                for i in 0..shape.0 {
                    stored[part.at() + i + j * part.stride()] = from.at(i, j);
                }
            }
        }
    }
}

fn flipped(number: f64) -> f64 {
    f64::from_bits(number.to_bits() ^ 1)
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        let held = self.usage.held;
        self.count(|ledger| {
            ledger.open -= 1;
            ledger.held -= held;
        });
        match self.warm {
            true => self.contexts.put(&self.about.uuid),
            false => self.contexts.tell(ContextEvent::Gone, &self.about.uuid),
        }
    }
}

impl Device for HostDevice {
    fn about(&self) -> &About {
        &self.about
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn allocate(&mut self, elements: usize) -> Result<Buffer, DeviceError> {
        self.take(8 * elements as u64)?;
        self.next += 1;
        // As on a device: programs must not rely on zeros.
        self.buffers.insert(self.next, vec![f64::NAN; elements]);
        Ok(Buffer::new(self.next, elements))
    }

    fn release(&mut self, buffer: Buffer) {
        if self.buffers.remove(&buffer.id()).is_some() {
            self.give(8 * buffer.elements() as u64);
        }
    }

    fn write(&mut self, from: MatRef<'_>, to: Part) -> Result<(), DeviceError> {
        self.put(to, from);
        self.count(|ledger| ledger.written += 8 * (from.rows() * from.cols()) as u64);
        Ok(())
    }

    fn read(&mut self, from: Part, mut to: MatMut<'_>) -> Result<(), DeviceError> {
        to.copy_from(self.copy(from).view());
        self.count(|ledger| ledger.read += 8 * (from.rows() * from.cols()) as u64);
        Ok(())
    }

    fn gemm(
        &mut self,
        _: Arithmetic,
        a: Part,
        b: Part,
        into: Into,
        c: Part,
    ) -> Result<(), DeviceError> {
        let (left, right, mut product) = (self.copy(a), self.copy(b), self.copy(c));
        let to = product.view_mut();
        gemm(&mut self.engine, left.view(), right.view(), into, to);
        self.spoil(product.view_mut());
        self.put(c, product.view());
        self.count(|ledger| ledger.products += 1);
        Ok(())
    }

    fn solve_unit_lower(&mut self, _: Arithmetic, l: Part, x: Part) -> Result<(), DeviceError> {
        let (l, mut solved) = (self.copy(l), self.copy(x));
        triangular::solve_unit_lower(&mut self.engine, l.view(), solved.view_mut());
        self.spoil(solved.view_mut());
        self.put(x, solved.view());
        Ok(())
    }

    fn exchange(&mut self, x: Part, pivots: &[usize]) -> Result<(), DeviceError> {
        let mut exchanged = self.copy(x);
        lu::exchange(exchanged.view_mut(), pivots);
        self.put(x, exchanged.view());
        Ok(())
    }

    fn vendor_lu(&mut self, a: Part) -> Result<Result<Vec<usize>, LuError>, DeviceError> {
        let mut panel = self.copy(a);
        let mut pivots = vec![0; a.cols()];
        let done = lu::panel(&mut self.engine, panel.view_mut(), &mut pivots);
        self.put(a, panel.view());
        Ok(done.map(|()| pivots))
    }

    fn vendor_qr(&mut self, a: Part) -> Result<Vec<f64>, DeviceError> {
        let mut panel = self.copy(a);
        let made =
            qr::panel(&mut self.engine, panel.view_mut()).map_err(|error| DeviceError::Driver {
                call: "qr",
                why: error.to_string(),
            })?;
        self.put(a, panel.view());
        Ok((0..a.cols()).map(|j| made.t.view().at(j, j)).collect())
    }

    fn cg_begin(&mut self, problem: &CgProblem, state: &CgState) -> Result<(), DeviceError> {
        self.cg_end();
        let matrix = problem.matrix();
        let bytes = (12 * matrix.entries() + 4 * matrix.rows() + 5 * 8 * problem.n()) as u64;
        self.take(bytes)?;
        self.count(|ledger| ledger.written += bytes);
        self.solve = Some(Solve {
            problem: problem.clone(),
            state: state.clone(),
            work: CgWork::new(problem),
            bytes,
        });
        Ok(())
    }

    fn cg_advance(&mut self, limits: CgLimits) -> Result<(CgScalars, CgStop), DeviceError> {
        let mut done = 0;
        let solve = self.solve.as_mut();
        assert!(solve.is_some(), "no solve was taken up");
        let Some(Solve {
            problem,
            state,
            work,
            ..
        }) = solve
        else {
            return Err(DeviceError::Absent("no solve".to_owned()));
        };
        let mut stop = CgStop::Steps;
        loop {
            if state.relative_residual(problem) <= limits.tolerance {
                stop = CgStop::Converged;
                break;
            }
            if done == limits.steps {
                break;
            }
            if state.iteration >= limits.most {
                stop = CgStop::Most;
                break;
            }
            if let Err(error) = cg::step(problem, state, work) {
                stop = CgStop::Broken(error);
                break;
            }
            if self.wrong {
                state.x[0] = flipped(state.x[0]);
            }
            done += 1;
        }
        let scalars = CgScalars {
            rz: state.rz,
            rr: state.rr,
            iteration: state.iteration,
        };
        self.count(|ledger| ledger.iterations += done);
        Ok((scalars, stop))
    }

    fn cg_read(&mut self, state: &mut CgState) -> Result<(), DeviceError> {
        assert!(self.solve.is_some(), "no solve was taken up");
        if let Some(solve) = &self.solve {
            state.clone_from(&solve.state);
            let bytes = 24 * solve.state.x.len() as u64;
            self.count(|ledger| ledger.read += bytes);
        }
        Ok(())
    }

    fn cg_end(&mut self) {
        if let Some(solve) = self.solve.take() {
            self.give(solve.bytes);
        }
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn close(mut self: Box<Self>, warm: bool) {
        self.warm = warm;
        if warm {
            self.count(|ledger| ledger.kept_warm += 1);
        }
    }
}
