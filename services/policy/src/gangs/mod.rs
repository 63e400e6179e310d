//! Gangs.

mod leading;
pub(crate) mod places;
mod placing;
mod rooms;
