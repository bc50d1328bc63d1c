// Views with names: the address of the page, and on a run's page the layout of its charts.
"use strict";

const place = document.querySelector(".savedviews"), isRun = place.dataset.of === "run";
// Only the charts of a run's page have a layout.
const { kept } = isRun ? await import("./chart_sections.js") : {};

place.querySelector("form")?.addEventListener("submit", ({ target }) => {
  // What the page shows now: the search and the charts change the address while it is open.
  const query = new URLSearchParams(location.search);
  for (const name of ["page", "token"]) query.delete(name);
  target.elements.query.value = query.toString();
  if (isRun) target.elements.layout.value = JSON.stringify(kept.read());
});
for (const link of isRun ? place.querySelectorAll("a[data-layout]") : []) {
  link.addEventListener("click", () => {
    const layout = JSON.parse(link.dataset.layout);
    kept.change(now => { Object.assign(now, { pinned: layout.pinned, folded: layout.folded }); });
  });
}
// A link to the curves keeps their settings.
const share = document.getElementById("share");
share?.addEventListener("click", () => {
  const to = new URL(share.href);
  if (to.searchParams.has("run")) for (const name of ["metric", "axis", "smooth", "scale", "ranks", "attempts", "from", "to"]) {
    const value = new URLSearchParams(location.search).get(name);
    if (value) to.searchParams.set(name, value);
  }
  share.href = to.href;
});
