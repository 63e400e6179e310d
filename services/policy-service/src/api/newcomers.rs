//! Tenants that submit for the first time. If quotas exist, none limits such a tenant, and its name
//! may be misspelt. The answer says so, once.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fiec_broker::{buckets, leader};
use fiec_schemas::{Tenant, subjects};

use super::Api;

/// Most tenants that are remembered. Further tenants are looked up for each request.
const REMEMBERED: usize = 10_000;
/// Most tenants with quotas that an answer names.
const NAMED: usize = 5;
/// Longest wait of an answer for this look-up.
const WITHIN: Duration = Duration::from_secs(1);

/// Tenants that have a quota or have submitted before.
#[derive(Debug, Default)]
pub(super) struct Known(Mutex<HashSet<Tenant>>);

impl Known {
    fn has(&self, tenant: &Tenant) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.contains(tenant)
    }

    fn insert(&self, tenant: &Tenant) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() < REMEMBERED {
            known.insert(tenant.clone());
        }
    }
}

impl Api {
    /// A note for a tenant that submits for the first time. `None` for any other tenant, and if
    /// the look-up takes too long.
    pub(super) async fn newcomer(&self, tenant: &Tenant) -> Option<String> {
        if self.known.has(tenant) {
            return None;
        }
        let limited = tokio::time::timeout(WITHIN, self.limited_if_new(tenant));
        let limited = limited.await.ok().flatten()?;
        self.known.insert(tenant);
        in_words(tenant, &limited)
    }

    /// The tenants with quotas. Empty if the tenant is not new. `None` if the broker does not answer.
    async fn limited_if_new(&self, tenant: &Tenant) -> Option<Vec<String>> {
        let js = &self.effects.broker.js;
        let stream = js.get_stream_no_info(subjects::LEDGER_STREAM).await.ok()?;
        let ledgers = format!("fiec.ledger.{tenant}.*");
        if leader::last(&stream, &ledgers).await.ok()?.is_some() {
            return Some(Vec::new());
        }
        let bucket = js.get_key_value(subjects::QUOTA_BUCKET).await.ok()?;
        let quotas = buckets::entries(&bucket).await.ok()?;
        let mut limited: Vec<String> = quotas.into_iter().map(|(key, _)| key).collect();
        if limited.iter().any(|key| key == tenant.as_str()) {
            limited.clear();
        }
        Some(limited)
    }
}

/// The note in words. `None` if no tenant has a quota.
fn in_words(tenant: &Tenant, limited: &[String]) -> Option<String> {
    let named = limited.get(..NAMED.min(limited.len()))?.join(", ");
    let more = match limited.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!limited.is_empty()).then(|| {
        format!(
            "tenant {tenant} is new and has no quota; tenants with quotas: {named}{more}. If the \
             name is misspelt, cancel and submit again with the right one"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_tenant_is_told_beside_which_others_it_stands() {
        let tenant = Tenant::new("lba").unwrap();
        assert_eq!(in_words(&tenant, &[]), None);
        let limited: Vec<String> = (0..7).map(|n| format!("t{n}")).collect();
        let words = in_words(&tenant, &limited).unwrap();
        assert!(
            words.starts_with("tenant lba is new and has no quota"),
            "{words}"
        );
        assert!(words.contains("t0, t1, t2, t3, t4 and 2 more."), "{words}");
    }
}
