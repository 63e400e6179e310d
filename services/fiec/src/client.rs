//! Requests to policy services in the name of the user of this command.

use fiec_broker::Broker;
use fiec_broker::api::{ApiError, Operator};

use crate::context::who;

/// No server answered in time.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unreachable(pub String);

/// The user, as the history will have it.
pub fn me(broker: &Broker) -> Operator {
    Operator::new(broker.clone(), who())
}

/// Whether an error is that a server or a service did not answer.
pub fn is_unreachable(error: &anyhow::Error) -> bool {
    let is = |error: &ApiError| matches!(error, ApiError::Unreachable(_));
    error.is::<Unreachable>() || error.downcast_ref().is_some_and(is)
}
