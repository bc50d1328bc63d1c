// The top of a run's pages, which is replaced when the run's state changes.
"use strict";
import { follow, localTimes, part } from "./ui.js";

const runPage = location.pathname.replace(/\/(files|details|sweep|look\/.*|)$/, "");

export async function freshHead() {
  const old = document.getElementById("head");
  // Whoever writes a tag just now goes on writing.
  if (old.contains(document.activeElement) && /^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
  const made = await part(`${runPage}/head`);
  const head = made && made.getElementById("head");
  if (!head) return;
  const current = old.querySelector(".tabs [aria-current]")?.textContent;
  for (const tab of head.querySelectorAll(".tabs a")) {
    if (tab.textContent === current) tab.setAttribute("aria-current", "page"); else tab.removeAttribute("aria-current");
  }
  localTimes(head);
  old.replaceWith(head);
}

export function followRun(handlers) {
  let last = "";
  return follow(`${runPage}/live`, {
    ...handlers,
    state: state => {
      const now = JSON.stringify(state);
      const isOld = last === "" && state.status === document.getElementById("head").dataset.status;
      if (last !== now && !isOld) freshHead();
      last = now;
      handlers.state?.(state);
    },
  });
}

if (!document.getElementById("charts") && document.getElementById("head").dataset.terminal === "0") followRun({});
