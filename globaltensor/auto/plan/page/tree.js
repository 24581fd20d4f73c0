"use strict";
// The calls as rows, of which only those in sight are in the document, with the tensors between them as lines on the left.

const LANE = 9;

class Tree {
  constructor(plan, index, chosen) {
    Object.assign(this, { plan, index, chosen, root: treeOf(plan, index), open: new Set(), wanted: "", at: 0, rows: [] });
    this.box = document.getElementById("tree");
    this.body = document.getElementById("rows");
    this.box.style.setProperty("--layout-width", `${Math.max(110, 40 + 82 * plan.mesh.length)}px`);  // two layouts and an arrow
    this.most = Math.max(1e-12, ...plan.calls.map(busy), ...plan.changes.map(moving));
    for (const child of this.root.children) if (child.kind === "module") this.openFirst(child);
    document.getElementById("head").append(...[["call"], ["layout", "of the outputs"], ["bytes", "what one rank holds of the outputs; of a layout change, the global tensor"], ["computing", "forward and backward"],
      ["communication", "forward and backward"]].map(([t, title]) => el("div", { role: "columnheader", title }, t)));
    this.box.addEventListener("scroll", () => this.paint());
    this.box.addEventListener("keydown", (e) => this.key(e));
    this.body.addEventListener("click", (e) => this.click(e));
    addEventListener("resize", () => this.build());
    document.getElementById("open").addEventListener("click", () => { this.all(this.root); this.build(); });
    document.getElementById("close").addEventListener("click", () => { this.open.clear(); this.build(); });
    document.getElementById("find").addEventListener("input", (e) => { this.wanted = e.target.value.trim().toLowerCase(); this.box.scrollTop = 0; this.at = 0; this.build(); });
    this.build();
  }

  /** A module, and in it the first of each run of layers, down to their parts. */
  openFirst(node) {
    if (node.children.length > 60) return;
    this.open.add(node);
    const first = node.children.find((c) => c.kind === "module");
    if (first && node.children.every((c) => c.kind === "fold" || c.kind === "module") && first.children) this.open.add(first);
  }

  all(node) {
    for (const child of node.children || []) if (child.children) { this.open.add(child); this.all(child); }
  }

  build() {
    const narrow = matchMedia("(max-width: 640px)").matches;
    [this.row_height, this.head_height] = narrow ? [72, 54] : [26, 28];  // as in page.css
    this.rows = rowsOf(this.root, this.open, this.wanted);
    this.at = Math.max(0, Math.min(this.at, this.rows.length - 1));
    const { wires, lanes } = wiresOf(this.plan, this.rows);
    this.wires = wires;
    this.most_lanes = this.box.clientWidth < 500 ? 2 : 7;
    this.margin = 16 + LANE * Math.min(lanes, this.most_lanes);
    this.body.style.height = `${this.rows.length * this.row_height}px`;
    this.box.setAttribute("aria-rowcount", this.rows.length + 1);
    this.paint();
  }

  paint() {
    const from = Math.max(0, Math.floor((this.box.scrollTop - this.head_height) / this.row_height) - 8);
    const to = Math.min(this.rows.length, from + Math.ceil(this.box.clientHeight / this.row_height) + 18);
    const made = [];
    for (let r = from; r < to; r++) made.push(this.row(r));
    const refocus = this.focused();
    this.body.replaceChildren(this.lines(from, to), ...made);
    if (refocus) refocus();
    if (this.rows.length) this.box.setAttribute("aria-activedescendant", `row-${this.at}`);
    if (!this.rows.length) this.body.append(el("p.note", { style: "padding: 12px" }, `no module, call or layout matches “${this.wanted}”`));
  }

  /** If a mark of a row has the focus: a function that gives the focus to the new mark in its place, or to the tree. */
  focused() {
    const active = document.activeElement, row = this.body.contains(active) && active.closest(".row");
    if (!row) return null;
    const marks = (of) => [...of.querySelectorAll(".lay b")], at = marks(row).indexOf(active);
    return () => {
      const again = document.getElementById(row.id), mark = again && marks(again)[at];
      (mark && mark.tabIndex === 0 ? mark : this.box).focus({ preventScroll: true });
    };
  }

  row(r) {
    const { node, depth } = this.rows[r];
    const opens = Boolean(node.children), isOpen = opens && (this.open.has(node) || (this.wanted && this.rows[r + 1] && this.rows[r + 1].depth > depth));
    const name = el("div.name", { role: "gridcell", title: node.path || node.label, style: `padding-left: ${this.margin + 14 * depth}px` });
    name.append(el("span.twist", { "aria-hidden": "true" }, opens ? (isOpen ? "▾" : "▸") : node.kind === "change" ? "↳" : ""), ...this.named(node));
    const about = { role: "row", id: `row-${r}`, style: `top: ${r * this.row_height}px`, "data-row": r, "aria-level": depth + 1, "aria-rowindex": r + 2, "aria-selected": r === this.at };
    if (opens) about["aria-expanded"] = isOpen;
    return el(`div.row.${node.kind}${r === this.at ? ".at" : ""}`, about, name, el("div", { role: "gridcell" }, this.layoutOf(node, r === this.at)), el("div", { role: "gridcell" }, this.size(node)),
      this.meter(node.compute, "compute"), this.meter(node.move, "move"));
  }

  named(node) {
    if (node.kind === "fold") return [el("span.name", {}, node.label), el("span.sub", {}, `  ${node.alike} alike`)];
    if (node.kind === "module") return [el("span.name", {}, node.label), el("span.sub", {}, `  ${node.calls.length} call${node.calls.length === 1 ? "" : "s"}`)];
    if (node.kind === "change") return [el("span", { title: moved(node.change) }, node.label)];
    return [node.label, el("span.sub", {}, `  ${node.call.name}`)];
  }

  /** The layout of a row. The keyboard reaches the marks of the selected row only: there are thousands of rows. */
  layoutOf(node, focusable) {
    if (node.kind === "change") return change(node.change, shapeOf(this.index, node.change.value), focusable);
    const call = node.kind === "call" ? node.call : this.plan.calls[node.calls[node.calls.length - 1]];
    return call && call.results.length ? layout(call.results[0], call.shapes[0], focusable) : "";
  }

  size(node) {
    if (node.kind === "change") return bytes(node.change.bytes);
    const last = node.kind === "call" ? node.call : this.plan.calls[node.calls[node.calls.length - 1]];
    return last && last.bytes !== undefined ? bytes(last.bytes) : "";
  }

  meter(x, kind) {
    const part = Math.min(1, x / (this.most || 1));
    const style = x ? `background-image: linear-gradient(color-mix(in srgb, var(--${kind}) 34%, transparent) 0 0); background-size: ${(100 * part).toFixed(1)}% 16px` : "";
    return el("div.meter", { role: "gridcell", style }, x ? seconds(x) : "");
  }

  lines(from, to) {
    const svg = drawn("svg", { id: "wires", width: this.margin, height: this.rows.length * this.row_height, "aria-hidden": "true" });
    const mid = (r) => r * this.row_height + this.row_height / 2, x0 = 8;
    for (const w of this.wires) {
      if (w.to < from || w.from > to || w.lane > this.most_lanes) continue;
      const x = x0 + LANE * w.lane;
      let d = "";
      if (!w.lane) d = `M${x0} ${mid(w.from)}V${mid(w.to)}`;
      else {
        d = `M${x} ${mid(w.from) + 6}V${mid(w.to) - 6}`;
        for (const r of [w.maker, ...w.takers]) {
          if (r < from - 1 || r > to + 1) continue;
          const bend = r === w.from ? 6 : -6;
          d += `M${x0} ${mid(r)}Q${x} ${mid(r)} ${x} ${mid(r) + bend}`;
        }
      }
      const entries = w.layout.length ? w.layout : ["B"];
      entries.forEach((e, k) => {
        const shift = (k - (entries.length - 1) / 2) * 2.2;
        svg.append(drawn("path", { d, fill: "none", stroke: `var(--${kindOf(e).toLowerCase()})`, "stroke-width": 1.8, transform: `translate(${shift} 0)` }));
      });
    }
    for (let r = from; r < to; r++) {
      const { node } = this.rows[r];
      if (node.kind === "change") svg.append(drawn("path", { d: `M${x0} ${mid(r) - 5}l5 5l-5 5l-5 -5z`, fill: "var(--move)" }));
      else svg.append(drawn("circle", { cx: x0, cy: mid(r), r: node.children ? 4.5 : 3, fill: node.children ? "var(--ink)" : "var(--soft)" }));
    }
    return svg;
  }

  click(e) {
    const row = e.target.closest(".row");
    if (!row) return;
    const r = Number(row.dataset.row);
    if (e.target.closest(".twist") || (r === this.at && this.rows[r].node.children)) this.toggle(r);
    this.select(r);
  }

  toggle(r) {
    const { node } = this.rows[r];
    if (!node.children) return;
    if (this.open.has(node)) this.open.delete(node);
    else this.open.add(node);
    this.build();
  }

  select(r) {
    if (!this.rows.length) return;
    this.at = Math.max(0, Math.min(r, this.rows.length - 1));
    const top = this.at * this.row_height;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + this.row_height + this.head_height > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + this.row_height + this.head_height - this.box.clientHeight;
    this.paint();
    this.chosen(this.rows[this.at].node);
  }

  key(e) {
    const { node, depth } = this.rows[this.at] || {};
    const page = Math.floor(this.box.clientHeight / this.row_height) - 2;
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.rows.length, End: this.rows.length };
    if (e.key in steps) this.select(this.at + steps[e.key]);
    else if (e.key === "ArrowRight" && node && node.children && !this.open.has(node)) this.toggle(this.at);
    else if (e.key === "ArrowRight") this.select(this.at + 1);
    else if (e.key === "ArrowLeft" && node && node.children && this.open.has(node)) this.toggle(this.at);
    else if (e.key === "ArrowLeft") {
      let r = this.at;
      while (r > 0 && this.rows[r].depth >= depth) r--;
      this.select(r);
    } else if (e.key === "Enter" || e.key === " ") {
      this.select(this.at);
      if (e.key === " " && node && node.children) this.toggle(this.at);
    } else return;
    e.preventDefault();
  }

  /** Open what a call stands in, and go there. */
  show(name) {
    const call = this.index.calls.get(name);
    if (!call) return;
    this.wanted = document.getElementById("find").value = "";
    const path = (node) => {
      for (const child of node.children || []) {
        if (child.call === call) return [child];
        const inside = child.children && child.calls.includes(call.at) ? path(child) : null;
        if (inside) return [child, ...inside];
      }
      return null;
    };
    const found = path(this.root) || [];
    found.slice(0, -1).forEach((node) => this.open.add(node));
    this.build();
    this.select(this.rows.findIndex((row) => row.node.call === call));
  }
}
