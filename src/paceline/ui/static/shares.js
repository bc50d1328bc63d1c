// The address of a new link, and the HTML of a frame for it.
"use strict";
const link = document.getElementById("shared-link"), frame = document.getElementById("shared-frame");
if (link) {
  link.value = new URL(link.dataset.path, location.href).href;
  if (frame) {
    const made = document.createElement("iframe");
    made.src = link.value; made.width = "900"; made.height = "600"; made.title = "Curves in Paceline";
    frame.value = made.outerHTML;
  }
  for (const field of [link, frame]) field?.addEventListener("focus", () => field.select());
}
