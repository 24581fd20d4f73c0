"use strict";
// Figures, names and small elements, as the terminal's report writes them.

const significant = (x) => {
  if (!x) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(x))));
  const text = x.toFixed(Math.min(digits, 9));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
};

function seconds(x) {
  if (x === null || x === undefined || !isFinite(x)) return "never";
  const size = Math.abs(x);
  if (!size) return "0 s";
  const [unit, scale] = [["s", 1], ["ms", 1e3], ["us", 1e6]].find(([, s]) => size * s >= 0.9995) || ["us", 1e6];
  return `${significant(x * scale)} ${unit}`;
}

function bytes(n) {
  let size = Math.abs(n), unit = "B";
  for (unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (size < 1024 || unit === "TiB") break;
    size /= 1024;
  }
  return `${n < 0 ? "-" : ""}${unit === "B" ? Math.round(size) : size.toFixed(1)} ${unit}`;
}

const percent = (x) => x > 0 && x < 0.0005 ? "under 0.1 %" : `${significant(Math.round(x * 1000) / 10)} %`;
const sum = (list, of) => list.reduce((total, x) => total + of(x), 0);
const pattern = (path) => path.replace(/(^|[. ]|_)\d+(?=[. ]|$)/g, "$1*");

/** An element: el("td.n", {title: "x"}, "text", child). Text is never read as markup. */
function el(kind, about, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(about || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== ""));
  return made;
}

function drawn(tag, about, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(about || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const kindOf = (entry) => (entry[0] === "S" ? `S${Math.min(3, parseInt(entry.slice(2), 10) || 0)}` : entry[0] === "B" ? "B" : "P");

/** What a change of layout moves, in words. */
function moved(c) {
  const there = c.forward ? c.forward_collectives : "", back = c.backward ? c.backward_collectives : "";
  if (there === back) return there ? `${there} of ${c.value} and of its gradient` : c.value;
  if (there && back) return `${there} of ${c.value}, ${back} of its gradient`;
  return there ? `${there} of ${c.value}` : `${back} of the gradient of ${c.value}`;
}
