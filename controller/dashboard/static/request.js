// What happened to one request, and why.

import { count, el, glossary, ms, percent, Table } from "./dom.js";
import { look } from "./live.js";
import { requestTable, tell } from "./models.js";

/** Parts of a latency, in the order in which they happen. */
const PARTS = [
  ["waiting", "spent_queue_ns"],
  ["weights", "spent_load_ns"],
  ["network", "spent_network_ns"],
  ["input", "spent_input_ns"],
  ["EXEC", "spent_exec_ns"],
  ["output", "spent_output_ns"],
];

export function request(id) {
  const input = el("input", { id: "request-id", type: "text", autocomplete: "off", spellcheck: "false", required: true, value: id });
  const form = el("form", { class: "ask" }, el("label", { for: "request-id", text: "Its client's id for it, or the server's number" }), input, el("button", { type: "submit", text: "Explain" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = `#/request/${encodeURIComponent(input.value.trim())}`;
  });
  const place = el("div", { role: "status" });
  const recent = requestTable("Requests of the last moments");
  return {
    title: id ? `Request ${id}` : "Request",
    root: el("div", {}, el("h1", { text: id ? `Request ${id}` : "What happened to a request" }), form, place, recent.root, glossary()),
    path: "/live/timeline",
    started(signal, denied) {
      if (!id) return;
      look(`/look/request?id=${encodeURIComponent(id)}`, signal)
        .then((data) => place.replaceChildren(data.error === undefined ? explained(data.request, data.now_s) : el("p", { class: "verdict", text: data.error })))
        .catch((error) => {
          if (error.status === 401) denied(error);
          else if (!signal.aborted) place.replaceChildren(el("p", { class: "verdict", text: error.message }));
        });
    },
    update(data) {
      // Readers ask about refused requests.
      const refused = data.requests.filter((each) => each.outcome !== "OK" && each.outcome !== "CANCELLED");
      recent.update([...refused, ...data.requests.filter((each) => each.outcome === "OK")].slice(0, 15));
    },
  };
}

function explained(data, now_s) {
  const good = data.outcome === "OK";
  const verdict = el("p", { class: `verdict ${good ? "good" : "bad"}`, text: `${good ? "✓ answered in time" : data.outcome === "OPEN" ? "… still open" : `▲ ${data.outcome}`}: ${data.model_id}, ${ms(data.latency_ns / 1e6)} of an SLO of ${ms(data.slo_ns / 1e6)}` });
  const words = el("ul", { class: "words" }, ...data.words.map((text) => el("li", { text: text.replace(/(\d) us\b/g, "$1 µs") })));
  const root = el("section", { "aria-label": "Explanation" }, verdict, words);
  if (good) root.append(spent(data));
  else if (data.exec_ns) root.append(needed(data));
  if (data.lanes.length) root.append(lanes(data));
  const facts = el("dl", { class: "facts" });
  tell(facts, [
    ["model", data.model_id],
    ["its client's id", data.client_request_id || "none"],
    ["the server's number", `${data.request_id || "none: it was refused before it got one"}`],
    ["tenant", data.tenant || "none"],
    ["rows", count(data.rows)],
    ["weights at arrival", data.cold ? "nowhere: a cold start" : good ? "there" : "-"],
    ["came", `${ms(data.age_ns / 1e6)} before this page asked, at ${new Date(1000 * now_s - data.age_ns / 1e6).toLocaleTimeString("en-GB")}`],
  ]);
  root.append(facts);
  return root;
}

/** Where the time of an answer went. */
function spent(data) {
  const rows = PARTS.map(([name, field]) => ({ name, kind: name.toLowerCase(), ns: data[field] })).filter((part) => part.ns > 0);
  const table = new Table("Where the time went", [
    { title: "part", text: (row) => row.name },
    { title: "time", kind: "number", text: (row) => ms(row.ns / 1e6) },
    { title: "of the latency", kind: "number", text: (row) => percent(row.ns / data.latency_ns), share: (row) => row.ns / data.latency_ns },
  ]);
  table.update(rows);
  return el("div", {}, bar("Where the time went", rows, data.slo_ns), table.root);
}

/** What a refused request would have needed, against its SLO. */
function needed(data) {
  const waited = Math.min(data.latency_ns, Math.max(data.queue_ns, 0));
  const rows = [
    { name: "waited", kind: "waiting", ns: waited },
    { name: "still to wait", kind: "busy", ns: Math.max(data.queue_ns, 0) - waited },
    { name: "load of weights", kind: "weights", ns: data.load_ns },
    { name: "run", kind: "exec", ns: data.exec_ns },
    { name: "kept for the way back", kind: "margin", ns: data.margin_ns },
  ].filter((part) => part.ns > 0);
  const total = rows.reduce((all, row) => all + row.ns, 0);
  const beyond = total - data.slo_ns;
  const title = `What it would have needed: ${ms(total / 1e6)}${beyond > 0 ? `, ${ms(beyond / 1e6)} more than its SLO` : ""}`;
  const table = new Table(title, [
    { title: "part", text: (row) => row.name },
    { title: "time", kind: "number", text: (row) => ms(row.ns / 1e6) },
    { title: "of the SLO", kind: "number", text: (row) => percent(row.ns / data.slo_ns), share: (row) => row.ns / data.slo_ns },
  ]);
  table.update(rows);
  return el("div", {}, bar(title, rows, data.slo_ns), table.root);
}

/** Parts of a time, one after the other, above a scale on which the SLO is marked. */
function bar(title, rows, slo_ns) {
  const total = rows.reduce((all, row) => all + row.ns, 0);
  const whole = Math.max(total, slo_ns);
  const strip = el("div", { class: "strip spent", role: "img", "aria-label": `${title}: the table below says it` });
  for (const { name, kind, ns } of rows) {
    const part = el("span", { class: `part ${kind}`, title: `${name}: ${ms(ns / 1e6)}`, text: ns > 0.07 * whole ? `${name} ${ms(ns / 1e6)}` : "" });
    part.style.flex = `${ns} 1 0`;
    strip.append(part);
  }
  const left = slo_ns - total;
  if (left > 0) {
    const rest = el("span", { class: "part free", title: `left of the SLO: ${ms(left / 1e6)}`, text: left > 0.07 * whole ? `${ms(left / 1e6)} left` : "" });
    rest.style.flex = `${left} 1 0`;
    strip.append(rest);
  }
  const scale = el("div", { class: "scale", "aria-hidden": "true" });
  const mark = (at, kind, text) => {
    const tick = el("span", { class: kind, text });
    tick.style.left = `${((100 * at) / whole).toFixed(2)}%`;
    scale.append(tick);
  };
  for (let quarter = 0; quarter < 4; quarter += 1) mark((quarter * slo_ns) / 4, "tick", quarter ? ms((quarter * slo_ns) / 4e6) : "0");
  mark(slo_ns, "tick slo", `SLO ${ms(slo_ns / 1e6)}`);
  return el("div", { class: "measured" }, strip, scale);
}

function lanes(data) {
  const table = new Table(
    "Workers that could have run it, when it was refused",
    [
      { title: "worker", text: (row) => row.worker_id },
      { title: "weights", text: (row) => (row.resident ? "are there" : row.loading ? "on their way" : "are not there") },
      { title: "EXEC lane busy for", kind: "number", text: (row) => ms(row.exec_busy_ns / 1e6), share: (row) => row.exec_busy_ns / data.slo_ns },
      { title: "load lane busy for", kind: "number", text: (row) => ms(row.load_busy_ns / 1e6), share: (row) => row.load_busy_ns / data.slo_ns },
      { title: "free pages", kind: "number", text: (row) => `${count(row.num_free_pages)} of ${count(row.num_pages)}` },
    ],
    { key: (row) => row.worker_id },
  );
  table.update(data.lanes);
  return table.root;
}
