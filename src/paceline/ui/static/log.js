// The log: lines as they come, in their colours. Whatever they hold is text; no line is ever taken for HTML.
"use strict";
import { json } from "./ui.js";

const MOST_LINES = 6000;

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
    const ask = () => this.ask();
    let typing = 0;
    document.getElementById("log-search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(ask, 250); });
    for (const name of ["of", "rank", "attempt"]) document.getElementById(`log-${name}`)?.addEventListener("change", ask);
    document.getElementById("log-earlier").addEventListener("click", () => { this.last = Math.min(20000, this.last * 4); this.ask(true); });
    this.follow.addEventListener("change", () => this.toEnd());
    // A controller has no workers: what it says itself is shown.
    if (this.asked.of !== "workers" || this.asked.rank) ask();
    this.box.addEventListener("scroll", () => {
      const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 30;
      if (!this.isScrolling && this.follow.checked !== isAtEnd) this.follow.checked = isAtEnd;
      this.isScrolling = false;
    });
  }

  get asked() {
    const value = name => document.getElementById(`log-${name}`)?.value || "";
    return { search: value("search"), of: value("of"), rank: value("rank"), attempt: value("attempt") };
  }

  /** Lines of the stream. */
  came({ lines, reset, left_out: leftOut }) {
    if (this.mode !== "live") return;
    if (reset && this.last > 500) { this.ask(true); return; }
    if (reset) this.clear();
    if (leftOut) this.rule(`${leftOut} lines skipped here; the run's files have all`);
    this.add(lines);
  }

  /** The supervisor has said something, or a node that prepares. */
  sideCame() {
    const { of, search } = this.asked;
    if (of !== "workers" && !search && this.follow.checked) this.ask();
  }

  async ask(isSame = false) {
    const asked = this.asked;
    const isPlain = !asked.search && asked.of === "workers" && !asked.rank && !asked.attempt;
    if (!isSame) this.last = 500;
    this.mode = isPlain ? "live" : "asked";
    const given = new URLSearchParams(Object.entries({ ...asked, last: this.last }).filter(([, value]) => value));
    const number = this.asking = (this.asking || 0) + 1;
    let found;
    try { found = await json(`${this.section.dataset.log}?${given}`); } catch (error) { this.note.textContent = error.message; return; }
    if (number !== this.asking) return;
    this.clear();
    // Of a supervisor, and of one node alone, each line needs no name before it.
    this.isOne = asked.of !== "workers" && found.lines.every(line => line[1] === 0);
    this.add(found.lines, asked.search);
    this.note.textContent = asked.search
      ? `${found.more ? "The last " : ""}${found.lines.length} line${found.lines.length === 1 ? "" : "s"} with “${asked.search}”.`
      : isPlain ? "" : `${found.lines.length} line${found.lines.length === 1 ? "" : "s"}${asked.of === "workers" ? "; new ones come where all ranks and attempts are chosen" : ""}.`;
    document.getElementById("log-earlier").disabled = !found.more || this.last >= 20000;
    if (isSame) this.box.scrollTop = 0;
  }

  clear() { this.box.replaceChildren(); this.box.classList.add("short"); this.bars.clear(); this.colours.clear(); this.attempt = 0; }

  rule(text) {
    const rule = document.createElement("div");
    rule.className = "rule";
    rule.textContent = text;
    this.box.append(rule);
  }

  add(lines, search = "") {
    const made = document.createDocumentFragment();
    for (const [attempt, rank, text, isWhole] of lines) {
      if (attempt && this.attempt && attempt !== this.attempt) {
        const rule = document.createElement("div");
        rule.className = "rule";
        rule.textContent = `Attempt ${attempt}`;
        made.append(rule);
      }
      this.attempt = attempt || this.attempt;
      const line = document.createElement("div");
      line.className = "line";
      if (attempt) this.ranks = Math.max(this.ranks, rank + 1);   // a script may start ranks itself
      if (attempt ? this.ranks > 1 : !this.isOne) {
        const who = document.createElement("span");
        who.className = `who r${rank % 8}`;
        who.textContent = attempt ? rank : `node ${rank}`;
        line.append(who);
      }
      if (search) marked(text.replace(/\x1b\[[0-9;:]*m/g, ""), search, line); else coloured(text, line);
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

function marked(text, search, into) {
  const lower = text.toLowerCase(), wanted = search.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
    into.append(text.slice(from, at));
    const mark = document.createElement("mark");
    mark.textContent = text.slice(at, at + wanted.length);
    into.append(mark);
    from = at + wanted.length;
  }
  into.append(text.slice(from));
}
