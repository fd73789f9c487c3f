// What drawings along an axis of time have in common: `root`, `view` and `height` are theirs.

const LEFT = 118, RIGHT = 14, TOP = 14;

class Drawing {
  get width() {
    return this.root.clientWidth || 1200;
  }

  x(time) {
    return LEFT + ((time - this.view.begin) / (this.view.end - this.view.begin)) * (this.width - LEFT - RIGHT);
  }

  // Left edge and width of a stretch of time, cut to what is in view; null outside.
  span(begin, end, least = 1) {
    if (end < this.view.begin || begin > this.view.end) return null;
    const from = Math.max(LEFT, this.x(begin)), to = Math.min(this.width - RIGHT, this.x(end));
    return { x: from, width: Math.max(least, to - from) };
  }

  patterns() {
    return svg("defs", {}, svg("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("rect", { class: "hatch-page", width: 7, height: 7 }), svg("line", { class: "hatch-line", x1: 0, y1: 0, x2: 0, y2: 7 })));
  }

  axis(height) {
    const { step, values } = ticks(this.view.begin * 1e3, this.view.end * 1e3, this.width / 120);
    const marks = values.map((v) => {
      const x = this.x(v / 1e3);
      const near = x > this.width - 60;
      return [svg("line", { x1: x, x2: x, y1: TOP - 4, y2: height - 18 }),
        svg("text", { x: near ? this.width - RIGHT : x, y: height - 5, "text-anchor": near ? "end" : "middle" }, `${v.toFixed(decimals(step))} ms`)];
    });
    return svg("g", { class: "axis" }, marks);
  }

  label(words, at, y, mayCut = true) {
    const room = Math.floor((at.width - 8) / 6.9);
    if (!words || (words.length > room && (room < 4 || !mayCut))) return null;
    // Names of units differ at their ends; of several, the first says more than the last.
    const cut = words.includes(", ") ? `${words.slice(0, room - 1)}…` : `…${words.slice(1 - room)}`;
    return svg("text", { x: at.x + 4, y }, words.length <= room ? words : cut);
  }
}
