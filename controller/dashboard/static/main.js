// Which page is shown, what the server says of it, and whether it still says anything.

import { redraw } from "./charts.js";
import { el, say, setAttribute } from "./dom.js";
import { follow, keepKey } from "./live.js";
import { applications } from "./applications.js";
import { model, models } from "./models.js";
import { overview } from "./overview.js";
import { pages } from "./pages.js";
import { request } from "./request.js";
import { timeline } from "./timeline.js";

/** By the first word of the fragment: each makes {title, root, path, update(data), destroy(), started(signal)}. */
const PAGES = { "": overview, timeline, pages, models, model, applications, request };

const main = document.getElementById("main");
const banner = document.getElementById("banner");
const finding = document.getElementById("finding");
const words = document.getElementById("words");
const others = document.getElementById("others");
const announced = document.getElementById("announced");
const server = document.getElementById("server");
const door = document.getElementById("door");

let leaving = new AbortController();
let page = null;
let saidAt = null;

// --- where we are -----------------------------------------------------------------------------------

/** `#/model/a%2Fb?context=c` -> ["model", "a/b", {context: "c"}] */
function where() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const slash = path.indexOf("/");
  const first = slash < 0 ? path : path.slice(0, slash);
  const rest = slash < 0 ? "" : path.slice(slash + 1);
  let name;
  try {
    name = decodeURIComponent(rest);
  } catch {
    name = rest; // Typed by hand.
  }
  return [first, name, Object.fromEntries(new URLSearchParams(query))];
}

function go({ focus }) {
  leaving.abort();
  leaving = new AbortController();
  page?.destroy?.();
  const [first, name, query] = where();
  page = (Object.hasOwn(PAGES, first) ? PAGES[first] : overview)(name, query);
  document.title = `${page.title} - Clockwright`;
  for (const link of document.querySelectorAll("nav a")) {
    const target = link.hash.slice(2);
    const here = target === first || (target === "models" && first === "model");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren(page.root);
  setAttribute(main, "aria-busy", "true");
  if (focus) {
    // A screen reader says where it is now; the next Tab is on the page.
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  attend();
}

function attend() {
  const { signal } = leaving;
  page.started?.(signal, denied);
  follow(page.path, signal, {
    data: (data) => heard(data),
    gone: (why, pause) => gone(why, pause),
    denied: (error) => denied(error),
  });
}

// --- what is heard ----------------------------------------------------------------------------------

function heard(data) {
  saidAt = Date.now();
  document.body.classList.remove("stale");
  setAttribute(main, "aria-busy", "false");
  main.hidden = data.standby !== undefined;
  if (main.hidden) {
    show("waiting", "STANDBY", data.standby);
    say(server, "");
    return;
  }
  if (data.error !== undefined) {
    show("waiting", "NOT THERE", data.error);
    return;
  }
  head(data);
  page.update(data);
}

function head(data) {
  // What is past comes last, and is nowhere the first thing to say.
  const first = data.findings.find((each) => !each.past);
  const more = data.findings.filter((each) => each !== first);
  const models = `${data.num_ready} of ${data.num_models} models ready`;
  if (first) show(data.findings.some((each) => each.harmful) ? "sick" : "warning", first.name.toUpperCase(), first.words, more);
  else if (!data.ready) show("waiting", "PREPARING", models, more);
  else if (data.idle) show("well", "IDLE", `${data.last_ago_s === null ? "no request has come yet" : `the last request was over ${age(data.last_ago_s)} ago, at ${new Date(1000 * (data.now_s - data.last_ago_s)).toLocaleTimeString("en-GB")}`}; nothing is wrong`, more);
  else show("well", "WELL", data.well, more);
  say(server, `${data.version}, ${data.policy}, up ${age(data.up_s)}, ${models}`);
}

function show(kind, name, text, more = []) {
  setAttribute(banner, "class", kind);
  say(finding, name);
  tellWords(words, text);
  // Figures change each second. A screen reader hears of it when something else is wrong, and what to do.
  const names = [name, ...more.filter((each) => !each.past).map((each) => each.name)].join(", ");
  if (announced.dataset.names !== names) {
    announced.dataset.names = names;
    say(announced, `${name}: ${text}`);
  }
  others.hidden = more.length === 0;
  const told = more.map((each) => `${each.past ? "before" : "also"} ${each.name}: ${each.words}`);
  if (others.dataset.told !== told.join("\n")) {
    others.dataset.told = told.join("\n");
    others.replaceChildren(
      ...told.map((line) => {
        const item = el("li");
        tellWords(item, line);
        return item;
      }),
    );
  }
}

/** Say it; options of commands stay on one line. */
function tellWords(element, text) {
  if (element.textContent === text) return;
  const parts = text.split(/(--[a-z][a-z-]*(?: \d+)?)/);
  element.replaceChildren(...parts.map((part, index) => (index % 2 ? el("code", { class: "whole", text: part }) : part)));
}

function gone(why, pause) {
  document.body.classList.add("stale");
  const since = saidAt === null ? "" : `; below is what it said at ${new Date(saidAt).toLocaleTimeString("en-GB")}`;
  show("gone", "DISCONNECTED", `the server is gone: ${why}. Trying again each ${Math.ceil(pause / 1000)} s${since}`);
}

function denied(error) {
  if (error.status === 403) {
    show("waiting", "NOT ALLOWED", error.message);
    return;
  }
  say(document.getElementById("door-words"), error.message);
  show("waiting", "A KEY, PLEASE", "this server knows its callers");
  if (!door.open) door.showModal();
}

door.addEventListener("close", () => {
  const key = document.getElementById("key");
  if (!key.value) return;
  keepKey(key.value);
  key.value = "";
  go({ focus: false });
});

function age(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (seconds >= size) return `${(seconds / size).toFixed(1)} ${unit}`;
  return `${Math.floor(seconds)} s`;
}

// --- theme ------------------------------------------------------------------------------------------

const THEMES = { "": "as the system", light: "light", dark: "dark" };
const themeButton = document.getElementById("theme");

function nameTheme() {
  say(themeButton, `Theme: ${THEMES[document.documentElement.dataset.theme ?? ""]}`);
}

themeButton.addEventListener("click", () => {
  const order = Object.keys(THEMES);
  const next = order[(order.indexOf(document.documentElement.dataset.theme ?? "") + 1) % order.length];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("theme", next);
  nameTheme();
  restyled();
});

function restyled() {
  redraw();
  page?.restyled?.();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyled);
nameTheme();

addEventListener("hashchange", () => go({ focus: true }));
// A hidden page costs the server nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) leaving.abort();
  else if (leaving.signal.aborted) {
    leaving = new AbortController();
    attend();
  }
});
go({ focus: false });
