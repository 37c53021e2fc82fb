/* Runs beside one another: the list on the left, and the table of all of them with their tags and notes. */

class RunList {
  constructor(page) {
    this.page = page;
    this.root = document.getElementById("runs");
    this.title = element("h2");
    this.rows = new Map();
  }

  /** Brings the list up to date; rows stay what they are, so that focus and clicks are not lost. */
  draw() {
    const { page, root } = this;
    if (page.list.length < 2) { root.replaceChildren(); this.rows.clear(); return; }
    this.title.textContent = `${page.list.length} runs`;
    const wanted = [this.title, ...page.list.map((run) => this._row(run))];
    if (wanted.length !== root.children.length || wanted.some((each, place) => root.children[place] !== each)) {
      const focused = document.activeElement;
      root.replaceChildren(...wanted);
      if (root.contains(focused)) focused.focus();
    }
  }

  _row(run) {
    const { page } = this, place = page.chosen.indexOf(run.id), color = place >= 0 && page.chosen.length > 1 ? runColor(place) : "";
    if (!this.rows.has(run.id)) this.rows.set(run.id, this._make(run.id));
    const row = this.rows.get(run.id), { box, name, where, dot } = row;
    [name.textContent, where.textContent, row.root.title] = [run.name, `${run.status}, step ${whole(run.step)}`, run.name];
    box.checked = place >= 0;
    box.ariaLabel = `show ${run.name} beside the others`;
    dot.dataset.status = run.status;
    name.style.color = color;
    row.root.style.setProperty("--run", place >= 0 ? runColor(place) : "");
    row.root.setAttribute("aria-current", run.id === page.focus && !page.isInTable);
    return row.root;
  }

  _make(id) {
    const { page } = this, box = element("input", { type: "checkbox", title: "show this run beside the others" });
    box.addEventListener("click", (event) => { event.stopPropagation(); const ids = page.chosen.filter((each) => each !== id); page.pick(box.checked ? [...ids, id] : ids.length ? ids : [id]); });
    const name = element("span", { className: "name" }), where = element("span", { className: "where" }), dot = element("span", { className: "dot" });
    const root = element("div", { className: "run", tabIndex: 0, role: "button", onclick: () => page.pick(page.chosen.includes(id) ? page.chosen : [id], id), onkeydown: (event) => { if (event.key === "Enter" && event.target === root) root.click(); } },
      box, element("span", { className: "who" }, name, where), dot);
    return { root, box, name, where, dot };
  }
}

/** [key, title, format]: what a row of the table has of its run. */
const RUN_COLUMNS = [["name", "Run", String], ["status", "State", String], ["tags", "Tags", String], ["note", "Note", String], ["started", "Started", clock], ["step", "Step", whole], ["loss", "Loss of rank 0", short], ["eval_loss", "Test loss", short], ["eval_accuracy", "Test accuracy", percent],
  ["lr", "Learning rate", String], ["global_batch", "Batch", whole], ["strategy", "Strategy", String], ["world_size", "Ranks", whole], ["seconds", "Duration", seconds]];

class RunTable {
  constructor(page) {
    this.page = page;
    this.rows = [];
    this.sort = "-started";
    this.find = element("input", { type: "search", placeholder: "filter: digits failed lr-test", ariaLabel: "filter the runs", oninput: () => { this.draw(); page.note(); } });
    this.body = element("tbody");
    this.heads = RUN_COLUMNS.map(([key, title]) => element("th", { scope: "col" }, element("button", { onclick: () => { this.sort = this.sort === key ? `-${key}` : key; this.draw(); page.note(); } }, title)));
    this.count = element("span", { className: "fine" });
    this.told = element("p", { className: "fine", role: "status" });
    this.root = element("section", { className: "card block all-runs" }, element("div", { className: "head" }, element("h1", {}, "All runs"), element("div", { className: "tools" }, this.find, this.count)),
      element("div", { className: "scroller", tabIndex: 0 }, element("table", {}, element("thead", {}, element("tr", {}, ...this.heads)), this.body)), this.told);
    this.body.addEventListener("focusout", () => { if (this.isStale) this.draw(); });
  }

  goTo(asked) { this.sort = asked.get("sort") || "-started"; this.find.value = asked.get("find") || ""; }
  note(told) { if (this.sort !== "-started") told.set("sort", this.sort); if (this.find.value) told.set("find", this.find.value); }
  refresh() { this.page._soon("table", this.rows.length ? 1000 : 0, async () => { this.rows = await this.page.source.rows(); this.draw(); }); }

  /** Every word of the filter is in one of the cells of a run. */
  _isFound(row) {
    const text = RUN_COLUMNS.map(([key, , format]) => (row[key] === null || row[key] === undefined ? "" : format(row[key]))).join(" ").toLowerCase();
    return this.find.value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  draw() {
    this.isStale = this.body.contains(document.activeElement);
    if (this.isStale) return;  // somebody writes in it: later
    const isDown = this.sort.startsWith("-"), key = this.sort.replace(/^-/, ""), known = (value) => value !== null && value !== undefined && value !== "";
    const compare = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true }));
    const shown = this.rows.filter((row) => this._isFound(row)).sort((one, other) => (known(one[key]) && known(other[key]) ? (isDown ? -1 : 1) * compare(one[key], other[key]) : known(other[key]) - known(one[key])));
    this.heads.forEach((head, place) => head.setAttribute("aria-sort", RUN_COLUMNS[place][0] !== key ? "none" : isDown ? "descending" : "ascending"));
    this.body.replaceChildren(...shown.map((row) => element("tr", {}, ...RUN_COLUMNS.map((column) => element("td", {}, this._cell(row, column))))));
    this.count.textContent = `${shown.length} of ${this.rows.length}`;
  }

  _cell(row, [key, title, format]) {
    const value = row[key], { page } = this;
    if (key === "name") return element("a", { href: `#run=${encodeURIComponent(value)}`, onclick: (event) => { event.preventDefault(); page.pick([row.id]); } }, value);
    if (key === "status") { const pill = element("span", { className: "pill" }, value); pill.dataset.status = value; return pill; }
    if (page.source.isLive && (key === "tags" || key === "note")) {
      const input = element("input", { value: value || "", className: key, placeholder: key === "tags" ? "tag, tag" : "note", ariaLabel: `${title} of ${row.name}`, maxLength: 2000 });
      input.addEventListener("change", async () => { row[key] = input.value; this.told.textContent = await page.source.keep(row.id, { tags: row.tags || "", note: row.note || "" }); });
      return input;
    }
    return value === null || value === undefined || value === "" ? "–" : format(value);
  }
}
