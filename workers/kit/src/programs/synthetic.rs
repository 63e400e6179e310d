//! `synthetic@1`: declared work with a declared state, for tests and benches.
//!
//! σ: magic `FIECSYN1`, index `u64`, chain `u64` (little endian), then bytes up to the declared
//! size, of which 64 change with every capsule. The result's digest is over all of σ.

use std::time::{Duration, Instant};

use fiec_schemas::Digest;
use fiec_schemas::programs::SyntheticParams;
use serde_json::{Value, json};

use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};

const MAGIC: &[u8; 8] = b"FIECSYN1";
const HEADER: usize = 24;
const CHANGED: usize = 64;

/// The program.
pub struct Synthetic {
    params: SyntheticParams,
}

/// σ as its own bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntheticState {
    bytes: Vec<u8>,
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl SyntheticState {
    fn word(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.bytes[at..at + 8]);
        u64::from_le_bytes(word)
    }

    fn index(&self) -> u64 {
        self.word(8)
    }

    fn advance(&mut self) {
        let index = self.index() + 1;
        let chain = mix(self
            .word(16)
            .wrapping_add(index)
            .wrapping_add(0x9E37_79B9_7F4A_7C15));
        self.bytes[8..16].copy_from_slice(&index.to_le_bytes());
        self.bytes[16..24].copy_from_slice(&chain.to_le_bytes());
        let filling = &mut self.bytes[HEADER..];
        if !filling.is_empty() {
            let blocks = filling.len().div_ceil(CHANGED);
            let at = (index as usize % blocks) * CHANGED;
            let end = filling.len().min(at + CHANGED);
            for (byte, new) in filling[at..end]
                .iter_mut()
                .zip(chain.to_le_bytes().iter().cycle())
            {
                *byte ^= new;
            }
        }
    }
}

impl State for SyntheticState {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes);
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProgramError> {
        if bytes.len() < HEADER || &bytes[..8] != MAGIC {
            return Err(ProgramError::Permanent(
                "not a state of synthetic@1".to_owned(),
            ));
        }
        Ok(Self {
            bytes: bytes.to_vec(),
        })
    }
}

impl Synthetic {
    fn crash_if_due(&self, index: u64) {
        if self.params.crash_at != Some(index) {
            return;
        }
        if let Some(marker) = &self.params.crash_marker {
            if std::path::Path::new(marker).exists() {
                return;
            }
            if let Err(error) = std::fs::write(marker, "crashed once\n") {
                eprintln!("cannot write {marker}: {error}");
            }
        }
        eprintln!("synthetic: crashing at capsule {index}, as its parameters say");
        std::process::exit(1);
    }
}

impl Program for Synthetic {
    type State = SyntheticState;

    fn start(params: &Value, _: &mut Inputs) -> Result<Self, ProgramError> {
        let params = SyntheticParams::from_value(params).map_err(ProgramError::permanent)?;
        Ok(Self { params })
    }

    fn initial(&mut self) -> Result<SyntheticState, ProgramError> {
        let size = usize::try_from(self.params.state_bytes).map_err(ProgramError::permanent)?;
        let mut bytes = vec![0u8; size.max(HEADER)];
        bytes[..8].copy_from_slice(MAGIC);
        for (block, chunk) in bytes[HEADER..].chunks_mut(8).enumerate() {
            let word = mix(block as u64 + 1).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        Ok(SyntheticState { bytes })
    }

    fn capsule(
        &mut self,
        state: &mut SyntheticState,
        _: &mut Capsule,
    ) -> Result<Step, ProgramError> {
        let index = state.index();
        self.crash_if_due(index);
        if index < self.params.capsules {
            if self.params.work_us > 0 {
                let (start, work) = (Instant::now(), Duration::from_micros(self.params.work_us));
                while start.elapsed() < work {
                    std::hint::spin_loop();
                }
            }
            state.advance();
            if self.params.print {
                println!("boundary {}", state.index());
            }
        }
        if state.index() < self.params.capsules {
            return Ok(Step::Boundary);
        }
        Ok(Step::Complete {
            result: json!({ "digest": Digest::of(&state.bytes), "capsules": state.index() }),
        })
    }

    fn progress(&self, _: &SyntheticState) -> Progress {
        Progress {
            of: Some(self.params.capsules),
            note: None,
        }
    }
}
