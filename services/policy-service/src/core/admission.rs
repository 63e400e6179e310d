//! Lines of tenants that have too many waiting executions ([`crate::allowance`]).

use std::collections::BTreeSet;

use fiec_schemas::Tenant;

use super::Core;
use crate::allowance::Allowance;
use crate::bounds::Gauge;
use crate::effects::Effects;
use crate::events::Outcome;
use crate::intake::{Cursor, Line, Others};
use crate::refusal::Refusal;
use crate::vetting::Vetting;

impl Core {
    /// How many waiting executions a tenant has and may have.
    pub(super) fn allowance(&self, tenant: &Tenant) -> Allowance {
        let waiting = usize::try_from(self.policy.waiting_of(tenant)).unwrap_or(usize::MAX);
        let promised = self.lines.promised(tenant);
        let quota = self.policy.waiting_limit(tenant);
        Allowance {
            tenant: tenant.clone(),
            limit: quota.unwrap_or(self.options.waiting),
            is_quota: quota.is_some(),
            waiting: waiting.saturating_add(promised),
            begun: BTreeSet::new(),
        }
    }

    /// Checks a message as a whole.
    pub(super) fn vet(&self, cursor: Box<Cursor>) {
        let tenant = cursor.tenant.as_ref().ok();
        let allowance = tenant.map(|tenant| self.allowance(tenant));
        let lost = Outcome::Recorded(
            cursor.seq,
            Err("the check of the message panicked".to_owned()),
        );
        let vetting = self.effects.clone().vet_message(cursor, allowance);
        self.effects.running.run(lost, vetting);
    }

    /// Takes the result of checking a message as a whole. If other lines have taken its room
    /// meanwhile, it is checked again.
    pub(super) async fn settle_vetting(
        &mut self,
        cursor: Box<Cursor>,
        vetting: Result<Vetting, Refusal>,
    ) {
        let vetting = match vetting {
            Ok(vetting) => vetting,
            Err(error) => return self.lines.intake().vetted(cursor, Err(error)).await,
        };
        let promise = match &cursor.tenant {
            Ok(tenant) if vetting.admitted > self.allowance(tenant).left() => {
                return self.vet(cursor);
            }
            Ok(tenant) => self.lines.promise(tenant, vetting.admitted),
            Err(_) => Gauge::default().take(vetting.admitted),
        };
        let vetted = Ok((vetting.refused, promise));
        self.lines.intake().vetted(cursor, vetted).await;
    }

    /// Refuses a line with which too many executions would wait. If it may have been taken in
    /// before, that is looked up first.
    pub(super) fn refuse_excess(&mut self, line: Box<Line>, allowance: &Allowance) {
        if line.others != Others::Nobody && !line.is_new {
            self.run_for_line(line, Effects::look_up_name);
            return;
        }
        let error = allowance.refusal(0, 1);
        self.refuse_line(&line, &error.field, error.reason);
    }
}
