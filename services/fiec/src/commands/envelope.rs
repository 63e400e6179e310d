//! `fiec node envelope`: limits what a node offers of a signal, by a cap, a schedule or a sinusoid.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{ArgGroup, Args};
use fiec_schemas::envelope::{
    Amount, Constant, Day, Envelope, NodeEnvelopes, Schedule, Shape, Sinusoid, TimeOfDay, Window,
    Zone, read_list,
};
use fiec_schemas::messages::{ApiReply, EnvelopeChange};
use fiec_schemas::{NodeId, Reading, Signal, Timestamp};
use serde_json::Value;

use crate::client;
use crate::context::Global;
use crate::exit::Outcome;

const EXAMPLES: &str = "\
With the limit L of a signal and the cap c(t) of its envelope, the signal's value is raw / c(t): \
thresholds then act on what is offered. The worker applies it, it outlives restarts, and the \
history says who set it.

Examples:
  fiec node envelope n1 --signal memory --cap 40%
  fiec node envelope n1 --signal memory --device GPU-8f… --cap 40% \\
      --from 09:00 --to 17:00 --days mon-fri --zone Europe/Berlin
  fiec node envelope n1 --signal memory --sinusoid amplitude=8GiB,period=600s --speed 60
  fiec node envelope --file examples/envelopes.json
  fiec node envelope n1 --clear";

/// Limit what a node offers of a signal: a cap, a cap by time of day, or a sinusoid
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, group(
    ArgGroup::new("what").args(["cap", "sinusoid", "file", "clear", "show"])
))]
pub struct EnvelopeArgs {
    /// The node; with --file, only this node of the file
    #[arg(value_parser = crate::cli::parse_node, required_unless_present = "file")]
    pub node: Option<NodeId>,
    /// memory, power or contention
    #[arg(long, value_parser = parse_signal)]
    pub signal: Option<Signal>,
    /// A device's UUID, or * for each device [default: the node itself]
    #[arg(long)]
    pub device: Option<String>,
    /// The cap: a share of the limit (40%), bytes (8GiB, 8GB) or watts (300W)
    #[arg(long, requires = "signal")]
    pub cap: Option<Amount>,
    /// Time of day from which the cap applies
    #[arg(long, requires_all = ["cap", "zone"])]
    pub from: Option<TimeOfDay>,
    /// Time of day until which the cap applies
    #[arg(long, requires_all = ["cap", "zone"])]
    pub to: Option<TimeOfDay>,
    /// Days on which the cap applies: mon-fri, sat,sun
    #[arg(long, requires_all = ["cap", "zone"])]
    pub days: Option<String>,
    /// Time zone of these times: an IANA name, or UTC
    #[arg(long)]
    pub zone: Option<Zone>,
    /// `amplitude=AMOUNT,period=SECONDS[,phase=DEGREES][,mean=AMOUNT]`; the default mean is the
    /// limit minus the amplitude, so that the peak is the limit
    #[arg(long, requires = "signal", value_parser = parse_sinusoid)]
    pub sinusoid: Option<Sinusoid>,
    /// Start of a sinusoid, or of faster time (RFC 3339) [default: now]
    #[arg(long)]
    pub since: Option<Timestamp>,
    /// Factor by which time passes faster for the envelope, for experiments
    #[arg(long, default_value_t = 1.0)]
    pub speed: f64,
    /// JSON file {"NODE": [envelope, …], …}; it replaces all envelopes of these nodes
    #[arg(long, conflicts_with_all = ["signal", "device"])]
    pub file: Option<PathBuf>,
    /// Remove envelopes: all of the node, or those of --signal and --device
    #[arg(long)]
    pub clear: bool,
    /// Show the envelopes in force and their course (the default without options)
    #[arg(long)]
    pub show: bool,
}

fn parse_signal(text: &str) -> Result<Signal, String> {
    let found = Signal::ALL.into_iter().find(|s| s.as_str() == text);
    found.ok_or_else(|| format!("{text:?} is no signal; write memory, power or contention"))
}

fn parse_sinusoid(text: &str) -> Result<Sinusoid, String> {
    let (mut amplitude, mut period_s, mut phase_deg, mut mean) = (None, None, 0.0, None);
    for part in text.split(',') {
        let (name, value) = part
            .split_once('=')
            .ok_or_else(|| format!("{part:?} must be name=value"))?;
        let number = |unit: &str| {
            let digits = value.strip_suffix(unit).unwrap_or(value);
            let number: Result<f64, _> = digits.parse();
            number.map_err(|_| format!("{name}: {value:?} is no number"))
        };
        match name {
            "amplitude" => amplitude = Some(value.parse().map_err(|e| format!("{name}: {e}"))?),
            "mean" => mean = Some(value.parse().map_err(|e| format!("{name}: {e}"))?),
            "period" => period_s = Some(number("s")?),
            "phase" => phase_deg = number("deg")?,
            other => {
                return Err(format!(
                    "{other:?} is none of amplitude, period, phase and mean"
                ));
            }
        }
    }
    Ok(Sinusoid {
        amplitude: amplitude.ok_or("amplitude is missing, e.g. amplitude=8GiB")?,
        period_s: period_s.ok_or("period is missing, e.g. period=600s")?,
        phase_deg,
        mean,
    })
}

/// Shows or changes the envelopes of nodes.
///
/// # Errors
/// If no policy service answers, or the file cannot be read.
pub async fn run(args: EnvelopeArgs, global: &Global) -> anyhow::Result<Outcome> {
    let changes = match changes(&args) {
        Ok(changes) => changes,
        Err(error) => {
            eprintln!("{error:#}");
            return Ok(Outcome::BadInput);
        }
    };
    let broker = global.broker("envelope").await?;
    let mut outcome = Outcome::Done;
    for (node, change) in changes {
        let reply = client::me(&broker).envelope(node.clone(), change).await?;
        if global.json {
            println!("{}", serde_json::to_string(&reply)?);
        }
        if let Some(error) = &reply.error {
            if !global.json {
                eprintln!("{node}: {error}");
            }
            outcome = Outcome::Failed;
        } else if !global.json {
            let nodes = client::me(&broker).nodes().await?;
            print(&node, &reply, &nodes, Timestamp::now());
        }
    }
    Ok(outcome)
}

/// The requests to send, in order. All are checked before the first is sent.
fn changes(args: &EnvelopeArgs) -> anyhow::Result<Vec<(NodeId, Option<EnvelopeChange>)>> {
    if let Some(file) = &args.file {
        return from_file(file, args.node.as_ref());
    }
    let node = args.node.clone().context("name the node")?;
    if args.clear {
        let (signal, device) = (args.signal, args.device.clone());
        return Ok(vec![(node, Some(EnvelopeChange::Clear { signal, device }))]);
    }
    let Some(envelope) = envelope(args)? else {
        return Ok(vec![(node, None)]);
    };
    let envelopes = serde_json::to_value([envelope])?;
    read_list(&envelopes)?;
    Ok(vec![(node, Some(EnvelopeChange::Set { envelopes }))])
}

fn envelope(args: &EnvelopeArgs) -> anyhow::Result<Option<Envelope>> {
    let shape = match (args.cap, &args.sinusoid) {
        (Some(cap), _) => match &args.zone {
            Some(zone) => Shape::Schedule(Schedule {
                zone: zone.clone(),
                windows: vec![Window {
                    cap,
                    from: args.from,
                    to: args.to,
                    days: match &args.days {
                        Some(days) => Day::parse_list(days).map_err(anyhow::Error::msg)?,
                        None => Vec::new(),
                    },
                }],
                otherwise: None,
            }),
            None => Shape::Constant(Constant { cap }),
        },
        (None, Some(sinusoid)) => Shape::Sinusoid(sinusoid.clone()),
        (None, None) => {
            if args.signal.is_some() {
                bail!("no envelope named for the signal: use --cap, --sinusoid or --clear");
            }
            return Ok(None);
        }
    };
    Ok(Some(Envelope {
        signal: args.signal.context("name the signal: --signal memory")?,
        device: args.device.clone(),
        shape,
        since: args.since,
        speed: args.speed,
    }))
}

fn from_file(
    file: &std::path::Path,
    only: Option<&NodeId>,
) -> anyhow::Result<Vec<(NodeId, Option<EnvelopeChange>)>> {
    let name = file.display();
    let text = std::fs::read(file).with_context(|| format!("cannot read {name}"))?;
    let nodes: BTreeMap<NodeId, Value> = serde_json::from_slice(&text)
        .with_context(|| format!("{name} must be {{\"NODE\": [envelope, …], …}}"))?;
    let mut changes = Vec::new();
    for (node, envelopes) in nodes {
        if only.is_some_and(|only| *only != node) {
            continue;
        }
        read_list(&envelopes).with_context(|| format!("{name}: {node}"))?;
        changes.push((node, Some(EnvelopeChange::Replace { envelopes })));
    }
    match (only, changes.is_empty()) {
        (Some(only), true) => bail!("{name} has no entry for node {only}"),
        (None, true) => bail!("{name} names no node"),
        _ => Ok(changes),
    }
}

fn print(node: &NodeId, reply: &ApiReply, nodes: &ApiReply, now: Timestamp) {
    if reply.message.is_empty() {
        let none = NodeEnvelopes::default();
        let set = reply.envelopes.as_ref().unwrap_or(&none);
        match set.envelopes.is_empty() {
            true => println!("{node} has no envelope: it offers all its resources"),
            false => println!("{node}, set by {} at {}", set.who, set.at),
        }
    } else {
        println!("{}", reply.message);
    }
    let status = nodes.nodes.iter().find(|n| n.descriptor.node == *node);
    let vector = status.and_then(|n| n.vector.as_ref());
    for envelope in reply.envelopes.iter().flat_map(|set| &set.envelopes) {
        let meant = |r: &&Reading| {
            r.signal == envelope.signal
                && match envelope.device.as_deref() {
                    Some(fiec_schemas::envelope::EVERY_DEVICE) => {
                        r.device.is_some() && !r.is_part()
                    }
                    device => r.device.as_deref() == device,
                }
        };
        let reading = vector.and_then(|v| v.readings.iter().find(meant));
        println!("{}", describe(envelope, reading, now));
    }
}

/// Describes an envelope: its form, what it offers now, and its course.
fn describe(envelope: &Envelope, reading: Option<&Reading>, now: Timestamp) -> String {
    let limit = reading.and_then(|r| r.limit);
    let mut text = format!("  {envelope}");
    let Some(limit) = limit else {
        text.push_str("\n    its limit is not known: the signal is not measured there now");
        return text;
    };
    let share = |at| envelope.cap(Some(limit), at).map(|cap| cap / limit);
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    if let Some(now) = share(now) {
        text.push_str(&format!("\n    offers {} of the limit now", percent(now)));
    }
    if let Some(value) = reading.and_then(|r| r.value) {
        text.push_str(&format!(", of which {} is in use", percent(value)));
    }
    if let Some(period) = envelope.period_s() {
        let line = sparkline(|part| {
            let later = now.micros().saturating_add((part * period * 1e6) as i64);
            share(Timestamp::from_micros(later)).unwrap_or(1.0)
        });
        text.push_str(&format!("\n    {line} in the next {}", span(period)));
    }
    text
}

/// A number of seconds with a unit, for people.
fn span(seconds: f64) -> String {
    match seconds {
        s if s >= 172_800.0 => format!("{:.0} days", s / 86_400.0),
        s if s >= 7_200.0 => format!("{:.0} h", s / 3_600.0),
        s => format!("{s:.0} s"),
    }
}

const WIDTH: usize = 48;

/// A chart of one period. Each column shows the share at its middle.
fn sparkline(share: impl Fn(f64) -> f64) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let column = |n: usize| {
        let value = share((n as f64 + 0.5) / WIDTH as f64).clamp(0.0, 1.0);
        LEVELS[((value * 8.0) as usize).min(7)]
    };
    (0..WIDTH).map(column).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: EnvelopeArgs,
    }

    fn words(line: &str) -> String {
        let args = std::iter::once("x").chain(line.split_whitespace());
        let args = match Line::try_parse_from(args) {
            Ok(line) => line.args,
            Err(error) => return error.to_string(),
        };
        match changes(&args) {
            Ok(changes) => match &changes[0].1 {
                Some(EnvelopeChange::Set { envelopes }) => {
                    read_list(envelopes).unwrap()[0].to_string()
                }
                other => format!("{other:?}"),
            },
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn the_command_line_becomes_an_envelope_or_the_rule_that_it_breaks() {
        assert_eq!(words("n1 --signal memory --cap 40%"), "memory: cap of 40%");
        assert_eq!(
            words(
                "n1 --signal power --device * --cap 300W --from 09:00 --to 17:00 --days sat,sun --zone UTC"
            ),
            "power of every device: 300W 09:00-17:00 sat,sun in UTC"
        );
        assert_eq!(
            words(
                "n1 --signal memory --sinusoid amplitude=8GiB,period=600s,phase=90deg --speed 60"
            ),
            "memory: sinusoid of 8GiB in 600 s from 90 degrees, 60 times as fast"
        );
        assert_eq!(words("n1"), "None");
        assert!(words("n1 --clear --signal memory").contains("Clear"));
        for (line, rule) in [
            ("n1 --signal memory --cap 140%", "within 0% and 100%"),
            (
                "n1 --signal latency --cap 40%",
                "memory, power or contention",
            ),
            ("n1 --signal memory --cap 300W", "bytes for memory"),
            ("n1 --signal memory --cap lots", "must be a share"),
            ("n1 --cap 40%", "--signal"),
            ("n1 --signal memory --cap 4% --from 09:00", "--zone"),
            (
                "n1 --signal memory --cap 4% --from 9am --zone UTC",
                "time of day",
            ),
            ("n1 --signal memory --cap 4% --zone Mars", "IANA"),
            (
                "n1 --signal memory --sinusoid amplitude=8GiB",
                "period is missing",
            ),
            ("n1 --signal memory --cap 4% --clear", "cannot be used with"),
            ("n1 --signal memory", "--cap, --sinusoid or --clear"),
            ("--cap 4% --signal memory", "<NODE>"),
        ] {
            assert!(words(line).contains(rule), "{line}: {}", words(line));
        }
    }

    #[test]
    fn the_papers_envelopes_are_read_from_their_file() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/envelopes.json");
        let all = from_file(file.as_ref(), None).unwrap();
        let words = |change: &Option<EnvelopeChange>| match change {
            Some(EnvelopeChange::Replace { envelopes }) => {
                read_list(envelopes).unwrap()[0].to_string()
            }
            other => format!("{other:?}"),
        };
        let lines: Vec<String> = all
            .iter()
            .map(|(n, c)| format!("{n} {}", words(c)))
            .collect();
        assert_eq!(
            lines,
            [
                "n1 memory of every device: sinusoid of 8GB in 600 s",
                "n2 memory of every device: sinusoid of 7GB in 760 s",
                "n3 memory of every device: sinusoid of 6GB in 890 s",
            ]
        );
        let n2: NodeId = "n2".parse().unwrap();
        assert_eq!(from_file(file.as_ref(), Some(&n2)).unwrap().len(), 1);
        let n9: NodeId = "n9".parse().unwrap();
        let error = from_file(file.as_ref(), Some(&n9)).unwrap_err();
        assert!(error.to_string().contains("no entry for node n9"));
    }

    #[test]
    fn a_period_is_drawn_from_what_is_offered() {
        let line = sparkline(|part| if part < 0.5 { 1.0 } else { 0.1 });
        assert_eq!(line, format!("{}{}", "█".repeat(24), "▁".repeat(24)));
    }
}
