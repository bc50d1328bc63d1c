// Runs beside one another: a colour for each.
"use strict";
import { Board } from "./charts.js";
import { part } from "./ui.js";

const names = Array.from(document.querySelectorAll("#legend li"), item => item.dataset.name);
const metrics = document.getElementById("metrics");
function colour(at) { return getComputedStyle(document.documentElement).getPropertyValue(`--c${at % 8}`).trim(); }

const board = new Board({
  address: metrics.dataset.curves, place: document.getElementById("charts"), nodes: null,
  colourOf: curve => colour(curve.run),
  dashOf: curve => curve.run >= 8 ? [6, 3] : undefined,
  labelOf: curve => names[curve.run],
});
board.keep();
await board.load(null);
const only = document.getElementById("only-different"), table = document.getElementById("diff");
only.addEventListener("change", () => table.classList.toggle("only", only.checked));
const changes = document.getElementById("changes");
if (changes) {
  const made = await part(changes.dataset.part);
  changes.lastElementChild.replaceWith(made || "Paceline can't compare them now.");
}
