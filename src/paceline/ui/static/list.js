// The list of runs: rows that change are replaced in place, so that focus and chosen boxes stay.
"use strict";
import { follow, localTimes, parsed, root } from "./ui.js";

const address = `${root}live${location.search}`;
const body = document.getElementById("rows"), compare = document.getElementById("compare");

function chosen() { return body.querySelectorAll("input[name=run]:checked"); }
function choose() {
  const count = chosen().length;
  compare.disabled = count < 2;
  compare.textContent = count < 2 ? "Compare selected" : `Compare ${count} runs`;
}

function change({ order, rows, total, first }) {
  const there = new Map(Array.from(body.rows, row => [row.dataset.run, row]));
  for (const [id, html] of Object.entries(rows)) {
    const fresh = parsed(html, address).querySelector("tr"), old = there.get(id);
    localTimes(fresh);
    if (old) {
      const plain = row => row.textContent.replace(/\s+/g, " ");
      if (first && plain(old) === plain(fresh)) continue;
      fresh.querySelector("input").checked = old.querySelector("input").checked;
      const focused = old.contains(document.activeElement) ? document.activeElement.tagName : null;
      old.replaceWith(fresh);
      if (focused) fresh.querySelector(focused.toLowerCase())?.focus();
    }
    // Only what is another state, and not each value, catches the eye.
    const state = row => row?.querySelector(".badge").textContent;
    if (!first && state(old) !== state(fresh)) fresh.classList.add("fresh");
    there.set(id, fresh);
  }
  const wanted = new Set(order);
  for (const [id, row] of there) if (!wanted.has(id)) row.remove();
  let before = null;
  for (const id of order) {
    const row = there.get(id), next = before ? before.nextElementSibling : body.firstElementChild;
    if (row && row !== next) body.insertBefore(row, next);
    before = row || before;
  }
  document.getElementById("total").textContent = total;
  const empty = document.getElementById("empty");
  if (empty) empty.hidden = order.length > 0;
  choose();
}

body.addEventListener("change", choose);
for (const select of document.querySelectorAll(".filters select, .filters input[type=checkbox]")) {
  select.addEventListener("change", () => select.form.requestSubmit());
}
// Fields that say nothing stay out of the address, which may be kept as a link.
document.querySelector(".filters").addEventListener("submit", event => {
  for (const field of event.target.elements) if (field.name && !field.value) field.disabled = true;
});
window.addEventListener("pageshow", () => {
  for (const field of document.querySelector(".filters").elements) field.disabled = false;
  choose();
});
follow(address, { rows: change }, body.dataset.place);
choose();
