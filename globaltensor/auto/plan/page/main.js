"use strict";
// Reads the plan that stands in the page, and fills the sections.

const page = {};

(() => {
  const { plan, trace, lanes, devices, texts } = JSON.parse(document.getElementById("plan").textContent);
  const index = indexed(plan), at = (id) => document.getElementById(id);
  page.mesh = plan.mesh;
  page.hints = new Hints();
  document.title = plan.model ? `${plan.model}: ${texts.title}` : texts.title;
  at("title").textContent = plan.model || texts.title;
  at("subtitle").textContent = plan.model ? texts.title : "";
  page.devices = new Devices(devices);
  at("proof").append(el(`b.${plan.optimal ? "optimal" : "gap"}`, {}, texts.proof.replace(/:.*/, "")), texts.proof.replace(/^[^:]*/, ""));
  const tile = (name, value, more) => el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, more) : ""));
  at("tiles").append(...texts.cards.map(([name, value, more]) => tile(name, value, more)),
    tile("peak memory", bytes(plan.memory), plan.limit ? `a rank, ${percent(plan.memory / plan.limit)} of the limit of ${bytes(plan.limit)}` : "a rank, no limit set"),
    tile("devices", plan.mesh.join(" × "), `${texts.arrangement}, ${plan.cluster}`));
  at("spent").append(...spentBar(plan, texts.terms), texts.stages.length ? el("p.note", {}, "Of all stages together.") : "");
  if (plan.alternatives.length) at("bars").append(...alternativeBars(plan));
  at("not-priced").textContent = texts.not_priced ? `${texts.not_priced[0].toUpperCase()}${texts.not_priced.slice(1)}.` : "";
  at("changes-note").textContent = texts.summed ? `${texts.summed[0].toUpperCase()}${texts.summed.slice(1)}.` : "";
  at("others").hidden = !plan.alternatives.length && !texts.not_priced;
  page.about = new About(plan, index);
  page.tree = new Tree(plan, index, (node) => page.about.explain(node));
  page.about.explain(page.tree.root);
  const show = (name) => { page.tree.show(name); at("graph").scrollIntoView(); };
  at("legend").append(...[["S0", "S(0): split on dim 0"], ["S1", "S(1)"], ["S2", "S(2)"], ["S3", "S(3) and more"], ["B", "B: replicated"], ["P", "P: partial sum"]]
    .map(([kind, word]) => el("span.key", {}, el("i", { style: `background: var(--${kind.toLowerCase()})` }), word)));
  at("changes").append(plan.changes.length ? changesTable(plan, index, show) : el("p.note", {}, "No tensor changes its layout."));
  memoryChart(plan, lanes);
  page.times = new Times(trace, texts.timeline);
  at("placed").append(tensorsTable(plan, (g) => { page.about.box.replaceChildren(...page.about.tensor(g)); at("graph").scrollIntoView(); }));
  for (const id of ["chosen", "searched"]) at(id).append(...texts[id].map((sentence) => el("li", {}, sentence)));
  for (const [name, value] of [...texts.rest, ...texts.internals]) at("choices").append(el("dt", {}, name), el("dd", {}, value));
  if (texts.stages.length) {
    const [head, ...rows] = texts.stages;
    at("stages").append(el("h3", {}, "stages"), sorted(head.map((title, i) => ({ title, of: (r) => r[i], by: (r) => (isNaN(r[i]) ? r[i] : Number(r[i])) })), rows, 0, false));
  }
  const sections = [...document.querySelectorAll("main section:not([hidden])")];
  at("sections").append(el("div", {}, sections.map((s) => el("a", { href: `#${s.id}` }, s.querySelector("h2").textContent))));
})();
