//! The reasons against a place, in words, and their remedies.

use fiec_schemas::machine::Unmet;
use fiec_schemas::messages::Remedy;
use fiec_schemas::package::is_built_in;
use fiec_schemas::scheduling::Adjustment;
use fiec_schemas::substrate::ComputeCapability;
use fiec_schemas::{Contract, ExecutionId, NodeId, StartError, Timestamp};

use crate::lifecycle::cluster::Node;
use crate::lifecycle::cluster::places::NoRoom;
use crate::lifecycle::cluster::starts::Against;
use crate::lifecycle::cluster::trust::Standing;
use crate::lifecycle::cluster::watch::Watched;
use crate::time::Millis;

/// Most nodes that an explanation names.
pub(crate) const NAMES: usize = 12;

/// What operators changed about an execution. An explanation tells their restrictions of its nodes
/// apart from those of the submission, and names the command that lifts them.
#[derive(Debug, Clone, Copy)]
pub struct Operators<'a> {
    /// The execution.
    pub execution: ExecutionId,
    /// The changes in force.
    pub change: &'a Adjustment,
}

impl Operators<'_> {
    /// Why a place was not taken, if operators rule it out.
    pub(super) fn in_words(self, reason: Reason<'_>) -> Option<String> {
        let (pinned, excluded) = (&self.change.nodes, &self.change.exclude);
        match (reason, pinned, excluded) {
            (Reason::NotNamed(_), Some(nodes), _) if !nodes.is_empty() => Some(format!(
                "it is pinned to {} (`fiec unpin`)",
                in_a_row(nodes)
            )),
            (Reason::Excluded, _, Some(nodes)) if !nodes.is_empty() => {
                Some("an operator has excluded it (`fiec unpin`)".to_owned())
            }
            _ => None,
        }
    }

    /// The command that lifts the restrictions.
    pub(super) fn remedy(self) -> String {
        format!("`fiec unpin {}`", self.execution)
    }
}

/// The first of these nodes, for people.
pub(super) fn in_a_row(nodes: &[NodeId]) -> String {
    let names: Vec<_> = nodes.iter().take(NAMES).map(NodeId::as_str).collect();
    names.join(", ")
}

/// A reason against a place.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reason<'a> {
    Unknown,
    Lost {
        silent_ms: u64,
    },
    NoVector,
    Stale {
        age_ms: u64,
    },
    Cordoned,
    Draining,
    Revoked {
        at: Timestamp,
    },
    Program {
        wanted: &'a str,
        offered: &'a [String],
    },
    NoContainers {
        wanted: &'a str,
    },
    CannotStart {
        program: &'a str,
        against: Against<'a>,
    },
    NotNamed(&'a [NodeId]),
    Excluded,
    /// There is enough, but the current envelope offers less.
    Offered {
        offered: u64,
        has: u64,
        needs: u64,
        device: bool,
    },
    Memory {
        has: u64,
        needs: u64,
    },
    FreeMemory {
        free: Option<u64>,
        needs: u64,
        device: bool,
    },
    Cores {
        has: u32,
        needs: u32,
    },
    Bandwidth {
        has: Option<u64>,
        needs: u64,
    },
    Machine(Unmet<'a>),
    Label {
        key: &'a str,
        value: &'a str,
    },
    NoDevice,
    DeviceGone,
    DeviceKind {
        name: &'a str,
        pattern: &'a str,
    },
    DeviceCapability {
        has: Option<ComputeCapability>,
        needs: ComputeCapability,
    },
    DeviceUnits {
        has: Option<u32>,
        needs: u32,
    },
    DeviceMemory {
        has: Option<u64>,
        needs: u64,
    },
    DeviceCopies {
        has: Option<u64>,
        needs: u64,
    },
    Contract {
        wanted: Contract,
        standing: Standing<'a>,
    },
    DeviceContract {
        wanted: Contract,
    },
    Unmeasured(&'a Watched),
    Pressing(&'a Watched),
    Left(&'a Watched),
    Refused,
    Suspect,
    Leaving,
    NotWanted,
    /// Reserved for the leading gang.
    Kept,
    Full {
        held: u32,
        limit: u32,
    },
    DeviceFull(NoRoom),
}

/// What would let a node start a command.
fn would_start(command: &str, error: StartError, node: &NodeId) -> String {
    match error {
        StartError::NotFound => format!("{command} where the worker on {node} runs"),
        StartError::NotExecutable | StartError::NoFormat => {
            format!("a {command} that the worker on {node} may execute")
        }
        StartError::NoProcesses => {
            format!(
                "more processes for the worker on {node} (`ulimit -u`, or a limit of its group)"
            )
        }
        StartError::NoFiles => {
            format!("more open files for the worker on {node} (`ulimit -n`)")
        }
        StartError::NoMemory => format!("free memory on {node}"),
        StartError::NoSpace => format!("space on the disk of the worker on {node}"),
        StartError::Other => format!("the worker on {node} starting {command}"),
    }
}

fn or_not(has: Option<impl ToString>, unit: &str) -> String {
    has.map_or_else(
        || "not known".to_owned(),
        |n| format!("{}{unit}", n.to_string()),
    )
}

impl Reason<'_> {
    pub(super) fn in_words(self, node: &Node, now: Millis) -> String {
        match self {
            Reason::Unknown => "it has not joined".to_owned(),
            Reason::Lost { silent_ms } => format!("it has been silent for {silent_ms} ms"),
            Reason::NoVector => "it has sent no hardware vector yet".to_owned(),
            Reason::Stale { age_ms } => format!("its hardware vector is {age_ms} ms old"),
            Reason::Cordoned => format!("it was cordoned by {}", node.flags.who),
            Reason::Draining => "it is draining".to_owned(),
            Reason::Revoked { at } => {
                format!("it ends at {at}, announced by {}", node.flags.who)
            }
            Reason::Program { wanted, offered } => format!(
                "it does not offer {wanted} (its worker runs {})",
                offered.join(", ")
            ),
            Reason::NoContainers { wanted } => format!(
                "{wanted} runs in a container, and its worker finds neither podman nor docker"
            ),
            Reason::CannotStart { program, against } => match against {
                Against::Program(failing) => {
                    format!("it cannot start {program}: {}", failing.in_words(now))
                }
                Against::Node(failing) => {
                    format!(
                        "it cannot start several programs: {}",
                        failing.in_words(now)
                    )
                }
            },
            Reason::Offered {
                offered,
                has,
                needs,
                device,
            } => format!(
                "its envelope offers {offered} of the {has} bytes of {} at the moment, {needs} are \
                 required",
                if device {
                    "the device's memory"
                } else {
                    "its memory"
                }
            ),
            Reason::NotNamed(nodes) => {
                format!(
                    "it must be on {} (`requires.nodes` or a pin)",
                    in_a_row(nodes)
                )
            }
            Reason::Excluded => "it is excluded (`requires.exclude` or `fiec exclude`)".to_owned(),
            Reason::Memory { has, needs } => {
                format!("its memory limit is {has} bytes, {needs} are required")
            }
            Reason::FreeMemory {
                free,
                needs,
                device,
            } => {
                let whose = if device { "the device" } else { "the node" };
                let free = or_not(free, " bytes");
                format!("{whose} has {free} of free memory, {needs} are required")
            }
            Reason::Cores { has, needs } => {
                format!("it has {has} logical processors, {needs} are required")
            }
            Reason::Bandwidth { has, needs } => format!(
                "its memory bandwidth is {}, {needs} bytes/s are required",
                or_not(has, " bytes/s")
            ),
            Reason::Machine(unmet) => unmet.to_string(),
            Reason::Label { key, value } => format!("label {key} is not {value}"),
            Reason::NoDevice => "it has no device, and one is required".to_owned(),
            Reason::DeviceGone => "the device is gone".to_owned(),
            Reason::DeviceKind { name, pattern } => {
                format!("the device is {name:?}, {pattern:?} is required")
            }
            Reason::DeviceCapability { has, needs } => format!(
                "the device's compute capability is {}, {needs} is required",
                or_not(has, "")
            ),
            Reason::DeviceUnits { has, needs } => format!(
                "the device's number of multiprocessors is {}, {needs} are required",
                or_not(has, "")
            ),
            Reason::DeviceMemory { has, needs } => format!(
                "the device's memory is {}, {needs} bytes are required",
                or_not(has, " bytes")
            ),
            Reason::DeviceCopies { has, needs } => format!(
                "the device's copy bandwidth is {}, {needs} bytes/s are required",
                or_not(has, " bytes/s")
            ),
            Reason::Contract { wanted, standing } => standing.in_words(wanted),
            Reason::DeviceContract { wanted } => {
                format!("the device does not offer the {} contract", wanted.as_str())
            }
            Reason::Unmeasured(w) => {
                format!(
                    "{} has a threshold in the submission and is not measured here",
                    w.signal
                )
            }
            Reason::Pressing(w) => w.in_words(now),
            Reason::Left(w) => w.unrecovered_in_words(now),
            Reason::Refused => "it has just refused this execution".to_owned(),
            Reason::Suspect => {
                "another execution under which workers end is there, and the two are kept apart"
                    .to_owned()
            }
            Reason::Leaving => "it is the node to leave".to_owned(),
            Reason::NotWanted => "another node was asked for".to_owned(),
            Reason::Kept => {
                "its free slots are reserved for a gang that has waited longer".to_owned()
            }
            Reason::Full { held, limit } => {
                format!("it is full ({held} bound, room for {limit})")
            }
            Reason::DeviceFull(NoRoom::Taken) => {
                "another execution has the device to itself".to_owned()
            }
            Reason::DeviceFull(NoRoom::Shared { by }) => {
                format!("{by} executions share the device, and this one wants it to itself")
            }
            Reason::DeviceFull(NoRoom::Memory { free, needs }) => {
                format!("the budgets on the device leave {free} bytes, {needs} are wanted")
            }
        }
    }

    /// True if the place lacks only capacity.
    pub(super) fn is_only_full(self) -> bool {
        matches!(self, Reason::Full { .. } | Reason::DeviceFull(_))
    }

    /// True if the place would have to be another one: neither time nor an operator lifts it.
    pub(super) fn is_lasting(self) -> bool {
        matches!(self, Reason::NoDevice) || self.is_of_submission()
    }

    /// True if only other requirements in the submission lift it.
    pub(super) fn is_of_submission(self) -> bool {
        matches!(
            self,
            Reason::NotNamed(_)
                | Reason::Excluded
                | Reason::Memory { .. }
                | Reason::Cores { .. }
                | Reason::Bandwidth { .. }
                | Reason::Machine(_)
                | Reason::DeviceKind { .. }
                | Reason::DeviceCapability { .. }
                | Reason::DeviceUnits { .. }
                | Reason::DeviceMemory { .. }
                | Reason::DeviceCopies { .. }
                | Reason::Label { .. }
        )
    }

    /// The request that lifts it, if there is one.
    pub(super) fn request(self, node: &Node) -> Option<Remedy> {
        let is_set_by_person = !node.flags.who.is_empty();
        let node = node.id.clone();
        match self {
            Reason::Cordoned if is_set_by_person => Some(Remedy::Uncordon { node }),
            Reason::Draining if is_set_by_person => Some(Remedy::Undrain { node }),
            Reason::Revoked { .. } => Some(Remedy::Undrain { node }),
            _ => None,
        }
    }

    pub(super) fn remedy(self, node: &Node) -> Option<String> {
        let id = &node.id;
        Some(match self {
            Reason::Lost { .. } | Reason::Stale { .. } | Reason::NoVector => {
                format!("the worker on {id} answering again")
            }
            Reason::Revoked { .. } => {
                format!("`fiec undrain {id}`, should it stay, or another node joining")
            }
            Reason::Cordoned | Reason::Draining if !node.flags.who.is_empty() => {
                format!("`fiec uncordon {id}`")
            }
            Reason::Pressing(w) | Reason::Left(w) => {
                let of = w.device.as_deref().map(|d| format!(" of {d}"));
                format!(
                    "{}{} on {id} below {:.1} % for {} ms",
                    w.signal,
                    of.unwrap_or_default(),
                    w.threshold.low * 100.0,
                    w.threshold.dwell_ms
                )
            }
            Reason::Full { .. } => format!("something on {id} completing, or more slots there"),
            Reason::DeviceFull(NoRoom::Shared { .. } | NoRoom::Memory { .. }) => {
                format!("something on a device of {id} completing, or a smaller `share_bytes`")
            }
            Reason::DeviceFull(NoRoom::Taken) => {
                format!("something on a device of {id} completing")
            }
            Reason::FreeMemory { needs, .. } => {
                format!("{needs} bytes of memory becoming free on {id}")
            }
            Reason::Program { wanted, .. } if is_built_in(wanted) => {
                format!("a worker on {id} of a version that has {wanted}")
            }
            Reason::Program { wanted, .. } => {
                format!("a worker on {id} with `--allow-program {wanted}`")
            }
            Reason::NoContainers { .. } => {
                format!("podman or docker where the worker on {id} runs")
            }
            Reason::CannotStart { against, .. } => {
                let (Against::Program(failing) | Against::Node(failing)) = against;
                would_start(failing.command(), failing.error(), id)
            }
            Reason::Offered { .. } => {
                format!("a wider envelope on {id} (`fiec node envelope {id}` shows it)")
            }
            Reason::NoDevice => format!(
                "a node with a device joining, or no `requires.device` in the submission ({id} has none)"
            ),
            _ => return None,
        })
    }
}
