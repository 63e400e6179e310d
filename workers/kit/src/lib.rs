//! The program contract: the trait that a capsule program implements, and the frames between child
//! and agent.
//!
//! A program ([`Program`]) computes from one boundary to the next and encodes its state as bytes.
//! The run time owns the loop: [`child`] under an agent, [`local`] without any server. Both give
//! the same results. A program cannot distinguish them.

pub mod beneath;
pub mod child;
pub mod commit;
pub mod flips;
pub mod foreign;
pub mod frames;
pub mod launch;
pub mod local;
pub mod pages;
pub mod port;
pub mod program;
pub mod programs;
pub mod reserve;
pub mod room;
mod shares;
pub mod simulated;
pub mod start;
pub mod surroundings;
mod writer;

pub use child::{child_main, child_main_with};
pub use local::{LocalOutcome, run_local};
pub use pages::Pages;
pub use program::{Capsule, Fetch, Inputs, Program, ProgramError, Progress, State, Step};
pub use reserve::{Reserve, Reserved};
pub use surroundings::{Asked, GrantChange, Offer, Offers, Surroundings};
