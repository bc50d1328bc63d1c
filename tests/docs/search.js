// Search a built site as a browser does: the theme's own worker reads the site's own index.
// node search.js SITE QUERY... prints a JSON list of pages for each query, the best first.
"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets", "javascripts", "workers");
const [worker] = fs.readdirSync(folder).filter((name) => /^search\..*\.js$/.test(name));
const load = (name) => vm.runInThisContext(fs.readFileSync(path.join(folder, name), "utf8"));

let receive, answer;
globalThis.self = globalThis;
globalThis.importScripts = (...names) => names.forEach(load);
globalThis.addEventListener = (_, listener) => { receive = listener; };
globalThis.postMessage = (message) => answer(message.data);
const ask = (type, data) => new Promise((resolve) => { answer = resolve; receive({ data: { type, data } }); });

(async () => {
  load(worker);
  const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));
  await ask(0, { ...index, options: { suggest: true } });
  const pages = [];
  for (const query of queries)
    pages.push((await ask(2, query)).items.map(([first]) => first.location.split("#")[0]));
  console.log(JSON.stringify(pages));
})();
