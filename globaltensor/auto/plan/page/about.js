"use strict";
// What is said of the selected row: what belongs to it, what moves there, and what other ways would cost.

class About {
  constructor(plan, index) {
    Object.assign(this, { plan, index, box: document.getElementById("about") });
  }

  tell(node) {
    const told = node.kind === "call" ? this.call(node.call) : node.kind === "change" ? this.change(node.change) : this.module(node);
    this.box.replaceChildren(...told);
    this.box.scrollTop = 0;
  }

  /** A button that leads to a call. */
  link(name) {
    return this.index.calls.has(name) ? el("button", { type: "button", onclick: () => page.tree.show(name) }, name) : el("code", {}, name);
  }

  call(c) {
    const takes = c.operands.map((o, i) => el("li", {}, el("code", {}, o), " ", layout(c.wanted[i]), this.lies(o)));
    const gives = c.results.map((r, i) => el("li", {}, el("code", {}, `[${c.shapes[i].join(", ")}]`), " ", layout(r)));
    const share = c.share >= 1 ? "all of it on each rank" : `1/${significant(1 / c.share)} of it on each rank`;
    const before = this.plan.changes.filter((m) => m.takers.includes(c.name)), after = this.index.ofValue.get(c.name) || [];
    return [
      el("h3", {}, c.name), el("p.note", {}, `${c.function}${c.module ? ` in ${c.module}` : ""}`, c.where ? el("span.mono", {}, ` at ${c.where}`) : ""),
      el("dl", {}, el("dt", {}, "computes"), el("dd", {}, share), el("dt", {}, "forward"), el("dd", {}, seconds(c.forward)),
        el("dt", {}, "backward"), el("dd", {}, seconds(c.backward)), c.moving ? [el("dt", {}, "moves itself"), el("dd", {}, seconds(c.moving))] : []),
      el("h3", {}, "takes"), el("ul", {}, takes.length ? takes : el("li", {}, "nothing")),
      el("h3", {}, "gives"), el("ul", {}, gives), ...this.moves("moves before it", before), ...this.moves("moves after it", after),
      ...this.others(c.others, c.results),
    ];
  }

  lies(operand) {
    const g = this.index.given.get(operand);
    return g ? el("span.note", {}, ` ${g.kind}, lies `, layout(g.layout)) : "";
  }

  change(c) {
    return [
      el("h3", {}, `${moved(c)}`), el("p", {}, change(c), ` ${bytes(c.bytes)}`),
      el("dl", {}, el("dt", {}, "forward"), el("dd", {}, `${seconds(c.forward)}${c.forward && c.forward_collectives ? `, ${c.forward_collectives}` : ""}`),
        el("dt", {}, "gradient"), el("dd", {}, `${seconds(c.backward)}${c.backward && c.backward_collectives ? `, ${c.backward_collectives}` : ""}`),
        this.index.calls.has(c.value) ? [el("dt", {}, "made by"), el("dd", {}, this.link(c.value))] : "", el("dt", {}, "taken by"), el("dd", {}, c.takers.length ? c.takers.map((t) => [this.link(t), " "]) : "nothing here: it is kept so")),
      ...this.given(this.index.given.get(c.value)),
    ];
  }

  given(g) {
    if (!g) return [];
    return [el("h3", {}, g.name), el("p", {}, `${g.kind} ${g.dtype}[${g.shape.join(", ")}] `, layout(g.layout), ` ${bytes(g.bytes)} a rank`), ...this.others(g.others, [g.layout])];
  }

  module(node) {
    const calls = new Set(node.calls.map((i) => this.plan.calls[i].name));
    const inside = this.plan.placed.filter((g) => node.path && (g.name === node.path || g.name.startsWith(`${node.path}.`)));
    const lines = inside.slice(0, 40).map((g) => el("li", {}, el("code", {}, g.name), ` [${g.shape.join(", ")}] `, layout(g.layout), ` ${bytes(g.bytes)} a rank`));
    const changes = this.plan.changes.filter((c) => c.takers.some((t) => calls.has(t))).sort((a, b) => moving(b) - moving(a));
    return [
      el("h3", {}, node.kind === "fold" ? `${node.label}: ${node.alike} alike` : node.path || "the whole plan"),
      node.path ? "" : el("p.note", {}, "Choose a row to see why it is as it is."),
      el("dl", {}, el("dt", {}, "calls"), el("dd", {}, String(node.calls.length)), el("dt", {}, "computing"), el("dd", {}, seconds(node.compute)),
        el("dt", {}, "moving"), el("dd", {}, seconds(node.move))),
      ...(lines.length ? [el("h3", {}, node.kind === "fold" ? `given, of the first (${node.path})` : "given"), el("ul", {}, lines)] : []),
      ...this.dearest(changes),
    ];
  }

  /** The dearest moves of a module, those that are alike together. */
  dearest(changes) {
    const groups = alike(changes, (c) => [pattern(moved(c)), c.src, c.dst, c.bytes].join("|")).sort((a, b) => sum(b.all, moving) - sum(a.all, moving));
    const line = ({ first, all }) => el("li", {}, all.length > 1 ? `${all.length} × ${pattern(first.value)}: ` : "", moved(first), " ", change(first), ` ${bytes(first.bytes)}: `,
      el("span.extra", {}, seconds(sum(all, moving))));
    return groups.length ? [el("h3", {}, "dearest moves"), el("ul", {}, groups.slice(0, 8).map(line))] : [];
  }

  moves(title, changes) {
    if (!changes.length) return [];
    const lines = changes.map((c) => el("li", {}, moved(c), " ", change(c), ` ${bytes(c.bytes)}: `, el("span.extra", {}, [c.forward, c.backward].filter(Boolean).map(seconds).join(" + "))));
    return [el("h3", {}, title), el("ul", {}, lines)];
  }

  others(others, chosen) {
    const head = el("h3", {}, "why ", chosen.map((x) => [layout(x), " "]));
    if (!others.length) {
      const priced = [...this.plan.calls, ...this.plan.placed].some((x) => x.others.length);
      return [head, el("p.note", {}, priced ? "Nothing else is possible here." : "Other ways have not been priced one by one in this plan.")];
    }
    return [head, el("ul", {}, others.map((o) => el("li", {}, o.gives.map((x) => [layout(x), " "]), "instead ", el("span.extra", {}, this.price(o)), o.because ? `: ${o.because}` : "")))];
  }

  price(o) {
    const over = this.plan.limit !== null && this.plan.memory + o.memory > this.plan.limit;
    const grown = o.memory ? `, ${bytes(Math.abs(o.memory))} a rank ${o.memory > 0 ? "more" : "less"}` : "";
    if (o.extra < 0) return `${seconds(-o.extra)} less${grown}${over ? ", which does not fit" : ", as the rest stands: the search was not complete"}`;
    return `${o.extra ? `+${seconds(o.extra)}` : "as dear"}${grown}${over ? ", which does not fit" : ""}`;
  }
}
