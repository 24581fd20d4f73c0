"use strict";
// The timeline: lanes of a Chrome trace, drawn on a canvas; wheel or buttons zoom, dragging and arrow keys move.

class Times {
  constructor(trace, about) {
    this.box = document.getElementById("canvas");
    this.tip = document.getElementById("at");
    const spans = (trace.traceEvents || []).filter((e) => e.ph === "X");
    if (!spans.length) { this.box.append(el("p.note", {}, "The plan has no timeline.")); return; }
    const names = new Map((trace.traceEvents || []).filter((e) => e.ph === "M").map((e) => [`${e.name}:${e.pid}:${e.tid ?? ""}`, e.args.name]));
    const lanes = [...new Set(spans.map((e) => `${e.pid}:${e.tid}`))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const many = new Set(spans.map((e) => e.pid)).size > 1;
    this.lanes = lanes.map((lane) => {
      const [pid] = lane.split(":");
      const process = many ? `${names.get(`process_name:${pid}:`) || pid} ` : "";
      return `${process}${names.get(`thread_name:${lane}`) || lane}`;
    });
    this.spans = spans.map((e) => ({ lane: lanes.indexOf(`${e.pid}:${e.tid}`), start: e.ts, end: e.ts + e.dur, name: e.name, cat: e.cat || "" })).sort((a, b) => a.start - b.start);
    this.end = Math.max(...this.spans.map((s) => s.end)) || 1;
    this.from = 0; this.to = this.end;
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": `timeline of ${this.lanes.length} lanes, ${seconds(this.end * 1e-6)} in all` });
    this.box.append(this.canvas);
    this.canvas.addEventListener("wheel", (e) => { if (e.ctrlKey || e.shiftKey || e.metaKey) { this.zoom(e.deltaY < 0 ? 1.25 : 0.8, this.timeAt(e)); e.preventDefault(); } }, { passive: false });
    this.canvas.addEventListener("pointerdown", (e) => { this.grip = e.clientX; this.canvas.setPointerCapture(e.pointerId); });
    this.canvas.addEventListener("pointermove", (e) => this.hover(e));
    this.canvas.addEventListener("pointerup", () => { this.grip = undefined; });
    this.canvas.addEventListener("keydown", (e) => this.key(e));
    document.getElementById("wider").addEventListener("click", () => this.zoom(2));
    document.getElementById("narrower").addEventListener("click", () => this.zoom(0.5));
    document.getElementById("reset").addEventListener("click", () => { this.from = 0; this.to = this.end; this.paint(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    new ResizeObserver(() => requestAnimationFrame(() => this.paint())).observe(this.box);
    this.tip.textContent = `${seconds(this.end * 1e-6)} in all, ${about}; Ctrl and the wheel zoom, dragging moves`;
  }

  timeAt(e) {
    const r = this.canvas.getBoundingClientRect();
    return this.from + ((e.clientX - r.left - this.left) / (r.width - this.left)) * (this.to - this.from);
  }

  zoom(by, about = (this.from + this.to) / 2) {
    const wide = Math.min(this.end, (this.to - this.from) / by);
    this.move(about - ((about - this.from) / (this.to - this.from)) * wide, wide);
  }

  move(from, wide = this.to - this.from) {
    this.from = Math.max(0, Math.min(from, this.end - wide));
    this.to = this.from + wide;
    this.paint();
  }

  key(e) {
    const wide = this.to - this.from;
    if (e.key === "ArrowRight") this.move(this.from + wide / 5);
    else if (e.key === "ArrowLeft") this.move(this.from - wide / 5);
    else if (e.key === "+" || e.key === "=") this.zoom(2);
    else if (e.key === "-") this.zoom(0.5);
    else return;
    e.preventDefault();
  }

  hover(e) {
    if (this.grip !== undefined) {
      const r = this.canvas.getBoundingClientRect();
      this.move(this.from - ((e.clientX - this.grip) / (r.width - this.left)) * (this.to - this.from));
      this.grip = e.clientX;
    }
    const r = this.canvas.getBoundingClientRect(), lane = Math.floor((e.clientY - r.top) / this.height), t = this.timeAt(e), slack = (this.to - this.from) / 500;
    const span = this.spans.find((s) => s.lane === lane && s.start - slack <= t && t <= s.end + slack);
    if (span) this.tip.textContent = `${span.name}: ${seconds((span.end - span.start) * 1e-6)} from ${seconds(span.start * 1e-6)}`;
  }

  paint() {
    const wide = this.box.clientWidth;
    if (!wide) return;
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
    this.height = this.lanes.length > 24 ? 16 : 30;
    const tall = this.height * this.lanes.length + 18, scale = devicePixelRatio || 1, c = this.canvas.getContext("2d");
    this.canvas.width = wide * scale; this.canvas.height = tall * scale; this.canvas.style.height = `${tall}px`;
    c.scale(scale, scale);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    this.left = Math.min(wide * 0.25, 12 + Math.max(...this.lanes.map((n) => c.measureText(n).width)));
    const x = (t) => this.left + ((t - this.from) / (this.to - this.from)) * (wide - this.left);
    c.fillStyle = color("--shade");
    this.lanes.forEach((_, i) => c.fillRect(this.left, i * this.height + 2, wide - this.left, this.height - 4));
    const paints = this.paints(color);
    for (const s of this.spans) {
      if (s.end < this.from || s.start > this.to) continue;
      const a = Math.max(this.left, x(s.start)), b = Math.min(wide, x(s.end)), y = s.lane * this.height + 2;
      c.fillStyle = paints(s);
      c.fillRect(a, y, Math.max(0.6, b - a - (b - a > 4 ? 0.8 : 0)), this.height - 4);
      if (b - a > 34) {
        c.save(); c.beginPath(); c.rect(a, y, b - a - 3, this.height); c.clip();
        c.fillStyle = color("--ground");
        c.fillText(s.name, a + 4, y + this.height / 2 - 2);
        c.restore();
      }
    }
    c.fillStyle = color("--soft");
    this.lanes.forEach((name, i) => c.fillText(name, 2, i * this.height + this.height / 2, this.left - 8));
    const tall0 = this.height * this.lanes.length + 9;
    c.fillText(seconds(this.from * 1e-6), this.left, tall0);
    const last = seconds(this.to * 1e-6);
    c.fillText(last, wide - c.measureText(last).width, tall0);
  }

  /** A colour for each kind of span. */
  paints(color) {
    const known = { forward: "--compute", backward: "--s2", "backward of inputs": "--s2", "backward of weights": "--s1", moving: "--move", communication: "--move", transfer: "--move", optimizer: "--update", updating: "--update" };
    const spare = ["--s1", "--s3", "--s0"], chosen = new Map();
    return (s) => {
      if (!chosen.has(s.cat)) chosen.set(s.cat, color(known[s.cat] || spare[chosen.size % spare.length]));
      return chosen.get(s.cat);
    };
  }
}
