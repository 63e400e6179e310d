//! One file a group of sub-commands; each returns how it ended.

pub mod check;
pub mod data;
pub mod doctor;
pub mod history;
pub mod logs;
pub mod nodes;
pub mod operate;
pub mod output;
pub mod program;
pub mod run_local;
pub mod serve;
pub mod submit;
pub mod watch;
