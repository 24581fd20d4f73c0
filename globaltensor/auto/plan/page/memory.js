"use strict";
// Memory over a step: of a rank, or of each lane of stages. The limit is always in the chart.

const CHART = { height: 280, left: 66, right: 10, bottom: 30 };  // px
const memoryParts = (plan) => Object.entries(plan.memory_breakdown || {}).filter(([name]) => name !== "peak");
/** A limit far above the peak would flatten the chart: it stands above a broken axis then. */
const nearLimit = (plan) => plan.limit !== null && plan.limit < 3 * plan.memory;
const memoryColor = (name) => {
  const names = ["parameters", "gradients", "optimizer", "inputs and buffers", "activations", "gathered parameters"];
  return `var(--mem${Math.max(0, names.indexOf(name))})`;
};

/** What always stands in memory as bands, activations above them; the pointer or the arrow keys select a moment. */
function memoryChart(plan, lanes) {
  const box = document.getElementById("area"), legend = document.getElementById("memory-legend");
  const limit = plan.limit === null ? [] : [el("span.key", {}, el("i.limit-key"), `limit ${bytes(plan.limit)}`)];
  if (!lanes.length && !plan.over_time.length) {
    box.append(el("p.note", {}, `The plan has no memory over time. Its peak is ${bytes(plan.memory)} a rank${plan.limit === null ? "" : `, the limit is ${bytes(plan.limit)}`}.`));
    return;
  }
  let width = 0;
  const draw = () => {
    if (!box.clientWidth || box.clientWidth === width) return;
    width = box.clientWidth;
    box.replaceChildren(...(lanes.length ? lanesDrawn(plan, lanes, width) : memoryDrawn(plan, width)));
  };
  draw();
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(box);
  const keys = lanes.length
    ? lanes.map((l, i) => el("span.key", {}, el("i", { style: `background: ${laneColor(i)}` }), `${l.name} at most ${bytes(highest(l.steps))}`))
    : memoryParts(plan).filter(([, n]) => n).map(([name, n]) => el("span.key", {}, el("i", { style: `background: ${memoryColor(name)}` }), `${name} ${bytes(n)}`));
  legend.append(el("div.legend", {}, keys, limit));
}

const highest = (steps) => steps.reduce((most, s) => Math.max(most, s[1]), 0);
const laneColor = (i) => `var(--${["s0", "move", "s1", "s2", "s3", "update", "good", "p"][i % 8]})`;

/** Axes and limit of a chart whose highest value is `peak`: {svg, x, y, top}. */
function frameOf(plan, width, peak, end, label) {
  const { height, left, right, bottom } = CHART, far = plan.limit !== null && !nearLimit(plan);
  const top = far ? 52 : 18;
  const most = Math.max(peak, nearLimit(plan) ? plan.limit : 0) * 1.06 || 1;
  const x = (t) => left + ((width - left - right) * Math.max(0, Math.min(t, end))) / end;
  const y = (n) => height - bottom - ((height - top - bottom) * n) / most;
  const limit = plan.limit === null ? "" : `, limit ${bytes(plan.limit)}`;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${label}${limit}` });
  const unit = 2 ** (10 * Math.floor(Math.log2(most) / 10)), step = unit * [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((k) => most / (k * unit) <= 6);
  for (let n = 0; n <= most; n += step) {
    svg.append(drawn("line", { class: "axis", x1: left, x2: width - right, y1: y(n), y2: y(n) }), drawn("text", { x: left - 6, y: y(n) + 4, "text-anchor": "end" }, n ? bytes(n) : "0"));
  }
  return { svg, x, y, top, limit: () => limitOf(plan, svg, width, far ? 20 : y(plan.limit), far, top) };
}

/** The limit as a line. Far above the peak, its line is at the top edge, above a break of the axis. */
function limitOf(plan, svg, width, y, far, top) {
  if (plan.limit === null) return;
  const { left, right } = CHART;
  const times = far ? ` (${significant(Math.round((10 * plan.limit) / plan.memory) / 10)} times the peak; not to scale)` : "";
  svg.append(drawn("line", { class: "limit", x1: left, x2: width - right, y1: y, y2: y }),
    drawn("text", { class: "limit-word", x: width - right, y: y - 5, "text-anchor": "end" }, `limit ${bytes(plan.limit)}${times}`));
  if (!far) return;
  const zigzag = (at) => `M${left - 6} ${at}l4 -4l4 6l4 -6l4 4`;
  svg.append(drawn("path", { class: "break", d: `M${left} ${y}V${top - 16}M${left} ${top - 8}V${top}${zigzag(top - 15)}${zigzag(top - 8)}` }));
}

function lanesDrawn(plan, lanes, width) {
  const end = Math.max(...lanes.map((l) => l.steps[l.steps.length - 1][0])) || 1;
  const label = lanes.map((l) => `${l.name}: at most ${bytes(highest(l.steps))}`).join(", ");
  const { svg, x, y, limit } = frameOf(plan, width, Math.max(...lanes.map((l) => highest(l.steps))), end, label);
  lanes.forEach((l, i) => svg.append(drawn("path", { d: outline(l.steps, x, y, end, l.steps[0][1]), fill: "none", stroke: laneColor(i), "stroke-width": 1.8 })));
  limit();
  const { left, right, height } = CHART;
  svg.append(drawn("text", { x: left, y: height - 8 }, "0 s"), drawn("text", { x: width - right, y: height - 8, "text-anchor": "end" }, seconds(end * 1e-6)));
  return [svg, el("div.tip")];
}

/** The path of a level that changes in steps, from `level` at time 0. */
function outline(steps, x, y, end, level) {
  let path = `M${x(0)} ${y(level)}`;
  for (const [t, n] of steps) { path += `L${x(t)} ${y(level)}L${x(t)} ${y(n)}`; level = n; }
  return `${path}L${x(end)} ${y(level)}`;
}

function memoryDrawn(plan, width) {
  const { height, left, right, bottom } = CHART, steps = plan.over_time, end = plan.moments || steps[steps.length - 1][0] || 1;
  const label = `memory of a rank over a step, ${bytes(plan.memory)} at its peak`;
  const { svg, x, y, top, limit } = frameOf(plan, width, highest(steps), end, label);
  svg.setAttribute("tabindex", 0);
  svg.append(drawn("path", { d: `${outline(steps, x, y, end, steps[0][0] > 0 ? 0 : steps[0][1])}L${x(end)} ${y(0)}L${x(0)} ${y(0)}Z`, fill: memoryColor("activations") }));
  let level = 0;
  for (const [name, n] of memoryParts(plan).filter(([name]) => name !== "activations")) {
    if (n) svg.append(drawn("rect", { x: left, width: width - left - right, y: y(level + n), height: y(level) - y(level + n), fill: memoryColor(name) }));
    level += n;
  }
  limit();
  const words = plan.training ? [["forward", 0.25], ["backward", 0.75]] : [["forward", 0.5]];
  for (const [word, at] of words) svg.append(drawn("text", { x: x(end * at), y: height - 8, "text-anchor": "middle" }, word));
  if (plan.training) svg.append(drawn("line", { class: "axis", x1: x(end / 2), x2: x(end / 2), y1: top, y2: height - bottom }));
  const cursor = drawn("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" }), tip = el("div.tip", { "aria-live": "polite" });
  svg.append(cursor);
  const peak = steps.reduce((a, b) => (b[1] > a[1] ? b : a));
  let now = peak[0];
  const byNumber = new Map(plan.calls.map((c) => [c.number, c]));
  const select = (t) => {
    now = Math.max(0, Math.min(end, Math.round(t)));
    const at = steps.filter((s) => s[0] <= now).pop() || steps[0];
    const call = byNumber.get(plan.training && now > end / 2 ? end - now : now);
    cursor.setAttribute("x1", x(now)); cursor.setAttribute("x2", x(now)); cursor.setAttribute("visibility", "visible");
    tip.textContent = `${bytes(at[1])} a rank${at[1] === peak[1] ? ", the peak," : ""}${call ? ` at ${call.module ? `${call.module} ` : ""}${call.function}${now > end / 2 ? ", backward" : ""}` : ""}`;
    return call;
  };
  const timeAt = (e) => { const r = svg.getBoundingClientRect(); return (((e.clientX - r.left) / r.width) * width - left) / (width - left - right) * end; };
  svg.addEventListener("pointermove", (e) => select(timeAt(e)));
  svg.addEventListener("click", (e) => { const call = select(timeAt(e)); if (call) { page.tree.show(call.name); document.getElementById("graph").scrollIntoView(); } });
  svg.addEventListener("keydown", (e) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[e.key];
    if (by) { select(now + by); e.preventDefault(); }
  });
  select(now);
  return [svg, tip];
}
