//! F and a part of L from real traffic: the kernel's `TCP_INFO` of connections that this process
//! has opened. In a worker those lead to the broker.
//!
//! F of the node is 1 − exp(−r / [`RETRANSMITS_REF`]). r is the share of retransmitted segments in
//! the last [`WINDOW_MS`]: 5 % gives 0.63, 15 % 0.95. The kernel's smoothed round trip is the part
//! `peer:@broker` of L, with its own base. It includes the delay of acknowledgements, up to 40 ms
//! if the other side has no data to send. So it only informs. L itself measures answered messages
//! ([`crate::latency`]).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem::ManuallyDrop;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{FromRawFd, RawFd};

use fiec_schemas::hardware::{Reading, Signal};
use fiec_schemas::ids::Timestamp;
use serde::{Deserialize, Serialize};

use crate::Probe;
use crate::kernel_file::Once;
use crate::latency::LatencyConfig;
use crate::reading::Make;

/// The place of this part of L. No node can have this name.
pub const PLACE: &str = "peer:@broker";
/// Window of segments, in milliseconds.
pub const WINDOW_MS: i64 = 30_000;
/// This share of retransmitted segments gives F = 0.63.
pub const RETRANSMITS_REF: f64 = 0.05;
/// Least segments for a reading: among fewer, one retransmission would count too much.
const LEAST_SEGMENTS: u64 = 100;
/// Interval of the readings of connections, in milliseconds.
const EVERY_MS: i64 = 500;
const SOURCE: &str = "TCP_INFO";

/// The kernel's figures of a connection that this process has opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Its two ends.
    pub name: String,
    /// The smoothed round trip in microseconds.
    pub rtt_us: u32,
    /// Data segments sent since it was opened, retransmissions included.
    pub sent: u64,
    /// Retransmitted segments.
    pub again: u64,
}

/// A source of connections.
pub trait ConnectionSource: Send {
    /// Returns every open connection, in any order.
    ///
    /// # Errors
    /// The reason why they cannot be read.
    fn connections(&mut self) -> Result<Vec<Connection>, String>;
}

/// F of the node, and L as the kernel measures it.
pub struct ConnectionProbe {
    source: Box<dyn ConnectionSource>,
    /// (sent, retransmitted) of each connection at the last reading. None before the first.
    known: Option<BTreeMap<String, (u64, u64)>>,
    /// Segments between two readings.
    window: VecDeque<(Timestamp, u64, u64)>,
    lowest_us: f64,
    last: Option<(Timestamp, Vec<Reading>)>,
    once: Once,
}

impl ConnectionProbe {
    /// A probe of this process's connections.
    pub fn own() -> Self {
        Self::of(OwnConnections)
    }

    /// A probe of any source.
    pub fn of(source: impl ConnectionSource + 'static) -> Self {
        Self {
            source: Box::new(source),
            known: None,
            window: VecDeque::new(),
            lowest_us: f64::INFINITY,
            last: None,
            once: Once::default(),
        }
    }

    /// Notes the segments since the last reading. The earlier segments of a connection count only
    /// if it was opened after the last reading.
    fn note(&mut self, now: Timestamp, connections: &[Connection]) {
        let (mut sent, mut again) = (0, 0);
        if let Some(known) = &self.known {
            for c in connections {
                let (s, a) = known.get(&c.name).copied().unwrap_or_default();
                sent += c.sent.saturating_sub(s);
                again += c.again.saturating_sub(a);
            }
            self.window.push_back((now, sent, again));
        }
        let oldest = now.micros() - WINDOW_MS * 1_000;
        self.window.retain(|(at, ..)| at.micros() >= oldest);
        let facts = connections
            .iter()
            .map(|c| (c.name.clone(), (c.sent, c.again)));
        self.known = Some(facts.collect());
    }

    fn look(&mut self, now: Timestamp) -> Vec<Reading> {
        let make = |signal, device, unit| Make {
            signal,
            device,
            unit,
            source: SOURCE,
            at: now,
        };
        let fabric = || make(Signal::Fabric, None, "ratio");
        let connections = match self.source.connections() {
            Ok(connections) => connections,
            Err(why) => {
                self.once.warn("connections", &why);
                return vec![fabric().missing(why)];
            }
        };
        self.note(now, &connections);
        let sum = |of: fn(&(Timestamp, u64, u64)) -> u64| self.window.iter().map(of).sum::<u64>();
        let (sent, again) = (sum(|w| w.1), sum(|w| w.2));
        let mut out = vec![match (connections.is_empty(), sent) {
            (true, _) => fabric().missing("no connection is open"),
            (false, 0) => fabric().missing(format!("nothing was sent within {WINDOW_MS} ms")),
            (false, sent) => {
                let share = again.min(sent) as f64 / sent.max(LEAST_SEGMENTS) as f64;
                let value = 1.0 - (-share / RETRANSMITS_REF).exp();
                fabric().value(value, share, None)
            }
        }];
        if let Some(rtt) = connections.iter().map(|c| c.rtt_us).max() {
            let rtt = f64::from(rtt);
            self.lowest_us = self.lowest_us.min(rtt);
            let above = (rtt - self.lowest_us) / LatencyConfig::default().ref_us;
            let place = make(Signal::Latency, Some(PLACE), "us");
            out.push(place.value(1.0 - (-above).exp(), rtt, None));
        }
        out
    }
}

impl Probe for ConnectionProbe {
    fn name(&self) -> &'static str {
        "connections"
    }

    fn read(&mut self, now: Timestamp, out: &mut Vec<Reading>) {
        let fresh = |at: Timestamp| (0..EVERY_MS * 1_000).contains(&(now.micros() - at.micros()));
        if let Some((at, readings)) = &self.last
            && fresh(*at)
        {
            out.extend(readings.iter().cloned());
            return;
        }
        let readings = self.look(now);
        out.extend(readings.iter().cloned());
        self.last = Some((now, readings));
    }
}

/// The connections of this process, found among its open files.
struct OwnConnections;

/// `TCP_ESTABLISHED` and `TCP_LISTEN` of the kernel.
const ESTABLISHED: u8 = 1;
const LISTEN: u8 = 10;

impl ConnectionSource for OwnConnections {
    fn connections(&mut self) -> Result<Vec<Connection>, String> {
        let folder = "/proc/self/fd";
        let files = std::fs::read_dir(folder).map_err(|e| format!("{folder}: {e}"))?;
        let numbers = files.flatten().filter_map(|entry| {
            let name = entry.file_name();
            name.to_str()?.parse::<RawFd>().ok()
        });
        let sockets: Vec<_> = numbers.filter_map(|fd| Some((fd, info(fd)?))).collect();
        // Accepted connections were opened by the other side.
        let listening: Vec<u16> = sockets
            .iter()
            .filter(|(_, info)| info.state == LISTEN)
            .filter_map(|(fd, _)| Some(ends(*fd).ok()?.0.port()))
            .collect();
        let open = sockets.iter().filter(|(_, i)| i.state == ESTABLISHED);
        Ok(open
            .filter_map(|(fd, info)| {
                let (own, peer) = ends(*fd).ok()?;
                let peer = peer?;
                (!listening.contains(&own.port())).then(|| Connection {
                    name: format!("{own} to {peer}"),
                    rtt_us: info.rtt_us,
                    sent: u64::from(info.sent),
                    again: u64::from(info.again),
                })
            })
            .collect())
    }
}

/// The fields of `struct tcp_info` that are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Info {
    state: u8,
    rtt_us: u32,
    again: u32,
    sent: u32,
}

impl Info {
    /// Reads the kernel's bytes at the offsets of its `linux/tcp.h`, which only grows. None before
    /// Linux 4.6, which does not count data segments.
    fn of(bytes: &[u8]) -> Option<Self> {
        let word = |offset: usize| {
            let bytes = bytes.get(offset..offset + 4)?;
            Some(u32::from_ne_bytes(bytes.try_into().ok()?))
        };
        Some(Self {
            state: *bytes.first()?,
            rtt_us: word(68)?,
            again: word(100)?,
            sent: word(156)?,
        })
    }
}

/// Returns the kernel's figures of an open file, if it is a TCP socket.
fn info(fd: RawFd) -> Option<Info> {
    let mut bytes = [0u8; 256];
    let mut length = libc::socklen_t::try_from(bytes.len()).ok()?;
    // SAFETY: the kernel writes at most `length` bytes into `bytes` and returns their number. The
    // number of a closed file gives an error, and a reused one gives that file's state. Nothing is
    // changed.
    #[allow(unsafe_code)]
    let told = unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            bytes.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    let written = usize::try_from(length).ok().filter(|_| told == 0)?;
    Info::of(bytes.get(..written)?)
}

/// Returns the addresses of a TCP socket's own end and of its peer, if it has one.
fn ends(fd: RawFd) -> io::Result<(SocketAddr, Option<SocketAddr>)> {
    // SAFETY: only the addresses are read, and the socket is never closed here. A number that is no
    // socket gives an error.
    #[allow(unsafe_code)]
    let socket = ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(fd) });
    Ok((socket.local_addr()?, socket.peer_addr().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance;
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000 + ms * 1_000)
    }

    /// Replays one recorded reading after the other.
    struct Played(VecDeque<Result<Vec<Connection>, String>>);

    impl ConnectionSource for Played {
        fn connections(&mut self) -> Result<Vec<Connection>, String> {
            self.0
                .pop_front()
                .unwrap_or_else(|| Err("the trace is over".into()))
        }
    }

    fn connection(name: &str, rtt_us: u32, sent: u64, again: u64) -> Connection {
        Connection {
            name: name.into(),
            rtt_us,
            sent,
            again,
        }
    }

    fn play(looks: Vec<Result<Vec<Connection>, String>>, every_ms: i64) -> Vec<Vec<Reading>> {
        let steps = looks.len();
        let mut probe = ConnectionProbe::of(Played(looks.into()));
        let steps = (0i64..).take(steps).map(|step| {
            let mut out = Vec::new();
            probe.read(at(step * every_ms), &mut out);
            conformance::check_all(&out).unwrap();
            out
        });
        steps.collect()
    }

    #[test]
    fn segments_that_were_sent_again_are_f_and_the_round_trip_is_a_part_of_l() {
        let one = |rtt, sent, again| Ok(vec![connection("a", rtt, sent, again)]);
        // Segments before the first reading do not count. Ten of two hundred were retransmitted.
        let steps = play(vec![one(200, 1_000, 900), one(10_200, 1_200, 910)], 1_000);
        assert!(steps[0][0].missing.is_some(), "{steps:?}");
        let (f, l) = (&steps[1][0], &steps[1][1]);
        assert_eq!(
            (f.signal, f.device.as_deref(), f.raw),
            (Signal::Fabric, None, Some(0.05))
        );
        assert!((f.value.unwrap() - (1.0 - (-1.0f64).exp())).abs() < 1e-12);
        assert_eq!((l.device.as_deref(), l.raw), (Some(PLACE), Some(10_200.0)));
        assert!(l.is_part());
        assert!((l.value.unwrap() - (1.0 - (-1.0f64).exp())).abs() < 1e-12);
    }

    #[test]
    fn one_segment_among_few_is_no_sign_and_all_is_forgotten_after_the_window() {
        let of = |sent, again| Ok(vec![connection("a", 1, sent, again)]);
        let steps = play(vec![of(0, 0), of(10, 1)], 1_000);
        assert_eq!(steps[1][0].raw, Some(0.01));
        let steps = play(
            vec![of(0, 0), of(200, 100), of(400, 100), of(400, 100)],
            20_000,
        );
        let raw: Vec<_> = steps.iter().map(|s| s[0].raw).collect();
        assert_eq!(raw, [None, Some(0.5), Some(0.25), Some(0.0)]);
        assert!(
            play(vec![of(5, 0), of(5, 0)], 1_000)[1][0]
                .missing
                .is_some()
        );
    }

    #[test]
    fn a_connection_that_was_opened_since_counts_whole_and_others_go_on_without_one_that_is_gone() {
        let looks = vec![
            Ok(vec![connection("a", 1, 500, 50)]),
            Ok(vec![connection("b", 1, 200, 20)]),
            Ok(vec![]),
            Err("no /proc".to_owned()),
        ];
        let steps = play(looks, 1_000);
        assert_eq!(steps[1][0].raw, Some(0.1));
        assert_eq!(
            steps[2][0].missing.as_deref(),
            Some("no connection is open")
        );
        assert_eq!(steps[3][0].missing.as_deref(), Some("no /proc"));
        assert_eq!(steps[3].len(), 1, "no round trip is made up");
    }

    #[test]
    fn it_is_looked_twice_a_second_at_most() {
        let of = |sent| Ok(vec![connection("a", 1, sent, 0)]);
        let steps = play(vec![of(0), of(100), of(200)], 200);
        assert!(steps[2] == steps[0] && steps[2][0].at == at(0));
    }

    #[test]
    fn the_kernel_tells_of_the_connections_that_this_process_has_opened_and_of_no_other() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut opened = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        for _ in 0..3 {
            opened.write_all(b"x").unwrap();
            accepted.read_exact(&mut [0]).unwrap();
            accepted.write_all(b"y").unwrap();
            opened.read_exact(&mut [0]).unwrap();
        }
        let name = format!(
            "{} to {}",
            opened.local_addr().unwrap(),
            opened.peer_addr().unwrap()
        );
        let back = accepted.local_addr().unwrap().to_string();
        let mut probe = OwnConnections;
        let all = probe.connections().unwrap();
        let own = all.iter().find(|c| c.name == name).unwrap();
        assert!(
            own.sent >= 3 && own.again <= own.sent && own.rtt_us > 0,
            "{own:?}"
        );
        assert!(!all.iter().any(|c| c.name.starts_with(&back)), "{all:?}");
        drop(opened);
        assert!(!probe.connections().unwrap().iter().any(|c| c.name == name));
    }
}
