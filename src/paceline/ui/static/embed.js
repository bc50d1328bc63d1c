// The curves of runs in a frame of another page.
"use strict";
import { Board } from "./charts.js";
import { Legend } from "./run_colours.js";

const LOOK_MS = 5000; // pause between looks at runs that go on
const metrics = document.getElementById("metrics"), legend = new Legend();
const board = new Board({
  address: metrics.dataset.curves, place: document.getElementById("charts"), nodes: null,
  ...(legend.names.length === 1 ? {} : legend.options),
});
board.keep();
await board.load(null);
if (metrics.dataset.live) setInterval(() => { if (!document.hidden) { board.load(null); board.refresh(); } }, LOOK_MS);
