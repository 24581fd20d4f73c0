"use strict";
// The sentence that explains a mark of a layout (S(d), B, P), under the pointer and at keyboard focus.

/** The sizes of the local parts of a dim of `size` elements, split over these axes one after the other. */
function partSizes(size, axes, entries, mesh) {
  let sizes = new Set([size]);
  for (const axis of axes) {
    const unit = Number(entries[axis].split("/")[1] || 1), parts = new Set();
    for (const n of sizes) {
      const units = Math.ceil(n / unit), least = Math.floor(units / mesh[axis]), more = units % mesh[axis];
      const start = (i) => Math.min(n, unit * (i * least + Math.min(i, more)));
      for (let i = 0; i < mesh[axis]; i++) parts.add(start(i + 1) - start(i));
    }
    sizes = parts;
  }
  return [...sizes].sort((a, b) => a - b);
}

const counted = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/** The name of the elements along a dim: rows and columns of a matrix. */
function dimWord(dim, shape) {
  if (shape.length === 1) return "elements";
  return shape.length === 2 ? ["rows", "columns"][dim] : `elements of dim ${dim}`;
}

/** One entry of a layout in a sentence. `shape` is that of the global tensor, if it is known. */
function explained(entries, axis, shape, mesh) {
  const entry = entries[axis], where = `mesh axis ${axis} (${counted(mesh[axis] || 1, "device")})`;
  if (entry === "B") return `B: replicated over ${where}: each holds the same data.`;
  if (entry[0] === "P") {
    const kind = entry === "P" ? "sum" : entry.slice(2, -1);
    const what = kind === "sum" ? "a summand; the tensor is their sum" : `a partial ${kind}; the tensor is the ${kind} of all`;
    return `${entry}: partial ${kind} over ${where}: each holds ${what}.`;
  }
  const dim = parseInt(entry.slice(2), 10), dimOf = (e) => (e[0] === "S" ? parseInt(e.slice(2), 10) : -1);
  const axes = entries.map((e, a) => (dimOf(e) === dim ? a : -1)).filter((a) => a >= 0);
  const others = axes.filter((a) => a !== axis);
  const shared = others.length ? `, and over axis ${others.join(" and ")}` : "";
  const head = `${entry}: split on dim ${dim} over ${where}${shared}`;
  if (!shape || dim >= shape.length) return `${head}.`;
  const sizes = partSizes(shape[dim], axes, entries, mesh);
  const held = sizes.length > 2 ? `${sizes[0]} to ${sizes[sizes.length - 1]}` : sizes.join(" or ");
  return `${head}: each holds ${held} of ${shape[dim]} ${dimWord(dim, shape)}.`;
}

/** A layout as marks, one for each axis of the mesh. `focusable`: the keyboard reaches each mark. */
function layout(entries, shape, focusable = true) {
  return el("span.lay", {}, entries.map((entry, axis) => {
    const mark = el(`b.${kindOf(entry)}`, focusable ? { tabindex: 0 } : {}, entry);
    mark.explain = () => explained(entries, axis, shape, page.mesh);
    return mark;
  }));
}

const change = (c, shape, focusable) => (String(c.src) === String(c.dst) ? layout(c.src, shape, focusable)
  : el("span.change", {}, layout(c.src, shape, focusable), " → ", layout(c.dst, shape, focusable)));

class Hints {
  constructor() {
    this.box = document.getElementById("hint");
    const markOf = (e) => (e.target instanceof Element ? e.target.closest(".lay b") : null);
    document.addEventListener("pointerover", (e) => { const mark = markOf(e); if (mark) this.show(mark); });
    document.addEventListener("pointerout", (e) => { if (markOf(e)) this.hide(); });
    document.addEventListener("focusin", (e) => { const mark = markOf(e); if (mark) this.show(mark); });
    document.addEventListener("focusout", (e) => { if (markOf(e)) this.hide(); });
    document.addEventListener("keydown", (e) => { if (e.key === "Escape") this.hide(); });
    document.addEventListener("scroll", () => { if (this.mark && this.mark.isConnected) this.place(); else this.hide(); }, true);
  }

  show(mark) {
    if (!mark.explain) return;
    this.hide();
    this.mark = mark;
    this.box.textContent = mark.explain();
    this.box.hidden = false;
    mark.setAttribute("aria-describedby", "hint");
    this.place();
  }

  place() {
    const mark = this.mark.getBoundingClientRect(), box = this.box.getBoundingClientRect();
    const below = mark.bottom + 6 + box.height <= innerHeight;
    this.box.style.left = `${Math.max(8, Math.min(mark.left, document.documentElement.clientWidth - box.width - 8))}px`;
    this.box.style.top = `${below ? mark.bottom + 6 : Math.max(4, mark.top - box.height - 6)}px`;
  }

  hide() {
    if (this.mark) this.mark.removeAttribute("aria-describedby");
    this.mark = null;
    this.box.hidden = true;
  }
}
