/* The page: which runs are chosen, what is drawn, and what keys and controls do. */

const SHORTCUTS = [["← →", "move along the steps"], ["+ −", "zoom in and out"], ["0", "show all steps"], ["l", "logarithmic scale"], ["x", "steps or time"],
  ["s", "more smoothing, then none"], ["d", "dark or light"], ["j k", "next run, previous run"], ["?", "this help"]];

class Page {
  constructor(source) {
    this.source = source;
    this.list = [];
    this.runs = new Map();
    this.words = new Map();
    this.chosen = [];
    this.focus = null;
    this.differences = [];
    this.charts = new Map();
    this.view = { x: "step", smooth: 0, isLog: false, hasOutliers: false, zoom: null, bounds: () => this._bounds(), onZoom: (range) => this.zoomTo(range) };
    this.main = document.getElementById("main");
    this.timers = {};
    this._controls();
    this._keys();
    this._print();
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; this._soon("resize", 120, () => this.drawAll()); } });
  }

  async start() {
    const state = document.getElementById("connection");
    state.dataset.state = this.source.isLive ? "live" : "file";
    state.textContent = this.source.isLive ? "live" : "report";
    if (!this.source.isLive) {
      this.list = this.source.list();
      await this.choose(this.list.map((run) => run.id));
      return;
    }
    const first = await this.source.load([], null, 1);
    this.list = first.list;
    this.seen = new Set(this.list.map((run) => run.id));
    const wanted = this.list.find((run) => run.status === "running") || this.list[0];
    await this.choose(wanted ? [wanted.id] : []);
    this.source.follow((list) => this.news(list), (now) => { state.dataset.state = now; state.textContent = now === "live" ? "live" : "the server does not answer"; });
  }

  /** Shows runs that somebody has picked: the page stays with them. */
  pick(ids, focus) { this.isByHand = true; return this.choose(ids, focus); }

  async choose(ids, focus) {
    this.chosen = ids;
    this.focus = focus && ids.includes(focus) ? focus : ids.includes(this.focus) ? this.focus : ids[0] || null;
    this.view.zoom = null;
    if (this.timeline) { this.timeline.isNewest = true; this.timeline.zoom = null; }
    await this.load();
  }

  run() { return this.runs.get(this.focus); }

  /** Takes the states of all runs; loads the chosen ones again where they have news. Goes to a run that starts, where
   * nobody has chosen one by hand and the one that is shown is over. */
  news(list) {
    const fresh = list.find((run) => !this.seen.has(run.id)), now = list.find((run) => run.id === this.focus);
    list.forEach((run) => this.seen.add(run.id));
    this.list = list;
    this.drawRuns();
    if (fresh && (!now || (!this.isByHand && now.status !== "running"))) return this.choose([fresh.id]);
    const stale = list.filter((run) => this.chosen.includes(run.id) && (!this.runs.has(run.id) || this.runs.get(run.id).version !== run.version || this.runs.get(run.id).state.status !== run.status));
    if (stale.length) this._loadSoon();
    return undefined;
  }

  async load() {
    if (this.isLoading) { this.isBehind = true; return; }
    this.isLoading = true;
    try {
      const answer = await this.source.load(this.chosen, this._range(), Math.min(2000, Math.max(400, Math.round(innerWidth / 1.5))));
      this.list = answer.list;
      answer.runs.forEach((run) => { this.runs.set(run.id, run); });
      if (this.chosen.length > 1) this.differences = await this.source.differences(this.chosen);
      this.drawAll();
      this._heat();
      if (this.timeline && this.timeline.isNewest && !this.timeline.zoom && this.run() && this.run().range) this.timeline.newest();
    } finally {
      this.isLoading = false;
      this.loadedAt = performance.now();
    }
    this.chosen.forEach((id) => this._words(id));
    if (this.isBehind) { this.isBehind = false; this._loadSoon(); }
  }

  /** Loads at once, or a quarter of a second after the load before. */
  _loadSoon() { this._soon("load", Math.max(0, 250 - (performance.now() - (this.loadedAt || 0))), () => this.load()); }

  /** Asks for the words of a run, again when its status changed, and now and then while it runs. */
  async _words(id) {
    const run = this.runs.get(id), known = this.words.get(id), now = Date.now();
    if (!run || run.read < 1 || (known && known.status === run.state.status && (run.state.status !== "running" || now - known.at < 20000))) return;
    this.words.set(id, { ...(known || {}), status: run.state.status, at: now });
    const told = await this.source.words(id);
    this.words.set(id, { told, status: run.state.status, at: now });
    this.drawWords();
  }

  _soon(name, wait, work) { if (!this.timers[name]) this.timers[name] = setTimeout(() => { this.timers[name] = 0; work(); }, wait); }

  /** The chosen steps, as the server counts them; a zoom over time is one of the curves alone. */
  _range() { return this.view.zoom && this.view.x === "step" ? this.view.zoom : null; }

  zoomTo(range) {
    if (range) {
      const all = this._bounds();
      const size = Math.min(range[1] - range[0], all[1] - all[0]);
      const first = Math.max(all[0], Math.min(range[0], all[1] - size));
      range = size >= (all[1] - all[0]) * 0.999 ? null : [first, first + size];
    }
    this.view.zoom = range;
    this.drawCharts();
    document.getElementById("reset").disabled = !range;
    if (this.source.isLive && this.view.x === "step") this._soon("load", 200, () => this.load());
  }

  _bounds() {
    const known = this.chosen.map((id) => this.runs.get(id)).filter((run) => run && run.range);
    if (!known.length) return [0, 1];
    if (this.view.x === "step") return [Math.min(...known.map((run) => run.range[0])), Math.max(...known.map((run) => run.range[1]))];
    const times = known.flatMap((run) => run.x.time.filter((each) => each !== null));
    return [Math.min(...times), Math.max(...times)];
  }

  // what is drawn -----------------------------------------------------------------------------------------------------

  drawAll() {
    this.drawRuns();
    if (!this.run()) { this._empty(); return; }
    this._frame();
    this.drawWords();
    this.drawCharts();
    document.title = `${this.run().name} – Paceline`;
  }

  _empty() {
    this.charts.forEach((chart) => chart.remove());
    this.charts.clear();
    this.heat = this.timeline = null;
    this.main.replaceChildren(element("div", { className: "empty" }, element("h1", {}, "No run yet"),
      "This page shows the first one as soon as it starts. ", element("p", {}, element("code", {}, "paceline train configs/digits.yaml"))));
  }

  _frame() {
    if (this.heat) return;
    this.top = element("div");
    this.grid = element("div", { className: "charts" });
    this.bottom = element("div");
    this.heat = new HeatMap((name) => this._heatOf(name), (step) => { this.timeline.choose(step - 1, step + 1); this.timeline.root.scrollIntoView({ behavior: "smooth", block: "nearest" }); });
    this.timeline = new Timeline((range) => this.source.timeline(this.focus, range), () => this.run().range || [0, 0], this.source.isLive);
    this.main.replaceChildren(this.top, this.grid, this.bottom);
    this.timeline.isNewest = true;
  }

  _heatOf(name) { const run = this.run(); return run && run.heat_names.length ? this.source.heat(run.id, name, this._range(), 600) : null; }
  _heat() { const run = this.run(); if (this.heat && run && run.heat_names.length) { this.heat.names(run.heat_names); this.heat.refresh(); } }

  drawRuns() {
    const nav = document.getElementById("runs");
    if (this.list.length < 2) { nav.replaceChildren(); return; }
    nav.replaceChildren(element("h2", {}, `${this.list.length} runs`), ...this.list.map((run) => {
      const place = this.chosen.indexOf(run.id), box = element("input", { type: "checkbox", checked: place >= 0, title: "show this run beside the others" });
      box.addEventListener("click", (event) => { event.stopPropagation(); const ids = this.chosen.filter((id) => id !== run.id); this.pick(box.checked ? [...ids, run.id] : ids.length ? ids : [run.id]); });
      const dot = element("span", { className: "dot" }); dot.dataset.status = run.status;
      const row = element("div", { className: "run", tabIndex: 0, role: "button", title: run.name,
        onclick: () => this.pick(this.chosen.includes(run.id) ? this.chosen : [run.id], run.id), onkeydown: (event) => { if (event.key === "Enter") row.click(); } },
      box, element("span", { className: "who" }, element("span", { className: "name" }, run.name), element("span", { className: "where" }, `${run.status}, step ${whole(run.step)}`)), dot);
      if (place >= 0) { row.style.setProperty("--run", runColor(place)); if (this.chosen.length > 1) row.querySelector(".name").style.color = runColor(place); }
      row.setAttribute("aria-current", run.id === this.focus);
      return row;
    }));
  }

  drawWords() {
    const run = this.run();
    if (!run || !this.top) return;
    const words = (this.words.get(run.id) || {}).told;
    const chosen = this.chosen.map((id) => this.runs.get(id)).filter(Boolean);
    this.top.replaceChildren(verdictCard(run, words));
    if (chosen.length > 1) {
      const compared = element("div", { className: "compare" }, ...compareTables(chosen, this.differences, chosen.map((each, place) => runColor(place))));
      compared.lastChild.style.marginBottom = "14px";
      this.top.append(compared);
    }
    this.bottom.replaceChildren(...[...wordTables(words), communicationTable(run), eventTable(run)].filter(Boolean));
  }

  /** All charts of the chosen runs: [spec, lines]. A chart without a line is left out. */
  _plots() {
    const chosen = this.chosen.map((id, place) => [this.runs.get(id), place]).filter((each) => each[0]);
    const isSole = chosen.length === 1, focus = this.run(), axis = this.view.x;
    const line = (run, place, name, label) => {
      const found = run.curves[name];
      return found && { label: isSole ? label : run.name, color: runColor(place), x: run.x[axis], y: found.mean, low: found.min, high: found.max };
    };
    const spots = (run, place, pairs, label, isDashed) => pairs && pairs.length && { label: isSole ? label : `${run.name} ${label}`, color: isSole && isDashed ? runColor(1) : runColor(place),
      x: pairs.map((each) => each[axis === "step" ? 0 : 1]), y: pairs.map((each) => each[2]), isPoints: true };
    const level = (value, label, x) => value && x.length && { label, color: css("--faint"), x: [x[0], x[x.length - 1]], y: [value, value], dash: [6, 4] };
    const plots = [];
    const add = (spec, make) => { const lines = chosen.flatMap(([run, place]) => make(run, place)).filter(Boolean); if (lines.length) plots.push([spec, lines]); };
    const predicted = (run, name) => (run !== focus ? [] : [run.predicted, (run.predicted || {}).later].filter(Boolean).map((found) =>
      level(found[name], found.is_later ? "predicted while it ran" : "predicted", run.x[axis])));
    add({ key: "loss", title: "Loss", format: short }, (run, place) => [line(run, place, "loss", "training"), spots(run, place, run.evaluations.loss, "evaluation", true)]);
    const unit = (run) => `${run.facts.unit || "samples"}/s`, isMixed = chosen.some(([run]) => unit(run) !== unit(focus));
    add({ key: "units_per_s", title: "Throughput", unit: isMixed ? "" : unit(focus), format: count },
      (run, place) => { const found = line(run, place, "units_per_s", "all ranks"); return [found && isMixed ? { ...found, label: `${found.label}, ${unit(run)}` } : found]; });
    add({ key: "step_s", title: "Step time", unit: "slowest rank", format: seconds, isTime: true }, (run, place) => [line(run, place, "step_s", "measured"), ...predicted(run, "step_s")]);
    Object.keys(focus.evaluations).filter((name) => name !== "loss").forEach((name) =>
      add({ key: `eval-${name}`, title: `Evaluation: ${name}`, format: name === "accuracy" ? percent : short }, (run, place) => [spots(run, place, run.evaluations[name], name)]));
    add({ key: "mfu", title: "MFU", unit: "of the device's peak", format: percent }, (run, place) => [line(run, place, "mfu", "mean of the ranks")]);
    if (!focus.curves.mfu) add({ key: "flops_per_s", title: "Model FLOP/s", format: flops, axis: (value) => flops(value, "") }, (run, place) => [line(run, place, "flops_per_s", "all ranks")]);
    add({ key: "memory_bytes", title: "Memory", unit: "largest rank", format: bytes, fromZero: true, noLog: true }, (run, place) => [line(run, place, "memory_bytes", "measured"), ...predicted(run, "memory_bytes")]);
    add({ key: "lr", title: "Learning rate", format: short }, (run, place) => [line(run, place, "lr", "rate")]);
    add({ key: "grad_norm", title: "Gradient norm", format: short }, (run, place) => [line(run, place, "grad_norm", "before clipping")]);
    Object.keys(focus.own).forEach((name) => add({ key: `own-${name}`, title: name, format: short }, (run, place) => [{ ...spots(run, place, run.own[name] || [], name), isPoints: false }].filter((each) => each.x)));
    this._deviceCharts(focus).forEach((each) => plots.push(each));
    const phases = this._phases(focus);
    if (phases.length) plots.push([{ key: "phases", title: "Where a step's time goes", unit: "mean of the ranks", format: seconds, isStacked: true, isWide: true, isTime: true }, phases]);
    return plots;
  }

  /** Charts of what the sampler of each host read, a line a device, with limits as dashed lines; and of the rate of collectives. */
  _deviceCharts(run) {
    const axis = this.view.x, by = new Map();
    run.hosts.forEach((each) => {
      const [name, device] = each.name.split("/", 2), isLimit = name.endsWith(".limit"), base = isLimit ? name.replace(/limit$/, "usage") : name;
      if (name.includes(".throttle.") && !each.mean.some((value) => value > 0)) return;  // nothing lowered the clocks
      if (!by.has(base)) by.set(base, []);
      if (isLimit && by.get(base).some((line) => line.dash && line.y[0] === each.mean[0])) return;  // one line for equal devices
      const label = [run.facts.num_hosts > 1 || device === undefined ? each.host : null, device === undefined ? null : /^[0-9]+$/.test(device) ? `${base.startsWith("process.") ? "rank" : "device"} ${device}` : device, isLimit ? "limit" : null].filter(Boolean).join(" ").replace(/^.*limit$/, "limit");
      const place = by.get(base).filter((line) => !line.dash).length;
      by.get(base).push({ label, color: isLimit ? css("--faint") : runColor(place), x: each.x[axis], y: each.mean, low: isLimit ? undefined : each.min, high: each.max, dash: isLimit ? [6, 4] : undefined });
    });
    const order = Object.keys(DEVICE_CHARTS), rank = ([base]) => (order.includes(base) ? order.indexOf(base) : order.length);
    const made = [...by].sort((one, other) => rank(one) - rank(other)).map(([base, lines]) => {
      const [title, format] = DEVICE_CHARTS[base] || [base, short];
      return [{ key: `host-${base}`, title, unit: title === base ? "" : base, format, fromZero: format !== hertz, noLog: true }, lines.sort((one, other) => !!one.dash - !!other.dash)];
    });
    const rates = run.comm.map((each, place) => ({ label: `${each.kind} (${each.group})`, color: runColor(place), x: each.points.map((point) => point[axis === "step" ? 0 : 1]), y: each.points.map((point) => point[2]) }));
    if (rates.length) made.push([{ key: "comm", title: "Communication", unit: "bytes of tensors a second", format: rate, axis: rate }, rates]);
    return made;
  }

  /** Phases on top of one another; the topmost line first, so that lower ones are painted over it. */
  _phases(run) {
    if (!run.curves.step_s) return [];
    const x = run.x[this.view.x], parts = PHASES.slice(0, 5).filter(([name]) => run.curves[name]);
    let below = x.map(() => 0);
    const lines = parts.map(([name, label]) => {
      const own = run.curves[name].mean;
      below = below.map((each, place) => each + (own[place] || 0));
      return { label, color: phaseColor(name), x, y: below, own };
    });
    return lines.reverse();
  }

  drawCharts() {
    if (!this.grid || !this.run()) return;
    const plots = this._plots(), keys = new Set(plots.map(([spec]) => spec.key)), run = this.run();
    this.charts.forEach((chart, key) => { if (!keys.has(key)) { chart.remove(); this.charts.delete(key); } });
    const events = run.events.map((event) => ({ ...event, x: this.view.x === "step" ? event.step : event.time }));
    const order = plots.map(([spec]) => {
      if (!this.charts.has(spec.key)) this.charts.set(spec.key, new Chart(spec, this.view));
      return this.charts.get(spec.key).root;
    });
    const wanted = [...order, ...(run.heat_names.length ? [this.heat.root, this.timeline.root] : [])];
    if (wanted.length !== this.grid.children.length || wanted.some((each, place) => this.grid.children[place] !== each)) this.grid.replaceChildren(...wanted);
    plots.forEach(([spec, lines]) => { const chart = this.charts.get(spec.key); chart.spec = spec; chart.draw(lines, events); });
    this.heat.draw();
    this.timeline.draw();
    document.body.dataset.drawn = run.version;
  }

  // controls ----------------------------------------------------------------------------------------------------------

  _controls() {
    const saved = localStorageGet("paceline-theme"), prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = saved || (prefersDark ? "dark" : "light");
    const toggle = (name, title, isOn, work) => { const made = element("button", { title, onclick: () => { work(); made.setAttribute("aria-pressed", isOn()); } }, name); made.setAttribute("aria-pressed", isOn()); return made; };
    this.slider = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, oninput: () => { this.view.smooth = +this.slider.value; this._soon("smooth", 60, () => this.drawCharts()); } });
    this.logButton = toggle("log", "logarithmic scale (l)", () => this.view.isLog, () => { this.view.isLog = !this.view.isLog; this.drawCharts(); });
    this.timeButton = toggle("time", "steps or time along the charts (x)", () => this.view.x === "time", () => { this.view.x = this.view.x === "step" ? "time" : "step"; this.view.zoom = null; this.drawCharts(); });
    const outliers = toggle("outliers", "show steps that take far longer than all others", () => this.view.hasOutliers, () => { this.view.hasOutliers = !this.view.hasOutliers; this.drawCharts(); });
    this.darkButton = toggle("dark", "dark or light (d)", isDark, () => { const next = isDark() ? "light" : "dark"; document.documentElement.dataset.theme = next; localStorageSet("paceline-theme", next); this.drawAll(); });
    const reset = element("button", { id: "reset", disabled: true, title: "show all steps (0)", onclick: () => this.zoomTo(null) }, "all steps");
    document.getElementById("controls").append(element("label", { title: "smoothing (s)" }, "smooth", this.slider), this.logButton, this.timeButton, outliers, reset, this.darkButton,
      element("button", { title: "keys (?)", onclick: () => this._help() }, "?"));
  }

  _keys() {
    addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
      const work = { ArrowLeft: () => this._move(-0.2), ArrowRight: () => this._move(0.2), "+": () => this._resize(0.5), "=": () => this._resize(0.5), "-": () => this._resize(2), 0: () => this.zoomTo(null),
        l: () => this.logButton.click(), x: () => this.timeButton.click(), d: () => this.darkButton.click(), j: () => this._next(1), k: () => this._next(-1), "?": () => this._help(),
        s: () => { this.slider.value = this.view.smooth >= 0.9 ? 0 : this.view.smooth >= 0.6 ? 0.9 : 0.6; this.slider.dispatchEvent(new Event("input")); } }[event.key];
      if (work) { event.preventDefault(); work(); }
    });
  }

  _move(share) { const [first, last] = this.view.zoom || this._bounds(), by = (last - first) * share; this.zoomTo([first + by, last + by]); }
  _resize(factor) { const [first, last] = this.view.zoom || this._bounds(), middle = (first + last) / 2, half = ((last - first) / 2) * factor; this.zoomTo([middle - half, middle + half]); }
  _next(by) { const place = this.list.findIndex((run) => run.id === this.focus); const next = this.list[(place + by + this.list.length) % this.list.length]; if (next) this.pick([next.id]); }

  /** Paper is white and narrow: charts are drawn for it, and again for the screen afterwards. */
  _print() {
    let theme = null;
    addEventListener("beforeprint", () => { theme = document.documentElement.dataset.theme; document.documentElement.dataset.theme = "light"; document.body.classList.add("printed"); this.drawAll(); });
    addEventListener("afterprint", () => { if (theme) document.documentElement.dataset.theme = theme; document.body.classList.remove("printed"); this.drawAll(); });
  }

  _help() {
    const help = document.getElementById("help");
    help.replaceChildren(element("h2", {}, "Keys"), table([], SHORTCUTS.map(([key, what]) => [element("kbd", {}, key), what])),
      element("p", { className: "fine" }, "Drag over a chart to zoom in, double click to show all steps."));
    help.addEventListener("click", () => help.close(), { once: true });
    help.showModal();
  }
}

/* A file that was opened from a disk may have no storage. */
function localStorageGet(name) { try { return localStorage.getItem(name); } catch { return null; } }
function localStorageSet(name, value) { try { localStorage.setItem(name, value); } catch { /* it is light again next time */ } }

const embedded = JSON.parse(document.getElementById("data").textContent);
const page = new Page(embedded ? new FileSource(embedded) : new ServerSource());
page.start();
