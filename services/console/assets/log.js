// The log of an execution, while it is open: asks for what came since the last look.
const box = document.getElementById("log"), pre = box.querySelector("pre"), note = box.querySelector(".quiet");
const MOST = 400_000;
let cursor = { next: 1 }, asking = false;

async function look() {
  if (!box.querySelector("details").open || document.hidden || asking) return;
  asking = true;
  try {
    const answer = await fetch(box.dataset.log, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(cursor),
    });
    if (!answer.ok) throw new Error(await answer.text());
    const { text, left_out, cursor: next } = await answer.json();
    cursor = next;
    const below = pre.scrollHeight - pre.scrollTop - pre.clientHeight < 40;
    if (left_out) pre.append(`… ${left_out} lines are left out; fiec logs has them\n`);
    if (text) pre.append(text);
    if (pre.textContent.length > MOST) pre.textContent = "…" + pre.textContent.slice(-MOST / 2);
    if (below && text) pre.scrollTop = pre.scrollHeight;
    note.textContent = pre.textContent ? "" : "It has printed nothing yet.";
  } catch (error) { note.textContent = `The log cannot be read: ${error.message}`; }
  asking = false;
}

box.querySelector("details").addEventListener("toggle", look);
document.addEventListener("visibilitychange", look);
setInterval(look, 1000);
