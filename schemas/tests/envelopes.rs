//! Properties of envelopes, for all envelopes and all moments.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use fiec_schemas::envelope::{
    Amount, Constant, Day, Envelope, NodeEnvelopes, Schedule, Shape, Sinusoid, Window, read_list,
};
use fiec_schemas::{Reading, Signal, Timestamp};
use proptest::prelude::*;
use serde_json::{Value, json};

const GB: u64 = 1_000_000_000;

fn envelope(shape: Shape) -> Envelope {
    Envelope {
        signal: Signal::Memory,
        device: None,
        shape,
        since: Some(Timestamp::from_micros(0)),
        speed: 1.0,
    }
}

fn amount() -> impl Strategy<Value = Amount> {
    prop_oneof![
        (0.0..100.0f64).prop_map(Amount::Percent),
        (0..200 * GB).prop_map(Amount::Bytes),
    ]
}

fn window() -> impl Strategy<Value = Window> {
    let time = || (0u32..24, 0u32..60).prop_map(|(h, m)| format!("{h:02}:{m:02}"));
    let days = proptest::sample::subsequence(Day::ALL.to_vec(), 0..=7);
    (amount(), time(), time(), days)
        .prop_filter("an empty window", |(_, from, to, _)| from != to)
        .prop_map(|(cap, from, to, days)| Window {
            cap,
            from: Some(from.parse().unwrap()),
            to: Some(to.parse().unwrap()),
            days,
        })
}

fn shape() -> impl Strategy<Value = Shape> {
    let zone = prop_oneof![Just("UTC"), Just("Europe/Berlin"), Just("America/St_Johns")];
    let windows = proptest::collection::vec(window(), 1..5);
    let schedule = (zone, windows, proptest::option::of(amount()));
    let sinusoid = (
        (1..200 * GB).prop_map(Amount::Bytes),
        0.1..1e6f64,
        -360.0..360.0f64,
        proptest::option::of(amount()),
    );
    prop_oneof![
        amount().prop_map(|cap| Shape::Constant(Constant { cap })),
        schedule.prop_map(|(zone, windows, otherwise)| {
            Shape::Schedule(Schedule {
                zone: zone.parse().unwrap(),
                windows,
                otherwise,
            })
        }),
        sinusoid.prop_map(|(amplitude, period_s, phase_deg, mean)| {
            Shape::Sinusoid(Sinusoid {
                amplitude,
                period_s,
                phase_deg,
                mean,
            })
        }),
    ]
}

fn any_envelope() -> impl Strategy<Value = Envelope> {
    (shape(), 0i64..2_000_000_000_000_000, 0.001..1000.0f64).prop_map(|(shape, since, speed)| {
        Envelope {
            since: Some(Timestamp::from_micros(since)),
            speed,
            ..envelope(shape)
        }
    })
}

fn reading(raw: f64, limit: f64) -> Reading {
    serde_json::from_value(json!({
        "signal": "memory", "value": (raw / limit).clamp(0.0, 1.0), "raw": raw, "limit": limit,
        "unit": "bytes", "source": "test", "at": "2026-05-01T12:00:00.000000Z",
    }))
    .unwrap()
}

fn set(envelopes: Vec<Envelope>) -> NodeEnvelopes {
    NodeEnvelopes {
        v: 1,
        envelopes,
        who: "ada".into(),
        at: Timestamp::default(),
    }
}

proptest! {
    #[test]
    fn a_cap_lies_within_zero_and_the_limit(
        envelope in any_envelope(), limit in 1.0..3e11f64, at in 0i64..4_000_000_000_000_000,
    ) {
        prop_assert!(envelope.check("").is_ok(), "{:?}", envelope.check(""));
        let cap = envelope.cap(Some(limit), Timestamp::from_micros(at)).unwrap();
        prop_assert!((0.0..=limit).contains(&cap), "{cap} of {limit}");
    }

    #[test]
    fn a_value_is_raw_over_the_cap_and_never_below_what_it_was(
        envelope in any_envelope(), raw in 0.0..3e11f64, limit in 1.0..3e11f64,
        at in 0i64..4_000_000_000_000_000,
    ) {
        let at = Timestamp::from_micros(at);
        let before = reading(raw, limit);
        let mut held = before.clone();
        set(vec![envelope.clone()]).hold(&mut held, at);
        let cap = envelope.cap(Some(limit), at).unwrap();
        let expected = if cap > 0.0 { (raw / cap).clamp(0.0, 1.0) } else { 1.0 };
        prop_assert!((held.value.unwrap() - expected).abs() < 1e-12);
        prop_assert!(held.value >= before.value);
        prop_assert_eq!((held.raw, held.limit), (before.raw, before.limit));
        prop_assert_eq!(held.envelope.unwrap().cap, cap);
    }

    #[test]
    fn an_envelope_survives_its_json_and_repeats_after_its_period(
        envelope in any_envelope(), limit in 1.0..3e11f64, at in 0i64..2_000_000_000,
    ) {
        let value = serde_json::to_value([&envelope]).unwrap();
        prop_assert_eq!(&read_list(&value).unwrap()[0], &envelope);
        if let (Shape::Sinusoid(_), Some(period)) = (&envelope.shape, envelope.period_s()) {
            let since = envelope.since.unwrap().micros();
            let cap = |us: i64| envelope.cap(Some(limit), Timestamp::from_micros(us)).unwrap();
            let later = since + at + (period * 1e6).round() as i64;
            // The period in whole microseconds is off by half of one.
            let slope = 3.2e11 * std::f64::consts::TAU / (period * 1e6);
            prop_assert!((cap(since + at) - cap(later)).abs() <= slope + 1e-3 * limit);
        }
    }

    #[test]
    fn time_compression_shows_the_same_caps_sooner(
        shape in shape(), speed in 2.0..1000.0f64, seconds in 0.0..1e5f64, limit in 1.0..3e11f64,
    ) {
        let plain = envelope(shape.clone());
        let fast = Envelope { speed, ..envelope(shape) };
        let soon = Timestamp::from_micros((seconds * 1e6) as i64);
        let late = Timestamp::from_micros((soon.micros() as f64 * speed).round() as i64);
        let (a, b) = (fast.cap(Some(limit), soon).unwrap(), plain.cap(Some(limit), late).unwrap());
        // A window may begin within the microsecond that rounding shifts.
        let swings = matches!(plain.shape, Shape::Sinusoid(_));
        prop_assert!(!swings || (a - b).abs() <= 1e-3 * limit.max(2e11), "{a} {b}");
        let near = [-1, 1].map(|us| plain.cap(Some(limit), Timestamp::from_micros(late.micros() + us)).unwrap());
        prop_assert!(swings || a == b || near.contains(&a), "{a} {b}");
    }
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn one(value: Value) -> Envelope {
    read_list(&json!([value])).unwrap().remove(0)
}

#[test]
fn a_default_sinusoid_swings_from_the_limit_down_by_twice_its_amplitude() {
    let paper = one(json!({
        "signal": "memory", "since": "1970-01-01T00:00:00.000000Z",
        "shape": {"sinusoid": {"amplitude": "8GB", "period_s": 600}},
    }));
    let cap = |s: i64| {
        paper
            .cap(Some(48e9), Timestamp::from_micros(s * 1_000_000))
            .unwrap()
    };
    assert_eq!(cap(0), 40e9);
    assert_eq!(cap(150), 48e9);
    assert_eq!(cap(450), 32e9);
    let ahead = one(json!({
        "signal": "memory", "since": "1970-01-01T00:00:00.000000Z", "speed": 60,
        "shape": {"sinusoid": {"amplitude": "8GB", "period_s": 600, "phase_deg": 90}},
    }));
    assert_eq!(ahead.cap(Some(48e9), Timestamp::from_micros(0)), Some(48e9));
    assert_eq!(
        ahead.cap(Some(48e9), Timestamp::from_micros(5_000_000)),
        Some(32e9)
    );
    assert_eq!(ahead.period_s(), Some(10.0));
}

#[test]
fn office_hours_are_those_of_the_wall_clock_in_summer_and_in_winter() {
    let office = one(json!({
        "signal": "memory",
        "shape": {"schedule": {"zone": "Europe/Berlin", "windows": [
            {"cap": "40%", "from": "09:00", "to": "17:00", "days": ["mon", "tue", "wed", "thu", "fri"]}
        ]}},
    }));
    let cap = |text| office.cap(Some(100.0), at(text)).unwrap();
    // A Wednesday in July is two hours ahead of UTC, one in January one.
    assert_eq!(cap("2026-07-01T06:59:59.999999Z"), 100.0);
    assert_eq!(cap("2026-07-01T07:00:00.000000Z"), 40.0);
    assert_eq!(cap("2026-07-01T15:00:00.000000Z"), 100.0);
    assert_eq!(cap("2026-01-07T07:30:00.000000Z"), 100.0);
    assert_eq!(cap("2026-01-07T08:00:00.000000Z"), 40.0);
    assert_eq!(cap("2026-07-04T10:00:00.000000Z"), 100.0, "a Saturday");
}

#[test]
fn a_night_ends_on_the_next_day_and_the_lowest_of_overlapping_windows_counts() {
    let night = one(json!({
        "signal": "power",
        "shape": {"schedule": {"zone": "UTC", "otherwise": "90%", "windows": [
            {"cap": "50%", "from": "22:00", "to": "06:00", "days": ["fri"]},
            {"cap": "20%", "from": "05:00", "to": "07:00"},
        ]}},
    }));
    let cap = |text| night.cap(Some(100.0), at(text)).unwrap();
    assert_eq!(cap("2026-07-03T21:59:59.000000Z"), 90.0);
    assert_eq!(cap("2026-07-03T23:00:00.000000Z"), 50.0, "Friday night");
    assert_eq!(cap("2026-07-04T04:00:00.000000Z"), 50.0, "until Saturday");
    assert_eq!(cap("2026-07-04T05:30:00.000000Z"), 20.0);
    assert_eq!(cap("2026-07-04T23:00:00.000000Z"), 90.0, "Saturday night");
}

#[test]
fn a_devices_own_envelope_comes_before_that_for_every_device_and_the_host_has_its_own() {
    let of = |device: Value, cap: &str| json!({"signal": "memory", "device": device, "shape": {"constant": {"cap": cap}}});
    let list = json!([
        of(Value::Null, "10%"),
        of(json!("*"), "20%"),
        of(json!("GPU-1"), "30%")
    ]);
    let all = set(read_list(&list).unwrap());
    let cap = |device: Option<&str>| {
        let mut held = Reading {
            device: device.map(str::to_owned),
            ..reading(5.0, 100.0)
        };
        all.hold(&mut held, Timestamp::default());
        (held.value.unwrap(), held.envelope.unwrap().cap)
    };
    assert_eq!(cap(None), (0.5, 10.0));
    assert_eq!(cap(Some("GPU-0")), (0.25, 20.0));
    assert_eq!(cap(Some("GPU-1")).1, 30.0);
}

#[test]
fn what_was_not_measured_stays_missing_and_a_forced_one_stays_one() {
    let all = set(vec![one(
        json!({"signal": "memory", "shape": {"constant": {"cap": "50%"}}}),
    )]);
    let mut missing = Reading {
        value: None,
        raw: None,
        missing: Some("gone".into()),
        ..reading(1.0, 100.0)
    };
    all.hold(&mut missing, Timestamp::default());
    assert_eq!((missing.value, missing.envelope.unwrap().cap), (None, 50.0));
    let mut forced = Reading {
        value: Some(1.0),
        ..reading(1.0, 100.0)
    };
    all.hold(&mut forced, Timestamp::default());
    assert_eq!(forced.value, Some(1.0));
    let nothing = set(vec![one(
        json!({"signal": "memory", "shape": {"constant": {"cap": "0%"}}}),
    )]);
    let mut held = reading(0.0, 100.0);
    nothing.hold(&mut held, Timestamp::default());
    assert_eq!(held.value, Some(1.0));
    assert!(held.envelope.unwrap().source.ends_with("by ada"));
}

#[test]
fn bad_envelopes_are_answered_with_the_field_and_the_rule() {
    let sinusoid = |more: Value| {
        let mut shape = json!({"amplitude": "8GB", "period_s": 600});
        shape
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        json!([{"signal": "memory", "shape": {"sinusoid": shape}}])
    };
    let schedule = |window: Value| json!([{"signal": "memory", "shape": {"schedule": {"zone": "UTC", "windows": [window]}}}]);
    let cap =
        |signal: &str, cap: &str| json!([{"signal": signal, "shape": {"constant": {"cap": cap}}}]);
    for (value, field, rule) in [
        (
            cap("thermal", "40%"),
            "envelopes[0].signal",
            "memory, power or contention",
        ),
        (
            cap("memory", "140%"),
            "envelopes[0].shape.constant.cap",
            "within 0% and 100%",
        ),
        (
            cap("memory", "300W"),
            "envelopes[0].shape.constant.cap",
            "bytes for memory",
        ),
        (
            cap("memory", "many"),
            "envelopes[0].shape.constant.cap",
            "must be a share",
        ),
        (cap("mood", "4%"), "envelopes[0].signal", "unknown variant"),
        (
            sinusoid(json!({"period_s": 0})),
            "envelopes[0].shape.sinusoid.period_s",
            "seconds",
        ),
        (
            sinusoid(json!({"amplitude": "0%"})),
            "envelopes[0].shape.sinusoid.amplitude",
            "above 0",
        ),
        (
            sinusoid(json!({"phase_deg": 999})),
            "envelopes[0].shape.sinusoid.phase_deg",
            "360",
        ),
        (
            sinusoid(json!({"phase": 1})),
            "envelopes[0].shape.sinusoid.phase",
            "unknown field",
        ),
        (
            schedule(json!({"cap": "40%", "from": "9am"})),
            "envelopes[0].shape.schedule.windows[0].from",
            "time of day",
        ),
        (
            schedule(json!({"cap": "40%", "from": "09:00", "to": "09:00"})),
            "envelopes[0].shape.schedule.windows[0].to",
            "differ",
        ),
        (
            json!([{"signal": "memory", "shape": {"schedule": {"zone": "Mars", "windows": []}}}]),
            "envelopes[0].shape.schedule.zone",
            "IANA",
        ),
        (
            json!([{"signal": "memory", "speed": -1, "shape": {"constant": {"cap": "4%"}}}]),
            "envelopes[0].speed",
            "must be within",
        ),
        (
            json!([
                {"signal": "memory", "shape": {"constant": {"cap": "4%"}}},
                {"signal": "memory", "shape": {"constant": {"cap": "5%"}}},
            ]),
            "envelopes[1].signal",
            "already",
        ),
        (json!([["memory"]]), "envelopes[0]", "must be an object"),
        (json!({}), "envelopes", "invalid type"),
    ] {
        let error = read_list(&value).unwrap_err();
        assert_eq!(error.field, field, "{error}");
        assert!(error.reason.contains(rule), "{error}");
    }
}
