// A cell for each member of a batch, in the order of submission, coloured by phase. Dragging over cells lists their members.
const PHASES = { c: "completed", f: "failed", x: "cancelled", s: "started", b: "bound", p: "paused", h: "held", v: "verifying", w: "pending" };
const box = document.getElementById("matrix"), canvas = box.querySelector("canvas"), chosen = document.getElementById("chosen");
let cells = "", drawn = "", columns = 1, size = 1, from = null, to = null;

async function load() {
  const answer = await fetch(`/batches/${box.dataset.batch}/matrix`);
  if (!answer.ok) return;
  const fresh = await answer.text();
  if (fresh !== cells) { cells = fresh; draw(); }
}

function draw() {
  const width = box.clientWidth, ratio = devicePixelRatio || 1;
  // As large as fits some 400 rows of pixels, between 2 and 14.
  size = Math.max(2, Math.min(14, Math.floor(Math.sqrt((width * 400) / Math.max(cells.length, 1)))));
  columns = Math.max(1, Math.floor(width / size));
  const rows = Math.ceil(cells.length / columns), gap = size > 4 ? 1 : 0;
  const resized = canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(rows * size * ratio);
  if (resized) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(rows * size * ratio);
    canvas.style.height = `${rows * size}px`;
    drawn = "";
  }
  const context = canvas.getContext("2d"), style = getComputedStyle(document.body), colours = {};
  for (const [letter, phase] of Object.entries(PHASES)) colours[letter] = style.getPropertyValue("--" + phase);
  const chosenColour = style.getPropertyValue("--ink");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const low = Math.min(from, to), high = Math.max(from, to);
  let now = "";
  const marks = [];
  for (let n = 0; n < cells.length; n++) {
    const inside = from !== null && n >= low && n <= high;
    marks.push(inside ? cells[n].toUpperCase() : cells[n]);
  }
  now = marks.join("");
  for (let n = 0; n < now.length; n++) {
    if (now[n] === drawn[n]) continue;
    const x = (n % columns) * size, y = Math.floor(n / columns) * size;
    context.clearRect(x, y, size, size);
    context.fillStyle = now[n] === cells[n] ? colours[cells[n]] : chosenColour;
    context.fillRect(x, y, size - gap, size - gap);
  }
  drawn = now;
}

function cell(event) {
  const place = canvas.getBoundingClientRect();
  const x = Math.floor((event.clientX - place.left) / size), y = Math.floor((event.clientY - place.top) / size);
  return Math.max(0, Math.min(cells.length - 1, y * columns + Math.min(x, columns - 1)));
}

function say() {
  if (from === null) { chosen.textContent = ""; return; }
  const low = 1 + Math.min(from, to), high = 1 + Math.max(from, to);
  const link = document.createElement("a");
  link.href = `/executions?batch=${box.dataset.batch}&from=${low}&to_line=${high}`;
  link.textContent = low === high ? `member ${low}` : `members ${low} to ${high}`;
  chosen.replaceChildren(link);
}

let frame = 0;
function redraw() { cancelAnimationFrame(frame); frame = requestAnimationFrame(() => { draw(); say(); }); }

canvas.addEventListener("pointerdown", (event) => { from = to = cell(event); canvas.setPointerCapture(event.pointerId); redraw(); });
canvas.addEventListener("pointermove", (event) => { if (event.buttons && from !== null) { to = cell(event); redraw(); } });
box.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
  if (event.key === "Escape") from = to = null;
  else if (step === undefined) return;
  else {
    to = Math.max(0, Math.min(cells.length - 1, (to ?? -step) + step));
    if (!event.shiftKey || from === null) from = to;
  }
  event.preventDefault();
  redraw();
});
addEventListener("resize", redraw);
document.addEventListener("fiec:fresh", load);
load();
