// Colours and dashes by which runs are told apart, and the list of runs above their curves.
"use strict";
import { isDark, style } from "./ui.js";

/** A colour for each run: those of the page for the first eight, then hues far from each other, with dashes. The ninth is between
 *  green and yellow, the widest gap of the first eight. */
export function colour(at) {
  if (at < 8) return style(`--c${at}`);
  return `oklch(${(isDark() ? 0.72 : 0.5) + (at % 3 - 1) * 0.09} 0.15 ${Math.round(at * 137.508 + 100) % 360})`;
}
const DASHES = [undefined, [7, 4], [2, 3], [12, 4, 2, 4]];
const dash = at => DASHES[Math.floor(at / 8) % DASHES.length];

/** Give the runs in the document their colours and dashes. */
function paint() {
  // Read all colours before the first change: after a change, the browser computes the styles of the page again for each of them.
  const marked = Array.from(document.querySelectorAll("[data-colour]"), one => [one, Number(one.dataset.colour), colour(Number(one.dataset.colour))]);
  for (const [one, at, mine] of marked) {
    one.style.setProperty("--mine", mine);
    one.style.setProperty("--line-style", ["solid", "dashed", "dotted", "double"][Math.floor(at / 8) % 4]);
  }
}

/** The entries of the runs above the curves. Each hides, shows or highlights the curves of its run. */
export class Legend {
  constructor() {
    this.items = Array.from(document.querySelectorAll("#legend li"));
    this.names = this.items.map(item => item.dataset.name);
    this.hidden = new Set();
    this.items.forEach((item, at) => { item.dataset.colour = at; });
    paint();
    document.addEventListener("theme", paint);
  }

  /** The options of a board whose curves are told apart by their run. */
  get options() {
    return {
      colourOf: curve => colour(curve.run), dashOf: curve => dash(curve.run), labelOf: curve => this.names[curve.run],
      isShown: curve => !this.hidden.has(curve.run),
    };
  }

  bind(board) {
    this.board = board;
    this.items.forEach((item, at) => {
      item.querySelector("input")?.addEventListener("change", event => this.show(event.target.checked, at));
      for (const [event, run] of [["mouseenter", at], ["mouseleave", null], ["focusin", at], ["focusout", null]]) {
        item.addEventListener(event, () => board.highlight(curve => curve.run === run, run !== null));
      }
    });
  }

  /** Show or hide the curves of these runs. */
  show(isShown, ...runs) {
    for (const at of runs) isShown ? this.hidden.delete(at) : this.hidden.add(at);
    this.items.forEach((item, at) => item.classList.toggle("off", this.hidden.has(at)));
    this.board.redrawAll();
  }
}
