// Elements, numbers and names. Text only ever goes into text nodes and attributes: nothing here parses markup.

const NS = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(NS, tag), attributes, children);

function bytes(n) {
  const size = Math.abs(n);
  for (const [unit, value] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (size >= value) return `${(n / value).toFixed(size >= 100 * value ? 0 : size >= 10 * value ? 1 : 2)} ${unit}`;
  }
  return `${n} B`;
}

function seconds(s) {
  const size = Math.abs(s);
  if (size >= 1) return `${s.toFixed(2)} s`;
  if (size >= 1e-3) return `${(s * 1e3).toFixed(size >= 0.1 ? 0 : size >= 0.01 ? 1 : 2)} ms`;
  return `${(s * 1e6).toFixed(0)} µs`;
}

const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "0 %");
const sum = (list, pick = (x) => x) => list.reduce((total, entry) => total + pick(entry), 0);
const KINDS = { gather: "all-gather", reduce: "reduction", all_reduce: "all-reduce", exchange: "all-to-all" };
const ownerOf = (c) => c.units.join(", ") || c.module || "the model's own";

// What the names of all units below the outermost begin with, all but the last part of it: "model." of model.layers.0 and model.layers.1.
let prefix = "";
function setPrefix(names) {
  const parts = names.filter((name) => name.includes(".")).map((name) => name.split("."));
  const first = parts[0] ?? [], other = first.findIndex((part, n) => parts.some((p) => p[n] !== part));
  prefix = parts.length > 1 && other > 1 ? `${first.slice(0, other - 1).join(".")}.` : "";
}
const short = (name) => (prefix && name.startsWith(prefix) ? name.slice(prefix.length) : name);
const nameOf = (c) => `${KINDS[c.kind] ?? c.kind} of ${ownerOf(c)}`;
const dotted = (kind) => el("i", { class: `dot ${kind}` });

function definitions(pairs) {
  return el("dl", {}, pairs.map(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]));
}

const tip = {
  show(event, ...content) {
    const box = document.getElementById("tip");
    box.replaceChildren(...content);
    box.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
    const below = event.clientY + 18 + box.offsetHeight < innerHeight;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${below ? event.clientY + 18 : Math.max(8, event.clientY - box.offsetHeight - 12)}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};
