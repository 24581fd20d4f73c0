"use strict";
// The plan as a tree of modules, in the order of their calls; layers that are alike are folded.

/** Look-up tables: calls, and parameters and inputs, by name; changes by value and by the call that uses it. */
function indexed(plan) {
  const found = { calls: new Map(), placed: new Map(), ofValue: new Map(), ofTaker: new Map() };
  const push = (map, key, value) => (map.has(key) ? map.get(key).push(value) : map.set(key, [value]));
  plan.calls.forEach((c, i) => { c.at = i; found.calls.set(c.name, c); });
  plan.placed.forEach((g) => found.placed.set(g.name, g));
  plan.changes.forEach((c) => {
    push(found.ofValue, c.value, c);
    c.takers = c.taker ? c.taker.split(" ") : [];
    if (c.takers.length) push(found.ofTaker, c.takers[0], c);
  });
  return found;
}

/** The shape of a tensor by its name; undefined for a call with results of several shapes. */
function shapeOf(index, name) {
  const placed = index.placed.get(name), call = index.calls.get(name);
  if (placed) return placed.shape;
  return call && new Set(call.shapes.map(String)).size === 1 ? call.shapes[0] : undefined;
}

const busy = (c) => c.forward + c.backward;
const moving = (c) => c.forward + c.backward;

/** Nodes {kind, name, label, children, calls: [first, ..., last], compute, move}; kinds: module, fold, call, change. */
function treeOf(plan, index) {
  const root = { kind: "module", path: "", label: "", children: [], under: new Map() };
  for (const call of plan.calls) {
    let node = root;
    for (const part of call.module ? call.module.split(".") : []) {
      if (!node.under.has(part)) {
        const child = { kind: "module", path: node.path ? `${node.path}.${part}` : part, label: part, children: [], under: new Map() };
        node.under.set(part, child);
        node.children.push(child);
      }
      node = node.under.get(part);
    }
    for (const c of index.ofTaker.get(call.name) || []) node.children.push({ kind: "change", change: c, label: briefly(c), at: call.at });
    node.children.push({ kind: "call", call, label: call.function, at: call.at });
    const stored = (index.ofValue.get(call.name) || []).filter((c) => !index.calls.has(c.takers[0]));
    for (const c of stored) node.children.push({ kind: "change", change: c, label: briefly(c), at: call.at });
  }
  return summed(root);
}

function summed(node) {
  if (node.kind === "call") return Object.assign(node, { calls: [node.at], compute: busy(node.call), move: node.call.moving, sign: signature(node.call) });
  if (node.kind === "change") return Object.assign(node, { calls: [], compute: 0, move: moving(node.change), sign: `${node.change.src}>${node.change.dst}` });
  node.children.forEach(summed);
  if (node.kind === "module") node.children = merged(node);
  node.calls = node.children.flatMap((c) => c.calls);
  node.compute = sum(node.children, (c) => c.compute);
  node.move = sum(node.children, (c) => c.move);
  node.sign = `${node.kind}:${pattern(node.label)}(${node.children.map((c) => c.sign).join(";")})`;
  return node;
}

/** A change in a few words: the name's end, and the collectives there and back. */
function briefly(c) {
  const kinds = [...new Set([c.forward ? c.forward_collectives : "", c.backward ? c.backward_collectives : ""].filter(Boolean))];
  return `${c.value.split(".").slice(-2).join(".")} ${kinds.join(", ")}`;
}

const signature = (c) => `${c.function}|${c.wanted.join("/")}|${c.results.join("/")}|${c.shapes.join("/")}`;

/** A module that holds nothing but one module, or one call, is shown with it, as one row; runs of layers that are alike become the first and a fold of the others. */
function merged(node) {
  const children = node.children.flatMap((c) => {
    if (c.kind !== "module") return c;
    const [calls, within] = ["call", "module"].map((kind) => c.children.filter((x) => x.kind === kind));
    if (c.children.length === 1 && within.length) return Object.assign(within[0], { label: `${c.label}.${within[0].label}` });
    if (calls.length !== 1 || within.length || /^\d+$/.test(c.label)) return c;
    calls[0].label = `${c.label} ${calls[0].label}`;
    calls[0].sign = `${c.label}|${calls[0].sign}`;
    return c.children;
  });
  const out = [];
  for (let i = 0; i < children.length;) {
    const first = children[i];
    let j = i + 1;
    while (first.kind === "module" && /\d$/.test(first.label) && j < children.length && children[j].kind === "module" && children[j].sign === first.sign) j++;
    out.push(first);
    const rest = children.slice(i + 1, j);
    if (rest.length > 1) out.push(fold(rest));
    else out.push(...rest);
    i = j;
  }
  return out;
}

function fold(alike) {
  const [first, last] = [alike[0], alike[alike.length - 1]];
  const made = { kind: "fold", path: first.path, label: `${first.label} … ${last.label}`, alike: alike.length, children: alike };
  return Object.assign(made, {
    calls: alike.flatMap((c) => c.calls), compute: sum(alike, (c) => c.compute), move: sum(alike, (c) => c.move), sign: `fold(${alike.length}${first.sign})`,
  });
}

/** The rows that show, given which nodes are open, or those that a search finds, with what they stand in. */
function rowsOf(root, open, wanted) {
  const rows = [];
  const hit = (node) => textOf(node).includes(wanted);
  const walk = (node, depth, all) => {
    let shown = 0;
    for (const child of node.children) {
      const here = all || (wanted && hit(child));
      const at = rows.length;
      rows.push({ node: child, depth });
      let inside = 0;
      if (child.children && (wanted ? !here : open.has(child))) inside = walk(child, depth + 1, all);
      else if (child.children && wanted && open.has(child)) inside = walk(child, depth + 1, true);
      if (wanted && !here && !inside) rows.length = at;
      else shown++;
    }
    return shown;
  };
  walk(root, 0, false);
  return rows;
}

function textOf(node) {
  if (node.text === undefined) {
    const c = node.call;
    const parts = c ? [c.name, c.function, c.module, c.results.map((r) => r.join(" ")).join(" ")] : [node.path || "", node.label];
    node.text = parts.join(" ").toLowerCase();
  }
  return node.text;
}

/** Lines between rows: {from, to, takers, lane, layout}; lane 0 joins neighbours. */
function wiresOf(plan, rows) {
  const rowOf = new Int32Array(plan.calls.length).fill(-1);
  rows.forEach(({ node }, r) => { if (node.kind !== "change") for (const i of node.calls) rowOf[i] = r; });
  const last = new Map(), wires = [];
  plan.calls.forEach((c, i) => {
    for (const o of new Set(c.operands)) {
      const made = last.get(o);
      if (made) made.takers.push(rowOf[i]);
    }
    last.set(c.name, { row: rowOf[i], takers: [], layout: c.results[0] || [] });
    if (c.results.length) wires.push(last.get(c.name));
  });
  const found = [];
  for (const w of wires) {
    const takers = [...new Set(w.takers)].filter((r) => r >= 0 && r !== w.row);
    if (w.row < 0 || !takers.length) continue;
    const near = takers.filter((r) => r > w.row && onlyChanges(rows, w.row, r));
    if (near.length) found.push({ from: w.row, to: near[0], takers: near, lane: 0, layout: w.layout });
    const far = takers.filter((r) => !near.includes(r));
    if (far.length) found.push({ from: Math.min(w.row, ...far), to: Math.max(w.row, ...far), maker: w.row, takers: far, lane: -1, layout: w.layout });
  }
  const free = [];
  for (const w of found.filter((x) => x.lane < 0).sort((a, b) => a.from - b.from || a.to - b.to)) {
    let lane = free.findIndex((until) => until <= w.from);
    if (lane < 0) lane = free.push(0) - 1;
    free[lane] = w.to;
    w.lane = lane + 1;
  }
  return { wires: found, lanes: free.length };
}

function onlyChanges(rows, a, b) {
  for (let r = a + 1; r < b; r++) if (rows[r].node.kind !== "change") return false;
  return true;
}
