/* Line charts on uPlot: several runs in one, bands of least and greatest values, events as marks, one zoom for all. */

const SYNC = "paceline";
const POWERS = Array.from({ length: 60 }, (_, power) => 2 ** power);

/** Exponential smoothing that begins unbiased; gaps stay gaps. It goes both ways, so that the curve does not lag behind. */
function smoothed(values, weight) {
  const pass = (all) => {
    let mean = 0, norm = 0;
    return all.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return mean / norm;
    });
  };
  const back = pass([...values].reverse()).reverse();
  return pass(values).map((value, place) => (value === null ? null : (value + back[place]) / 2));
}

class Chart {
  /** `spec`: title, unit, label (of the y axis), format (of a value), isStacked, noLog, isSmooth, onRemove. `view` has x, smooth, isLog, zoom, onZoom. */
  constructor(spec, view) {
    this.spec = spec;
    this.view = view;
    this.legend = element("div", { className: "legend" });
    this.at = element("span", { className: "at" });
    this.unit = element("span", { className: "unit" });
    this.plane = element("div", { className: "plane" });
    this.root = element("section", { className: `card chart${spec.isWide ? " wide" : ""}` },
      element("div", { className: "head" }, element("h3", {}, spec.title, this.unit), this.at,
        spec.onRemove ? element("button", { className: "remove", title: "remove this chart", onclick: spec.onRemove }, "×") : null),
      this.legend, this.plane);
    this.root.dataset.chart = spec.key;
    this.plot = null;
    this.shape = "";
  }

  /** `lines`: [{label, color, x, y, low, high, isPoints, dash}], `events`: [{x, name, text}]. */
  draw(lines, events) {
    this.events = events;
    this.unit.textContent = this.spec.unit || "";
    this.lines = lines.map((line) => ({ ...line, shown: this._hasRaw(line) ? smoothed(line.y, this.view.smooth) : line.y }));
    let place = 1;
    this.lines.forEach((line) => { line.place = place; place += 1 + this._hasRaw(line) + 2 * !!line.low; });
    const data = this._data();
    const width = Math.max(200, Math.floor(this.plane.clientWidth || 340));
    const isLog = this.view.isLog && !this.spec.isStacked && !this.spec.noLog;
    const shape = JSON.stringify([this.lines.map((line) => [line.label, line.color, !!line.low, !!line.isPoints, !!line.dash, this._hasRaw(line)]), isLog, this.view.x, isDark(), this.view.smooth > 0, this.view.hasOutliers, this._height()]);
    if (this.plot && shape === this.shape) {
      if (this.plot.width !== width) this.plot.setSize({ width, height: this.plot.height });
      this.plot.setData(data, false);
      this._scale();
    } else {
      if (this.plot) this.plot.destroy();
      this.shape = shape;
      this.plot = new uPlot(this._options(width, isLog), data, this.plane);
      this._scale();
    }
    this._tell(null);
  }

  /** One table of x and the columns of all lines: shown, then raw where smoothed, low and high where there are any. */
  _data() {
    const tables = this.lines.map((line) => {
      const columns = [line.x, line.shown];
      if (this._hasRaw(line)) columns.push(line.y);
      if (line.low) columns.push(line.low, line.high);
      return columns;
    });
    if (!tables.length) return [[]];
    const isSame = tables.every((table) => table[0] === tables[0][0]);
    return isSame ? [tables[0][0], ...tables.flatMap((table) => table.slice(1))] : uPlot.join(tables, tables.map((table) => table.map(() => 1)));
  }

  /** Whether a line is smoothed, and its own values stand faint behind it. */
  _hasRaw(line) { return this.view.smooth > 0 && !!this.spec.isSmooth && !line.isPoints && !line.dash && line.y.length > 2; }

  _height() { return this.spec.isFirst ? (innerWidth < 820 ? 250 : 320) : this.spec.isWide ? 266 : 206; }

  _options(width, isLog) {
    const series = [{}], bands = [];
    for (const line of this.lines) {
      series.push({ label: line.label, stroke: line.color, width: line.isPoints ? 1.4 : 1.8, spanGaps: true, dash: line.dash,
        fill: this.spec.isStacked ? line.color : undefined, points: { show: !!line.isPoints, size: 5, fill: line.color }, alpha: 1 });
      if (this._hasRaw(line)) series.push({ stroke: line.color, width: 1, alpha: 0.3, spanGaps: true, points: { show: false } });
      if (line.low) {
        bands.push({ series: [series.length + 1, series.length], fill: line.color + "26" });
        series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } }, { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      }
    }
    const axis = { stroke: css("--dim"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 16, labelGap: 0 };
    const tick = this.spec.axis || (this.spec.format === seconds ? tickSeconds : this.spec.format);
    const show = this.view.x === "time" ? tickSeconds : (each) => (each >= 1e5 ? count(each) : whole(each));
    return {
      width, height: this._height(), series, bands, legend: { show: false },
      padding: [8, 10, 0, 0],
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, range: isLog ? undefined : (_, low, high) => this._range(low, this._capped(high)) } },
      axes: [
        { ...axis, label: this.view.x === "time" ? "time since the start" : "step", size: 24, gap: 3, space: 70, values: (_, all) => all.map((each) => (each === null || (this.view.x === "step" && each % 1) ? "" : show(each))) },
        { ...axis, label: this.spec.label, size: 58, gap: 4, space: 34, incrs: this.spec.format === bytes || this.spec.format === byteRate ? POWERS : undefined, values: (_, all) => all.map((each) => (each === null ? "" : tick(each))) },
      ],
      cursor: { sync: { key: SYNC, scales: ["x", null] }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false },
      hooks: {
        setSelect: [(plot) => this._select(plot)],
        setCursor: [(plot) => this._tell(plot.cursor.idx)],
        draw: [(plot) => this._mark(plot)],
        ready: [(plot) => { plot.over.addEventListener("dblclick", () => this.view.onZoom(null)); plot.over.addEventListener("mousedown", () => { Chart.dragged = this; }); }],
      },
    };
  }

  _range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.spec.isStacked || this.spec.fromZero) return [0, high > 0 ? high * 1.05 : 1];
    const isFlat = high - low <= 1e-9 * Math.abs(high);  // but for what rounding and smoothing add
    const room = (isFlat ? Math.abs(high) || 1 : high - low) * 0.06;
    return [low >= 0 && low < room ? 0 : low - room, high + room];
  }

  /** A few steps that take far longer than all others would flatten the chart: it ends below them unless asked not to. */
  _capped(high) {
    if (!this.spec.isTime || this.view.hasOutliers || high === null) return high;
    const known = this.lines[0].y.filter((each) => each !== null).sort((one, other) => one - other);
    const usual = known.length >= 20 ? known[Math.floor(known.length * 0.97)] : high;
    return Math.min(high, usual * 1.6);
  }

  _scale() {
    const [min, max] = this.view.zoom || this.view.bounds();
    this.plot.setScale("x", { min, max: max > min ? max : min + 1 });
  }

  _select(plot) {
    if (plot.select.width < 4 || Chart.dragged !== this) return;  // the others follow its cursor
    const range = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.view.onZoom(range);
  }

  /** Writes the legend with the values under the cursor, or else the last ones that are shown; the head says which. */
  _tell(index) {
    if (!this.plot) return;
    const data = this.plot.data, isAtRest = index === null || index === undefined;
    const at = (column, place) => {
      for (let each = Math.min(place, column.length - 1); each >= 0; each--) if (column[each] !== null && column[each] !== undefined) return column[each];
      return null;
    };
    const place = isAtRest ? this._lastShown(data[0]) : index;
    const order = this.spec.isStacked ? [...this.lines].reverse() : this.lines;
    this.legend.replaceChildren(...order.slice(0, 10).map((line) => {
      const swatch = element("i", { className: line.dash ? "dash" : "" }); swatch.style.color = line.color;
      const value = line.own ? at(line.own, place) : at(data[line.place + this._hasRaw(line)] || [], place);
      return element("span", {}, swatch, `${line.label} `, element("b", {}, this.spec.format(value)));
    }), ...(order.length > 10 ? [element("span", {}, `and ${order.length - 10} more`)] : []));
    const x = data[0][place];
    const where = x === undefined ? "" : this.view.x === "time" ? seconds(x) : `step ${whole(x)}`;
    const near = isAtRest || !where ? null : this._near(x);
    this.at.textContent = near ? `${near.title}, step ${whole(near.step)}` : where && isAtRest ? `last: ${where}` : where;
  }

  /** The place of the last value that a zoom leaves on the chart. */
  _lastShown(x) {
    let place = x.length - 1;
    if (this.view.zoom) while (place > 0 && x[place] > this.view.zoom[1]) place -= 1;
    return place;
  }

  _near(x) {
    const reach = Math.abs(this.plot.posToVal(5, "x") - this.plot.posToVal(0, "x"));
    return this.events.find((event) => Math.abs(event.x - x) <= reach) || null;
  }

  _mark(plot) {
    const context = plot.ctx, { top, height, left, width } = plot.bbox;
    context.save();
    context.lineWidth = devicePixelRatio || 1;
    for (const event of this.events) {
      const x = Math.round(plot.valToPos(event.x, "x", true));
      if (x < left || x > left + width) continue;
      context.strokeStyle = context.fillStyle = eventColor(event.name);
      const isSmall = SMALL_EVENTS.has(event.name);
      context.globalAlpha = isSmall ? 0.5 : 0.85;
      context.setLineDash([3, 4]);
      if (!isSmall) { context.beginPath(); context.moveTo(x, top); context.lineTo(x, top + height); context.stroke(); }
      context.setLineDash([]);
      context.beginPath(); context.arc(x, top + 2, 3 * (devicePixelRatio || 1) * 0.8, 0, 7); context.fill();
    }
    context.restore();
  }

  remove() { if (this.plot) this.plot.destroy(); this.plot = null; this.root.remove(); }
}
