// Elements, made without HTML: whatever a name is, it is text.

/** Make an element; `properties` are attributes, but for `text`. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Change a text where it is another: a screen reader hears of nothing else, and a selection stays. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** A table whose rows are kept by key, so that focus stays where it is while figures change. */
export class Table {
  /**
   * columns: {title, text: row => string, href: row => string, share: row => number, kind: "text" | "number",
   * tone: row => string}; `share` draws a bar in front of the text.
   */
  constructor(caption, columns, { key = (row) => row.name, empty = "none" } = {}) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = el("tbody");
    this.empty = el("p", { class: "dim", text: empty });
    const head = el("tr");
    for (const column of columns)
      head.append(el("th", { scope: "col", class: column.kind ?? "text", text: column.title, title: column.help }));
    this.caption = el("caption", { text: caption });
    this.table = el("table", {}, this.caption, el("thead", {}, head), this.body);
    // Wide tables move sideways, also by keys.
    const frame = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, this.table);
    this.root = el("section", { class: "table" }, frame, this.empty);
    this.update([]);
  }

  update(rows) {
    this.empty.hidden = rows.length > 0;
    const kept = new Map();
    const focused = document.activeElement;
    rows.forEach((row, index) => {
      const key = this.key(row);
      const line = this.rows.get(key) ?? this.line();
      kept.set(key, line);
      this.columns.forEach((column, number) => fill(line.children[number], column, row));
      if (this.body.children[index] !== line) this.body.insertBefore(line, this.body.children[index] ?? null);
    });
    for (const [key, line] of this.rows) if (kept.get(key) !== line) line.remove();
    this.rows = kept;
    // What is moved loses its focus.
    if (focused !== document.activeElement && this.body.contains(focused)) focused.focus();
  }

  /** Rename it: it shows another period now. */
  name(caption) {
    say(this.caption, caption);
    setAttribute(this.root.firstElementChild, "aria-label", caption);
  }

  line() {
    const line = el("tr");
    this.columns.forEach((column, number) => {
      const cell = number === 0 ? el("th", { scope: "row" }) : el("td");
      cell.className = column.kind ?? "text";
      if (column.share) cell.append(el("span", { class: "bar", "aria-hidden": "true" }, el("span")));
      cell.append(column.href ? el("a") : el("span"));
      line.append(cell);
    });
    return line;
  }
}

function fill(cell, column, row) {
  const target = cell.lastElementChild;
  say(target, column.text(row));
  if (column.href) setAttribute(target, "href", column.href(row));
  if (column.share) {
    const share = Math.min(Math.max(column.share(row), 0), 1);
    cell.firstElementChild.firstElementChild.style.width = `${(100 * share).toFixed(1)}%`;
  }
  if (column.tone) setAttribute(cell, "data-tone", column.tone(row));
}

/** A figure in large letters with its name below. */
export class Tile {
  constructor(name) {
    this.name = el("dt", { text: name });
    this.value = el("dd");
    this.more = el("dd", { class: "dim" });
    this.root = el("div", { class: "tile" }, this.name, this.value, this.more);
  }

  /** period: what the value is of, in words. */
  update(value, more = "", tone = "", period = "") {
    this.label ??= this.name.textContent;
    say(this.name, period ? `${this.label}, ${period}` : this.label);
    say(this.value, value);
    say(this.more, more);
    setAttribute(this.root, "data-tone", tone);
  }
}

/** How long ago figures begin. */
export function lastSeconds(seconds) {
  return `last ${seconds >= 10 || Math.abs(seconds - Math.round(seconds)) < 0.05 ? Math.round(seconds) : seconds.toFixed(1)} s`;
}

const WORDS = [
  ["OVERLOADED", "refused before it ran: all workers that have the model were busy until its SLO would have been over"],
  ["LATE", "its answer was ready after its SLO, or its run could not begin in time, although it was planned to be in time"],
  ["COLD", "refused because the model's weights were on no worker, and could not be loaded within its SLO"],
  ["INFEASIBLE", "refused because its SLO is shorter than one run and the link to a worker take"],
  ["LOADING, UNFIT", "workers still prepare its model, or have refused it"],
  ["FAILED, WORKER_LOST", "its run failed, or its worker went away"],
  ["SLO", "the time within which a request wants its answer"],
  ["median, p99", "half of the answers took no longer than the median, 99 of 100 no longer than p99"],
  ["EXEC, LOAD", "a worker's two lanes: it runs one batch at a time in one, and copies one model's weights onto the GPU in the other"],
  ["pages", "a GPU's memory for weights is cut into pages of one size; a model takes as many as its weights fill"],
  ["window", "the earliest and the latest time at which an action may begin; a worker refuses to begin later"],
  ["planned ahead", "how long a worker needs for what it was sent and has not run yet"],
];

/** What the pages' words mean, folded. */
export function glossary() {
  const list = el("dl", { class: "facts" }, ...WORDS.map(([word, text]) => el("div", {}, el("dt", { text: word }), el("dd", { text }))));
  return el("details", { class: "glossary" }, el("summary", { text: "What the words mean: OVERLOADED, LATE, window, planned ahead ..." }), list);
}

export function tiles(...all) {
  return el("dl", { class: "tiles" }, ...all.map((tile) => tile.root));
}

// --- figures for people ---------------------------------------------------------------------------

const number = new Intl.NumberFormat("en");

export function rate(rps) {
  return rps >= 100 ? number.format(Math.round(rps)) : rps > 0 ? rps.toFixed(1) : "0";
}

export function count(value) {
  return number.format(value);
}

export function percent(share) {
  if (share === null || share === undefined) return "-";
  // 99.96 % is not all.
  const value = share < 1 && share > 0.995 ? Math.min(100 * share, 99.9).toFixed(1) : (100 * share).toFixed(0);
  return `${value} %`;
}

export function ms(value) {
  if (value === null || value === undefined) return "-";
  // As `format_ns` says it in sentences.
  if (Math.abs(value) >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return Math.abs(value) >= 0.1 ? `${value.toFixed(1)} ms` : `${(1000 * value).toFixed(0)} µs`;
}

export function sum(values) {
  return Object.values(values).reduce((total, value) => total + value, 0);
}

/** Write numbers by name, such as `3 cold starts`. */
export function named(numbers) {
  return Object.entries(numbers).map(([name, number]) => `${count(number)} ${name.replaceAll("_", " ")}`).join(", ");
}

/** Reasons with their rates, the most frequent first. */
export function reasons(rates) {
  return Object.entries(rates)
    .filter(([, rps]) => rps > 0)
    .sort((a, b) => b[1] - a[1])
    .map(([reason, rps]) => `${rate(rps)}/s ${reason}`)
    .join(", ");
}
