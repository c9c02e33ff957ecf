import { el } from "./dom.js";

export function timeline() {
  return { title: "timeline", root: el("div", {}, el("h1", { text: "timeline" })), path: "/live/overview", update() {} };
}
