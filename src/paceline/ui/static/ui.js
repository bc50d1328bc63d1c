// What every page has: local times, running durations, the theme, forms that ask before they act, keys.
"use strict";

export const root = document.body.dataset.root;

/** The value of a CSS property of the page, such as "--c0". */
export function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

/** Whether the page is dark: by its button, or else by the system. */
export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** A number as people read it. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

/** Seconds as people read them: as the command line has it. */
export function duration(seconds) {
  if (Math.round(seconds * 10) / 10 < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Each is made when it is needed: that takes as long as drawing the page.
const formats = {
  clock: { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" }, withYear: { dateStyle: "medium", timeStyle: "short" },
};
const made = {};
function formatted(date) {
  const name = date.getFullYear() === new Date().getFullYear() ? "clock" : "withYear";
  return (made[name] ||= new Intl.DateTimeFormat(undefined, formats[name])).format(date);
}

/** Times below this element by the clock of whoever looks. */
export function localTimes(top = document) {
  for (const time of top.querySelectorAll("time:not([data-local])")) {
    const date = new Date(time.dateTime);
    if (Number.isNaN(date.getTime())) continue;
    time.dataset.local = "1";
    time.title = date.toString();
    time.textContent = formatted(date);
  }
}

function tick() {
  for (const running of document.querySelectorAll("[data-since]")) {
    const began = Date.parse(running.dataset.since);
    if (began) running.textContent = duration(Math.max(0, Math.floor((Date.now() - began) / 1000)));
  }
}

/** Parse HTML that this server has made, all of whose texts it has escaped; its addresses are relative to `address`, which it came
 *  from. Scripts in it would not run. */
export function parsed(html, address) {
  const made = document.createElement("template"), base = new URL(address, location.href);
  made.innerHTML = html;
  for (const name of ["href", "src", "action"]) {
    for (const one of made.content.querySelectorAll(`[${name}]`)) one.setAttribute(name, new URL(one.getAttribute(name), base).href);
  }
  return made.content;
}

/** Fetch a part of a page; null where it can't be had now. */
export async function part(address) {
  try {
    const answer = await fetch(address, { headers: { accept: "text/html" } });
    return answer.ok ? parsed(await answer.text(), address) : null;
  } catch { return null; }
}

/** Show a run's state in the tab, which may be one of many. */
function stateInTab() {
  const head = document.getElementById("head");
  if (!head?.dataset.title || head.dataset.title === shownInTab) return;
  if (shownInTab !== null) {
    document.title = document.title.replace(`${shownInTab}: `, `${head.dataset.title}: `);
    document.querySelector("link[rel=icon]").href = `${document.body.dataset.static}icon-${head.dataset.tone}.svg`;
  }
  shownInTab = head.dataset.title;
}
let shownInTab = null;

/** The foldable parts below an element, each with a key that it keeps when others come or go: its heading and its label without counts. */
function folds(place) {
  const seen = {};
  return Array.from(place.querySelectorAll("details"), one => {
    const head = one.closest("section, article")?.querySelector("h2, h3")?.firstChild?.textContent.trim();
    const key = one.id || `${head}|${one.querySelector("summary")?.textContent.replace(/\d+/g, "")}`;
    return [`${key}|${seen[key] = (seen[key] || 0) + 1}`, one];
  });
}

/** Replace what is in an element; where somebody types there, or `isBusy`, as soon as that is over. What is open, checked, focused or
 *  scrolled stays so. */
export function swap(place, make, done, isBusy) {
  clearTimeout(place.waiting);
  const active = place.contains(document.activeElement) ? document.activeElement : null;
  const types = active && /^(INPUT|SELECT|TEXTAREA)$/.test(active.tagName) && active.type !== "checkbox";
  if (types || isBusy?.()) {
    place.waiting = setTimeout(() => swap(place, make, done, isBusy), 500);
    return;
  }
  const each = selector => Array.from(place.querySelectorAll(selector)), canFocus = "a[href], button, input, select, summary, [tabindex]";
  const name = one => [one.tagName, one.href, one.name, one.value, one.textContent].join("|");
  const at = each(canFocus).indexOf(active), open = new Map(folds(place).map(([key, one]) => [key, one.open]));
  const checked = new Set(each(":checked").map(name)), scrolled = each(".scroll, pre").map(one => [one.scrollLeft, one.scrollTop]);
  const made = make();
  localTimes(made);
  place.replaceChildren(made);
  for (const [key, one] of folds(place)) one.open = open.get(key) ?? one.open;
  each(".scroll, pre").forEach((one, number) => { if (number in scrolled) [one.scrollLeft, one.scrollTop] = scrolled[number]; });
  each("input[type=checkbox]").forEach(one => { one.checked ||= checked.has(name(one)); });
  if (active) (each(canFocus).find(one => name(one) === name(active)) || each(canFocus)[at])?.focus({ preventScroll: true });
  stateInTab();
  tick();
  done?.();
}

export async function json(address) {
  const answer = await fetch(address, { headers: { accept: "application/json" } });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error || answer.statusText);
  return value;
}

/** Fill a datalist with [value, label] pairs. A slow answer to an earlier text does not replace a later one. */
export async function offer(datalist, find) {
  const mine = datalist.asked = (datalist.asked || 0) + 1, found = await find().catch(() => []);
  if (mine !== datalist.asked) return;
  datalist.replaceChildren(...found.map(([value, label]) => Object.assign(document.createElement("option"), { value, label })));
}

/** Follow a stream of events. It rests while nobody looks at the tab, and begins again by itself when the server was away.
 *  seen: what the page has already, as the stream says it. */
export function follow(address, handlers, seen = "") {
  let source = null, isOver = false, place = seen, retry = 0;
  const shown = document.getElementById("connection");
  function say(text) { shown.hidden = !text; shown.textContent = text; }
  function open() {
    if (source || isOver) return;
    clearTimeout(retry);
    // A new stream does not say by itself what was seen of the last one; one that the browser opens again does.
    source = new EventSource(place ? `${address}${address.includes("?") ? "&" : "?"}place=${encodeURIComponent(place)}` : address);
    source.onopen = () => say("");
    source.onerror = () => {
      say("Connection lost. Trying again");
      // A browser gives up where the answer was an error, as a proxy gives one while the server is away.
      if (source && source.readyState === EventSource.CLOSED) { close(); retry = setTimeout(open, 1500); }
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, event => { place = event.lastEventId || place; handle(JSON.parse(event.data)); });
    }
    source.addEventListener("end", () => { isOver = true; close(); say(""); });
  }
  function close() { if (source) source.close(); source = null; }
  document.addEventListener("visibilitychange", () => { document.hidden ? close() : open(); });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  if (!document.hidden) open();
  return { close, stop() { isOver = true; close(); }, get place() { return place; } };
}

document.addEventListener("submit", event => {
  const asked = event.target.dataset.confirm;
  if (asked && !window.confirm(asked)) event.preventDefault();
});

document.getElementById("theme")?.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("paceline-theme", document.documentElement.dataset.theme); } catch { /* not kept then */ }
  document.dispatchEvent(new Event("theme"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));

// "/" goes to the page's search, as in many programs.
document.addEventListener("keydown", event => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const search = document.querySelector("input[type=search]");
  if (search) { event.preventDefault(); search.focus(); search.select(); }
});

// Paint the page first: creating the first format of dates takes as long.
requestAnimationFrame(() => setTimeout(() => localTimes()));
stateInTab();
tick();
setInterval(tick, 1000);
