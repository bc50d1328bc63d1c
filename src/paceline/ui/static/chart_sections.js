// Sections of charts: those that are pinned, then one for each prefix of the metrics' names, and nodes and workers below the log.
"use strict";
import { number } from "./ui.js";

const PAGE = 12;        // charts of a section that are there at first, and that come with each "more"
const NUMBERS = 60;     // cards of single values in a section
const OPEN = 8;         // sections that are open at first
const MOST_SECTIONS = 200;

/** What this browser keeps for the workspace: pinned charts in their order, and folded sections. */
export const kept = {
  key: `paceline-charts:${document.querySelector(".workspace")?.title || ""}`,
  read() {
    let found = {};
    try { found = JSON.parse(localStorage.getItem(this.key)) || {}; } catch { /* nothing kept */ }
    const list = value => Array.isArray(value) ? value : [];
    return { pinned: list(found.pinned).filter(one => one && typeof one === "object"), folded: list(found.folded) };
  },
  change(does) {
    const now = this.read();
    does(now);
    try { localStorage.setItem(this.key, JSON.stringify(now)); } catch { /* then they last as long as the page */ }
    return now;
  },
};

/** Whether a pin is that of this metric. */
export function isOf(pin, entry) { return !pin.kind && pin.name === entry.name && Boolean(pin.node) === Boolean(entry.node); }

/** Whether each rank has logged one value, which makes no curve. */
function isSingle(entry) { return !entry.node && entry.count <= entry.ranks.length * Math.max(1, entry.attempts.length); }

/** What stands for a chart below a heading: its card, or the place of its card while that fills the screen. */
const placeOf = chart => chart.stay || chart.card;

/** Charts below one heading, of which more come on demand. */
class Section {
  constructor(sections, title, place, isOpen) {
    this.sections = sections; this.title = title; this.entries = []; this.limit = PAGE; this.isFiltered = false;
    this.box = document.createElement("details");
    this.box.className = "metrics"; this.box.open = isOpen;
    this.head = document.createElement("summary");
    this.numbers = document.createElement("dl");
    this.numbers.className = "numbers";
    this.charts = document.createElement("div");
    this.charts.className = "charts";
    this.more = document.createElement("button");
    this.more.type = "button"; this.more.className = "more"; this.more.hidden = true;
    this.box.append(this.head, this.numbers, this.charts, this.more);
    place.append(this.box);
    this.more.addEventListener("click", () => { this.limit += 2 * PAGE; this.show(); });
    // Charts are made when their section is open and comes into sight.
    new IntersectionObserver(found => { if (found.some(one => one.isIntersecting) && !this.isSeen) { this.isSeen = true; this.show(); } }, { rootMargin: "300px" }).observe(this.box);
    this.box.addEventListener("toggle", () => {
      if (this.box.open) this.show();
      if (!this.isSystem && !this.isFiltered) kept.change(now => {
        now.folded = now.folded.filter(one => one !== title);
        if (!this.box.open) now.folded.push(title);
      });
    });
  }

  show() {
    const board = this.sections.board, passing = board.passing(this.entries);
    this.box.hidden = passing.length === 0;
    this.head.textContent = "";
    const count = document.createElement("small");
    count.textContent = passing.length;
    this.head.append(`${this.title} `, count);
    if (!this.isSystem && board.isFiltered !== this.isFiltered) {
      // What the filter finds is open; afterwards the section is as it was.
      this.isFiltered = board.isFiltered;
      if (this.isFiltered) this.wasOpen = this.box.open;
      this.box.open = this.isFiltered || this.wasOpen;
    }
    if (!this.box.open || !this.isSeen) return;
    const single = passing.filter(isSingle), drawn = passing.filter(entry => !isSingle(entry)), shown = drawn.slice(0, this.limit);
    this.numbers.hidden = single.length === 0;
    this.numbers.replaceChildren(...single.slice(0, NUMBERS).map(numberCard));
    const cards = shown.map(entry => placeOf(board.chart(entry, null))), wanted = new Set(cards);
    for (const card of [...this.charts.children]) if (!wanted.has(card)) card.remove();
    cards.forEach((card, at) => { if (this.charts.children[at] !== card) this.charts.insertBefore(card, this.charts.children[at] || null); });
    const left = drawn.length - shown.length;
    this.more.hidden = left === 0;
    this.more.textContent = `Show more: ${left} of ${drawn.length} charts are not shown`;
    this.charts.hidden = cards.length === 0;
  }
}

function numberCard(entry) {
  const card = document.createElement("div"), name = document.createElement("dt"), value = document.createElement("dd");
  name.textContent = entry.name;
  value.textContent = number(entry.last);
  value.title = entry.ranks.length > 1 ? `Rank ${entry.ranks[0]}; ${entry.ranks.length} ranks logged a value` : "The only value";
  card.append(name, value);
  (window.pacelineDrawn ||= {})[entry.name] = { last: entry.last, n: entry.count, at: Date.now() };
  return card;
}

/** All sections of a run's page. */
export class Sections {
  constructor(board) {
    this.board = board; this.entries = new Map(); this.byTitle = new Map(); this.node = "";
    this.pinnedBox = document.getElementById("pinned");
    const choice = document.getElementById("system-node");
    choice?.addEventListener("change", () => {
      this.node = choice.value;
      board.all(chart => { if (chart.isNode) { chart.isStale = true; if (chart.isSeen) board.want(chart); } });
    });
    document.getElementById("own-add")?.addEventListener("click", async () => (await import("./own_charts.js")).add(this));
  }

  get hasMetrics() { return [...this.entries.values()].some(entry => !entry.node); }

  /** The metrics that there are now: all of them, or those that changed. */
  take(names) {
    let isNew = false;
    for (const entry of names) {
      const of = `${entry.node || 0}|${entry.name}`, before = this.entries.get(of);
      isNew ||= !before || isSingle(before) !== isSingle(entry);
      this.entries.set(of, entry);
      if (this.board.charts.has(of)) this.board.chart(entry);
    }
    if (isNew) this.sort();
  }

  /** New values; false if the metric is unknown. */
  told(one) {
    const entry = this.entries.get(`${one.node || 0}|${one.name}`);
    if (!entry) return false;
    const was = isSingle(entry);
    if (!entry.ranks.includes(one.rank) || !entry.attempts.includes(one.attempt)) return false;
    if (one.y && one.y.length) {
      entry.count += one.y.length;
      entry.last = one.y[one.y.length - 1];
      if (was) this.soon();
    }
    return true;
  }

  soon() { this.timer ||= setTimeout(() => { this.timer = 0; this.show(); }, 100); }

  /** Put each metric into its section. */
  sort() {
    const { pinned, folded } = kept.read(), into = new Map();
    for (const entry of this.entries.values()) {
      if (pinned.some(pin => isOf(pin, entry))) continue;
      const cut = entry.name.indexOf("/");
      let title = entry.node ? (entry.name.startsWith("rank_") ? "Workers" : "Nodes") : cut > 0 ? entry.name.slice(0, cut) : "General";
      if (!entry.node && !into.has(title) && into.size >= MOST_SECTIONS) title = "More";
      const of = `${entry.node || 0}|${title}`;
      into.has(of) ? into.get(of).push(entry) : into.set(of, [entry]);
    }
    for (const [of, section] of this.byTitle) if (!into.has(of)) { section.entries = []; section.box.hidden = true; }
    for (const [of, entries] of into) {
      let section = this.byTitle.get(of);
      if (!section) {
        const isSystem = of[0] === "1", title = of.slice(2);
        section = new Section(this, title, isSystem ? this.board.nodes : this.board.place, !isSystem && this.byTitle.size < OPEN && !folded.includes(title));
        section.isSystem = isSystem;
        // The first one is in sight: its charts need not wait for the observer.
        section.isSeen = !isSystem && this.byTitle.size < 2;
        this.byTitle.set(of, section);
      }
      section.entries = entries;
    }
    const own = [...this.byTitle.values()].filter(section => !section.isSystem && section.entries.length);
    this.board.place.classList.toggle("single", own.length === 1);
    document.getElementById("system").hidden = ![...into.keys()].some(of => of[0] === "1");
    this.pin(pinned);
    this.show();
  }

  show() { for (const section of this.byTitle.values()) section.show(); }

  /** The charts that somebody pinned or made, in their order. */
  async pin(pinned) {
    const own = pinned.some(pin => pin.kind) ? await import("./own_charts.js") : null;
    const cards = [];
    for (const pin of pinned) {
      const entry = pin.kind ? null : this.entries.get(`${pin.node ? 1 : 0}|${pin.name}`);
      const chart = entry ? this.board.chart(entry, null) : pin.kind ? own.chartOf(this, pin) : null;
      if (chart) cards.push(placeOf(chart));
    }
    this.pinnedBox.querySelector(".charts").replaceChildren(...cards);
    this.pinnedBox.hidden = cards.length === 0;
  }

  /** Change what is pinned: the list of all pins. */
  change(does) {
    kept.change(now => { does(now.pinned); });
    this.sort();
  }
}
