// What the compute targets say of themselves: asked anew now and then while somebody looks.
"use strict";
import { part } from "./ui.js";

const place = document.getElementById("targets");
async function ask() {
  if (document.hidden) return;
  const made = await part(place.dataset.part);
  if (!made || place.contains(document.activeElement)) return;
  const open = Array.from(place.querySelectorAll("details"), one => one.open);
  place.replaceChildren(made);
  place.querySelectorAll("details").forEach((one, at) => { if (at in open) one.open = open[at]; });
}
ask();
setInterval(ask, 15000);
document.addEventListener("visibilitychange", ask);
