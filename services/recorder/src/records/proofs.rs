//! Proofs of nodes, and the parts of executions that other nodes computed once more.

use fiec_schemas::messages::VerificationOutcome;
use fiec_schemas::trust::{Proof, SignedProof};
use fiec_schemas::{
    BoundaryIndex, Contract, Digest, ExecutionId, InstanceId, NodeId, Sequence, Timestamp, limits,
};
use sqlx::PgConnection;

use crate::table::{table, write_one};

table! {
    /// A row of `node_proofs`: one result of a proof.
    struct ProofRow in "node_proofs" {
        /// Sequence in `FIEC_RECORD`.
        seq: Sequence,
        /// Which node.
        node: NodeId,
        /// Which life of its agent.
        instance: InstanceId,
        /// Which place.
        substrate: String,
        /// Which contract.
        contract: Contract,
        /// Version of the canaries.
        suite: u32,
        /// Digest of what it was computed on.
        environment: Digest,
        /// True if the contract holds there.
        passed: bool,
        /// What broke it.
        detail: String,
        /// Number of cases.
        cases: u32,
        /// What computed them.
        ran_on: String,
        /// Digest over all cases.
        digest: Digest,
        /// Why the proof as a whole does not count.
        refused: Option<String>,
        /// When it was computed.
        proved_at: Timestamp,
        /// Until when it counts.
        expires_at: Timestamp,
        /// When a policy service judged it.
        judged_at: Timestamp,
        /// The node's public key.
        key: String,
        /// The node's signature.
        signature: String,
    }
}

table! {
    /// A row of `verifications`: a part of an execution that was computed once more.
    struct VerificationRow in "verifications" {
        /// Sequence in `FIEC_RECORD`.
        seq: Sequence,
        /// Which execution.
        execution: ExecutionId,
        /// The boundary before the part.
        from_boundary: BoundaryIndex,
        /// The boundary at its end.
        to_boundary: BoundaryIndex,
        /// The node that had computed it.
        node: Option<NodeId>,
        /// The nodes that computed it once more.
        by_nodes: Vec<NodeId>,
        /// The outcome.
        outcome: VerificationOutcome,
        /// In words.
        detail: String,
        /// When.
        at: Timestamp,
    }
}

/// Writes a row for each result of a proof. A proof whose statement cannot be read leaves none.
pub(super) async fn write(
    tx: &mut PgConnection,
    seq: Sequence,
    signed: &SignedProof,
    refused: Option<&str>,
    judged_at: Timestamp,
) -> sqlx::Result<()> {
    let statement: Proof = match serde_json::from_str(&signed.statement) {
        Ok(statement) => statement,
        Err(error) => {
            tracing::error!(seq, %error, "a proof that cannot be read was passed over");
            return Ok(());
        }
    };
    for result in statement.results {
        let mut substrate = result.substrate;
        // It is part of the key, and PostgreSQL refuses a long key.
        limits::cut(&mut substrate, limits::WORD_LIMIT);
        let row = ProofRow {
            seq,
            node: statement.node.clone(),
            instance: statement.instance,
            substrate,
            contract: result.contract,
            suite: statement.suite,
            environment: statement.environment,
            passed: result.passed,
            detail: result.detail,
            cases: result.cases,
            ran_on: result.ran_on,
            digest: result.digest,
            refused: refused.map(str::to_owned),
            proved_at: statement.at,
            expires_at: statement.expires_at,
            judged_at,
            key: signed.key.clone(),
            signature: signed.sig.clone(),
        };
        write_one(&mut *tx, &row).await?;
    }
    Ok(())
}
