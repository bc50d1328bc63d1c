// Runs beside one another: a table, curves with a colour for each run, pictures, and images by step.
"use strict";
import { Board } from "./charts.js";
import { Table } from "./compare_table.js";
import { prepare } from "./pictures.js";
import { colour, dash, paint } from "./run_colours.js";
import { json, part, root } from "./ui.js";

const LOOK_MS = 5000; // pause between looks at runs that go on
const place = document.getElementById("compared"), items = Array.from(document.querySelectorAll("#legend li"));
const runs = items.map(item => ({ id: item.dataset.run, name: item.dataset.name })), hidden = new Set();
const metrics = document.getElementById("metrics"), byId = name => document.getElementById(name);

/** Go to the comparison with other runs. The settings in the address stay. */
function go(ids) {
  const given = new URLSearchParams(location.search);
  given.delete("run");
  location.search = new URLSearchParams([...ids.map(id => ["run", id]), ...given]).toString();
}

const board = new Board({
  address: metrics.dataset.curves, place: byId("charts"), nodes: null,
  colourOf: curve => colour(curve.run), dashOf: curve => dash(curve.run), labelOf: curve => runs[curve.run].name,
  isShown: curve => !hidden.has(curve.run),
  onListed: ({ more }) => {
    byId("more-metrics").hidden = !more;
    byId("more-metrics").textContent = `${more} more metrics have no chart here. The table has all.`;
  },
});
board.keep();

const table = new Table(byId("table"), {
  note: byId("table-note"),
  head: (run, first) => {
    const cell = document.createElement("th"), link = document.createElement("a");
    cell.scope = "col"; cell.dataset.colour = run; cell.className = "run";
    cell.style.setProperty("--mine", colour(run));
    link.textContent = link.title = runs[run].name;
    link.href = `${root}runs/${runs[run].id}`;
    cell.append(link);
    if (run === first && runs.length > 1) cell.classList.add("first");
    return cell;
  },
  pair: (run, first) => `?run=${encodeURIComponent(runs[first].id)}&run=${encodeURIComponent(runs[run].id)}`,
});

async function fill() {
  try { table.set(await json(`${root}compare/table?${place.dataset.query}`)); }
  catch (error) { byId("table-note").textContent = error.message; }
}

items.forEach((item, at) => {
  item.dataset.colour = at;
  const box = item.querySelector("input");
  box.addEventListener("change", () => { box.checked ? hidden.delete(at) : hidden.add(at); shownChanged(); });
  for (const [event, run] of [["mouseenter", at], ["mouseleave", null], ["focusin", at], ["focusout", null]]) {
    item.addEventListener(event, () => board.highlight(curve => curve.run === run, run !== null));
  }
  item.querySelector(".remove")?.addEventListener("click", () => go(runs.filter((_, other) => other !== at).map(run => run.id)));
  item.querySelector(".first")?.addEventListener("click", () => go([runs[at].id, ...runs.filter((_, other) => other !== at).map(run => run.id)]));
});
function shownChanged() {
  items.forEach((item, at) => item.classList.toggle("off", hidden.has(at)));
  if (byId("show-all")) byId("show-all").textContent = hidden.size ? "Show all" : "Hide all";
  board.redrawAll();
}
byId("show-all")?.addEventListener("click", () => {
  const isAll = hidden.size > 0;
  items.forEach((item, at) => { item.querySelector("input").checked = isAll; isAll ? hidden.delete(at) : hidden.add(at); });
  shownChanged();
});

// Completion by name, id and tag.
let asked = 0;
byId("add-run")?.addEventListener("input", event => {
  clearTimeout(asked);
  asked = setTimeout(async () => {
    // The browser offers only options that have the typed text, which a query is not.
    const text = event.target.value, typed = run => (`${run.run_id} ${run.name}`.toLowerCase().includes(text.toLowerCase()) ? "" : `, ${text}`);
    const found = await json(`${root}compare/names?${place.dataset.query}&q=${encodeURIComponent(text)}`).catch(() => []);
    byId("offered").replaceChildren(...found.map(run => Object.assign(document.createElement("option"), {
      value: run.run_id, label: `${run.name ? `${run.name}, ` : ""}${run.status}${typed(run)}`,
    })));
  }, 150);
});
byId("add")?.addEventListener("submit", event => { event.preventDefault(); go([...runs.map(run => run.id), byId("add-run").value.trim()]); });

// The settings of the table stand in the address, as those of the charts do.
const given = new URLSearchParams(location.search);
byId("table-filter").value = given.get("rows") || "";
if (["last", "best", "min", "max", ""].includes(given.get("value"))) byId("table-part").value = given.get("value");
if (given.has("all")) byId("only-different").checked = false;
function settings() {
  const now = new URLSearchParams(location.search), put = (name, value) => { value === null ? now.delete(name) : now.set(name, value); };
  const words = byId("table-filter").value, chosen = byId("table-part").value, isOnly = byId("only-different").checked;
  put("rows", words || null); put("value", chosen === "last" ? null : chosen); put("all", isOnly || runs.length < 2 ? null : "1");
  history.replaceState(null, "", `?${now}${location.hash}`);
  table.show({ words: words.toLowerCase().split(/\s+/).filter(Boolean), part: chosen, isOnly });
}
for (const name of ["table-filter", "table-part", "only-different"]) byId(name).addEventListener("input", settings);
settings();

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

paint();
document.addEventListener("theme", paint);
await Promise.all([fill(), board.load(null)]);
for (const section of document.querySelectorAll(".late")) {
  if (section.dataset.part === "images") late(section); else soon.observe(section);
}
if (place.dataset.live) setInterval(() => { if (!document.hidden) { fill(); board.load(null); board.refresh(); } }, LOOK_MS);
