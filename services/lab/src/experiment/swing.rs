//! Trigger 3: three nodes whose devices offer memory that follows sinusoids, compressed in time.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use fiec::ui::Steps;
use fiec_schemas::envelope::Amount;
use fiec_schemas::{Signal, Threshold, Timestamp};

use super::devices::Devices;
use super::run::{Run, Variant, begin, end};
use super::stand::{Stand, Swing, Wants};
use super::workload::{Kind, Workload, prepare};
use super::{Experiment, ExperimentArgs, Name, runs, wanted};

/// As published: amplitude in GB and period in seconds, for each node.
const ENVELOPES: [(f64, f64); 3] = [(8.0, 600.0), (7.0, 760.0), (6.0, 890.0)];
/// Amplitude of each node's power in per cent of its limit. None were published. These are the
/// memory's amplitudes as shares of 48 GB, with the same periods and a quarter of a period behind.
const POWER_PERCENT: [f64; 3] = [100.0 * 8.0 / 48.0, 100.0 * 7.0 / 48.0, 100.0 * 6.0 / 48.0];
/// Published memory of a device, in GB.
const PUBLISHED_GB: f64 = 48.0;
/// Share of each device that other users hold. With it the troughs of all three envelopes press.
/// Those of the smallest amplitude (36 GB of 48) press for the shortest time.
const USED: f64 = 30.0 / PUBLISHED_GB;
const HIGH: f64 = 0.80;
const LOW: f64 = 0.75;

/// Runs the experiment.
pub(super) async fn run(
    args: &ExperimentArgs,
    devices: Devices,
    steps: &Steps,
) -> anyhow::Result<Experiment> {
    ensure!(
        args.speed >= 1.0 && args.speed <= 1_000.0,
        "--speed must be 1 to 1000, but is {}",
        args.speed
    );
    let speed = if args.quick {
        args.speed.max(480.0)
    } else {
        args.speed
    };
    let shortest = ENVELOPES[0].1 / speed;
    // Two and a half periods of the fastest envelope, as far as the machine's speed allows.
    let seconds = shortest * if args.quick { 2.4 } else { 3.0 };
    // The published sampling of 10 s, on the same scale; a dwell cannot be shorter than 100 ms.
    let dwell_ms = ((10.0 / speed * 1e3) as u32).max(100);
    let emulated = devices.of(0).is_none();
    let mut workloads = Vec::new();
    for kind in [Kind::Gemm, Kind::Lu, Kind::Qr] {
        if !wanted(args, kind.name()) {
            continue;
        }
        steps.step(&format!(
            "sizing {} and running it undisturbed",
            kind.name()
        ));
        workloads.push(prepare(kind, Some(&devices), seconds).await?);
    }
    ensure!(!workloads.is_empty(), "trigger3 has no such program");
    let wants = Wants {
        threshold: Threshold {
            high: HIGH,
            low: LOW,
            dwell_ms,
        },
        device_rest: USED,
        power: true,
        ..Wants::new(ENVELOPES.len(), Some(devices), dwell_ms)
    };
    let stand = Stand::start(wants, steps).await?;
    let mut experiment = Experiment::of(Name::Trigger3, &stand);
    experiment.swings = true;
    experiment.notes.push(format!(
        "Of 48 GB of device memory 30 are in use by others; offered memory swings by 8, 7 and 6 GB \
         around 48 GB less that, in 600, 760 and 890 s, {speed} times as fast, all from their peaks. \
         {} No load takes processors: `baseline with load` is the envelopes without rebinding.",
        if emulated {
            ""
        } else {
            "The devices' own memory stands for 48 GB, all else in proportion."
        }
    ));
    experiment.notes.push(format!(
        "Offered power swings as well, by {:.0}, {:.0} and {:.0} % of its limit around that less as \
         much, in the same periods, a quarter of one behind; power has the thresholds of memory. {} No \
         amplitudes of power were published; these are ours.",
        POWER_PERCENT[0],
        POWER_PERCENT[1],
        POWER_PERCENT[2],
        if emulated {
            "An emulated device reads a draw of 182 of 300 W all the time."
        } else {
            "The draw is what the device reads."
        }
    ));
    let total = runs(args);
    for number in 1..=total {
        for workload in &workloads {
            for variant in Variant::SWINGING {
                let (name, what) = (workload.name, variant.name());
                steps.step(&format!("{name}, {what}, run {number} of {total}"));
                let run = one(&stand, workload, variant, number, speed).await;
                let run = run.with_context(|| format!("{name}, {what}, run {number}"))?;
                experiment.runs.push(run);
            }
        }
    }
    stand.cluster.stop().await;
    steps.done("stopped");
    Ok(experiment)
}

/// The envelopes of each node.
fn swings(emulated: bool) -> Vec<Vec<Swing>> {
    // A real device's memory stands for the published one's.
    let amplitude = |gigabytes: f64| match emulated {
        true => Amount::Bytes((gigabytes * 1e9) as u64),
        false => Amount::Percent(100.0 * gigabytes / PUBLISHED_GB),
    };
    let node = |((gigabytes, period_s), percent): (&(f64, f64), &f64)| {
        let memory = Swing {
            signal: Signal::Memory,
            amplitude: amplitude(*gigabytes),
            period_s: *period_s,
            phase_deg: 90.0,
        };
        let power = Swing {
            signal: Signal::Power,
            amplitude: Amount::Percent(*percent),
            period_s: *period_s,
            phase_deg: 0.0,
        };
        vec![memory, power]
    };
    ENVELOPES.iter().zip(&POWER_PERCENT).map(node).collect()
}

async fn one(
    stand: &Stand,
    workload: &Workload,
    variant: Variant,
    number: u32,
    speed: f64,
) -> anyhow::Result<Run> {
    stand.steady().await?;
    let emulated = stand.devices.as_ref().is_none_or(|d| d.of(0).is_none());
    let (execution, _) = begin(stand, workload, variant, number).await?;
    let from = Timestamp::now();
    if variant != Variant::Baseline {
        stand.swing(&swings(emulated), speed, from).await?;
    }
    let ended = |t: &super::trace::Trace| t.end.as_ref().map(|e| e.at);
    let patience = Duration::from_secs(180);
    let at = stand
        .observer
        .until("it completes", execution, patience, ended)
        .await?;
    end(stand, workload, variant, number, execution, (from, at)).await
}
