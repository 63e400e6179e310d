//! One file a group of sub-commands; each returns how it ended.

pub mod adjust;
pub mod batch;
pub mod check;
pub mod data;
pub mod device;
pub mod doctor;
pub mod envelope;
pub mod health;
pub mod history;
pub mod logs;
pub mod node;
pub mod nodes;
pub mod operate;
pub mod output;
pub mod profile;
pub mod program;
pub mod quota;
pub mod reconfigure;
pub mod record;
pub mod replay;
pub mod run_local;
pub mod serve;
pub mod sharing;
pub mod simulate;
pub mod submit;
pub mod watch;
