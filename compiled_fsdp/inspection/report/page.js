// The page: which rank, which graphs and which executor are shown, the tabs, and the numbers above them.

const EXECUTORS = { plain: "the graph as it is", fused: "under Inductor" };
const TABS = { timeline: "Timeline", memory: "Memory", buckets: "Buckets", passes: "Passes", settings: "Settings" };
let data = null;
const state = { rank: 0, step: null, executor: null, tab: location.hash.slice(1) in TABS ? location.hash.slice(1) : "timeline" };

// A forward with the backward that goes on from it, or either alone.
function stepsOf(rank) {
  const backwards = rank.graphs.filter((g) => g.timeline.kind === "backward");
  const steps = rank.graphs.filter((g) => g.timeline.kind === "forward").map((forward) => {
    const own = backwards.filter((b) => b.memory.after === forward.name);
    return [forward, ...own.slice(-1)];
  });
  return [...steps, ...backwards.filter((b) => b.memory.after === null).map((b) => [b])];
}

// First a step that was measured, else a whole one; of several the last.
function bestStep(steps) {
  const rate = (step) => 2 * step.some((g) => g.measured) + (step.length > 1);
  return steps.reduce((best, step, n) => (rate(step) >= rate(steps[best]) ? n : best), 0);
}

function current() {
  const rank = data.ranks[state.rank], steps = stepsOf(rank);
  const graphs = steps[state.step ?? bestStep(steps)] ?? steps[0];
  return { rank, steps, graphs, executor: state.executor ?? graphs[0].timeline.executor };
}

function choice(label, options, selected, act) {
  const select = el("select", { "aria-label": label, onchange: (event) => { act(event.target.value); render(); } },
    options.map(([value, words]) => el("option", { value, selected: String(value) === String(selected) }, words)));
  return el("label", {}, el("span", {}, label), select);
}

function switches({ rank, steps, graphs, executor }) {
  const found = [];
  if (data.ranks.length > 1) found.push(choice("rank", data.ranks.map((r, n) => [n, `rank ${r.rank}`]), state.rank, (v) => Object.assign(state, { rank: Number(v), step: null })));
  if (steps.length > 1) found.push(choice("graphs", steps.map((s, n) => [n, s.map((g) => g.name).join(" + ")]), steps.indexOf(graphs), (v) => { state.step = Number(v); }));
  found.push(choice("predicted for", Object.entries(EXECUTORS).map(([key, words]) => [key, key === graphs[0].timeline.executor ? `${words} (runs here)` : words]), executor, (v) => { state.executor = v; }));
  found.push(el("label", {}, "trace for Perfetto", el("button", { type: "button", id: "trace", onclick: saveTrace }, "save trace.json")));
  return found;
}

function saveTrace() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(data.trace)], { type: "application/json" }));
  el("a", { href: url, download: "trace.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const tile = (label, value, note, style) => el("div", { class: `tile ${style ?? ""}` }, el("span", {}, label), el("b", {}, value), el("span", {}, note));

// What was measured comes first; of a prediction, how far it is from that.
function tiles({ rank, graphs, executor }) {
  const runs = graphs.map((g) => g.timeline[executor]), collectives = graphs.flatMap((g) => g.timeline.collectives);
  const exposed = sum(runs, (r) => sum(r.times, (t) => t.exposed)), total = sum(runs, (r) => r.total);
  const peak = graphs.reduce((best, g) => (g.memory[executor].peak > best.memory[executor].peak ? g : best));
  const what = graphs.length > 1 ? "forward and backward" : graphs[0].timeline.kind;
  return [...(rank.step ? measuredTiles(rank.step) : []), predictedTile(graphs, what, total, exposed),
    tile("communication", `${collectives.length} collectives`, `each rank sends ${bytes(sum(collectives, (c) => c.sent))}`),
    tile("predicted peak above rest", bytes(peak.memory[executor].peak), `in ${peak.timeline.kind}, at rest ${bytes(graphs[0].memory[executor].at_rest)}`)];
}

function measuredTiles(step) {
  const apart = sum(step.parts.filter(([, , kind]) => ["optimizer", "clip", "data"].includes(kind)), ([begin, end]) => end - begin);
  return [tile("profiled step", seconds(step.total), step.compiling ? `${seconds(step.compiling)} of it compilation` : "measured; a profiler makes it slower"),
    tile("waits for communication", percent(step.waiting, step.total), `${seconds(step.waiting)}, measured`),
    tile("starts collectives", percent(step.starting, step.total), `${seconds(step.starting)}, measured`),
    tile("optimizer, clipping, data", percent(apart, step.total), `${seconds(apart)}, measured`)];
}

const FAR = 2; // times as long, or as short, as was measured

function predictedTile(graphs, what, total, exposed) {
  const note = `${seconds(exposed)} of it exposed`;
  if (!graphs.every((g) => g.measured)) return tile(`predicted ${what}`, seconds(total), `${note}; not measured`);
  const measured = sum(graphs, (g) => g.measured.total), isFar = total > FAR * measured || measured > FAR * total;
  const far = isFar ? "; too far off to plan with" : "";
  return tile(`predicted ${what}`, seconds(total), `${note}; measured ${seconds(measured)}${far}`, isFar ? "is-far" : "");
}

const DRAWN = [];

function timelineTab({ graphs, executor, rank }) {
  const units = [...new Set(rank.graphs.flatMap((g) => g.timeline.collectives.flatMap((c) => c.units)))].flatMap((u) => u.split(", "));
  setPrefix(units);
  return [el("div", { class: "bar-of-tools" }, timelineLegend(), el("span", { class: "muted hint" }, "drag to zoom, double-click for all; click a collective to keep it")),
    stepSection(), graphs.map((graph) => {
      const run = graph.timeline[executor], line = new Timeline(graph, run, units);
      const rows = collectiveTable(graph, run);
      DRAWN.push(line);
      rows.addEventListener("click", (event) => { const row = event.target.closest("tbody tr"); if (row) line.select(Number(row.dataset.index)); });
      line.onselect = (index) => rows.querySelectorAll("tbody tr").forEach((row) => row.classList.toggle("is-selected", Number(row.dataset.index) === index));
      const exposed = sum(run.times, (t) => t.exposed);
      return el("section", { class: "graph" }, el("h2", {}, graph.timeline.kind, el("small", {}, `${graph.name}: ${seconds(run.total)} predicted, ${seconds(exposed)} exposed`, measuredText(graph))),
        el("div", { class: "bar-of-tools" }, tools(line.view)), line.root, line.detail, el("h3", {}, "Collectives"), rows, routingTable(graph, run));
    })];
}

function measuredText({ measured }) {
  if (!measured) return "";
  const note = measured.has_arrivals ? "" : "; when messages arrived was not recorded, so a collective is shown until it was awaited";
  return `; ${seconds(measured.total)} measured, ${seconds(sum(measured.times, (t) => t.exposed))} exposed${note}`;
}

function memoryTab({ graphs, executor }) {
  const memory = new Memory(graphs, executor);
  DRAWN.push(memory);
  const axis = el("select", { "aria-label": "horizontal axis", onchange: (event) => memory.along(event.target.value === "time") },
    el("option", { value: "nodes" }, "by node"), el("option", { value: "time" }, "by predicted time"));
  return [el("h2", {}, "Memory over the step", el("small", {}, `bytes alive above what is at rest (${bytes(graphs[0].memory[executor].at_rest)}); click for what is alive there`)),
    el("div", { class: "bar-of-tools" }, memory.legend(), axis, tools(memory.view)), memory.root, memory.owners];
}

const DRAW = {
  timeline: timelineTab,
  memory: memoryTab,
  buckets: ({ graphs }) => graphs.map((g) => el("section", {}, el("h2", {}, `${g.timeline.kind}`, el("small", {}, `${g.name}: which parameters share a collective`)), bucketTable(g))),
  passes: ({ rank, graphs }) => [rank.joint.map(([name, passes]) => passList(name, passes, "")), graphs.map((g) => passList(g.name, g.passes, g.text))],
  settings: ({ graphs }) => settingsTables(graphs[0]),
};

function tabs() {
  return Object.entries(TABS).map(([key, words]) => el("button", { type: "button", role: "tab", id: `tab-${key}`, "aria-controls": "main", "aria-selected": String(key === state.tab),
    onclick: () => { state.tab = key; history.replaceState(null, "", `#${key}`); render(); } }, words));
}

function redraw() {
  DRAWN.forEach((drawing) => drawing.draw());
}

function render() {
  const now = current(), { settings, costs } = now.graphs[0].timeline;
  tip.hide();
  document.title = `${data.title}: compiled_fsdp report`;
  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = `rank ${now.rank.rank} of ${settings.world_size}, compiled_fsdp ${settings.versions.compiled_fsdp}, torch ${settings.versions.torch}`;
  document.getElementById("switches").replaceChildren(...switches(now));
  document.getElementById("headline").textContent = now.rank.headline;
  const notice = document.getElementById("notice");
  notice.hidden = !costs.is_assumed;
  notice.textContent = "Predicted times rest on assumed costs (round numbers, see Settings): nothing was measured on this machine. Order, bytes and memory do not depend on them.";
  document.getElementById("tiles").replaceChildren(...tiles(now));
  document.getElementById("tabs").replaceChildren(...tabs());
  DRAWN.length = 0;
  document.getElementById("main").replaceChildren(...[DRAW[state.tab](now)].flat(2).filter(Boolean));
  redraw();
}

async function unpacked() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent.trim()), (c) => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

document.getElementById("switches").addEventListener("submit", (event) => event.preventDefault());
unpacked().then((found) => {
  data = found;
  render();
  // The width in which drawings were made: that of the window, or what a scroll bar left of it.
  let drawnAt = document.getElementById("main").clientWidth;
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width === drawnAt) return;
    drawnAt = contentRect.width;
    redraw();
  }).observe(document.getElementById("main"));
}, (error) => { document.getElementById("headline").textContent = `This page cannot be unpacked here (${error}); a browser of 2023 or later can.`; });
