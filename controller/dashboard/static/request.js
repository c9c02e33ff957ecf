import { el } from "./dom.js";

export function request() {
  return { title: "request", root: el("div", {}, el("h1", { text: "request" })), path: "/live/overview", update() {} };
}
