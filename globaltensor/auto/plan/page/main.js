"use strict";
// Reads the plan that stands in the page, and fills the sections.

const page = {};

(() => {
  const { plan, trace, lanes, told } = JSON.parse(document.getElementById("plan").textContent);
  const index = indexed(plan), at = (id) => document.getElementById(id);
  document.title = told.title;
  at("title").textContent = told.title;
  at("proof").append(el(`b.${plan.optimal ? "optimal" : "gap"}`, {}, told.proof.replace(/:.*/, "")), told.proof.replace(/^[^:]*/, ""));
  const tile = (name, value, more) => el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, more) : ""));
  at("tiles").append(
    tile("cost", seconds(plan.cost), "a step"), tile("bound", seconds(plan.bound), plan.lost.length ? "of what was looked at" : "no plan costs less"), tile("predicted", seconds(plan.seconds), "a step"),
    tile("memory", bytes(plan.memory), plan.limit ? `a rank, ${percent(plan.memory / plan.limit)} of ${bytes(plan.limit)}` : "a rank at its peak"),
    tile("mesh", plan.mesh.join(" × "), `${told.lying}, ${plan.cluster}`));
  at("spent").append(...spentBar(plan), told.stages.length ? el("p.note", {}, "Of all stages together.") : "");
  if (plan.alternatives.length) at("bars").append(...alternativeBars(plan));
  else at("others").hidden = true;
  page.about = new About(plan, index);
  page.tree = new Tree(plan, index, (node) => page.about.tell(node));
  page.about.tell(page.tree.root);
  const show = (name) => { page.tree.show(name); at("graph").scrollIntoView(); };
  at("legend").append(...[["S0", "split on dim 0"], ["S1", "1"], ["S2", "2"], ["S3", "3 or more"], ["B", "whole on each rank"], ["P", "summands"]]
    .map(([kind, word]) => el("span.key", {}, el("i", { style: `background: var(--${kind.toLowerCase()})` }), word)));
  at("changes").append(plan.changes.length ? changesTable(plan, index, show) : el("p.note", {}, "No tensor changes its layout."));
  memoryChart(plan, lanes);
  page.times = new Times(trace, told.timeline);
  at("given").append(givenTable(plan, (g) => { page.about.box.replaceChildren(...page.about.given(g)); at("graph").scrollIntoView(); }));
  for (const [name, value] of told.rest) at("choices").append(el("dt", {}, name), el("dd", {}, value));
  if (told.stages.length) {
    const [head, ...rows] = told.stages;
    at("stages").append(el("h3", {}, "stages"), sorted(head.map((title, i) => ({ title, of: (r) => r[i], by: (r) => (isNaN(r[i]) ? r[i] : Number(r[i])) })), rows, 0, false));
  }
  const sections = [...document.querySelectorAll("main section:not([hidden])")];
  at("sections").append(el("div", {}, sections.map((s) => el("a", { href: `#${s.id}` }, s.querySelector("h2").textContent))));
})();
