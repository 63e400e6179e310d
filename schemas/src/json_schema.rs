//! JSON Schemas of all messages between processes, generated from the types and committed as
//! `schemas/json/*.json`. A test fails if a committed one is stale.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::Value;

use crate::{
    envelope, event, hardware, messages, package, programs, quota, submission, surroundings, trust,
};

/// Every schema: file name without its ending, and content.
pub fn all() -> Vec<(&'static str, Value)> {
    vec![
        ("submission", schema::<submission::Submission>()),
        ("canary-params", schema::<programs::CanaryParams>()),
        ("cg-params", schema::<programs::CgParams>()),
        ("gemm-params", schema::<programs::GemmParams>()),
        ("lu-params", schema::<programs::LuParams>()),
        ("qr-params", schema::<programs::QrParams>()),
        ("synthetic-params", schema::<programs::SyntheticParams>()),
        ("ledger-message", schema::<event::LedgerMessage>()),
        ("capsule-message", schema::<messages::CapsuleMessage>()),
        ("handover", schema::<messages::Handover>()),
        ("control-request", schema::<messages::ControlRequest>()),
        ("control-reply", schema::<messages::ControlReply>()),
        ("hardware-vector", schema::<hardware::HardwareVector>()),
        ("node-descriptor", schema::<hardware::NodeDescriptor>()),
        ("node-flags", schema::<hardware::NodeFlags>()),
        ("node-proof", schema::<trust::Proof>()),
        ("node-signed-proof", schema::<trust::SignedProof>()),
        ("node-quarantine", schema::<trust::Quarantine>()),
        ("verdict", schema::<trust::Verdict>()),
        ("signed-verdict", schema::<trust::SignedVerdict>()),
        ("verified-up-to", schema::<trust::VerifiedUpTo>()),
        ("execution-request", schema::<messages::ExecutionRequest>()),
        ("node-request", schema::<messages::NodeRequest>()),
        ("node-envelopes", schema::<envelope::NodeEnvelopes>()),
        ("envelope-request", schema::<messages::EnvelopeRequest>()),
        ("quota", schema::<quota::Quota>()),
        ("quota-request", schema::<messages::QuotaRequest>()),
        ("reservations", schema::<quota::Reservations>()),
        ("quota-reply", schema::<messages::QuotaReply>()),
        ("batch-request", schema::<messages::BatchRequest>()),
        ("batch-reply", schema::<messages::BatchReply>()),
        ("api-reply", schema::<messages::ApiReply>()),
        ("view-request", schema::<messages::ViewRequest>()),
        ("view-reply", schema::<messages::ViewReply>()),
        ("submit-reply", schema::<messages::SubmitReply>()),
        ("record", schema::<messages::Record>()),
        (
            "recorder-checkpoint",
            schema::<messages::RecorderCheckpoint>(),
        ),
        ("restore-request", schema::<messages::RestoreRequest>()),
        ("restore-reply", schema::<messages::RestoreReply>()),
        ("recorded-request", schema::<messages::RecordedRequest>()),
        ("recorded-reply", schema::<messages::RecordedReply>()),
        ("policy-presence", schema::<messages::PolicyPresence>()),
        ("log-line", schema::<messages::LogLine>()),
        ("manifest", schema::<package::Manifest>()),
        ("program-record", schema::<package::ProgramRecord>()),
        ("grant", schema::<package::Grant>()),
        ("surroundings", schema::<surroundings::Surroundings>()),
        ("grant-change", schema::<surroundings::GrantChange>()),
        ("offers-reply", schema::<surroundings::OffersReply>()),
    ]
}

fn schema<T: JsonSchema>() -> Value {
    SchemaSettings::draft2020_12()
        .into_generator()
        .into_root_schema_for::<T>()
        .to_value()
}
