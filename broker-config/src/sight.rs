//! Placeholder until the HTTP helper lands.
