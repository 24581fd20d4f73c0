"use strict";
// Bars of what the time goes to and of alternatives; memory over a step.

function spentBar(plan) {
  const s = plan.cost_breakdown || {};
  const colors = { computing: "--compute", moving: "--move", updating: "--update", "computing and moving": "--compute", "parameters and gradients": "--move" };
  const hides = "moving" in s ? "moving" : "parameters and gradients";
  const parts = Object.entries(s).filter(([name, x]) => name !== "hidden" && x > 0)
    .map(([name, x]) => [name, name === hides ? Math.max(0, x - (s.hidden || 0)) : x, `var(${colors[name] || "--s3"})`]);
  const whole = sum(parts, (p) => p[1]) || 1;
  const stack = el("div.stack", { role: "img", "aria-label": parts.map((p) => `${p[0]} ${seconds(p[1])}`).join(", ") },
    parts.map(([name, x, color]) => el("i", { style: `width: ${(100 * x) / whole}%; background-color: ${color}`, title: `${name} ${seconds(x)}` })));
  const keys = parts.map(([name, x, color]) => el("span.key", {}, el("i", { style: `background: ${color}` }), `${name} ${seconds(x)} (${percent(x / whole)})`));
  if (s.hidden) keys.push(el("span.key", {}, el("i.hidden", { style: "background-color: var(--hide)" }), `${hides} ${seconds(s.hidden)} more, hidden behind computing`));
  return [stack, el("div.legend", {}, keys)];
}

function alternativeBars(plan) {
  const rows = [{ name: "this plan", cost: plan.cost, memory: plan.memory, fits: true, mine: true }, ...plan.alternatives];
  const most = Math.max(...rows.filter((r) => r.cost !== null).map((r) => r.cost));
  return rows.map((r) => {
    const more = r.cost === null || !plan.cost ? null : r.cost / plan.cost - 1;
    const price = r.cost === null ? "cannot be done" : seconds(r.cost) + (r.mine ? "" : Math.abs(more) < 5e-4 ? ", the same" : `, ${more > 0 ? "+" : ""}${percent(more)}`);
    const why = r.why ? (r.fits || r.cost === null ? r.why : `does not fit: ${r.why}`) : "";
    return el(`div.bar${r.mine ? ".mine" : ""}${r.fits ? "" : ".not"}`, {}, el("div", {}, r.name),
      el("div.track", {}, r.cost === null ? "" : el("i", { style: `width: ${(100 * r.cost) / most}%` })),
      el("div.price", {}, el("b", {}, price), r.memory ? el("div.note", {}, `${bytes(r.memory)} a rank`) : ""), why ? el("div.why", {}, why) : "");
  });
}

/** Memory over time: what is always there as bands, activations above them, the limit as a line; the pointer or the arrow keys tell of a moment. */
function memoryChart(plan, lanes) {
  const box = document.getElementById("area");
  if (lanes.length) return lanesChart(box, plan, lanes);
  if (!plan.over_time.length) return box.append(el("p.note", {}, "The plan says nothing of memory over time."));
  let wide = 0;
  const draw = () => {
    if (box.clientWidth && box.clientWidth !== wide) box.replaceChildren(...memoryDrawn(plan, (wide = box.clientWidth)));
  };
  draw();
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(box);
  const held = heldParts(plan);
  const keys = held.map(([name, n], i) => (n ? el("span.key", {}, el("i", { style: `background: var(--held${i})` }), `${name} ${bytes(n)}`) : ""));
  if (plan.limit && !nearLimit(plan)) keys.push(el("span.key", {}, `the limit of ${bytes(plan.limit)} is far above`));
  document.getElementById("held").append(el("div.legend", {}, keys));
}

/** Memory of each lane of stages over the simulated step. */
function lanesChart(box, plan, lanes) {
  const end = Math.max(...lanes.flatMap((l) => l.steps.map((s) => s[0]))) || 1;
  const most = Math.max(...lanes.flatMap((l) => l.steps.map((s) => s[1])), nearLimit(plan) ? plan.limit : 0) * 1.06 || 1;
  const color = (i) => `var(--${["s0", "move", "s1", "s2", "s3", "update", "good", "p"][i % 8]})`;
  let wide = 0;
  const draw = () => {
    if (!box.clientWidth || box.clientWidth === wide) return;
    const [W, H, left, right, top, bottom] = [(wide = box.clientWidth), 280, 66, 10, 14, 30];
    const x = (t) => left + ((W - left - right) * t) / end, y = (n) => H - bottom - ((H - top - bottom) * n) / most;
    const svg = drawn("svg", { viewBox: `0 0 ${W} ${H}`, height: H, role: "img", "aria-label": lanes.map((l) => `${l.name}: at most ${bytes(Math.max(...l.steps.map((s) => s[1])))}`).join(", ") });
    for (let k = 0; k <= 4; k++) {
      const n = (most * k) / 4;
      svg.append(drawn("line", { class: "axis", x1: left, x2: W - right, y1: y(n), y2: y(n) }), drawn("text", { x: left - 6, y: y(n) + 4, "text-anchor": "end" }, bytes(n)));
    }
    lanes.forEach((l, i) => {
      let before = l.steps[0][1], path = `M${x(0)} ${y(before)}`;
      for (const [t, n] of l.steps) { path += `L${x(t)} ${y(before)}L${x(t)} ${y(n)}`; before = n; }
      svg.append(drawn("path", { d: `${path}L${x(end)} ${y(before)}`, fill: "none", stroke: color(i), "stroke-width": 1.8 }));
    });
    if (nearLimit(plan)) svg.append(drawn("line", { class: "limit", x1: left, x2: W - right, y1: y(plan.limit), y2: y(plan.limit) }));
    svg.append(drawn("text", { x: left, y: H - 8 }, "0 s"), drawn("text", { x: W - right, y: H - 8, "text-anchor": "end" }, seconds(end * 1e-6)));
    box.replaceChildren(svg, el("div.tip"));
  };
  draw();
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(box);
  document.getElementById("held").append(el("div.legend", {}, lanes.map((l, i) => el("span.key", {}, el("i", { style: `background: ${color(i)}` }),
    `${l.name} at most ${bytes(Math.max(...l.steps.map((s) => s[1])))}`))));
}

const heldParts = (plan) => Object.entries(plan.memory_breakdown || {}).filter(([name]) => name !== "peak");
const nearLimit = (plan) => plan.limit && plan.limit < 3 * plan.memory;

function memoryDrawn(plan, W) {
  const steps = plan.over_time, H = 280, left = 66, right = 10, top = 14, bottom = 30;
  const end = plan.moments || steps[steps.length - 1][0] || 1;
  const held = heldParts(plan), base = held.filter(([name]) => name !== "activations");
  const most = Math.max(...steps.map((s) => s[1]), nearLimit(plan) ? plan.limit : 0) * 1.06 || 1;
  const x = (t) => left + ((W - left - right) * Math.max(0, Math.min(t, end))) / end, y = (n) => H - bottom - ((H - top - bottom) * n) / most;
  const svg = drawn("svg", { viewBox: `0 0 ${W} ${H}`, height: H, role: "img", tabindex: 0,
    "aria-label": `memory of a rank over a step, ${bytes(plan.memory)} at its peak${plan.limit ? `, limit ${bytes(plan.limit)}` : ""}` });
  const unit = 2 ** (10 * Math.floor(Math.log2(most) / 10)), step = unit * [1, 2, 5, 10, 20, 50, 100, 200, 500].find((k) => most / (k * unit) <= 6);
  for (let n = 0; n <= most; n += step) {
    svg.append(drawn("line", { class: "axis", x1: left, x2: W - right, y1: y(n), y2: y(n) }), drawn("text", { x: left - 6, y: y(n) + 4, "text-anchor": "end" }, n ? bytes(n) : "0"));
  }
  let path = `M${x(0)} ${y(0)}`, before = steps[0][0] > 0 ? 0 : steps[0][1];
  for (const [t, n] of steps) { path += `L${x(t)} ${y(before)}L${x(t)} ${y(n)}`; before = n; }
  svg.append(drawn("path", { d: `${path}L${x(end)} ${y(before)}L${x(end)} ${y(0)}Z`, fill: "var(--held4)" }));
  let level = 0;
  base.forEach(([, n], i) => {
    if (n) svg.append(drawn("rect", { x: left, width: W - left - right, y: y(level + n), height: y(level) - y(level + n), fill: `var(--held${i})` }));
    level += n;
  });
  if (nearLimit(plan)) {
    svg.append(drawn("line", { class: "limit", x1: left, x2: W - right, y1: y(plan.limit), y2: y(plan.limit) }),
      drawn("text", { class: "limit-word", x: W - right, y: y(plan.limit) - 5, "text-anchor": "end" }, `limit ${bytes(plan.limit)}`));
  }
  const words = plan.training ? [["forward", 0.25], ["backward", 0.75]] : [["forward", 0.5]];
  for (const [word, at] of words) svg.append(drawn("text", { x: x(end * at), y: H - 8, "text-anchor": "middle" }, word));
  if (plan.training) svg.append(drawn("line", { class: "axis", x1: x(end / 2), x2: x(end / 2), y1: top, y2: H - bottom }));
  const cursor = drawn("line", { class: "cursor", y1: top, y2: H - bottom, visibility: "hidden" }), tip = el("div.tip", { "aria-live": "polite" });
  svg.append(cursor);
  const peak = steps.reduce((a, b) => (b[1] > a[1] ? b : a));
  let now = peak[0];
  const byNumber = new Map(plan.calls.map((c) => [c.number, c]));
  const tell = (t) => {
    now = Math.max(0, Math.min(end, Math.round(t)));
    const at = steps.filter((s) => s[0] <= now).pop() || steps[0];
    const call = byNumber.get(plan.training && now > end / 2 ? end - now : now);
    cursor.setAttribute("x1", x(now)); cursor.setAttribute("x2", x(now)); cursor.setAttribute("visibility", "visible");
    tip.textContent = `${bytes(at[1])} a rank${at[1] === peak[1] ? ", the peak," : ""}${call ? ` at ${call.module ? `${call.module} ` : ""}${call.function}${now > end / 2 ? ", backward" : ""}` : ""}`;
    return call;
  };
  const timeAt = (e) => { const r = svg.getBoundingClientRect(); return (((e.clientX - r.left) / r.width) * W - left) / (W - left - right) * end; };
  svg.addEventListener("pointermove", (e) => tell(timeAt(e)));
  svg.addEventListener("click", (e) => { const call = tell(timeAt(e)); if (call) { page.tree.show(call.name); document.getElementById("graph").scrollIntoView(); } });
  svg.addEventListener("keydown", (e) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[e.key];
    if (by) { tell(now + by); e.preventDefault(); }
  });
  tell(now);
  return [svg, tip];
}
