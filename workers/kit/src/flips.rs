//! Deliberate corruption, for tests of verification. The environment variable `FIEC_TEST_BIT_FLIPS`
//! makes a child flip one bit of σ at boundaries.
//!
//! * `after:N`: at every boundary after the first N of this process;
//! * `file:PATH`: at every boundary while that file exists, so that a test can start the corruption
//!   at a certain moment.
//!
//! Never set it where results matter. The child prints a notice when it flips its first bit.

use std::path::PathBuf;

use crate::program::{Capsule, ProgramError};
use crate::programs::Instance;

/// The variable.
pub const BIT_FLIPS_ENV: &str = "FIEC_TEST_BIT_FLIPS";

#[derive(Debug, Clone, PartialEq, Eq)]
enum When {
    After(u64),
    While(PathBuf),
}

/// Flips bits.
#[derive(Debug)]
pub(crate) struct Flips {
    when: When,
    crossed: u64,
    flipped: u64,
}

impl Flips {
    /// Reads the environment. Returns none if the variable is not set.
    pub(crate) fn from_env() -> Option<Self> {
        let text = std::env::var(BIT_FLIPS_ENV).ok()?;
        let flips = Self::parse(&text);
        if flips.is_none() {
            eprintln!("fiec child: {BIT_FLIPS_ENV}={text} is neither after:N nor file:PATH");
        }
        flips
    }

    fn parse(text: &str) -> Option<Self> {
        let when = match text.split_once(':')? {
            ("after", n) => When::After(n.parse().ok()?),
            ("file", path) if !path.is_empty() => When::While(path.into()),
            _ => return None,
        };
        Some(Self {
            when,
            crossed: 0,
            flipped: 0,
        })
    }

    fn is_due(&self) -> bool {
        match &self.when {
            When::After(n) => self.crossed > *n,
            When::While(path) => path.exists(),
        }
    }

    /// Flips a low bit near the middle of σ at a boundary, a different one each time, and resumes
    /// the program from it.
    pub(crate) fn boundary(
        &mut self,
        instance: &mut dyn Instance,
        cx: &mut Capsule,
    ) -> Result<(), ProgramError> {
        self.crossed += 1;
        if !self.is_due() {
            return Ok(());
        }
        let mut state = Vec::new();
        instance.encode(&mut state, cx)?;
        if state.is_empty() {
            return Ok(());
        }
        // The third byte of a little-endian f64 is far below its leading digits.
        let words = state.len() / 8;
        let word = (words / 2 + self.flipped as usize % (words / 4 + 1)).min(words);
        let at = (word * 8 + 2).min(state.len() - 1);
        state[at] ^= 1;
        instance.resume(Some(&state))?;
        if self.flipped == 0 {
            eprintln!("fiec child: {BIT_FLIPS_ENV} is set: a bit of the state was flipped");
        }
        self.flipped += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Inputs;
    use crate::programs;
    use serde_json::json;

    #[test]
    fn only_the_two_forms_are_understood() {
        let when = |text| Flips::parse(text).map(|f| f.when);
        assert_eq!(when("after:3"), Some(When::After(3)));
        assert_eq!(when("file:/x"), Some(When::While("/x".into())));
        for text in ["", "3", "after:", "after:x", "file:", "other:1"] {
            assert_eq!(when(text), None, "{text}");
        }
    }

    #[test]
    fn one_bit_changes_at_each_boundary_after_the_declared_number() {
        let params = json!({"capsules": 9, "state_bytes": 512});
        let mut inputs = Inputs::default();
        let mut instance = programs::start("synthetic@1", None, &params, &mut inputs).unwrap();
        instance.resume(None).unwrap();
        let mut flips = Flips::parse("after:2").unwrap();
        let mut cx = Capsule::default();
        for crossed in 1..=5 {
            let (mut before, mut after) = (Vec::new(), Vec::new());
            instance.encode(&mut before, &mut cx).unwrap();
            flips.boundary(instance.as_mut(), &mut cx).unwrap();
            instance.encode(&mut after, &mut cx).unwrap();
            let bits: u32 = before
                .iter()
                .zip(&after)
                .map(|(a, b)| (a ^ b).count_ones())
                .sum();
            assert_eq!(bits, u32::from(crossed > 2), "boundary {crossed}");
        }
    }
}
