// The memory of a step: bytes alive by kind over its nodes, the peak, and what is alive at any place.

const KIND_ORDER = ["activation saved for backward", "output", "gradient", "gathered parameter", "bucket buffer", "optimizer state", "in-flight collective", "temporary"];
const M = { left: 66, right: 14, top: 26, bottom: 40, height: 300 };
const styleOf = (kind) => `kind-${kind.replaceAll(" ", "-")}`;

class Memory {
  constructor(graphs, executor) {
    this.parts = graphs.map((graph) => ({ graph, profile: graph.memory[executor], run: graph.timeline[executor] }));
    this.kinds = KIND_ORDER.filter((kind) => this.parts.some((p) => kind in p.profile.kinds));
    this.kinds.push(...new Set(this.parts.flatMap((p) => Object.keys(p.profile.kinds)).filter((k) => !this.kinds.includes(k))));
    this.points = this.parts.flatMap((part) => part.profile.during.map((_, index) => ({ part, index })));
    this.peak = this.points.reduce((best, p, n) => (this.at(p) > this.at(this.points[best]) ? n : best), 0);
    this.chosen = this.peak;
    this.byTime = false;
    this.root = svg("svg", { class: "memory", tabindex: 0, role: "group", "aria-label": "memory over the step" });
    this.owners = el("div", { class: "owners" });
    this.view = new View(1, () => this.draw());
    steer(this.root, this.view, M.left, M.right);
    this.root.addEventListener("pointermove", (event) => this.hover(event));
    this.root.addEventListener("pointerleave", () => { tip.hide(); this.root.querySelector(".cursor")?.remove(); });
    this.root.addEventListener("click", (event) => { this.chosen = this.nearest(event); this.draw(); this.list(); });
    this.measure();
    this.list();
  }

  at({ part, index }) {
    return part.profile.during[index];
  }

  // Where each point lies on the axis, by node or by predicted time.
  measure() {
    let before = 0;
    this.places = [];
    for (const part of this.parts) {
      const count = part.profile.during.length;
      for (let n = 0; n < count; n++) this.places.push(before + (this.byTime ? part.run.nodes[n] : n));
      before += this.byTime ? part.run.total : count;
    }
    this.view.full = before || 1;
    this.view.begin = 0;
    this.view.end = this.view.full;
  }

  along(byTime) {
    this.byTime = byTime;
    this.measure();
    this.draw();
  }

  get width() {
    return this.root.clientWidth || 1200;
  }

  x(place) {
    return M.left + ((place - this.view.begin) / (this.view.end - this.view.begin)) * (this.width - M.left - M.right);
  }

  y(value) {
    return M.top + (1 - value / this.most) * (M.height - M.top - M.bottom);
  }

  nearest(event) {
    const share = (event.clientX - this.root.getBoundingClientRect().left - M.left) / (this.width - M.left - M.right);
    const place = this.view.begin + share * (this.view.end - this.view.begin);
    let low = 0, high = this.places.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.places[middle] <= place) low = middle; else high = middle - 1;
    }
    return low;
  }

  draw() {
    this.most = this.at(this.points[this.peak]) * 1.12 || 1;
    this.root.style.height = `${M.height + 2}px`;
    const clip = svg("defs", {}, svg("clipPath", { id: "inside" },
      svg("rect", { x: M.left, y: 0, width: Math.max(1, this.width - M.left - M.right), height: M.height })));
    this.root.replaceChildren(clip, this.axes(), svg("g", { "clip-path": "url(#inside)" }, this.areas(), this.borders(), this.mark(this.peak, "peak")));
    if (this.chosen !== this.peak) this.root.append(this.mark(this.chosen, "cursor"));
  }

  axes() {
    const unit = this.most >= 1e9 ? ["GB", 1e9] : this.most >= 1e6 ? ["MB", 1e6] : ["kB", 1e3];
    const up = ticks(0, this.most / unit[1], 5), scale = this.byTime ? 1e3 : 1;
    const along = ticks(this.view.begin * scale, this.view.end * scale, this.width / 130);
    const label = (v, step) => v.toFixed(decimals(step));
    return svg("g", { class: "axis" },
      up.values.map((v) => [svg("line", { x1: M.left, x2: this.width - M.right, y1: this.y(v * unit[1]), y2: this.y(v * unit[1]) }),
        svg("text", { x: M.left - 8, y: this.y(v * unit[1]) + 4, "text-anchor": "end" }, `${label(v, up.step)} ${unit[0]}`)]),
      along.values.map((v) => svg("text", { x: this.x(v / scale), y: M.height - 22, "text-anchor": "middle" }, label(v, along.step))),
      svg("text", { x: this.width - M.right, y: M.height - 6, "text-anchor": "end" }, this.byTime ? "predicted time, ms" : "node of the graphs, in order"));
  }

  // What is drawn: [point, left edge, right edge]; of the points in one column of pixels the highest, so that no peak is lost.
  columns() {
    const found = [];
    this.points.forEach((point, n) => {
      const from = this.x(this.places[n]), to = this.x(this.places[n + 1] ?? this.view.full);
      if (to < M.left || from > this.width - M.right) return;
      const last = found[found.length - 1];
      if (!last || Math.floor(last[1]) !== Math.floor(from)) found.push([point, from, to]);
      else found[found.length - 1] = [this.at(point) > this.at(last[0]) ? point : last[0], last[1], to];
    });
    return found;
  }

  areas() {
    const columns = this.columns(), base = columns.map(() => 0);
    return this.kinds.map((kind) => {
      const upper = [], lower = [];
      columns.forEach(([{ part, index }, from, to], n) => {
        lower.push(`${from} ${this.y(base[n])}`, `${to} ${this.y(base[n])}`);
        base[n] += part.profile.kinds[kind]?.[index] ?? 0;
        upper.push(`${from} ${this.y(base[n])}`, `${to} ${this.y(base[n])}`);
      });
      return svg("path", { class: `area ${styleOf(kind)}`, d: `M${upper.join("L")}L${lower.reverse().join("L")}Z` });
    });
  }

  // Where one graph ends and the next begins.
  borders() {
    let before = 0;
    return this.parts.map((part, n) => {
      const x = this.x(before);
      before += this.byTime ? part.run.total : part.profile.during.length;
      return [n ? svg("line", { class: "cursor", x1: x, x2: x, y1: M.top - 8, y2: M.height - M.bottom }) : null,
        svg("text", { x: Math.max(x, M.left) + 6, y: 15, class: "is-bold" }, part.graph.timeline.kind)];
    });
  }

  mark(n, style) {
    const x = this.x(this.places[n]), y = this.y(this.at(this.points[n]));
    const line = svg("line", { class: style, x1: x, x2: x, y1: y, y2: M.height - M.bottom });
    if (style !== "peak") return svg("g", {}, line);
    const brief = `peak ${bytes(this.at(this.points[n]))}`, whole = `${brief} at %${this.nodeOf(n)}`;
    const widthOf = (text) => text.length * 6.4 + 10, room = Math.max(x - M.left, this.width - M.right - x) - 12;
    const words = widthOf(whole) > room ? brief : whole; // the list below names the node too
    const width = widthOf(words), left = x + width + 12 > this.width - M.right;
    return svg("g", { class: "peak-mark" }, line, svg("circle", { class: "peak-dot", cx: x, cy: y, r: 4 }),
      svg("rect", { class: "label-page", x: left ? x - width - 8 : x + 8, y: y - 16, width, height: 17, rx: 3 }),
      svg("text", { class: "is-bold", x: left ? x - 13 : x + 13, y: y - 3, "text-anchor": left ? "end" : "start" }, words));
  }

  nodeOf(n) {
    const { part, index } = this.points[n];
    return part.graph.memory.nodes[index];
  }

  hover(event) {
    const n = this.nearest(event), { part, index } = this.points[n];
    this.root.querySelector(".hovered")?.remove();
    const mark = this.mark(n, "cursor");
    mark.setAttribute("class", "hovered");
    this.root.append(mark);
    const rows = [...this.kinds].reverse().map((kind) => [kind, part.profile.kinds[kind]?.[index] ?? 0]).filter(([, value]) => value);
    tip.show(event, el("b", {}, `${bytes(this.at(this.points[n]))} at `, el("code", {}, `%${this.nodeOf(n)}`)),
      el("p", { class: "muted" }, `${part.graph.timeline.kind}, node ${index} of ${part.profile.during.length}`),
      definitions(rows.map(([kind, value]) => [el("span", {}, dotted(styleOf(kind)), kind), bytes(value)])));
  }

  // What is alive at a node: [kind, owner, bytes], largest first.
  alive(n) {
    const { part, index } = this.points[n];
    return part.profile.storages.filter(([, , , first, last]) => first <= index && index <= last)
      .map(([kind, owner, size, , , way]) => [way.some(([a, b]) => a <= index && index <= b) ? "in-flight collective" : kind, owner, size])
      .sort((a, b) => b[2] - a[2]);
  }

  list() {
    const alive = this.alive(this.chosen), total = sum(alive, (a) => a[2]);
    const where = this.chosen === this.peak ? "At the peak" : "At the chosen node";
    const { part, index } = this.points[this.chosen];
    const groups = this.kinds.map((kind) => [kind, alive.filter((a) => a[0] === kind)]).filter(([, found]) => found.length);
    groups.sort((a, b) => sum(b[1], (s) => s[2]) - sum(a[1], (s) => s[2]));
    this.owners.replaceChildren(
      el("h2", {}, `${where}: ${bytes(this.at(this.points[this.chosen]))}`, el("small", {}, `${part.graph.timeline.kind}, node ${index}, `, el("code", {}, `%${this.nodeOf(this.chosen)}`))),
      el("div", { class: "scroll" }, el("table", { class: "owners-table" },
        el("thead", {}, el("tr", {}, ["kind", "share", "bytes", "owners, largest first"].map((h, n) => el("th", { class: n === 2 ? "number" : null }, h)))),
        el("tbody", {}, groups.map(([kind, found]) => this.row(kind, found, total))))));
  }

  row(kind, found, total) {
    const size = sum(found, (a) => a[2]);
    const named = (entries) => entries.map(([, owner, value]) => el("span", { class: "chip" }, `${owner} ${bytes(value)}`));
    return el("tr", {}, el("td", {}, dotted(styleOf(kind)), kind),
      el("td", { style: "width:14%" }, el("i", { class: `meter ${styleOf(kind)}`, style: `width:${(100 * size) / total}%` })),
      el("td", { class: "number" }, bytes(size)),
      el("td", {}, named(found.slice(0, 6)), found.length > 6 ? el("details", {}, el("summary", {}, `and ${found.length - 6} more`), named(found.slice(6, 400))) : null));
  }

  legend() {
    return el("div", { class: "legend" }, this.kinds.map((kind) => el("span", {}, dotted(styleOf(kind)), kind)));
  }
}
