// Which models fill the pages of which worker.

import { count, el, lastSeconds, percent, rate, say, setAttribute, Table } from "./dom.js";


// Parts that are narrower have no name in the picture; it is in the table.
const NAMED_FROM = 0.04;

export function pages() {
  const kinds = new Table(
    "Coming and going",
    [
      { title: "kind of workers", text: (row) => row.kind },
      { title: "workers", kind: "number", text: (row) => count(row.workers) },
      { title: "loads", kind: "number", text: (row) => `${rate(row.loads_per_s)}/s` },
      { title: "evictions", kind: "number", text: (row) => `${rate(row.evictions_per_s)}/s` },
      { title: "time spent loading", kind: "number", text: (row) => percent(row.load_busy), share: (row) => row.load_busy },
      { title: "refused for lack of pages", kind: "number", text: (row) => `${rate(row.dropped_rps.pages)}/s`, tone: (row) => (row.dropped_rps.pages > 0.1 ? "bad" : "") },
    ],
    { key: (row) => row.kind, empty: "No worker is connected." },
  );
  const place = el("div", { class: "holders" });
  const find = el("input", { id: "find", type: "search", autocomplete: "off", spellcheck: "false" });
  const found = el("span", { role: "status" });
  const holders = new Map();
  let data = null;

  function mark() {
    const wanted = find.value.trim();
    const on = [];
    for (const holder of holders.values()) {
      let has = false;
      for (const [name, segment] of holder.segments) {
        const hit = wanted !== "" && name.includes(wanted);
        segment.classList.toggle("found", hit);
        has ||= hit;
      }
      if (has) on.push(holder.id);
    }
    say(found, wanted === "" ? "" : on.length ? `on ${on.join(", ")}` : "on none of these workers, or among their smaller models");
  }
  find.addEventListener("input", mark);
  return {
    title: "Pages",
    root: el(
      "div",
      {},
      el("h1", { text: "Pages" }),
      el("div", { class: "ask" }, el("label", { for: "find", text: "Where is the model" }), find, found),
      legend(),
      place,
      kinds.root,
    ),
    path: "/live/pages",
    update(news) {
      data = news;
      kinds.name(`Coming and going (${lastSeconds(data.kinds_over_s)})`);
      kinds.update(data.kinds);
      const kept = new Map();
      for (const each of data.holders) {
        const holder = holders.get(each.id) ?? new Holder(each.id);
        kept.set(each.id, holder);
        holder.update(each);
        if (!holder.root.isConnected) place.append(holder.root);
      }
      for (const [id, holder] of holders) if (!kept.has(id)) holder.root.remove();
      holders.clear();
      for (const [id, holder] of kept) holders.set(id, holder);
      if (kept.size === 0 && !place.querySelector("p")) place.replaceChildren(el("p", { class: "dim", text: "No worker is connected, so there are no pages." }));
      mark();
    },
  };
}

function legend() {
  const item = (kind, text) => el("li", {}, el("i", { class: `key ${kind}` }), ` ${text}`);
  return el("ul", { class: "legend" }, item("resident", "weights that are there"), item("loading", "weights on their way"), item("free", "free pages"));
}

/** One worker's pages: a bar in parts as wide as their pages, and a table. */
class Holder {
  constructor(id) {
    this.id = id;
    this.segments = new Map();
    this.strip = el("div", { class: "strip", role: "img" });
    this.words = el("p", { class: "dim" });
    this.table = new Table(
      `Models on ${id}`,
      [
        { title: "model", text: (row) => row.name, href: (row) => `#/model/${encodeURIComponent(row.name)}` },
        { title: "pages", kind: "number", text: (row) => count(row.pages) },
        { title: "weights", text: (row) => (row.resident ? "are there" : "on their way") },
      ],
      { empty: "No model's weights are there." },
    );
    this.root = el("section", { class: "holder", "aria-label": `Pages of ${id}` }, el("h2", { text: id }), this.strip, this.words, el("details", {}, el("summary", { text: `Models on ${id}, as a table` }), this.table.root));
  }

  update(data) {
    const num = data.models.length + data.others.models;
    const used = data.pages - data.free;
    say(this.words, `${count(used)} of ${count(data.pages)} pages in use, ${count(data.free)} free; ${count(num)} model${num === 1 ? "" : "s"}`);
    setAttribute(this.strip, "aria-label", `${count(used)} of ${count(data.pages)} pages in use`);
    const wanted = data.models.map((model) => [model.name, model.pages, model.resident ? "resident" : "loading"]);
    if (data.others.models) wanted.push([`${count(data.others.models)} more models`, data.others.pages, "resident others"]);
    if (data.free) wanted.push(["", data.free, "free"]);
    // By name, so that a model stays where it was while others come and go.
    wanted.sort((a, b) => Number(a[2] === "free") - Number(b[2] === "free") || (a[0] < b[0] ? -1 : 1));
    const parts = wanted.map(([name, num, kind]) => {
      const part = this.segments.get(name) ?? el("span");
      part.className = `part ${kind}`;
      part.style.flexGrow = `${num}`;
      say(part, num < NAMED_FROM * data.pages ? "" : kind === "free" ? `${count(num)} free` : name);
      part.title = kind === "free" ? `${count(num)} free pages` : `${name}: ${count(num)} page${num === 1 ? "" : "s"}`;
      return [name, part];
    });
    this.segments = new Map(parts);
    this.strip.replaceChildren(...parts.map(([, part]) => part));
    this.table.update(data.models);
  }
}
