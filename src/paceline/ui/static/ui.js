// What every page has: local times, running durations, the theme, forms that ask before they act, keys.
"use strict";

export const root = document.body.dataset.root;

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

const clock = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
const withYear = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

/** Times below this element by the clock of whoever looks. */
export function localTimes(top = document) {
  for (const time of top.querySelectorAll("time:not([data-local])")) {
    const date = new Date(time.dateTime);
    if (Number.isNaN(date.getTime())) continue;
    time.dataset.local = "1";
    time.title = date.toString();
    time.textContent = (date.getFullYear() === new Date().getFullYear() ? clock : withYear).format(date);
  }
}

function tick() {
  for (const running of document.querySelectorAll("[data-since]")) {
    const began = Date.parse(running.dataset.since);
    if (began) running.textContent = duration(Math.max(0, Math.floor((Date.now() - began) / 1000)));
  }
}

/** Parse HTML that this server has made, all of whose texts it has escaped. Scripts in it would not run. */
export function parsed(html) {
  const made = document.createElement("template");
  made.innerHTML = html;
  return made.content;
}

/** Fetch a part of a page; null where it can't be had now. */
export async function part(address) {
  try {
    const answer = await fetch(address, { headers: { accept: "text/html" } });
    return answer.ok ? parsed(await answer.text()) : null;
  } catch { return null; }
}

export async function json(address) {
  const answer = await fetch(address, { headers: { accept: "application/json" } });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error || answer.statusText);
  return value;
}

/** Follow a stream of events. It rests while nobody looks at the tab, and begins again by itself when the server was away. */
export function follow(address, handlers) {
  let source = null, isOver = false, place = "", retry = 0;
  const shown = document.getElementById("connection");
  function say(text) { shown.hidden = !text; shown.textContent = text; }
  function open() {
    if (source || isOver) return;
    clearTimeout(retry);
    // A new stream does not say by itself what was seen of the last one; one that the browser opens again does.
    source = new EventSource(place ? `${address}${address.includes("?") ? "&" : "?"}place=${encodeURIComponent(place)}` : address);
    source.onopen = () => say("");
    source.onerror = () => {
      say("Not connected; trying again");
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
  return { close, get place() { return place; } };
}

document.addEventListener("submit", event => {
  const asked = event.target.dataset.confirm;
  if (asked && !window.confirm(asked)) event.preventDefault();
});

document.getElementById("theme")?.addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
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

localTimes();
tick();
setInterval(tick, 1000);
