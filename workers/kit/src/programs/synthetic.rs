//! `synthetic@1`: declared work with a declared state, for tests and benches.
//!
//! σ: magic `FIECSYN1`, index `u64`, chain `u64` (little endian), then bytes up to the declared
//! size. Each capsule changes 64 of them, or as many as `change` says. The result's digest covers
//! all of σ. With `page_bytes` the magic is FIECSYN2, and the digests of pages replace the bytes
//! (see [`crate::Pages`]). Each capsule then touches one page.

use std::time::{Duration, Instant};

use fiec_schemas::Digest;
use fiec_schemas::package::Grant;
use fiec_schemas::programs::{SYNTHETIC_HEADER, SyntheticChange, SyntheticParams};
use serde_json::{Value, json};

use crate::pages::Pages;
use crate::program::{Capsule, Inputs, Program, ProgramError, Progress, State, Step};
use crate::reserve::{Reserve, Reserved};
use crate::surroundings::{Asked, GrantChange};

const MAGIC: &[u8; 8] = b"FIECSYN1";
const MAGIC_PAGED: &[u8; 8] = b"FIECSYN2";
const HEADER: usize = SYNTHETIC_HEADER as usize;
const CHANGED: usize = 64;
/// Prefix of the outputs of its pages.
const PAGES: &str = "filling";

/// The program.
pub struct Synthetic {
    params: SyntheticParams,
    /// The answer to its request for more memory.
    reserved: Option<Reserved>,
    /// The answers about its surroundings and to its grant change.
    told: Option<String>,
}

/// σ in its encoded form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntheticState {
    bytes: Vec<u8>,
    /// The bytes after the header, if they are in pages.
    pages: Option<Pages>,
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

    /// Changes this many bytes, at places that the chain determines.
    fn change(&mut self, change: &SyntheticChange, chain: u64) {
        let filling = &mut self.bytes[HEADER..];
        let places = u64::from(change.places).max(1);
        let length = (change.bytes / places) as usize;
        if length == 0 || length > filling.len() {
            return;
        }
        for place in 0..places {
            let seed = mix(chain.wrapping_add(place));
            let at = (seed % (filling.len() - length + 1) as u64) as usize;
            if change.insert {
                filling.copy_within(at..filling.len() - length, at + length);
            }
            for (word, chunk) in filling[at..at + length].chunks_mut(8).enumerate() {
                let new = mix(seed.wrapping_add(word as u64 + 1)).to_le_bytes();
                chunk.copy_from_slice(&new[..chunk.len()]);
            }
        }
    }

    fn advance(
        &mut self,
        change: Option<&SyntheticChange>,
        cx: &mut Capsule,
    ) -> Result<(), ProgramError> {
        let index = self.index() + 1;
        let chain = mix(self
            .word(16)
            .wrapping_add(index)
            .wrapping_add(0x9E37_79B9_7F4A_7C15));
        self.bytes[8..16].copy_from_slice(&index.to_le_bytes());
        self.bytes[16..24].copy_from_slice(&chain.to_le_bytes());
        if let Some(change) = change {
            self.change(change, chain);
            return Ok(());
        }
        let length = match &self.pages {
            Some(pages) => pages.len(),
            None => self.bytes.len() - HEADER,
        };
        if length == 0 {
            return Ok(());
        }
        let blocks = length.div_ceil(CHANGED);
        let at = (index as usize % blocks) * CHANGED;
        let changed = match &mut self.pages {
            // A page has whole blocks.
            Some(pages) => {
                let (page, offset) = (at / pages.page_bytes(), at % pages.page_bytes());
                let page = pages.page_mut(page, cx)?;
                let end = page.len().min(offset + CHANGED);
                &mut page[offset..end]
            }
            None => {
                let filling = &mut self.bytes[HEADER..];
                let end = filling.len().min(at + CHANGED);
                &mut filling[at..end]
            }
        };
        for (byte, new) in changed.iter_mut().zip(chain.to_le_bytes().iter().cycle()) {
            *byte ^= new;
        }
        Ok(())
    }

    fn digest(&self) -> Digest {
        if self.pages.is_none() {
            return Digest::of(&self.bytes);
        }
        let mut out = Vec::new();
        self.encode(&mut out);
        Digest::of(&out)
    }
}

impl State for SyntheticState {
    fn settle(&mut self, cx: &mut Capsule) -> Result<(), ProgramError> {
        if let Some(pages) = &mut self.pages {
            pages.settle(cx);
        }
        Ok(())
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.bytes);
        if let Some(pages) = &self.pages {
            pages.encode(out);
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, ProgramError> {
        if bytes.len() > HEADER && &bytes[..8] == MAGIC_PAGED {
            let (header, mut rest) = bytes.split_at(HEADER);
            return Ok(Self {
                bytes: header.to_vec(),
                pages: Some(Pages::decode(PAGES, &mut rest)?),
            });
        }
        if bytes.len() < HEADER || &bytes[..8] != MAGIC {
            return Err(ProgramError::Permanent(
                "not a state of synthetic@1".to_owned(),
            ));
        }
        Ok(Self {
            bytes: bytes.to_vec(),
            pages: None,
        })
    }
}

impl Synthetic {
    /// Takes the time of one capsule.
    fn work(&self) {
        let work = Duration::from_micros(self.params.work_us);
        let start = Instant::now();
        while start.elapsed() < work {
            std::hint::spin_loop();
        }
        if self.params.rest_us > 0 {
            std::thread::sleep(Duration::from_micros(self.params.rest_us));
        }
    }

    fn crash_if_due(&self, index: u64, crashes: u64) {
        let is_over = self.params.crash_attempts.is_some_and(|n| crashes >= n);
        if self.params.crash_at != Some(index) || is_over {
            return;
        }
        eprintln!("synthetic: crashing at capsule {index}, as its parameters say");
        std::process::exit(1);
    }
}

impl Synthetic {
    fn ask_if_due(&mut self, index: u64, cx: &mut Capsule) -> Result<(), ProgramError> {
        let Some(wish) = &self.params.reserve else {
            return Ok(());
        };
        if index < wish.at || self.reserved.is_some() {
            return Ok(());
        }
        self.reserved = Some(cx.reserve(Reserve {
            memory_bytes: wish.memory_bytes,
            device_memory_bytes: wish.device_memory_bytes,
        })?);
        Ok(())
    }
}

impl Synthetic {
    fn look_if_due(&mut self, index: u64, cx: &mut Capsule) -> Result<(), ProgramError> {
        let Some(ask) = self.params.ask else {
            return Ok(());
        };
        if index == 0 || !index.is_multiple_of(ask.every.max(1)) {
            return Ok(());
        }
        let around = cx.surroundings()?;
        let asked = cx.ask(GrantChange::threads(ask.threads))?;
        self.told = Some(format!(
            "vector: {}; offers: {}; {} threads: {}",
            match &around.vector {
                Some(vector) => vector.node.as_str(),
                None => "unknown",
            },
            match &around.offers {
                Some(offers) => format!("{} slots", offers.free_slots()),
                None => "unknown".to_owned(),
            },
            ask.threads,
            match asked {
                Asked::Granted { .. } => "granted",
                Asked::Refused { .. } => "refused",
            }
        ));
        Ok(())
    }
}

impl Program for Synthetic {
    type State = SyntheticState;

    fn start(params: &Value, _: &mut Inputs) -> Result<Self, ProgramError> {
        let params = SyntheticParams::from_value(params).map_err(ProgramError::permanent)?;
        Ok(Self {
            params,
            reserved: None,
            told: None,
        })
    }

    fn initial(&mut self) -> Result<SyntheticState, ProgramError> {
        let size = usize::try_from(self.params.state_bytes).map_err(ProgramError::permanent)?;
        let mut bytes = vec![0u8; size.max(HEADER)];
        bytes[..8].copy_from_slice(MAGIC);
        for (block, chunk) in bytes[HEADER..].chunks_mut(8).enumerate() {
            let word = mix(block as u64 + 1).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        let page_bytes = usize::try_from(self.params.page_bytes).unwrap_or(usize::MAX);
        let pages = (page_bytes > 0).then(|| {
            let pages = Pages::new(PAGES, &bytes[HEADER..], page_bytes);
            bytes.truncate(HEADER);
            bytes[..8].copy_from_slice(MAGIC_PAGED);
            pages
        });
        Ok(SyntheticState { bytes, pages })
    }

    fn capsule(
        &mut self,
        state: &mut SyntheticState,
        cx: &mut Capsule,
    ) -> Result<Step, ProgramError> {
        let index = state.index();
        self.crash_if_due(index, cx.crashes);
        self.ask_if_due(index, cx)?;
        self.look_if_due(index, cx)?;
        if index < self.params.capsules {
            self.work();
            state.advance(self.params.change.as_ref(), cx)?;
            let every = self.params.emit_every;
            if every > 0 && state.index().is_multiple_of(every) {
                cx.emit("tick", state.index().to_string().as_bytes())?;
            }
            if self.params.print {
                println!("boundary {}", state.index());
            }
        }
        if state.index() < self.params.capsules {
            return Ok(Step::Boundary);
        }
        Ok(Step::Complete {
            result: json!({ "digest": state.digest(), "capsules": state.index() }),
        })
    }

    fn configure(&mut self, _: &Grant) -> Result<(), ProgramError> {
        // Under another grant, or in another run, the answer may differ.
        self.reserved = None;
        Ok(())
    }

    fn progress(&self, _: &SyntheticState) -> Progress {
        Progress {
            of: Some(self.params.capsules),
            note: self
                .reserved
                .as_ref()
                .map(|answer| match answer {
                    Reserved::Granted { .. } => "reserve: granted".to_owned(),
                    Reserved::Moves { .. } => "reserve: moves".to_owned(),
                    Reserved::Refused { .. } => "reserve: refused".to_owned(),
                })
                .or_else(|| self.told.clone()),
        }
    }

    fn let_go(&mut self, _: bool) {
        self.told = None;
    }
}
