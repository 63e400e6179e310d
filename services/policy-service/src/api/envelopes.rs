//! Envelopes, by which operators limit the offers of a node. They are read, checked, written beside
//! the node's flags, and recorded.

use async_nats::jetstream::kv;
use fiec_schemas::envelope::{Envelope, NodeEnvelopes, Shape, read_list};
use fiec_schemas::messages::{ApiReply, EnvelopeChange, EnvelopeRequest, Record};
use fiec_schemas::{Timestamp, subjects};

use super::{Answered, Api, parse, somebody};
use crate::refusal::Refusal;

/// Attempts to write while other services write too.
const ATTEMPTS: usize = 8;

impl Api {
    pub(super) async fn envelope(&self, payload: &[u8]) -> Answered<ApiReply> {
        let EnvelopeRequest { node, who, change } = parse(payload)?;
        let key = subjects::envelopes_key(&node);
        let what = format!("write {key}");
        let failed = |error: &dyn std::fmt::Display| Refusal::broker(&what, error);
        let bucket = self
            .effects
            .broker
            .js
            .get_key_value(subjects::NODES_BUCKET)
            .await
            .map_err(|error| failed(&error))?;
        let who = somebody(&who);
        for attempt in 0..ATTEMPTS {
            let entry = bucket.entry(&key).await.map_err(|error| failed(&error))?;
            let (revision, before) = match &entry {
                Some(e) if e.operation == kv::Operation::Put => {
                    let set: NodeEnvelopes =
                        serde_json::from_slice(&e.value).map_err(|error| failed(&error))?;
                    (e.revision, Some(set))
                }
                Some(e) => (e.revision, None),
                None => (0, None),
            };
            if attempt == 0 && before.is_none() {
                self.joined(&node).await?;
            }
            let before = before.unwrap_or_default();
            let Some(change) = &change else {
                return Ok(ApiReply {
                    envelopes: Some(before),
                    ..ApiReply::default()
                });
            };
            let at = self.effects.broker.now();
            let set = NodeEnvelopes {
                v: 1,
                envelopes: changed(before.envelopes, change, at)?,
                who: who.clone(),
                at,
            };
            set.check()?;
            let value = serde_json::to_vec(&set).map_err(|error| failed(&error))?;
            match bucket.update(&key, value.into(), revision).await {
                Ok(revision) => {
                    let record = Record::Envelopes {
                        node: node.clone(),
                        envelopes: set.clone(),
                    };
                    // The message id keeps a repeated attempt from being stored twice.
                    let id = format!("envelopes/{node}/{revision}");
                    let recorded = self.record(subjects::node_record(&node), id, &record).await;
                    let mut message = format!("{node}: {}", set.in_words());
                    if let Err(error) = recorded {
                        tracing::warn!(%error, %node, "a change of envelopes could not be recorded");
                        message.push_str(" (in force, but not recorded in the history: ");
                        message.push_str(&error);
                        message.push(')');
                    }
                    tracing::info!(%node, who, "{}", set.in_words());
                    return Ok(ApiReply {
                        message,
                        envelopes: Some(set),
                        ..ApiReply::default()
                    });
                }
                // Another service wrote at this moment: read again.
                Err(error) if error.kind() == kv::UpdateErrorKind::WrongLastRevision => {}
                Err(error) => return Err(failed(&error)),
            }
        }
        Err(Refusal::Contended { what: key })
    }
}

/// The envelopes after a change. An envelope that needs a beginning and names none begins now.
fn changed(
    mut before: Vec<Envelope>,
    change: &EnvelopeChange,
    now: Timestamp,
) -> Answered<Vec<Envelope>> {
    let read = |value| -> Answered<Vec<Envelope>> {
        let mut list = read_list(value)?;
        for envelope in &mut list {
            let swings = matches!(envelope.shape, Shape::Sinusoid(_));
            if swings || envelope.speed != 1.0 {
                envelope.since.get_or_insert(now);
            }
        }
        Ok(list)
    };
    match change {
        EnvelopeChange::Set { envelopes } => {
            let new = read(envelopes)?;
            before.retain(|old| !new.iter().any(|n| n.same_place(old)));
            before.extend(new);
            Ok(before)
        }
        EnvelopeChange::Replace { envelopes } => read(envelopes),
        EnvelopeChange::Clear { signal, device } => {
            let count = before.len();
            before.retain(|e| {
                let meant = signal.is_none_or(|s| s == e.signal)
                    && (device.is_none() || *device == e.device);
                !meant
            });
            let named = signal.is_some() || device.is_some();
            if named && before.len() == count {
                let rule = "the node has no such envelope to remove; --show lists its envelopes";
                return Err(Refusal::invalid("change.signal", rule));
            }
            Ok(before)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn cap(signal: &str, device: Option<&str>, cap: &str) -> serde_json::Value {
        json!({"signal": signal, "device": device, "shape": {"constant": {"cap": cap}}})
    }

    #[test]
    fn setting_replaces_the_one_for_the_same_place_and_clearing_takes_what_is_named() {
        let now = Timestamp::from_micros(7);
        let set =
            |before, list| changed(before, &EnvelopeChange::Set { envelopes: list }, now).unwrap();
        let clear = |before, signal, device: Option<&str>| {
            let device = device.map(str::to_owned);
            changed(before, &EnvelopeChange::Clear { signal, device }, now)
        };
        let list = set(
            vec![],
            json!([cap("memory", None, "10%"), cap("memory", Some("G"), "20%")]),
        );
        let list = set(list, json!([cap("memory", None, "30%")]));
        let words: Vec<String> = list.iter().map(ToString::to_string).collect();
        assert_eq!(words, ["memory of G: cap of 20%", "memory: cap of 30%"]);
        let left = clear(list.clone(), None, Some("G")).unwrap();
        assert_eq!(left.len(), 1);
        let power = Some(fiec_schemas::Signal::Power);
        assert!(
            clear(list.clone(), power, None)
                .unwrap_err()
                .to_string()
                .contains("no such")
        );
        assert!(clear(list, None, None).unwrap().is_empty());
    }

    #[test]
    fn a_sinusoid_begins_when_it_is_set_and_a_bad_one_is_answered_with_its_field() {
        let now = Timestamp::from_micros(7);
        let of = |value| changed(vec![], &EnvelopeChange::Replace { envelopes: value }, now);
        let swing = json!({"sinusoid": {"amplitude": "8GB", "period_s": 600}});
        let list = of(json!([{"signal": "memory", "shape": swing}])).unwrap();
        assert_eq!(list[0].since, Some(now));
        let list = of(json!([cap("memory", None, "10%")])).unwrap();
        assert_eq!(list[0].since, None);
        let refusal = of(json!([cap("errors", None, "10%")])).unwrap_err();
        let error = refusal.to_string();
        assert!(
            error.starts_with("envelopes[0].signal: must be memory"),
            "{error}"
        );
    }
}
