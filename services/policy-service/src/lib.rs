//! The policy service: a shell around the pure policy that consumes telemetry, submissions and ledgers.
