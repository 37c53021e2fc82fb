/* Words and tables: the state on top, the notes, what each rank did, events, and how runs differ. */

/** A table that scrolls by itself where it is too wide, and shows that it does. A column that is text has a heading's case. */
function table(columns, rows, wordy = []) {
  return element("div", { className: "scroller", tabIndex: 0 }, element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map((name, place) => element("th", { scope: "col", className: wordy.includes(place) ? "words" : "" }, typeof name === "string" ? heading(name) : name)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell, place) => {
      const made = element("td", { className: wordy.includes(place) ? "words" : "" });
      made.append(cell instanceof Node ? cell : String(cell));
      return made;
    }))))));
}

const block = (title, key, ...children) => { const made = element("section", { className: "card block" }, element("h3", {}, heading(title)), ...children); made.dataset.block = key; return made; };

const FOLDS = new Set();  // that are open, by key: what is drawn anew stays open
function fold(key, title, ...children) {
  return element("details", { open: FOLDS.has(key), ontoggle: (event) => { if (event.target.open) FOLDS.add(key); else FOLDS.delete(key); } }, element("summary", {}, title), ...children);
}

/** Name, state and progress of a run: in few lines, as the loss follows. */
function stateOf(run) {
  const { state, facts } = run, share = state.total ? Math.min(1, state.step / state.total) : state.status === "done" ? 1 : 0;
  const bar = element("i"); bar.style.width = `${100 * share}%`; bar.dataset.status = state.status;
  const pill = element("span", { className: "pill" }, state.status); pill.dataset.status = state.status;
  const setup = facts.strategy === undefined ? "" : [
    `${facts.strategy} on ${facts.world_size} ${facts.world_size === 1 ? "rank" : "ranks"}`, `${facts.backend}, ${facts.device}`,
    `${count(facts.num_parameters)} parameters`, `global batch ${whole(facts.global_batch)}`, facts.num_hosts > 1 ? `${facts.num_hosts} hosts` : facts.hosts[0],
    state.attempts > 1 ? `attempt ${state.attempts}` : null, `torch ${facts.torch}`].filter(Boolean).join("  ·  ");
  const reading = run.read < 1 ? `reading records, ${Math.floor(100 * run.read)} %` : "";
  return [element("div", { className: "top" }, element("h1", {}, run.name), pill, reading ? element("span", { className: "at" }, reading) : null),
    element("p", { className: "sentence" }, state.sentence), element("p", { className: "setup" }, setup),
    element("div", { className: "progress", role: "progressbar", title: `${Math.round(100 * share)} % of the steps` }, bar)];
}

/** One card of all that is to be said: what failed, the verdict, its evidence, advice, and what was predicted, folded. */
function notesCard(run, words, onLog) {
  const told = [...((words && words.sentences) || [])], of = (...kinds) => told.filter((each) => kinds.includes(each.kind)).map((each) => each.text);
  if (run.verdict) told.unshift({ kind: "bad", text: run.verdict });
  if (words && words.problem) told.push({ kind: "warning", text: words.problem });
  run.problems.forEach((text) => told.push({ kind: "warning", text }));
  const list = (title, texts) => (texts.length ? [element("h4", {}, title), element("ul", {}, ...texts.map((text) => element("li", {}, text)))] : []);
  const says = (...kinds) => told.filter((each) => kinds.includes(each.kind)).map((each) => { const made = element("p", { className: "says" }, heading(each.text)); made.dataset.kind = each.kind; return made; });
  const failed = run.failure ? [element("pre", { tabIndex: 0 }, run.failure.traceback || run.failure.message), element("button", { className: "more", onclick: onLog }, "Show the log")] : [];
  const predicted = of("prediction");
  const waits = words ? null : element("p", { className: "fine" }, "The verdict on the run comes in a moment.");
  return element("section", { className: "card notes-card" }, element("h3", {}, run.failure ? `How rank ${run.failure.rank} failed` : "What limits the run"), ...says("bad"), ...failed, ...says("warning", "good"), ...list("Evidence", of("evidence")), ...list("What would help", of("advice")),
    predicted.length ? fold("predicted", `Predicted and measured: ${predicted.length}`, element("ul", {}, ...predicted.map((text) => element("li", {}, text)))) : null, waits);
}

/** Texts and images that a run kept of its evaluations: those of the last step that has any. */
function samplesCard(run) {
  if (!run.samples || !run.samples.length) return null;
  const each = (found) => element("div", { className: "samples" }, ...found.items.map(([text, image]) => element("figure", {},
    image ? element("img", { src: `data:image/png;base64,${image.replace(/[^A-Za-z0-9+/=]/g, "")}`, alt: text || "a sample" }) : null, text ? element("figcaption", {}, text) : null)));
  const [last, ...older] = [...run.samples].reverse();
  return block(`Samples of step ${whole(last.step)}`, "samples", each(last), ...older.map((found) => fold(`samples-${found.step}`, `Step ${whole(found.step)}`, each(found))));
}

function lastOf(run, name) {
  const values = run.curves[name] && run.curves[name].mean;
  if (!values) return null;
  for (let place = values.length - 1; place >= 0; place--) if (values[place] !== null) return values[place];
  return null;
}

/** The figures of the summary where it is there; while a run goes on, those of its newest steps. */
function factList(run, words) {
  let rows = words && words.facts;
  if (!rows || run.state.status === "running") {
    rows = [["training loss", short(lastOf(run, "loss")), "now"], [`${run.facts.unit || "samples"}/s`, count(lastOf(run, "units_per_s")), "now"],
      ["step", seconds(lastOf(run, "step_s")), "slowest rank"], ["memory", bytes(lastOf(run, "memory_bytes")), "largest rank"],
      ["time left", run.state.left_s === null ? "–" : seconds(run.state.left_s), "at this speed"], ["running for", seconds(run.state.seconds), ""]];
    const mfu = lastOf(run, "mfu");
    if (mfu !== null) rows.splice(2, 0, ["MFU", percent(mfu), "now"]);
    rows.push(...Object.entries(run.evaluations).filter(([, all]) => all.length).map(([name, all]) => {
      const [step, , value] = all[all.length - 1];
      return [`test ${name}`, name === "accuracy" ? percent(value) : short(value), `step ${whole(step)}`];
    }));
  }
  return element("dl", { className: "card facts" }, ...rows.map(([name, value, note]) =>
    element("div", {}, element("dt", {}, heading(name)), element("dd", {}, value, note ? element("span", { className: "more-words" }, note) : null))));
}

function wordTables(words) {
  return ((words && words.tables) || []).map((each) =>
    block(each.title, "table", table(each.columns, each.rows), each.note ? element("p", { className: "fine" }, each.note) : null));
}

function eventTable(run) {
  if (!run.events.length) return null;
  const rows = [...run.events].reverse().slice(0, 60).map((event) => {
    const mark = element("span", {}, event.title); mark.style.color = SMALL_EVENTS.has(event.name) ? css("--dim") : eventColor(event.name);
    return [mark, whole(event.step), seconds(event.time), event.text];
  });
  return block("Events", "events", table(["event", "step", "after", "what"], rows, [3]), run.events.length > 60 ? element("p", { className: "fine" }, `the last 60 of ${run.events.length}`) : null);
}

function communicationTable(run) {
  if (!run.comm.length) return null;
  const rows = run.comm.map((each) => {
    const total = (place) => each.points.reduce((sum, point) => sum + (point[place] || 0), 0);
    const took = total(5), sent = total(3);
    return [`${each.kind} (${each.group}, ${each.ranks} ranks)`, whole(total(4)), bytes(sent), seconds(took), rate(took ? sent / took : null)];
  });
  return block("Communication", "communication", table(["operation", "calls", "bytes", "time", "rate"], rows), element("p", { className: "fine" }, "as the lowest rank saw it"));
}

/** Several runs side by side: the figures of each, and the settings in which they differ. */
function compareTables(runs, differences, colors) {
  const name = (run, place) => { const made = element("span", {}, run.name); made.style.color = colors[place]; return made; };
  const best = (pick, isLow) => {
    const known = runs.map((run) => pick(run)).filter((each) => each !== null);
    return runs.map((run) => { const value = pick(run); return value !== null && known.length > 1 && value === (isLow ? Math.min(...known) : Math.max(...known)); });
  };
  const middle = (key) => (run) => {
    const values = ((run.curves[key] || {}).mean || []).filter((each) => each !== null).slice(Math.floor((((run.curves[key] || {}).mean || []).length) / 10)).sort((one, other) => one - other);
    return values.length ? values[Math.floor(values.length / 2)] : null;
  };
  const last = (key) => (run) => lastOf(run, key);
  const evaluated = (name) => (run) => { const all = run.evaluations[name]; return all && all.length ? all[all.length - 1][2] : null; };
  const own = [...new Set(runs.flatMap((run) => Object.keys(run.evaluations)))].filter((name) => !["loss", "accuracy"].includes(name));
  const isMixed = new Set(runs.map((run) => run.facts.unit)).size > 1;  // tokens beside samples: none is the best
  const rows = [["state", (run) => run.state.status, null], ["steps", (run) => whole(run.state.step), null],
    ["training loss, last", last("loss"), true, short], ["test accuracy", evaluated("accuracy"), false, percent], ["test loss", evaluated("loss"), true, short],
    ...own.map((name) => [`test ${name}`, evaluated(name), undefined, short]),  // nobody says whether less of it is better
    ["throughput, median", middle("units_per_s"), isMixed ? undefined : false, count, (run) => `${run.facts.unit || "samples"}/s`],
    ["step, median", middle("step_s"), true, seconds], ["exposed communication, median", middle("comm_s"), true, seconds], ["MFU, median", middle("mfu"), false, percent],
    ["memory, last", last("memory_bytes"), true, bytes]];
  const cells = rows.map(([title, pick, isLow, format, unit]) => {
    if (isLow === null) return [title, ...runs.map(pick)];
    const marks = isLow === undefined ? [] : best(pick, isLow);
    if (runs.every((run) => pick(run) === null)) return null;
    return [title, ...runs.map((run, place) => element("span", { className: marks[place] ? "changed" : "" }, format(pick(run)), unit && pick(run) !== null ? ` ${unit(run)}` : ""))];
  }).filter(Boolean);
  const made = [block("Runs compared", "compare", table(["", ...runs.map(name)], cells), element("p", { className: "fine" }, "the best value of a row is coloured"))];
  const settingTable = (part) => table(["setting", ...runs.map(name)], part.map(([key, values]) => [key, ...values.map((each) => each || "–")]));
  if (differences.length) {
    const rest = differences.length > 12 ? fold("differences", `${differences.length - 12} more`, settingTable(differences.slice(12))) : null;
    made.push(block("What differs in the config", "differences", settingTable(differences.slice(0, 12)), rest));
  }
  return made;
}
