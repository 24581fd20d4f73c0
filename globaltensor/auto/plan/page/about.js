"use strict";
// The explanation of the selected row: its tensors, its layout changes, its drawing, and the price of other layouts.

class About {
  constructor(plan, index) {
    Object.assign(this, { plan, index, box: document.getElementById("about") });
  }

  explain(node) {
    this.box.replaceChildren(...(node.kind === "call" ? this.call(node.call) : node.kind === "change" ? this.change(node.change) : this.module(node)));
    this.box.scrollTop = 0;
  }

  /** A button that leads to a call. */
  link(name) {
    return this.index.calls.has(name) ? el("button", { type: "button", onclick: () => page.tree.show(name) }, name) : el("code", {}, name);
  }

  call(c) {
    const inputs = c.operands.map((o, i) => el("li", {}, el("code", {}, o), " ", layout(c.wanted[i], shapeOf(this.index, o)), this.stored(o)));
    const outputs = c.results.map((r, i) => el("li", {}, el("code", {}, `[${c.shapes[i].join(", ")}]`), " ", layout(r, c.shapes[i])));
    const share = c.share >= 1 ? "all of it on each rank" : `1/${significant(1 / c.share)} of it on each rank`;
    const before = this.plan.changes.filter((m) => m.takers.includes(c.name)), after = this.index.ofValue.get(c.name) || [];
    return [
      el("h3", {}, c.name), el("p.note", {}, `${c.function}${c.module ? ` in ${c.module}` : ""}`, c.where ? el("span.mono", {}, ` at ${c.where}`) : ""),
      el("dl", {}, el("dt", {}, "computes"), el("dd", {}, share), el("dt", {}, "forward"), el("dd", {}, seconds(c.forward)),
        el("dt", {}, "backward"), el("dd", {}, seconds(c.backward)), c.moving ? [el("dt", {}, "its own communication"), el("dd", {}, seconds(c.moving))] : []),
      el("h3", {}, "inputs"), el("ul", {}, inputs.length ? inputs : el("li", {}, "nothing")),
      el("h3", {}, "outputs"), el("ul", {}, outputs), ...this.changes("layout changes before it", before), ...this.changes("layout changes after it", after),
      ...this.others(c.others, c.results, c.shapes),
      ...(c.results.length ? this.drawing(c.shapes[0], c.results[0], "", page.devices.groupOfCall(c.at)) : []),
    ];
  }

  /** The layout in which a parameter or input is stored. */
  stored(operand) {
    const g = this.index.placed.get(operand);
    return g ? el("span.note", {}, ` ${g.kind}, layout `, layout(g.layout, g.shape)) : "";
  }

  drawing(shape, entries, dtype, group) {
    const svg = page.devices.svg(shape, entries, dtype, group);
    return svg ? [el("h3", {}, "what each device holds"), svg] : [];
  }

  change(c) {
    return [
      el("h3", {}, `${moved(c)}`), el("p", {}, change(c, shapeOf(this.index, c.value)), ` ${bytes(c.bytes)}`),
      el("dl", {}, el("dt", {}, "forward"), el("dd", {}, `${seconds(c.forward)}${c.forward && c.forward_collectives ? `, ${c.forward_collectives}` : ""}`),
        el("dt", {}, "gradient"), el("dd", {}, `${seconds(c.backward)}${c.backward && c.backward_collectives ? `, ${c.backward_collectives}` : ""}`),
        this.index.calls.has(c.value) ? [el("dt", {}, "made by"), el("dd", {}, this.link(c.value))] : "", el("dt", {}, "used by"), el("dd", {}, c.takers.length ? c.takers.map((t) => [this.link(t), " "]) : "nothing in this stage: it is stored in this layout")),
      ...this.tensor(this.index.placed.get(c.value)),
    ];
  }

  tensor(g) {
    if (!g) return [];
    return [el("h3", {}, g.name), el("p", {}, `${g.kind} ${g.dtype}[${g.shape.join(", ")}] `, layout(g.layout, g.shape), ` ${bytes(g.bytes)} a rank`),
      ...this.others(g.others, [g.layout], [g.shape]), ...this.drawing(g.shape, g.layout, g.dtype, page.devices.groupOf(g.name))];
  }

  module(node) {
    const calls = new Set(node.calls.map((i) => this.plan.calls[i].name));
    const inside = this.plan.placed.filter((g) => node.path && (g.name === node.path || g.name.startsWith(`${node.path}.`)));
    const lines = inside.slice(0, 40).map((g) => el("li", {}, el("code", {}, g.name), ` [${g.shape.join(", ")}] `, layout(g.layout, g.shape), ` ${bytes(g.bytes)} a rank`));
    const changes = this.plan.changes.filter((c) => c.takers.some((t) => calls.has(t))).sort((a, b) => moving(b) - moving(a));
    return [
      el("h3", {}, node.kind === "fold" ? `${node.label}: ${node.alike} alike` : node.path || "the full plan"),
      node.path ? "" : el("p.note", {}, "Select a row to see its layouts, their reasons and the price of others."),
      el("dl", {}, el("dt", {}, "calls"), el("dd", {}, String(node.calls.length)), el("dt", {}, "computing"), el("dd", {}, seconds(node.compute)),
        el("dt", {}, "communication"), el("dd", {}, seconds(node.move))),
      ...(lines.length ? [el("h3", {}, node.kind === "fold" ? `parameters and inputs of the first (${node.path})` : "parameters and inputs"), el("ul", {}, lines)] : []),
      ...this.mostExpensive(changes),
    ];
  }

  /** The most expensive layout changes of a module; equal ones share a line. */
  mostExpensive(changes) {
    const groups = alike(changes, (c) => [pattern(moved(c)), c.src, c.dst, c.bytes].join("|")).sort((a, b) => sum(b.all, moving) - sum(a.all, moving));
    const line = ({ first, all }) => el("li", {}, all.length > 1 ? `${all.length} × ${pattern(first.value)}: ` : "", moved(first), " ", change(first, shapeOf(this.index, first.value)), ` ${bytes(first.bytes)}: `,
      el("span.extra", {}, seconds(sum(all, moving))));
    return groups.length ? [el("h3", {}, "most expensive layout changes"), el("ul", {}, groups.slice(0, 8).map(line))] : [];
  }

  changes(title, changes) {
    if (!changes.length) return [];
    const lines = changes.map((c) => el("li", {}, moved(c), " ", change(c, shapeOf(this.index, c.value)), ` ${bytes(c.bytes)}: `, el("span.extra", {}, [c.forward, c.backward].filter(Boolean).map(seconds).join(" + "))));
    return [el("h3", {}, title), el("ul", {}, lines)];
  }

  others(others, chosen, shapes) {
    const head = el("h3", {}, "why ", chosen.map((x, i) => [layout(x, shapes[i]), " "]));
    if (!others.length) {
      const priced = [...this.plan.calls, ...this.plan.placed].some((x) => x.others.length);
      return [head, el("p.note", {}, priced ? "Nothing else is possible here." : "Other layouts have not been priced one by one in this plan.")];
    }
    return [head, el("ul", {}, others.map((o) => el("li", {}, o.gives.map((x, i) => [layout(x, shapes[i]), " "]), "instead ", el("span.extra", {}, this.price(o)), o.because ? `: ${o.because}` : "")))];
  }

  price(o) {
    const over = this.plan.limit !== null && this.plan.memory + o.memory > this.plan.limit;
    const grown = o.memory ? `, ${bytes(Math.abs(o.memory))} a rank ${o.memory > 0 ? "more" : "less"}` : "";
    if (o.extra < 0) return `${seconds(-o.extra)} less${grown}${over ? ", which does not fit" : ", as the rest stands: the search was not complete"}`;
    return `${o.extra ? `+${seconds(o.extra)}` : "same cost"}${grown}${over ? ", which does not fit" : ""}`;
  }
}
