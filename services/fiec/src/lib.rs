//! The product's command as a library: the operator's commands and the processes of production.
//!
//! `fiec-lab` links it and adds the commands that simulate, measure and demonstrate. Nothing here
//! depends on the lab, the simulator or the development servers.

/// Replaces the standard macros here and in the lab: see [`terminal`].
#[macro_export]
macro_rules! println {
    ($($text:tt)*) => {
        ::std::println!("{}", $crate::terminal::safe(&::std::format!($($text)*)))
    };
}
#[macro_export]
macro_rules! print {
    ($($text:tt)*) => {
        ::std::print!("{}", $crate::terminal::safe(&::std::format!($($text)*)))
    };
}
#[macro_export]
macro_rules! eprintln {
    ($($text:tt)*) => {
        ::std::eprintln!("{}", $crate::terminal::safe(&::std::format!($($text)*)))
    };
}

pub mod allocator;
pub mod cli;
pub mod client;
pub mod commands;
pub mod context;
pub mod exit;
pub mod lab;
pub mod local;
pub mod node_keys;
pub mod package;
pub mod sql;
pub mod table;
pub mod terminal;
pub mod transfer;
pub mod ui;
