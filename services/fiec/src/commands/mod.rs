//! One file a group of sub-commands; each returns how it ended.

pub mod doctor;
pub mod history;
pub mod logs;
pub mod nodes;
pub mod operate;
pub mod serve;
pub mod submit;
pub mod watch;
