//! The only form of time in messages: UTC with microseconds, stamped by its observer.

use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, ser};

use crate::ids::{IdError, Parsed, shorten};

/// A moment in UTC, in µs since the Unix epoch, stamped by its observer. Workers and policy
/// services publish times by the broker's clock, as far as they could measure it. The text is RFC
/// 3339 with six digits of a second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(i64);

impl Timestamp {
    /// From microseconds since the Unix epoch.
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    pub const fn micros(self) -> i64 {
        self.0
    }

    /// Milliseconds since the Unix epoch.
    pub const fn millis(self) -> i64 {
        self.0.div_euclid(1_000)
    }

    /// This many milliseconds later.
    #[must_use]
    pub fn plus_ms(self, ms: u64) -> Self {
        let us = i64::try_from(ms).unwrap_or(i64::MAX).saturating_mul(1_000);
        Self(self.0.saturating_add(us))
    }

    /// The present time of the system clock. Only for shells; the policy receives its times.
    pub fn now() -> Self {
        let since = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        Self(i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
    }
}

/// Length of `2026-05-01T12:00:00.000001Z`.
const TEXT_LEN: usize = 27;
/// Outside these years, the year would not have four digits.
const YEARS: std::ops::RangeInclusive<i64> = 0..=9_999;

impl Timestamp {
    /// The canonical text. Every ledger message needs it, and this is several times faster than a
    /// general formatter. `None` outside the years 0 to 9999.
    fn text(self) -> Option<[u8; TEXT_LEN]> {
        // Civil date from days: Howard Hinnant, "chrono-compatible low-level date algorithms".
        let z = self.0.div_euclid(86_400_000_000) + 719_468;
        let micros = self.0.rem_euclid(86_400_000_000);
        let era = z.div_euclid(146_097);
        let doe = z.rem_euclid(146_097);
        let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
        let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
        let mp = (5 * doy + 2) / 153;
        let day = doy - (153 * mp + 2) / 5 + 1;
        let month = if mp < 10 { mp + 3 } else { mp - 9 };
        let year = yoe + era * 400 + i64::from(month <= 2);
        if !YEARS.contains(&year) {
            return None;
        }
        let seconds = micros / 1_000_000;
        let mut text = *b"0000-00-00T00:00:00.000000Z";
        for (range, mut value) in [
            (0..4, year),
            (5..7, month),
            (8..10, day),
            (11..13, seconds / 3_600),
            (14..16, seconds / 60 % 60),
            (17..19, seconds % 60),
            (20..26, micros % 1_000_000),
        ] {
            for digit in text[range].iter_mut().rev() {
                *digit = b'0' + (value % 10) as u8;
                value /= 10;
            }
        }
        Some(text)
    }

    /// Parses the canonical text. `None` for any other form, which a general parser handles.
    fn from_text(text: &[u8; TEXT_LEN]) -> Option<Self> {
        let shape = b"0000-00-00T00:00:00.000000Z";
        let fits = text.iter().zip(shape).all(|(found, wanted)| match wanted {
            b'0' => found.is_ascii_digit(),
            wanted => found == wanted,
        });
        if !fits {
            return None;
        }
        let number = |range: std::ops::Range<usize>| {
            text[range]
                .iter()
                .fold(0i64, |n, digit| n * 10 + i64::from(digit - b'0'))
        };
        let (year, month, day) = (number(0..4), number(5..7), number(8..10));
        let (hour, minute, second) = (number(11..13), number(14..16), number(17..19));
        // The general parser handles days after the 28th, leap seconds and invalid dates.
        if !(1..=12).contains(&month)
            || !(1..=28).contains(&day)
            || hour > 23
            || minute > 59
            || second > 59
        {
            return None;
        }
        let y = year - i64::from(month <= 2);
        let era = y.div_euclid(400);
        let yoe = y.rem_euclid(400);
        let mp = (month + 9) % 12;
        let doy = (153 * mp + 2) / 5 + day - 1;
        let doe = yoe * 365 + yoe / 4 - yoe / 100 + doy;
        let days = era * 146_097 + doe - 719_468;
        let seconds = days * 86_400 + hour * 3_600 + minute * 60 + second;
        Some(Self(seconds * 1_000_000 + number(20..26)))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?),
            None => write!(f, "{} µs since 1970", self.0),
        }
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Timestamp {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        if let Ok(canonical) = text.as_bytes().try_into()
            && let Some(time) = Self::from_text(canonical)
        {
            return Ok(time);
        }
        text.parse::<jiff::Timestamp>()
            .map(|t| Self(t.as_microsecond()))
            .map_err(|_| IdError::Time {
                text: shorten(text),
            })
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.text() {
            Some(text) => {
                serializer.serialize_str(std::str::from_utf8(&text).map_err(ser::Error::custom)?)
            }
            None => Err(ser::Error::custom("the year has no four digits")),
        }
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Parsed::new("a time"))
    }
}

impl JsonSchema for Timestamp {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Timestamp".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string", "format": "date-time", "description": "UTC with microseconds"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_survives_its_text_and_reads_as_others_read_it() {
        let day = 86_400_000_000i64;
        let mut all = vec![0, 1, 951_782_400_000_000, 1_709_164_800_999_999, -1, -day];
        // Every day of eight years around a leap year, at various times of day.
        all.extend((10_000..13_000).map(|n| n * day + n * 7_919 % day));
        for micros in all {
            let t = Timestamp::from_micros(micros);
            let text = t.to_string();
            assert_eq!(text.parse::<Timestamp>().unwrap(), t, "{text}");
            let other: jiff::Timestamp = text.parse().unwrap();
            assert_eq!(other.as_microsecond(), micros, "{text}");
            assert_eq!(serde_json::from_value::<Timestamp>(text.into()).unwrap(), t);
        }
        for bad in [
            "2026-02-30T00:00:00.000000Z",
            "2026-13-01T00:00:00.000000Z",
            "soon",
        ] {
            assert!(bad.parse::<Timestamp>().is_err(), "{bad}");
        }
        let elsewhere: Timestamp = "2026-05-01T14:00:00+02:00".parse().unwrap();
        assert_eq!(elsewhere.to_string(), "2026-05-01T12:00:00.000000Z");
    }
}
