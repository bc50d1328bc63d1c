// The table of a comparison. Only the rows and columns in sight are in the document, so 12,000 rows of 200 runs scroll like 12.
"use strict";
import { colour } from "./run_colours.js";
import { element, number } from "./ui.js";

function gap(columns) {
  const cell = element("td", "", "gap");
  cell.colSpan = columns;
  cell.setAttribute("aria-hidden", "true");
  return cell;
}

const ROW = 30, EXTRA = 12, BESIDE = 3; // height of a row in pixels; rows and columns drawn around those in sight

/** The value of a fact in a run. Equal values are sent once. */
const valueOf = (fact, run) => fact.values.length === 1 ? fact.values[0] : fact.values[run];
const isUnlike = (a, b) => a !== b && (a ?? "") !== (b ?? "");
const textOf = value => value === null || value === undefined || value === "" ? "–" : number(value);

export class Table {
  /** head(run): the content of a run's heading. pair(run): the address that compares a run with the first, if there is one. */
  constructor(place, { head, pair }) {
    this.place = place; this.head = head; this.pair = pair; this.note = document.getElementById("table-note");
    this.kinds = JSON.parse(place.dataset.kinds);
    this.facts = []; this.runs = []; this.order = []; this.rows = []; this.words = []; this.part = "last"; this.isOnly = true;
    this.sorted = null;
    place.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
    new ResizeObserver(() => this.draw()).observe(place);
  }

  /** Take the table that the server has sent. */
  set({ runs, facts }) {
    this.runs = runs;
    if (this.order.length !== runs.length) this.order = runs.map((_, at) => at);
    this.facts = facts.map(([kind, name, part, values]) => ({ kind, name, part, values, low: name.toLowerCase() }));
    this.sort();
    this.choose();
  }

  /** Show the rows that the fields above the table choose, now and after each change. onRead: called with the values of the fields. */
  obey(onRead) {
    const fields = ["table-filter", "table-part", "only-different"].map(name => document.getElementById(name)), [filter, part, only] = fields;
    const read = () => {
      const found = { words: filter.value, part: part.value, isOnly: only.checked };
      onRead?.(found);
      Object.assign(this, { ...found, words: found.words.toLowerCase().split(/\s+/).filter(Boolean) });
      if (this.runs.length) this.choose();
    };
    for (const field of fields) field.addEventListener("input", read);
    read();
  }

  /** Order the runs by a fact: up, down, and as they were. */
  sortBy(fact) {
    const key = `${fact.kind}|${fact.name}|${fact.part}`, was = this.sorted;
    this.sorted = was?.key !== key ? { key, down: false } : was.down ? null : { key, down: true };
    this.sort();
    this.choose();
  }

  sort() {
    this.order = this.runs.map((_, at) => at);
    const fact = this.sorted && this.facts.find(one => `${one.kind}|${one.name}|${one.part}` === this.sorted.key);
    if (!fact) { this.sorted = null; return; }
    const value = run => { const one = valueOf(fact, run), read = Number(one); return one === "" || Number.isNaN(read) ? one : read; };
    this.order.sort((a, b) => {
      const x = value(a), y = value(b), isNone = one => one === null || one === undefined || one === "";
      if (isNone(x) || isNone(y)) return isNone(x) - isNone(y);
      const by = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
      return this.sorted.down ? -by : by;
    });
  }

  /** Choose the rows by the filters. */
  choose() {
    const shown = this.facts.filter(fact => (!fact.part || !this.part || fact.part === this.part)
      && (!this.isOnly || fact.values.length > 1) && this.words.every(word => fact.low.includes(word)));
    this.rows = [];
    let kind = null;
    for (const fact of shown) {
      if (fact.kind !== kind) this.rows.push({ section: kind = fact.kind });
      this.rows.push(fact);
    }
    this.drawn = null;
    const differ = this.facts.filter(fact => fact.values.length > 1 && (!fact.part || !this.part || fact.part === this.part)).length;
    this.note.textContent = `${shown.length} row${shown.length === 1 ? "" : "s"}`
      + (this.runs.length > 1 ? `; ${differ} differ${differ === 1 ? "s" : ""}. A cell is marked where it differs from the first run.` : ".");
    this.make();
  }

  /** Make the table and its head; `draw` fills in the rows. */
  make() {
    const table = element("table");
    table.setAttribute("aria-rowcount", this.rows.length + 1);
    table.setAttribute("aria-colcount", this.order.length + 1);
    table.style.setProperty("--count", this.order.length);
    this.top = element("thead");
    this.body = element("tbody");
    table.append(this.top, this.body);
    const { scrollLeft, scrollTop } = this.place;
    this.draw();
    this.keepFocus(() => this.place.replaceChildren(table));
    Object.assign(this.place, { scrollLeft, scrollTop });
  }

  /** Give the focus to the new control with the same column and text as the one that had it. */
  keepFocus(change) {
    const key = one => [one.tagName, one.textContent, one.parentNode?.getAttribute("aria-colindex")].join("|");
    const active = this.place.contains(document.activeElement) ? document.activeElement : null, was = active && key(active);
    change();
    if (active && !active.isConnected) Array.from(this.place.querySelectorAll("a, button")).find(one => key(one) === was)?.focus({ preventScroll: true });
  }

  heading(run) {
    const cell = element("th", "", run === this.order[0] && this.runs.length > 1 ? "run first" : "run"), name = this.head(run);
    cell.scope = "col"; cell.dataset.colour = run;
    cell.style.setProperty("--mine", colour(run));
    name.title = name.textContent;
    cell.append(name);
    return cell;
  }

  /** Append the cells of the runs in sight to a row. */
  fill(row, cellOf) {
    const [left, right] = this.columns, spare = columns => {
      const cell = gap(columns);
      cell.style.width = `calc(${columns} * var(--column))`;
      row.append(cell);
    };
    if (left) spare(left);
    for (let at = left; at < right; at++) {
      const cell = cellOf(this.order[at]);
      cell.setAttribute("aria-colindex", at + 2);
      row.append(cell);
    }
    if (right < this.order.length) spare(this.order.length - right);
    return row;
  }

  drawTop() {
    const names = element("tr");
    names.append(element("th", "Name", "name"));
    this.top.replaceChildren(this.fill(names, run => this.heading(run)));
    if (this.runs.length > 1) this.top.append(this.against(element("tr", "", "against")));
  }

  /** How far each run is from the first, by kind of fact. */
  against(row) {
    row.append(element("th", "Unlike the first", "name"));
    const first = this.order[0];
    const facts = this.facts.filter(fact => fact.values.length > 1 && (!fact.part || fact.part === "last"));
    return this.fill(row, run => {
      const cell = element("td");
      if (run === first) { cell.textContent = "the first"; return cell; }
      const found = Object.keys(this.kinds).filter(kind => kind !== "metrics").map(kind => [kind, facts.filter(fact =>
        fact.kind === kind && isUnlike(valueOf(fact, run), valueOf(fact, first))).length]).filter(([, count]) => count);
      const link = element(this.pair ? "a" : "span", found.length ? found.map(([kind, count]) => `${kind} ${count}`).join(", ") : "nothing but results");
      if (this.pair) Object.assign(link, { href: this.pair(run, first), title: "Compare these two runs: code, first difference of metrics" });
      cell.append(link);
      return cell;
    });
  }

  draw() {
    if (!this.body) return;
    const { scrollTop, scrollLeft, clientHeight, clientWidth } = this.place, wide = parseFloat(getComputedStyle(this.place).getPropertyValue("--column")) || 130;
    // After a filter there may be fewer rows than were scrolled by.
    const top = Math.min(scrollTop, Math.max(0, this.rows.length * ROW - clientHeight));
    const first = Math.max(0, Math.floor(top / ROW) - EXTRA), left = Math.max(0, Math.floor(scrollLeft / wide) - BESIDE);
    const last = Math.min(this.rows.length, first + Math.ceil((clientHeight || 600) / ROW) + 2 * EXTRA);
    const right = Math.min(this.order.length, left + Math.ceil((clientWidth || 1200) / wide) + 2 * BESIDE), drawn = [first, last, left, right].join();
    if (this.drawn === drawn) return;
    this.drawn = drawn;
    this.columns = [left, right];
    if (this.top.drawn !== `${left}|${right}`) { this.top.drawn = `${left}|${right}`; this.keepFocus(() => this.drawTop()); }
    const rows = [], skip = height => {
      const row = element("tr", "", "gap"), cell = gap(this.order.length + 1);
      cell.style.height = `${height}px`; row.append(cell); row.setAttribute("aria-hidden", "true"); rows.push(row);
    };
    if (first) skip(first * ROW);
    for (let at = first; at < last; at++) rows.push(this.row(this.rows[at], at));
    if (last < this.rows.length) skip((this.rows.length - last) * ROW);
    this.keepFocus(() => this.body.replaceChildren(...rows));
  }

  row(fact, at) {
    const row = element("tr", "", fact.section ? "section" : "");
    row.setAttribute("aria-rowindex", at + 2);
    const name = element("th", "", "name");
    row.append(name);
    if (fact.section) {
      name.textContent = this.kinds[fact.section];
      name.scope = "rowgroup";
      const rest = element("td");
      rest.colSpan = this.order.length;
      row.append(rest);
      return row;
    }
    name.scope = "row";
    const title = fact.part && (!this.part || this.part !== "last") ? `${fact.name} ${fact.part}` : fact.name;
    if (fact.values.length > 1) {
      const button = element("button", title, "order");
      button.type = "button";
      button.title = `${title}: order the runs by this row`;
      button.addEventListener("click", () => this.sortBy(fact));
      name.append(button);
      if (this.sorted?.key === `${fact.kind}|${fact.name}|${fact.part}`) name.append(element("span", this.sorted.down ? " ↓" : " ↑"));
    } else {
      name.textContent = name.title = title;
    }
    const one = valueOf(fact, this.order[0]);
    return this.fill(row, run => {
      const value = valueOf(fact, run), text = textOf(value);
      const cell = element("td", text, isUnlike(value, one) ? "unlike" : "");
      if (text.length > 16) cell.title = text;
      return cell;
    });
  }
}
