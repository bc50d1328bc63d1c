// Colours and dashes by which runs are told apart.
"use strict";

/** A colour for each run: those of the page for the first eight, then hues far from each other, with dashes. */
export function colour(at) {
  const root = document.documentElement;
  if (at < 8) return getComputedStyle(root).getPropertyValue(`--c${at}`).trim();
  const isDark = getComputedStyle(root).getPropertyValue("--bg").trim() === "#0e131a";
  return `oklch(${(isDark ? 0.72 : 0.5) + (at % 3 - 1) * 0.09} 0.15 ${Math.round(at * 137.508) % 360})`;
}
const DASHES = [undefined, [7, 4], [2, 3], [12, 4, 2, 4]];
export const dash = at => DASHES[Math.floor(at / 8) % DASHES.length];

/** Give the runs in the document their colours and dashes. */
export function paint() {
  for (const one of document.querySelectorAll("[data-colour]")) {
    const at = Number(one.dataset.colour);
    one.style.setProperty("--mine", colour(at));
    one.style.setProperty("--line-style", ["solid", "dashed", "dotted", "double"][Math.floor(at / 8) % 4]);
  }
}
