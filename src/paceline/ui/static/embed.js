// The curves of runs in a frame of another page.
"use strict";
import { Board } from "./charts.js";
import { colour, dash, paint } from "./run_colours.js";

const LOOK_MS = 5000; // pause between looks at runs that go on
const metrics = document.getElementById("metrics"), items = Array.from(document.querySelectorAll("#legend li")), names = items.map(item => item.dataset.name);
items.forEach((item, at) => { item.dataset.colour = at; });
const board = new Board({
  address: metrics.dataset.curves, place: document.getElementById("charts"), nodes: null,
  ...(names.length === 1 ? {} : { colourOf: curve => colour(curve.run), dashOf: curve => dash(curve.run), labelOf: curve => names[curve.run] }),
});
board.keep();
paint();
document.addEventListener("theme", paint);
await board.load(null);
if (metrics.dataset.live) setInterval(() => { if (!document.hidden) { board.load(null); board.refresh(); } }, LOOK_MS);
