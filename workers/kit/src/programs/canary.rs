//! `canary@1`: the canaries of `fiec_kernels::canary`, one case per capsule, and the judgement of
//! their results by the numeric contracts.
//!
//! If the grant names a device, the device computes its share of each case, and the host the rest.
//! The result names both. If the device is unavailable or fails, the program ends with a result
//! that says so: this says nothing about bits.
//!
//! σ: magic `FIECCAN1`, number of cases `u64`. Then for each computed case its digest (32 bytes)
//! and its error over its bound (`f64`, NaN without a result). Little endian.

pub use fiec_kernels::canary::SUITE;
use fiec_kernels::canary::device::{Share, run_on, share};
use fiec_kernels::canary::{self, Found};
use fiec_kernels::device::About;
use fiec_kernels::engine::Engine;
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::CanaryParams;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::place::Place;
use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECCAN1";
const HEADER: usize = 16;
const ENTRY: usize = 40;
/// Most threads. The kernels' bits must not depend on them, and the canaries show that.
const THREADS: u32 = 4;
/// `ran_on` for the host.
const CPU: &str = "cpu";

/// The program.
pub struct Canary {
    engine: Engine,
    place: Place,
    /// Description of the place that computes.
    ran_on: String,
    /// The reason why the granted device computes nothing.
    no_device: Option<String>,
}

/// Describes which cases this device computes, for people.
fn on_device(about: &About) -> String {
    let named = |what| {
        let names: Vec<_> = canary::names().filter(|n| share(n) == what).collect();
        names.join(", ")
    };
    format!(
        "{} ({}); on the host: panels of {}; all of {}",
        about.uuid,
        about.name,
        named(Share::Updates),
        named(Share::None)
    )
}

impl Canary {
    /// Computes the next case. Returns none if the device fails.
    fn next(&mut self, index: usize) -> Option<Found> {
        let Some(mut device) = self.place.take() else {
            return canary::run(index, &mut self.engine);
        };
        match run_on(index, &mut self.engine, device.as_mut()) {
            Ok(found) => {
                self.place.put(device);
                found
            }
            Err(error) => {
                let case = canary::names().nth(index).unwrap_or_default();
                self.no_device = Some(format!("canary {case}: {error}"));
                None
            }
        }
    }
}

/// σ: digest and error of the computed cases.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CanaryState {
    found: Vec<([u8; 32], u64)>,
}

impl State for CanaryState {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(self.found.len() as u64).to_le_bytes());
        for (digest, error) in &self.found {
            out.extend_from_slice(digest);
            out.extend_from_slice(&error.to_le_bytes());
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProgramError> {
        let wrong = || ProgramError::Permanent("not a state of canary@1".to_owned());
        let (head, rest) = bytes.split_at_checked(HEADER).ok_or_else(wrong)?;
        let (magic, count) = head.split_at(8);
        let count = <[u8; 8]>::try_from(count).map_err(|_| wrong())?;
        let whole = u64::from_le_bytes(count) == (rest.len() / ENTRY) as u64;
        if magic != MAGIC || !whole || rest.len() % ENTRY != 0 {
            return Err(wrong());
        }
        let mut found = Vec::with_capacity(rest.len() / ENTRY);
        for entry in rest.chunks_exact(ENTRY) {
            let (digest, error) = entry.split_at(32);
            found.push((
                digest.try_into().map_err(|_| wrong())?,
                u64::from_le_bytes(error.try_into().map_err(|_| wrong())?),
            ));
        }
        Ok(Self { found })
    }
}

impl Program for Canary {
    type State = CanaryState;

    fn start(params: &Value, inputs: &mut Inputs) -> Result<Self, ProgramError> {
        CanaryParams::from_value(params).map_err(ProgramError::permanent)?;
        Ok(Self {
            engine: Engine::default(),
            place: Place::new(inputs),
            ran_on: CPU.to_owned(),
            no_device: None,
        })
    }

    fn initial(&mut self) -> Result<CanaryState, ProgramError> {
        Ok(CanaryState::default())
    }

    fn capsule(&mut self, state: &mut CanaryState, _: &mut Capsule) -> Result<Step, ProgramError> {
        let found = match self.no_device {
            None => self.next(state.found.len()),
            Some(_) => None,
        };
        if let Some(reason) = &self.no_device {
            return Ok(Step::Complete {
                result: json!({ "suite": SUITE, "no_device": reason }),
            });
        }
        if let Some(found) = found {
            if let Some(failure) = &found.failure {
                eprintln!("canary {}: {failure}", found.name);
            }
            state.found.push((found.digest, found.error.to_bits()));
        }
        if state.found.len() < canary::names().len() {
            return Ok(Step::Boundary);
        }
        let cases = canary::names().zip(&state.found);
        let cases: Vec<Case> = cases
            .map(|(name, (digest, error))| Case {
                name: name.to_owned(),
                digest: Digest(*digest),
                error: Some(f64::from_bits(*error)).filter(|e| e.is_finite()),
            })
            .collect();
        Ok(Step::Complete {
            result: json!({ "suite": SUITE, "ran_on": self.ran_on, "cases": cases }),
        })
    }

    fn progress(&self, _: &CanaryState) -> Progress {
        Progress {
            of: Some(canary::names().len() as u64),
            note: None,
        }
    }

    fn let_go(&mut self, warm: bool) {
        self.place.let_go(warm);
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        if self.place.changes(grant) {
            self.no_device = self.place.go(grant).err().map(|error| error.to_string());
            self.ran_on = CPU.to_owned();
            if let Some(device) = self.place.take() {
                self.ran_on = on_device(device.about());
                self.place.put(device);
            }
        }
        let threads = grant.threads.unwrap_or(1).clamp(1, THREADS) as usize;
        if threads != self.engine.threads() {
            self.engine = Engine::new(threads).map_err(ProgramError::transient)?;
        }
        Ok(())
    }
}

/// A case of the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Case {
    name: String,
    digest: Digest,
    /// Error over its bound. None if it is not a number.
    error: Option<f64>,
}

/// A result of `canary@1`.
#[derive(Debug, Deserialize)]
struct Results {
    suite: u32,
    ran_on: String,
    cases: Vec<Case>,
}

/// The judgement of a substrate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    /// Version of the suite.
    pub suite: u32,
    /// Description of the place that computed it.
    pub ran_on: String,
    /// Computed cases.
    pub cases: u32,
    /// Digest over names and digests of all cases.
    pub digest: Digest,
    /// The case that broke the bitwise contract, described.
    pub not_bitwise: Option<String>,
    /// The case that broke the bounded contract, described.
    pub not_bounded: Option<String>,
}

/// The reason if a result of `canary@1` has no cases: the granted device was unavailable or failed.
pub fn no_device(result: &Value) -> Option<&str> {
    result.get("no_device")?.as_str()
}

/// Judges a result of `canary@1` by this process's golden digests and bounds.
///
/// # Errors
/// When it is no result of this suite.
pub fn judge(result: &Value) -> Result<Judgement, String> {
    let results = Results::deserialize(result)
        .map_err(|error| format!("the canaries' result cannot be read: {error}"))?;
    if results.suite != SUITE {
        return Err(format!(
            "the canaries are of suite {}, and {SUITE} was expected",
            results.suite
        ));
    }
    let names: Vec<_> = results
        .cases
        .iter()
        .map(|case| case.name.as_str())
        .collect();
    if !names.iter().copied().eq(canary::names()) {
        return Err(format!(
            "the canaries are not those of suite {SUITE}: {}",
            names.join(", ")
        ));
    }
    let (mut not_bitwise, mut not_bounded) = (None, None);
    let mut bytes = Vec::new();
    for (name, case) in canary::names().zip(&results.cases) {
        bytes.extend_from_slice(name.as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(&case.digest.0);
        let found = Found {
            name,
            digest: case.digest.0,
            error: case.error.unwrap_or(f64::NAN),
            failure: None,
        };
        if !found.is_bitwise() && not_bitwise.is_none() {
            let golden = canary::golden(name).unwrap_or_default();
            not_bitwise = Some(format!(
                "canary {name} has digest {}, and {golden} is right",
                case.digest
            ));
        }
        if !found.is_bounded() && not_bounded.is_none() {
            not_bounded = Some(match case.error {
                Some(error) => format!("canary {name} is off by {error:.3} times its bound"),
                None => format!("canary {name} gave no number"),
            });
        }
    }
    Ok(Judgement {
        suite: results.suite,
        ran_on: results.ran_on,
        cases: u32::try_from(results.cases.len()).unwrap_or(u32::MAX),
        digest: Digest::of(&bytes),
        not_bitwise,
        not_bounded,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fiec_kernels::device::HostDevices;
    use fiec_schemas::package::DeviceGrant;
    use std::sync::Arc;

    fn computed(flip_at: Option<usize>) -> Value {
        let program = Canary::start(&json!({}), &mut Inputs::default()).unwrap();
        run(program, flip_at)
    }

    /// Computes on one of these devices, with this much of its memory.
    fn computed_on(devices: &HostDevices, memory_bytes: Option<u64>) -> Value {
        let mut inputs = Inputs::default().with_devices(Arc::new(devices.clone()));
        let mut program = Canary::start(&json!({}), &mut inputs).unwrap();
        let device = DeviceGrant {
            uuid: "GPU-host".to_owned(),
            memory_bytes,
        };
        let grant = Grant {
            device: Some(device),
            ..Grant::default()
        };
        program.configure(&grant).unwrap();
        let result = run(program, None);
        assert_eq!((devices.ledger().open, devices.ledger().held), (0, 0));
        result
    }

    fn run(mut program: Canary, flip_at: Option<usize>) -> Value {
        let mut cx = Capsule::default();
        let mut state = program.initial().unwrap();
        loop {
            match program.capsule(&mut state, &mut cx).unwrap() {
                Step::Boundary => {
                    let mut bytes = Vec::new();
                    state.encode(&mut bytes);
                    if flip_at == Some(state.found.len()) {
                        bytes[HEADER + 3] ^= 1;
                    }
                    state = CanaryState::decode(&bytes).unwrap();
                }
                Step::Complete { result } => {
                    program.let_go(false);
                    return result;
                }
            }
        }
    }

    #[test]
    fn the_suite_is_the_one_that_is_asked_for() {
        assert_eq!(SUITE, fiec_schemas::trust::SUITE);
    }

    #[test]
    fn this_machine_keeps_both_contracts_across_boundaries() {
        let judgement = judge(&computed(None)).unwrap();
        assert_eq!(judgement.cases as usize, canary::names().len());
        assert_eq!((judgement.not_bitwise, judgement.not_bounded), (None, None));
    }

    #[test]
    fn a_device_proves_the_same_bits_and_says_what_the_host_computed() {
        let devices = HostDevices::new(1 << 30);
        let judgement = judge(&computed_on(&devices, None)).unwrap();
        assert_eq!((judgement.not_bitwise, judgement.not_bounded), (None, None));
        assert_eq!(
            judgement.ran_on,
            "GPU-host (the host's memory); on the host: panels of lu-panel-ties, qr-panel; all of \
             dot, spmv"
        );
        assert_eq!(
            judgement.digest,
            judge(&computed(None)).unwrap().digest,
            "the host's bits"
        );
        assert!(devices.ledger().products > 0 && devices.ledger().iterations == 20);
    }

    #[test]
    fn a_device_that_computes_wrongly_loses_the_bitwise_contract() {
        let devices = HostDevices::new(1 << 30).computing_wrongly();
        let judgement = judge(&computed_on(&devices, None)).unwrap();
        let said = judgement.not_bitwise.unwrap();
        assert!(said.contains("gemm-511"), "{said}");
    }

    #[test]
    fn a_device_that_cannot_be_had_or_fails_gives_a_reason_and_no_digests() {
        let devices = HostDevices::new(1 << 20);
        for (memory, words) in [(Some(1 << 21), "granted 2097152"), (Some(512), "gemm-511")] {
            let result = computed_on(&devices, memory);
            let said = no_device(&result).unwrap();
            assert!(said.contains(words), "{said}");
            assert!(judge(&result).is_err(), "{result}");
        }
        assert_eq!(no_device(&computed(None)), None);
    }

    #[test]
    fn one_bit_of_one_case_costs_the_bitwise_contract_and_only_that() {
        let judgement = judge(&computed(Some(4))).unwrap();
        let said = judgement.not_bitwise.unwrap();
        assert!(said.contains("gemm-511"), "{said}");
        assert_eq!(judgement.not_bounded, None);
    }

    #[test]
    fn results_of_other_suites_and_with_missing_cases_are_refused() {
        let mut result = computed(None);
        result["suite"] = json!(SUITE + 1);
        assert!(judge(&result).unwrap_err().contains("suite"));
        let mut result = computed(None);
        result["cases"].as_array_mut().unwrap().pop();
        assert!(judge(&result).unwrap_err().contains("not those"));
        assert!(judge(&json!({"x": 1})).is_err());
    }

    #[test]
    fn bytes_that_are_no_state_are_refused() {
        for bytes in [&b""[..], b"FIECCAN1", b"FIECCAN1\x01\0\0\0\0\0\0\0short"] {
            assert!(CanaryState::decode(bytes).is_err());
        }
    }
}
