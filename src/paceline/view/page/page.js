/* The page: which runs are chosen, what is drawn, the address of what is shown, and what keys and controls do. */

const SHORTCUTS = [["← →", "move along the steps"], ["+ −", "zoom in and out"], ["0", "show all steps"], ["l", "logarithmic scale"], ["x", "steps or time"],
  ["s", "more smoothing, then none"], ["a", "all runs in a table"], ["d", "dark or light"], ["j k", "next run, previous run"], ["?", "this help"]];
const SMOOTH = 0.6;

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
    this.ownCharts = keptCharts();
    this.view = { x: "step", smooth: SMOOTH, isLog: false, hasOutliers: false, zoom: null, bounds: () => this._bounds(), onZoom: (range) => this.zoomTo(range) };
    this.main = document.getElementById("main");
    this.timers = {};
    this.runList = new RunList(this);
    this.table = new RunTable(this);
    this.texts = new Texts(this);
    this._controls();
    this._keys();
    this._print();
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; this._soon("resize", 120, () => this.drawAll()); } });
    addEventListener("popstate", () => this.goTo(location.hash));
  }

  async start() {
    const state = document.getElementById("connection");
    state.dataset.state = this.source.isLive ? "live" : "file";
    state.textContent = this.source.isLive ? "live" : "report";
    this.list = this.source.isLive ? (await this.source.load([], null, 1)).list : this.source.list();
    this.seen = new Set(this.list.map((run) => run.id));
    await this.goTo(location.hash);
    if (this.source.isLive) this.source.follow((list) => this.news(list), (now) => { state.dataset.state = now; state.textContent = now === "live" ? "live" : "the server does not answer"; });
  }

  // the address of what is shown --------------------------------------------------------------------------------------

  /** Shows what an address names; without one, the run that is running, or the newest; in a report all. */
  async goTo(hash) {
    const asked = new URLSearchParams(hash.slice(1)), first = this.list.find((run) => run.status === "running") || this.list[0];
    const named = asked.getAll("run").map((name) => this.list.find((run) => run.name === name)).filter(Boolean).map((run) => run.id);
    const ids = named.length ? named : this.source.isLive ? (first ? [first.id] : []) : this.list.map((run) => run.id);
    this.isByHand = this.isByHand || named.length > 0;
    const zoom = (asked.get("steps") || "").split("-").map(Number);
    Object.assign(this.view, { x: asked.get("x") === "time" ? "time" : "step", isLog: asked.has("log"), smooth: asked.has("smooth") ? +asked.get("smooth") || 0 : SMOOTH });
    if (asked.has("chart")) this.ownCharts = asked.getAll("chart").map((each) => each.split("|"));
    this.table.goTo(asked);
    this._showControls();
    this.isInTable = asked.get("view") === "runs";
    await this.choose(ids, (this.list.find((run) => run.name === asked.get("focus")) || {}).id, zoom.length === 2 && zoom[1] > zoom[0] ? zoom : null);
    if (asked.has("part")) this._scrollTo(asked.get("part"));
  }

  /** Writes the address; a new entry of the history for another view. */
  note(isNew = false) {
    const told = new URLSearchParams(), { view } = this, name = (id) => (this.list.find((run) => run.id === id) || {}).name;
    if (this.isInTable) { told.set("view", "runs"); this.table.note(told); }
    this.chosen.map(name).filter(Boolean).forEach((each) => told.append("run", each));
    if (this.focus !== this.chosen[0] && name(this.focus)) told.set("focus", name(this.focus));
    if (view.x === "time") told.set("x", "time");
    if (view.isLog) told.set("log", "");
    if (view.smooth !== SMOOTH) told.set("smooth", view.smooth);
    if (view.zoom) told.set("steps", view.zoom.map((each) => Number(each.toPrecision(7))).join("-"));
    this.ownCharts.forEach((names) => told.append("chart", names.join("|")));
    if (this.part) told.set("part", this.part);
    const hash = `#${told}`;
    if (hash === location.hash) return;
    try { history[isNew ? "pushState" : "replaceState"](null, "", hash); } catch { /* a file may have no address of its own */ }
  }

  /** Shows runs that somebody has picked: the page stays with them. */
  async pick(ids, focus) {
    this.isByHand = true;
    this.isInTable = false;
    this.part = null;
    await this.choose(ids, focus, null, true);
  }

  async choose(ids, focus, zoom = null, isNew = false) {
    this.chosen = ids;
    this.focus = focus && ids.includes(focus) ? focus : ids.includes(this.focus) ? this.focus : ids[0] || null;
    this.view.zoom = zoom;
    if (this.timeline) { this.timeline.isNewest = true; this.timeline.zoom = null; }
    this.note(isNew);
    await this.load();
  }

  showTable(isShown) {
    this.isInTable = isShown;
    this.note(true);
    this.drawAll();
  }

  run() { return this.runs.get(this.focus); }

  /** Takes the states of all runs; loads the chosen ones again where they have news. Goes to a run that starts, where
   * nobody has chosen one by hand and the one that is shown is over. */
  news(list) {
    const fresh = list.find((run) => !this.seen.has(run.id)), now = list.find((run) => run.id === this.focus);
    list.forEach((run) => this.seen.add(run.id));
    this.list = list;
    this.runList.draw();
    if (this.isInTable) this.table.refresh();
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
    this.note();
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
    this.runList.draw();
    this.tableButton.hidden = this.list.length < 2;
    this.tableButton.setAttribute("aria-pressed", this.isInTable);
    if (this.isInTable && this.list.length) { this.main.replaceChildren(this.table.root); this.table.refresh(); return; }
    if (!this.run()) { this._empty(); return; }
    this._frame();
    this.drawWords();
    this.drawCharts();
    document.title = `${this.run().name} – Paceline`;
  }

  _empty() {
    this.charts.forEach((chart) => chart.remove());
    this.charts.clear();
    this.heat = this.experts = this.timeline = null;
    this.main.replaceChildren(element("div", { className: "empty" }, element("h1", {}, "No run yet"),
      "This page shows the first one as soon as it starts. ", element("p", {}, element("code", {}, "paceline train configs/digits.yaml"))));
  }

  /** The places of everything, from the top: the state, the parts with the loss first, and in each its charts or tables. */
  _frame() {
    if (!this.heat) {
      this.top = element("div", { id: "verdict" });
      this.tabs = element("nav", { className: "tabs", ariaLabel: "Parts of the page" });
      this.grids = Object.fromEntries(["first", "learning", "speed", "system", "hosts", "experts", "ranks"].map((key) => [key, element("div", { className: key === "first" ? "first" : "charts" })]));
      this.notes = element("div", { className: "notes" });
      this.words0 = element("div");
      this.samples = element("div");
      this.bottom = element("div");
      this.hosts = element("details", { className: "card fold", ontoggle: () => this.drawCharts() }, element("summary", {}, "Hosts"), this.grids.hosts);
      const pick = (step) => { this.timeline.choose(step - 1, step + 1); this.timeline.root.scrollIntoView({ behavior: "smooth", block: "nearest" }); };
      this.heat = new HeatMap((name) => this._heatOf(name), pick);
      this.experts = new HeatMap((name) => this._heatOf(name), pick, "expert");
      this.timeline = new Timeline((range) => this.source.timeline(this.focus, range), () => this.run().range || [0, 0], this.source.isLive);
      this.timeline.isNewest = true;
      const more = element("button", { className: "more", onclick: () => this._addChart() }, "Add a chart");
      const inside = { learning: [this.grids.first, this.words0, this.grids.learning, more, this.samples], speed: [this.grids.speed], system: [this.grids.system, this.hosts], experts: [this.grids.experts], ranks: [this.grids.ranks],
        tables: [this.bottom], log: [this.texts.log], config: [this.texts.config] };
      this.parts = Object.fromEntries(PARTS.map(([key, name]) => [key, element("section", { className: "part", id: `part-${key}` }, element("h2", {}, name), ...inside[key])]));
      this.tabs.append(...PARTS.map(([key, name]) => element("a", { href: `#part-${key}`, id: `tab-${key}`, onclick: (event) => { event.preventDefault(); this._scrollTo(key); this.note(); } }, name)));
      const seen = new IntersectionObserver((all) => all.forEach((each) => { if (each.isIntersecting) this._markTab(each.target.id.slice(5)); }), { rootMargin: "-100px 0px -60% 0px" });
      this._markTab("learning");
      Object.values(this.parts).forEach((part) => seen.observe(part));
    }
    if (this.top.parentNode !== this.main) this.main.replaceChildren(this.top, this.tabs, ...Object.values(this.parts));
  }

  _markTab(key) { [...this.tabs.children].forEach((tab) => tab.setAttribute("aria-current", tab.id === `tab-${key}`)); }

  _scrollTo(key) {
    if (!this.parts || !this.parts[key]) return;
    this.part = key === "learning" ? null : key;
    if (this.part) this.parts[key].scrollIntoView(); else scrollTo(0, 0);
    this._markTab(key);
  }

  _heatOf(name) { const run = this.run(); return run && run.heat_names.length ? this.source.heat(run.id, name, this._range(), 600) : null; }
  _heat() {
    const run = this.run();
    for (const [map, names] of this.heat && run ? [[this.heat, run.heat_names], [this.experts, run.expert_layers]] : []) if (names.length) { map.names(names); map.refresh(); }
  }

  drawWords() {
    const run = this.run();
    if (!run || !this.top) return;
    const words = (this.words.get(run.id) || {}).told, chosen = this.chosen.map((id) => this.runs.get(id)).filter(Boolean);
    renew(this.top, stateOf(run));
    renew(this.notes, [notesCard(run, words, () => { this.texts.log.open = true; this._scrollTo("log"); this.note(); })]);
    const compared = chosen.length > 1 ? compareTables(chosen, this.differences, chosen.map((each, place) => runColor(place))) : [];
    renew(this.words0, [...compared, factList(run, words)]);
    const facts = this.words0.querySelector(".facts");
    if (facts) balance(facts, 130);
    renew(this.samples, [samplesCard(run)]);
    renew(this.bottom, [...wordTables(words), communicationTable(run), eventTable(run)]);
    this.texts.draw(run);
    this._showParts();
  }

  _showParts() {
    const run = this.run();
    const isThere = { learning: true, speed: this.grids.speed.children.length, system: this.grids.system.children.length || !this.hosts.hidden, experts: run.expert_layers.length, ranks: run.heat_names.length, tables: this.bottom.children.length, log: this.texts.hasLog, config: this.texts.hasConfig };
    PARTS.forEach(([key]) => { this.parts[key].hidden = document.getElementById(`tab-${key}`).hidden = !isThere[key]; });
  }

  drawCharts() {
    if (!this.grids || !this.run() || this.isInTable) return;
    const run = this.run(), chosen = this.chosen.map((id, place) => [this.runs.get(id), place]).filter((each) => each[0]);
    const plots = new Plots(chosen, run, this.view.x).all(this.ownCharts, (number) => this._removeChart(number)), keys = new Set(plots.map(([spec]) => spec.key));
    this.charts.forEach((chart, key) => { if (!keys.has(key)) { chart.remove(); this.charts.delete(key); } });
    const events = run.events.map((event) => ({ ...event, x: this.view.x === "step" ? event.step : event.time }));
    plots.forEach(([spec]) => { if (!this.charts.has(spec.key)) this.charts.set(spec.key, new Chart(spec, this.view)); });
    const of = (part) => plots.filter(([spec]) => spec.part === part).map(([spec]) => this.charts.get(spec.key).root);
    const wanted = { first: [...of("first"), this.notes], learning: of("learning"), speed: of("speed"), system: of("system"), hosts: of("hosts"), experts: run.expert_layers.length ? [this.experts.root] : [], ranks: run.heat_names.length ? [this.heat.root, this.timeline.root] : [] };
    this.hosts.hidden = !wanted.hosts.length;
    this.hosts.firstChild.textContent = `Hosts: ${wanted.hosts.length} charts of processors, memory, network and devices`;
    Object.entries(wanted).forEach(([part, roots]) => {
      const grid = this.grids[part];
      if (roots.length !== grid.children.length || roots.some((each, place) => grid.children[place] !== each)) grid.replaceChildren(...roots);
    });
    this._showParts();
    Object.values(this.grids).forEach((grid) => balance(grid, 340));
    plots.filter(([spec]) => spec.part !== "hosts" || this.hosts.open).forEach(([spec, lines]) => { const chart = this.charts.get(spec.key); chart.spec = spec; chart.draw(lines, events); });
    this.heat.draw();
    this.experts.draw();
    this.timeline.draw();
    document.getElementById("reset").disabled = !this.view.zoom;
    document.body.dataset.drawn = run.version;
  }

  // charts of one's own -----------------------------------------------------------------------------------------------

  _addChart() {
    const dialog = document.getElementById("help"), boxes = seriesOf(this.chosen.map((id) => this.runs.get(id)).filter(Boolean)).map((name) => element("input", { type: "checkbox", value: name }));
    const add = () => { const names = boxes.filter((box) => box.checked).map((box) => box.value); dialog.close(); if (names.length) this._keepCharts([...this.ownCharts, names]); };
    dialog.replaceChildren(element("h2", {}, "A chart of your own"), element("div", { className: "series" }, ...boxes.map((box) => element("label", {}, box, seriesName(box.value)))),
      element("div", { className: "tools" }, element("button", { id: "add-chart", onclick: add }, "Add"), element("button", { onclick: () => dialog.close() }, "Cancel")));
    dialog.showModal();
  }

  _removeChart(number) { this._keepCharts(this.ownCharts.filter((_, place) => place !== number)); }

  _keepCharts(all) {
    this.ownCharts = all;
    localStorageSet("paceline-charts", JSON.stringify(all));
    this.note();
    this.drawCharts();
  }

  // controls ----------------------------------------------------------------------------------------------------------

  _controls() {
    const saved = localStorageGet("paceline-theme"), prefersDark = matchMedia("(prefers-color-scheme: dark)").matches, { view } = this;
    document.documentElement.dataset.theme = saved || (prefersDark ? "dark" : "light");
    this.toggles = [];
    const toggle = (name, title, isOn, work) => { const made = element("button", { title, onclick: () => { work(); this.drawAll(); this.note(); this._showControls(); } }, name); this.toggles.push([made, isOn]); return made; };
    this.slider = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, oninput: () => { view.smooth = +this.slider.value; this.note(); this._soon("smooth", 60, () => this.drawCharts()); } });
    this.logButton = toggle("log", "logarithmic scale (l)", () => view.isLog, () => { view.isLog = !view.isLog; });
    this.timeButton = toggle("time", "steps or time along the charts (x)", () => view.x === "time", () => { view.x = view.x === "step" ? "time" : "step"; view.zoom = null; });
    const outliers = toggle("outliers", "show steps that take far longer than all others", () => view.hasOutliers, () => { view.hasOutliers = !view.hasOutliers; });
    this.darkButton = toggle("dark", "dark or light (d)", isDark, () => { const next = isDark() ? "light" : "dark"; document.documentElement.dataset.theme = next; localStorageSet("paceline-theme", next); });
    const reset = element("button", { id: "reset", disabled: true, title: "show all steps (0)", onclick: () => this.zoomTo(null) }, "all steps");
    const controls = document.getElementById("controls"), menu = document.getElementById("menu"), open = (isOpen) => { controls.classList.toggle("open", isOpen); menu.setAttribute("aria-expanded", isOpen); };
    controls.append(element("label", { title: "smoothing (s)" }, "smooth", this.slider), this.logButton, this.timeButton, outliers, reset, this.darkButton, element("button", { title: "keys (?)", onclick: () => this._help() }, "?"));
    menu.addEventListener("click", () => open(!controls.classList.contains("open")));
    addEventListener("pointerdown", (event) => { if (!document.getElementById("bar").contains(event.target)) open(false); });
    this.tableButton = document.getElementById("all");
    this.tableButton.addEventListener("click", () => this.showTable(!this.isInTable));
    this._showControls();
  }

  _showControls() {
    this.slider.value = this.view.smooth;
    this.toggles.forEach(([button, isOn]) => button.setAttribute("aria-pressed", isOn()));
  }

  _keys() {
    addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
      const work = { ArrowLeft: () => this._move(-0.2), ArrowRight: () => this._move(0.2), "+": () => this._resize(0.5), "=": () => this._resize(0.5), "-": () => this._resize(2), 0: () => this.zoomTo(null),
        l: () => this.logButton.click(), x: () => this.timeButton.click(), d: () => this.darkButton.click(), a: () => this.showTable(!this.isInTable), j: () => this._next(1), k: () => this._next(-1), "?": () => this._help(),
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
      element("p", { className: "fine" }, "Drag over a chart to zoom in, double click to show all steps."), element("div", { className: "tools" }, element("button", { onclick: () => help.close() }, "Close")));
    help.showModal();
  }
}

/* A file that was opened from a disk may have no storage. */
function localStorageGet(name) { try { return localStorage.getItem(name); } catch { return null; } }
function localStorageSet(name, value) { try { localStorage.setItem(name, value); } catch { /* it is light again next time */ } }

function keptCharts() {
  try { return JSON.parse(localStorageGet("paceline-charts") || "[]").filter((names) => Array.isArray(names) && names.every((name) => typeof name === "string")); } catch { return []; }
}

const embedded = JSON.parse(document.getElementById("data").textContent);
const page = new Page(embedded ? new FileSource(embedded) : new ServerSource());
page.start();
