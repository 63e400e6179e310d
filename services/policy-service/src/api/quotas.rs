//! Quotas of tenants: shown, and changed by compare-and-set.

use std::time::Duration;

use async_nats::jetstream::kv;
use fiec_broker::buckets;
use fiec_schemas::messages::{QuotaChange, QuotaReply, QuotaRequest, Record, TenantQuota};
use fiec_schemas::quota::Quota;
use fiec_schemas::{Tenant, Timestamp, subjects};

use super::{Answered, Api, parse, somebody, tenant};
use crate::events::Ask;
use crate::refusal::Refusal;
use crate::reservation;

/// Attempts to write while other services write too.
const ATTEMPTS: usize = 8;
/// Time limit for reading all quotas.
const READING: Duration = Duration::from_secs(8);

impl Api {
    /// Answers with one tenant's quota, after changing it if the request asks for that.
    pub(super) async fn quota(&self, tenant_text: &str, payload: &[u8]) -> Answered<QuotaReply> {
        let tenant = tenant(tenant_text)?;
        let request: QuotaRequest = parse(payload)?;
        let (quota, warning) = self.change_quota(&tenant, request).await?;
        Ok(QuotaReply {
            warning,
            tenants: vec![self.in_use(tenant, quota).await?],
            ..QuotaReply::default()
        })
    }

    /// All quotas that are set.
    pub(super) async fn quotas(&self) -> Answered<QuotaReply> {
        const WHAT: &str = "read the quotas";
        let answer = async {
            let bucket = self.quota_bucket().await?;
            let quotas = buckets::entries(&bucket).await;
            let quotas = quotas.map_err(|error| Refusal::broker(WHAT, error))?;
            let mut found = Vec::new();
            for (key, value) in quotas {
                if let Ok(tenant) = key.parse() {
                    let quota = read(&key, &value)?;
                    found.push(self.in_use(tenant, Some(quota)).await?);
                }
            }
            Ok(QuotaReply {
                tenants: found,
                ..QuotaReply::default()
            })
        };
        let late = "reading the quotas took too long; try again, or name one tenant";
        let answer = tokio::time::timeout(READING, answer).await;
        answer.unwrap_or_else(|_| Err(Refusal::broker(WHAT, late)))
    }

    async fn quota_bucket(&self) -> Answered<kv::Store> {
        let js = &self.effects.broker.js;
        js.get_key_value(subjects::QUOTA_BUCKET)
            .await
            .map_err(|error| Refusal::broker("open the bucket of quotas", error))
    }

    async fn in_use(&self, tenant: Tenant, quota: Option<Quota>) -> Answered<TenantQuota> {
        let reserved = reservation::reserved(&self.effects.broker, &tenant).await;
        let (_, table) = reserved?;
        let entries = &table.entries;
        let asked = self.ask(|reply| Ask::Allowance(tenant.clone(), reply));
        let waiting = asked.await.ok().map(|allowance| allowance.waiting);
        Ok(TenantQuota {
            tenant,
            quota,
            running: u32::try_from(entries.len()).unwrap_or(u32::MAX),
            devices: entries.iter().map(|e| e.devices).sum(),
            memory_bytes: entries.iter().map(|e| e.memory_bytes).sum(),
            waiting: waiting.map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        })
    }

    /// Changes a quota. Returns the quota that is in force, and a note for the asker.
    async fn change_quota(
        &self,
        tenant: &Tenant,
        request: QuotaRequest,
    ) -> Answered<(Option<Quota>, Option<String>)> {
        let who = somebody(&request.who);
        let bucket = self.quota_bucket().await?;
        let key = tenant.as_str();
        let failed = |error: &dyn std::fmt::Display| Refusal::broker("write the quota", error);
        for _ in 0..ATTEMPTS {
            let entry = bucket.entry(key).await.map_err(|error| failed(&error))?;
            let (revision, before) = match &entry {
                Some(e) if e.operation == kv::Operation::Put => {
                    (e.revision, Some(read(key, &e.value)?))
                }
                Some(e) => (e.revision, None),
                None => (0, None),
            };
            let Some(change) = &request.change else {
                return Ok((before, None));
            };
            let quota = changed(before, change, (who.clone(), self.effects.broker.now()))?;
            let value = serde_json::to_vec(&quota).map_err(|error| failed(&error))?;
            match bucket.update(key, value.into(), revision).await {
                Ok(revision) => {
                    tracing::info!(%tenant, who, "quota: {}", quota.in_words());
                    let id = format!("quota/{tenant}/{revision}");
                    let record = Record::Quota {
                        tenant: tenant.clone(),
                        quota: quota.clone(),
                    };
                    let subject = subjects::quota_record(tenant);
                    let recorded = self.record(subject, id, &record).await;
                    let warning = recorded.err().map(|error| {
                        tracing::warn!(error, %tenant, "a change of a quota could not be recorded");
                        format!(
                            "the change is in force, but was not recorded in the history: {error}"
                        )
                    });
                    return Ok((Some(quota), warning));
                }
                // Another service wrote at this moment: read again.
                Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        let what = format!("the quota of {tenant}");
        Err(Refusal::Contended { what })
    }
}

fn read(key: &str, value: &[u8]) -> Answered<Quota> {
    let read = serde_json::from_slice(value);
    read.map_err(|error| Refusal::broker(&format!("read the quota of {key}"), error))
}

fn changed(
    before: Option<Quota>,
    change: &QuotaChange,
    (who, at): (String, Timestamp),
) -> Answered<Quota> {
    let empty = QuotaChange::default();
    if *change == empty {
        let rule =
            "names no change; running, devices, memory_bytes, waiting and weight can be changed";
        return Err(Refusal::invalid("change", rule));
    }
    let old = before.filter(|_| !change.clear);
    let old = old.as_ref();
    let quota = Quota {
        v: 1,
        running: change.running.or(old.and_then(|q| q.running)),
        devices: change.devices.or(old.and_then(|q| q.devices)),
        memory_bytes: change.memory_bytes.or(old.and_then(|q| q.memory_bytes)),
        waiting: change.waiting.or(old.and_then(|q| q.waiting)),
        weight: change.weight.or(old.and_then(|q| q.weight)),
        who,
        at,
    };
    quota.check()?;
    Ok(quota)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_keeps_what_it_does_not_name_and_clearing_takes_all_away() {
        let set = |before, change: QuotaChange| {
            changed(before, &change, ("ann".to_owned(), Timestamp::now()))
        };
        let one = set(
            None,
            QuotaChange {
                running: Some(4),
                weight: Some(2),
                ..QuotaChange::default()
            },
        )
        .unwrap();
        let two = set(
            Some(one.clone()),
            QuotaChange {
                running: Some(0),
                ..QuotaChange::default()
            },
        )
        .unwrap();
        assert_eq!((two.running, two.weight), (Some(0), Some(2)));
        let clear = QuotaChange {
            clear: true,
            ..QuotaChange::default()
        };
        assert!(!set(Some(two), clear).unwrap().limits());
        let bad = QuotaChange {
            weight: Some(0),
            ..QuotaChange::default()
        };
        let refusal = set(Some(one), bad).unwrap_err();
        assert!(matches!(refusal, Refusal::Invalid(error) if error.field == "weight"));
        let refusal = set(None, QuotaChange::default()).unwrap_err();
        assert!(matches!(refusal, Refusal::Invalid(error) if error.field == "change"));
    }
}
