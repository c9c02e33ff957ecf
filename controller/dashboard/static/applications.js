import { el } from "./dom.js";

export function applications() {
  return { title: "applications", root: el("div", {}, el("h1", { text: "applications" })), path: "/live/overview", update() {} };
}
