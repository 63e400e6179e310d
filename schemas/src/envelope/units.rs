//! Amounts, times of day, days and zones as people write them. Each is a string in JSON.

use std::fmt;
use std::str::FromStr;

use jiff::tz::TimeZone;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// An amount of a signal: a share of its limit, or a number in its own unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// Per cent of the limit: `40%`.
    Percent(f64),
    /// `8GiB`, `8GB`, `1048576B`.
    Bytes(u64),
    /// `300W`, `300500mW`.
    Milliwatts(u64),
}

impl Amount {
    /// The amount in the unit of a limit. `None` for a share without a limit.
    pub fn of(self, limit: Option<f64>) -> Option<f64> {
        match self {
            Self::Percent(percent) => limit.map(|limit| limit * percent / 100.0),
            Self::Bytes(raw) | Self::Milliwatts(raw) => Some(raw as f64),
        }
    }

    /// The number alone, to compare amounts of one kind.
    pub(super) fn number(self) -> f64 {
        match self {
            Self::Percent(percent) => percent,
            Self::Bytes(raw) | Self::Milliwatts(raw) => raw as f64,
        }
    }
}

/// Units of bytes, the largest first.
const BYTES: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Bytes(raw) => {
                let whole = |(_, unit): &&(&str, u64)| *raw >= *unit && raw % unit == 0;
                let (name, unit) = BYTES.iter().find(whole).unwrap_or(&("B", 1));
                write!(f, "{}{name}", raw / unit)
            }
            Self::Milliwatts(raw) if raw % 1_000 == 0 => write!(f, "{}W", raw / 1_000),
            Self::Milliwatts(raw) => write!(f, "{raw}mW"),
        }
    }
}

impl FromStr for Amount {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let form = || {
            format!(
                "must be a share (`40%`), bytes (`8GiB`, `8GB`) or watts (`300W`), but is {text:?}"
            )
        };
        let split = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .ok_or_else(form)?;
        let (number, unit) = text.split_at(split);
        let number: f64 = number.parse().map_err(|_| form())?;
        let whole = |unit: u64| {
            let raw = number * unit as f64;
            // Below 2^53 every whole number is exact.
            (raw < 9.0e15)
                .then_some(raw.round() as u64)
                .ok_or_else(|| format!("must be below 9 PB or TW, but is {text:?}"))
        };
        match unit.trim() {
            "%" => Ok(Self::Percent(number)),
            "W" => whole(1_000).map(Self::Milliwatts),
            "mW" => whole(1).map(Self::Milliwatts),
            unit => match BYTES.iter().find(|(name, _)| *name == unit) {
                Some((_, bytes)) => whole(*bytes).map(Self::Bytes),
                None => Err(form()),
            },
        }
    }
}

/// A time of day to the minute, `00:00` to `24:00`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeOfDay(u16);

impl TimeOfDay {
    /// Begin of a day.
    pub const MIDNIGHT: Self = Self(0);
    /// End of a day.
    pub const END: Self = Self(24 * 60);

    /// Seconds since midnight.
    pub fn seconds(self) -> i32 {
        i32::from(self.0) * 60
    }
}

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}:{:02}", self.0 / 60, self.0 % 60)
    }
}

impl FromStr for TimeOfDay {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (hours, minutes) = text.split_once(':')?;
            let two = |t: &str| t.len() == 2 && t.bytes().all(|b| b.is_ascii_digit());
            if !two(hours) || !two(minutes) {
                return None;
            }
            let (hours, minutes): (u16, u16) = (hours.parse().ok()?, minutes.parse().ok()?);
            let at = hours * 60 + minutes;
            (minutes < 60 && at <= Self::END.0).then_some(Self(at))
        };
        read().ok_or_else(|| {
            format!("must be a time of day such as 09:00, 24:00 at most, but is {text:?}")
        })
    }
}

/// A day of the week.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Day {
    /// Monday.
    Mon,
    /// Tuesday.
    Tue,
    /// Wednesday.
    Wed,
    /// Thursday.
    Thu,
    /// Friday.
    Fri,
    /// Saturday.
    Sat,
    /// Sunday.
    Sun,
}

impl Day {
    /// All days, from Monday.
    pub const ALL: [Day; 7] = [
        Day::Mon,
        Day::Tue,
        Day::Wed,
        Day::Thu,
        Day::Fri,
        Day::Sat,
        Day::Sun,
    ];

    /// The name in messages.
    pub fn as_str(self) -> &'static str {
        ["mon", "tue", "wed", "thu", "fri", "sat", "sun"][self as usize]
    }

    /// Parses `mon-fri`, `sat,sun` or `mon-wed,fri`.
    ///
    /// # Errors
    /// The text that is no day.
    pub fn parse_list(text: &str) -> Result<Vec<Day>, String> {
        let day = |name: &str| {
            let found = Day::ALL.into_iter().find(|d| d.as_str() == name.trim());
            found.ok_or_else(|| {
                format!("{name:?} is no day; write mon to sun, e.g. mon-fri or sat,sun")
            })
        };
        let mut days = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (mut at, last) = (day(first)? as usize, day(last)? as usize);
            loop {
                days.push(Day::ALL[at]);
                if at == last {
                    break;
                }
                at = (at + 1) % 7;
            }
        }
        days.sort_unstable();
        days.dedup();
        Ok(days)
    }
}

/// A time zone by its IANA name. The machine's time zone database is used. If the machine has none,
/// the compiled-in one is.
#[derive(Debug, Clone, PartialEq)]
pub struct Zone(pub(super) TimeZone);

impl fmt::Display for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.iana_name().unwrap_or("UTC"))
    }
}

impl FromStr for Zone {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        TimeZone::get(text).map(Self).map_err(|_| {
            format!("must be an IANA time zone such as Europe/Berlin or UTC, but is {text:?}")
        })
    }
}

macro_rules! as_text {
    ($name:ident, $schema:literal, $description:literal, $example:literal) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(de::Error::custom)
            }
        }
        impl JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $schema.into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "type": "string",
                    "description": $description,
                    "examples": [$example],
                })
            }
        }
    };
}
as_text!(
    Amount,
    "Amount",
    "A share of the signal's limit (`40%`), or an amount in its unit: bytes (`8GiB`, `8GB`) or watts (`300W`, `300500mW`).",
    "40%"
);
as_text!(
    TimeOfDay,
    "TimeOfDay",
    "A time of day to the minute, 00:00 to 24:00.",
    "09:00"
);
as_text!(Zone, "Zone", "An IANA time zone.", "Europe/Berlin");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_amount_survives_its_text(raw in 0u64..9_000_000_000_000_000, percent in 0.0..1e6f64) {
            for amount in [Amount::Bytes(raw), Amount::Milliwatts(raw), Amount::Percent(percent)] {
                prop_assert_eq!(amount.to_string().parse::<Amount>(), Ok(amount));
            }
        }
        #[test]
        fn a_time_of_day_survives_its_text(minutes in 0u16..=1440) {
            let time = TimeOfDay(minutes);
            prop_assert_eq!(time.to_string().parse::<TimeOfDay>(), Ok(time));
        }
    }

    #[test]
    fn amounts_are_read_with_their_units() {
        assert_eq!("40%".parse(), Ok(Amount::Percent(40.0)));
        assert_eq!("8GB".parse(), Ok(Amount::Bytes(8_000_000_000)));
        assert_eq!(Amount::Bytes(8_000_000_000).to_string(), "8GB");
        assert_eq!(Amount::Bytes(0).to_string(), "0B");
        assert_eq!("1.5GiB".parse(), Ok(Amount::Bytes(3 << 29)));
        assert_eq!("300W".parse(), Ok(Amount::Milliwatts(300_000)));
        for bad in ["", "40", "%", "-3%", "8 parsecs", "1e9GiB", "99999999TiB"] {
            assert!(bad.parse::<Amount>().is_err(), "{bad}");
        }
    }

    #[test]
    fn days_are_read_as_ranges_and_lists_even_over_the_end_of_the_week() {
        let words = |text| {
            let days = Day::parse_list(text).unwrap();
            days.iter()
                .map(|d| d.as_str())
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(words("mon-fri"), "mon tue wed thu fri");
        assert_eq!(words("sat,sun,sat"), "sat sun");
        assert_eq!(words("sat-mon"), "mon sat sun");
        assert!(Day::parse_list("monday").unwrap_err().contains("no day"));
    }

    #[test]
    fn what_is_no_time_or_zone_is_refused_with_the_rule() {
        for bad in ["9:00", "24:01", "12:60", "0900", "+1:00"] {
            assert!(
                bad.parse::<TimeOfDay>()
                    .unwrap_err()
                    .contains("time of day")
            );
        }
        assert!("Mars/Olympus".parse::<Zone>().unwrap_err().contains("IANA"));
        assert_eq!(
            "Europe/Berlin".parse::<Zone>().unwrap().to_string(),
            "Europe/Berlin"
        );
    }
}
