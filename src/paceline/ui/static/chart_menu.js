// The menu of a chart: pin it, see it on the full screen, keep it as PNG, SVG or CSV.
"use strict";
import { isOf, kept } from "./chart_sections.js";
import { element, style } from "./ui.js";

/** Open the menu of a chart below its button. Escape and a click elsewhere close it. */
export function open(chart) {
  const before = chart.card.querySelector(".chartmenu");
  if (before) { before.close(true); return; }
  const menu = element("div", "", "chartmenu"), sections = chart.board.sections;
  menu.setAttribute("role", "menu");
  menu.setAttribute("aria-label", chart.title);
  const item = (text, does) => {
    const button = element("button", text);
    button.type = "button"; button.tabIndex = -1;
    button.setAttribute("role", "menuitem");
    button.addEventListener("click", () => { menu.close(true); does(); });
    menu.append(button);
  };
  if (sections) {
    const pinned = kept.read().pinned, mine = pin => chart.pin ? pin.id === chart.pin.id : isOf(pin, { name: chart.name, node: chart.isNode }), at = pinned.findIndex(mine);
    const move = by => sections.change(pins => { const from = pins.findIndex(mine); pins.splice(from + by, 0, ...pins.splice(from, 1)); });
    if (at < 0) item("Pin to the top", () => sections.change(pins => { pins.push({ name: chart.name, node: chart.isNode ? 1 : 0 }); }));
    else {
      if (at > 0) item("Move forward", () => move(-1));
      if (at < pinned.length - 1) item("Move back", () => move(1));
      item(chart.pin ? "Remove" : "Unpin", () => sections.change(pins => { pins.splice(pins.findIndex(mine), 1); }));
    }
  }
  if (!chart.card.closest("dialog")) item("Full screen", () => fullScreen(chart));
  if (chart.plot) {
    item("Save as PNG", () => save(`${fileName(chart)}.png`, png(chart)));
    item("Save as SVG", () => save(`${fileName(chart)}.svg`, new Blob([svg(chart)], { type: "image/svg+xml" })));
  }
  item("Save as CSV", async () => save(`${fileName(chart)}.csv`, new Blob([await csv(chart)], { type: "text/csv" })));
  let isOver = false;
  menu.close = isFocused => {
    if (isOver) return;
    isOver = true;   // the focus that leaves the menu would close it again
    chart.menu.setAttribute("aria-expanded", "false");
    if (isFocused) chart.menu.focus();
    menu.remove();
  };
  menu.addEventListener("keydown", event => {
    const items = [...menu.children], at = items.indexOf(document.activeElement), to = {
      ArrowDown: (at + 1) % items.length, ArrowUp: (at - 1 + items.length) % items.length, Home: 0, End: items.length - 1,
    }[event.key];
    if (to !== undefined) { event.preventDefault(); items[to].focus(); }
    if (event.key === "Escape") { event.preventDefault(); event.stopPropagation(); menu.close(true); }
    if (event.key === "Tab") menu.close(true);
  });
  menu.addEventListener("focusout", event => { if (menu.isConnected && !menu.contains(event.relatedTarget) && event.relatedTarget !== chart.menu) menu.close(false); });
  chart.menu.setAttribute("aria-expanded", "true");
  chart.menu.after(menu);
  menu.firstElementChild.focus();
}

function fullScreen(chart) {
  const dialog = element("dialog", "", "fullscreen"), done = element("button", "Close", "closefull");
  dialog.setAttribute("aria-label", chart.title);
  done.type = "button";
  done.addEventListener("click", () => dialog.close());
  // The page moves this element while the card is away: a new metric or a pin changes the order of charts.
  chart.stay = element("div");
  chart.stay.hidden = true;
  chart.card.replaceWith(chart.stay);
  dialog.append(done, chart.card);
  document.body.append(dialog);
  const fit = () => { chart.resize(); chart.board.want?.(chart); };
  dialog.addEventListener("close", () => {
    chart.stay.replaceWith(chart.card);
    chart.stay = null;
    dialog.remove();
    window.removeEventListener("resize", fit);
    chart.resize();
    chart.menu.focus();
  });
  window.addEventListener("resize", fit);
  dialog.showModal();
  fit();
  done.focus();
}

function fileName(chart) { return chart.title.replace(/[^\p{L}\p{N}._-]+/gu, "_").slice(0, 100) || "chart"; }

async function save(name, made) {
  const link = document.createElement("a"), blob = await made;
  link.href = URL.createObjectURL(blob); link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** What is drawn: for each line its label, colour and column. */
function lines(chart) {
  return chart.drawn.map((curve, at) => ({ text: chart.labelAt(curve), colour: chart.board.colourOf(curve, at), curve, column: chart.columns[at] }));
}

function png(chart) {
  const own = chart.plot.ctx.canvas, ratio = own.width / chart.plot.width, made = document.createElement("canvas"), drawn = lines(chart);
  const top = 30 * ratio, bottom = 24 * ratio;
  made.width = own.width; made.height = own.height + top + bottom;
  const on = made.getContext("2d");
  on.fillStyle = style("--card"); on.fillRect(0, 0, made.width, made.height);
  on.fillStyle = style("--text"); on.font = `600 ${14 * ratio}px system-ui, sans-serif`;
  on.fillText(chart.title, 10 * ratio, 20 * ratio);
  on.drawImage(own, 0, top);
  on.font = `${12 * ratio}px system-ui, sans-serif`;
  let x = 10 * ratio;
  for (const line of drawn) {
    on.fillStyle = line.colour; on.fillRect(x, made.height - 17 * ratio, 9 * ratio, 9 * ratio);
    on.fillStyle = style("--text"); on.fillText(line.text, x + 13 * ratio, made.height - 9 * ratio);
    x += 28 * ratio + on.measureText(line.text).width;
  }
  return new Promise(resolve => made.toBlob(resolve, "image/png"));
}

function escaped(text) { return String(text).replace(/[&<>"]/g, sign => `&#${sign.charCodeAt(0)};`); }

/** The chart as SVG: on white, so that it can stand in a paper. */
export function svg(chart) {
  const plot = chart.plot, width = plot.width, height = plot.height, ratio = plot.ctx.canvas.width / width, top = 30;
  const box = { x: plot.bbox.left / ratio, y: plot.bbox.top / ratio + top, w: plot.bbox.width / ratio, h: plot.bbox.height / ratio };
  const X = value => box.x + plot.valToPos(value, "x"), Y = value => box.y + plot.valToPos(value, "y"), at = value => value.toFixed(2);
  const parts = [`<rect width="${width}" height="${height + top + 24}" fill="#fff"/>`, `<text x="10" y="20" font-size="14" font-weight="600" fill="#16202e">${escaped(chart.title)}</text>`];
  for (const [side, isX] of [[0, true], [1, false]]) {
    const axis = plot.axes[side], ticks = axis._splits || [], texts = axis._values || [];
    ticks.forEach((tick, place) => {
      const p = isX ? X(tick) : Y(tick);
      if (tick === null || texts[place] === null || !Number.isFinite(p)) return;
      parts.push(isX ? `<path d="M${at(p)} ${at(box.y)}V${at(box.y + box.h)}" stroke="#dfe3ea"/><text x="${at(p)}" y="${at(box.y + box.h + 18)}" text-anchor="middle">${escaped(texts[place] ?? "")}</text>`
        : `<path d="M${at(box.x)} ${at(p)}H${at(box.x + box.w)}" stroke="#dfe3ea"/><text x="${at(box.x - 8)}" y="${at(p + 4)}" text-anchor="end">${escaped(texts[place] ?? "")}</text>`);
    });
  }
  const xs = plot.data[0], { min, max } = plot.scales.x;
  const path = ys => {
    let text = "", isOn = false;
    for (let place = 0; place < xs.length; place++) {
      const y = ys[place];
      if (y === undefined) continue;   // another curve's step
      if (y === null || xs[place] < min || xs[place] > max) { isOn = false; continue; }
      text += `${isOn ? "L" : "M"}${at(X(xs[place]))} ${at(Y(y))}`; isOn = true;
    }
    return text;
  };
  let left = 10;
  for (const line of lines(chart)) {
    const colour = escaped(line.colour), ys = plot.data[line.column];
    if (line.curve.lo) {
      const points = column => xs.map((x, place) => [x, plot.data[column][place]]).filter(([x, y]) => y !== null && y !== undefined && x >= min && x <= max).map(([x, y]) => `${at(X(x))} ${at(Y(y))}`);
      const edge = [...points(line.column + 1), ...points(line.column + 2).reverse()];
      if (edge.length) parts.push(`<path d="M${edge.join("L")}Z" fill="${colour}" fill-opacity=".15"/>`);
    }
    if (chart.bars) xs.forEach((x, place) => { if (ys[place] !== null && ys[place] !== undefined) parts.push(`<rect x="${at(X(x) - chart.bars(X) / 2)}" y="${at(Math.min(Y(0), Y(ys[place])))}" width="${at(chart.bars(X))}" height="${at(Math.abs(Y(0) - Y(ys[place])))}" fill="${colour}"/>`); });
    else if (chart.hasPoints) xs.forEach((x, place) => { if (ys[place] !== null && ys[place] !== undefined) parts.push(`<circle cx="${at(X(x))}" cy="${at(Y(ys[place]))}" r="2.5" fill="${colour}"/>`); });
    else parts.push(`<path d="${path(ys)}" fill="none" stroke="${colour}" stroke-width="1.6"/>`);
    parts.push(`<rect x="${left}" y="${height + top + 6}" width="9" height="9" fill="${colour}"/><text x="${left + 13}" y="${height + top + 15}">${escaped(line.text)}</text>`);
    left += 30 + 6.5 * line.text.length;
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height + top + 24}" width="${width}" height="${height + top + 24}" font-family="system-ui, sans-serif" font-size="11" fill="#566275">${parts.join("")}</svg>`;
}

/** A cell of CSV. Text that a spreadsheet would take for a formula gets an apostrophe in front. */
export function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** All values of the chart's curves in its present window: none is thinned. */
async function csv(chart) {
  const rows = chart.table ? chart.table() : [];
  if (!chart.table) {
    const found = await chart.board.read([chart], { whole: "1" });
    const x = chart.isNode ? "time_s" : chart.board.axis === "step" ? "step" : chart.board.axis === "time" ? "time_s" : "seconds";
    rows.push(["metric", "curve", "rank", "attempt", x, "value", "least", "greatest"]);
    for (const curve of found.curves) {
      if (Boolean(curve.node) !== chart.isNode || curve.name !== chart.name || !chart.board.isShown(curve)) continue;
      curve.x.forEach((value, at) => rows.push([chart.name, chart.labelAt(curve), curve.lo ? null : curve.rank, curve.attempt, value, curve.y[at], curve.lo?.[at], curve.hi?.[at]]));
    }
  }
  return rows.map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
}
