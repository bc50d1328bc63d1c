// A run: its curves and its log, live.
"use strict";
import { follow, part, swap } from "./ui.js";
import { Board } from "./charts.js";
import { Log } from "./log.js";
import { Panels } from "./panels.js";

const metrics = document.getElementById("metrics");
const runPage = metrics.dataset.curves.replace(/\/curves$/, "");
const panels = new Panels(document.getElementById("others-body"), `${runPage}/others`);
let known = "", shown = 0, asking = 0;

function others(count) {
  if (count === shown) return;
  shown = count;
  clearTimeout(asking);
  asking = setTimeout(async () => {
    if (!await panels.load()) { shown = 0; return; }
    document.getElementById("others").hidden = false;
  }, 200);
}

/** The top of the page anew where the state is another one than that which stands there. */
async function stateIs(state) {
  const now = JSON.stringify(state), isShown = known === "" && state.shown === document.getElementById("head").dataset.shown && !state.slow;
  if (known !== now && !isShown) {
    const made = await part(`${runPage}/head`);
    if (made) swap(document.querySelector("[data-piece=head]"), () => made);
  }
  known = now;
  const label = document.getElementById("chart-attempts-label");
  if (label && state.attempts > 1) label.hidden = false;
}

const board = new Board({
  address: metrics.dataset.curves, place: document.getElementById("charts"), nodes: document.getElementById("system-charts"),
  onOthers: others, hasSections: true,
});
board.keep();
const log = new Log();
// The stream begins once the curves are there: what it tells goes behind them.
await board.load(null);
follow(`${runPage}/live`, {
  log: lines => log.came(lines),
  points: points => board.told(points),
  other: ({ count }) => others(count),
  side: () => log.sideCame(),
  state: stateIs,
});
