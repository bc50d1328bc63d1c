// A service: live curves of its load, and a form that calls it.
"use strict";
import { json, number, style } from "./ui.js";

const LOOK_MS = 2000, MOST = 6000;
const CURVES = {
  rate: [["requests_per_s", "requests", 0], ["errors_per_s", "errors", 7]],
  latency: [["p50_ms", "p50", 0], ["p95_ms", "p95", 1], ["p99_ms", "p99", 3]],
  queue: [["running", "running", 2], ["waiting", "waiting", 6]],
};
const place = document.getElementById("load"), note = document.getElementById("load-note"), points = [];
const plots = new Map(), span = document.getElementById("load-span");
let shown = [];

/** Choose the points of the last hours. */
function choose() {
  const from = (points.at(-1)?.t ?? 0) - 3600 * span.value;
  shown = points.filter(one => one.t > from);
}

function makePlot(key) {
  const box = document.getElementById(`plot-${key}`), axis = { stroke: style("--soft"), grid: { stroke: style("--line2") }, ticks: { show: false } };
  plots.get(key)?.destroy();
  plots.set(key, new uPlot({
    width: box.clientWidth, height: 210, legend: { show: false }, cursor: { drag: { x: false, y: false } },
    scales: { x: { range: (_, low, high) => [low, shown.length < 2 ? low + 30 : Math.max(high, low + 30)] }, y: { range: (_, __, high) => [0, Math.max(high * 1.1, 1)] } },
    axes: [{ ...axis, space: 90, values: (_, ticks) => ticks.map(tick => new Date(1000 * tick).toLocaleTimeString()) }, { ...axis, size: 52 }],
    series: [{}, ...CURVES[key].map(([, label, at]) => ({ label, stroke: style(`--c${at}`), width: 2, spanGaps: false, points: { size: 4 } }))],
  }, data(key), box));
}

function data(key) { return [shown.map(one => one.t), ...CURVES[key].map(([name]) => shown.map(one => one[name]))]; }

function draw() {
  choose();
  const last = points[points.length - 1];
  for (const key of Object.keys(CURVES)) {
    plots.has(key) ? plots.get(key).setData(data(key)) : makePlot(key);
    const legend = document.getElementById(`legend-${key}`);
    legend.replaceChildren(...CURVES[key].map(([name, label, at]) => {
      const item = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = style(`--c${at}`);
      item.append(mark, `${label} ${number(last[name])}`);
      return item;
    }));
  }
}

async function look() {
  if (document.hidden) return;
  try {
    const found = await json(`${place.dataset.load}?after=${points.length ? points[points.length - 1].t : 0}`);
    points.push(...found.points);
    points.splice(0, Math.max(0, points.length - MOST));
    note.hidden = !found.error && points.length > 0;
    if (found.error) note.textContent = `The server gives no measurements: ${found.error}`;
    if (found.points.length) draw();
  } catch (error) { note.hidden = false; note.textContent = String(error.message || error); }
}

document.addEventListener("theme", () => { for (const key of plots.keys()) makePlot(key); if (points.length) draw(); });
new ResizeObserver(() => { for (const [key, plot] of plots) plot.setSize({ width: document.getElementById(`plot-${key}`).clientWidth, height: 210 }); }).observe(place);
span.addEventListener("change", () => { if (points.length) draw(); });
setInterval(look, LOOK_MS);
look();

const form = document.getElementById("call"), answer = document.getElementById("answer");
form?.addEventListener("submit", async event => {
  event.preventDefault();
  const button = form.querySelector("button"), shown = document.createElement("pre"), head = document.createElement("p");
  button.disabled = true;
  try {
    const sent = await fetch(form.action, { method: "POST", headers: { accept: "application/json" }, body: new URLSearchParams(new FormData(form)) });
    const found = await sent.json();
    head.textContent = found.error ? "The service answered with an error:" : `Answer after ${found.took}:`;
    head.className = found.error ? "box failure" : "note";
    shown.textContent = found.error || found.answer;
  } catch (error) { head.className = "box failure"; head.textContent = "The request failed:"; shown.textContent = String(error.message || error); }
  shown.tabIndex = 0;
  answer.replaceChildren(head, shown);
  button.disabled = false;
});
