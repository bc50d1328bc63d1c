// A report in one file: the table, curves and pictures of the page, whose data stand in the document.
"use strict";
import { Board } from "./charts.js";
import { Table } from "./compare_table.js";
import { prepare } from "./pictures.js";
import { colour, dash, paint } from "./run_colours.js";

const byId = name => document.getElementById(name), data = JSON.parse(byId("data").textContent);
const items = Array.from(document.querySelectorAll("#legend li")), names = items.map(item => item.dataset.name), hidden = new Set();

/** A board that takes its curves from the document. */
class ReportBoard extends Board {
  // An address of a file keeps no settings.
  keep() { byId("chart-reset").hidden = !this.window; }

  async read(charts) {
    const wanted = charts && new Set(charts.map(chart => chart.name));
    const x = curve => this.axis === "step" ? curve.x : this.axis === "relative" ? curve.t : curve.t.map(time => time === null ? null : time + data.starts[curve.run]);
    return { names: data.names, others: 0, curves: data.curves.filter(curve => !wanted || wanted.has(curve.name)).map(curve => ({ ...curve, x: x(curve) })) };
  }
}

// An anonymous report does not say when its runs started.
if (!data.starts.length) document.querySelector("#chart-axis option[value=time]").remove();
const isOne = names.length === 1;
const board = new ReportBoard({
  address: "", place: byId("charts"), nodes: null, isShown: curve => !hidden.has(curve.run),
  ...(isOne ? {} : { colourOf: curve => colour(curve.run), dashOf: curve => dash(curve.run), labelOf: curve => names[curve.run] }),
});
const table = new Table(byId("table"), {
  note: byId("table-note"),
  head: (run, first) => {
    const cell = document.createElement("th"), name = document.createElement("span");
    cell.scope = "col"; cell.dataset.colour = run; cell.className = run === first && !isOne ? "run first" : "run";
    cell.style.setProperty("--mine", colour(run));
    name.textContent = name.title = names[run];
    cell.append(name);
    return cell;
  },
});
items.forEach((item, at) => {
  item.dataset.colour = at;
  item.querySelector("input")?.addEventListener("change", event => {
    event.target.checked ? hidden.delete(at) : hidden.add(at);
    item.classList.toggle("off", hidden.has(at));
    board.redrawAll();
  });
  for (const [event, run] of [["mouseenter", at], ["mouseleave", null], ["focusin", at], ["focusout", null]]) {
    item.addEventListener(event, () => board.highlight(curve => curve.run === run, run !== null));
  }
});
function show() {
  table.show({ words: byId("table-filter").value.toLowerCase().split(/\s+/).filter(Boolean), part: byId("table-part").value, isOnly: byId("only-different").checked });
}
for (const name of ["table-filter", "table-part", "only-different"]) byId(name).addEventListener("input", show);
show();
table.set(data.table);
for (const place of document.querySelectorAll(".sweep")) prepare(place);
paint();
document.addEventListener("theme", paint);
board.load(null);
