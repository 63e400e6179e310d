//! The endpoints of the micro service: their names, their subjects, and the files of `schemas/json`
//! that describe their requests and answers.

use std::collections::HashMap;

use fiec_schemas::messages::{ExecutionVerb, NodeVerb};
use fiec_schemas::{InstanceId, subjects};

/// An endpoint of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// Takes in submissions.
    Submit,
    /// Reads or changes one execution.
    Execution(ExecutionVerb),
    /// Reads or changes a batch.
    Batch,
    /// Reads or changes a tenant's quota.
    Quota,
    /// Reads all quotas.
    Quotas,
    /// Lists all nodes.
    Nodes,
    /// Lists the resources that nodes can offer. Agents ask for it.
    Offers,
    /// Changes one node.
    Node(NodeVerb),
    /// Reads or changes the envelopes of a node.
    Envelope,
    /// Reads what this service believes of live executions.
    View(InstanceId),
}

impl Endpoint {
    /// All endpoints of a service.
    pub(super) fn all(service: InstanceId) -> impl Iterator<Item = Self> {
        let executions = ExecutionVerb::ALL.iter().copied().map(Self::Execution);
        let nodes = NodeVerb::ALL.iter().copied().map(Self::Node);
        [Self::Submit, Self::Batch, Self::Quota, Self::Quotas]
            .into_iter()
            .chain([Self::Nodes, Self::Offers, Self::Envelope])
            .chain([Self::View(service)])
            .chain(executions)
            .chain(nodes)
    }

    /// Its name in `nats micro info` and logs.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Submit => "submit",
            Self::Execution(verb) => verb.as_str(),
            Self::Batch => "batch",
            Self::Quota => "quota",
            Self::Quotas => "quotas",
            Self::Nodes => "nodes",
            Self::Offers => "offers",
            Self::Node(verb) => verb.as_str(),
            Self::Envelope => "envelope",
            Self::View(_) => "view",
        }
    }

    /// The subject of its requests.
    pub(super) fn subject(self) -> String {
        match self {
            Self::Submit => subjects::api_submit("*"),
            Self::Execution(verb) => subjects::api_execution(verb, "*"),
            Self::Batch => subjects::api_batch("*", "*"),
            Self::Quota => subjects::api_quota("*"),
            Self::Quotas => subjects::API_QUOTAS.to_owned(),
            Self::Nodes => subjects::API_NODES.to_owned(),
            Self::Offers => subjects::OFFERS.to_owned(),
            Self::Node(verb) => subjects::api_node(verb),
            Self::Envelope => subjects::API_ENVELOPE.to_owned(),
            Self::View(service) => subjects::api_view(service),
        }
    }

    /// The schemas of its requests and answers.
    pub(super) fn payloads(self) -> HashMap<String, String> {
        let (request, reply) = match self {
            Self::Submit => ("lines of submission.json", "submit-reply.json"),
            Self::Execution(_) => ("execution-request.json", "api-reply.json"),
            Self::Batch => ("batch-request.json", "batch-reply.json"),
            Self::Quota => ("quota-request.json", "quota-reply.json"),
            Self::Quotas => ("none", "quota-reply.json"),
            Self::Nodes => ("none", "api-reply.json"),
            Self::Offers => ("none", "offers-reply.json"),
            Self::Node(_) => ("node-request.json", "api-reply.json"),
            Self::Envelope => ("envelope-request.json", "api-reply.json"),
            Self::View(_) => ("view-request.json", "view-reply.json"),
        };
        let pairs = [("request", request), ("reply", reply)];
        let pairs = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
        pairs.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_endpoint_has_a_name_and_a_subject_of_its_own() {
        let (names, subjects): (Vec<_>, Vec<_>) = Endpoint::all(InstanceId(uuid::Uuid::nil()))
            .map(|e| (e.name(), e.subject()))
            .unzip();
        assert_eq!(names.len(), 23);
        assert_eq!(BTreeSet::from_iter(&names).len(), names.len());
        assert_eq!(BTreeSet::from_iter(&subjects).len(), subjects.len());
        assert!(subjects.contains(&"fiec.api.why.*".to_owned()));
        assert!(subjects.contains(&"fiec.api.batch.*.*".to_owned()));
        assert!(subjects.contains(&"fiec.api.node.drain".to_owned()));
    }
}
