//! The devices of triggers 2 and 3: real ones if there is one per node, else an emulated budget.
//! The report states which, and why.

use std::sync::Arc;

use clap::ValueEnum;
use fiec_cuda::Found;

use super::emulated;

/// `--devices`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// Real devices if there is one for each node, else emulated ones
    #[default]
    Auto,
    /// Real devices; if there are too few, exit code 5
    Real,
    /// Emulated devices, even if there are real ones
    Emulated,
}

/// The devices of the nodes.
#[derive(Debug, Clone)]
pub(super) enum Devices {
    /// Budgets in host memory.
    Emulated {
        /// The reason against real ones.
        why: String,
    },
    /// One device per node, in their order.
    Real(Arc<[Found]>),
}

/// Chooses devices for `nodes` nodes. `found`: the driver's devices, or the reason for none.
///
/// # Errors
/// The reason why there are no real devices, if real ones are required.
pub(super) fn choose(
    choice: Choice,
    nodes: usize,
    found: impl FnOnce() -> Result<Vec<Found>, String>,
) -> Result<Devices, String> {
    if choice == Choice::Emulated {
        let why = "so it was asked for".to_owned();
        return Ok(Devices::Emulated { why });
    }
    let why = match found() {
        Ok(all) if all.len() >= nodes => {
            return Ok(Devices::Real(all.into_iter().take(nodes).collect()));
        }
        Ok(all) => format!(
            "the driver shows {} here, and each of the {nodes} nodes needs one of its own, since \
             pressure on one device is pressure on all who share it (MIG slices do not count yet: a \
             process is shown one of them at most)",
            all.len()
        ),
        Err(why) => why,
    };
    match choice {
        Choice::Real => Err(why),
        Choice::Auto | Choice::Emulated => Ok(Devices::Emulated { why }),
    }
}

/// The same, with this machine's driver.
///
/// # Errors
/// See [`choose`].
pub(super) fn here(choice: Choice, nodes: usize) -> Result<Devices, String> {
    choose(choice, nodes, || {
        fiec_cuda::list().map_err(|error| error.to_string())
    })
}

impl Devices {
    /// The device of a node, from 0. None if emulated.
    pub fn of(&self, node: usize) -> Option<&Found> {
        match self {
            Self::Real(all) => all.get(node),
            Self::Emulated { .. } => None,
        }
    }

    /// Memory of the smallest device, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        match self {
            Self::Real(all) => all.iter().map(|d| d.memory_bytes).min().unwrap_or(0),
            Self::Emulated { .. } => emulated::MEMORY_BYTES,
        }
    }

    /// A description for the report.
    pub fn note(&self) -> String {
        match self {
            Self::Real(all) => {
                let each = |d: &Found| format!("{} ({} bytes, {})", d.name, d.memory_bytes, d.uuid);
                let all: Vec<String> = all.iter().map(each).collect();
                format!(
                    "Devices are real, one for each node: {}. The load takes their memory through \
                     the driver, and what they read is NVML's.",
                    all.join(", ")
                )
            }
            Self::Emulated { why } => format!(
                "Devices are emulated ({why}): the programs compute on the kernels' device in the \
                 host's memory with the budget of their grant, and a file says what the device's \
                 memory reads."
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(count: usize) -> Vec<Found> {
        let one = |n| Found {
            ordinal: n,
            uuid: format!("GPU-{n}"),
            name: "A device".to_owned(),
            memory_bytes: 40_000_000_000 + n as u64,
            capability: (9, 0),
            multiprocessors: 100,
            clock_khz: 0,
            driver: 13_000,
        };
        (0..count as i32).map(one).collect()
    }

    #[test]
    fn real_devices_are_taken_where_there_is_one_for_each_node() {
        let Devices::Real(all) = choose(Choice::Auto, 2, || Ok(found(3))).unwrap() else {
            panic!("there are enough");
        };
        assert_eq!(all.len(), 2);
        let real = Devices::Real(all);
        assert_eq!(real.memory_bytes(), 40_000_000_000);
        assert_eq!(real.of(1).unwrap().uuid, "GPU-1");
        assert!(real.note().contains("real") && real.note().contains("GPU-0"));
    }

    #[test]
    fn otherwise_they_are_emulated_and_the_note_says_why() {
        for (choice, all, word) in [
            (Choice::Auto, Ok(found(1)), "shows 1 here"),
            (Choice::Auto, Err("no driver".to_owned()), "no driver"),
            (Choice::Emulated, Ok(found(9)), "asked for"),
        ] {
            let devices = choose(choice, 2, || all).unwrap();
            assert!(devices.of(0).is_none());
            assert_eq!(devices.memory_bytes(), emulated::MEMORY_BYTES);
            let note = devices.note();
            assert!(note.contains("emulated") && note.contains(word), "{note}");
        }
    }

    #[test]
    fn whoever_wants_real_ones_or_nothing_is_told_why_there_are_none() {
        let why = choose(Choice::Real, 2, || Err("no driver".to_owned())).unwrap_err();
        assert_eq!(why, "no driver");
        assert!(choose(Choice::Real, 2, || Ok(found(1))).is_err());
        assert!(choose(Choice::Real, 2, || Ok(found(2))).is_ok());
    }
}
