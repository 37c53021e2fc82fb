/* The timeline of chosen steps: a row for each rank with its phases, and one with its collectives where they were traced. */

class Timeline {
  /** `load([first, last])` gives the steps; `bounds()` gives the first and last step of the run. */
  constructor(load, bounds, canChoose) {
    this.load = load;
    this.bounds = bounds;
    this.first = element("input", { type: "number", title: "first step", onchange: () => this.choose(+this.first.value, +this.last.value) });
    this.last = element("input", { type: "number", title: "last step", onchange: () => this.choose(+this.first.value, +this.last.value) });
    const move = (by) => { const size = this.range[1] - this.range[0] + 1; this.choose(this.range[0] + by * size, this.range[1] + by * size); };
    this.tools = element("div", { className: "tools" }, "steps ", this.first, "to", this.last,
      element("button", { onclick: () => move(-1) }, "earlier"), element("button", { onclick: () => move(1) }, "later"),
      element("button", { onclick: () => this.newest() }, "newest"));
    this.whole = element("button", { onclick: () => { this.zoom = null; this.draw(); } }, "whole");
    this.canvas = element("canvas", { role: "img", tabIndex: 0 });
    this.canvas.setAttribute("aria-label", "Timeline of phases and collectives");
    this.legend = element("div", { className: "legend" });
    this.note = element("p", { className: "fine" });
    this.root = element("section", { className: "card chart wide" },
      element("div", { className: "head" }, element("h3", {}, "Timeline"), element("div", { className: "tools" }, canChoose ? this.tools : null, this.whole)),
      this.legend, element("div", { className: "scroll" }, this.canvas), this.note);
    this.root.dataset.chart = "timeline";
    this.range = null;
    this.zoom = null;
    this._listen();
  }

  newest() { this.isNewest = true; const [first, last] = this.bounds(); return this._choose(Math.max(first, last - 3), last); }
  choose(first, last) { this.isNewest = false; return this._choose(first, last); }

  async _choose(first, last) {
    const [least, most] = this.bounds();
    first = Math.max(least, Math.min(first, most)); last = Math.max(first, Math.min(last, most, first + 23));
    this.range = [first, last];
    this.first.value = first; this.last.value = last;
    this.found = await this.load(this.range);
    this.zoom = null;
    this.draw();
  }

  _spans() {
    const { ranks, steps, end, length, parts, phases } = this.found, spans = [];
    ranks.forEach((rank, row) => steps.forEach((step, column) => {
      if (end[row][column] === null) return;
      let at = end[row][column] - length[row][column];
      phases.forEach((name, place) => {
        const took = parts[place][row][column] || 0;
        spans.push({ row, start: at, end: at + took, name, step });
        at += took;
      });
      if (end[row][column] > at) spans.push({ row, start: at, end: end[row][column], name: "other_s", step });
    }));
    return spans;
  }

  draw() {
    if (!this.found || !this.found.steps.length) { this.note.textContent = "no steps yet"; return; }
    const { ranks, operations } = this.found, hasTrace = operations.length > 0;
    this.spans = this._spans();
    const end = Math.max(...this.spans.map((span) => span.end), 1e-6);
    const tall = Math.max(hasTrace ? 18 : 9, Math.min(hasTrace ? 42 : 26, Math.floor(460 / ranks.length)));
    const width = Math.max(240, this.root.clientWidth - 34);
    this.box = { left: 58, width: width - 70, tall, lane: hasTrace ? Math.floor(tall * 0.55) : tall - 3, end };
    const [from, to] = this.zoom || [0, end];
    const context = sharpen(this.canvas, width, ranks.length * tall + 40);
    const at = (time) => this.box.left + ((time - from) / (to - from)) * this.box.width;
    this._rows(context, at, from, to);
    context.save();
    context.beginPath(); context.rect(this.box.left, 0, this.box.width, ranks.length * tall + 2); context.clip();
    for (const span of this.spans) this._bar(context, at(span.start), at(span.end), span.row * tall + 1, this.box.lane, phaseColor(span.name), span.name === "comm_s");
    context.globalAlpha = 0.5;  // several may be on their way at once
    operations.forEach(([rank, start, took]) => this._bar(context, at(start), at(start + took), ranks.indexOf(rank) * tall + this.box.lane + 2, tall - this.box.lane - 5, css("--accent"), false));
    context.restore();
    this._names(hasTrace);
  }

  _rows(context, at, from, to) {
    const { ranks } = this.found, { tall, left, width } = this.box, bottom = ranks.length * tall + 4;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = css("--dim"); context.strokeStyle = css("--grid");
    context.textAlign = "right"; context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(13 / tall));
    ranks.forEach((rank, row) => { if (row % every === 0) context.fillText(`rank ${rank}`, left - 8, (row + 0.5) * tall); });
    context.textAlign = "center"; context.textBaseline = "top";
    context.fillText("time", left + width / 2, bottom + 18);
    for (const tick of ticks(from, to, width / 120)) {
      context.beginPath(); context.moveTo(at(tick), 0); context.lineTo(at(tick), bottom); context.stroke();
      context.fillText(tickSeconds(tick), Math.min(at(tick), left + width - 16), bottom + 3);
    }
  }

  _bar(context, start, end, top, height, color, isExposed) {
    const wide = Math.max(0.5, end - start - (end - start > 3 ? 0.5 : 0));
    context.fillStyle = color;
    context.fillRect(start, top, wide, height);
    if (isExposed && wide > 4) {
      context.save();
      context.beginPath(); context.rect(start, top, wide, height); context.clip();
      context.strokeStyle = "rgba(255,255,255,.45)"; context.lineWidth = 1.5;
      for (let x = start - height; x < start + wide; x += 6) { context.beginPath(); context.moveTo(x, top + height); context.lineTo(x + height, top); context.stroke(); }
      context.restore();
    }
  }

  _names(hasTrace) {
    const names = PHASES.map(([name, label]) => { const swatch = element("i"); swatch.style.color = phaseColor(name); return element("span", {}, swatch, label); });
    if (hasTrace) { const swatch = element("i"); swatch.style.color = css("--accent"); names.push(element("span", {}, swatch, "collective")); }
    this.legend.replaceChildren(...names);
    const told = "scroll to zoom, drag to move; the phases of a step are added up and shown in their order";
    this.note.textContent = [told, this.found.note].filter(Boolean).join("; ");
  }

  _listen() {
    let drag = null;
    const time = (event) => { const [from, to] = this.zoom || [0, this.box.end]; return from + ((event.clientX - this.canvas.getBoundingClientRect().left - this.box.left) / this.box.width) * (to - from); };
    const set = (from, to) => {
      const size = Math.min(to - from, this.box.end);
      from = Math.max(0, Math.min(from, this.box.end - size));
      this.zoom = size >= this.box.end ? null : [from, from + size];
      this.draw();
    };
    this.canvas.addEventListener("wheel", (event) => {
      if (!this.box || event.deltaY === 0) return;
      event.preventDefault();
      const [from, to] = this.zoom || [0, this.box.end], at = time(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
      set(at - (at - from) * factor, at + (to - at) * factor);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => { if (this.box) { drag = { x: event.clientX, zoom: this.zoom || [0, this.box.end] }; this.canvas.setPointerCapture(event.pointerId); } });
    this.canvas.addEventListener("pointerup", () => { drag = null; });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.box || !this.found) return;
      if (drag) { const [from, to] = drag.zoom, by = ((drag.x - event.clientX) / this.box.width) * (to - from); return set(from + by, to + by); }
      this._hover(event, time(event));
    });
    this.canvas.addEventListener("pointerleave", hideTip);
  }

  _hover(event, at) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top, row = Math.floor(y / this.box.tall), rank = this.found.ranks[row];
    const operation = y - row * this.box.tall > this.box.lane && this.found.operations.find((each) => each[0] === rank && each[1] <= at && at <= each[1] + each[2]);
    if (operation) return showTip(event, `rank ${rank}: ${operation[3]}\n${bytes(operation[4])} in ${seconds(operation[2])}`);
    const span = this.spans.find((each) => each.row === row && each.start <= at && at <= each.end);
    if (!span) return hideTip();
    showTip(event, `rank ${rank}, step ${span.step}\n${PHASES.find((each) => each[0] === span.name)[1]} ${seconds(span.end - span.start)}`);
  }
}
