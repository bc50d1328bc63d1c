// Versions of a model side by side.
"use strict";

const only = document.getElementById("only-different"), table = document.getElementById("diff");
only?.addEventListener("change", () => table.classList.toggle("only", only.checked));
