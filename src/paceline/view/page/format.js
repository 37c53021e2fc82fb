"use strict";
/* Numbers as people read them, colours, and small helpers to build the page. Text goes in as text, never as markup. */

const RUN_COLORS = ["#5753c6", "#d9730d", "#0d8a72", "#c2378a", "#2f7fd1", "#8a7a0a", "#7b4fb8", "#5a6b7a"];
const RUN_COLORS_DARK = ["#9d9af5", "#f0a35e", "#4cc9ad", "#ee82bf", "#79b4f2", "#d1c14a", "#bd96ee", "#9fb2c3"];
const PHASES = [
  ["data_s", "data", "#3b8fd6", "#5aa9ea"],
  ["forward_s", "forward", "#6ab187", "#6fc394"],
  ["backward_s", "backward", "#2f7d60", "#3f9a7a"],
  ["comm_s", "exposed communication", "#d8434f", "#f0636e"],
  ["optimizer_s", "update", "#e0a32e", "#e6b450"],
  ["other_s", "other", "#c3c5cf", "#4b4d58"],
];
const EVENT_COLORS = { attempt: "#d8434f", restart: "#d8434f", resume: "#d9730d", roll_back: "#d8434f", skipped: "#d8434f", spike: "#d8434f",
  straggler: "#d9730d", preempted: "#d9730d", not_saved: "#d8434f", early_stop: "#0d8a72", checkpoint: "#a3a4ae", evaluation: "#2f7fd1" };
/* Marks without a line: what belongs to every run. */
const SMALL_EVENTS = new Set(["checkpoint", "evaluation", "loader", "precision", "packing", "warmup", "compiling", "not_compiled", "cuda_graphs", "fallback"]);

const isDark = () => document.documentElement.dataset.theme === "dark";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runColor = (place) => (isDark() ? RUN_COLORS_DARK : RUN_COLORS)[place % RUN_COLORS.length];
const phaseColor = (name) => { const found = PHASES.find((each) => each[0] === name); return isDark() ? found[3] : found[2]; };
const eventColor = (name) => EVENT_COLORS[name] || "#8a7a0a";

function element(kind, attributes = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((each) => each !== null && each !== undefined));
  return made;
}

function short(value, digits = 4) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}
const scaled = (value, steps, unit) => {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const found = steps.find((each) => Math.abs(value) >= each[0]) || steps[steps.length - 1];
  return `${Number((value / found[0]).toPrecision(3))} ${found[1]}${unit}`.trim();
};
/** In the words of format_seconds in paceline/units.py: one format of time on the page and in the terminal. */
const seconds = (value) => {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value), sign = value < 0 ? "−" : "";
  if (size === 0) return "0 s";
  if (size >= 3600) return `${sign}${(size / 3600).toFixed(1)} h`;
  if (size >= 60) return `${sign}${Math.floor(size / 60)} min ${Math.floor(size % 60)} s`;
  if (size >= 1) return `${sign}${size.toFixed(1)} s`;
  return size >= 1e-3 ? `${sign}${(size * 1e3).toFixed(1)} ms` : `${sign}${(size * 1e6).toFixed(0)} us`;
};
/** A time on an axis: round numbers without their zero. */
const tickSeconds = (value) => seconds(value).replace(/\.0 /, " ").replace(/ 0 s$/, "");
const clock = (value) => (value ? new Date(value * 1000).toLocaleString("sv-SE", { dateStyle: "short", timeStyle: "short" }) : "–");
/** The one case of headings: a capital at the beginning. */
const heading = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const bytes = (value) => scaled(value, [[2 ** 40, "Ti"], [2 ** 30, "Gi"], [2 ** 20, "Mi"], [2 ** 10, "Ki"], [1, ""]], "B");
const count = (value) => (value !== null && Math.abs(value) < 1000 ? short(value, 3) : scaled(value, [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]], ""));
const rate = (value) => scaled(value, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]], "B/s");
const flops = (value, unit = "FLOP/s") => scaled(value, [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1, ""]], unit);
const hertz = (value) => scaled(value, [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]], "Hz");
const byteRate = (value) => (value === null || value === undefined || !isFinite(value) ? "–" : `${bytes(value)}/s`);
const percent = (value) => (value === null || value === undefined || !isFinite(value) ? "–" : `${Number((100 * value).toPrecision(3))} %`);
const whole = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US"));

const withUnit = (unit) => (value) => (value === null || value === undefined || !isFinite(value) ? "–" : `${short(value, 3)} ${unit}`);
/* What samplers of hosts read: title, format and label by the name that the records have. */
const DEVICE_CHARTS = {
  "hw.gpu.utilization": ["GPU in use", percent, "share"], "hw.gpu.memory.usage": ["GPU memory", bytes, "bytes"], "hw.power": ["Power", withUnit("W"), "power"], "hw.temperature": ["Temperature", withUnit("°C"), "temperature"],
  "hw.gpu.clock.sm": ["GPU clock", hertz, "clock"], "hw.gpu.clock.memory": ["GPU memory clock", hertz, "clock"], "hw.gpu.throttle.power": ["Clocks lowered by power", short, "share"], "hw.gpu.throttle.thermal": ["Clocks lowered by heat", short, "share"],
  "hw.gpu.throttle.hardware": ["Clocks lowered by hardware", short, "share"], "hw.gpu.throttle.sync": ["Clocks lowered with another GPU", short, "share"],
  "system.cpu.utilization": ["Processors in use", percent, "share"], "system.memory.usage": ["Memory of the host", bytes, "bytes"], "process.memory.usage": ["Memory of the ranks", bytes, "bytes"],
  "system.network.io": ["Network", byteRate, "rate"], "system.disk.io": ["Disks", byteRate, "rate"],
};

function showTip(event, text) {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
  tip.style.top = `${Math.max(8, event.clientY - box.height - 12)}px`;
}
const hideTip = () => { document.getElementById("tip").hidden = true; };

/** Sets a canvas to a size in CSS pixels, sharp on any screen, and returns its context. */
function sharpen(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** Round numbers between two bounds, about as many as asked for. */
function ticks(low, high, about) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let each = Math.ceil(low / step) * step; each <= high + step * 1e-9; each += step) found.push(each);
  return found;
}

/** Puts children in the place of those that are there; those that are the same stay, with focus, selection and scroll. */
function renew(parent, children) {
  const wanted = children.filter(Boolean);
  wanted.forEach((each, place) => {
    const old = parent.children[place];
    if (!old) parent.append(each);
    else if (old !== each && !old.isEqualNode(each)) old.replaceWith(each);
  });
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
}

/** Sets the columns of a grid so that its rows are even, and the last has no hole: its items grow. */
function balance(grid, least) {
  const num = [...grid.children].filter((each) => !each.classList.contains("wide")).length, most = Math.max(1, Math.floor((grid.clientWidth + 14) / (least + 14)));
  if (num) grid.style.setProperty("--columns", Math.ceil(num / Math.ceil(num / most)));
}
