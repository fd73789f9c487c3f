// What is read rather than drawn: collectives beside each other, buckets, what passes changed, settings.

// A table that a click on a heading sorts. Columns: {name, value(row), show(row), isNumber, group}.
// With `first`, of more than FEW rows those come first that it ranks highest, and the others are folded.
const FEW = 12, SHOWN = 5;

function table(columns, rows, attributes = {}, first = null) {
  const body = el("tbody", {});
  let by = null, down = false, isFolded = first !== null && rows.length > FEW;
  const unfold = isFolded ? el("button", { type: "button", class: "unfold", onclick: () => { isFolded = false; unfold.remove(); draw(); } }, `all ${rows.length}, in order`) : null;
  const draw = () => {
    let order = rows.map((row, index) => [row, index]);
    if (isFolded) order = order.sort(([a], [b]) => first(b) - first(a)).slice(0, SHOWN);
    if (by !== null) order.sort(([a], [b]) => { const [x, y] = [by.value(a), by.value(b)]; return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
    body.replaceChildren(...order.map(([row, index]) => el("tr", { "data-index": index },
      columns.map((c) => el("td", { class: c.isNumber ? "number" : null }, (c.show ?? c.value)(row))))));
  };
  const sort = (column) => { down = by === column && !down; by = column; isFolded = false; unfold?.remove(); draw(); };
  const heads = columns.map((c) => el("th", { class: c.isNumber ? "number" : null, scope: "col" }, el("button", { type: "button", onclick: () => sort(c) }, c.name)));
  draw();
  const groups = columns.some((c) => c.group) ? el("tr", {}, groupHeads(columns)) : null;
  return el("div", { class: "scroll" }, el("table", attributes, el("thead", {}, groups, el("tr", {}, heads)), body), unfold);
}

function groupHeads(columns) {
  const found = [];
  for (const column of columns) {
    const last = found[found.length - 1];
    if (last && last.name === (column.group ?? "")) last.count += 1;
    else found.push({ name: column.group ?? "", count: 1 });
  }
  return found.map(({ name, count }) => el("th", { class: name ? "group" : null, colspan: count }, name));
}

const badge = (kind) => el("span", { class: `badge mark-${kind}` }, KINDS[kind] ?? kind);
const time = (value) => (value === null ? "–" : seconds(value));

function exposure(t) {
  if (t.awaited === null) return "in flight";
  return t.exposed > 0 ? el("span", { class: "is-exposed" }, seconds(t.exposed)) : "hidden";
}

// Every collective of a graph: predicted, and beside it measured.
function collectiveTable(graph, run) {
  const rows = graph.timeline.collectives.map((c, n) => ({ c, n, p: run.times[n], m: graph.measured?.times[n] ?? null }));
  const timed = (group, pick) => [
    { group, name: "start", isNumber: true, value: (r) => pick(r).begin, show: (r) => time(pick(r).begin) },
    { group, name: "end", isNumber: true, value: (r) => pick(r).end, show: (r) => time(pick(r).end) },
    { group, name: "on the wire", isNumber: true, value: (r) => pick(r).end - pick(r).begin, show: (r) => time(pick(r).end - pick(r).begin) },
    { group, name: "exposed", isNumber: true, value: (r) => pick(r).exposed, show: (r) => exposure(pick(r)) },
  ];
  const columns = [
    { name: "#", isNumber: true, value: (r) => r.n },
    { name: "what", value: (r) => r.c.kind, show: (r) => badge(r.c.kind) },
    { name: "unit", value: (r) => ownerOf(r.c) },
    { name: "parameters", isNumber: true, value: (r) => r.c.parameters.length },
    { name: "bytes", isNumber: true, value: (r) => r.c.bytes, show: (r) => bytes(r.c.bytes) },
    ...timed("predicted", (r) => r.p),
    ...(graph.measured ? timed("measured", (r) => r.m) : []),
    ...(graph.measured ? [{ group: "measured", name: "starting", isNumber: true, value: (r) => r.m.issuing, show: (r) => time(r.m.issuing) }] : []),
  ];
  return table(columns, rows, { class: "collectives" }, (r) => (r.m ?? r.p).exposed);
}

// Rows that the user's all-to-alls moved, tokens for experts mostly: by rank and expert where it was measured, else what is expected.
function routingTable(graph, run) {
  const routed = new Map((graph.measured?.routed ?? []).map((r) => [r.collective, r]));
  const rows = graph.timeline.collectives.map((c, n) => ({ c, n, p: run.times[n], m: graph.measured?.times[n] ?? null, r: routed.get(n) ?? null })).filter((r) => r.c.kind === "exchange");
  if (!rows.length) return null;
  const total = (list) => sum(list ?? []);
  const column = (name, pick) => ({ group: "rows, measured", name, isNumber: true, value: (r) => total(pick(r)), show: (r) => (r.r ? `${total(pick(r))} (${pick(r).join(", ")})` : "–") });
  const columns = [
    { name: "#", isNumber: true, value: (r) => r.n },
    { name: "module", value: (r) => ownerOf(r.c) },
    { name: "group", value: (r) => r.c.group, show: (r) => groupText(graph, r.c.group) },
    { name: "sent, expected", isNumber: true, value: (r) => r.c.sent, show: (r) => bytes(r.c.sent) },
    ...(routed.size ? [{ name: "sent, measured", isNumber: true, value: (r) => r.r?.bytes ?? 0, show: (r) => (r.r ? bytes(r.r.bytes) : "–") }] : []),
    ...(routed.size ? [column("sent to each rank", (r) => r.r?.sent), column("received from each", (r) => r.r?.received)] : []),
    { name: graph.measured ? "exposed, measured" : "exposed, predicted", isNumber: true, value: (r) => (r.m ?? r.p).exposed, show: (r) => exposure(r.m ?? r.p) },
  ];
  const told = rows.filter((r) => r.r?.to.length);
  const note = !graph.measured ? null : !routed.size ? "How many rows went where is in profiles with record_shapes=True." : told.length ? null : "How many tokens each expert got is in profiles of graphs that were compiled with Plan(record_routing=True).";
  return el("div", {}, el("h3", {}, "Routing"), note ? el("p", { class: "muted" }, note) : null, table(columns, rows, { class: "routing" }), told.length ? expertsTable(told) : null);
}

// Tokens of each expert, where ranks told each other how many: the experts here over all ranks that sent to them, and what this rank sent to every expert.
function expertsTable(rows) {
  const here = (r) => r.r.of[0].map((_, expert) => sum(r.r.of.map((counts) => counts[expert])));
  const skew = (counts) => (Math.max(...counts) * counts.length) / Math.max(1, sum(counts));
  const counts = (group, name, pick) => [
    { group, name, isNumber: true, value: (r) => sum(pick(r).flat()), show: (r) => el("details", {}, el("summary", {}, `${sum(pick(r).flat())}`), pick(r).map((list) => (Array.isArray(list) ? list.join(", ") : list)).join(Array.isArray(pick(r)[0]) ? " | " : ", ")) },
    { group, name: "busiest, times the mean", isNumber: true, value: (r) => skew(pick(r).flat()), show: (r) => skew(pick(r).flat()).toFixed(2) },
  ];
  const columns = [
    { name: "#", isNumber: true, value: (r) => r.n },
    { name: "module", value: (r) => ownerOf(r.c) },
    ...counts("tokens, measured", "of the experts here, by expert", here),
    ...counts("tokens, measured", "sent, by rank | and expert", (r) => r.r.to),
    ...counts("tokens, measured", "received, by rank | and expert here", (r) => r.r.of),
  ];
  return el("div", {}, el("h3", {}, "Experts"), table(columns, rows, { class: "experts" }));
}

// Which parameters share a collective; a bar has a piece for each, as wide as its bytes, and changes shade with the unit.
function bucketTable(graph) {
  const columns = [
    { name: "#", isNumber: true, value: (r) => r.n },
    { name: "what", value: (r) => r.c.kind, show: (r) => badge(r.c.kind) },
    { name: "units that share it", value: (r) => r.c.units.length, show: (r) => el("span", {}, r.c.units.length ? r.c.units.map((u) => el("span", { class: "chip" }, u)) : ownerOf(r.c)) },
    { name: "parameters", value: (r) => r.c.parameters.length, show: (r) => parameters(r.c) },
    { name: "in full", isNumber: true, value: (r) => r.c.bytes, show: (r) => bytes(r.c.bytes) },
    { name: "sent by a rank", isNumber: true, value: (r) => r.c.sent, show: (r) => bytes(r.c.sent) },
    { name: "dtype", value: (r) => r.c.dtype },
    { name: "group", value: (r) => r.c.group, show: (r) => groupText(graph, r.c.group) },
    { name: "op", value: (r) => r.c.op, show: (r) => el("code", {}, r.c.op) },
  ];
  return table(columns, graph.timeline.collectives.map((c, n) => ({ c, n })), { class: "buckets" });
}

function groupText(graph, group) {
  const ranks = graph.timeline.groups[group] ?? [];
  const named = ranks.length > 8 ? `${ranks.length} ranks` : `ranks ${ranks.join(", ")}`;
  return ranks.length ? `${group} (${named})` : group;
}

function parameters(c) {
  if (!c.parameters.length) return "none of ours";
  const pieces = c.parameters.map((p) => el("i", { style: `flex:${Math.max(1, p.bytes)}`, class: c.units.indexOf(p.unit) % 2 ? "odd" : null, title: `${p.name} ${bytes(p.bytes)}` }));
  const count = c.parameters.length;
  return el("div", {}, el("div", { class: "pieces" }, pieces), el("details", {}, el("summary", {}, `${count} parameter${count === 1 ? "" : "s"}`),
    el("ul", {}, c.parameters.map((p) => el("li", {}, `${p.name} [${p.shape.join(", ")}] ${bytes(p.bytes)}`)))));
}

// -- passes

// Its inside is made when it is first opened.
function lazy(summary, make) {
  const box = el("details", {}, el("summary", {}, summary));
  box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) box.append(el("div", { class: "inside" }, make())); });
  return box;
}

function passList(name, passes, text) {
  const entries = passes.map((entry, index) => [passEntry(entry, index), index > 0 && !entry.diff]);
  const idle = entries.filter(([, isIdle]) => isIdle).map(([made]) => made);
  const folded = idle.length ? lazy(el("span", { class: "muted" }, `${idle.length} passes that changed no collective, cast or free`), () => idle) : null;
  return el("section", {}, el("h2", {}, name), entries.filter(([, isIdle]) => !isIdle).map(([made]) => made), folded, text ? lazy("the graph after the last pass", () => el("pre", {}, text)) : null);
}

function passEntry(entry, index) {
  const lines = entry.diff ? entry.diff.split("\n").slice(2) : [];
  const count = (sign) => lines.filter((line) => line.startsWith(sign)).length;
  const change = index === 0 ? "as it came" : lines.length ? `+${count("+")} −${count("-")} collectives, casts, frees` : "no collective changed";
  const summary = el("span", {}, el("code", {}, entry.name), " ", el("span", { class: "muted" }, change));
  return lazy(summary, () => [el("p", { class: "muted" }, entry.provenance), lines.length ? el("pre", { class: "diff" }, lines.map(diffLine)) : null]);
}

function diffLine(line) {
  const style = { "+": "added", "-": "removed", "@": "place" }[line[0]];
  return style ? el("span", { class: style }, line) : `${line}\n`;
}

// -- settings

const rate = (n) => (n ? `${bytes(n)}/s` : "as all-gathers");
const LINK = { latency: ["latency", seconds], bandwidth: ["all-gathers", rate], scatter: ["reduce-scatters", rate], exchange: ["all-to-alls", rate],
  message: ["each further message", seconds], start: ["starting delays the thread by", seconds], issue: ["and for each MB sent by", (s) => seconds(s * 1e6)] };

// Every field of a link; one that this page does not know by its name.
function linkRows(name, link) {
  return Object.entries(link).map(([field, value]) => { const [words, show] = LINK[field] ?? [field, String]; return [`${name}: ${words}`, show(value)]; });
}

function settingsTables(graph) {
  const { settings, costs } = graph.timeline;
  const text = (value) => (value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const part = (title, pairs, note) => el("section", {}, el("h2", {}, title), note ? el("p", { class: "muted" }, note) : null,
    el("div", { class: "scroll" }, el("table", { class: "settings" }, el("tbody", {}, pairs.map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", {}, text(value))))))));
  const links = Object.entries(costs.links).flatMap(([name, link]) => linkRows(name ? `group ${name}` : "every link", link));
  return el("div", { class: "two" },
    part("Plan", Object.entries(settings.plan), "What the passes were told; see Plan in the package."),
    part("Costs", [["matmuls", `${(costs.flops / 1e9).toPrecision(3)} GFLOP/s`], ["memory", `${bytes(costs.bandwidth)}/s`], ["a kernel's launch", seconds(costs.overhead)],
      ["pointwise kernels", costs.is_fused ? "fused" : "each by itself"], ["kernels measured in the model", String((costs.kernels ?? []).length)], ...links],
      costs.is_assumed ? "Assumed round numbers: nothing was measured here." : "Measured on these ranks, and agreed by them."),
    part("Versions and ranks", [...Object.entries(settings.versions), ["rank", settings.rank], ["world size", settings.world_size], ["executor", EXECUTORS[graph.timeline.executor]]]),
    part("Environment", Object.entries(settings.environment), Object.keys(settings.environment).length ? "Variables that torch and this package read." : "None of the variables that torch and this package read is set."));
}
