//! What this service believes of live executions, for those who compare it with the ledgers. Each
//! service answers on a subject of its own.

use fiec_schemas::messages::{ViewReply, ViewRequest};

use super::{Answered, Api, parse};
use crate::events::Ask;

impl Api {
    /// A page of the service's view.
    pub(super) async fn view(&self, payload: &[u8]) -> Answered<ViewReply> {
        let request = if payload.is_empty() {
            ViewRequest::default()
        } else {
            parse(payload)?
        };
        self.ask(|reply| Ask::View(request.after, reply)).await
    }
}
