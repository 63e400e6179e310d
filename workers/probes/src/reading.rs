//! The construction of a [`Reading`], so that every probe keeps the same rules.

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;

/// The signal, place and time of a reading, before its value or reason is known.
pub(crate) struct Make<'a> {
    pub signal: Signal,
    pub device: Option<&'a str>,
    pub unit: &'a str,
    pub source: &'a str,
    pub at: Timestamp,
}

impl Make<'_> {
    /// A measured reading. The value is clamped to \[0, 1\]. A value that is no finite number is
    /// missing.
    pub(crate) fn value(self, value: f64, raw: f64, limit: Option<f64>) -> Reading {
        if !value.is_finite() || !raw.is_finite() {
            return self.missing("the source gave no finite number");
        }
        Reading {
            value: Some(value.clamp(0.0, 1.0)),
            raw: Some(raw),
            limit: limit.filter(|l| l.is_finite()),
            missing: None,
            ..self.blank()
        }
    }

    /// A reading that failed.
    pub(crate) fn missing(self, why: impl Into<String>) -> Reading {
        Reading {
            missing: Some(why.into()),
            ..self.blank()
        }
    }

    fn blank(&self) -> Reading {
        Reading {
            signal: self.signal,
            device: self.device.map(str::to_owned),
            value: None,
            raw: None,
            limit: None,
            unit: self.unit.to_owned(),
            source: self.source.to_owned(),
            at: self.at,
            missing: None,
            envelope: None,
        }
    }
}
