// The log: lines as they come, in their colours. Whatever they hold is text; no line is ever taken for HTML.
"use strict";
import { element, json } from "./ui.js";

const MOST_LINES = 6000;

const ruleOf = text => element("div", text, "rule");

/** A line with the colours that its writer set: `\x1b[1;31m` and so on become classes. */
function coloured(text, into) {
  const parts = text.split(/\x1b\[([0-9;:]*)m/);
  let on = new Set();
  parts.forEach((part, at) => {
    if (at % 2) { on = after(on, part); return; }
    if (!part) return;
    if (!on.size) { into.append(part); return; }
    const span = document.createElement("span");
    span.className = [...on].join(" ");
    span.textContent = part;
    into.append(span);
  });
}

function after(before, codes) {
  let on = new Set(before);
  const drop = letter => { for (const one of on) if (one[0] === letter) on.delete(one); };
  const numbers = codes.split(/[;:]/).map(code => Number(code || 0));
  for (let at = 0; at < numbers.length; at++) {
    const code = numbers[at];
    if (code === 0) on = new Set();
    else if ([1, 2, 3, 4, 9].includes(code)) on.add(`a${code}`);
    else if (code >= 22 && code <= 29) drop("a");
    else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) { drop("f"); on.add(`f${code % 10}`); }
    else if ((code >= 40 && code <= 47) || (code >= 100 && code <= 107)) { drop("b"); on.add(`b${code % 10}`); }
    else if (code === 39) drop("f");
    else if (code === 49) drop("b");
    else if (code === 38 || code === 48) {
      // 256 colours and true colours: the nearest of the eight.
      const letter = code === 38 ? "f" : "b";
      let rgb = null;
      if (numbers[at + 1] === 2) { rgb = numbers.slice(at + 2, at + 5); at += 4; }
      else if (numbers[at + 1] === 5) {
        const n = numbers[at + 2]; at += 2;
        if (n < 16) { drop(letter); on.add(letter + n % 8); }
        else rgb = n > 231 ? Array(3).fill((n - 232) * 10 + 8) : [Math.floor((n - 16) / 36), Math.floor((n - 16) / 6) % 6, (n - 16) % 6].map(v => v * 51);
      }
      if (rgb) { drop(letter); on.add(letter + rgb.reduce((sum, value, bit) => sum + (value > 127 ? 1 << bit : 0), 0)); }
    }
  }
  return on;
}

export class Log {
  constructor() {
    this.box = document.getElementById("log");
    this.section = document.getElementById("log-section");
    this.note = document.getElementById("log-note");
    this.ranks = Number(this.section.dataset.ranks);
    this.follow = document.getElementById("log-follow");
    this.bars = new Map();   // rank -> the line that is a progress bar's state by now
    this.colours = new Map();
    this.last = 500;
    this.mode = "live";
    // A link to the log of one rank, such as that of the first that failed.
    const chosen = new URLSearchParams(location.search).get("log_rank"), byRank = document.getElementById("log-rank");
    if (chosen && byRank) byRank.value = chosen;
    this.found = [];         // the lines of a search's result
    this.current = -1;       // the number of the line among them to which the reader went
    const ask = () => this.ask(), by = id => document.getElementById(id);
    const search = by("log-search");
    search.addEventListener("input", () => { clearTimeout(this.typing); this.typing = setTimeout(ask, 250); });
    search.addEventListener("keydown", event => {
      if (event.key === "Enter") { event.preventDefault(); this.go(event.shiftKey ? -1 : 1); }
    });
    for (const name of ["of", "rank", "attempt", "level", "regex"]) by(`log-${name}`)?.addEventListener("change", ask);
    by("log-previous").addEventListener("click", () => this.go(-1));
    by("log-next").addEventListener("click", () => this.go(1));
    by("log-latest").addEventListener("click", () => { this.follow.checked = true; ask(); });
    by("log-earlier").addEventListener("click", () => {
      this.last = Math.min(20000, this.last * 4);
      if (this.mode === "line") this.openLine(this.line); else this.ask(true);
    });
    by("log-copy").hidden = !navigator.clipboard;
    by("log-copy").addEventListener("click", () => this.copy());
    this.box.addEventListener("click", event => {
      const link = event.target.closest("a.link");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      this.openLine(new URL(link.href).searchParams.get("line"));
    });
    this.follow.addEventListener("change", () => this.toEnd());
    const linked = new URLSearchParams(location.search).get("line");
    if (linked) this.openLine(linked);
    // A controller has no workers: what it says itself is shown.
    else if (this.asked.of !== "workers" || this.asked.rank) ask();
    this.box.addEventListener("scroll", () => {
      const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 30;
      if (!this.isScrolling && this.follow.checked !== isAtEnd) this.follow.checked = isAtEnd;
      this.isScrolling = false;
    });
  }

  get asked() {
    const value = name => document.getElementById(`log-${name}`)?.value || "";
    const regex = document.getElementById("log-regex").checked ? "1" : "";
    return { search: value("search"), of: value("of"), rank: value("rank"), attempt: value("attempt"), level: value("level"), regex };
  }

  /** Lines of the stream. */
  came({ lines, reset, left_out: leftOut }) {
    if (this.mode === "asked" && this.asked.of === "workers" && lines.length) this.askLater();
    if (this.mode !== "live") return;
    if (reset && this.last > 500) { this.ask(true); return; }
    if (reset) this.clear();
    if (leftOut) this.box.append(ruleOf(`${leftOut} lines skipped here; the run's files have all`));
    this.add(lines);
    if (reset) document.getElementById("log-earlier").disabled = lines.length < 500;
  }

  /** The supervisor has said something, or a node that prepares. */
  sideCame() {
    const { of, search } = this.asked;
    if (this.mode !== "line" && of !== "workers" && !search && this.follow.checked) this.ask();
  }

  /** Search again for new lines, with pauses ten times as long as a search, unless the reader looks at earlier lines. */
  askLater() {
    this.later ||= setTimeout(async () => {
      const began = performance.now();
      if (this.mode === "asked" && this.follow.checked) await this.ask(true, true);
      this.rest = 10 * (performance.now() - began);
      this.later = 0;
    }, Math.max(2000, this.rest || 0));
  }

  async ask(isSame = false, isNew = false) {
    clearTimeout(this.typing);
    const asked = this.asked;
    const isPlain = !asked.search && asked.of === "workers" && !asked.rank && !asked.attempt && !asked.level;
    if (!isSame) this.last = 500;
    this.mode = isPlain ? "live" : "asked";
    this.keep("");
    const whole = new URLSearchParams(Object.entries({ of: asked.of, rank: asked.rank, attempt: asked.attempt }).filter(([, value]) => value));
    document.getElementById("log-download").href = `${this.section.dataset.log}/text?${whole}`;
    const given = new URLSearchParams(Object.entries({ ...asked, last: this.last }).filter(([, value]) => value));
    if (!isNew) this.note.textContent = asked.search ? "Searching…" : "";
    const found = await this.read(given);
    if (!found) return;
    this.clear();
    // Of a supervisor, and of one node alone, each line needs no name before it.
    this.isOne = asked.of !== "workers" && found.lines.every(line => line[1] === 0);
    this.add(found.lines, asked.search, asked.regex);
    const isSearch = asked.search || asked.level;
    this.found = isSearch ? Array.from(this.box.querySelectorAll(".line")) : [];
    this.current = -1;
    document.getElementById("log-previous").hidden = document.getElementById("log-next").hidden = !this.found.length;
    this.note.textContent = isSearch
      ? `${found.count.toLocaleString()} line${found.count === 1 ? "" : "s"} found${found.more ? `; the last ${found.lines.length.toLocaleString()} are shown` : ""}${found.is_partial ? "; the search stopped at its time limit, before the end of the log" : ""}.`
      : isPlain ? "" : `${found.lines.length} line${found.lines.length === 1 ? "" : "s"}.`;
    document.getElementById("log-earlier").disabled = !found.more || this.last >= 20000 || Boolean(isSearch);
    if (isSame && !isNew) this.box.scrollTop = 0;
  }

  /** Fetch lines. Null if the server gives none, which the note tells, or if another request began meanwhile. */
  async read(given) {
    const number = this.asking = (this.asking || 0) + 1;
    try {
      const found = await json(`${this.section.dataset.log}?${given}`);
      return number === this.asking ? found : null;
    } catch (error) {
      if (number === this.asking) this.note.textContent = error.message;
      return null;
    }
  }

  /** Show the lines around the line of a link, "attempt.rank.offset". */
  async openLine(line) {
    clearTimeout(this.typing);
    if (this.mode !== "line") this.last = 200;
    [this.mode, this.line] = ["line", line];
    this.follow.checked = false;
    this.keep(line);
    const found = await this.read(new URLSearchParams({ line, last: this.last, rank: this.asked.rank }));
    if (!found) return;
    this.clear();
    this.isOne = false;
    this.add(found.lines);
    this.found = [];
    document.getElementById("log-previous").hidden = document.getElementById("log-next").hidden = true;
    document.getElementById("log-earlier").disabled = !found.more || this.last >= 20000;
    this.note.textContent = found.at < 0 ? "The log does not have the linked line." : "The linked line and the lines around it. New lines are not added here.";
    const place = this.box.querySelectorAll(".line")[found.at];
    if (place) this.show(place);
  }

  /** Keep the linked line in the address, and offer a way back. */
  keep(line) {
    const given = new URLSearchParams(location.search);
    line ? given.set("line", line) : given.delete("line");
    history.replaceState(null, "", `${location.pathname}${String(given) ? `?${given}` : ""}${location.hash}`);
    document.getElementById("log-latest").hidden = !line;
  }

  /** Go to the next (1) or previous (-1) line of the result. */
  go(step) {
    if (!this.found.length) return;
    this.current = this.current < 0 ? (step > 0 ? 0 : this.found.length - 1) : (this.current + step + this.found.length) % this.found.length;
    this.follow.checked = false;
    this.show(this.found[this.current]);
    this.note.textContent = this.note.textContent.replace(/^(Line [\d.,]+ of )?/, `Line ${(this.current + 1).toLocaleString()} of `);
  }

  show(line) {
    this.box.querySelector(".line.on")?.classList.remove("on");
    line.classList.add("on");
    this.isScrolling = true;
    this.box.scrollTop += line.getBoundingClientRect().top - this.box.getBoundingClientRect().top - this.box.clientHeight / 3;
  }

  async copy() {
    const texts = Array.from(this.box.querySelectorAll(".line"), line => line.dataset.text);
    try { await navigator.clipboard.writeText(texts.join("\n")); this.note.textContent = `Copied ${texts.length.toLocaleString()} lines.`; }
    catch (error) { this.note.textContent = `The browser did not copy the lines: ${error.message}`; }
  }

  clear() { this.box.replaceChildren(); this.box.classList.add("short"); this.bars.clear(); this.colours.clear(); this.attempt = 0; }

  add(lines, search = "", isRegex = "") {
    const made = document.createDocumentFragment();
    const pattern = search && patternOf(search, isRegex);
    for (const [attempt, rank, text, isWhole, begin] of lines) {
      if (attempt && this.attempt && attempt !== this.attempt) made.append(ruleOf(`Attempt ${attempt}`));
      this.attempt = attempt || this.attempt;
      const line = document.createElement("div");
      line.className = "line";
      line.dataset.text = text.replace(/\x1b\[[0-9;:]*m/g, "");
      if (begin >= 0) {
        const link = document.createElement("a");
        link.className = "link";
        link.href = `?line=${attempt}.${rank}.${begin}`;
        link.title = "Link to this line";
        link.tabIndex = -1;
        link.ariaLabel = "Link to this line";
        line.append(link);
      }
      if (attempt) this.ranks = Math.max(this.ranks, rank + 1);   // a script may start ranks itself
      if (attempt ? this.ranks > 1 : !this.isOne) {
        const who = document.createElement("span");
        who.className = `who r${rank % 8}`;
        who.textContent = attempt ? rank : `node ${rank}`;
        line.append(who);
      }
      if (pattern) marked(line.dataset.text, pattern, line); else coloured(text, line);
      const bar = this.bars.get(rank);
      if (bar) { bar.remove(); this.bars.delete(rank); }
      if (!isWhole) this.bars.set(rank, line);
      made.append(line);
    }
    this.box.append(made);
    // A few lines need no tall box; of a tall one its reader may choose the height.
    this.box.classList.toggle("short", this.box.childElementCount < 18);
    while (this.box.childElementCount > Math.max(MOST_LINES, this.last)) this.box.firstElementChild.remove();
    this.toEnd();
  }

  toEnd() {
    if (!this.follow.checked) return;
    this.isScrolling = true;
    this.box.scrollTop = this.box.scrollHeight;
  }
}

/** The pattern of a search; null where the browser does not know this expression of Python's, or where it might take long. */
function patternOf(search, isRegex) {
  try { return new RegExp(isRegex ? search : search.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi"); } catch { return null; }
}

function marked(text, pattern, into) {
  let from = 0;
  for (const match of text.slice(0, 5000).matchAll(pattern)) {
    if (!match[0]) continue;
    into.append(text.slice(from, match.index));
    const mark = document.createElement("mark");
    mark.textContent = match[0];
    into.append(mark);
    from = match.index + match[0].length;
  }
  into.append(text.slice(from));
}
