//! The worker agent: claims a node, pulls capsules, runs programs in child processes, commits boundaries.
