use super::*;

const MS: Duration = Duration::from_millis(1);

/// What the pieces of a stream say: each in its place, what was dropped as a count.
#[derive(Debug, Default)]
struct Read {
    text: Vec<u8>,
    dropped: Dropped,
    at: u64,
}

impl Read {
    /// Adds the pieces of stdout. Their offsets join each other.
    fn read(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            assert_eq!(piece.offset, self.at, "{piece:?}");
            match &piece.content {
                Content::Text { bytes, part } => {
                    assert!(bytes.len() <= PIECE_LIMIT && (!part || !bytes.is_empty()));
                    self.text.extend(bytes);
                    if !part {
                        self.text.push(b'\n');
                    }
                    self.at += bytes.len() as u64 + u64::from(!part);
                }
                Content::Dropped(dropped) => {
                    self.dropped.lines += dropped.lines;
                    self.dropped.bytes += dropped.bytes;
                    self.at += dropped.bytes;
                }
            }
        }
    }
}

fn text(piece: &Piece) -> (&[u8], bool) {
    match &piece.content {
        Content::Text { bytes, part } => (bytes, *part),
        Content::Dropped(dropped) => panic!("{dropped:?}"),
    }
}

fn all(input: &[u8]) -> Vec<Piece> {
    let now = Instant::now();
    let mut pieces = Pieces::new(now);
    let mut left = pieces.add(LogStream::Stdout, input, now);
    left.extend(pieces.finish(LogStream::Stdout, now));
    left
}

/// A generator of the test's own: xorshift.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

#[test]
fn a_line_of_any_length_arrives_whole() {
    for seed in 1..400_u64 {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let start = Instant::now();
        let mut now = start;
        let mut pieces = Pieces::new(start);
        let (mut read, mut written) = (Read::default(), Vec::new());
        let mut lossless = true;
        let alphabet = ["\n", "é", "日本", "x", "\r", "👩"].map(str::as_bytes);
        for _ in 0..dice.below(60) {
            let mut chunk = Vec::new();
            let words = [3, 300, 20_000][dice.below(3) as usize];
            for _ in 0..dice.below(words) {
                match dice.below(8) {
                    6 => chunk.push(dice.below(256) as u8),
                    7 if dice.below(9) > 0 => chunk.push(b'-'),
                    word => chunk.extend(alphabet[word as usize % 6]),
                }
            }
            written.extend(&chunk);
            let left = pieces.add(LogStream::Stdout, &chunk, now);
            // Some cannot be sent: from one on, all.
            let sent = match dice.below(10) {
                0 => dice.below(left.len() as u64 + 1) as usize,
                _ => left.len(),
            };
            pieces.lost(&left[sent..]);
            lossless &= sent == left.len();
            read.read(&left[..sent]);
            now += MS * dice.below(400) as u32;
            read.read(&pieces.tick(now));
        }
        read.read(&pieces.finish(LogStream::Stdout, now));
        assert_eq!(pieces.offsets(), [written.len() as u64, 0], "seed {seed}");
        assert_eq!(read.at, written.len() as u64, "seed {seed}");
        let told = read.text.len() as u64 + read.dropped.bytes;
        assert_eq!(told, written.len() as u64, "seed {seed}");
        let told = lines(&read.text) as u64 + read.dropped.lines;
        assert_eq!(told, lines(&written) as u64, "seed {seed}");
        if read.dropped.bytes == 0 {
            assert!(read.text == written, "seed {seed}");
        }
        let kept = written.len().min(1_000);
        let tail = &written[written.len() - kept..];
        assert!(
            !lossless || lines(tail) > KEPT_LINES || read.text.ends_with(tail),
            "seed {seed}"
        );
    }
}

#[test]
fn no_character_is_cut() {
    let lines = [
        "é".repeat(4_095),
        "é".repeat(10_000),
        "日".repeat(9_000),
        "👩".repeat(5_000),
    ];
    for line in lines {
        // At an odd place.
        for line in [format!("{line}\n"), format!("a{line}\n")] {
            let left = all(line.as_bytes());
            for piece in &left {
                std::str::from_utf8(text(piece).0).unwrap();
            }
            let joined: Vec<u8> = left.iter().flat_map(|p| text(p).0).copied().collect();
            assert_eq!(joined, line.trim_end().as_bytes());
            assert!(!text(left.last().unwrap()).1);
        }
    }
    // Bytes that are no text are not held back for ever.
    let noise = vec![0x80; 20_000];
    assert_eq!(all(&noise).len(), 3);
}

#[test]
fn what_is_not_finished_leaves_four_times_a_second() {
    let start = Instant::now();
    let mut pieces = Pieces::new(start);
    assert!(
        pieces
            .add(LogStream::Stdout, b"name? \xc3", start)
            .is_empty()
    );
    assert_eq!(pieces.due(), Some(start + UNFINISHED));
    let left = pieces.tick(start + UNFINISHED);
    assert_eq!(
        left.iter().map(text).collect::<Vec<_>>(),
        [(&b"name? "[..], true)]
    );
    assert_eq!(pieces.due(), None, "half a character waits for its rest");
    let left = pieces.add(LogStream::Stdout, b"\xa9\n", start + UNFINISHED * 2);
    assert_eq!(
        left.iter().map(text).collect::<Vec<_>>(),
        [("é".as_bytes(), false)]
    );

    let mut left = 0;
    for step in 0..400 {
        let now = start + Duration::from_secs(5) + MS * 10 * step;
        left += pieces.add(LogStream::Stdout, b"\r 7 %", now).len();
    }
    assert!((13..=16).contains(&left), "{left} in four seconds");
}

#[test]
fn a_flood_leaves_its_budget_and_its_end_and_counts_the_rest() {
    let start = Instant::now();
    let mut pieces = Pieces::new(start);
    let written: String = (1..=3_000).map(|i| format!("line {i}\n")).collect();
    let mut read = Read::default();
    let left = pieces.add(LogStream::Stderr, written.as_bytes(), start);
    assert_eq!(left.len(), PIECES_A_SECOND as usize);
    read.read(&left);
    assert_eq!(pieces.due(), Some(start + SECOND));
    assert!(pieces.tick(start + MS * 999).is_empty());
    let later = pieces.tick(start + SECOND);
    assert!(matches!(&later[0].content, Content::Dropped(dropped) if dropped.lines > 1_000));
    read.read(&later);
    read.read(&pieces.finish(LogStream::Stderr, start + SECOND));
    assert!(read.text.ends_with(b"line 3000\n"));
    assert_eq!(lines(&read.text) as u64 + read.dropped.lines, 3_000);
    assert_eq!(
        read.text.len() as u64 + read.dropped.bytes,
        written.len() as u64
    );
}

#[test]
fn the_second_attempt_continues_the_count() {
    let now = Instant::now();
    let mut pieces = Pieces::new(now);
    pieces.hold(LogStream::Stderr, b"early\n", now);
    pieces.begin([7, 9]);
    let left = pieces.add(LogStream::Stdout, b"x\n", now);
    assert_eq!(left.iter().map(|p| p.offset).collect::<Vec<_>>(), [7, 9]);
    assert_eq!(pieces.offsets(), [9, 15]);
}
