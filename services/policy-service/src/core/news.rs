//! News from the broker: ledger messages, reports of nodes, settings of operators.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fiec_broker::trust;
use fiec_policy::{Input, LedgerView};
use fiec_schemas::trust::SUITE;
use fiec_schemas::{EventKind, InstanceId, NodeId};

use super::Core;
use crate::events::News;

/// Drops each vector that a later one of the same node follows: only the last one counts.
pub(super) fn drop_outdated_vectors(news: &mut Vec<News>) {
    let mut nodes = HashSet::new();
    let mut is_last: Vec<bool> = Vec::with_capacity(news.len());
    is_last.extend(news.iter().rev().map(|item| match item {
        News::Vector(vector) => nodes.insert(vector.node.clone()),
        _ => true,
    }));
    news.retain(|_| is_last.pop().unwrap_or(true));
}

impl Core {
    pub(super) async fn news(&mut self, news: News) {
        match news {
            News::Feed(item) => {
                match LedgerView::read(&item.header, item.seq) {
                    Ok(view) => {
                        // The service counts its own bindings when it decides on them. It still
                        // follows its own messages: an acknowledgement can be lost, and its message
                        // can be stored after the service gave up.
                        let own = view.author() == self.effects.author;
                        if let Some(cause) = view.event(EventKind::Bound).and_then(|b| b.cause())
                            && self.is_loaded()
                            && !own
                        {
                            self.metrics.bound(cause.as_str());
                        }
                        let tip = self.appends.tip(item.execution);
                        if tip.is_some_and(|tip| tip.seq < item.seq) {
                            self.appends.forget(item.execution);
                        }
                        self.follow_ledger(&view, false);
                        self.settle_entrusted_binding(&view).await;
                    }
                    Err(error) => {
                        tracing::warn!(execution = %item.execution, seq = item.seq, %error, "a ledger message was passed over");
                    }
                }
            }
            News::Loaded => {
                if self.after_loss {
                    self.step(Input::Lost);
                }
                self.step(Input::Loaded);
                self.loaded.store(true, Ordering::Relaxed);
                tracing::info!(
                    live = self.policy.live(),
                    waiting = self.policy.waiting(),
                    ms = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(0),
                    "ledgers taken over"
                );
            }
            News::Vector(vector) => self.step(Input::Vector {
                vector: Box::new(*vector),
                age_ms: 0,
            }),
            News::Descriptor(descriptor) => {
                let node = descriptor.node.clone();
                self.step(Input::Descriptor { descriptor });
                self.judge(&node);
            }
            News::Proof(node, signed) => {
                self.proofs.insert(node.clone(), *signed);
                self.judge(&node);
            }
            News::Quarantine(node, lost) => self.step(Input::Quarantine {
                node: node.clone(),
                quarantine: lost,
            }),
            News::Verdict(signed) => {
                match trust::check_verdict(&signed, |node| self.policy.identity(node)) {
                    Ok(verdict) => self.step(Input::Verdict {
                        verdict: Box::new(verdict),
                    }),
                    Err(error) => tracing::warn!(%error, "a verdict does not count"),
                }
            }
            News::Gone(node) => self.gone(&node),
            News::Flags(node, flags) => self.step(Input::Flags {
                node: node.clone(),
                flags,
            }),
            News::Aged(up_to) => self.step(Input::Aged { up_to }),
            News::Quota(tenant, quota) => self.step(Input::Quota {
                tenant: tenant.clone(),
                quota,
            }),
            News::Reserved(tenant, seq, table) => self.step(Input::Reserved {
                tenant: tenant.clone(),
                table: Some((seq, Arc::new(table))),
                answer: false,
            }),
            News::Container(program) => self.step(Input::Container {
                program: program.clone(),
            }),
            News::Replica(id, leaving) => self.step(Input::Replica { id, leaving }),
        }
    }

    /// The descriptor of a node was deleted.
    pub(super) fn gone(&mut self, node: &NodeId) {
        self.proofs.remove(node);
        self.step(Input::Gone { node: node.clone() });
    }

    /// The broker has forgotten a node. Another instance may have joined since.
    pub(super) fn forgotten(&mut self, node: &NodeId, instance: Option<InstanceId>) {
        if self.policy.instance(node) == instance {
            self.gone(node);
        }
    }

    /// Verifies the signature of a node's proof, once its descriptor and its proof are known.
    fn judge(&mut self, node: &NodeId) {
        let Some(signed) = self.proofs.get(node).cloned() else {
            return;
        };
        if !self.policy.has_node(node) {
            return;
        }
        let identity = self.policy.identity(node);
        let judged = trust::check(&signed, identity.as_ref(), SUITE);
        let judged = judged.map_err(|error| error.to_string());
        let judged = judged.and_then(|proof| {
            let own = proof.node == *node;
            own.then_some(proof)
                .ok_or_else(|| "its proof is another node's".to_owned())
        });
        self.step(Input::Proof {
            node: node.clone(),
            signed: Box::new(signed),
            judged: judged.into(),
        });
    }

    /// Takes the state of the broker at the start, before any live news.
    pub async fn preload(&mut self, news: Vec<News>, vectors: Vec<fiec_schemas::HardwareVector>) {
        for item in news {
            self.news(item).await;
        }
        let wall = self.effects.broker.now();
        for vector in vectors {
            let age = u64::try_from(wall.millis() - vector.at.millis()).unwrap_or(0);
            self.step(Input::Vector {
                vector: Box::new(vector),
                age_ms: age,
            });
        }
    }
}
