// A sweep: its pictures and its table, drawn anew as it goes on.
"use strict";
import { followPieces } from "./pieces.js";
import { prepare } from "./pictures.js";

const sweep = document.querySelector("[data-piece=sweep]"), place = sweep.closest("[data-live]");
let state = prepare(sweep);
if (place) {
  followPieces(place, name => { if (name === "sweep") state = prepare(sweep, state.sorted); }, () => state.isChosen);
}
