import { el } from "./dom.js";

export function pages() {
  return { title: "pages", root: el("div", {}, el("h1", { text: "pages" })), path: "/live/overview", update() {} };
}
