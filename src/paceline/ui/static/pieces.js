// Pieces of a page that the server tells anew when what they show has changed.
"use strict";
import { follow, parsed, swap } from "./ui.js";

/** Follow the pieces (`data-piece`) below an element. onNew: called with a piece's name after it has been replaced. isBusy: says
 *  while nothing may be. */
export function followPieces(place, onNew, isBusy) {
  return follow(place.dataset.live, {
    part: ({ name, html }) => {
      const piece = place.querySelector(`[data-piece="${CSS.escape(name)}"]`);
      if (piece) swap(piece, () => parsed(html, place.dataset.live), () => onNew?.(name), isBusy);
    },
  }, place.dataset.place);
}

const place = document.querySelector("[data-live]");
if (place && !document.querySelector("[data-piece=sweep]")) followPieces(place);
