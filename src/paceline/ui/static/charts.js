// Curves: one picture for each metric, drawn by uPlot. The server thins them to the pixels that there are; what is zoomed into is
// fetched anew, and exact.
"use strict";
import { json, number } from "./ui.js";

const MOST_TOLD = 10; // curves below a chart: of more, those nearest to the pointer
const MOST_POINTS = 6000; // of one curve on the page; beyond, it is fetched anew, thinned
const tools = name => document.getElementById(`chart-${name}`);

function colour(at) { return getComputedStyle(document.documentElement).getPropertyValue(`--c${at % 8}`).trim(); }
function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

/** Exponential smoothing, without a drag towards 0 at the beginning (Kingma and Ba, 2015, section 3). */
function smoothed(ys, weight) {
  let sum = 0, scale = 0;
  return ys.map(y => {
    if (y === null || y === undefined) return y;
    sum = sum * weight + (1 - weight) * y;
    scale = scale * weight + (1 - weight);
    return sum / scale;
  });
}

function tickText(value) {
  return value === null || value === undefined ? "" : number(value).replace(/\.?0+e/, "e");
}

/** Ticks of a clock, `step` seconds apart: times of day, and the date where a day begins. */
function clockTicks(ticks, step) {
  const time = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined });
  const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });
  return ticks.map(tick => {
    const date = new Date(tick * 1000);
    return (step >= 86400 || date.getHours() + date.getMinutes() + date.getSeconds() === 0 ? day : time).format(date);
  });
}

/** `disk_read_mib_s` as people read it. */
function nodeTitle(name) {
  const units = { _percent: " %", _gib: " GiB", _mib_s: " MiB/s", _steps_s: " steps/s" };
  return name.replace(/_(percent|gib|mib_s|steps_s)$/, unit => units[unit]).replaceAll("_", " ")
    .replace(/\b(cpu|gpu)/, unit => unit.toUpperCase()).replace(/\bnet\b/, "network");
}

/** How much there is: stands beside what of it is taken, and is no curve. */
function isTotal(entry) { return Boolean(entry.node) && entry.name.endsWith("memory_total_gib"); }

/** One metric's picture. Curves come by `set`, values that are new by `add`. */
class Chart {
  constructor(board, entry, place) {
    this.board = board; this.name = entry.name; this.isNode = Boolean(entry.node);
    this.curves = new Map(); this.plot = null; this.isSeen = false; this.isStale = true;
    this.card = document.createElement("div");
    this.card.className = "card chart";
    this.card.tabIndex = 0;
    this.card.setAttribute("role", "group");
    const head = document.createElement("h3"), title = document.createElement("span");
    title.textContent = this.title;
    this.last = document.createElement("span");
    this.last.className = "last";
    this.wide = document.createElement("button");
    this.wide.type = "button"; this.wide.textContent = "⤢"; this.wide.title = "Enlarge or reduce";
    this.wide.setAttribute("aria-label", `${this.title}: enlarge or reduce`);
    head.append(title, this.last, this.wide);
    this.box = document.createElement("div");
    this.box.className = "plot";
    this.box.setAttribute("role", "img");
    this.legend = document.createElement("div");
    this.legend.className = "legendline";
    this.card.append(head, this.box, this.legend);
    place.append(this.card);
    this.entry(entry);
    this.wide.addEventListener("click", () => { this.card.classList.toggle("wide"); this.resize(); this.board.want(this); });
    this.card.addEventListener("keydown", event => this.key(event));
  }

  get title() { return this.isNode ? nodeTitle(this.name) : this.name; }
  get isPercent() { return this.isNode && this.name.endsWith("_percent"); }
  get isTime() { return this.isNode || this.board.axis === "time"; }

  entry(entry) {
    this.ranks = entry.ranks; this.count = entry.count;
    this.latest = entry.last;
    this.say();
  }

  /** The last value, and of how much. */
  say() { this.last.title = "Last value"; this.last.textContent = number(this.latest) + (this.total ? ` of ${number(this.total)}` : ""); }

  set(curves) {
    this.curves = new Map(curves.map(curve => [key(curve), curve]));
    this.isStale = false;
    this.draw();
  }

  /** Values that were logged just now; false where some between are missing, so that the curve has to be fetched. */
  add(points) {
    const curve = this.curves.get(key(points));
    if (points.y && points.y.length) { this.latest = points.y[points.y.length - 1]; this.say(); }
    if (!curve) return this.curves.size >= 8;
    const missing = points.n - (points.y ? points.y.length : 0) - curve.n;
    if (points.n <= curve.n) return true;
    if (missing > 0 || !points.y || this.board.window || this.board.axis !== "step" && !this.isNode) return false;
    const from = -missing;
    for (let at = from; at < points.y.length; at++) { curve.x.push(points.x[at]); curve.y.push(points.y[at]); }
    curve.n = points.n;
    if (curve.x.length > MOST_POINTS) return false;
    this.board.redraw(this);
    return true;
  }

  draw() {
    const curves = [...this.curves.values()].filter(curve => curve.x.length && this.board.isShown(curve));
    const weight = this.isNode ? 0 : this.board.smooth;
    const tables = curves.map(curve => {
      let x = curve.x, y = curve.y;
      if (x.some((value, at) => at && value < x[at - 1])) {
        const order = x.map((_, at) => at).sort((a, b) => x[a] - x[b]);
        x = order.map(at => curve.x[at]); y = order.map(at => curve.y[at]);
      }
      return [x, weight ? smoothed(y, weight) : y];
    });
    const data = tables.length === 0 ? [[], []] : tables.length === 1 ? tables[0] : uPlot.join(tables);
    const shape = JSON.stringify([curves.map(key), this.isTime, this.board.isLog, curves.map(c => c.x.length < 60)]);
    if (!this.plot || shape !== this.shape) {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.options(curves), data, this.box);
    } else {
      this.plot.setData(data, !this.zoomed);
    }
    const [low, high] = this.board.window && !this.isNode ? this.board.window : [null, null];
    this.zoomed = low !== null;
    if (this.zoomed) this.plot.setScale("x", { min: low, max: high });
    this.describe(curves);
  }

  describe(curves) {
    const values = curves.flatMap(curve => curve.y).filter(y => y !== null && y !== undefined);
    let least = Infinity, greatest = -Infinity;
    for (const value of values) { if (value < least) least = value; if (value > greatest) greatest = value; }
    this.box.setAttribute("aria-label", values.length
      ? `${this.title}: ${this.count} values, least ${number(least)}, greatest ${number(greatest)}, last ${number(this.latest)}`
      : `${this.title}: no values here`);
    this.card.setAttribute("aria-label", `${this.title}. Arrow keys read values; plus and minus zoom`);
    if (!this.at) this.tell(curves.map(() => null), null);
    // What was drawn last, for whoever measures how soon that is.
    (window.pacelineDrawn ||= {})[this.name] = { last: this.latest, n: Math.max(0, ...curves.map(curve => curve.n)), at: Date.now() };
  }

  options(curves) {
    const line = style("--line2"), soft = style("--soft");
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    this.drawn = curves;
    return {
      width: Math.max(200, this.box.clientWidth), height: this.box.clientHeight, legend: { show: false },
      padding: [8, 8, 0, 0],
      cursor: { drag: { x: true, y: false, uni: 12 }, points: { size: 7 }, y: false, sync: this.isNode ? undefined : { key: "metrics" } },
      // Of a single value uPlot would draw years around it.
      scales: { x: { time: this.isTime, ...(this.isTime ? { range: (_, low, high) => low === high && low !== null ? [low - 30, low + 30] : [low, high] } : {}) }, y: { distr: this.board.isLog && !this.isNode ? 3 : 1, ...(this.isPercent ? { range: [0, 100] } : {}) } },
      series: [{}, ...curves.map((curve, at) => ({
        stroke: this.board.colourOf(curve, at), width: 1.6, spanGaps: false,
        dash: this.board.dashOf(curve, at, curves), points: { show: curve.x.length < 60, size: 4 },
      }))],
      axes: [{ ...axis, size: 30, space: this.isTime ? 84 : 60, values: (_, ticks, at, space, step) => this.isTime ? clockTicks(ticks, step) : ticks.map(tickText) },
        { ...axis, size: 54, values: (_, ticks) => ticks.map(tickText) }],
      hooks: {
        setSelect: [plot => {
          if (plot.select.width < 4) return;
          const low = plot.posToVal(plot.select.left, "x"), high = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (!this.isNode) this.board.zoom(low, high); else plot.setScale("x", { min: low, max: high });
        }],
        setCursor: [plot => {
          const at = plot.cursor.idx;
          this.at = at;
          this.tell(curves.map((_, n) => at === null || at === undefined ? null : near(plot.data[n + 1], at)), at === null || at === undefined ? null : plot.data[0][at]);
        }],
      },
    };
  }

  /** The curves that are told below the chart. */
  told(values) {
    const all = (this.drawn || []).map((_, at) => at);
    if (all.length <= MOST_TOLD) return all;
    const there = all.filter(at => values[at] !== null && values[at] !== undefined), y = this.plot.posToVal(this.plot.cursor.top, "y");
    return there.sort((a, b) => Math.abs(values[a] - y) - Math.abs(values[b] - y)).slice(0, MOST_TOLD);
  }

  /** Let the curves that `isMeant` takes stand out; of null none does. */
  highlight(isMeant) {
    if (!this.plot) return;
    const at = isMeant ? (this.drawn || []).findIndex(isMeant) : -1;
    this.plot.setSeries(at < 0 ? null : at + 1, { focus: true });
  }

  tell(values, x) {
    const drawn = this.drawn || [];
    const parts = this.told(values).map(at => {
      const curve = drawn[at];
      const told = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = this.board.colourOf(curve, at);
      // One curve alone needs no name.
      const label = drawn.length === 1 && x !== null ? "" : this.board.labelOf(curve, drawn.length, this.isNode);
      told.append(mark, label + (values[at] === null || values[at] === undefined ? "" : ` ${number(values[at])}`));
      return told;
    });
    if (x !== null && x !== undefined) {
      const where = document.createElement("span");
      where.textContent = this.isTime ? new Date(x * 1000).toLocaleTimeString() : this.board.axis === "relative" ? `${number(x)} s` : `step ${number(x)}`;
      parts.unshift(where);
    }
    this.legend.replaceChildren(...parts);
  }

  key(event) {
    if (!this.plot || event.target !== this.card) return;
    const xs = this.plot.data[0], step = event.shiftKey ? 10 : 1;
    const move = by => {
      const at = Math.min(xs.length - 1, Math.max(0, (this.at ?? (by > 0 ? -1 : xs.length)) + by));
      this.plot.setCursor({ left: this.plot.valToPos(xs[at], "x"), top: 20 });
      this.legend.setAttribute("aria-live", "polite");
    };
    const scale = this.plot.scales.x, half = (scale.max - scale.min) / 4, middle = this.at != null ? xs[this.at] : (scale.max + scale.min) / 2;
    const does = {
      ArrowLeft: () => move(-step), ArrowRight: () => move(step), Home: () => move(-xs.length), End: () => move(xs.length),
      "+": () => this.board.zoom(middle - half, middle + half), "=": () => this.board.zoom(middle - half, middle + half),
      "-": () => this.board.zoom(middle - 4 * half, middle + 4 * half), Escape: () => this.board.reset(),
    }[event.key];
    if (does && xs.length) { event.preventDefault(); does(); }
  }

  resize() { if (this.plot) this.plot.setSize({ width: Math.max(200, this.box.clientWidth), height: this.box.clientHeight }); }
}

function key(curve) { return `${curve.run ?? ""}|${curve.rank}|${curve.attempt}`; }
function near(ys, at) {
  for (let off = 0; off < 200; off++) {
    for (const place of [at - off, at + off]) if (ys[place] !== undefined) return ys[place];
  }
  return null;
}

/** All pictures of a page, and the tools above them, whose settings stand in the page's address. */
export class Board {
  constructor({ address, place, nodes, colourOf, dashOf, labelOf, onOthers, isShown, onListed }) {
    this.address = address; this.place = place; this.nodes = nodes; this.onOthers = onOthers; this.onListed = onListed;
    this.isShown = isShown || (() => true);
    this.colourOf = colourOf || (curve => colour(curve.rank));
    // Where there are several, attempts are told apart.
    this.dashOf = dashOf || ((curve, at, curves) => curve.attempt % 2 || curves.every(one => one.attempt === curve.attempt) ? undefined : [6, 3]);
    this.labelOf = labelOf || ((curve, count, isNode) => isNode ? `${curve.name.startsWith("rank_") ? "rank" : "node"} ${curve.rank}`
      : `rank ${curve.rank}${this.hasAttempts ? `, attempt ${curve.attempt}` : ""}`);
    this.charts = new Map(); this.waiting = new Set(); this.drawing = new Set(); this.timer = 0;
    this.seen = new IntersectionObserver(found => {
      for (const one of found) {
        const chart = one.target.chart;
        chart.isSeen = one.isIntersecting;
        if (chart.isSeen && chart.isStale) this.want(chart);
      }
    }, { rootMargin: "200px" });
    this.take();
    for (const name of ["filter", "axis", "smooth", "log", "ranks", "attempts"]) {
      tools(name)?.addEventListener(name === "axis" || name === "ranks" ? "change" : "input", () => this.changed(name));
    }
    tools("reset")?.addEventListener("click", () => this.reset());
    document.addEventListener("theme", () => this.redrawAll());
    let width = 0;
    new ResizeObserver(() => {
      if (place.clientWidth !== width) { width = place.clientWidth; this.all(chart => chart.resize()); }
    }).observe(place);
  }

  redrawAll() { this.all(chart => { chart.shape = ""; if (!chart.isStale) chart.draw(); }); }
  highlight(isMeant, isOn) { this.all(chart => chart.highlight(isOn ? isMeant : null)); }

  all(does) { for (const chart of this.charts.values()) does(chart); }

  /** The settings as the address has them. */
  take() {
    const given = new URLSearchParams(location.search), has = name => given.get(name) || "";
    if (tools("filter")) tools("filter").value = has("metric");
    if (["step", "relative", "time"].includes(has("axis"))) tools("axis").value = has("axis");
    if (tools("smooth") && has("smooth")) tools("smooth").value = has("smooth");
    if (tools("log")) tools("log").checked = has("scale") === "log";
    if (tools("ranks")) tools("ranks").value = has("ranks");
    if (tools("attempts")) tools("attempts").checked = has("attempts") === "all";
    const low = parseFloat(has("from")), high = parseFloat(has("to"));
    this.window = Number.isFinite(low) && Number.isFinite(high) ? [low, high] : null;
  }

  get axis() { return tools("axis")?.value || "step"; }
  get smooth() { return Number(tools("smooth")?.value || 0); }
  get isLog() { return Boolean(tools("log")?.checked); }
  get ranks() { return (tools("ranks")?.value || "").replace(/[^0-9,]/g, "").replace(/^,+|,+$/g, ""); }
  get hasAttempts() { return this.attemptCount > 1; }

  keep() {
    const given = new URLSearchParams(location.search);
    const put = (name, value) => { value ? given.set(name, value) : given.delete(name); };
    put("metric", tools("filter")?.value); put("axis", this.axis === "step" ? "" : this.axis);
    put("smooth", this.smooth || ""); put("scale", this.isLog ? "log" : ""); put("ranks", this.ranks);
    put("attempts", tools("attempts")?.checked ? "all" : "");
    put("from", this.window ? String(this.window[0]) : ""); put("to", this.window ? String(this.window[1]) : "");
    const query = given.toString();
    history.replaceState(null, "", `${location.pathname}${query ? `?${query}` : ""}${location.hash}`);
    if (tools("reset")) tools("reset").hidden = !this.window;
  }

  changed(name) {
    if (name === "axis") this.window = null;
    this.keep();
    if (name === "filter") this.filter();
    else if (name === "smooth" || name === "log") this.redrawAll();
    else this.refresh();
  }

  zoom(low, high) { if (high > low) { this.window = [low, high]; this.keep(); this.refresh(); } }
  reset() { this.window = null; this.keep(); this.all(chart => { chart.zoomed = false; chart.shape = ""; }); this.refresh(); }

  refresh() { this.all(chart => { if (!chart.isNode || chart.isStale) { chart.isStale = true; if (chart.isSeen) this.want(chart); } }); }

  filter() {
    const words = (tools("filter")?.value || "").toLowerCase().split(/\s+/);
    this.all(chart => { if (!chart.isNode) chart.card.hidden = !words.every(word => chart.name.toLowerCase().includes(word)); });
  }

  /** Fetch this picture's curves soon, with those of others that are wanted. */
  want(chart) {
    this.waiting.add(chart);
    if (!this.timer) this.timer = setTimeout(() => { this.timer = 0; this.load([...this.waiting]); this.waiting.clear(); }, 30);
  }

  query(charts) {
    const given = new URLSearchParams();
    for (const chart of charts || []) given.append("name", chart.name);
    const width = Math.max(...(charts || []).map(chart => chart.box.clientWidth), 400);
    given.set("px", String(Math.min(2000, Math.round(width))));
    if (this.axis !== "step") given.set("axis", this.axis);
    if (this.ranks) given.set("ranks", this.ranks);
    if (tools("attempts")?.checked) given.set("attempts", "all");
    if (this.window) { given.set("from", this.window[0]); given.set("to", this.window[1]); }
    return `${this.address}${this.address.includes("?") ? "" : "?"}${given}`;
  }

  async load(charts) {
    // In handfuls: an address has an end.
    for (let at = 0; charts && at < charts.length; at += 20) await this.fetch(charts.slice(at, at + 20));
    if (!charts) await this.fetch(null);
  }

  async fetch(charts) {
    let found;
    try { found = await json(this.query(charts)); } catch { setTimeout(() => charts?.forEach(chart => this.want(chart)), 2000); return; }
    this.listed(found);
    this.onListed?.(found);
    const by = new Map();
    for (const curve of found.curves) {
      const of = `${curve.node || 0}|${curve.name}`;
      by.has(of) ? by.get(of).push(curve) : by.set(of, [curve]);
    }
    const drawn = charts || [...by.keys()].map(of => this.charts.get(of)).filter(Boolean);
    for (const chart of drawn) chart.set(by.get(`${Number(chart.isNode)}|${chart.name}`) || []);
  }

  listed({ names, others }) {
    this.attemptCount = Math.max(1, ...names.filter(entry => !entry.node).flatMap(entry => entry.attempts));
    let isNew = false;
    for (const entry of names) {
      const of = `${entry.node || 0}|${entry.name}`;
      let chart = this.charts.get(of);
      if (chart) { chart.entry(entry); continue; }
      if (entry.node && !this.nodes || isTotal(entry)) continue;
      chart = new Chart(this, entry, entry.node ? this.nodes : this.place);
      chart.card.chart = chart;
      this.charts.set(of, chart);
      this.seen.observe(chart.card);
      isNew = true;
    }
    for (const entry of names.filter(isTotal)) {
      const chart = this.charts.get(`1|${entry.name.replace("_total", "")}`);
      // Nodes of one size; of others the page says nothing.
      if (chart && entry.ranks.length === 1) { chart.total = entry.last; chart.say(); }
    }
    if (isNew) this.filter();
    const own = [...this.charts.values()];
    document.getElementById("nometrics").hidden = own.some(chart => !chart.isNode);
    const system = document.getElementById("system");
    if (system) system.hidden = !own.some(chart => chart.isNode);
    if (others) this.onOthers?.(others);
  }

  /** Values that were told as they came. */
  told(points) {
    let isUnknown = false;
    for (const one of points) {
      const chart = this.charts.get(`${one.node || 0}|${one.name}`);
      if (!chart) { isUnknown ||= !isTotal(one); continue; }
      if (chart.isStale) continue;
      if (!chart.add(one)) { chart.isStale = true; if (chart.isSeen) this.want(chart); }
    }
    if (isUnknown && !this.unknown) {
      // A metric that is logged for the first time.
      this.unknown = setTimeout(() => { this.unknown = 0; this.load(null); }, 50);
    }
  }

  redraw(chart) {
    if (!chart.isSeen) { chart.isBehind = true; }
    if (this.drawing.size === 0) requestAnimationFrame(() => { for (const one of this.drawing) one.draw(); this.drawing.clear(); });
    this.drawing.add(chart);
  }
}
