//! The mixed load: solvers, a program in Python, outputs, large σ, messages to the outside, arrays,
//! gangs and a tenant with a quota. Most of them rest instead of computing, so that a small machine
//! plays many.

use std::path::Path;

use anyhow::Context as _;
use fiec_schemas::{ClientId, ExecutionId, Tenant};
use serde_json::{Value, json};

use super::schedule::Dice;

/// The program in Python: it counts, keeps its count as σ, says each tenth number to the outside, and
/// makes an output of each third, which no other execution makes. Its result has `pad` bytes more:
/// with many of them it does not fit into a ledger message.
const COUNT: &str = r#"import base64, json, os, socket, time
conn = socket.socket(socket.AF_UNIX)
conn.connect(os.environ["FIEC_SOCKET"])
lines = conn.makefile("rw", encoding="utf-8", newline="\n")
def say(**line):
    lines.write(json.dumps(line) + "\n")
    lines.flush()
def hear():
    line = lines.readline()
    if not line:
        raise SystemExit(0)
    return json.loads(line)
run = hear()
state = run.get("state")
count = int(base64.b64decode(state)) if state else 0
made = []
while count < run["params"]["n"]:
    time.sleep(0.02)
    count += 1
    if count % 3 == 0:
        made.append(f"third-{count}")
        with open(os.path.join(run["outputs"], made[-1]), "w", encoding="utf-8") as output:
            output.write(f"{run['execution']} {count}")
    emit = [{"name": "tenth", "text": str(count)}] if count % 10 == 0 else []
    say(**{"is": "boundary", "emit": emit})
    while True:
        heard = hear()
        if heard["is"] == "state":
            state = base64.b64encode(str(count).encode()).decode()
            say(**{"is": "state", "state": state, "outputs": made})
            made = []
        elif heard["is"] in ("yield", "cancel"):
            raise SystemExit(0)
        elif heard["is"] == "go":
            break
pad = "x" * run["params"].get("pad", 0)
say(**{"is": "completed", "result": {"digest": str(count), "pad": pad}, "outputs": made})
"#;

/// Crashes of a program before it fails.
const RETRIES: u32 = 1_000;

/// A tenant of which one execution may run. One that finds no place takes its turns with the others.
pub const STRAIT: &str = "strait";

/// Name of the program in Python.
pub const COUNTER: &str = "count@1";

/// Writes the package of the program in Python.
///
/// # Errors
/// If the folder cannot be written.
pub fn write_counter(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).context("cannot make the folder of the program")?;
    let manifest = json!({"entry": ["python3", "-B", "count.py"], "protocol": "json_lines",
        "outputs": ["third-*"]});
    std::fs::write(folder.join("count.py"), COUNT)?;
    std::fs::write(folder.join("fiec.json"), manifest.to_string())?;
    Ok(())
}

/// What becomes of the executions of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// They end by themselves. The client asks for changes.
    Passes,
    /// As [`Role::Passes`], but never cancelled: the rest of a gang would wait for ever.
    Member,
    /// They compute as long as the faults go on, then are paused.
    Stays,
    /// As [`Role::Stays`], with long capsules: the client pauses and resumes them again and again, and
    /// each pause is open for seconds.
    Slow,
    /// No node can take them. They wait, and reserve in turn with the others of their tenant.
    NoPlace,
}

/// A line of the load.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// Its tenant.
    pub tenant: Tenant,
    /// The submission.
    pub submission: Value,
    /// The ids that it makes.
    pub names: Vec<String>,
    /// What becomes of them.
    pub role: Role,
}

impl Line {
    /// The executions that it makes.
    ///
    /// # Errors
    /// If a name is no client's id.
    pub fn executions(&self) -> anyhow::Result<Vec<ExecutionId>> {
        let id = |name: &String| {
            Ok(ExecutionId::from_client(
                &self.tenant,
                &ClientId::new(name)?,
            ))
        };
        self.names.iter().map(id).collect()
    }
}

/// Executions that live until everything else has ended: what leaks of them stays to be seen. Two
/// commit as often as they may, one has a large σ, two have long capsules, and one finds no place
/// under a quota. Beside them one that fails once, and is held: at the end it is retried until it
/// has ended.
///
/// # Errors
/// Never for these tenants.
pub fn standing() -> anyhow::Result<Vec<Line>> {
    let steps = |rest_us: u64, state_bytes: u64, every_ms: u64| {
        let params = json!({"capsules": 1_000_000, "rest_us": rest_us, "state_bytes": state_bytes});
        json!({"program": "synthetic@1", "params": params, "commit": {"every_ms": every_ms}})
    };
    let mut slow = steps(5_000_000, 1_024, 0);
    slow["commit"] = json!({"every": 1});
    let fails = json!({"program": "synthetic@1", "on_failure": "hold", "retries": 0,
        "commit": {"every": 1}, "params": {"capsules": 20, "rest_us": 20_000,
            "state_bytes": 1_024, "crash_at": 10, "crash_attempts": 1}});
    let nowhere = json!({"program": "synthetic@1", "requires": {"labels": {"no": "such"}}});
    let lines = [
        ("lab", "steady-1", Role::Stays, steps(20_000, 1_024, 200)),
        ("lab", "steady-2", Role::Stays, steps(20_000, 1_024, 200)),
        (
            "lab",
            "steady-large",
            Role::Stays,
            steps(60_000, 3_000_000, 500),
        ),
        ("lab", "slow-1", Role::Slow, slow.clone()),
        ("lab", "slow-2", Role::Slow, slow),
        ("lab", "fails", Role::Passes, fails),
        (STRAIT, "nowhere", Role::NoPlace, nowhere),
    ];
    let line = |(tenant, name, role, mut submission): (&str, &str, Role, Value)| {
        submission["id"] = json!(name);
        if submission["retries"].is_null() {
            submission["retries"] = json!(RETRIES);
        }
        Ok(Line {
            tenant: tenant.parse()?,
            submission,
            names: vec![name.to_owned()],
            role,
        })
    };
    lines.into_iter().map(line).collect()
}

/// Draws the next lines. `number` makes their names unlike all others.
///
/// # Errors
/// Never for these tenants.
pub fn draw(dice: &mut Dice, number: u64) -> anyhow::Result<Vec<Line>> {
    let lab: Tenant = "lab".parse()?;
    let narrow: Tenant = "narrow".parse()?;
    let name = format!("c{number}");
    let one = |tenant: &Tenant, name: &str, fields: Value| {
        let mut submission = fields;
        submission["id"] = json!(name);
        // A killed child counts as a crash.
        submission["retries"] = json!(RETRIES);
        Line {
            tenant: tenant.clone(),
            names: vec![name.to_owned()],
            submission,
            role: Role::Passes,
        }
    };
    let capsules = 50 + dice.below(250);
    let steps = |capsules: u64, more: Value| {
        let mut params = json!({"capsules": capsules, "rest_us": 20_000, "state_bytes": 1_024});
        if let (Some(params), Some(more)) = (params.as_object_mut(), more.as_object()) {
            params.extend(more.clone());
        }
        json!({"program": "synthetic@1", "params": params, "commit": {"every_ms": 200}})
    };
    let lines = match dice.below(12) {
        0 => {
            let n = 60 + dice.below(60);
            let params = json!({"matrix": {"poisson2d": {"n": n}}, "load_cases": 3});
            let commit = json!({"every_ms": 200});
            vec![one(
                &lab,
                &name,
                json!({"program": "cg@1", "params": params, "commit": commit}),
            )]
        }
        1 => {
            let n = 50 + dice.below(150);
            let params = json!({"n": n, "pad": 20_000 * (n % 2)});
            let commit = json!({"every": 5});
            vec![one(
                &lab,
                &name,
                json!({"program": COUNTER, "params": params, "commit": commit}),
            )]
        }
        2 => {
            let large = json!({"state_bytes": 3_000_000, "rest_us": 60_000});
            vec![one(&lab, &name, steps(capsules / 4, large))]
        }
        3 => {
            let emits = json!({"emit_every": 5});
            vec![one(&lab, &name, steps(capsules, emits))]
        }
        4 => {
            let count = 4 + dice.below(8);
            let mut submission = steps(20, json!({}));
            submission["array"] = json!({"count": count});
            submission["id"] = json!(name);
            submission["retries"] = json!(RETRIES);
            vec![Line {
                tenant: lab,
                names: (0..count).map(|n| format!("{name}-{n}")).collect(),
                submission,
                role: Role::Passes,
            }]
        }
        5 => {
            let member = |n: u64| {
                let mut submission = steps(40, json!({}));
                submission["batch"] = json!(name);
                submission["gang"] = json!({"name": name, "size": 2});
                Line {
                    role: Role::Member,
                    ..one(&lab, &format!("{name}-g{n}"), submission)
                }
            };
            vec![member(0), member(1)]
        }
        6 | 7 => {
            let two = [format!("{name}-a"), format!("{name}-b")];
            let all = two.map(|name| one(&narrow, &name, steps(capsules / 2, json!({}))));
            all.into()
        }
        8 => {
            let strait: Tenant = STRAIT.parse()?;
            vec![one(&strait, &name, steps(15, json!({})))]
        }
        // A request stays open for seconds until the next boundary.
        9 | 10 => {
            let long = json!({"capsules": 3 + dice.below(3), "rest_us": 5_000_000});
            let mut submission = steps(0, long);
            submission["commit"] = json!({"every": 1});
            vec![one(&lab, &name, submission)]
        }
        _ => vec![one(&lab, &name, steps(capsules, json!({})))],
    };
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use fiec_schemas::Submission;

    use super::*;

    #[test]
    fn every_line_of_the_load_is_a_valid_submission_under_a_name_of_its_own() {
        let mut dice = Dice::new(3);
        let mut names = std::collections::BTreeSet::new();
        let drawn = (0..200).map(|number| draw(&mut dice, number).unwrap());
        for lines in drawn.chain([standing().unwrap()]) {
            for line in lines {
                let submission: Submission =
                    serde_json::from_value(line.submission.clone()).unwrap();
                submission.check().unwrap();
                for name in line.names {
                    assert!(names.insert(name), "{}", line.submission);
                }
            }
        }
    }
}
