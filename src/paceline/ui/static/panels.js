// Panels of images, sounds, tables and texts, each with a slider over its steps. Only the shown step is fetched.
"use strict";
import { part } from "./ui.js";

const PAUSE_MS = 60;

/** The panels below `place`; `address` has them all, and one of them at one step. */
export class Panels {
  constructor(place, address) {
    this.place = place;
    this.address = address;
    place.addEventListener("input", event => {
      const panel = event.target.closest("article.other");
      if (panel && event.target.matches("input[type=range], select")) this.wait(panel);
    });
  }

  /** Show new names, and new steps where the last step is shown. False where the server can't be reached. */
  async load() {
    const made = await part(this.address);
    if (!made) return false;
    const known = new Map(Array.from(this.place.querySelectorAll("article.other"), one => [one.dataset.name, one]));
    for (const note of this.place.querySelectorAll(":scope > .note")) note.remove();
    for (const fresh of Array.from(made.children)) {
      const old = known.get(fresh.dataset.name);
      if (!old) this.place.append(fresh);
      else if (old.dataset.count !== fresh.dataset.count || fresh.querySelector("table")) this.renew(old, fresh);
    }
    return true;
  }

  renew(old, fresh) {
    const slider = old.querySelector("input[type=range]"), rank = old.querySelector("select")?.value;
    const isLast = !slider || slider.value === slider.max, isBusy = Array.from(old.querySelectorAll("audio, video")).some(one => !one.paused);
    const hasFocus = old.contains(document.activeElement);
    old.dataset.count = fresh.dataset.count;
    if (slider) slider.max = String(Number(fresh.dataset.count) - 1);
    if (!isLast || rank || isBusy) return;
    // The first panel of a name has no slider: it comes with the second step.
    if (!slider || Boolean(old.querySelector("select")) !== Boolean(fresh.querySelector("select"))) {
      old.replaceChildren(...fresh.childNodes);
      if (hasFocus) old.querySelector("input, select, [tabindex]")?.focus({ preventScroll: true });
    } else {
      slider.value = slider.max;
      this.put(old, fresh.querySelector(".shown"));
    }
  }

  wait(panel) {
    clearTimeout(panel.waiting);
    panel.waiting = setTimeout(() => this.show(panel), PAUSE_MS);
  }

  async show(panel) {
    const asked = panel.asked = (panel.asked || 0) + 1;
    const query = new URLSearchParams({ name: panel.dataset.name });
    for (const one of panel.querySelectorAll("input[type=range], select")) if (one.value) query.set(one.name, one.value);
    const made = await part(`${this.address}?${query}`);
    // A slower answer to an earlier move must not replace a later one.
    if (made && asked === panel.asked) this.put(panel, made.querySelector(".shown"));
  }

  put(panel, shown) {
    panel.querySelector(".shown").replaceWith(shown);
    const slider = panel.querySelector("input[type=range]"), label = panel.querySelector("output");
    if (slider) slider.setAttribute("aria-valuetext", shown.dataset.label);
    if (label) label.textContent = shown.dataset.label;
  }
}
