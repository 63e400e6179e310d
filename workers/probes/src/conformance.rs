//! The rules of every reading, from any probe.

use fiec_schemas::hardware::Reading;

/// Units that a reading may carry.
pub const UNITS: [&str; 7] = ["bytes", "percent", "mW", "celsius", "us", "ratio", "event"];

/// Checks one reading.
///
/// # Errors
/// The rule that it breaks.
pub fn check(reading: &Reading) -> Result<(), String> {
    let fail = |rule: &str| Err(format!("{rule}: {reading:?}"));
    if !UNITS.contains(&reading.unit.as_str()) {
        return fail("unit is unknown");
    }
    if reading.source.is_empty() {
        return fail("source is empty");
    }
    if reading.device.as_deref() == Some("") {
        return fail("device is empty");
    }
    if [reading.raw, reading.limit]
        .into_iter()
        .flatten()
        .any(|x| !x.is_finite())
    {
        return fail("raw or limit is no finite number");
    }
    match (reading.value, reading.missing.as_deref()) {
        (Some(v), None) if !(0.0..=1.0).contains(&v) => fail("value is outside [0, 1]"),
        (Some(_), None) if reading.raw.is_none() => fail("a value has no raw reading"),
        (Some(_), None) => Ok(()),
        (Some(_), Some(_)) => fail("a missing reading has a value"),
        (None, None | Some("")) => fail("a reading has neither value nor reason"),
        (None, Some(_)) => Ok(()),
    }
}

/// Checks a whole sample: every reading, and at most one for each signal and place.
///
/// # Errors
/// The first rule that it breaks.
pub fn check_all(readings: &[Reading]) -> Result<(), String> {
    let mut seen = std::collections::BTreeSet::new();
    for reading in readings {
        check(reading)?;
        if !seen.insert((reading.signal, reading.device.clone())) {
            return Err(format!(
                "two readings for one signal and place: {reading:?}"
            ));
        }
    }
    Ok(())
}
