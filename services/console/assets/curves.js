// Draws the curves of an execution: means, and around them what their reports reached. Each piece has
// the colour of the node that computed it.
import { axes } from "./axes.js";

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#6e6e6e"];
const plots = new Map();

function options(figure, nodes, rows) {
  const style = getComputedStyle(document.body), ink = style.getPropertyValue("--quiet"), grid = style.getPropertyValue("--line");
  const finite = rows.map((r) => r[1]).filter((v) => v !== null);
  const low = Math.min(...finite), high = Math.max(...finite);
  // Once logarithmic, always so: the scale must not flip while numbers arrive.
  const isLog = low > 0 && (high / low > 500 || figure.dataset.log);
  figure.dataset.log = isLog ? "1" : "";
  figure.querySelector("figcaption").textContent = figure.dataset.name + (isLog ? " (logarithmic)" : "");
  const series = [{ label: "boundary" }];
  const bands = [];
  nodes.forEach((node, at) => {
    const colour = COLOURS[at % COLOURS.length], first = series.length;
    series.push({ label: node || "mean", stroke: colour, width: 1.5, spanGaps: false, points: { show: rows.length < 3 } });
    series.push({ stroke: "transparent", label: "highest", show: true, points: { show: false } });
    series.push({ stroke: "transparent", label: "lowest", show: true, points: { show: false } });
    bands.push({ series: [first + 1, first + 2], fill: colour + "33" });
  });
  return {
    width: figure.clientWidth - 20, height: 200, legend: { show: false }, cursor: { drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    axes: axes(ink, grid, isLog), series, bands,
  };
}

function columns(nodes, rows) {
  const data = [rows.map((r) => r[0])];
  nodes.forEach((_, at) => {
    for (const column of [1, 3, 2]) {
      // A piece begins where the piece before ends.
      data.push(rows.map((r, n) => (r[4] === at || rows[n + 1]?.[4] === at ? r[column] : null)));
    }
  });
  return data;
}

function draw() {
  for (const figure of document.querySelectorAll(".plot")) {
    const text = figure.dataset.curve, before = plots.get(figure);
    if (before?.text === text) continue;
    const { nodes, rows } = JSON.parse(text);
    before?.plot.destroy();
    const plot = new uPlot(options(figure, nodes, rows), columns(nodes, rows), figure);
    plots.set(figure, { text, plot });
  }
}

draw();
document.addEventListener("fiec:fresh", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { plots.forEach((p) => (p.text = "")); draw(); });
addEventListener("resize", () => plots.forEach((p, figure) => p.plot.setSize({ width: figure.clientWidth - 20, height: 200 })));
