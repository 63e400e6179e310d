//! The page around the figures. Every text from outside goes through [`escape`].

use std::fmt::Write;

use super::curves;
use super::facts::{Facts, seconds};
use super::figures::{self, Nodes};
use crate::error::Result;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;\
padding:0 1rem;color:#1d2329;background:#fff}h1{font-size:1.5rem;margin-bottom:.2rem}\
h2{font-size:1.1rem;margin-top:2.2rem}table{border-collapse:collapse;width:100%}\
td,th{text-align:left;vertical-align:top;padding:.3rem .7rem .3rem 0;\
border-bottom:1px solid #e3e6ea}th{font-weight:600;white-space:nowrap}\
td{overflow-wrap:anywhere;white-space:pre-line}svg{max-width:100%;height:auto}\
.n{font-variant-numeric:tabular-nums;white-space:nowrap}.s{color:#5b6670}.bad{color:#b00020;font-weight:600}";

/// Facts that are marked if the execution ended badly.
const BAD: [&str; 2] = ["phase", "failure"];

/// Text as HTML.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn gap(us: Option<i64>) -> String {
    us.map(|us| format!("{:.3} ms", us as f64 / 1e3))
        .unwrap_or_default()
}

/// Joules of the host and of the device; empty if none were measured.
fn energy([host, device]: &[Option<String>; 2]) -> String {
    let part = |joules: &Option<String>, name| joules.as_ref().map(|j| format!("{j} J of {name}"));
    let parts = [part(host, "the host"), part(device, "the device")];
    parts.into_iter().flatten().collect::<Vec<_>>().join("\n")
}

fn table(html: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    html.push_str("<table><tr>");
    for name in head {
        // Writing to a string cannot fail.
        let _ = write!(html, "<th>{}</th>", escape(name));
    }
    html.push_str("</tr>");
    for row in rows {
        html.push_str("<tr>");
        for cell in row {
            let _ = write!(html, "<td>{}</td>", escape(&cell));
        }
        html.push_str("</tr>");
    }
    html.push_str("</table>");
}

/// The lines of a figure, by name and CSS colour: beside the figure, not on its curves.
fn legend(lines: &[(String, String)]) -> String {
    let mut html = String::from("<p class=\"s\">");
    for (name, colour) in lines {
        let name = escape(name);
        // Writing to a string cannot fail.
        let _ = write!(html, "<b style=\"color:{colour}\">━</b> {name} &emsp;");
    }
    html.push_str("</p>");
    html
}

pub(super) fn render(facts: &Facts) -> Result<String> {
    let nodes = Nodes::of(facts);
    let since = |at: Option<fiec_schemas::Timestamp>| {
        at.map(|at| seconds(at.micros() - facts.submitted_at.micros()))
            .unwrap_or_default()
    };
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>Execution {0}</title>\
         <style>{STYLE}</style></head><body><h1>Execution {0}</h1>\
         <p class=\"s\">From the history in PostgreSQL. Times are seconds since submission.</p>",
        escape(&facts.title),
    );
    html.push_str("<h2>Facts</h2><table>");
    for (name, value) in &facts.summary {
        let is_bad = facts.ended_badly && BAD.contains(name);
        let class = if is_bad { " class=\"bad\"" } else { "" };
        let _ = write!(
            html,
            "<tr><th>{}</th><td{class}>{}</td></tr>",
            escape(name),
            escape(value)
        );
    }
    html.push_str("</table>");
    if !facts.missing.is_empty() {
        html.push_str("<h2>What is missing</h2><ul>");
        for words in &facts.missing {
            let _ = write!(html, "<li>{}</li>", escape(words));
        }
        html.push_str("</ul>");
    }
    figures::register_font()?;
    html.push_str("<h2>Where it was</h2>");
    html.push_str(&figures::location(facts, &nodes)?);
    html.push_str("<h2>What it had reached</h2><p class=\"s\">Vertical lines are rebindings.</p>");
    html.push_str(&figures::capsules(facts)?);
    for curve in &facts.curves {
        let _ = write!(html, "<h2>{}</h2>", escape(&curve.name));
        html.push_str(&legend(&curves::legend(&nodes, curve)));
        html.push_str(&curves::figure(facts, &nodes, curve)?);
    }
    if facts.more_curves > 0 {
        let _ = write!(
            html,
            "<p>{} more names are in <code>execution_series</code>.</p>",
            facts.more_curves
        );
    }
    for signal in &facts.signals {
        let _ = write!(html, "<h2>Pressure: {}</h2>", escape(&signal.name));
        if signal.lines.is_empty() {
            html.push_str("<p class=\"s\">No measurement of it was recorded in this time.</p>");
        }
        html.push_str(&legend(&figures::legend(&nodes, signal)));
        html.push_str(&figures::pressure(facts, &nodes, signal)?);
    }
    html.push_str("<h2>Rebindings</h2>");
    if facts.rebindings.is_empty() {
        html.push_str("<p>It was never moved.</p>");
    } else {
        table(
            &mut html,
            &["epoch", "at", "from", "to", "why", "boundary", "gap"],
            facts.rebindings.iter().map(|r| {
                vec![
                    r.epoch.to_string(),
                    since(Some(r.at)),
                    r.from.clone(),
                    r.to.clone(),
                    r.why.clone(),
                    r.boundary.map(|b| b.to_string()).unwrap_or_default(),
                    gap(r.gap_us),
                ]
            }),
        );
    }
    if !facts.changes.is_empty() {
        html.push_str("<h2>Changes</h2>");
        let rows = facts.changes.iter();
        let rows = rows.map(|c| vec![since(Some(c.at)), c.who.clone(), c.in_words()]);
        table(&mut html, &["at", "who", "what"], rows);
    }
    html.push_str("<h2>Placements</h2>");
    table(
        &mut html,
        &[
            "epoch",
            "node",
            "cause",
            "bound",
            "started",
            "ended",
            "why it ended",
            "gap before",
            "energy",
        ],
        facts.placements.iter().map(|p| {
            vec![
                p.epoch.to_string(),
                p.node.clone(),
                p.cause.clone(),
                since(p.bound_at),
                since(p.started_at),
                since(p.ended_at),
                p.end_reason.clone(),
                gap(p.gap_us),
                energy(&p.joules),
            ]
        }),
    );
    html.push_str("<h2>Decisions</h2>");
    table(
        &mut html,
        &["epoch", "at", "cause", "chosen", "considered"],
        facts.decisions.iter().map(|d| {
            vec![
                d.epoch.to_string(),
                since(Some(d.at)),
                d.cause.clone(),
                d.chosen.clone(),
                d.words.clone(),
            ]
        }),
    );
    html.push_str("</body></html>");
    Ok(html)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(
            escape("<b a=\"1\">&'"),
            "&lt;b a=&quot;1&quot;&gt;&amp;&#39;"
        );
    }
}
