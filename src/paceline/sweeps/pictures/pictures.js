// A sweep's pictures under somebody's hands: one trial is seen in all of them, parts of axes are chosen, the table is sorted.
// A module of the live page; in the file that is drawn at a sweep's end it stands inline.

/** Prepare the pictures and the table below an element. sorted: what an earlier look was sorted by (`sorted` of the answer). */
export function prepare(place, sorted = null) {
  const places = JSON.parse(place.querySelector("[id^=places]").textContent), byTrial = {};
  for (const one of place.querySelectorAll(".trial")) (byTrial[one.dataset.trial] ||= []).push(one);
  for (const together of Object.values(byTrial)) {
    for (const one of together) {
      for (const [event, on] of [["mouseenter", true], ["mouseleave", false], ["focusin", true], ["focusout", false]]) {
        one.addEventListener(event, () => together.forEach(each => each.classList.toggle("on", on)));
      }
    }
  }
  const axes = Array.from(place.querySelectorAll(".brush"), brush => new Axis(brush, choose));
  function choose() {
    let left = 0;
    for (const [trial, at] of Object.entries(places)) {
      const off = axes.some(axis => axis.range && !(at[axis.number] !== null && at[axis.number] >= axis.range[0] && at[axis.number] <= axis.range[1]));
      left += !off;
      for (const each of byTrial[trial] || []) each.classList.toggle("off", off);
    }
    for (const axis of axes) axis.tell(`${left} of ${Object.keys(places).length} trials`);
  }
  const state = { sorted, get isChosen() { return axes.some(axis => axis.range); } };
  const table = place.querySelector("table.trials");
  for (const button of table?.querySelectorAll(".sort") || []) {
    button.addEventListener("click", () => {
      const column = button.closest("th").cellIndex;
      state.sorted = { column, down: state.sorted?.column === column && !state.sorted.down };
      sort(table, state.sorted);
    });
  }
  if (sorted && table) sort(table, sorted);
  return state;
}

/** One axis, over which a part of it is chosen: by mouse, finger or keys. range: [low, high], from 0 to 1, or null for all. */
class Axis {
  constructor(brush, onChange) {
    this.number = brush.dataset.axis; this.brush = brush; this.onChange = onChange; this.range = null;
    this.svg = brush.ownerSVGElement;
    this.top = Number(brush.getAttribute("y")); this.height = Number(brush.getAttribute("height"));
    this.mark = document.createElementNS(this.svg.namespaceURI, "rect");
    for (const name of ["x", "width"]) this.mark.setAttribute(name, brush.getAttribute(name));
    this.mark.setAttribute("class", "brush set");
    this.mark.setAttribute("pointer-events", "none");
    this.svg.insertBefore(this.mark, brush);
    // What is in a picture by its role nobody comes to with a screen reader.
    this.svg.setAttribute("role", "group");
    for (const [name, value] of Object.entries({
      tabindex: 0, role: "slider", "aria-orientation": "vertical", "aria-valuemin": 0, "aria-valuemax": 100,
      "aria-label": `${brush.dataset.name}: part that is shown; arrow keys move its lower end, with Shift the upper one, Escape shows all`,
    })) brush.setAttribute(name, value);
    let from = null;
    brush.addEventListener("pointerdown", event => { from = this.at(event); brush.setPointerCapture(event.pointerId); });
    brush.addEventListener("pointermove", event => {
      const to = this.at(event);
      if (from !== null) this.set(Math.abs(to - from) < 0.01 ? null : [Math.min(from, to), Math.max(from, to)]);
    });
    brush.addEventListener("pointerup", event => {
      if (from !== null && Math.abs(this.at(event) - from) < 0.01) this.set(null);
      from = null;
      onChange();
    });
    brush.addEventListener("pointercancel", () => { from = null; onChange(); });
    brush.addEventListener("keydown", event => this.key(event));
    this.set(null);
    this.tell("");
  }

  at(event) {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
    const part = 1 - (point.y - this.top) / this.height;
    // Beside an end its last trial is meant, too, which lies on it.
    return part < 0.02 ? 0 : part > 0.98 ? 1 : part;
  }

  set(range) {
    this.range = range;
    this.mark.setAttribute("y", range ? this.top + (1 - range[1]) * this.height : this.top);
    this.mark.setAttribute("height", range ? (range[1] - range[0]) * this.height : 0);
  }

  key(event) {
    const by = { ArrowUp: 0.05, ArrowRight: 0.05, ArrowDown: -0.05, ArrowLeft: -0.05, PageUp: 0.25, PageDown: -0.25 }[event.key];
    if (event.key === "Escape" || event.key === "Delete") this.set(null);
    else if (by) {
      let [low, high] = this.range || [0, 1];
      // The ends push each other.
      const moved = end => Math.round(Math.min(1, Math.max(0, end + by)) * 1e4) / 1e4;
      if (event.shiftKey) { high = moved(high); low = Math.min(low, high); } else { low = moved(low); high = Math.max(low, high); }
      this.set(low <= 0 && high >= 1 ? null : [low, high]);
    } else return;
    event.preventDefault();
    this.onChange();
  }

  tell(left) {
    const [low, high] = this.range || [0, 1], percent = part => Math.round(100 * part);
    this.brush.setAttribute("aria-valuenow", percent(low));
    this.brush.setAttribute("aria-valuetext", this.range ? `${percent(low)} to ${percent(high)} % of the axis, ${left}` : "all of it");
  }
}

function sort(table, { column, down }) {
  const rows = Array.from(table.tBodies[0].rows), value = row => row.cells[column]?.textContent.trim() || "";
  rows.sort((a, b) => {
    const x = value(a), y = value(b), p = parseFloat(x), q = parseFloat(y);
    // What has no value stands last, whichever way.
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows);
  Array.from(table.tHead.rows[0].cells).forEach((cell, at) =>
    cell.setAttribute("aria-sort", at === column ? (down ? "descending" : "ascending") : "none"));
}
