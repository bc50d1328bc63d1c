// Charts that somebody makes: a metric over another one, as a line or as points; bars of last values; a histogram.
"use strict";
import { json, number } from "./ui.js";
import { axisStyle, colour, makeCard, tickText, valuesText, yRange } from "./charts.js";

const KINDS = { line: "line", scatter: "points", bar: "bars of last values", histogram: "histogram of values" };
const LOOK_MS = 5000, OFFERED = 2000;
const made = new Map();

/** A chart that was made before; null if what this browser has kept is no such chart. */
export function chartOf(sections, pin) {
  const isText = value => typeof value === "string" && value.length < 1000;
  if (!Object.hasOwn(KINDS, pin.kind) || !isText(pin.y) || !isText(pin.id) || pin.x !== undefined && !isText(pin.x)) return null;
  if (!made.has(pin.id)) made.set(pin.id, new OwnChart(sections, pin));
  return made.get(pin.id);
}

class OwnChart {
  constructor(sections, pin) {
    this.sections = sections; this.pin = pin; this.drawn = []; this.columns = []; this.plot = null; this.isSeen = false;
    this.board = { sections, colourOf: (_, at) => colour(at) };
    makeCard(this, "Move, full screen, PNG, SVG, CSV");
    new IntersectionObserver(found => { this.isSeen = found.at(-1).isIntersecting; if (this.isSeen) this.fetch(); }, { rootMargin: "200px" }).observe(this.card);
    setInterval(() => { if (this.isSeen && !document.hidden && document.getElementById("head").dataset.terminal === "0") this.fetch(); }, LOOK_MS);
    document.addEventListener("theme", () => this.draw());
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  get title() { const { kind, x, y } = this.pin; return x ? `${y} over ${x}` : kind === "bar" ? `Last values: ${y}` : `Histogram: ${y}`; }
  get hasPoints() { return this.pin.kind === "scatter"; }
  labelAt(curve) { return curve.text; }

  async fetch() {
    const { kind, x, y } = this.pin;
    try { this.found = await json(`${document.getElementById("metrics").dataset.own}?${new URLSearchParams({ kind, y, ...(x ? { x } : {}) })}`); }
    catch (error) { this.legend.textContent = error.message; return; }
    this.draw();
  }

  draw() {
    if (!this.found) return;
    const { labels, note, curves, width } = this.found, isBar = this.pin.kind === "bar" || this.pin.kind === "histogram";
    this.bars = isBar ? X => Math.abs(X(width * 0.9) - X(0)) : null;
    this.drawn = curves; this.columns = curves.map((_, at) => at + 1);
    const sorted = curves.map(curve => {
      const order = curve.x.map((_, at) => at).sort((a, b) => curve.x[a] - curve.x[b]);
      return [order.map(at => curve.x[at]), order.map(at => curve.y[at])];
    });
    const data = sorted.length > 1 ? uPlot.join(sorted) : sorted[0] || [[], []];
    const axis = axisStyle();
    const short = text => text.length > 14 ? `…${text.slice(-13)}` : text;
    this.plot?.destroy();
    this.plot = new uPlot({
      width: Math.max(200, this.box.clientWidth), height: this.box.clientHeight, legend: { show: false }, padding: [8, 20, 0, 0],
      cursor: { y: false, drag: { x: true, y: false } },
      scales: {
        x: { time: false, range: (_, low, high) => low === null ? [0, 1] : isBar ? [low - width, high + width] : low === high ? [low - 1, high + 1] : [low, high] },
        y: { range: (_, low, high) => isBar && low !== null ? yRange(Math.min(0, low), Math.max(0, high)) : yRange(low, high) },
      },
      series: [{}, ...curves.map((_, at) => ({
        stroke: colour(at), width: 1.6, spanGaps: true, fill: isBar ? `${colour(at)}aa` : undefined,
        ...(isBar ? { paths: uPlot.paths.bars({ size: [0.9, 200] }), points: { show: false } } : {}),
        ...(this.hasPoints ? { paths: () => null, points: { show: true, size: 5, fill: colour(at) } } : {}),
      }))],
      axes: [{ ...axis, size: 30, space: labels ? 90 : 60, ...(labels ? { incrs: [1, 2, 5, 10, 20, 50, 100] } : {}), values: (_, ticks) => ticks.map(tick => labels ? short(labels[tick] ?? "") : tickText(tick)) },
        { ...axis, size: 54, values: (_, ticks) => ticks.map(tickText) }],
      hooks: { setCursor: [plot => this.tell(plot)] },
    }, data, this.box);
    this.box.setAttribute("aria-label", `${this.title}: ${valuesText(null, curves) || "no values"}`);
    this.note = note;
    this.tell(this.plot);
  }

  tell(plot) {
    const at = plot.cursor?.idx, { labels } = this.found, parts = [];
    if (at !== null && at !== undefined) {
      const x = plot.data[0][at], told = this.columns.map(column => plot.data[column][at]).find(y => y !== null && y !== undefined);
      parts.push(`${labels ? labels[x] : number(x)}: ${number(told)}`);
    } else if (this.drawn.length > 1) parts.push(this.drawn.map(curve => curve.text).join(", "));
    if (this.note) parts.push(this.note);
    this.legend.textContent = parts.join(" · ");
  }

  table() {
    const { labels } = this.found || {}, rows = [[this.pin.kind, this.pin.x || (labels ? "name" : "value"), this.pin.kind === "histogram" ? "count" : this.pin.y]];
    for (const curve of this.drawn) curve.x.forEach((x, at) => rows.push([curve.text, labels ? labels[x] : x, curve.y[at]]));
    return rows;
  }

  resize() { if (this.plot && this.box.clientWidth) this.plot.setSize({ width: Math.max(200, this.box.clientWidth), height: this.box.clientHeight }); }
}

/** Ask what the new chart shows. */
export function add(sections) {
  const dialog = document.createElement("dialog"), form = document.createElement("form"), said = document.createElement("p");
  dialog.className = "ask"; dialog.setAttribute("aria-labelledby", "own-title");
  form.method = "dialog";
  const head = document.createElement("h2");
  head.id = "own-title"; head.textContent = "Add a chart";
  const names = [...sections.entries.values()].filter(entry => !entry.node).map(entry => entry.name);
  const offered = document.createElement("datalist");
  offered.id = "own-names";
  offered.append(...names.slice(0, OFFERED).map(name => Object.assign(document.createElement("option"), { value: name })));
  const row = (text, field) => {
    const label = document.createElement("label"), words = document.createElement("span");
    words.textContent = text; label.append(words, field);
    return label;
  };
  const kind = document.createElement("select");
  kind.append(...Object.entries(KINDS).map(([value, text]) => Object.assign(document.createElement("option"), { value, textContent: text })));
  const field = () => { const one = document.createElement("input"); one.setAttribute("list", "own-names"); one.required = true; one.autocomplete = "off"; one.maxLength = 900; return one; };
  const x = field(), y = field(), xRow = row("Horizontal axis", x), yRow = row("Vertical axis", y);
  const change = () => {
    xRow.hidden = kind.value === "bar" || kind.value === "histogram"; x.required = !xRow.hidden;
    yRow.firstChild.textContent = kind.value === "bar" ? "Metrics with this text in their name" : kind.value === "histogram" ? "Metric" : "Vertical axis";
  };
  kind.addEventListener("change", change);
  said.className = "note"; said.setAttribute("role", "alert");
  const buttons = document.createElement("div"), cancel = document.createElement("button"), done = document.createElement("button");
  buttons.className = "under";
  cancel.type = "button"; cancel.textContent = "Close"; cancel.addEventListener("click", () => dialog.close());
  done.textContent = "Add";
  buttons.append(done, cancel);
  form.append(head, row("Kind", kind), yRow, xRow, offered, said, buttons);
  form.addEventListener("submit", event => {
    const wrong = kind.value === "bar" ? (names.some(name => name.includes(y.value)) ? undefined : y.value) : [y.value, ...(xRow.hidden ? [] : [x.value])].find(name => !names.includes(name));
    if (wrong !== undefined) { event.preventDefault(); said.textContent = `No metric of this run is called “${wrong}”. Choose a name from the list.`; return; }
    const id = crypto.randomUUID?.() || String(Math.random());
    sections.change(pins => { pins.push({ id, kind: kind.value, y: y.value, ...(xRow.hidden ? {} : { x: x.value }) }); });
    document.getElementById("pinned").scrollIntoView({ block: "nearest" });
  });
  dialog.append(form);
  dialog.addEventListener("close", () => { dialog.remove(); document.getElementById("own-add").focus(); });
  document.body.append(dialog);
  change();
  dialog.showModal();
}
