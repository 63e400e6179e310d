// The curves of a batch's members over one another, coloured by a parameter from low to high.
import { axes } from "./axes.js";

const figure = document.getElementById("members");
let plot = null, drawn = null;

// From violet to amber: each can be read on a light and on a dark page.
function colour(share) {
  const stops = [[112, 64, 200], [62, 110, 200], [33, 145, 140], [90, 165, 70], [214, 158, 0]];
  const at = Math.min(share, 0.9999) * (stops.length - 1), n = Math.floor(at), part = at - n;
  const mix = stops[n].map((c, k) => Math.round(c + (stops[n + 1][k] - c) * part));
  return `rgb(${mix.join(" ")})`;
}

function draw() {
  const text = figure.dataset.members;
  if (text === drawn) return;
  drawn = text;
  plot?.destroy();
  figure.querySelector(".scale")?.remove();
  const members = JSON.parse(text).filter((m) => m.points);
  if (members.length === 0) return;
  const values = members.map((m) => m.by).filter((v) => typeof v === "number");
  const low = Math.min(...values), high = Math.max(...values);
  // Tolerances and learning rates span orders of magnitude.
  const level = low > 0 && high / low > 100 ? Math.log : (v) => v;
  const span = level(high) - level(low) || 1;
  const share = (m) => (typeof m.by === "number" ? (level(m.by) - level(low)) / span : 0.5);
  const data = uPlot.join(members.map((m) => [m.points.map((p) => p[0]), m.points.map((p) => p[1])]));
  const all = members.flatMap((m) => m.points.map((p) => p[1])).filter((v) => v !== null);
  const least = Math.min(...all), most = Math.max(...all);
  const style = getComputedStyle(document.body), ink = style.getPropertyValue("--quiet"), grid = style.getPropertyValue("--line");
  // Once logarithmic, always so: the scale must not flip while numbers arrive.
  const isLog = least > 0 && (most / least > 500 || figure.dataset.log);
  figure.dataset.log = isLog ? "1" : "";
  figure.querySelector("figcaption").textContent = `${figure.dataset.number} of ${members.length} members${isLog ? " (logarithmic)" : ""}`;
  const series = members.map((m) => ({ label: m.name, stroke: colour(share(m)), width: 1, spanGaps: true, points: { show: false } }));
  plot = new uPlot({
    width: figure.clientWidth - 20, height: 310, legend: { show: false },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    axes: axes(ink, grid, isLog), series: [{ label: "boundary" }, ...series],
  }, data, figure);
  if (values.length) {
    const scale = document.createElement("p"), bar = document.createElement("i");
    scale.className = "scale";
    bar.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(colour).join(",")})`;
    scale.append(`${figure.dataset.by} ${low}`, bar, String(high));
    figure.append(scale);
  }
}

if (figure) {
  draw();
  document.addEventListener("fiec:fresh", draw);
  addEventListener("resize", () => plot?.setSize({ width: figure.clientWidth - 20, height: 310 }));
}
