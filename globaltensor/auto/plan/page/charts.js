"use strict";
// Bars: the terms of the cost, and the alternatives.

function spentBar(plan, terms) {
  const s = plan.cost_breakdown || {};
  const colors = { computing: "--compute", moving: "--move", updating: "--update", "computing and moving": "--compute", "parameters and gradients": "--move" };
  const hides = "moving" in s ? "moving" : "parameters and gradients";
  const parts = Object.entries(s).filter(([name, x]) => name !== "hidden" && x > 0)
    .map(([name, x]) => [terms[name], name === hides ? Math.max(0, x - (s.hidden || 0)) : x, `var(${colors[name] || "--s3"})`]);
  const total = sum(parts, (p) => p[1]) || 1;
  const stack = el("div.stack", { role: "img", "aria-label": parts.map((p) => `${p[0]} ${seconds(p[1])}`).join(", ") },
    parts.map(([name, x, color]) => el("i", { style: `width: ${(100 * x) / total}%; background-color: ${color}`, title: `${name} ${seconds(x)}` })));
  const keys = parts.map(([name, x, color]) => el("span.key", {}, el("i", { style: `background: ${color}` }), `${name} ${seconds(x)} (${percent(x / total)})`));
  if (s.hidden) keys.push(el("span.key", {}, el("i.hidden", { style: "background-color: var(--hide)" }), `${terms[hides]} ${seconds(s.hidden)} more, hidden behind computing`));
  return [stack, el("div.legend", {}, keys)];
}

function alternativeBars(plan) {
  const rows = [{ name: "this plan", cost: plan.cost, memory: plan.memory, fits: true, current: true }, ...plan.alternatives];
  const most = Math.max(...rows.filter((r) => r.cost !== null).map((r) => r.cost));
  return rows.map((r) => {
    const more = r.cost === null || !plan.cost ? null : r.cost / plan.cost - 1;
    const price = r.cost === null ? "not possible" : seconds(r.cost) + (r.current ? "" : Math.abs(more) < 5e-4 ? ", the same" : `, ${more > 0 ? "+" : ""}${percent(more)}`);
    const why = r.why ? (r.fits || r.cost === null ? r.why : `does not fit: ${r.why}`) : "";
    return el(`div.bar${r.current ? ".current" : ""}${r.fits ? "" : ".not"}`, {}, el("div", {}, r.name),
      el("div.track", {}, r.cost === null ? "" : el("i", { style: `width: ${(100 * r.cost) / most}%` })),
      el("div.price", {}, el("b", {}, price), r.memory ? el("div.note", {}, `${bytes(r.memory)} a rank`) : ""), why ? el("div.why", {}, why) : "");
  });
}
