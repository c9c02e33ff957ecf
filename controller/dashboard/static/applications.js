// Applications: the weights of their models, and how their queries ended.

import { count, el, ms, percent, say, Table } from "./dom.js";

export function applications(name, query) {
  const context = el("input", { id: "context", type: "text", autocomplete: "off", spellcheck: "false", value: query.context ?? "" });
  const form = el("form", { class: "ask" }, el("label", { for: "context", text: "Weights of one user, session or tenant (empty: of all users)" }), context, el("button", { type: "submit", text: "Show" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = context.value.trim();
    location.hash = `#/applications/${encodeURIComponent(name)}${wanted ? `?context=${encodeURIComponent(wanted)}` : ""}`;
  });
  const place = el("div", { class: "cards" });
  const none = el("p", { hidden: true, text: "No application exists. An application is one name for several models, chosen and combined by a policy: clockwright app add --help." });
  const cards = new Map();
  return {
    title: name || "Applications",
    root: el("div", {}, el("h1", { text: name || "Applications" }), form, none, place),
    path: `/live/applications?name=${encodeURIComponent(name)}&context=${encodeURIComponent(query.context ?? "")}`,
    update(data) {
      none.hidden = data.applications.length > 0;
      const kept = new Map();
      for (const each of data.applications) {
        const key = each.application.name;
        const card = cards.get(key) ?? new Card(key);
        kept.set(key, card);
        card.update(each, data.context);
        if (!card.root.isConnected) place.append(card.root);
      }
      for (const [key, card] of cards) {
        if (!kept.has(key)) {
          card.root.remove();
          cards.delete(key);
        }
      }
      for (const [key, card] of kept) cards.set(key, card);
    },
  };
}

class Card {
  constructor(name) {
    this.words = el("p");
    this.counts = el("p", { class: "dim" });
    this.weights = new Table(
      `Weights of the models of ${name}`,
      [
        { title: "model", text: (row) => row.model, href: (row) => `#/model/${encodeURIComponent(row.model)}` },
        { title: "part of its belief", kind: "number", text: (row) => percent(row.weight), share: (row) => row.weight },
        { title: "without an answer in time", kind: "number", text: (row) => count(row.missing) },
        { title: "left out because", text: (row) => row.misfit || "-", tone: (row) => (row.misfit ? "bad" : "") },
      ],
      { key: (row) => row.model },
    );
    this.root = el("section", { class: "card", "aria-label": name }, el("h2", {}, el("a", { href: `#/applications/${encodeURIComponent(name)}`, text: name })), this.words, this.weights.root, this.counts);
  }

  update(data, context) {
    const settings = data.application;
    const whose = context ? `as learned from ${context}` : "as learned from all users";
    say(this.words, `${data.state.toLowerCase()}; policy ${settings.policy}, ${settings.combination || "vote"}${settings.slo_ns ? `, SLO ${ms(settings.slo_ns / 1e6)}` : ""}; ${whose}${data.remark ? `. ${data.remark}` : ""}`);
    // Weights may be of any sum; what counts is a model's part.
    const total = data.weights.reduce((all, row) => all + row.weight, 0) || 1;
    this.weights.update(data.weights.map((row) => ({ ...row, weight: row.weight / total })));
    const list = (rows) => rows.map((row) => `${count(row.count)} ${row.reason}`).join(", ") || "none";
    say(this.counts, `${count(data.queries)} queries; default answers: ${list(data.defaults)}; refused: ${list(data.refusals)}; feedback: ${list(data.feedbacks)}; ${count(data.num_contexts)} contexts in memory`);
  }
}
