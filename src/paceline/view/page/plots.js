/* Which charts there are: of chosen runs, of what hosts read, and those that somebody has put together. */

/** The parts of the page, in their order: [key, name]. */
const PARTS = [["learning", "Learning"], ["speed", "Speed"], ["system", "System"], ["experts", "Experts"], ["ranks", "Ranks"], ["tables", "Tables"], ["log", "Log"], ["config", "Config"]];

class Plots {
  /** `chosen`: [[run, place]], `focus`: the run that details are of, `axis`: "step" or "time". */
  constructor(chosen, focus, axis) {
    this.chosen = chosen;
    this.focus = focus;
    this.axis = axis;
    this.isSole = chosen.length === 1;
    this.found = [];
  }

  /** All charts: [spec, lines]. A chart without a line is left out. */
  all(own, removeOwn) {
    const { focus } = this, evaluated = Object.keys(focus.evaluations).filter((name) => name !== "loss");
    this._add({ key: "loss", part: "first", title: "Loss", label: "loss", format: short, isSmooth: true, isFirst: true },
      (run, place) => [this._curve(run, place, "loss", "training"), this._spots(run, place, run.evaluations.loss, "evaluation")]);
    evaluated.forEach((name) => this._add({ key: `eval-${name}`, part: "learning", title: `Evaluation: ${name}`, label: name, format: name === "accuracy" ? percent : short },
      (run, place) => [this._spots(run, place, run.evaluations[name], name)]));
    this._add({ key: "lr", part: "learning", title: "Learning rate", label: "learning rate", format: short }, (run, place) => [this._curve(run, place, "lr", "rate")]);
    this._add({ key: "grad_norm", part: "learning", title: "Gradient norm", label: "norm", format: short, isSmooth: true }, (run, place) => [this._curve(run, place, "grad_norm", "before clipping")]);
    Object.keys(focus.own).forEach((name) => this._add({ key: `own-${name}`, part: "learning", title: name, label: name, format: short, isSmooth: true },
      (run, place) => [this._series(run, place, `own:${name}`)]));
    own.forEach((names, number) => this._add({ key: `mine-${names.join()}`, part: "learning", title: names.map(seriesName).join(", "), label: "value", format: short, isSmooth: true, onRemove: () => removeOwn(number) },
      (run, place) => names.map((name, line) => this._series(run, this.isSole ? line : place, name))));
    this._speed();
    this._system();
    return this.found;
  }

  _add(spec, make) {
    const lines = this.chosen.flatMap(([run, place]) => make(run, place)).filter(Boolean);
    if (lines.length) this.found.push([spec, lines]);
  }

  _curve(run, place, name, label) {
    const found = run.curves[name];
    return found && { label: this.isSole ? label : run.name, color: runColor(place), x: run.x[this.axis], y: found.mean, low: found.min, high: found.max };
  }

  /** Points that are joined by dashes: in the colour of the run where several are compared. */
  _spots(run, place, pairs, label) {
    return pairs && pairs.length && { label: this.isSole ? label : `${run.name}, ${label}`, color: this.isSole && label === "evaluation" ? runColor(1) : runColor(place),
      x: pairs.map((each) => each[this.axis === "step" ? 0 : 1]), y: pairs.map((each) => each[2]), isPoints: true, dash: [5, 4] };
  }

  /** A series by the name that charts of one's own have: curve:loss, eval:accuracy, own:entropy, host:NAME of node-1. */
  _series(run, place, name) {
    const [kind, key] = [name.slice(0, name.indexOf(":")), name.slice(name.indexOf(":") + 1)], label = this.isSole ? seriesName(name) : `${run.name}, ${seriesName(name)}`;
    if (kind === "eval") return this._spots(run, place, run.evaluations[key], label);
    if (kind === "own") { const found = this._spots(run, place, run.own[key], label); return found && { ...found, label: this.isSole ? key : run.name, isPoints: false, dash: undefined }; }
    const found = kind === "curve" ? run.curves[key] && { x: run.x, ...run.curves[key] } : run.hosts.find((each) => `${each.name} of ${each.host}` === key);
    return found && { label, color: runColor(place), x: found.x[this.axis], y: found.mean, low: found.min, high: found.max };
  }

  _speed() {
    const { focus, chosen } = this, unit = (run) => `${run.facts.unit || "samples"}/s`, isMixed = chosen.some(([run]) => unit(run) !== unit(focus));
    this._add({ key: "units_per_s", part: "speed", title: "Throughput", label: isMixed ? "units/s" : unit(focus), format: count, isSmooth: true },
      (run, place) => { const found = this._curve(run, place, "units_per_s", "all ranks"); return [found && isMixed ? { ...found, label: `${found.label}, ${unit(run)}` } : found]; });
    this._add({ key: "step_s", part: "speed", title: "Step time", unit: "slowest rank", label: "time", format: seconds, isTime: true, isSmooth: true },
      (run, place) => [this._curve(run, place, "step_s", "measured"), ...this._predicted(run, "step_s")]);
    this._add({ key: "mfu", part: "speed", title: "MFU", unit: "of the device's peak", label: "MFU", format: percent, isSmooth: true }, (run, place) => [this._curve(run, place, "mfu", "mean of the ranks")]);
    if (!focus.curves.mfu) this._add({ key: "flops_per_s", part: "speed", title: "Model FLOP/s", label: "FLOP/s", format: flops, axis: (value) => flops(value, ""), isSmooth: true }, (run, place) => [this._curve(run, place, "flops_per_s", "all ranks")]);
    const rates = focus.comm.map((each, place) => ({ label: `${each.kind} (${each.group})`, color: runColor(place), x: each.points.map((point) => point[this.axis === "step" ? 0 : 1]), y: each.points.map((point) => point[2]) }));
    if (rates.length) this.found.push([{ key: "comm", part: "speed", title: "Communication", unit: "bytes of tensors a second", label: "rate", format: rate, axis: rate }, rates]);
    const phases = this._phases(focus);
    if (phases.length) this.found.push([{ key: "phases", part: "speed", title: "Where a step's time goes", unit: "mean of the ranks", label: "time", format: seconds, isStacked: true, isWide: true, isTime: true }, phases]);
  }

  _predicted(run, name) {
    const x = run.x[this.axis];
    return run !== this.focus || !x.length ? [] : [run.predicted, (run.predicted || {}).later].filter((found) => found && found[name]).map((found) =>
      ({ label: found.is_later ? "predicted while it ran" : "predicted", color: css("--faint"), x: [x[0], x[x.length - 1]], y: [found[name], found[name]], dash: [6, 4] }));
  }

  /** Phases on top of one another; the topmost line first, so that lower ones are painted over it. */
  _phases(run) {
    if (!run.curves.step_s) return [];
    const x = run.x[this.axis], parts = PHASES.slice(0, 5).filter(([name]) => run.curves[name]);
    let below = x.map(() => 0);
    const lines = parts.map(([name, label]) => {
      const own = run.curves[name].mean;
      below = below.map((each, place) => each + (own[place] || 0));
      return { label, color: phaseColor(name), x, y: below, own };
    });
    return lines.reverse();
  }

  /** Memory of the ranks, and what the sampler of each host read: a line a device, with limits as dashed lines. */
  _system() {
    const { axis, focus } = this, by = new Map();
    this._add({ key: "memory_bytes", part: "system", title: "Memory", unit: "largest rank", label: "bytes", format: bytes, fromZero: true, noLog: true },
      (run, place) => [this._curve(run, place, "memory_bytes", "measured"), ...this._predicted(run, "memory_bytes")]);
    focus.hosts.forEach((each) => {
      const [name, device] = each.name.split("/", 2), isLimit = name.endsWith(".limit"), base = isLimit ? name.replace(/limit$/, "usage") : name;
      if (name.includes(".throttle.") && !each.mean.some((value) => value > 0)) return;  // nothing lowered the clocks
      if (!by.has(base)) by.set(base, []);
      if (isLimit && by.get(base).some((line) => line.dash && line.y[0] === each.mean[0])) return;  // one line for equal devices
      const who = device === undefined ? null : /^[0-9]+$/.test(device) ? `${base.startsWith("process.") ? "rank" : "device"} ${device}` : device;
      const label = isLimit ? "limit" : [focus.facts.num_hosts > 1 || device === undefined ? each.host : null, who].filter(Boolean).join(" ");
      const place = by.get(base).filter((line) => !line.dash).length;
      by.get(base).push({ label, color: isLimit ? css("--faint") : runColor(place), x: each.x[axis], y: each.mean, low: isLimit ? undefined : each.min, high: each.max, dash: isLimit ? [6, 4] : undefined });
    });
    const order = Object.keys(DEVICE_CHARTS), rank = ([base]) => (order.includes(base) ? order.indexOf(base) : order.length);
    [...by].sort((one, other) => rank(one) - rank(other)).forEach(([base, lines]) => {
      const [title, format, label] = DEVICE_CHARTS[base] || [base, short, "value"];
      this.found.push([{ key: `host-${base}`, part: "hosts", title, unit: title === base ? "" : base, label, format, fromZero: format !== hertz, noLog: true }, lines.sort((one, other) => !!one.dash - !!other.dash)]);
    });
  }
}

/** The names of all series of runs, for a chart of one's own. */
function seriesOf(runs) {
  return [...new Set(runs.flatMap((run) => [...Object.keys(run.curves).map((name) => `curve:${name}`), ...Object.keys(run.evaluations).map((name) => `eval:${name}`),
    ...Object.keys(run.own).map((name) => `own:${name}`), ...run.hosts.map((each) => `host:${each.name} of ${each.host}`)]))];
}

/** A series as people read it. */
function seriesName(name) {
  const [kind, key] = [name.slice(0, name.indexOf(":")), name.slice(name.indexOf(":") + 1)];
  return kind === "eval" ? `evaluation ${key}` : kind === "curve" ? HEAT_NAMES[key] || key.replace(/_per_s$/, "/s").replaceAll("_", " ") : key;
}
