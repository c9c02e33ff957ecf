// Time series, drawn by uPlot; and the same as a table, for whoever does not see them.

import { el, percent, rate, say, setAttribute } from "./dom.js";

const SHOWN_S = 300;
const SHOWN_LEAST_S = 60;
const HEIGHT = 210;
// Seconds without a look that are a gap.
const GAP_S = 6;
// Lines of the table: one each ten seconds.
const TABLE_STEP_S = 10;

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const charts = new Set();

/** Draw all charts again: the theme has changed. */
export function redraw() {
  for (const chart of charts) chart.build();
}

const probe = el("span", { hidden: true });

/** What a property of the style means now, in words that a canvas knows. */
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

export class TimeChart {
  /** series: {label, colour: name of a property, width, dash, value: point => number | null}; `limit`: where a line is. */
  constructor(title, series, { say: words, format, limit, limitLabel = "", band } = {}) {
    this.series = series;
    this.format = format;
    this.limit = limit;
    this.limitLabel = limitLabel;
    this.band = band;
    this.times = [];
    this.columns = series.map(() => []);
    this.legend = el("ul", { class: "legend", "aria-hidden": "true" });
    this.values = series.map((each) => {
      const value = el("b");
      const swatch = el("i");
      swatch.style.setProperty("--swatch", `var(${each.colour})`);
      if (each.dash) swatch.className = "dashed";
      this.legend.append(el("li", {}, swatch, ` ${each.label} `, value));
      return value;
    });
    if (limit !== undefined) {
      const swatch = el("i", { class: "limit" });
      this.legend.append(el("li", {}, swatch, ` ${limitLabel}`));
    }
    this.period = el("li", { class: "period" });
    this.legend.append(this.period);
    this.plot = el("div", { class: "plot", role: "img", "aria-label": `${title}: no figures yet` });
    this.body = el("tbody");
    const head = el("tr", {}, el("th", { scope: "col", text: "time" }));
    for (const each of series) head.append(el("th", { scope: "col", class: "number", text: each.label }));
    const table = el("table", {}, el("caption", { text: title }), el("thead", {}, head), this.body);
    this.details = el("details", {}, el("summary", { text: "As a table" }), el("div", { class: "scroll short", tabindex: "0", role: "region", "aria-label": `${title}, as a table` }, table));
    this.details.addEventListener("toggle", () => this.tabulate());
    this.note = el("p", { class: "dim none", text: "No figures yet: they come with the first requests." });
    this.title = title;
    this.words = words;
    this.root = el("figure", { class: "chart" }, el("figcaption", { text: title }), this.legend, this.plot, this.note, this.details);
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(this.plot);
    charts.add(this);
    this.build();
  }

  destroy() {
    this.resized.disconnect();
    charts.delete(this);
    this.uplot?.destroy();
  }

  /** Take in points of before what was taken in so far. */
  addPast(points) {
    const { times, columns } = this;
    this.times = [];
    this.columns = columns.map(() => []);
    for (const point of points) if (times.length === 0 || point.at_s < times[0]) this.add(point.at_s, point);
    const gap = times.length && this.times.length && times[0] - this.times.at(-1) > GAP_S;
    this.times.push(...(gap ? [(times[0] + this.times.at(-1)) / 2] : []), ...times);
    this.columns.forEach((column, index) => column.push(...(gap ? [null] : []), ...columns[index]));
    this.show();
  }

  /** Take in a point; those must come in order. */
  add(at_s, point) {
    const last = this.times.at(-1);
    if (last !== undefined && at_s <= last) return;
    if (last !== undefined && at_s - last > GAP_S) {
      this.times.push((at_s + last) / 2);
      for (const column of this.columns) column.push(null);
    }
    this.times.push(at_s);
    this.series.forEach((each, index) => this.columns[index].push(each.value(point) ?? null));
    while (this.times[0] < at_s - SHOWN_S) {
      this.times.shift();
      for (const column of this.columns) column.shift();
    }
  }

  /** Show the data; the legend shows a whole period, named in words, unless the pointer is at a time. */
  show(whole = this.whole, period = this.wholePeriod) {
    this.whole = whole;
    this.wholePeriod = period;
    this.note.hidden = this.columns.some((column) => column.some((value) => value !== null));
    this.uplot.setData([this.times, ...this.columns]);
    this.tell(this.uplot.cursor.idx);
    const told = this.words?.(whole ? this.series.map((each) => each.value(whole) ?? null) : this.columns.map((column) => column.at(-1) ?? null)) ?? "";
    setAttribute(this.plot, "aria-label", `${this.title}: ${told || "no figures yet"}`);
    if (this.details.open) this.tabulate();
  }

  tell(chosen) {
    const index = chosen ?? this.times.length - 1;
    const isWhole = (chosen === null || chosen === undefined) && this.whole !== undefined;
    say(this.period, isWhole ? `(${this.wholePeriod})` : this.times[index] ? `(at ${clock.format(1000 * this.times[index])})` : "");
    this.columns.forEach((column, number) => {
      const value = isWhole ? this.series[number].value(this.whole) : column[index];
      say(this.values[number], value === null || value === undefined ? "-" : this.format(value));
    });
  }

  tabulate() {
    if (!this.details.open) return;
    const lines = [];
    let next = Infinity;
    for (let index = this.times.length - 1; index >= 0; index -= 1) {
      if (this.times[index] > next || this.columns.every((column) => column[index] === null)) continue;
      next = this.times[index] - TABLE_STEP_S;
      const line = el("tr", {}, el("th", { scope: "row", text: clock.format(1000 * this.times[index]) }));
      for (const column of this.columns) line.append(el("td", { class: "number", text: column[index] === null ? "-" : this.format(column[index]) }));
      lines.push(line);
    }
    this.body.replaceChildren(...lines);
  }

  resize() {
    const width = this.plot.clientWidth;
    if (width > 0) this.uplot.setSize({ width, height: HEIGHT });
  }

  build() {
    this.uplot?.destroy();
    const ink = colour("--dim");
    const line = { stroke: ink, grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    const options = {
      width: this.plot.clientWidth || 400,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      padding: [8, 30, 0, 0],
      scales: {
        x: { range: (_, from, to) => [Math.min(from ?? 0, (to ?? 0) - SHOWN_LEAST_S), to ?? SHOWN_LEAST_S] },
        y: { range: (_, _least, most) => [0, 1.08 * Math.max(most ?? 0, this.limit ?? 0, 1e-3)] },
      },
      axes: [
        { ...line, space: 90, values: (_, splits) => splits.map((at) => clock.format(1000 * at)) },
        { ...line, size: 64, values: (_, splits) => splits.map((value) => this.format(value)) },
      ],
      series: [
        {},
        ...this.series.map((each) => ({
          stroke: colour(each.colour),
          width: each.width ?? 2,
          dash: each.dash,
          points: { show: false },
        })),
      ],
      bands: this.band ? [{ series: this.band.series, fill: colour(this.band.colour) }] : [],
      hooks: {
        draw: [(plot) => this.drawLimit(plot)],
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
      },
    };
    this.uplot = new uPlot(options, [this.times, ...this.columns], this.plot);
  }

  drawLimit(plot) {
    if (this.limit === undefined) return;
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(this.limit, "y", true));
    ctx.save();
    ctx.strokeStyle = colour("--ink");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }
}

export function goodputChart() {
  return new TimeChart(
    "Requests per second, each second: asked for, and answered in time",
    [
      { label: "asked for", colour: "--bad", dash: [6, 4], value: (point) => point.asked_rps },
      { label: "in time", colour: "--good", width: 2.5, value: (point) => point.good_rps },
    ],
    {
      format: (value) => rate(value),
      band: { series: [1, 2], colour: "--bad-wash" },
      say: ([asked, good]) => (asked === null ? "" : `${rate(asked)} asked for, ${rate(good)} answered in time`),
    },
  );
}

export function shareChart() {
  return new TimeChart(
    "Latency of what is answered, each second, as a part of its SLO",
    [
      { label: "p99", colour: "--good", width: 2.5, value: (point) => point.p99_share },
      { label: "median", colour: "--second", dash: [6, 4], value: (point) => point.p50_share },
    ],
    {
      format: (value) => percent(value),
      limit: 1,
      limitLabel: "SLO",
      say: ([p99, p50]) => (p99 === null ? "" : `p99 ${percent(p99)} of the SLO, median ${percent(p50)}`),
    },
  );
}
