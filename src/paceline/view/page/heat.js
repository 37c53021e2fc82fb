/* The map of ranks and steps: one coloured cell for each rank and bucket of steps, so that a slow rank is a line. That of
   experts is the same, with a layer in the place of a field, and loads over the fair share. */

const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const HEAT_FORMATS = { loss: short, samples: count, memory_bytes: bytes, mfu: percent };
const HEAT_NAMES = { step_s: "step time", late_s: "lateness", data_s: "data", forward_s: "forward", backward_s: "backward", comm_s: "exposed communication",
  optimizer_s: "update", host_s: "host", loss: "loss", samples: "samples", memory_bytes: "memory", mfu: "MFU" };

function rampColor(share) {
  const place = Math.max(0, Math.min(1, share)) * (RAMP.length - 1), low = Math.min(RAMP.length - 2, Math.floor(place)), part = place - low;
  return RAMP[low].map((each, channel) => Math.round(each + part * (RAMP[low + 1][channel] - each)));
}

class HeatMap {
  /** `load(name)` gives the map of a field; `onPick(step)` is called for a click. `row`: what a row is, rank or expert. */
  constructor(load, onPick, row = "rank") {
    this.load = load;
    this.onPick = onPick;
    this.row = row;
    this.format = row === "expert" ? (value) => (value === null ? "–" : `${value.toFixed(2)} x`) : null;
    const title = row === "expert" ? "Load of experts" : "Ranks and steps";
    this.name = null;
    this.picker = element("select", { title: "what the colours show", onchange: () => { this.name = this.picker.value; this.refresh(); } });
    this.canvas = element("canvas", { role: "img" });
    this.canvas.setAttribute("aria-label", `Map of ${row}s and steps`);
    this.scale = element("canvas");
    this.low = element("span"); this.high = element("span");
    this.note = element("p", { className: "fine" });
    this.root = element("section", { className: "card chart wide" },
      element("div", { className: "head" }, element("h3", {}, title),
        element("div", { className: "tools" }, this.picker, this.low, this.scale, this.high)), this.canvas, this.note);
    this.root.dataset.chart = row === "expert" ? "experts" : "heat";
    this.canvas.addEventListener("mousemove", (event) => this._hover(event));
    this.canvas.addEventListener("mouseleave", hideTip);
    this.canvas.addEventListener("click", (event) => { const cell = this._cell(event); if (cell) this.onPick(Math.round(this.found.steps[cell.column])); });
  }

  names(all) {
    if (JSON.stringify(all) === JSON.stringify(this.all)) return;
    this.all = all;
    this.picker.replaceChildren(...all.map((name) => element("option", { value: name }, HEAT_NAMES[name] || name)));
    if (!all.includes(this.name)) this.name = all.includes("late_s") ? "late_s" : all[0];  // who holds the others up
    this.picker.value = this.name;
  }

  async refresh() {
    const found = await this.load(this.name);
    if (!found) return;
    const raw = atob(found.values), buffer = new Uint8Array(raw.length);
    for (let place = 0; place < raw.length; place++) buffer[place] = raw.charCodeAt(place);
    this.found = found;
    this.values = new Float32Array(buffer.buffer);
    this.draw();
  }

  draw() {
    if (!this.found) return;
    const { ranks, steps, limits } = this.found, rows = ranks.length, columns = steps.length;
    const width = Math.max(240, this.root.clientWidth - 34);
    const tall = Math.max(4, Math.min(22, Math.floor(420 / Math.max(1, rows))));
    this.box = { left: 46, top: 6, width: width - 52, height: tall * rows, tall };
    const context = sharpen(this.canvas, width, this.box.height + 42);
    const image = new ImageData(Math.max(1, columns), Math.max(1, rows));
    const [low, high] = limits, room = high - low || 1;
    for (let place = 0; place < rows * columns; place++) {
      const value = this.values[place];
      const [red, green, blue] = isFinite(value) ? rampColor(high > low ? (value - low) / room : 0) : [0, 0, 0];
      image.data.set([red, green, blue, isFinite(value) ? 255 : 0], 4 * place);
    }
    const small = element("canvas", { width: Math.max(1, columns), height: Math.max(1, rows) });
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, this.box.left, this.box.top, this.box.width, this.box.height);
    this._axes(context, ranks, steps);
    this._legend(limits);
    const what = this.format ? "a cell is how often an expert was chosen in some steps, over its fair share" : "a cell is a rank in some steps";
    this.note.textContent = columns ? `${what}; click one to see its step in the timeline` : "no steps yet";
  }

  _axes(context, ranks, steps) {
    const { left, top, width, height, tall } = this.box;
    context.fillStyle = css("--dim");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right"; context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(14 / tall));
    ranks.forEach((rank, row) => { if (row % every === 0) context.fillText(ranks.length <= 32 && !this.format ? `rank ${rank}` : rank, left - 6, top + (row + 0.5) * tall); });
    context.textAlign = "center"; context.textBaseline = "top";
    if (!steps.length) return;
    context.fillText("step", left + width / 2, top + height + 22);
    const first = steps[0], last = steps[steps.length - 1];
    for (const tick of ticks(first, last, width / 110)) {
      if (tick % 1) continue;
      const x = left + ((((tick - first) / (last - first || 1)) * (steps.length - 1) + 0.5) / steps.length) * width;  // the middle of its cell
      context.fillText(whole(tick), Math.min(x, left + width - 14), top + height + 7);
    }
  }

  _legend([low, high]) {
    const format = this.format || HEAT_FORMATS[this.name] || seconds;
    const context = sharpen(this.scale, 110, 10);
    for (let x = 0; x < 110; x++) { context.fillStyle = `rgb(${rampColor(x / 109)})`; context.fillRect(x, 0, 1, 10); }
    this.low.textContent = format(low);
    this.high.textContent = format(high);
  }

  _cell(event) {
    if (!this.found) return null;
    const area = this.canvas.getBoundingClientRect();
    const x = event.clientX - area.left - this.box.left, y = event.clientY - area.top - this.box.top;
    const columns = this.found.steps.length, column = Math.floor((x / this.box.width) * columns), row = Math.floor(y / this.box.tall);
    return column < 0 || column >= columns || row < 0 || row >= this.found.ranks.length ? null : { row, column };
  }

  _hover(event) {
    const cell = this._cell(event);
    if (!cell) return hideTip();
    const value = this.values[cell.row * this.found.steps.length + cell.column], format = this.format || HEAT_FORMATS[this.name] || seconds;
    showTip(event, `${this.row} ${this.found.ranks[cell.row]}, step ${whole(this.found.steps[cell.column])}\n${HEAT_NAMES[this.name] || this.name} ${format(isFinite(value) ? value : null)}`);
  }
}
