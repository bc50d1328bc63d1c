// A report in one file: the table, curves and pictures of the page, whose data stand in the document.
"use strict";
import { Board } from "./charts.js";
import { Table } from "./compare_table.js";
import { prepare } from "./pictures.js";
import { Legend } from "./run_colours.js";
import { element } from "./ui.js";

const byId = name => document.getElementById(name), data = JSON.parse(byId("data").textContent);
const legend = new Legend();

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
const board = new ReportBoard({ address: "", place: byId("charts"), nodes: null, ...(legend.names.length === 1 ? {} : legend.options) });
legend.bind(board);
// The frame in a notebook has curves alone.
if (data.table) {
  const table = new Table(byId("table"), { head: run => element("span", legend.names[run]) });
  table.obey();
  table.set(data.table);
}
for (const place of document.querySelectorAll(".sweep")) prepare(place);
board.load(null);
