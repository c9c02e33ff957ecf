// What became of one request, and why.

import { count, el, ms, percent, Table } from "./dom.js";
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
    root: el("div", {}, el("h1", { text: id ? `Request ${id}` : "What became of a request" }), form, place, recent.root),
    path: "/live/timeline",
    started(signal, denied) {
      if (!id) return;
      look(`/look/request?id=${encodeURIComponent(id)}`, signal)
        .then((data) => place.replaceChildren(data.error === undefined ? explained(data.request) : el("p", { class: "verdict", text: data.error })))
        .catch((error) => {
          if (error.status === 403) place.replaceChildren(el("p", { class: "verdict", text: error.message }));
          else if (error.status === 401) denied(error);
        });
    },
    update(data) {
      // What was refused is what somebody asks about.
      const refused = data.requests.filter((each) => each.outcome !== "OK" && each.outcome !== "CANCELLED");
      recent.update([...refused, ...data.requests.filter((each) => each.outcome === "OK")].slice(0, 15));
    },
  };
}

function explained(data) {
  const good = data.outcome === "OK";
  const verdict = el("p", { class: `verdict ${good ? "good" : "bad"}`, text: `${good ? "✓ answered in time" : data.outcome === "OPEN" ? "… still open" : `▲ ${data.outcome}`}: ${data.model_id}, ${ms(data.latency_ns / 1e6)} of an SLO of ${ms(data.slo_ns / 1e6)}` });
  const words = el("ul", { class: "words" }, ...data.words.map((text) => el("li", { text })));
  const root = el("section", { "aria-label": "Explanation" }, verdict, words);
  if (good) root.append(spent(data));
  if (data.lanes.length) root.append(lanes(data));
  const facts = el("dl", { class: "facts" });
  tell(facts, [
    ["model", data.model_id],
    ["its client's id", data.client_request_id || "none"],
    ["the server's number", `${data.request_id || "none: it was refused before it got one"}`],
    ["tenant", data.tenant || "none"],
    ["rows", count(data.rows)],
    ["weights at arrival", data.cold ? "nowhere: a cold start" : good ? "there" : "-"],
    ["came", `${ms(data.age_ns / 1e6)} ago`],
  ]);
  root.append(facts);
  return root;
}

/** Where the time went, as one bar up to the SLO. */
function spent(data) {
  const strip = el("div", { class: "strip spent", "aria-hidden": "true" });
  const rows = PARTS.map(([name, field]) => ({ name, ns: data[field] })).filter((part) => part.ns > 0);
  for (const { name, ns } of rows) {
    const part = el("span", { class: `part ${name.toLowerCase()}`, title: `${name}: ${ms(ns / 1e6)}`, text: ns > 0.07 * data.slo_ns ? name : "" });
    part.style.flexGrow = `${ns}`;
    strip.append(part);
  }
  const left = Math.max(data.slo_ns - data.latency_ns, 0);
  const rest = el("span", { class: "part free", title: `left of the SLO: ${ms(left / 1e6)}`, text: `${ms(left / 1e6)} left` });
  rest.style.flexGrow = `${left}`;
  strip.append(rest);
  const table = new Table("Where the time went", [
    { title: "part", text: (row) => row.name },
    { title: "time", kind: "number", text: (row) => ms(row.ns / 1e6) },
    { title: "of the latency", kind: "number", text: (row) => percent(row.ns / data.latency_ns), share: (row) => row.ns / data.latency_ns },
  ]);
  table.update(rows);
  return el("div", {}, strip, table.root);
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
