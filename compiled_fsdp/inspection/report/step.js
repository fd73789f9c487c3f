// The profiled step of every rank on one axis: what it consists of, where the thread waits and where it starts collectives.

const PARTS = { autograd: "backward, outside graphs", forward: "forward", backward: "backward", clip: "clipping", other: "between backward and step",
  optimizer: "optimizer", data: "data", compile: "compilation" };
const STEP = { part: 22, wait: 12, gap: 14 };

class StepChart extends Drawing {
  constructor(ranks) {
    super();
    this.ranks = ranks;
    const began = ranks.map((r) => r.step.began), spread = Math.max(...began) - Math.min(...began);
    // Clocks of several machines may differ: then every rank has its own beginning.
    this.isShared = spread < Math.max(...ranks.map((r) => r.step.total));
    this.offsets = began.map((time) => (this.isShared ? time - Math.min(...began) : 0));
    this.height = TOP + 4 + ranks.length * (STEP.part + STEP.wait + STEP.gap) + 18;
    this.root = svg("svg", { class: "step", tabindex: 0, role: "group", "aria-label": "the profiled step of every rank" });
    this.view = new View(Math.max(...ranks.map((r, n) => this.offsets[n] + r.step.total)) || 1e-9, () => this.draw());
    steer(this.root, this.view, LEFT, RIGHT);
    this.root.addEventListener("pointerleave", () => tip.hide());
  }

  draw() {
    this.root.style.height = `${this.height + 2}px`;
    this.root.replaceChildren(this.patterns(), this.axis(this.height), ...this.ranks.map((rank, n) => this.rank(rank, n)));
  }

  rank({ rank, step }, n) {
    const top = TOP + 4 + n * (STEP.part + STEP.wait + STEP.gap), offset = this.offsets[n];
    const bar = (begin, end, style, y, height, title, words) => {
      const at = this.span(offset + begin, offset + end, 0.5);
      if (!at) return null;
      const about = (event) => tip.show(event, el("b", {}, title), definitions([["rank", rank], ["from", seconds(offset + begin)], ["takes", `${seconds(end - begin)}, ${percent(end - begin, step.total)} of the step`]]));
      return svg("g", { class: style, onpointermove: about, onpointerout: tip.hide }, svg("rect", { y, height, ...at }), words ? this.label(words, at, y + 15) : null);
    };
    return svg("g", { class: "rank" },
      svg("text", { x: 10, y: top + 15, class: "lane" }, `rank ${rank}`), svg("text", { x: 10, y: top + STEP.part + 10 }, "starts, waits"),
      bar(0, step.total, "part-rest", top, STEP.part, "neither a graph of ours nor the optimizer"),
      step.parts.map(([begin, end, kind, name]) => bar(begin, end, `part part-${kind}`, top, STEP.part, `${PARTS[kind] ?? kind}: ${name}`, partLabel(kind, name))),
      step.starts.map(([begin, end, name]) => bar(begin, end, "starting", top + STEP.part + 1, STEP.wait, `starts ${name}`)),
      step.waits.map(([begin, end, name]) => bar(begin, end, "waiting", top + STEP.part + 1, STEP.wait, `waits for the ${name}`)));
  }

  // Who comes late, if the clocks are the same.
  straggler() {
    if (this.ranks.length < 2) return "";
    if (!this.isShared) return "The ranks' clocks differ, so each begins at its own step's beginning.";
    const ends = this.ranks.map((r, n) => this.offsets[n] + r.step.total), last = ends.indexOf(Math.max(...ends));
    const waits = this.ranks.map((r) => r.step.waiting), least = waits.indexOf(Math.min(...waits));
    return `Rank ${this.ranks[last].rank} ends last, ${seconds(ends[last] - Math.min(...ends))} after the first; rank ${this.ranks[least].rank} waits least (${seconds(waits[least])}): the others wait for it.`;
  }

  legend() {
    const kinds = Object.keys(PARTS).filter((kind) => this.ranks.some((r) => r.step.parts.some((p) => p[2] === kind)));
    const entry = (mark, words) => el("span", {}, el("i", { class: mark }), words);
    return el("div", { class: "legend" }, kinds.map((kind) => entry(`mark-part-${kind}`, PARTS[kind])), entry("mark-issues", "starts a collective"), entry("mark-exposed", "waits for one"));
  }
}

const partLabel = (kind, name) => (kind === "forward" || kind === "backward" ? name : PARTS[kind] ?? name);

function stepSection() {
  const measured = data.ranks.filter((r) => r.step);
  if (!measured.length) return null;
  const chart = new StepChart(measured);
  DRAWN.push(chart);
  const notes = measured.flatMap((r) => r.step.notes.map((note) => `rank ${r.rank}: ${note}`));
  return el("section", {}, el("h2", {}, "the step", el("small", {}, "as profiled, every rank that was")), el("div", { class: "bar-of-tools" }, chart.legend(), tools(chart.view)),
    chart.root, el("p", { class: "muted" }, chart.straggler()), [...new Set(notes)].map((note) => el("p", { class: "notice" }, note)));
}
