//! temporary
#![allow(clippy::unwrap_used, clippy::expect_used)]
use fiec_policy::{Action, Config, Input, Now, Policy};
use fiec_schemas::ExecutionId;
use fiec_simulator::{Decide, Scenario, World};
struct T(Policy, u32, String);
impl T {
    fn say(&self, now: Now, out: &[Action], why: &str) {
        for a in out {
            let s = format!("{a:?}");
            if s.contains(&self.2) {
                println!("{} p{} {why} {}", (now.mono.0 - 86_400_000) as f64 / 1e3, self.1, &s[..s.len().min(300)]);
            }
        }
    }
}
impl Decide for T {
    fn step(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Action>) {
        let i = match &input { Input::Vector(..) => "vector".to_owned(), i => format!("{i:?}") };
        if i.contains(&self.2) { println!("{} p{} IN {}", (now.mono.0 - 86_400_000) as f64 / 1e3, self.1, &i[..i.len().min(200)]); }
        let n = out.len();
        self.0.step(now, input, out);
        self.say(now, &out[n..], "OUT");
        if now.mono.0 % 60_000 == 0 && i == "Tick" {
            let id: ExecutionId = self.2.parse().unwrap_or(ExecutionId(Default::default()));
            println!("{} p{} why {:?}", (now.mono.0 - 86_400_000) as f64 / 1e3, self.1, self.0.why(now, id));
        }
    }
    fn act(&mut self, now: Now, out: &mut Vec<Action>) {
        let n = out.len();
        self.0.act(now, out);
        self.say(now, &out[n..], "ACT");
    }
    fn knows(&self, id: ExecutionId) -> bool { self.0.knows(id) }
}
fn main() {
    let mut args = std::env::args().skip(1);
    let s = Scenario::parse(&std::fs::read(args.next().unwrap()).unwrap()).unwrap();
    let id = args.next().unwrap();
    let mut n = 0;
    let mut make = |c: &Config, i| { n += 1; T(Policy::new(c.clone(), i), n, id.clone()) };
    let o = World::new(&s, &mut make).unwrap().run(&mut |_| {});
    println!("{}", o.violation.unwrap());
}
