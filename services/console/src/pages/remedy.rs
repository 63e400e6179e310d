//! Buttons for what would help an execution. Each opens the page that asks before anything is done.

use fiec_schemas::messages::Remedy;
use serde::Serialize;

use super::executions::encoded;

/// A button.
#[derive(Debug, PartialEq, Serialize)]
pub struct Button {
    /// The action.
    pub what: &'static str,
    /// Its label.
    pub words: String,
    /// The page that asks.
    pub address: String,
}

/// The buttons for an execution, which is named by its UUID.
pub fn buttons(remedies: &[Remedy], execution: &str) -> Vec<Button> {
    let of_execution = |what: &'static str, rest: String| Button {
        what,
        words: what.to_owned(),
        address: format!("/act?what={what}&execution={execution}{rest}"),
    };
    let of_node = |what: &'static str, node: &str| Button {
        what,
        words: format!("{what} {node}"),
        address: format!("/act?what={what}&on={}", encoded(node)),
    };
    let button = |remedy: &Remedy| match remedy {
        Remedy::Resume => of_execution("resume", String::new()),
        Remedy::Unpin => of_execution("unpin", String::new()),
        Remedy::Uncordon { node } => of_node("uncordon", node.as_str()),
        Remedy::Undrain { node } => of_node("undrain", node.as_str()),
        Remedy::Retry {
            more_memory_than: None,
        } => of_execution("retry", String::new()),
        Remedy::Retry {
            more_memory_than: Some(bytes),
        } => {
            // A first guess, which the page lets a person change.
            let mib = bytes.saturating_mul(2).div_ceil(1 << 20);
            Button {
                words: format!("retry with {mib} MiB"),
                ..of_execution("retry", format!("&memory={mib}"))
            }
        }
    };
    remedies.iter().map(button).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_leads_to_the_page_that_asks_for_it() {
        let node: fiec_schemas::NodeId = "n1".parse().unwrap();
        let retry = |more_memory_than| Remedy::Retry { more_memory_than };
        let all = [
            Remedy::Resume,
            Remedy::Unpin,
            Remedy::Uncordon { node: node.clone() },
            Remedy::Undrain { node },
            retry(None),
            retry(Some(100 << 20)),
        ];
        let buttons = buttons(&all, "u");
        let addresses: Vec<&str> = buttons.iter().map(|one| one.address.as_str()).collect();
        assert_eq!(
            addresses,
            [
                "/act?what=resume&execution=u",
                "/act?what=unpin&execution=u",
                "/act?what=uncordon&on=n1",
                "/act?what=undrain&on=n1",
                "/act?what=retry&execution=u",
                "/act?what=retry&execution=u&memory=200",
            ]
        );
        assert_eq!(buttons[5].words, "retry with 200 MiB");
    }
}
