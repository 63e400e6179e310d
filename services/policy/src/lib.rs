//! Pure placement policy of FIEC: hysteresis, viability, decisions. No clock, no I/O, no randomness.
