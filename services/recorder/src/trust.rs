//! What nodes proved, and what was computed once more.

use fiec_schemas::trust::{Proof, SignedProof};
use fiec_schemas::{BoundaryIndex, ExecutionId, NodeId, Sequence, Timestamp, limits};
use sqlx::PgConnection;

use crate::copy::{saturate, without_nul};
use crate::rows::{contract, line};
use crate::time::PgTime;

/// Writes a row for each result of a proof; one whose statement cannot be read leaves none.
pub(crate) async fn proof(
    tx: &mut PgConnection,
    seq: Sequence,
    signed: &SignedProof,
    refused: Option<&str>,
    at: Timestamp,
) -> sqlx::Result<()> {
    let statement: Proof = match serde_json::from_str(&signed.statement) {
        Ok(statement) => statement,
        Err(error) => {
            tracing::error!(seq, %error, "a proof that cannot be read was passed over");
            return Ok(());
        }
    };
    for result in &statement.results {
        // It is part of the key, and PostgreSQL refuses a long key.
        let mut substrate = without_nul(&result.substrate);
        limits::cut(&mut substrate, limits::WORD_LIMIT);
        sqlx::query(
            "INSERT INTO node_proofs (seq, node, instance, substrate, contract, suite, \
             environment, passed, detail, cases, ran_on, digest, refused, proved_at, expires_at, \
             judged_at, key, signature) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, \
             $12, $13, $14, $15, $16, $17, $18) ON CONFLICT DO NOTHING",
        )
        .bind(saturate(seq))
        .bind(statement.node.as_str())
        .bind(statement.instance.0)
        .bind(substrate)
        .bind(contract(result.contract))
        .bind(line(statement.suite))
        .bind(statement.environment.0.as_slice())
        .bind(result.passed)
        .bind(without_nul(&result.detail))
        .bind(line(result.cases))
        .bind(without_nul(&result.ran_on))
        .bind(result.digest.0.as_slice())
        .bind(refused.map(without_nul))
        .bind(PgTime(statement.at))
        .bind(PgTime(statement.expires_at))
        .bind(PgTime(at))
        .bind(without_nul(&signed.key))
        .bind(without_nul(&signed.sig))
        .execute(&mut *tx)
        .await?;
    }
    Ok(())
}

/// A part of an execution that was computed once more.
pub(crate) struct Verification<'a> {
    pub(crate) execution: ExecutionId,
    pub(crate) from: BoundaryIndex,
    pub(crate) to: BoundaryIndex,
    pub(crate) node: Option<&'a NodeId>,
    pub(crate) by: &'a [NodeId],
    pub(crate) outcome: &'a str,
    pub(crate) detail: &'a str,
    pub(crate) at: Timestamp,
}

/// Writes its row.
pub(crate) async fn verification(
    tx: &mut PgConnection,
    seq: Sequence,
    v: &Verification<'_>,
) -> sqlx::Result<()> {
    let by: Vec<String> = v.by.iter().map(|node| node.as_str().to_owned()).collect();
    sqlx::query(
        "INSERT INTO verifications (seq, execution, from_boundary, to_boundary, node, by_nodes, \
         outcome, detail, at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT DO NOTHING",
    )
    .bind(saturate(seq))
    .bind(v.execution.0)
    .bind(saturate(v.from))
    .bind(saturate(v.to))
    .bind(v.node.map(NodeId::as_str))
    .bind(by)
    .bind(without_nul(v.outcome))
    .bind(without_nul(v.detail))
    .bind(PgTime(v.at))
    .execute(tx)
    .await?;
    Ok(())
}
