// Axes with round ticks, and the part of an axis that is in view: zoomed by buttons, keys, Ctrl and the wheel, or by dragging.

function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-12); n++) found.push(n * step);
  return { step, values: found };
}

const decimals = (step) => Math.max(0, -Math.floor(Math.log10(step) + 1e-9));

class View {
  constructor(full, redraw) {
    Object.assign(this, { full, begin: 0, end: full, redraw });
  }
  set(begin, end) {
    const least = this.full / 1e5;
    const size = Math.min(this.full, Math.max(least, end - begin));
    this.begin = Math.min(Math.max(0, begin), this.full - size);
    this.end = this.begin + size;
    this.redraw();
  }
  zoom(factor, at = (this.begin + this.end) / 2) {
    this.set(at - (at - this.begin) * factor, at + (this.end - at) * factor);
  }
  pan(share) {
    const shift = (this.end - this.begin) * share;
    this.set(this.begin + shift, this.end + shift);
  }
  reset() {
    this.set(0, this.full);
  }
}

function tools(view) {
  const button = (label, text, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  return el("span", { class: "tools" },
    button("zoom in", "+", () => view.zoom(0.5)), " ", button("zoom out", "−", () => view.zoom(2)), " ",
    button("show all", "all", () => view.reset()));
}

// Keys, wheel and dragging on a drawing whose axis runs from `left` to its right edge less `right`.
function steer(root, view, left, right) {
  const place = (event) => {
    const box = root.getBoundingClientRect();
    const share = (event.clientX - box.left - left) / Math.max(1, box.width - left - right);
    return view.begin + (view.end - view.begin) * Math.min(1, Math.max(0, share));
  };
  root.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    if (event.shiftKey) view.pan(Math.sign(event.deltaY || event.deltaX) * 0.1);
    else view.zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event));
  }, { passive: false });
  root.addEventListener("dblclick", () => view.reset());
  root.addEventListener("keydown", (event) => {
    const act = { "+": () => view.zoom(0.5), "-": () => view.zoom(2), 0: () => view.reset(),
      ArrowLeft: () => view.pan(-0.2), ArrowRight: () => view.pan(0.2) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  let from = null;
  root.addEventListener("pointerdown", (event) => { if (event.button === 0) from = { x: event.clientX, at: place(event) }; });
  root.addEventListener("pointermove", (event) => {
    if (from === null) return;
    root.querySelector(".brush")?.remove();
    if (Math.abs(event.clientX - from.x) < 5) return;
    tip.hide();
    const box = root.getBoundingClientRect();
    const x = Math.min(from.x, event.clientX) - box.left;
    root.append(svg("rect", { class: "brush", x, y: 0, width: Math.abs(event.clientX - from.x), height: box.height }));
  });
  const finish = (event) => {
    if (from === null) return;
    const { x, at } = from;
    from = null;
    root.querySelector(".brush")?.remove();
    if (event.type === "pointerup" && Math.abs(event.clientX - x) >= 5) view.set(Math.min(at, place(event)), Math.max(at, place(event)));
  };
  root.addEventListener("pointerup", finish);
  root.addEventListener("pointerleave", finish);
}
