"use strict";
// The devices as a grid, with the part of a tensor that each of them holds, and the drawing of the tensor.

class Devices {
  constructor(data) {
    Object.assign(this, data);
    document.head.append(el("style", {}, this.style));
    const several = this.groups.some((g) => g.title);
    const nodes = this.node_size ? `${Math.ceil((1 + Math.max(...this.groups.flatMap((g) => g.ranks))) / this.node_size)} nodes of ${this.node_size} devices. ` : "";
    document.getElementById("devices-note").textContent = `${nodes}Each box is a device. The filled part of its rectangle is the part of the tensor that the device holds; `
      + `hatched parts are partial values. A colour stands for a device.${several ? " Each stage has its own devices." : ""}`;
    this.first.forEach((tensor, i) => document.getElementById("panels").append(this.panel(tensor, i)));
    document.getElementById("devices").hidden = !this.first.length;
  }

  /** The SVG of a layout, as `flow.sharding_svg` draws it; null if the page has none. */
  svg(shape, entries, dtype, group) {
    const drawing = this.drawings[this.key(shape, entries, dtype, group)];
    return drawing ? document.importNode(new DOMParser().parseFromString(drawing.svg, "image/svg+xml").documentElement, true) : null;
  }

  key(shape, entries, dtype, group) {
    return [shape.join(","), entries.join(" "), dtype, group].join("|");
  }

  groupOfCall(at) {
    return this.call_groups.length ? this.call_groups[at] : 0;
  }

  /** The group of a parameter or input. */
  groupOf(name) {
    const tensor = this.tensors.find((t) => t.names.includes(name));
    return tensor ? tensor.group : 0;
  }

  panel(first, number) {
    const body = el("div");
    const select = el("select", { id: `tensor-${number}`, onchange: () => this.draw(body, this.tensors[select.value]) },
      this.tensors.map((t, i) => el("option", { value: i, selected: i === first ? "" : null }, `${t.name} (${t.kind})`)));
    this.draw(body, this.tensors[first]);
    return el("div.panel", {}, el("label", { for: `tensor-${number}` }, number ? "and " : "Who holds ", select), body);
  }

  draw(body, tensor) {
    const drawing = this.drawings[this.key(tensor.shape, tensor.layout, tensor.dtype, tensor.group)];
    const about = el("p", {}, el("code", {}, `${tensor.dtype}[${tensor.shape.join(", ")}]`), " ", layout(tensor.layout, tensor.shape), ` ${bytes(tensor.bytes)} a device`);
    const groups = this.groups.map((g, i) => this.grid(g, i === tensor.group ? drawing : null));
    body.replaceChildren(about, ...groups, tensor.note ? el("p.note", {}, tensor.note) : "",
      drawing ? this.svg(tensor.shape, tensor.layout, tensor.dtype, tensor.group) : el("p.note", {}, "This page has no drawing of this tensor: flow.sharding_svg draws any tensor."));
  }

  grid(group, drawing) {
    const { mesh, ranks } = group, across = mesh[mesh.length - 1], shown = Math.min(ranks.length, Math.max(across, this.max_ranks));
    const rows = [];
    for (let at = 0; at < shown; at += across) {
      const cells = ranks.slice(at, Math.min(at + across, shown)).map((rank, i) => this.device(rank, drawing, drawing && drawing.cells[at + i]));
      rows.push(el("div.mesh-row", {}, mesh.length > 1 ? el("span.axis", {}, this.rowName(mesh, at / across)) : "", el("div.cells", {}, cells)));
    }
    const arrow = (axis) => (axis === mesh.length - 1 ? "→ " : axis === mesh.length - 2 ? "↓ " : "");
    return el("div.group", {}, group.title ? el("h3", {}, `${group.title}${group.modules ? `: ${group.modules}` : ""}`) : "",
      el("p.note", {}, mesh.map((n, axis) => `${arrow(axis)}axis ${axis}: ${counted(n, "device")}`).join("   ")), rows,
      ranks.length > shown ? el("p.note", {}, `and ${ranks.length - shown} more devices, to rank ${ranks[ranks.length - 1]}`) : "");
  }

  /** The indices of a row of devices on all axes but the last. */
  rowName(mesh, row) {
    const names = [];
    for (let axis = mesh.length - 2; axis >= 0; axis--) {
      names.unshift(`axis ${axis} = ${row % mesh[axis]}`);
      row = Math.floor(row / mesh[axis]);
    }
    return names.join(", ");
  }

  device(rank, drawing, cell) {
    const node = this.node_size ? el("small", {}, ` node ${Math.floor(rank / this.node_size)}`) : "";
    const name = el("b", {}, `rank ${rank}`, node);
    if (!drawing) return el("div.device.empty", {}, name, el("span", {}, "not here"));
    return el("div.device", {}, name, cell ? [this.map(drawing, cell), el("span", {}, cell[2])] : "");
  }

  /** The outline of the tensor, and in it the part that a device holds. */
  map(drawing, [, style, , [offsets, lengths]]) {
    const { shape, plane: [down, across], partial } = drawing;
    const tall = down === null ? 1 : shape[down], wide = across === null ? 1 : shape[across];
    const W = across === null ? 20 : 72, H = down === null ? 16 : across === null ? 48 : Math.max(18, Math.min(56, (72 * tall) / (wide || 1)));
    const place = (dim, side, total) => (dim === null || !total ? [0, side] : [(side * offsets[dim]) / total, (side * lengths[dim]) / total]);
    const [x, w] = place(across, W, wide), [y, h] = place(down, H, tall);
    const empty = lengths.some((n) => n === 0);
    const svg = drawn("svg", { class: "gt-svg map", viewBox: `-1 -1 ${W + 2} ${H + 2}`, width: W + 2, height: H + 2, "aria-hidden": "true" });
    if (!empty) svg.append(drawn("rect", { class: `part ${style}`, x, y, width: w, height: h }));
    if (partial && !empty) {
      let d = "";
      for (let s = x - h + 3; s < x + w; s += 6) {
        const [a, b] = [Math.max(s, x), Math.min(s + h, x + w)];
        if (b - a > 1) d += `M${a} ${y + h - (a - s)}L${b} ${y + h - (b - s)}`;
      }
      svg.append(drawn("path", { class: "hatch hollow", d }));
    }
    svg.append(drawn("rect", { class: "hollow edge", x: 0, y: 0, width: W, height: H }));
    return svg;
  }
}
