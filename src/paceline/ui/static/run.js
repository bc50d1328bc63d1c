// A run: its curves and its log, live.
"use strict";
import { part } from "./ui.js";
import { Board } from "./charts.js";
import { Log } from "./log.js";
import { followRun } from "./head.js";

const metrics = document.getElementById("metrics");
let shown = 0, asking = 0;

async function others(count) {
  if (count === shown) return;
  shown = count;
  clearTimeout(asking);
  asking = setTimeout(async () => {
    const made = await part(metrics.dataset.curves.replace(/curves$/, "others"));
    if (!made) { shown = 0; return; }
    document.getElementById("others-body").replaceChildren(made);
    document.getElementById("others").hidden = false;
  }, 200);
}

const board = new Board({
  address: metrics.dataset.curves, place: document.getElementById("charts"), nodes: document.getElementById("system-charts"),
  onOthers: others,
});
board.keep();
const log = new Log();
// The stream begins once the curves are there: what it tells goes behind them.
await board.load(null);
followRun({
  log: lines => log.came(lines),
  points: points => board.told(points),
  other: ({ count }) => others(count),
  state: state => {
    const label = document.getElementById("chart-attempts-label");
    if (label && state.attempts > 1) label.hidden = false;
  },
});
