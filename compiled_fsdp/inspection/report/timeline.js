// The timeline of one graph: a lane for the training thread and one for the wire, predicted and, where there is one, measured.

const UNIT = 22, KERNEL = 16, WIRE = 22, GAP = 12;

// The unit that a module belongs to: the longest unit name that its path begins with.
function unitOf(module, units) {
  const inside = units.filter((unit) => module === unit || module.startsWith(`${unit}.`));
  return inside.sort((a, b) => b.length - a.length)[0] ?? (module || "");
}

// Stretches of computation by unit: neighbours in one unit are drawn together, and units differ in shade from the one before.
function grouped(compute, units) {
  const found = [], shades = new Map();
  for (const [begin, end, node, module] of compute) {
    const name = unitOf(module, units);
    const last = found[found.length - 1];
    if (last && last.name === name && begin - last.end < 1e-9 && !last.node === !node) last.end = end;
    else found.push({ begin, end, name, node, shade: 0 });
  }
  for (const group of found) {
    if (group.name && !shades.has(group.name)) shades.set(group.name, shades.size % 2);
    group.shade = shades.get(group.name) ?? 0;
  }
  return found;
}

// A row for each collective, so that those under way at once do not cover each other; at most `most` rows.
function rowsOf(times, most = 4) {
  const ends = [];
  return times.map(({ begin, end }) => {
    let row = ends.findIndex((e) => e <= begin + 1e-12);
    if (row < 0) row = ends.length < most ? ends.length : ends.indexOf(Math.min(...ends));
    ends[row] = end;
    return row;
  });
}

class Timeline extends Drawing {
  constructor(graph, run, units) {
    super();
    this.graph = graph;
    this.collectives = graph.timeline.collectives;
    this.sources = [["predicted", run], ["measured", graph.measured]].filter(([, found]) => found).map(([label, found]) => {
      const rows = rowsOf(found.times);
      return { label, run: found, rows, height: UNIT + KERNEL + 2 * GAP + WIRE * Math.max(1, ...rows.map((row) => row + 1)), groups: grouped(found.compute, units) };
    });
    let top = TOP + 4;
    for (const source of this.sources) { source.top = top; top += source.height; }
    this.height = top + 18;
    this.selected = null;
    this.root = svg("svg", { class: "timeline", tabindex: 0, role: "group", "aria-label": `timeline of ${graph.timeline.kind}` });
    this.view = new View(Math.max(...this.sources.map((s) => s.run.total)) || 1e-9, () => this.draw());
    this.detail = el("div", { class: "detail", hidden: true, "aria-live": "polite" });
    steer(this.root, this.view, LEFT, RIGHT);
    this.root.addEventListener("pointerleave", () => tip.hide());
  }

  draw() {
    const height = this.height;
    this.root.style.height = `${height + 2}px`; // with its border; no viewBox: one unit is one pixel
    this.root.replaceChildren(this.patterns(), this.axis(height), ...this.sources.map((source) => this.lanes(source)));
    this.links();
  }

  lanes(source) {
    const { top } = source;
    const wireTop = top + UNIT + KERNEL + GAP;
    const text = (y, words, style) => svg("text", { x: 10, y, class: style }, words);
    return svg("g", { class: `source source-${source.label}` },
      text(top + 15, source.label, "lane"), text(top + 32, "training thread"), text(wireTop + 17, "wire"),
      svg("g", { class: "compute-lane" }, this.units(source, top), this.kernels(source, top + UNIT), this.issues(source, top), this.waits(source, top)),
      svg("g", { class: "wire-lane" }, this.collectives.map((c, index) => this.bar(source, c, index, wireTop))));
  }

  units(source, top) {
    return source.groups.map((group) => {
      const at = this.span(group.begin, group.end, 0.5);
      if (!at) return null;
      const name = group.name || (source.label === "measured" ? "computes" : "");
      const about = (event) => tip.show(event, el("b", {}, name || group.node || "computes"),
        definitions([["from", seconds(group.begin)], ["takes", seconds(group.end - group.begin)]]));
      return svg("g", { class: "unit", onpointermove: about, onpointerout: tip.hide },
        svg("rect", { class: `unit-${group.shade}`, y: top, height: group.node ? UNIT : UNIT + KERNEL, ...at }), this.label(short(name), at, top + 15));
    });
  }

  kernels(source, top) {
    const drawn = [];
    let last = null;
    source.run.compute.forEach(([begin, end, node, module], index) => {
      const at = node ? this.span(begin, end, 0.3) : null;
      if (!at || (last && at.width < 1 && at.x + at.width < last + 0.7)) return;
      last = at.x + at.width;
      const about = (event) => tip.show(event, el("b", { class: "mono" }, node), definitions([
        ["module", module || "none"], ["from", seconds(begin)], ["takes", `${seconds(end - begin)}, light kernels after it included`]]));
      drawn.push(svg("g", { class: "kernel", onpointermove: about, onpointerout: tip.hide },
        svg("rect", { class: `kernel-${index % 2}`, y: top, height: KERNEL, ...at }), this.label(node, at, top + 12, false)));
    });
    return drawn;
  }

  // How long the thread is busy with starting a collective.
  issues(source, top) {
    return source.run.times.map((times, index) => {
      const at = times.issuing ? this.span(times.issued, times.issued + times.issuing, 1) : null;
      if (!at) return null;
      const about = (event) => tip.show(event, el("b", {}, `starts the ${nameOf(this.collectives[index])}`), el("p", {}, `takes ${seconds(times.issuing)}`));
      return svg("g", { class: `issues kind-${this.collectives[index].kind}`, onpointermove: about, onpointerout: tip.hide, onclick: () => this.select(index) },
        svg("rect", { y: top, height: UNIT + KERNEL, ...at }), this.label("starts", at, top + 15, false));
    });
  }

  waits(source, top) {
    return source.run.times.map((times, index) => {
      const at = times.exposed > 0 && times.awaited !== null ? this.span(times.awaited, times.awaited + times.exposed, 1) : null;
      if (!at) return null;
      const about = (event) => tip.show(event, el("b", {}, `stands still for ${seconds(times.exposed)}`),
        el("p", {}, `waits for the ${nameOf(this.collectives[index])}`));
      return svg("rect", { class: "waits", y: top, height: UNIT + KERNEL, "data-index": index, onpointermove: about, onpointerout: tip.hide,
        onclick: () => this.select(index), ...at });
    });
  }

  bar(source, collective, index, top) {
    const times = source.run.times[index];
    const at = this.span(times.begin, times.end, 2);
    if (!at) return null;
    top += source.rows[index] * WIRE;
    const from = times.awaited === null ? times.end : Math.max(times.begin, times.awaited);
    const shown = times.exposed > 0 && from < times.end ? this.span(from, times.end, 1) : null;
    return svg("g", { class: `bar kind-${collective.kind}${this.selected === index ? " is-selected" : ""}`, "data-index": index,
      "aria-label": `${nameOf(collective)}, ${times.exposed > 0 ? `${seconds(times.exposed)} exposed` : "hidden"}`,
      onpointermove: (event) => tip.show(event, ...this.about(index, source, 8)), onpointerout: tip.hide, onclick: () => this.select(index) },
      svg("rect", { y: top, height: WIRE - 2, rx: 2, ...at }), shown && svg("rect", { class: "exposed", y: top + WIRE - 8, height: 6, ...shown }),
      this.label(ownerOf(collective).split(", ").map(short).join(", "), at, top + 14));
  }

  // What is to be said of a collective; `most` parameters are listed, and what does not depend on the source unless it is null.
  about(index, source, most) {
    const c = this.collectives[index], t = source.run.times[index];
    const state = t.exposed > 0 ? el("span", { class: "is-exposed" }, `exposed for ${seconds(t.exposed)}`) : t.awaited === null ? "left in flight" : "hidden";
    const when = [
      [source.label, `on the wire from ${seconds(t.begin)} to ${seconds(t.end)} (${seconds(t.end - t.begin)})`],
      ["started at", `${seconds(t.issued)}${t.issuing ? `, which took the thread ${seconds(t.issuing)}` : ""}`],
      ["awaited at", t.awaited === null ? "not in this graph" : seconds(t.awaited)], ["so it is", state]];
    return [el("b", {}, nameOf(c)), definitions(most === null ? when : [...this.what(c, most), ...when])];
  }

  what(c, most) {
    const names = c.parameters.slice(0, most).map((p) => `${p.name} [${p.shape.join(", ")}] ${bytes(p.bytes)}`);
    const rest = c.parameters.length - names.length;
    return [["parameters", el("span", {}, names.length ? names.map((n) => el("div", {}, n)) : "none of ours", rest > 0 ? `and ${rest} more` : null)],
      ["bytes", `${bytes(c.bytes)} in full, each rank sends ${bytes(c.sent)}; ${c.dtype}`],
      ["group", groupText(this.graph, c.group)], ["node", el("code", {}, `%${c.node}: ${c.op}`)]];
  }

  select(index) {
    this.selected = this.selected === index ? null : index;
    this.detail.hidden = this.selected === null;
    this.detail.replaceChildren(...(this.selected === null ? [] : this.sources.map((s, n) => el("div", {}, this.about(index, s, n ? null : Infinity)))));
    this.draw();
    this.onselect?.(this.selected);
  }

  // From the selected collective to where the thread starts it and awaits it.
  links() {
    if (this.selected === null) return;
    this.sources.forEach((source) => {
      const times = source.run.times[this.selected], { top } = source;
      const bottom = top + UNIT + KERNEL + GAP + WIRE * source.rows[this.selected];
      const line = (thread, wire) => this.root.append(svg("path", { class: "link",
        d: `M${this.x(thread)} ${top} V${top + UNIT + KERNEL} L${this.x(wire)} ${bottom}` }));
      line(times.issued, times.begin);
      if (times.awaited !== null) line(times.awaited, times.end);
    });
  }
}

function timelineLegend() {
  const entry = (mark, words) => el("span", {}, el("i", { class: mark }), words);
  return el("div", { class: "legend" }, entry("mark-gather", "all-gather"), entry("mark-reduce", "reduction"), entry("mark-all_reduce", "all-reduce, all-to-all"),
    entry("mark-exposed", "exposed: the thread stands still"), entry("mark-compute", "computes, by unit; below, by kernel"),
    entry("mark-issues", "starts a collective"));
}
