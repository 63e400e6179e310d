//! `canary@1`: the canaries of `fiec_kernels::canary`, one capsule a case, and what their results
//! mean for the numeric contracts.
//!
//! σ: magic `FIECCAN1`, number of cases `u64`, then of each case that was computed the digest
//! (32 bytes) and the error over its bound (`f64`, NaN where there is no result). Little endian.

pub use fiec_kernels::canary::SUITE;
use fiec_kernels::canary::{self, Found};
use fiec_kernels::engine::Engine;
use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::CanaryParams;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECCAN1";
const HEADER: usize = 16;
const ENTRY: usize = 40;
/// Threads at most: the kernels' bits do not depend on them, and that is what is to be shown.
const THREADS: u32 = 4;

/// The program.
pub struct Canary {
    engine: Engine,
}

/// σ: digest and error of the cases so far.
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

    fn start(params: &Value, _: &mut Inputs) -> Result<Self, ProgramError> {
        CanaryParams::from_value(params).map_err(ProgramError::permanent)?;
        Ok(Self {
            engine: Engine::default(),
        })
    }

    fn initial(&mut self) -> Result<CanaryState, ProgramError> {
        Ok(CanaryState::default())
    }

    fn capsule(&mut self, state: &mut CanaryState, _: &mut Capsule) -> Result<Step, ProgramError> {
        if let Some(found) = canary::run(state.found.len(), &mut self.engine) {
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
            result: json!({ "suite": SUITE, "ran_on": "cpu", "cases": cases }),
        })
    }

    fn progress(&self, _: &CanaryState) -> Progress {
        Progress {
            of: Some(canary::names().len() as u64),
            note: None,
        }
    }

    fn configure(&mut self, grant: &Grant) -> Result<(), ProgramError> {
        let threads = grant.threads.unwrap_or(1).clamp(1, THREADS) as usize;
        if threads != self.engine.threads() {
            self.engine = Engine::new(threads).map_err(ProgramError::transient)?;
        }
        Ok(())
    }
}

/// A case in the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Case {
    name: String,
    digest: Digest,
    /// Error over its bound; none where it is no number.
    error: Option<f64>,
}

/// A result of `canary@1`.
#[derive(Debug, Deserialize)]
struct Results {
    suite: u32,
    ran_on: String,
    cases: Vec<Case>,
}

/// What the canaries say of a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    /// Version of the suite.
    pub suite: u32,
    /// What computed it.
    pub ran_on: String,
    /// Cases that were computed.
    pub cases: u32,
    /// Digest over names and digests of all cases.
    pub digest: Digest,
    /// The case that broke the bitwise contract, in words.
    pub not_bitwise: Option<String>,
    /// The case that broke the bounded contract, in words.
    pub not_bounded: Option<String>,
}

/// Judges a result of `canary@1` by the golden digests and the bounds that this process knows.
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

    fn computed(flip_at: Option<usize>) -> Value {
        let mut program = Canary::start(&json!({}), &mut Inputs::default()).unwrap();
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
                Step::Complete { result } => return result,
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
