//! FIEC's one command, as a library so that tests drive the very code that operators run.
//!
//! The binary depends on every other crate; no other crate depends on it.

/// In place of the standard ones in all of this crate: see [`terminal`].
macro_rules! println {
    ($($text:tt)*) => {
        ::std::println!("{}", $crate::terminal::safe(&::std::format!($($text)*)))
    };
}
macro_rules! print {
    ($($text:tt)*) => {
        ::std::print!("{}", $crate::terminal::safe(&::std::format!($($text)*)))
    };
}
macro_rules! eprintln {
    ($($text:tt)*) => {
        ::std::eprintln!("{}", $crate::terminal::safe(&::std::format!($($text)*)))
    };
}

pub mod bench;
pub mod cli;
pub mod client;
pub mod cluster;
pub mod commands;
pub mod context;
pub mod demo;
pub mod exit;
pub mod experiment;
pub mod local;
pub mod node_keys;
pub mod package;
pub mod pressure;
pub mod process;
pub mod sql;
pub mod terminal;
pub mod transfer;
pub mod ui;
pub mod up;
