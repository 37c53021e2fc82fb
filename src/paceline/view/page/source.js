/* Where data comes from: this file, or the server that watches the runs. Both answer the same questions. */

class FileSource {
  constructor(data) { this.data = data; this.isLive = false; }
  list() { return this.data.runs.map((run) => ({ id: run.id, name: run.name, version: run.version, read: 1, ...run.state, verdict: run.verdict })); }
  _run(id) { return this.data.runs.find((run) => run.id === id); }
  async load(ids) { return { list: this.list(), runs: ids.map((id) => this._run(id)) }; }
  async heat(id, name) { return this._run(id).heats[name]; }
  async timeline(id) { return this._run(id).timeline; }
  async words(id) { return this._run(id).words; }
  async text(id, name) { return this._run(id).files[name]; }
  async rows() { return this.data.runs.map((run) => run.row); }
  async differences(ids) {
    const places = ids.map((id) => this.data.runs.findIndex((run) => run.id === id));
    return this.data.differences.map(([name, values]) => [name, places.map((place) => values[place])]);
  }
  follow() {}
}

class ServerSource {
  constructor() { this.isLive = true; }
  async _get(path, values) {
    const query = new URLSearchParams(Object.entries(values).filter((each) => each[1] !== null && each[1] !== undefined));
    const answer = await fetch(`${path}?${query}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${path} answers ${answer.status}`);
    return answer.json();
  }
  load(ids, range, points) { return this._get("/api/runs", { ids: ids.join(","), first: range && range[0], last: range && range[1], points }); }
  heat(id, name, range, points) { return this._get("/api/heat", { id, name, first: range && range[0], last: range && range[1], points }); }
  timeline(id, range) { return this._get("/api/timeline", { id, first: range[0], last: range[1] }); }
  words(id) { return this._get("/api/words", { id }); }
  text(id, name) { return this._get("/api/text", { id, name }); }
  rows() { return this._get("/api/rows", {}); }
  /** Keeps tags and a note in the folder of a run; answers what to tell of it. */
  async keep(id, note) {
    const answer = await fetch("/api/note", { method: "POST", cache: "no-store", headers: { "content-type": "application/json" }, body: JSON.stringify({ id, ...note }) });
    const told = await answer.json().catch(() => ({}));
    return answer.ok ? "kept in the folder of the run" : told.error || `the server answers ${answer.status}`;
  }
  differences(ids) { return this._get("/api/differences", { ids: ids.join(",") }); }
  /** Calls `news` with the states of all runs whenever one changes, and `state` with "live" or "lost". */
  follow(news, state) {
    const events = new EventSource("/api/events");
    events.onopen = () => state("live");
    events.onerror = () => state("lost");
    events.onmessage = (event) => { state("live"); news(JSON.parse(event.data)); };
  }
}
