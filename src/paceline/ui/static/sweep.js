// A sweep: trials light up in all pictures at once, parts of axes are chosen, the table is sorted; and it is drawn anew as it goes on.
"use strict";
import { localTimes, part } from "./ui.js";
import { followRun } from "./head.js";

const place = document.getElementById("sweep");
let sorted = null;

function prepare() {
  const places = JSON.parse(document.getElementById("places").textContent);
  const all = Array.from(place.querySelectorAll(".trial")), byTrial = {}, chosen = {};
  for (const one of all) (byTrial[one.dataset.trial] ||= []).push(one);
  for (const one of all) {
    for (const [event, on] of [["mouseenter", true], ["mouseleave", false], ["focusin", true], ["focusout", false]]) {
      one.addEventListener(event, () => byTrial[one.dataset.trial].forEach(each => each.classList.toggle("on", on)));
    }
  }
  function choose() {
    for (const [trial, elements] of Object.entries(byTrial)) {
      const at = places[trial];
      const off = at && Object.entries(chosen).some(([axis, [low, high]]) => at[axis] === null || at[axis] < low || at[axis] > high);
      elements.forEach(each => each.classList.toggle("off", Boolean(off)));
    }
  }
  for (const brush of place.querySelectorAll(".brush")) {
    const axis = brush.dataset.axis, svg = brush.ownerSVGElement;
    const top = Number(brush.getAttribute("y")), height = Number(brush.getAttribute("height"));
    const shown = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const name of ["x", "width"]) shown.setAttribute(name, brush.getAttribute(name));
    shown.setAttribute("class", "brush set");
    shown.setAttribute("height", 0);
    shown.setAttribute("pointer-events", "none");
    svg.insertBefore(shown, brush);
    const at = event => {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      return Math.min(1, Math.max(0, 1 - (point.y - top) / height));
    };
    let from = null;
    brush.addEventListener("pointerdown", event => { from = at(event); brush.setPointerCapture(event.pointerId); });
    brush.addEventListener("pointermove", event => {
      if (from === null) return;
      const to = at(event), low = Math.min(from, to), high = Math.max(from, to);
      shown.setAttribute("y", top + (1 - high) * height);
      shown.setAttribute("height", (high - low) * height);
      chosen[axis] = [low, high];
    });
    brush.addEventListener("pointerup", event => {
      if (from !== null && Math.abs(at(event) - from) < 0.01) { delete chosen[axis]; shown.setAttribute("height", 0); }
      from = null;
      choose();
    });
  }
  for (const button of place.querySelectorAll(".sort")) button.addEventListener("click", () => {
    const column = button.closest("th").cellIndex;
    sorted = { column, down: sorted?.column === column ? !sorted.down : false };
    sort();
  });
  if (sorted) sort();
}

function sort() {
  const table = document.getElementById("trials"), rows = Array.from(table.tBodies[0].rows);
  const value = row => row.cells[sorted.column]?.textContent.trim() || "";
  rows.sort((a, b) => {
    const x = value(a), y = value(b), p = parseFloat(x), q = parseFloat(y);
    // What has no value stands last, whichever way.
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
    return sorted.down ? -order : order;
  });
  table.tBodies[0].append(...rows);
  Array.from(table.tHead.rows[0].cells).forEach((cell, at) =>
    cell.setAttribute("aria-sort", at === sorted.column ? (sorted.down ? "descending" : "ascending") : "none"));
}

async function again() {
  // Not under the hands of who draws over an axis or chooses trials.
  if (document.hidden || place.querySelector(":checked, .brush.set:not([height='0'])")) return;
  const made = await part(place.dataset.part);
  if (!made) return;
  localTimes(made);
  place.replaceChildren(made);
  prepare();
}

prepare();
if (document.getElementById("head").dataset.terminal === "0") {
  const timer = setInterval(again, 3000);
  followRun({ state: state => { if (state.is_terminal) { clearInterval(timer); again(); } } });
}
