// How the whole is.

import { goodputChart, shareChart } from "./charts.js";
import { count, el, glossary, lastSeconds, ms, percent, rate, reasons, sum, Table, Tile, tiles } from "./dom.js";
import { look } from "./live.js";
import { modelTable } from "./models.js";

export function overview() {
  const good = new Tile("answered in time");
  const refused = new Tile("refused");
  const latency = new Tile("latency (p99)");
  const waiting = new Tile("waiting now");
  const pages = new Tile("pages in use");
  const wanted = new Tile("workers");
  const throughput = goodputChart();
  const latencies = shareChart();
  const workers = workerTable();
  const byName = new Intl.Collator("en", { numeric: true }).compare;
  const models = modelTable("Models, the busiest first");
  const root = el(
    "div",
    {},
    el("h1", { text: "Overview" }),
    tiles(good, refused, latency, waiting, pages, wanted),
    el("div", { class: "pair" }, throughput.root, latencies.root),
    workers.root,
    models.root,
    glossary(),
  );
  const charts = [throughput, latencies];
  return {
    title: "Overview",
    root,
    path: "/live/overview",
    started(signal) {
      look("/look/history", signal)
        .then((past) => charts.forEach((chart) => chart.addPast(past.seconds)))
        .catch(() => {}); // The stream says what is wrong.
    },
    update(data) {
      const { recent } = data;
      const last = lastSeconds(data.over_s);
      const lastOfKinds = lastSeconds(data.kinds_over_s);
      good.update(recent.asked_rps ? percent(recent.good_rps / recent.asked_rps) : "-", `${rate(recent.good_rps)} of ${rate(recent.asked_rps)} requests/s`, recent.good_rps < 0.99 * recent.asked_rps ? "bad" : "good", last);
      const lost = sum(recent.refused_rps);
      refused.update(`${rate(lost)}/s`, reasons(recent.refused_rps) || "nothing", lost > 0.01 * recent.asked_rps ? "bad" : "", last);
      latency.update(recent.good_rps ? ms(recent.p99_ms) : "-", recent.good_rps ? `${percent(recent.p99_share)} of its SLO; median ${ms(recent.p50_ms)}` : "no answer", "", last);
      waiting.update(count(data.waiting), "requests");
      const total = (field) => data.workers.reduce((all, row) => all + row[field], 0);
      const evictions = data.kinds.reduce((all, kind) => all + kind.evictions_per_s, 0);
      const homeless = data.kinds.reduce((all, kind) => all + kind.dropped_rps.pages, 0);
      pages.update(total("pages") ? percent(1 - total("free") / total("pages")) : "-", `${rate(evictions)} evictions/s (${lastOfKinds})`, homeless > 0.01 * recent.asked_rps && homeless > 0.1 && lost > 0.01 * recent.asked_rps ? "bad" : "", "now");
      const have = data.kinds.reduce((total, kind) => total + kind.workers, 0);
      const want = data.kinds.reduce((total, kind) => total + kind.wanted, 0);
      wanted.update(count(have), want > have ? `${count(want)} are wanted` : "as many as are wanted", have === 0 || (want > have && lost > 0.01 * recent.asked_rps) ? "bad" : want > have ? "warn" : "", "now");
      for (const chart of charts) {
        chart.add(data.now_s, data.second);
        chart.show(recent, last);
      }
      workers.name(`Workers; EXEC, loading and their speed: ${data.workers.length ? lastSeconds(data.workers[0].over_s || data.over_s) : last}, pages and plans: now`);
      workers.update([...data.workers].sort((a, b) => byName(a.id, b.id)));
      models.name(`Models, the busiest first (${last})`);
      models.update(data.models);
    },
    destroy: () => charts.forEach((chart) => chart.destroy()),
  };
}

function workerTable() {
  return new Table(
    "Workers",
    [
      { title: "worker", text: (row) => row.id, href: () => "#/timeline" },
      { title: "kind", text: (row) => row.kind },
      { title: "EXEC busy", help: "part of the time in which it ran batches", kind: "number", text: (row) => percent(row.exec_busy), share: (row) => row.exec_busy },
      { title: "LOAD busy", help: "part of the time in which it copied weights onto the GPU", kind: "number", text: (row) => percent(row.load_busy), share: (row) => row.load_busy },
      { title: "pages in use", kind: "number", text: (row) => `${row.pages - row.free} of ${row.pages}`, share: (row) => (row.pages - row.free) / row.pages },
      { title: "planned ahead", help: "how long it needs for what it was sent and has not run yet", kind: "number", text: (row) => ms(row.ahead_ms) },
      { title: "EXECs take", help: "as many times as long as the median of the other workers of its kind, for the same models and batch sizes; one alone is compared with what was predicted", kind: "number", text: (row) => (row.infers ? `${row.slower.toFixed(2)} × ${row.against === "others" ? "others' median" : "predicted"}` : "-"), tone: (row) => (row.slow ? "warn" : "") },
      { title: "state", text: state, tone: (row) => (state(row) === "ready" ? "" : "warn") },
    ],
    { key: (row) => row.id, empty: "No worker is connected." },
  );
}

function state(row) {
  if (row.complaints.length) return `unwell: ${row.complaints[0]}`;
  if (row.suspended.length) return `avoided for ${row.suspended[0]}`;
  return row.state;
}
