//! Envelopes: limits that an operator or an experiment sets on what a node offers of a signal.
//!
//! For the limit L of a reading, an envelope gives a cap c(t) in [0, L], a pure function of the
//! envelope and the time. The value of the signal then is raw / c(t), clamped to [0, 1], and never
//! less than without the envelope. If c(t) is 0, nothing is offered and the value is 1. The worker
//! applies envelopes before it publishes, so that every reader sees the same value. The reading
//! keeps its raw value and limit, and names the cap and who set it.

mod units;

use std::f64::consts::TAU;
use std::fmt;

use jiff::ToSpan as _;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::hardware::{Reading, Signal};
use crate::ids::Timestamp;
use crate::strict::Strict;
use crate::submission::FieldError;

pub use units::{Amount, Day, TimeOfDay, Zone};

/// Most envelopes of one node.
pub const ENVELOPES_LIMIT: usize = 64;
/// Most windows of one schedule.
const WINDOWS_LIMIT: usize = 64;
/// Value of `device` for every device of the node that has no envelope of its own.
pub const EVERY_DEVICE: &str = "*";

/// The envelopes of a node: the value of its key in `FIEC_NODES`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeEnvelopes {
    /// Version of this message: 1.
    pub v: u8,
    /// At most one for each signal and place.
    pub envelopes: Vec<Envelope>,
    /// Who set them last.
    pub who: String,
    /// When.
    pub at: Timestamp,
}

/// The cap on one signal of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Envelope {
    /// `memory`, `power` or `contention`: signals that measure use against a limit.
    pub signal: Signal,
    /// UUID of the device, or `*` for each. Absent: the node itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The cap over time.
    pub shape: Shape,
    /// When the envelope's own time equals the clock's: phase 0 of a sinusoid, and the start of
    /// `speed`. Absent: when the envelope is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Factor by which the envelope's time passes faster, for experiments. Default 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub speed: f64,
}

fn one() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
fn is_one(speed: &f64) -> bool {
    *speed == 1.0
}

/// The cap over time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// The same cap always.
    Constant(Constant),
    /// Caps by time of day.
    Schedule(Schedule),
    /// mean + amplitude · sin(2π · t / period + phase).
    Sinusoid(Sinusoid),
}

/// A constant cap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Constant {
    /// The cap.
    pub cap: Amount,
}

/// Caps by time of day. If windows overlap, the lowest cap counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Time zone of the times of day.
    pub zone: Zone,
    /// Windows with their caps.
    pub windows: Vec<Window>,
    /// The cap outside all windows. Default: the whole limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub otherwise: Option<Amount>,
}

/// A part of the day, on some days of the week. A window that ends before it begins ends on the
/// next day.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// The cap in this window.
    pub cap: Amount,
    /// Begin of the window. Default: midnight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<TimeOfDay>,
    /// End of the window, exclusive. Default: the end of the day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<TimeOfDay>,
    /// Days on which the window begins. Default: every day.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub days: Vec<Day>,
}

/// A cap that follows a sine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sinusoid {
    /// Half of the difference between peak and trough.
    pub amplitude: Amount,
    /// Seconds from peak to peak, in the envelope's time.
    pub period_s: f64,
    /// Phase in degrees, default 0. 90 begins at the peak.
    #[serde(default)]
    pub phase_deg: f64,
    /// Mean of the sine. Default: the limit minus the amplitude, so that the peak is the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean: Option<Amount>,
}

/// An envelope at one moment, in a reading.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EnvelopeNow {
    /// The cap in the reading's unit, at most its limit.
    pub cap: f64,
    /// Kind of the envelope, and who set it.
    pub source: String,
}

impl Envelope {
    /// c(t): the cap at a moment, in the unit of `limit` and within [0, limit]. `None` if the cap
    /// is a share and the limit is unknown.
    pub fn cap(&self, limit: Option<f64>, at: Timestamp) -> Option<f64> {
        let raw = match &self.shape {
            Shape::Constant(constant) => constant.cap.of(limit)?,
            Shape::Schedule(schedule) => schedule.cap(limit, self.own_time(at))?,
            Shape::Sinusoid(sinusoid) => sinusoid.cap(limit, self.own_seconds(at))?,
        };
        Some(raw.clamp(0.0, limit.unwrap_or(f64::INFINITY).max(0.0)))
    }

    /// Seconds of the envelope's own time since `since`.
    fn own_seconds(&self, at: Timestamp) -> f64 {
        let since = self.since.unwrap_or_default();
        at.micros().saturating_sub(since.micros()) as f64 / 1e6 * self.speed
    }

    /// The clock's time if time had passed at the envelope's speed since `since`.
    fn own_time(&self, at: Timestamp) -> Timestamp {
        if self.speed == 1.0 {
            return at;
        }
        let since = self.since.unwrap_or_default();
        // The cast turns an out-of-range float into the nearest integer.
        let passed = (self.own_seconds(at) * 1e6) as i64;
        Timestamp::from_micros(since.micros().saturating_add(passed))
    }

    /// Seconds of the clock after which the cap repeats. `None` if it is constant.
    pub fn period_s(&self) -> Option<f64> {
        match &self.shape {
            Shape::Constant(_) => None,
            Shape::Schedule(schedule) => {
                let weekly = schedule.windows.iter().any(|w| !w.days.is_empty());
                Some(if weekly { 604_800.0 } else { 86_400.0 } / self.speed)
            }
            Shape::Sinusoid(sinusoid) => Some(sinusoid.period_s / self.speed),
        }
    }

    /// True if both are for the same signal of the same device or node.
    pub fn same_place(&self, other: &Envelope) -> bool {
        self.signal == other.signal && self.device == other.device
    }

    /// Checks the rules that types cannot express. `path` is the prefix of field names.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn check(&self, path: &str) -> Result<(), FieldError> {
        let fail = |field: &str, rule: String| Err(FieldError::new(format!("{path}{field}"), rule));
        if !matches!(
            self.signal,
            Signal::Memory | Signal::Power | Signal::Contention
        ) {
            return fail(
                "signal",
                format!(
                    "must be memory, power or contention, whose values are use against a limit, but is {}",
                    self.signal
                ),
            );
        }
        if let Some(device) = &self.device
            && (device.is_empty() || device.len() > 128)
        {
            return fail(
                "device",
                "must be a UUID of a device, or `*` for each".into(),
            );
        }
        if !(self.speed.is_finite() && (1e-6..=1e6).contains(&self.speed)) {
            return fail(
                "speed",
                format!("must be within 0.000001 and 1000000, but is {}", self.speed),
            );
        }
        let amount = |field: &str, amount: &Amount, most: f64| {
            let fits = match amount {
                Amount::Percent(_) => true,
                Amount::Bytes(_) => self.signal == Signal::Memory,
                Amount::Milliwatts(_) => self.signal == Signal::Power,
            };
            let field = format!("{path}shape.{field}");
            if !fits {
                return Err(FieldError::new(
                    field,
                    format!(
                        "must be a share of the limit (`40%`), bytes for memory or watts for power, but is {amount} for {}",
                        self.signal
                    ),
                ));
            }
            if matches!(amount, Amount::Percent(p) if !(0.0..=most).contains(p)) {
                return Err(FieldError::new(
                    field,
                    format!("must be within 0% and {most}%, but is {amount}"),
                ));
            }
            Ok(())
        };
        match &self.shape {
            Shape::Constant(constant) => amount("constant.cap", &constant.cap, 100.0),
            Shape::Schedule(schedule) => {
                let count = schedule.windows.len();
                if !(1..=WINDOWS_LIMIT).contains(&count) {
                    return fail(
                        "shape.schedule.windows",
                        format!("must be 1 to {WINDOWS_LIMIT}, but there are {count}"),
                    );
                }
                for (n, window) in schedule.windows.iter().enumerate() {
                    let at = format!("schedule.windows[{n}]");
                    amount(&format!("{at}.cap"), &window.cap, 100.0)?;
                    let (from, to) = window.span();
                    if from == to || from == TimeOfDay::END {
                        return fail(
                            &format!("shape.{at}.to"),
                            format!(
                                "must differ from `from`, but it is {from} to {to}; leave both out for the whole day"
                            ),
                        );
                    }
                }
                match &schedule.otherwise {
                    Some(otherwise) => amount("schedule.otherwise", otherwise, 100.0),
                    None => Ok(()),
                }
            }
            Shape::Sinusoid(s) => {
                amount("sinusoid.amplitude", &s.amplitude, 100.0)?;
                if s.amplitude.number() <= 0.0 {
                    return fail("shape.sinusoid.amplitude", "must be above 0".into());
                }
                if let Some(mean) = &s.mean {
                    amount("sinusoid.mean", mean, 200.0)?;
                }
                if !(s.period_s.is_finite() && (0.001..=1e9).contains(&s.period_s)) {
                    return fail(
                        "shape.sinusoid.period_s",
                        format!(
                            "must be within 0.001 and 1000000000 seconds, but is {}",
                            s.period_s
                        ),
                    );
                }
                if !(s.phase_deg.is_finite() && s.phase_deg.abs() <= 360.0) {
                    return fail(
                        "shape.sinusoid.phase_deg",
                        format!(
                            "must be within -360 and 360 degrees, but is {}",
                            s.phase_deg
                        ),
                    );
                }
                Ok(())
            }
        }
    }
}

impl Schedule {
    fn cap(&self, limit: Option<f64>, at: Timestamp) -> Option<f64> {
        let at = jiff::Timestamp::from_microsecond(at.micros()).unwrap_or(jiff::Timestamp::MAX);
        let local = self.zone.0.to_datetime(at);
        let of = |date: jiff::civil::Date| {
            Day::ALL[usize::from(date.weekday().to_monday_zero_offset().unsigned_abs()) % 7]
        };
        let today = of(local.date());
        let yesterday = local.date().checked_sub(1.day()).map_or(today, of);
        let time = local.time();
        let seconds = i32::from(time.hour()) * 3_600
            + i32::from(time.minute()) * 60
            + i32::from(time.second());
        let mut lowest: Option<f64> = None;
        for window in &self.windows {
            if window.holds(seconds, today, yesterday) {
                let cap = window.cap.of(limit)?;
                lowest = Some(lowest.map_or(cap, |l| l.min(cap)));
            }
        }
        match (lowest, &self.otherwise) {
            (Some(cap), _) => Some(cap),
            (None, Some(otherwise)) => otherwise.of(limit),
            (None, None) => limit,
        }
    }
}

impl Window {
    fn span(&self) -> (TimeOfDay, TimeOfDay) {
        (
            self.from.unwrap_or(TimeOfDay::MIDNIGHT),
            self.to.unwrap_or(TimeOfDay::END),
        )
    }

    fn holds(&self, seconds: i32, today: Day, yesterday: Day) -> bool {
        let on = |day| self.days.is_empty() || self.days.contains(&day);
        let (from, to) = self.span();
        let (from, to) = (from.seconds(), to.seconds());
        if from < to {
            on(today) && (from..to).contains(&seconds)
        } else {
            (on(today) && seconds >= from) || (on(yesterday) && seconds < to)
        }
    }
}

impl Sinusoid {
    fn cap(&self, limit: Option<f64>, seconds: f64) -> Option<f64> {
        let amplitude = self.amplitude.of(limit)?;
        let mean = match &self.mean {
            Some(mean) => mean.of(limit)?,
            None => limit? - amplitude,
        };
        // Drop whole periods first, because the sine of a large number is inexact.
        let turns = (seconds / self.period_s).rem_euclid(1.0) + self.phase_deg / 360.0;
        Some(mean + amplitude * (turns * TAU).sin())
    }
}

impl NodeEnvelopes {
    /// The envelope for a signal. A device's own envelope comes before the one for every device.
    pub fn of(&self, signal: Signal, device: Option<&str>) -> Option<&Envelope> {
        let find = |wanted: Option<&str>| {
            self.envelopes
                .iter()
                .find(|e| e.signal == signal && e.device.as_deref() == wanted)
        };
        find(device).or_else(|| device.and_then(|_| find(Some(EVERY_DEVICE))))
    }

    /// Applies the envelope in force to a reading, if there is one. Parts of the host, which only
    /// inform, do not change.
    pub fn hold(&self, reading: &mut Reading, at: Timestamp) {
        if reading.is_part() {
            return;
        }
        let Some(envelope) = self.of(reading.signal, reading.device.as_deref()) else {
            return;
        };
        let Some(cap) = envelope.cap(reading.limit, at) else {
            return;
        };
        reading.envelope = Some(EnvelopeNow {
            cap,
            source: format!("{} by {}", envelope.shape, self.who),
        });
        if let (Some(value), Some(raw)) = (reading.value, reading.raw) {
            let used = if cap > 0.0 { raw / cap } else { 1.0 };
            reading.value = Some(value.max(used.clamp(0.0, 1.0)));
        }
    }

    /// One sentence for people.
    pub fn in_words(&self) -> String {
        let who = &self.who;
        if self.envelopes.is_empty() {
            return format!("{who} took all envelopes away");
        }
        let each: Vec<String> = self.envelopes.iter().map(ToString::to_string).collect();
        format!("{who} set {}", each.join("; "))
    }

    /// Checks every envelope, and that no two are for the same signal of the same device or node.
    ///
    /// # Errors
    /// The field and the rule that it breaks.
    pub fn check(&self) -> Result<(), FieldError> {
        check_all(&self.envelopes)
    }
}

fn check_all(envelopes: &[Envelope]) -> Result<(), FieldError> {
    if envelopes.len() > ENVELOPES_LIMIT {
        return Err(FieldError::new(
            "envelopes",
            format!(
                "at most {ENVELOPES_LIMIT} are allowed, but there are {}",
                envelopes.len()
            ),
        ));
    }
    for (n, envelope) in envelopes.iter().enumerate() {
        envelope.check(&format!("envelopes[{n}]."))?;
        if envelopes[..n].iter().any(|e| e.same_place(envelope)) {
            return Err(FieldError::new(
                format!("envelopes[{n}].signal"),
                format!(
                    "there is an envelope of {} at the same place already",
                    envelope.signal
                ),
            ));
        }
    }
    Ok(())
}

/// Parses a list of envelopes strictly.
///
/// # Errors
/// The field and the rule that it breaks. Field names begin with `envelopes[0]`.
pub fn read_list(value: &Value) -> Result<Vec<Envelope>, FieldError> {
    let envelopes: Vec<Envelope> =
        serde_path_to_error::deserialize(Strict(value)).map_err(|e| {
            let path = e.path().to_string();
            let at = match path.as_str() {
                "." => String::new(),
                // An index needs no dot before it. Every other path does.
                path if path.starts_with('[') => path.to_owned(),
                path => format!(".{path}"),
            };
            FieldError::new(format!("envelopes{at}"), e.into_inner().to_string())
        })?;
    check_all(&envelopes)?;
    Ok(envelopes)
}

impl fmt::Display for Envelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.signal)?;
        match self.device.as_deref() {
            None => {}
            Some(EVERY_DEVICE) => f.write_str(" of every device")?,
            Some(device) => write!(f, " of {device}")?,
        }
        write!(f, ": {}", self.shape)?;
        if self.speed != 1.0 {
            write!(f, ", {} times as fast", self.speed)?;
        }
        Ok(())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Constant(c) => write!(f, "cap of {}", c.cap),
            Self::Schedule(s) => {
                for (n, window) in s.windows.iter().enumerate() {
                    let (from, to) = window.span();
                    write!(
                        f,
                        "{}{} {from}-{to}",
                        if n > 0 { ", " } else { "" },
                        window.cap
                    )?;
                    for (n, day) in window.days.iter().enumerate() {
                        write!(f, "{}{}", if n > 0 { "," } else { " " }, day.as_str())?;
                    }
                }
                if let Some(otherwise) = &s.otherwise {
                    write!(f, ", otherwise {otherwise}")?;
                }
                write!(f, " in {}", s.zone)
            }
            Self::Sinusoid(s) => {
                write!(f, "sinusoid of {} in {} s", s.amplitude, s.period_s)?;
                if let Some(mean) = &s.mean {
                    write!(f, " around {mean}")?;
                }
                if s.phase_deg != 0.0 {
                    write!(f, " from {} degrees", s.phase_deg)?;
                }
                Ok(())
            }
        }
    }
}
