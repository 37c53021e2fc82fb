/* Files of a run as text: its logs, from the end, and its config. */

class Texts {
  constructor(page) {
    this.page = page;
    this.picker = element("select", { title: "whose log", onchange: () => this._load("log") });
    this.note = { log: element("p", { className: "fine" }), config: element("p", { className: "fine" }) };
    this.pre = { log: element("pre", { tabIndex: 0 }), config: element("pre", { tabIndex: 0 }) };
    this.folds = Object.fromEntries(["log", "config"].map((key) => [key, element("details", { className: "card fold", ontoggle: () => this._load(key) },
      element("summary", {}, key === "log" ? "What the ranks wrote" : "The whole config"), key === "log" ? element("div", { className: "tools" }, "log of", this.picker) : null, this.pre[key], this.note[key])]));
    this.log = this.folds.log;
    this.config = this.folds.config;
    this.loaded = {};
  }

  /** Takes the run that is shown; an open log of one that goes on is read again every two seconds at most. */
  draw(run) {
    const logs = run.texts.filter((name) => name !== "config"), isOther = run.id !== this.run;
    this.hasLog = logs.length > 0;
    this.hasConfig = run.texts.includes("config");
    if (isOther || logs.length !== this.picker.children.length) {
      const wanted = isOther || !logs.includes(this.picker.value) ? (run.failure && logs.includes(`rank-${run.failure.rank}`) ? `rank-${run.failure.rank}` : logs[0]) : this.picker.value;
      this.picker.replaceChildren(...logs.map((name) => element("option", { value: name }, name.replace("-", " "))));
      if (wanted) this.picker.value = wanted;
    }
    this.run = run.id;
    if (isOther) { this.loaded = {}; this._load("log"); this._load("config"); }
    else if (run.version !== this.version) this.page._soon("log", 2000, () => { this.loaded = {}; this._load("log"); });
    this.version = run.version;
  }

  async _load(key) {
    const name = key === "config" ? "config" : this.picker.value, id = this.run, pre = this.pre[key];
    if (!this.folds[key].open || !name || !id || this.loaded[key] === name) return;
    this.loaded[key] = name;
    const found = await this.page.source.text(id, name);
    if (id !== this.run) return;
    const isAtEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4;
    pre.textContent = found.text;
    this.note[key].textContent = found.is_cut ? `the last ${bytes(found.text.length)} of ${bytes(found.bytes)}` : "";
    if (key === "log" && isAtEnd) pre.scrollTop = pre.scrollHeight;
  }
}
