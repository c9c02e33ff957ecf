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
      head.append(el("th", { scope: "col", class: column.kind ?? "text", text: column.title }));
    this.table = el("table", {}, el("caption", { text: caption }), el("thead", {}, head), this.body);
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
    this.value = el("dd");
    this.more = el("dd", { class: "dim" });
    this.root = el("div", { class: "tile" }, el("dt", { text: name }), this.value, this.more);
  }

  update(value, more = "", tone = "") {
    say(this.value, value);
    say(this.more, more);
    setAttribute(this.root, "data-tone", tone);
  }
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
  if (Math.abs(value) >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${value.toFixed(0)} ms` : value >= 1 ? `${value.toFixed(1)} ms` : `${(1000 * value).toFixed(0)} µs`;
}

export function sum(values) {
  return Object.values(values).reduce((total, value) => total + value, 0);
}

/** Reasons with their rates, the most frequent first. */
export function reasons(rates) {
  return Object.entries(rates)
    .filter(([, rps]) => rps > 0)
    .sort((a, b) => b[1] - a[1])
    .map(([reason, rps]) => `${rate(rps)}/s ${reason}`)
    .join(", ");
}
