// The list of runs: rows that change are replaced in place, so that focus and chosen boxes stay. The search finds while one types.
"use strict";
import { follow, json, localTimes, offer, parsed, part, root } from "./ui.js";

const found = document.getElementById("found"), form = document.querySelector(".filters");
const search = document.getElementById("q"), list = document.getElementById("suggestions");
let stream = null;
const body = () => document.getElementById("rows"), address = () => `${root}live${location.search}`;

const WIDTHS = { state: "128px", experiment: "minmax(92px, 1fr)", target: "minmax(64px, .8fr)", created: "150px", duration: "108px", latest: "minmax(120px, 2.2fr)", tags: "minmax(100px, 1.3fr)" };
const columns = () => Array.from(document.querySelectorAll("#runs th[data-name]")).slice(1);

/** Give each column its width, and pinned columns their place. Headings can be dragged. */
function arrange() {
  const table = document.getElementById("runs"), heads = columns();
  for (const head of heads) head.draggable = true;
  const pinned = heads.filter(head => /\bpin\d/.test(head.className));
  // The style sheet has the widths of the usual columns. Setting them again would lay out all rows a second time.
  if (table.classList.contains("default") && !pinned.length) return;
  table.style.setProperty("--cols", ["38px", "minmax(200px, 2.8fr)", ...heads.map(head => WIDTHS[head.dataset.name] || "minmax(120px, 1fr)")].join(" "));
  table.style.setProperty("--more", heads.length - Object.keys(WIDTHS).length);
  table.classList.toggle("pinning", pinned.length > 0);
  let left = 38 + table.querySelector("th.c-run").offsetWidth;
  pinned.forEach((head, number) => { table.style.setProperty(`--left${number + 1}`, `${left}px`); left += head.offsetWidth; });
}

/** Lay out the rows below the first ones, after the first picture. */
function unfold() { requestAnimationFrame(() => setTimeout(() => document.getElementById("runs")?.classList.remove("first"))); }

function choose() {
  const count = body().querySelectorAll("input[name=run]:checked").length, compare = document.getElementById("compare");
  compare.disabled = count < 2;
  compare.textContent = count < 2 ? "Compare selected" : `Compare ${count} runs`;
}

function change({ order, rows, total, first }) {
  const table = body(), there = new Map(Array.from(table.rows, row => [row.dataset.run, row]));
  for (const [id, html] of Object.entries(rows)) {
    const fresh = parsed(html, address()).querySelector("tr"), old = there.get(id);
    localTimes(fresh);
    if (old) {
      const plain = row => row.textContent.replace(/\s+/g, " ");
      if (first && plain(old) === plain(fresh)) continue;
      const box = fresh.querySelector("input");
      if (box) box.checked = old.querySelector("input").checked;
      const focused = old.contains(document.activeElement) ? document.activeElement.tagName : null;
      old.replaceWith(fresh);
      if (focused) fresh.querySelector(focused.toLowerCase())?.focus();
    }
    // Only what is another state, and not each value, catches the eye.
    const state = row => row?.querySelector(".badge")?.textContent;
    if (!first && state(old) !== state(fresh)) fresh.classList.add("fresh");
    there.set(id, fresh);
  }
  const wanted = new Set(order);
  for (const [id, row] of there) if (!wanted.has(id)) row.remove();
  let before = null;
  for (const id of order) {
    const row = there.get(id), next = before ? before.nextElementSibling : table.firstElementChild;
    if (row && row !== next) table.insertBefore(row, next);
    before = row || before;
  }
  document.getElementById("total").textContent = total;
  const empty = document.getElementById("empty");
  if (empty) empty.hidden = order.length > 0;
  choose();
}

function watch() {
  stream?.stop();
  stream = follow(address(), { rows: change }, body().dataset.place);
}

// --- the search finds while one types

/** The address of the filters as they are now, without fields that say nothing. */
function wanted() {
  const given = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value) given.append(name, value);
  return `?${given}`;
}

let asked = 0;
async function find() {
  const query = wanted();
  // A name that one still types is no search for runs that have it.
  if (document.activeElement === search && /(^|[\s(])(metrics|params|tags)\.\S*$/.test(search.value)) return;
  if (query !== (location.search || "?")) await go(query, history.replaceState);
}

/** Show the list of this address, in place. */
async function go(query, keep = history.pushState) {
  const mine = ++asked, page = await part(`${location.pathname}${query}`);
  if (!page || mine !== asked) return;
  const wrong = page.getElementById("wrong");
  // A query that is not complete leaves the rows that are there.
  if (wrong.textContent.trim()) { document.getElementById("wrong").textContent = wrong.textContent; return; }
  const checked = Array.from(body().querySelectorAll("input[name=run]:checked"), one => one.value);
  const opened = document.getElementById("columns").open, focused = document.activeElement?.getAttribute("aria-label") || document.activeElement?.closest("tr")?.dataset.run;
  keep.call(history, null, "", query === "?" ? location.pathname : query);
  document.getElementById("group").value = new URLSearchParams(query).get("group") || "";
  found.replaceChildren(...page.getElementById("found").childNodes);
  document.querySelector("h1").replaceChildren(...page.querySelector("h1").childNodes);
  localTimes(found);
  unfold();
  for (const one of body().querySelectorAll("input[name=run]")) one.checked = checked.includes(one.value);
  document.getElementById("columns").open = opened;
  arrange();
  choose();
  watch();
  // The control that was used is a new element.
  if (focused && document.activeElement === document.body) {
    Array.from(found.querySelectorAll("a, [data-run] a")).find(one => [one.getAttribute("aria-label"), one.closest("tr")?.dataset.run].includes(focused))?.focus();
  }
}

// --- columns, groups and order: links that change the list in place, and headings that one drags

found.addEventListener("click", event => {
  const link = event.target.closest("a[href]");
  if (!link || link.origin !== location.origin || link.pathname !== location.pathname || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(link.search || "?");
});
found.addEventListener("keydown", event => {
  if (event.key !== " " || event.target.getAttribute("role") !== "button") return;
  event.preventDefault();
  event.target.click();
});
window.addEventListener("popstate", () => location.reload());
let dragged = null;
found.addEventListener("dragstart", event => { dragged = event.target.closest?.("th[data-name]"); });
for (const kind of ["dragover", "drop", "dragend"]) found.addEventListener(kind, event => {
  const over = dragged && columns().find(head => head.contains(event.target));
  for (const head of columns()) head.classList.toggle("over", kind === "dragover" && head === over);
  if (over && over !== dragged && kind !== "dragend") event.preventDefault();
  if (over && over !== dragged && kind === "drop") {
    const names = columns().filter(head => head !== dragged).map(head => head.dataset.name), query = new URLSearchParams(location.search);
    names.splice(names.indexOf(over.dataset.name) + (over.offsetLeft > dragged.offsetLeft ? 1 : 0), 0, dragged.dataset.name);
    query.set("columns", names.join(","));
    if (query.has("pin")) query.set("pin", names.filter(name => columns().some(head => head.dataset.name === name && /\bpin\d/.test(head.className))).join(","));
    go(`?${query}`);
  }
  if (kind !== "dragover") dragged = null;
});
document.addEventListener("input", event => {
  if (event.target.getAttribute("list") !== "fields") return;
  const place = document.getElementById("fields"), text = event.target.value;
  const address = `${place.dataset.from}?${new URLSearchParams({ q: text, at: text.length })}`;
  offer(place, async () => (await json(address)).suggestions.map(one => [one.text, one.hint]));
});
window.addEventListener("resize", arrange);

// --- completion: a combobox with a list, as ARIA describes it

let suggestions = [], at = -1, completing = 0;
function show(next) {
  suggestions = next;
  at = -1;
  list.hidden = !next.length;
  search.setAttribute("aria-expanded", String(next.length > 0));
  search.removeAttribute("aria-activedescendant");
  list.replaceChildren(...next.map((one, number) => {
    const item = document.createElement("li"), hint = document.createElement("small");
    item.id = `suggestion-${number}`;
    item.role = "option";
    item.append(one.text);
    hint.textContent = one.hint;
    item.append(hint);
    item.addEventListener("pointerdown", event => { event.preventDefault(); take(number); });
    return item;
  }));
}
function mark(next) {
  list.children[at]?.removeAttribute("aria-selected");
  at = next;
  list.children[at].setAttribute("aria-selected", "true");
  list.children[at].scrollIntoView({ block: "nearest" });
  search.setAttribute("aria-activedescendant", list.children[at].id);
}
function take(number) {
  const { text, start, end } = suggestions[number], // A group's name follows its dot, and perhaps a statistic the name of a metric.
    space = text.endsWith(".") || /^metrics\.(?!.*\.(last|best|min|max|count)$)/.test(text) ? "" : " ";
  search.setRangeText(text + space, start, end, "end");
  show([]);
  typed();
}
async function suggest() {
  const mine = ++completing, query = new URLSearchParams({ q: search.value, at: search.selectionStart });
  try {
    const answer = await json(`${list.dataset.from}?${query}`);
    if (mine === completing && document.activeElement === search) show(answer.suggestions);
  } catch { show([]); }
}

let later = 0;
function typed() {
  clearTimeout(later);
  later = setTimeout(() => { find(); suggest(); }, 150);
}
search.addEventListener("input", typed);
search.addEventListener("blur", () => { completing++; show([]); });
search.addEventListener("keydown", event => {
  const count = suggestions.length, { key } = event;
  if (key === "ArrowDown" && !count) { event.preventDefault(); suggest(); }
  else if (key === "ArrowDown" && count) { event.preventDefault(); mark((at + 1) % count); }
  else if (key === "ArrowUp" && count) { event.preventDefault(); mark((at + count - (at < 0 ? 0 : 1)) % count); }
  else if ((key === "Enter" || key === "Tab") && at >= 0) { event.preventDefault(); take(at); }
  else if (key === "Escape" && count) { event.preventDefault(); show([]); }
});

found.addEventListener("change", choose);
for (const select of form.querySelectorAll("select, input[type=checkbox]")) select.addEventListener("change", () => form.requestSubmit());
// Fields that say nothing stay out of the address, which may be kept as a link.
form.addEventListener("submit", event => {
  for (const field of event.target.elements) if (field.name && !field.value) field.disabled = true;
});
window.addEventListener("pageshow", () => {
  for (const field of form.elements) field.disabled = false;
  choose();
});
// An added column is now one of the list's own.
if (/[?&]add=/.test(location.search)) history.replaceState(null, "", found.dataset.address || location.pathname);
watch();
arrange();
unfold();
choose();
