// Runs beside one another: a table, curves with a colour for each run, pictures, and images by step.
"use strict";
import { Board } from "./charts.js";
import { Table } from "./compare_table.js";
import { prepare } from "./pictures.js";
import { Legend } from "./run_colours.js";
import { element, json, offer, part, root } from "./ui.js";

const LOOK_MS = 5000; // pause between looks at runs that go on
const byId = name => document.getElementById(name), place = byId("compared"), metrics = byId("metrics");
const legend = new Legend(), { items, names } = legend, ids = items.map(item => item.dataset.run);

/** Go to the comparison with other runs. The settings in the address stay. */
function go(chosen) {
  const given = new URLSearchParams(location.search);
  given.delete("run");
  location.search = new URLSearchParams([...chosen.map(id => ["run", id]), ...given]).toString();
}

const board = new Board({
  address: metrics.dataset.curves, place: byId("charts"), nodes: null, ...legend.options,
  onListed: ({ more }) => {
    if (more === undefined) return; // an answer about some metrics
    byId("more-metrics").hidden = !more;
    byId("more-metrics").textContent = `${more} more metrics have no chart here. The table has all.`;
  },
});
board.keep();
legend.bind(board);

const table = new Table(byId("table"), {
  head: run => Object.assign(element("a", names[run]), { href: `${root}runs/${ids[run]}` }),
  pair: (run, first) => `?run=${encodeURIComponent(ids[first])}&run=${encodeURIComponent(ids[run])}`,
});

async function fill() {
  try { table.set(await json(`${root}compare/table?${place.dataset.query}`)); }
  catch (error) { byId("table-note").textContent = error.message; }
}

items.forEach((item, at) => {
  const others = ids.filter((_, other) => other !== at);
  item.querySelector("input").addEventListener("change", sayShown);
  item.querySelector(".remove")?.addEventListener("click", () => go(others));
  item.querySelector(".first")?.addEventListener("click", () => go([ids[at], ...others]));
});
function sayShown() {
  if (byId("show-all")) byId("show-all").textContent = legend.hidden.size ? "Show all" : "Hide all";
}
byId("show-all")?.addEventListener("click", () => {
  const isAll = legend.hidden.size > 0;
  for (const item of items) item.querySelector("input").checked = isAll;
  legend.show(isAll, ...items.keys());
  sayShown();
});

// Completion by name, id and tag.
let asked = 0;
byId("add-run")?.addEventListener("input", event => {
  clearTimeout(asked);
  asked = setTimeout(() => {
    // The browser offers only options that have the typed text, which a query is not.
    const text = event.target.value, typed = run => (`${run.run_id} ${run.name}`.toLowerCase().includes(text.toLowerCase()) ? "" : `, ${text}`);
    const address = `${root}compare/names?${place.dataset.query}&q=${encodeURIComponent(text)}`;
    offer(byId("offered"), async () => (await json(address)).map(run => [run.run_id, `${run.name ? `${run.name}, ` : ""}${run.status}${typed(run)}`]));
  }, 150);
});
byId("add")?.addEventListener("submit", event => { event.preventDefault(); go([...ids, byId("add-run").value.trim()]); });

// The settings of the table stand in the address, as those of the charts do.
const given = new URLSearchParams(location.search);
byId("table-filter").value = given.get("rows") || "";
if (["last", "best", "min", "max", ""].includes(given.get("value"))) byId("table-part").value = given.get("value");
if (given.has("all")) byId("only-different").checked = false;
table.obey(({ words, part: chosen, isOnly }) => {
  const now = new URLSearchParams(location.search), put = (name, value) => { value === null ? now.delete(name) : now.set(name, value); };
  put("rows", words || null); put("value", chosen === "last" ? null : chosen); put("all", isOnly || ids.length < 2 ? null : "1");
  history.replaceState(null, "", `?${now}${location.hash}`);
});

/** Fetch a later part of the page; what it needs of a script is prepared. */
async function late(section, query = "") {
  const made = await part(`${root}compare/${section.dataset.part}?${place.dataset.query}${query}`), body = section.querySelector(".body");
  if (!made) { body.textContent = "Paceline can't show this now."; return; }
  body.replaceChildren(made);
  ({ pictures: preparePictures, images: prepareImages })[section.dataset.part]?.(section, body);
}
function preparePictures(section, body) {
  if (!body.querySelector("#axes")) return;
  prepare(body);
  for (const select of body.querySelectorAll("#axes select")) {
    select.addEventListener("change", async () => {
      await late(section, `&${new URLSearchParams(new FormData(select.form))}`);
      section.querySelector(`select[name=${select.name}]`)?.focus();
    });
  }
}
function prepareImages(section, body) {
  section.hidden = !body.children.length;
  for (const row of body.querySelectorAll(".imagerow")) {
    const figures = Array.from(row.querySelectorAll("figure"), figure => ({ figure, images: JSON.parse(figure.dataset.images) }));
    const steps = [...new Set(figures.flatMap(one => one.images.map(([step]) => step)))].sort((a, b) => a - b);
    const slider = row.querySelector("input");
    slider.max = steps.length - 1; slider.value = steps.length - 1;
    slider.closest("label").hidden = steps.length < 2;
    const show = () => {
      const step = steps[slider.value];
      row.querySelector("output").textContent = step;
      slider.setAttribute("aria-valuetext", `step ${step}`);
      for (const { figure, images } of figures) {
        // A run without an image at this step shows its last one before it.
        const at = images.filter(([own]) => own <= step).pop(), image = figure.querySelector("img");
        image.hidden = !at;
        figure.querySelector(".at").textContent = at ? `step ${at[0]}` : "no image yet";
        if (!at) continue;
        image.src = `${figure.dataset.folder}${at[1]}`; image.alt = `${image.dataset.name}, step ${at[0]}`;
      }
    };
    slider.addEventListener("input", show);
    show();
  }
}
const soon = new IntersectionObserver(found => {
  for (const one of found) if (one.isIntersecting) { soon.unobserve(one.target); late(one.target); }
}, { rootMargin: "300px" });

await Promise.all([fill(), board.load(null)]);
for (const section of document.querySelectorAll(".late")) {
  if (section.dataset.part === "images") late(section); else soon.observe(section);
}
if (place.dataset.live) setInterval(() => { if (!document.hidden) { fill(); board.load(null); board.refresh(); } }, LOOK_MS);
