"use strict";
// Tables that sort by any column.

const SHOWN = 100;

/** columns: {title, of: row -> text or element, by: row -> what to sort by, n: figures}. */
function sorted(columns, rows, by, down = true) {
  const box = el("div.wide"), body = el("tbody", { role: "rowgroup" });
  let all = false;
  const heads = columns.map((c, i) => el(`th${c.n ? ".n" : ""}`, { scope: "col", role: "columnheader", "aria-sort": "none" }, el("button", { type: "button", onclick: () => sort(i) }, c.title)));
  const more = el("button", { type: "button", onclick: () => { all = true; fill(); } });
  function sort(i) {
    down = by === i ? !down : Boolean(columns[i].n);
    by = i;
    fill();
  }
  function fill() {
    const of = columns[by].by;
    rows.sort((a, b) => { const [p, q] = [of(a), of(b)]; return (p < q ? -1 : p > q ? 1 : 0) * (down ? -1 : 1); });
    heads.forEach((h, i) => h.setAttribute("aria-sort", i === by ? (down ? "descending" : "ascending") : "none"));
    body.replaceChildren(...rows.slice(0, all ? rows.length : SHOWN).map((r) => el("tr", { role: "row" }, columns.map((c) => el(`td${c.n ? ".n" : ""}`, { role: "cell", "data-title": c.title }, c.of(r))))));
    more.textContent = `show all ${rows.length}`;
    more.hidden = all || rows.length <= SHOWN;
  }
  fill();
  box.append(el("table", { role: "table" }, el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, heads)), body), more);
  return box;
}

/** Things that are alike but for the numbers in their names, together: [{first, all}]. */
function alike(things, key) {
  const groups = new Map();
  for (const t of things) {
    const k = key(t);
    if (!groups.has(k)) groups.set(k, { first: t, all: [] });
    groups.get(k).all.push(t);
  }
  return [...groups.values()];
}

function changesTable(plan, index, show) {
  const known = (name) => { const c = index.calls.get(name); return name === undefined ? "" : c ? `${c.module} ${c.function}`.trim() : name; };
  const groups = alike(plan.changes, (c) => [pattern(known(c.value)), pattern(known(c.takers[0])), c.src, c.dst, c.bytes, c.forward.toFixed(12), c.backward.toFixed(12)].join("|"));
  const named = (g, of) => (g.all.length > 1 && new Set(g.all.map(of)).size > 1 ? pattern(of(g.first)) : of(g.first));
  const value = (g) => named(g, (c) => known(c.value)), taker = (g) => named(g, (c) => known(c.takers[0]));
  const forward = (g) => sum(g.all, (c) => c.forward), backward = (g) => sum(g.all, (c) => c.backward);
  return sorted([
    { title: "tensor", of: (g) => el("code", {}, value(g)), by: value },
    { title: "times", n: true, of: (g) => String(g.all.length), by: (g) => g.all.length },
    { title: "layout", of: (g) => change(g.first, shapeOf(index, g.first.value)), by: (g) => `${g.first.src} ${g.first.dst}` },
    { title: "bytes", n: true, of: (g) => bytes(g.first.bytes), by: (g) => g.first.bytes },
    { title: "forward", n: true, of: (g) => (forward(g) ? `${g.first.forward_collectives} ${seconds(forward(g))}` : ""), by: forward },
    { title: "gradient", n: true, of: (g) => (backward(g) ? `${g.first.backward_collectives} ${seconds(backward(g))}` : ""), by: backward },
    { title: "total", n: true, of: (g) => el("b", {}, seconds(forward(g) + backward(g))), by: (g) => forward(g) + backward(g) },
    { title: "used by", of: (g) => (index.calls.has(g.first.takers[0]) ? el("button", { type: "button", onclick: () => show(g.first.takers[0]) }, taker(g)) : taker(g)), by: taker },
  ], groups, 6);
}

function tensorsTable(plan, explain) {
  const groups = alike(plan.placed, (g) => [pattern(g.name), g.shape, g.dtype, g.layout].join("|"));
  const name = (g) => (g.all.length > 1 ? pattern(g.first.name) : g.first.name), total = (g) => sum(g.all, (x) => x.bytes);
  return sorted([
    { title: "name", of: (g) => el("button", { type: "button", onclick: () => explain(g.first) }, el("code", {}, name(g))), by: name },
    { title: "times", n: true, of: (g) => String(g.all.length), by: (g) => g.all.length },
    { title: "kind", of: (g) => g.first.kind, by: (g) => g.first.kind },
    { title: "shape", of: (g) => el("code", {}, `${g.first.dtype}[${g.first.shape.join(", ")}]`), by: (g) => g.first.shape.reduce((a, b) => a * b, 1) },
    { title: "layout", of: (g) => layout(g.first.layout, g.first.shape), by: (g) => String(g.first.layout) },
    { title: "bytes a rank", n: true, of: (g) => bytes(total(g)), by: total },
  ], groups, 5);
}
