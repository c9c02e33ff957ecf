// The lanes of the last moments: windows, predictions, what ran, and the requests that it was for.

import { colour } from "./charts.js";
import { count, el, glossary, ms, say, setAttribute, Table } from "./dom.js";

const SPANS_MS = [100, 250, 500, 1000, 2000];
const LEFT = 150;
const RIGHT = 14;
const LANE = { exec: 26, load: 18 };
const GAP = 16;
const REQUESTS_HIGH = 120;
const REQUEST_HIGH = 5;
const AXIS_HIGH = 26;
const WORKERS_MAX = 8;
const TABLE_ROWS = 40;
// Narrower bars have no room for a name that is cut.
const NAME_LEAST = 26;

const byName = new Intl.Collator("en", { numeric: true }).compare;

export function timeline() {
  const span = el("select", { id: "span" });
  for (const each of SPANS_MS) span.append(el("option", { value: `${each}`, text: `${each} ms` }));
  span.value = "1000";
  const whose = el("select", { id: "whose" }, el("option", { value: "", text: "all workers" }));
  const pause = el("button", { type: "button", "aria-pressed": "false", text: "Pause" });
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "Timeline of the lanes", "aria-describedby": "told" });
  const told = el("p", { id: "told", class: "told", "aria-live": "polite", text: "Choose an action with the mouse, or with the arrow keys on the picture: it pauses, and says what was planned and what ran." });
  const scope = el("p", { class: "dim" });
  const table = actionTable();
  const root = el(
    "div",
    {},
    el("h1", { text: "Timeline" }),
    el("div", { class: "ask" }, el("label", { for: "span", text: "Shown" }), span, el("label", { for: "whose", text: "of" }), whose, pause),
    el("figure", {}, legend(), canvas, told, scope),
    table.root,
    glossary(),
  );
  let data = null;
  let chosen = null;
  let paused = false;
  let places = [];

  function shown() {
    const lanes = whose.value ? [whose.value] : [...data.lanes].sort(byName).slice(0, WORKERS_MAX);
    const from = -Number(span.value);
    const actions = data.actions.filter((each) => lanes.includes(each.worker) && end(each) >= from);
    return { lanes, from, actions };
  }

  function draw() {
    if (data === null) return;
    const { lanes, from, actions } = shown();
    const drawn = paint(canvas, data, lanes, from, actions, chosen);
    places = drawn.places;
    const failed = actions.filter((each) => each.error).length;
    setAttribute(canvas, "aria-label", `Timeline of ${lanes.length} workers: ${actions.length} actions in ${span.value} ms, ${failed} of them failed${lanes.filter((worker) => data.slow[worker]).map((worker) => `; ${worker} is slow`).join("")}; the table below lists them`);
    const more = data.lanes.length > lanes.length && !whose.value ? `; ${data.lanes.length - lanes.length} more workers can be chosen` : "";
    const hidden = drawn.numHidden ? ` ${count(drawn.numHidden)} requests are not drawn: there is no room.` : "";
    say(scope, `${data.over_ms < Number(span.value) - 1 ? `So much has happened that the picture reaches ${ms(data.over_ms)} back${more}.` : `Each bar is an action where it ran${more}.`}${hidden}`);
    // Readers look for what failed.
    table.update([...actions.filter((each) => each.error), ...actions.filter((each) => !each.error)].slice(0, TABLE_ROWS));
  }

  function setPaused(value) {
    paused = value;
    say(pause, paused ? "Go on" : "Pause");
    setAttribute(pause, "aria-pressed", `${paused}`);
  }

  function choose(action) {
    chosen = action.id;
    setPaused(true);
    say(told, describe(action));
    draw();
  }

  pause.addEventListener("click", () => {
    setPaused(!paused);
    if (!paused) chosen = null;
    draw();
  });
  span.addEventListener("change", draw);
  whose.addEventListener("change", draw);
  canvas.addEventListener("click", (event) => {
    const { offsetX: x, offsetY: y } = event;
    const hit = places.findLast((place) => x >= place.left - 2 && x <= place.right + 2 && y >= place.top && y <= place.bottom);
    if (hit) choose(hit.action);
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
    if (!step || data === null) return;
    event.preventDefault();
    // The newest come first.
    const { actions } = shown();
    const at = actions.findIndex((each) => each.id === chosen);
    const next = actions[at < 0 ? 0 : Math.min(Math.max(at + step, 0), actions.length - 1)];
    if (next) choose(next);
  });
  const resized = new ResizeObserver(draw);
  resized.observe(root);
  return {
    title: "Timeline",
    root,
    path: "/live/timeline",
    restyled: draw,
    destroy: () => resized.disconnect(),
    update(news) {
      const known = [...whose.options].slice(1).map((option) => option.value);
      for (const worker of news.lanes) if (!known.includes(worker)) whose.append(el("option", { value: worker, text: worker }));
      if (paused && data !== null) return;
      data = news;
      draw();
    },
  };
}

function legend() {
  const item = (kind, text) => el("li", {}, el("i", { class: `key ${kind}` }), ` ${text}`);
  return el(
    "ul",
    { class: "legend" },
    item("exec", "EXEC"),
    item("load", "LOAD of weights"),
    item("predicted", "as predicted"),
    item("window", "window in which it may begin"),
    item("failed", "failed, or too late: it did not run (first in the table)"),
    item("request", "request, from arrival to answer"),
    el("li", {}, el("i", { class: "key refused" }), el("span", { class: "cross", text: "×" }), " request that was refused, at the ×"),
    item("deadline", "deadline"),
  );
}

function begin(action) {
  return action.ran ? action.ran[0] : action.predicted[0];
}

function end(action) {
  return action.ran ? action.ran[1] : action.predicted[1];
}

/** Draw; gives where each action is. */
function paint(canvas, data, lanes, from, actions, chosen) {
  const ratio = devicePixelRatio;
  const laneHigh = LANE.exec + LANE.load + GAP;
  const width = canvas.parentElement.clientWidth - 28;
  const height = AXIS_HIGH + REQUESTS_HIGH + GAP + Math.max(lanes.length, 1) * laneHigh;
  if (width <= 0) return { places: [], numHidden: 0 };
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = "12px system-ui, sans-serif";
  ctx.textBaseline = "middle";
  const inks = Object.fromEntries(["--ink", "--dim", "--grid", "--good", "--bad", "--warn", "--second", "--good-wash", "--bad-wash", "--panel", "--bg"].map((name) => [name.slice(2), colour(name)]));
  const x = (at) => LEFT + (1 - at / from) * (width - LEFT - RIGHT);
  // Time.
  for (let tick = 0; tick <= 5; tick += 1) {
    const at = from * (1 - tick / 5);
    ctx.fillStyle = inks.grid;
    ctx.fillRect(Math.round(x(at)), AXIS_HIGH - 6, 1, height);
    ctx.fillStyle = inks.dim;
    ctx.textAlign = tick === 5 ? "right" : "center";
    ctx.fillText(tick === 5 ? "now" : `${Math.round(at)} ms`, x(at) + (tick === 5 ? RIGHT : 0), 10);
  }
  ctx.save();
  ctx.beginPath();
  ctx.rect(LEFT, 0, width - LEFT, height);
  ctx.clip();
  const numHidden = requests(ctx, data.requests, from, x, inks);
  const top = AXIS_HIGH + REQUESTS_HIGH + GAP;
  const places = [];
  // In order of their begin, so that later ones are on top.
  for (const action of [...actions].reverse()) {
    const y = top + lanes.indexOf(action.worker) * laneHigh + (action.lane === "exec" ? 0 : LANE.exec + 3);
    const high = LANE[action.lane] - 3;
    places.push({ action, top: y, bottom: y + high, ...bar(ctx, action, x, y, high, inks, action.id === chosen) });
  }
  ctx.restore();
  ctx.textAlign = "right";
  ctx.fillStyle = inks.ink;
  ctx.fillText("requests", LEFT - 12, AXIS_HIGH + REQUESTS_HIGH / 2);
  if (numHidden) {
    ctx.fillStyle = inks.dim;
    ctx.fillText(`${count(numHidden)} not drawn`, LEFT - 12, AXIS_HIGH + REQUESTS_HIGH / 2 + 16, LEFT - 16);
  }
  lanes.forEach((worker, index) => {
    const y = top + index * laneHigh;
    ctx.fillStyle = inks.grid;
    ctx.fillRect(0, y - GAP / 2, width, 1);
    const slow = data.slow[worker];
    ctx.fillStyle = slow ? inks.warn : inks.ink;
    ctx.fillText(slow ? `◆ ${slow.toFixed(1)} × slower ${short(worker)} EXEC` : `${short(worker)} EXEC`, LEFT - 12, y + LANE.exec / 2, LEFT - 16);
    ctx.fillStyle = inks.dim;
    ctx.fillText("LOAD", LEFT - 12, y + LANE.exec + LANE.load / 2, LEFT - 16);
  });
  return { places, numHidden };
}

function short(name) {
  return name.length > 14 ? `${name.slice(0, 13)}…` : name;
}

/** Draw requests in as few rows as they fit into without touching each other; gives how many have no room. */
function requests(ctx, all, from, x, inks) {
  const free = new Array(Math.floor(REQUESTS_HIGH / REQUEST_HIGH)).fill(-Infinity);
  let numHidden = 0;
  const ordered = all.filter((each) => each.left >= from).sort((a, b) => a.arrived - b.arrived);
  for (const each of ordered) {
    const left = x(each.arrived);
    const right = Math.max(x(each.left), left + 2);
    const row = free.findIndex((until) => until < left - 2);
    if (row < 0) {
      numHidden += 1;
      continue;
    }
    free[row] = right;
    const y = AXIS_HIGH + row * REQUEST_HIGH;
    const good = each.outcome === "OK";
    ctx.fillStyle = good ? inks.good : inks.bad;
    ctx.fillRect(left, y, right - left, good ? 2 : 3);
    if (!good) cross(ctx, right, y + 1.5, inks.bad);
    if (each.deadline <= 0) {
      ctx.fillStyle = inks.ink;
      ctx.fillRect(x(each.deadline), y - 1, 1.5, 4);
    }
  }
  return numHidden;
}

function cross(ctx, x, y, ink) {
  ctx.strokeStyle = ink;
  ctx.lineWidth = 1.5;
  ctx.beginPath();
  ctx.moveTo(x - 2.5, y - 2.5);
  ctx.lineTo(x + 2.5, y + 2.5);
  ctx.moveTo(x - 2.5, y + 2.5);
  ctx.lineTo(x + 2.5, y - 2.5);
  ctx.stroke();
}

/** Draw an action; gives its left and right end. */
function bar(ctx, action, x, y, high, inks, isChosen) {
  const left = x(begin(action));
  const right = Math.max(x(end(action)), left + 1.5);
  const ink = action.error ? inks.bad : action.lane === "exec" ? inks.good : inks.second;
  if (action.earliest !== null) {
    // The window, as a bracket below.
    const [from, to] = [x(action.earliest), x(Math.min(action.latest, 0))];
    ctx.strokeStyle = isChosen ? inks.ink : inks.dim;
    ctx.lineWidth = isChosen ? 2 : 1;
    ctx.beginPath();
    ctx.moveTo(from, y + high - 1);
    ctx.lineTo(from, y + high + 2.5);
    ctx.lineTo(to, y + high + 2.5);
    if (action.latest <= 0) ctx.lineTo(to, y + high - 1);
    ctx.stroke();
  }
  if (action.ran) {
    ctx.fillStyle = ink;
    ctx.fillRect(left, y, right - left - 0.5, high);
  }
  // As predicted, as a frame.
  const [from, to] = action.predicted.map(x);
  ctx.strokeStyle = action.error ? inks.bad : inks.ink;
  ctx.setLineDash(action.error ? [3, 2] : []);
  ctx.lineWidth = 1;
  ctx.strokeRect(from, y - 2, Math.max(to - from, 1.5), high + 2);
  ctx.setLineDash([]);
  if (isChosen) {
    ctx.strokeStyle = inks.ink;
    ctx.lineWidth = 3;
    ctx.strokeRect(left - 3, y - 5, right - left + 6, high + 10);
  }
  const whole = action.lane === "exec" ? `${action.model} ×${action.requests}` : action.model;
  const room = right - left - 6;
  const label = [whole, action.model].find((text) => ctx.measureText(text).width < room) ?? (room + 6 >= NAME_LEAST ? cut(ctx, action.model, room) : "");
  if (action.ran && label) {
    ctx.fillStyle = inks.bg;
    ctx.textAlign = "left";
    ctx.fillText(label, left + 4, y + high / 2 + 0.5);
  }
  return { left: Math.min(left, from), right: Math.max(right, to) };
}

/** As much of a name as there is room for. */
function cut(ctx, name, room) {
  let length = name.length - 1;
  while (length > 1 && ctx.measureText(`${name.slice(0, length)}…`).width > room) length -= 1;
  return length > 1 ? `${name.slice(0, length)}…` : "";
}

function describe(action) {
  const what = action.lane === "exec" ? `EXEC of ${action.model} for ${action.requests} request${action.requests === 1 ? "" : "s"} in batches of ${action.batch}` : `LOAD of ${action.model}`;
  const took = action.ran ? `ran ${ms(action.ran[1] - action.ran[0])}` : "did not run";
  const late = action.ran ? action.ran[0] - action.predicted[0] : 0;
  const began = action.ran ? `, and began ${ms(Math.abs(late))} ${late < 0 ? "before" : "after"} it was predicted to` : "";
  const window = action.earliest === null ? "" : ` Its window was ${ms(action.latest - action.earliest)} long.`;
  return `Action ${action.id} on ${action.worker}: ${what}. It ${took}, was predicted to take ${ms(action.predicted[1] - action.predicted[0])}${began}.${window}${action.error ? ` It failed: ${action.error}.` : ""}`;
}

function actionTable() {
  return new Table(
    "Actions of the picture: those that failed, then the newest",
    [
      { title: "action", text: (row) => `${row.id}` },
      { title: "worker", text: (row) => row.worker },
      { title: "lane", text: (row) => row.lane.toUpperCase() },
      { title: "model", text: (row) => row.model, href: (row) => `#/model/${encodeURIComponent(row.model)}` },
      { title: "requests", kind: "number", text: (row) => (row.lane === "exec" ? `${row.requests} of ${row.batch}` : "-") },
      { title: "predicted", kind: "number", text: (row) => ms(row.predicted[1] - row.predicted[0]) },
      { title: "ran", kind: "number", text: (row) => (row.ran ? ms(row.ran[1] - row.ran[0]) : "-") },
      { title: "window", help: "how long the time was in which it might begin", kind: "number", text: (row) => (row.earliest === null ? "-" : ms(row.latest - row.earliest)) },
      { title: "error", text: (row) => row.error || "-", tone: (row) => (row.error ? "bad" : "") },
    ],
    { key: (row) => row.id, empty: "No action has ended in the time shown." },
  );
}
