//! A history of 100,000 executions, and one whose database goes away.

use std::time::Instant;

use serde_json::Value;

use crate::browser::{Browser, Console};
use crate::stage::{Lab, workers_with_history};

/// Members of the batch.
const MEMBERS: i64 = 100_000;

/// Rows as a recorder would have written them in some days.
const FILL: &str = "WITH b AS (INSERT INTO batches VALUES (gen_random_uuid(), 'lab', 'sweep', now() - interval '1 day') RETURNING id) \
    INSERT INTO executions (id, tenant, client_id, batch_id, batch_line, program, contract, submission, spec, \
        submitted_at, phase, node, epoch, first_started_at, boundary_index, boundary_of, commits, state_bytes, \
        rebindings, pressure_rebindings, crashes, compute_us, finished_at, capsules, author, ordinal, seq, recorded_at) \
    SELECT gen_random_uuid(), 'lab', 'walk-' || n, b.id, n, 'walk@1', 'bitwise', '\\x00', \
        jsonb_build_object('program', 'walk@1', 'params', jsonb_build_object('seed', n)), \
        now() - interval '1 day', CASE WHEN n % 97 = 0 THEN 'failed' ELSE 'completed' END, 'n1', 1, \
        now() - interval '23 hours', 100, 100, 3, 3000, 0, 0, 0, 1000000, \
        now() - interval '20 hours' + n * interval '0.5 seconds', 100, 'worker/n1/x', 4, n, now() \
    FROM generate_series(0, 99999) n, b";

#[tokio::test]
async fn a_hundred_thousand_members_are_painted_soon_and_stay_smooth_and_an_outage_is_told() {
    let mut lab = Lab::start(workers_with_history(1)).await;
    let console = Console::start(&lab).await;
    let Some(browser) = Browser::start().await else {
        return lab.end().await;
    };
    browser.open(&console.entrance).await;
    browser.pictures("empty").await;
    lab.execute(FILL).await;
    lab.execute("ANALYZE").await;
    let completed = "return document.querySelector('.tile.completed b')?.textContent.replace(/\\D/g, '') === '98969'";
    browser.until("all are counted", completed).await;

    let began = Instant::now();
    lab.sql("SELECT phase, count(*) FROM executions GROUP BY phase")
        .await;
    println!("counting by phase: {} ms", began.elapsed().as_millis());
    // One row for all that failed for the same reason.
    let told = "return document.querySelectorAll('.attention li').length === 1 \
                && document.querySelector('.attention li').textContent.includes('and 1030 more')";
    browser.until("what failed is told together", told).await;

    // First paint and bytes of the overview, as the browser measures them.
    let mut paints = Vec::new();
    for _ in 0..5 {
        browser.open(&format!("{}/", console.origin())).await;
        let seen = "return performance.getEntriesByName('first-contentful-paint').length > 0";
        browser.until("it is painted", seen).await;
        let paint = "return performance.getEntriesByName('first-contentful-paint')[0].startTime";
        paints.push(browser.script(paint).await.as_f64().unwrap());
    }
    paints.sort_by(f64::total_cmp);
    let bytes = "return performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))\
                 .reduce((sum, e) => sum + e.decodedBodySize, 0)";
    let bytes = browser.script(bytes).await.as_f64().unwrap();
    println!(
        "first paint: median {:.0} ms of {paints:.0?}, {bytes:.0} bytes",
        paints[2]
    );
    assert!(bytes < 300_000.0, "{bytes} bytes");
    browser.pictures("large").await;

    // The list says how many there are, whatever it shows.
    browser
        .open(&format!("{}/executions?phase=failed", console.origin()))
        .await;
    let all = "return document.querySelector('#list .quiet').textContent.replace(/[^0-9a-z ]/g, '') === '1 to 100 of 1031'";
    browser.until("the count is exact", all).await;

    // The matrix: all members are drawn, and dragging over them stays smooth.
    let batch = lab
        .sql("SELECT id::text AS b FROM batches WHERE name = 'sweep'")
        .await;
    let batch = batch.get(0, "b").unwrap().to_owned();
    let began = Instant::now();
    browser
        .open(&format!("{}/batches/{batch}", console.origin()))
        .await;
    let drawn = "const c = document.querySelector('#matrix canvas'); \
                 return c.height > 200 && c.getContext('2d').getImageData(1, 1, 1, 1).data[3] === 255";
    browser.until("the matrix is drawn", drawn).await;
    println!(
        "matrix of {MEMBERS}: drawn {} ms after the address was entered",
        began.elapsed().as_millis()
    );
    browser.pictures("large-batch").await;
    let drag = "const done = arguments[arguments.length - 1]; \
        const c = document.querySelector('#matrix canvas'), r = c.getBoundingClientRect(), times = []; let n = 0, last = performance.now(); \
        const at = (type, x, y) => c.dispatchEvent(new PointerEvent(type, { clientX: r.left + x, clientY: r.top + y, buttons: 1, pointerId: 1, bubbles: true })); \
        HTMLCanvasElement.prototype.setPointerCapture = () => {}; at('pointerdown', 5, 5); \
        function step() { const now = performance.now(); times.push(now - last); last = now; n += 1; \
            at('pointermove', 5 + n * 6, 5 + n * 4); if (n < 60) requestAnimationFrame(step); else done(times.slice(2)); } \
        requestAnimationFrame(step);";
    let times = browser.later(drag).await;
    let mut times: Vec<f64> = times
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_f64)
        .collect();
    times.sort_by(f64::total_cmp);
    let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
    println!(
        "dragging over the matrix: frames of {median:.1} ms in the median, {worst:.1} ms at worst"
    );
    // Two processors draw what a graphics card would, beside all that a test runs.
    assert!(median < 100.0, "{times:?}");
    let link = "return document.querySelector('#chosen a')?.textContent.startsWith('members ')";
    browser
        .until("those that are chosen can be listed", link)
        .await;
    browser
        .script("document.querySelector('#chosen a').click()")
        .await;
    browser
        .until(
            "they are listed",
            "return document.querySelectorAll('#list tbody tr').length === 100",
        )
        .await;

    // The database is stopped: pages say what was known, and since when.
    browser.open(&format!("{}/", console.origin())).await;
    browser.until("all is well", completed).await;
    lab.servers.postgres.as_mut().unwrap().kill().await;
    let old = "return !!document.querySelector('.trouble')?.textContent.startsWith('History: as of ') \
               && document.querySelector('.tile.completed b').textContent.replace(/\\D/g, '') === '98969'";
    browser
        .until("the outage is told, beside what is known", old)
        .await;
    browser.pictures("away").await;
    lab.servers
        .postgres
        .as_mut()
        .unwrap()
        .restart()
        .await
        .unwrap();
    browser
        .until(
            "it is well again",
            "return !document.querySelector('.trouble')",
        )
        .await;
    browser.end().await;
    console.end().await;
    // No ledger belongs to these rows: the check at the end would miss it.
    lab.execute("TRUNCATE batches, executions").await;
    lab.end().await;
}
