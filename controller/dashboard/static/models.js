// Models: the busiest, and one of them.

import { goodputChart, shareChart } from "./charts.js";
import { count, el, lastSeconds, named, ms, percent, rate, reasons, sum, Table, Tile, tiles } from "./dom.js";
import { look } from "./live.js";

export function modelTable(caption) {
  return new Table(
    caption,
    [
      { title: "model", text: (row) => row.name, href: (row) => `#/model/${encodeURIComponent(row.name)}` },
      { title: "asked", kind: "number", text: (row) => `${rate(row.asked_rps)}/s` },
      { title: "in time", kind: "number", text: (row) => percent(row.good), share: (row) => row.good ?? 0, tone: (row) => (row.good !== null && row.good < 0.99 ? "bad" : "") },
      { title: "median", kind: "number", text: (row) => ms(row.p50_ms) },
      { title: "p99", kind: "number", text: (row) => ms(row.p99_ms) },
      { title: "p99 of its SLO", kind: "number", text: (row) => percent(row.p99_share), share: (row) => row.p99_share ?? 0 },
      { title: "waiting", kind: "number", text: (row) => count(row.waiting) },
      { title: "copies", kind: "number", text: (row) => count(row.copies) },
      { title: "refused", text: (row) => reasons(row.refused_rps) || "-" },
    ],
    { empty: "No request has ended in the last seconds." },
  );
}

export function models() {
  const table = modelTable("Models, the busiest first");
  const input = el("input", { id: "model-name", type: "text", autocomplete: "off", spellcheck: "false", required: true });
  const form = el("form", { class: "ask" }, el("label", { for: "model-name", text: "Any other model, by name" }), input, el("button", { type: "submit", text: "Show" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = `#/model/${encodeURIComponent(input.value.trim())}`;
  });
  const totals = el("p");
  return {
    title: "Models",
    root: el("div", {}, el("h1", { text: "Models" }), totals, form, table.root),
    path: "/live/models",
    update(data) {
      totals.textContent = `${count(data.num_ready)} of ${count(data.num_models)} are ready${data.num_unfit ? `, ${count(data.num_unfit)} cannot be served` : ""}.`;
      table.name(`Models that were asked for, the busiest first (${lastSeconds(data.over_s)})`);
      table.update(data.models);
    },
  };
}

export function model(name) {
  const good = new Tile("answered in time");
  const refused = new Tile("refused");
  const latency = new Tile("latency (p99)");
  const waiting = new Tile("waiting now");
  const copies = new Tile("copies on workers");
  const throughput = goodputChart();
  const latencies = shareChart();
  const facts = el("dl", { class: "facts" });
  const estimates = new Table(
    "What a batch is predicted to take",
    [
      { title: "batch size", text: (row) => `${row[0]}` },
      { title: "EXEC", kind: "number", text: (row) => ms(row[1]) },
      { title: "per row", kind: "number", text: (row) => ms(row[1] / row[0]) },
    ],
    { key: (row) => row[0], empty: "No worker has it ready." },
  );
  const last = requestTable("Its last requests");
  const charts = [throughput, latencies];
  return {
    title: name,
    root: el(
      "div",
      {},
      el("h1", { text: name }),
      tiles(good, refused, latency, waiting, copies),
      el("div", { class: "pair" }, throughput.root, latencies.root),
      el("div", { class: "pair" }, facts, estimates.root),
      last.root,
    ),
    path: `/live/model?name=${encodeURIComponent(name)}`,
    started(signal) {
      look(`/look/history?name=${encodeURIComponent(name)}`, signal)
        .then((past) => charts.forEach((chart) => chart.addPast(past.seconds)))
        .catch(() => {}); // The stream says what is wrong.
    },
    update(data) {
      const told = data.model;
      const recent = told.recent ?? { asked_rps: 0, good_rps: 0, good: null, refused_rps: {}, p50_ms: null, p99_ms: null };
      const period = lastSeconds(data.over_s);
      good.update(percent(recent.good), `${rate(recent.good_rps)} of ${rate(recent.asked_rps)} requests/s`, recent.good !== null && recent.good < 0.99 ? "bad" : "good", period);
      refused.update(`${rate(sum(recent.refused_rps))}/s`, reasons(recent.refused_rps) || "nothing", recent.good !== null && recent.good < 0.99 ? "bad" : "", period);
      latency.update(ms(recent.p99_ms), recent.p99_share ? `${percent(recent.p99_share)} of its SLO; median ${ms(recent.p50_ms)}` : "no answer", "", period);
      waiting.update(count(told.waiting), "requests");
      copies.update(count(told.resident_on.length), told.pinned ? "pinned: its weights stay" : "", "", "now");
      throughput.add(data.now_s, recent);
      throughput.show(recent, period);
      latencies.add(data.now_s, recent);
      latencies.show(recent, period);
      tell(facts, [
        ["state", told.reason ? `${told.state}: ${told.reason}` : told.state],
        ["version", told.version],
        ["SLO where a request says none", ms(told.slo_ms)],
        ["weights", `${(told.weights_bytes / 2 ** 20).toFixed(1)} MiB in ${count(told.num_pages)} pages, loaded in ${ms(told.load_ms)}`],
        ["weights are on", told.resident_on.join(", ") || "no worker"],
        ["since the start", `${count(told.requests)} requests, ${count(told.answered)} answered in time; ${named(told.counters)}`],
        ["refused so far", Object.entries(told.refusals).map(([reason, number]) => `${count(number)} ${reason}`).join(", ") || "none"],
        ["rows run one by one", told.one_by_one || "no"],
      ]);
      estimates.update(told.exec_ms);
      last.update(told.last);
    },
    destroy: () => charts.forEach((chart) => chart.destroy()),
  };
}

/** Fill a list of names and what stands for them. */
export function tell(list, pairs) {
  const wanted = pairs.flatMap(([name, text]) => [name, text]);
  if (list.dataset.told === wanted.join("\n")) return;
  list.dataset.told = wanted.join("\n");
  list.replaceChildren(...pairs.map(([name, text]) => el("div", {}, el("dt", { text: name }), el("dd", { text }))));
}

export function requestTable(caption) {
  return new Table(
    caption,
    [
      { title: "request", text: (row) => row.id, href: (row) => `#/request/${row.id}` },
      { title: "outcome", text: (row) => (row.outcome === "OK" ? (row.cold ? "in time, cold" : "in time") : row.outcome), tone: (row) => (row.outcome === "OK" ? "" : "bad") },
      { title: "took", kind: "number", text: (row) => ms(row.left - row.arrived) },
      { title: "SLO", kind: "number", text: (row) => ms(row.deadline - row.arrived) },
      { title: "worker", text: (row) => row.worker ?? "-" },
      { title: "batch", kind: "number", text: (row) => (row.batch ? `${row.rows} of ${row.batch}` : "-") },
    ],
    { key: (row) => row.id, empty: "None in the last seconds." },
  );
}
