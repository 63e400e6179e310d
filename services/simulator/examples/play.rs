//! Plays a scenario file: `cargo run --release -p fiec-simulator --example play -- FILE [SEED]`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "it ends where it cannot play"
)]

use fiec_simulator::Scenario;

fn main() {
    let mut args = std::env::args().skip(1);
    let file = args.next().expect("a scenario file");
    let mut scenario = Scenario::parse(&std::fs::read(&file).unwrap()).unwrap();
    if let Some(seed) = args.next() {
        scenario.seed = seed.parse().unwrap();
    }
    let outcome = fiec_simulator::play(&scenario, &mut |p| {
        if std::env::var_os("QUIET").is_none() {
            let (now, ended) = (p.now_us / 1_000_000, p.ended);
            eprint!("\r{now} s, {ended} of {} ended   ", p.submitted);
        }
    })
    .unwrap();
    eprintln!();
    println!(
        "{}",
        serde_json::to_string_pretty(&outcome.summary).unwrap()
    );
    if let Some(violation) = outcome.violation {
        println!("{violation}");
        std::process::exit(1);
    }
}
