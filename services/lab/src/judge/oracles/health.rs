//! While a promise is broken for longer than its bound, some health is red or some duty is overdue:
//! an operator can see it.

use std::time::Duration;

use tokio::time::timeout;

use crate::judge::checker::{Rule, Violation};
use crate::judge::get;

/// How long a service has to answer.
const WITHIN: Duration = Duration::from_secs(5);

/// What a service says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Its name.
    pub service: String,
    /// True if it says that all is well.
    pub is_green: bool,
}

/// Asks the services at these addresses. One that does not answer is not green.
pub async fn observe(services: &[(String, String)]) -> Vec<Health> {
    let mut found = Vec::new();
    for (service, address) in services {
        let answer = timeout(WITHIN, get(address, "/healthz")).await;
        let is_green = matches!(answer, Ok(Ok(page)) if page.starts_with("HTTP/1.1 200"));
        found.push(Health {
            service: service.clone(),
            is_green,
        });
    }
    found
}

/// Finds that nothing shows what is broken. `overdue`: some duty is overdue.
pub fn judge(broken: &[Violation], healths: &[Health], overdue: bool) -> Option<Violation> {
    let all_green = healths.iter().all(|health| health.is_green);
    let is_hidden = !broken.is_empty() && all_green && !overdue;
    let what = "every health is green and nobody is overdue, while this is broken";
    is_hidden.then(|| Violation::new(Rule::Health, "", what))
}
