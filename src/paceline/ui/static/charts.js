// Curves: one picture for each metric, drawn by uPlot. The server thins them to the pixels that there are; what is zoomed into is
// fetched anew, and exact. Sections fold, and only the charts in sight are made and fetched.
"use strict";
import { element, json, number, style } from "./ui.js";
import { Sections } from "./chart_sections.js";

const MOST_TOLD = 10; // curves below a chart: of more, those nearest to the pointer
const MOST_POINTS = 6000; // of one curve on the page; beyond, it is fetched anew, thinned
const tools = name => document.getElementById(`chart-${name}`);

export function colour(at) { return style(`--c${at % 8}`); }

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

export function tickText(value) {
  return value === null || value === undefined ? "" : number(value).replace(/\.?0+e/, "e");
}

/** Ticks of a clock, `step` seconds apart: times of day, and the date where a day begins. */
function clockTicks(ticks, step) {
  const time = new Intl.DateTimeFormat(undefined, {
    hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined, fractionalSecondDigits: step < 0.2 || step === 0.25 ? 2 : step < 1 ? 1 : undefined,
  });
  const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });
  return ticks.map(tick => {
    const date = new Date(tick * 1000);
    return (step >= 86400 || step >= 60 && date.getHours() + date.getMinutes() + date.getSeconds() === 0 ? day : time).format(date);
  });
}

/** Seconds since the start as a clock shows them: "12 s", "2:05", "1:00:00". */
function sinceText(seconds) {
  const size = Math.abs(seconds), two = part => String(Math.floor(part)).padStart(2, "0");
  if (size < 60) return `${tickText(seconds)} s`;
  const clock = size < 3600 ? `${Math.floor(size / 60)}:${two(size % 60)}` : `${Math.floor(size / 3600)}:${two(size / 60 % 60)}:${two(size % 60)}`;
  return seconds < 0 ? `-${clock}` : clock;
}
const SINCE_STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const WHOLE_STEPS = [1, 2, 5].flatMap(first => Array.from({ length: 15 }, (_, zeros) => first * 10 ** zeros)).sort((a, b) => a - b);

/** A range of the vertical axis, also for values that are all equal. */
export function yRange(low, high) {
  if (low === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, low + Math.abs(low) / 10];
}

/** What the names of figures on nodes and workers mean. */
const MEANINGS = {
  rank_data_percent: "Share of the time in which the rank waits for its next batch of data",
  rank_wait_percent: "Share of the time in which the rank waits in collectives for other ranks",
  rank_steps_s: "Steps per second: of the optimizer, or of metrics that are logged with a step",
};

/** `disk_read_mib_s` as people read it. */
function nodeTitle(name) {
  const units = { _percent: " %", _gib: " GiB", _mib_s: " MiB/s", _steps_s: " steps/s" };
  return name.replace(/_(percent|gib|mib_s|steps_s)$/, unit => units[unit]).replaceAll("_", " ")
    .replace(/\b(cpu|gpu)/, unit => unit.toUpperCase()).replace(/\bnet\b/, "network");
}

/** How much there is: stands beside what of it is taken, and is no curve. */
function isTotal(entry) { return Boolean(entry.node) && entry.name.endsWith("memory_total_gib"); }

/** Give a chart its card: title, last value, menu, plot and legend. */
export function makeCard(chart, menuTitle) {
  chart.card = element("div", "", "card chart");
  chart.card.tabIndex = 0;
  chart.card.setAttribute("role", "group");
  chart.last = element("span", "", "last");
  chart.menu = element("button", "⋯", "menubutton");
  chart.menu.type = "button"; chart.menu.title = menuTitle;
  chart.menu.setAttribute("aria-label", `${chart.title}: menu`);
  chart.menu.setAttribute("aria-haspopup", "menu");
  chart.menu.addEventListener("click", async () => (await import("./chart_menu.js")).open(chart));
  chart.box = element("div", "", "plot");
  chart.box.setAttribute("role", "img");
  for (const one of [chart.box, chart.card]) one.setAttribute("aria-label", chart.title);
  chart.legend = element("div", "", "legendline");
  const head = element("h3");
  head.append(element("span", chart.title), chart.last, chart.menu);
  chart.card.append(head, chart.box, chart.legend);
}

/** How both axes of a plot look. */
export function axisStyle() {
  const line = style("--line2");
  return { stroke: style("--soft"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
}

/** How many values the curves have, the least and the greatest, as words for the plot's label. */
export function valuesText(count, curves) {
  const values = curves.flatMap(curve => curve.y).filter(y => y !== null && y !== undefined);
  let least = Infinity, greatest = -Infinity;
  for (const value of values) { if (value < least) least = value; if (value > greatest) greatest = value; }
  return values.length ? `${count ?? values.length} values, least ${number(least)}, greatest ${number(greatest)}` : "";
}

/** One metric's picture. Curves come by `set`, values that are new by `add`. */
class Chart {
  constructor(board, entry, place) {
    this.board = board; this.name = entry.name; this.isNode = Boolean(entry.node);
    this.curves = new Map(); this.plot = null; this.isSeen = false; this.isStale = true;
    makeCard(this, "Pin, full screen, PNG, SVG, CSV");
    if (this.isNode && MEANINGS[this.name]) this.box.before(element("p", MEANINGS[this.name], "meaning"));
    this.card.chart = this;
    place?.append(this.card);
    this.entry(entry);
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
  say() { this.last.title = this.mean === undefined ? "Last value" : "Last mean of the ranks"; this.last.textContent = number(this.mean ?? this.latest) + (this.total ? ` of ${number(this.total)}` : ""); }

  set(curves) {
    this.curves = new Map(curves.map(curve => [key(curve), curve]));
    this.isStale = false;
    const bands = curves.filter(curve => curve.lo);
    if (!this.board.window) this.mean = bands.at(-1)?.y.at(-1);
    this.say();
    this.draw();
  }

  labelAt(curve) { return this.board.labelOf(curve, this.drawn.length, this.isNode); }
  get isBand() { return [...this.curves.values()].some(curve => curve.lo); }

  /** Values that were logged just now; false where some between are missing, so that the curve has to be fetched. */
  add(points) {
    const curve = this.curves.get(key(points));
    if (points.y && points.y.length) { this.latest = points.y[points.y.length - 1]; this.say(); }
    if (!curve && this.isBand) {
      // A band has the values of all ranks: fetch it again, once in a while.
      this.later ||= setTimeout(() => { this.later = 0; this.isStale = true; if (this.isSeen) this.board.want(this); }, 1000);
      return true;
    }
    if (!curve) return this.curves.size >= 8;
    const missing = points.n - (points.y ? points.y.length : 0) - curve.n;
    if (points.n <= curve.n) return true;
    if (missing > 0 || !points.y || this.board.window || this.board.axis !== "step" && !this.isNode) return false;
    for (let at = -missing; at < points.y.length; at++) { curve.x.push(points.x[at]); curve.y.push(points.y[at]); }
    curve.n = points.n;
    if (curve.x.length > MOST_POINTS) return false;
    this.board.redraw(this);
    return true;
  }

  draw() {
    const curves = [...this.curves.values()].filter(curve => curve.x.length && this.board.isShown(curve));
    const weight = this.isNode ? 0 : this.board.smooth;
    const isLog = this.board.isLog && !this.isNode, shown = y => isLog ? y.map(value => value > 0 ? value : null) : y;
    const tables = curves.map(curve => {
      let x = curve.x, ys = [curve.y, ...(curve.lo ? [curve.lo, curve.hi] : [])];
      if (x.some((value, at) => at && value < x[at - 1])) {
        const order = x.map((_, at) => at).sort((a, b) => x[a] - x[b]);
        x = order.map(at => curve.x[at]); ys = ys.map(y => order.map(at => y[at]));
      }
      return [x, ...ys.map((y, at) => shown(weight && at === 0 ? smoothed(y, weight) : y))];
    });
    const data = tables.length === 0 ? [[], []] : tables.length === 1 ? tables[0] : uPlot.join(tables);
    const shape = JSON.stringify([curves.map(key), this.isTime, this.board.axis, this.board.isLog, curves.map(c => [c.x.length < 60, Boolean(c.lo)])]);
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
    const values = valuesText(this.count, curves);
    this.box.setAttribute("aria-label", `${this.title}: ${values ? `${values}, last ${number(this.mean ?? this.latest)}` : "no values here"}`);
    this.card.setAttribute("aria-label", `${this.title}. Arrow keys read values; plus and minus zoom`);
    if (!this.at) this.tell(curves.map(() => null), null);
    // What was drawn last, for whoever measures how soon that is.
    (window.pacelineDrawn ||= {})[this.name] = { last: this.latest, n: Math.max(0, ...curves.map(curve => curve.n)), at: Date.now() };
  }

  options(curves) {
    const axis = axisStyle();
    this.drawn = curves;
    // A curve with a band has three columns: mean, least, greatest.
    this.columns = [];
    let column = 1;
    for (const curve of curves) { this.columns.push(column); column += curve.lo ? 3 : 1; }
    const isSince = !this.isTime && this.board.axis === "relative", isStep = !this.isTime && !isSince, isLog = this.board.isLog && !this.isNode;
    const xText = (ticks, step) => this.isTime ? clockTicks(ticks, step) : ticks.map(isSince ? sinceText : tickText);
    return {
      width: Math.max(200, this.box.clientWidth), height: this.box.clientHeight, legend: { show: false },
      // The last label of the horizontal axis reaches beyond the axis.
      padding: [8, this.isTime ? 34 : 20, 0, 0],
      cursor: { drag: { x: true, y: false, uni: 12 }, points: { size: 7 }, y: false, sync: this.isNode ? undefined : { key: "metrics" } },
      // Of a single value uPlot would draw years around it.
      scales: {
        x: { time: this.isTime, range: (_, low, high) => low === null ? [0, 1] : low === high ? [low - (this.isTime ? 30 : 1), low + (this.isTime ? 30 : 1)] : [low, high] },
        y: isLog ? { distr: 3, range: (_, low, high) => low > 0 ? uPlot.rangeLog(low, high, 10, low === high) : [1, 10] }
          : { distr: 1, range: this.isPercent ? [0, 100] : (_, low, high) => yRange(low, high) },
      },
      series: [{}, ...curves.flatMap((curve, at) => {
        const stroke = this.board.colourOf(curve, at), dash = this.board.dashOf(curve, at, curves);
        const line = { stroke, width: 1.6, spanGaps: false, dash, points: { show: curve.x.length < 60 && !curve.lo, size: 4 } };
        const edge = { stroke: `${stroke}55`, width: 1, spanGaps: false, points: { show: false } };
        return curve.lo ? [line, edge, edge] : [line];
      })],
      bands: curves.flatMap((curve, at) => curve.lo ? [{ series: [this.columns[at] + 2, this.columns[at] + 1], fill: `${this.board.colourOf(curve, at)}26` }] : []),
      axes: [{ ...axis, size: 30, space: this.isTime ? 84 : 60, ...(isStep ? { incrs: WHOLE_STEPS } : isSince ? { incrs: SINCE_STEPS } : {}), values: (_, ticks, at, space, step) => xText(ticks, step) },
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
          this.tell(curves.map((_, n) => at === null || at === undefined ? null : near(plot.data[this.columns[n]], at)), at === null || at === undefined ? null : plot.data[0][at]);
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
    this.plot.setSeries(at < 0 ? null : this.columns[at], { focus: true });
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
      where.textContent = this.isTime ? new Date(x * 1000).toLocaleTimeString() : this.board.axis === "relative" ? sinceText(x) : `step ${number(x)}`;
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
      "-": () => this.board.zoom(middle - 4 * half, middle + 4 * half), Escape: this.card.closest("dialog") ? null : () => this.board.reset(),
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
  constructor({ address, place, nodes, colourOf, dashOf, labelOf, onOthers, isShown, onListed, hasSections }) {
    this.address = address; this.place = place; this.nodes = nodes; this.onOthers = onOthers; this.onListed = onListed;
    this.isShown = isShown || (() => true);
    this.colourOf = colourOf || (curve => colour(Math.max(0, curve.rank)));
    // Where there are several, attempts are told apart.
    this.dashOf = dashOf || ((curve, at, curves) => curve.attempt % 2 || curves.every(one => one.attempt === curve.attempt) ? undefined : [6, 3]);
    this.labelOf = labelOf || ((curve, count, isNode) => curve.lo ? `mean of ${curve.of} ${isNode && !curve.name.startsWith("rank_") ? "nodes" : "ranks"}, least to greatest${this.hasAttempts && !isNode ? `, attempt ${curve.attempt}` : ""}` : isNode ? `${curve.name.startsWith("rank_") ? "rank" : "node"} ${curve.rank}`
      : `rank ${curve.rank}${this.hasAttempts ? `, attempt ${curve.attempt}` : ""}`);
    this.sections = hasSections ? new Sections(this) : null;
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

  get isFiltered() { return Boolean(tools("filter")?.value); }

  /** The metrics that the filter lets pass. */
  passing(metrics) {
    const words = (tools("filter")?.value || "").toLowerCase().split(/\s+/);
    return this.isFiltered ? metrics.filter(one => one.node || words.every(word => one.name.toLowerCase().includes(word))) : metrics;
  }

  filter() {
    if (this.sections) { this.sections.show(); return; }
    const charts = [...this.charts.values()], passing = new Set(this.passing(charts));
    for (const chart of charts) if (!chart.isNode) chart.card.hidden = !passing.has(chart);
  }

  /** Fetch this picture's curves soon, with those of others that are wanted. */
  want(chart) {
    this.waiting.add(chart);
    if (!this.timer) this.timer = setTimeout(() => { this.timer = 0; this.load([...this.waiting]); this.waiting.clear(); }, 30);
  }

  query(charts, more = {}) {
    const given = new URLSearchParams(more);
    for (const chart of charts || []) given.append("name", chart.name);
    const width = Math.max(...(charts || []).map(chart => chart.box.clientWidth), 400);
    given.set("px", String(Math.min(2000, Math.round(width))));
    if (this.axis !== "step") given.set("axis", this.axis);
    if (this.ranks) given.set("ranks", this.ranks);
    if (charts && this.sections?.node) given.set("node", this.sections.node);
    // The page knows the other metrics.
    if (charts && this.sections) given.set("list", "asked");
    if (tools("attempts")?.checked) given.set("attempts", "all");
    if (this.window) { given.set("from", this.window[0]); given.set("to", this.window[1]); }
    return `${this.address}${this.address.includes("?") ? "" : "?"}${given}`;
  }

  /** The curves of these charts; of null, the list of metrics. A report has them in its own file. */
  read(charts, more) { return json(this.query(charts, more)); }

  async load(charts) {
    // In handfuls: an address has an end.
    for (let at = 0; charts && at < charts.length; at += 20) await this.fetch(charts.slice(at, at + 20));
    if (!charts) await this.fetch(null);
  }

  async fetch(charts) {
    let found;
    try { found = await this.read(charts); } catch { setTimeout(() => charts?.forEach(chart => this.want(chart)), 2000); return; }
    this.listed(found);
    this.onListed?.(found);
    const by = new Map();
    for (const curve of found.curves) {
      const of = `${curve.node || 0}|${curve.name}`;
      by.has(of) ? by.get(of).push(curve) : by.set(of, [curve]);
    }
    const drawn = charts || [...by.keys()].map(of => this.charts.get(of)).filter(Boolean);
    for (const chart of drawn) chart.set(by.get(`${Number(chart.isNode)}|${chart.name}`) || []);
    // The server reads a large log in pieces. Each answer has all that was read so far.
    if (found.has_more) { setTimeout(() => this.load(charts), 200); return; }
    // The first answer names the first of many metrics. The others wait until the first charts are drawn.
    if (found.unlisted) this.listed(await this.read(null, { list: "all", name: "" }).catch(() => ({ names: [] })));
  }

  listed({ names, others }) {
    for (const entry of names) if (!entry.node) this.attemptCount = Math.max(this.attemptCount || 1, ...entry.attempts);
    if (this.sections) this.sections.take(names.filter(entry => !isTotal(entry)));
    else for (const entry of names) if (!entry.node) this.chart(entry, this.place);
    for (const entry of names.filter(isTotal)) {
      const chart = this.charts.get(`1|${entry.name.replace("_total", "")}`);
      this.totals ||= new Map();
      // Nodes of one size; of others the page says nothing.
      if (entry.ranks.length === 1) this.totals.set(`1|${entry.name.replace("_total", "")}`, entry.last);
      if (chart) { chart.total = this.totals.get(`1|${chart.name}`); chart.say(); }
    }
    if (!this.sections) this.filter();
    document.getElementById("nometrics").hidden = this.sections ? this.sections.hasMetrics : this.charts.size > 0;
    if (others) this.onOthers?.(others);
  }

  /** The chart of a metric, made when it is first wanted. */
  chart(entry, place) {
    const of = `${entry.node || 0}|${entry.name}`;
    let chart = this.charts.get(of);
    if (chart) { chart.entry(entry); return chart; }
    chart = new Chart(this, entry, place);
    chart.total = this.totals?.get(of);
    chart.say();
    this.charts.set(of, chart);
    this.seen.observe(chart.card);
    return chart;
  }

  /** Values that were told as they came. */
  told(points) {
    let isUnknown = false;
    for (const one of points) {
      const chart = this.charts.get(`${one.node || 0}|${one.name}`);
      if (this.sections?.told(one)) { if (!chart) continue; }
      if (!chart) { isUnknown ||= !isTotal(one) && !(one.node && !this.nodes); continue; }
      if (chart.isStale) continue;
      if (!chart.add(one)) { chart.isStale = true; if (chart.isSeen) this.want(chart); }
    }
    if (isUnknown && !this.unknown) {
      // A metric that is logged for the first time.
      this.unknown = setTimeout(() => { this.unknown = 0; this.load(null); }, this.charts.size > 100 ? 2000 : 50);
    }
  }

  redraw(chart) {
    if (this.drawing.size === 0) requestAnimationFrame(() => { for (const one of this.drawing) one.draw(); this.drawing.clear(); });
    this.drawing.add(chart);
  }
}
