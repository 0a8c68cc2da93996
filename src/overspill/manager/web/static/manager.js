/* What pages do beside htmx: streams, focus, times, charts, logs that grow, a slider with its number, prompts, and notices. */
"use strict";

const token = () => document.body.dataset.token;

function notify(text) {
  const place = document.getElementById("notice");
  place.textContent = text;
  place.hidden = !text;
  if (text) place.scrollIntoView({ block: "nearest" });
}

/* What was refused is said, whoever asked for it. */
document.addEventListener("htmx:responseError", (event) => {
  let text = event.detail.xhr.responseText;
  try { text = JSON.parse(text).error.message; } catch { /* not ours */ }
  notify(text || "The manager answered " + event.detail.xhr.status + ".");
});
document.addEventListener("htmx:sendError", () => notify("The manager does not answer."));
document.addEventListener("htmx:beforeRequest", (event) => {
  if (event.detail.requestConfig.verb !== "get") notify("");
});

/* A browser has six connections to one host. A tab that nobody sees gives its stream back, or the seventh tab would
   wait for ever; seen again, it asks anew, and what is told first then is everything. */
class Stream {
  static all = new Set();
  #url;
  #source = null;
  #listeners = [];

  constructor(url) {
    this.#url = url;
    Stream.all.add(this);
    this.follow();
  }

  get readyState() {
    return this.#source?.readyState ?? EventSource.CONNECTING;
  }

  follow() {
    if (document.hidden) {
      this.#source?.close();
      this.#source = null;
    } else if (this.#source === null) {
      const source = this.#source = new EventSource(this.#url);
      source.onopen = (event) => this.onopen?.(event);
      source.onerror = (event) => {
        /* The extension makes a new one then. */
        if (source.readyState === EventSource.CLOSED) Stream.all.delete(this);
        this.onerror?.(event);
      };
      this.#listeners.forEach(([type, listener]) => source.addEventListener(type, listener));
    }
  }

  addEventListener(type, listener) {
    this.#listeners.push([type, listener]);
    this.#source?.addEventListener(type, listener);
  }

  removeEventListener(type, listener) {
    this.#listeners = this.#listeners.filter((one) => one[0] !== type || one[1] !== listener);
    this.#source?.removeEventListener(type, listener);
  }

  close() {
    Stream.all.delete(this);
    this.#source?.close();
  }
}
htmx.createEventSource = (url) => new Stream(url);
document.addEventListener("visibilitychange", () => {
  Stream.all.forEach((stream) => stream.follow());
  /* What was measured meanwhile is in the history. */
  if (!document.hidden) { charts.names = ""; loadCharts(); }
});

/* Whoever works with keys stays where they were, though the button they pressed is gone. */
let focused = null, around = null;
document.addEventListener("focusin", (event) => {
  focused = event.target;
  around = focused.closest("[tabindex='-1']");
});
document.addEventListener("htmx:afterSwap", () => {
  if (focused && !focused.isConnected && document.activeElement === document.body) around?.focus({ preventScroll: true });
});

/* Times in the zone of whoever reads them, which is named once. */
htmx.onLoad((part) => {
  const times = part.querySelectorAll("time[datetime]");
  times.forEach((one) => {
    one.title = one.title || one.textContent;
    one.textContent = new Date(one.dateTime).toLocaleString("sv");
  });
  const zone = document.getElementById("zone");
  if (times.length || document.getElementById("charts")) {
    zone.textContent = "Times are in " + Intl.DateTimeFormat().resolvedOptions().timeZone + ".";
    zone.hidden = false;
  }
});

/* What goes on is told every second: for how long, and how much longer if it goes as the last time. */
function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  return whole < 60 ? whole + " s" : Math.floor(whole / 60) + " min " + (whole % 60) + " s";
}
function tick() {
  const now = Date.now() / 1000;
  document.querySelectorAll("[data-since]").forEach((one) => { one.textContent = duration(now - Number(one.dataset.since)); });
  document.querySelectorAll("[data-left]").forEach((one) => {
    const left = Number(one.dataset.left) - now;
    one.textContent = left > 0 ? "about " + duration(left) + " left, judging by the last start" : "taking longer than the last start";
  });
  document.querySelectorAll("progress[data-ends]").forEach((one) => {
    const { began, ends } = one.dataset;
    one.value = Math.min(0.99, (now - began) / (ends - began));
  });
}

/* A form that is of no use before something is ticked. */
function allow(form) {
  form.querySelector("button").disabled = !form.querySelector("[name=" + form.dataset.needs + "]:checked");
}
htmx.onLoad((part) => part.parentElement?.querySelectorAll("form[data-needs]").forEach(allow));
document.addEventListener("change", (event) => {
  const form = event.target.closest("form[data-needs]");
  if (form) allow(form);
});
/* A browser that goes back ticks what was ticked, after everything else. */
window.addEventListener("pageshow", () => document.querySelectorAll("form[data-needs]").forEach(allow));

/* The first plan of a model knows how long its context may be, and what it would be without a choice. */
htmx.onLoad((part) => {
  const told = part.matches?.("[data-dial]") ? part : part.querySelector("[data-dial]");
  const range = document.getElementById("add-range"), number = document.getElementById("add-number");
  if (!told || !range || number.value) return;
  Object.assign(range, { min: told.dataset.step, max: told.dataset.most, step: told.dataset.step });
  range.value = number.value = told.dataset.value;
});

/* Numbers with units, as the server writes them. */
function shown(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit.startsWith("bytes")) {
    const names = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (Math.abs(value) >= 1024 && power < 4) { value /= 1024; power += 1; }
    return Number(value.toPrecision(3)) + " " + names[power] + unit.slice(5);
  }
  if (unit === "share") return Math.round(100 * value) + " %";
  if (unit === "s") return value < 1 ? Math.round(1000 * value) + " ms" : value.toFixed(1) + " s";
  const number = Math.abs(value) >= 100 ? Math.round(value) : Number(value.toPrecision(3));
  return number.toLocaleString("en") + (unit ? " " + unit : "");
}

/* Charts: the history once, then a row a second. */
const charts = { list: [], names: "", lastAt: 0, seconds: 900, loadedAt: 0 };
const finest = 900;  // seconds of which there is a row each; of longer ranges there is one for each minute

/* Six that are easy to tell apart, then as many others as it takes: no two lines of a chart have the same. */
function colour(index) {
  if (index < 6) return getComputedStyle(document.documentElement).getPropertyValue("--c" + index).trim();
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  return "hsl(" + Math.round((index * 137.508) % 360) + " 50% " + (isDark ? 68 : 38) + "%)";
}

/* A value between two gaps is no line, and would not be seen. */
function lonePoints(plot, series) {
  const values = plot.data[series];
  const isThere = (at) => values[at] !== null && values[at] !== undefined;
  return values.map((_, at) => at).filter((at) => isThere(at) && !isThere(at - 1) && !isThere(at + 1));
}

/* As much room as the longest label takes. */
function labelRoom(plot, labels, index, cycle) {
  const axis = plot.axes[index];
  if (cycle > 1) return axis._size;  // it was found in the first
  const longest = (labels ?? []).reduce((one, other) => (other.length > one.length ? other : one), "");
  plot.ctx.font = axis.font[0];
  return Math.ceil(axis.gap + axis.ticks.size + plot.ctx.measureText(longest).width / devicePixelRatio);
}

/* Below this nothing is to be told apart: without it, the axis of what stands still would say 0 at every line. */
const least = { "": 1, "tok/s": 1, "s": 0.01, "bytes": 1024, "bytes/s": 1024, "°C": 1, "W": 1 };

function makeChart(definition, history, place) {
  const section = document.createElement("section");
  section.className = "chart";
  const title = document.createElement("h3");
  title.textContent = definition.title;
  section.append(title);
  place.append(section);
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--faint").trim(), grid: { stroke: style.getPropertyValue("--rule").trim(), width: 1 }, ticks: { show: false } };
  const clock = (at) => new Date(1000 * at).toTimeString().slice(0, charts.seconds > finest ? 5 : 8);
  /* Bytes are counted in powers of two, and so are the lines behind them; of requests there are whole ones only. */
  const steps = definition.unit.startsWith("bytes") ? { incrs: Array.from({ length: 50 }, (_, power) => 2 ** power) }
    : definition.unit === "" ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] } : {};
  const top = definition.unit === "share" ? 1 : null;
  const options = {
    width: Math.max(240, section.clientWidth - 20), height: 170, cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (u, low, high) => [0, top || Math.max(high * 1.05, least[definition.unit])] } },
    legend: { markers: { width: 3 } },
    axes: [{ ...axis, space: 80, values: (u, ticks) => ticks.map(clock) }, { ...axis, ...steps, size: labelRoom, values: (u, ticks) => ticks.map((tick) => shown(tick, definition.unit)) }],
    series: [{ label: "at", value: (u, at) => (at === null ? "–" : clock(at)) }, ...definition.lines.map((line, index) => ({
      label: line.label, stroke: colour(index), width: 1.5, points: { show: true, size: 6, fill: colour(index), filter: lonePoints },
      value: (u, value) => shown(value, definition.unit),
    }))],
  };
  const data = [history.time.slice(), ...definition.lines.map((line) => (history.series[line.name] || history.time.map(() => null)).slice())];
  const plot = new uPlot(options, data, section);
  plot.setLegend({ idx: data[0].length - 1 }, false);
  return { definition, data, section, plot };
}

async function loadCharts() {
  const place = document.getElementById("charts");
  if (!place) return;
  const seconds = charts.seconds = Number(document.getElementById("range").value);
  const definitions = await (await fetch("/api/charts?seconds=" + seconds)).json();
  const names = definitions.flatMap((chart) => chart.lines.map((line) => line.name));
  const isLive = seconds <= finest;
  if (isLive && names.join() === charts.names) return;
  const query = new URLSearchParams({ charts: true, by: isLive ? "second" : "minute", after: Date.now() / 1000 - seconds });
  const answer = await fetch("/api/history?" + query);
  if (!answer.ok) return;
  const history = await answer.json();
  if (seconds !== charts.seconds) return;  // another range was chosen meanwhile
  charts.names = names.join();
  charts.loadedAt = Date.now();
  charts.lastAt = history.time[history.time.length - 1] || 0;
  charts.list.forEach((one) => { one.plot.destroy(); one.section.remove(); });
  charts.list = definitions.map((definition) => makeChart(definition, history, place));
  if (!definitions.length) place.textContent = isLive ? "" : "No measurements in this range yet.";
}

function addSample(sample) {
  if (charts.seconds > finest) {
    if (Date.now() - charts.loadedAt > 60000) loadCharts();
    return;
  }
  if (sample.at <= charts.lastAt) return;
  charts.lastAt = sample.at;
  charts.list.forEach((one) => {
    one.data[0].push(sample.at);
    one.definition.lines.forEach((line, index) => one.data[index + 1].push(sample.values[line.name] ?? null));
    while (one.data[0][0] < sample.at - charts.seconds) one.data.forEach((column) => column.shift());
    one.plot.setData(one.data);
    if (one.plot.cursor.idx === null || one.plot.cursor.left < 0) one.plot.setLegend({ idx: one.data[0].length - 1 }, false);
  });
  const known = new Set(charts.names.split(","));
  const isNew = Object.keys(sample.values).some((name) => name.startsWith("engine.") && name.endsWith("requests_running") && !known.has(name));
  if (isNew) loadCharts();
}

let sampledAt = 0;
function showAge() {
  const age = document.getElementById("age");
  if (!age || !sampledAt) return;
  const seconds = (Date.now() - sampledAt) / 1000;
  const isStale = seconds > 4;
  document.getElementById("live").classList.toggle("stale", isStale);
  age.classList.toggle("banner", isStale);
  age.textContent = isStale ? "Stale: the last numbers are " + Math.round(seconds) + " s old" : "live";
}

document.addEventListener("htmx:sseBeforeMessage", (event) => {
  const { type, data } = event.detail;
  if (type === "sample") {
    event.preventDefault();
    sampledAt = Date.now();
    addSample(JSON.parse(data));
    showAge();
  } else if (type === "lines") {
    event.preventDefault();
    const log = event.target.closest("[data-log]") || document.querySelector("[data-log]");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    log.append(data + "\n");
    while (log.childNodes.length > 2000) log.firstChild.remove();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
});
/* What is shown may not be so any more. */
document.addEventListener("htmx:sseError", (event) => event.target.classList.add("stale"));
/* After a break the first lines come again. */
document.addEventListener("htmx:sseOpen", (event) => {
  event.target.classList.remove("stale");
  const log = event.target.querySelector("[data-log]");
  if (log) log.textContent = "";
});

/* The slider and its number are one; the number is what is planned and saved. */
document.addEventListener("input", (event) => {
  const { number, range } = event.target.dataset;
  if (number) document.getElementById(number).value = event.target.value;
  if (range && event.target.value) {
    /* Any length may be typed; the slider has steps. */
    const slider = document.getElementById(range);
    slider.step = 1;
    slider.min = 1;
    slider.value = event.target.value;
  }
});

document.addEventListener("DOMContentLoaded", () => {
  loadCharts();
  document.getElementById("range")?.addEventListener("change", () => { charts.names = ""; loadCharts(); });
  setInterval(() => { showAge(); tick(); }, 1000);
  let resizing = null;
  window.addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => charts.list.forEach((one) => one.plot.setSize({ width: Math.max(240, one.section.clientWidth - 20), height: 170 })), 100);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { charts.names = ""; loadCharts(); });
});
