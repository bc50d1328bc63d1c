// Changes of the ticked runs of the list, with a message that can undo them; and a run's page notices that the run was deleted.
"use strict";
import { element, localTimes, part } from "./ui.js";

const bulk = document.getElementById("bulk"), said = document.getElementById("bulk-said");

// A new search replaces the whole table, so look for its boxes each time.
function boxes() { return document.querySelectorAll("#rows input[name=run]:checked"); }
function ticked() { return Array.from(boxes(), box => box.value); }

function show() {
  const count = ticked().length;
  bulk.hidden = !count;
  document.getElementById("bulk-count").textContent = `${count} ticked`;
}

// The buttons are named "action", so `bulk.action` would be those.
/** Send a change, and show its result with a button that undoes it. The message gets the focus, so Undo is the next Tab. */
async function change(values) {
  let found;
  try {
    const answer = await fetch(bulk.getAttribute("action"), { method: "POST", headers: { accept: "application/json" }, body: values });
    found = await answer.json();
    if (!answer.ok) found = { text: found.error, failed: [], undo: "" };
  } catch { found = { text: "The server does not answer. Nothing may have changed.", failed: [], undo: "" }; }
  const failed = found.failed.slice(0, 5).map(one => element("p", `${one.run}: ${one.error}`));
  said.replaceChildren(element("b", found.text), ...failed);
  if (found.failed.length > 5) said.append(element("p", `and ${found.failed.length - 5} more`));
  if (found.undo) {
    const undo = element("button", "Undo");
    undo.type = "button";
    undo.addEventListener("click", () => change(form(found.undo, found.done, { key: found.key })));
    said.append(" ", undo);
  }
  said.hidden = false;
  said.focus();
  for (const box of boxes()) box.checked = false;
  document.getElementById("rows").dispatchEvent(new Event("change", { bubbles: true }));
}

function form(action, runs, more) {
  const values = new URLSearchParams({ form_key: bulk.elements.form_key.value, action, ...more });
  for (const run of runs) values.append("run", run);
  return values;
}

if (bulk) {
  document.addEventListener("change", event => { if (event.target.closest?.("#rows")) show(); });
  new MutationObserver(changes => { if (changes.some(one => !bulk.contains(one.target))) show(); })
    .observe(document.getElementById("main"), { childList: true, subtree: true });
  window.addEventListener("pageshow", show);
  show();
  bulk.addEventListener("submit", event => {
    event.preventDefault();
    // Enter in a text field means the tag, not the first button of the form.
    const isTyped = /^(key|value)$/.test(document.activeElement?.name), action = isTyped ? "tag" : event.submitter.value;
    const runs = ticked(), { key, value } = bulk.elements;
    if (action === "cancel" && !window.confirm(`End ${runs.length === 1 ? "this run" : `these ${runs.length} runs`}?`)) return;
    if (action === "rerun" && runs.length > 3 && !window.confirm(`Submit ${runs.length} runs again?`)) return;
    if (action === "tag" && !key.value.trim()) { key.focus(); return; }
    change(form(action, runs, action === "tag" ? { key: key.value, value: value.value } : {}));
  });
  said.addEventListener("keydown", event => { if (event.key === "Escape") { said.hidden = true; document.querySelector("#rows input")?.focus(); } });
}

const head = document.querySelector("[data-gone]");
let note = null;

/** Ask whether the run is still in the list of runs; say so at the top of the page if it is not. */
async function look() {
  if (document.hidden) return;
  const made = await part(head.dataset.gone);
  if (!made) return;   // the server is away; the page says so
  // The answer is empty while the run is in the list.
  if (!made.childElementCount) { note?.remove(); note = null; } else if (!note) {
    note = element("div");
    note.setAttribute("role", "alert");
    note.append(made);
    localTimes(note);
    document.getElementById("main").prepend(note);
  }
}

if (head) {
  setInterval(look, 4000);
  document.addEventListener("visibilitychange", look);
}

// A file of the user's computer goes into the text field, where it can be read and changed before it is sent.
for (const chosen of document.querySelectorAll("input[type=file][data-into]")) {
  chosen.addEventListener("change", async () => {
    if (chosen.files[0]) document.getElementById(chosen.dataset.into).value = await chosen.files[0].text();
  });
}
