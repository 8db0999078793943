// Asks for the status once a second and shows it. The status has the shape of `midstream status --json`.

import { Actions } from "./actions.js";
import { h, renew, s } from "./dom.js";
import { EventTime, findings, Recovery } from "./findings.js";
import { bar, drawEdges, drawGraph, inputsTable, shares } from "./graph.js";
import { FailureLogs } from "./logs.js";
import { LiveRows } from "./rows.js";
import { clock, count, lagSeconds, NOTHING, rate, share, short, size, span, watermark } from "./text.js";

const PHASES = { transit: "barriers in transit", aligning: "alignment", capturing: "snapshot", storing: "writing state", metadata: "writing metadata", committing: "committing output" };
const MARKS = { bad: "✖", warn: "▲", info: "●", good: "✔" };
const EVERY_MS = 1000;
const RATE_MS = 3000;
const KEPT_MS = 60 * 60_000;
const DENSE_MS = 5 * 60_000; // older points are as far apart as those that the driver keeps
const SPARSE_MS = 10_000;
const GAP_MS = 15_000;
const SHOWN = 50; // of subtasks and of slots: a browser that lays out thousands of lines each second stutters
const byId = (id) => document.getElementById(id);

// Rows per second, from successive statuses: means over about three seconds, as on the command line.
class Rates {
  constructor() {
    this.samples = [];
    this.moved = new Map();
  }

  add(status) {
    const rows = new Map();
    for (const vertex of status.vertices) for (const each of vertex.operators) rows.set(each.uid, { in: each.rows_in, out: each.rows_out });
    if (this.samples.length && this.samples[this.samples.length - 1].atMs >= status.now_ms) return;
    this.samples.push({ atMs: status.now_ms, rows, flows: status.flows });
    for (const [uid, counts] of rows) {
      for (const way of ["in", "out"]) {
        const key = `${way} ${uid}`;
        if (this.moved.get(key)?.count !== counts[way]) this.moved.set(key, { count: counts[way], atMs: status.now_ms });
      }
    }
    while (this.samples.length > 2 && this.samples[1].atMs <= status.now_ms - RATE_MS) this.samples.shift();
  }

  of(uid, way) {
    if (this.samples.length < 2) return null;
    const [first, last] = [this.samples[0], this.samples[this.samples.length - 1]];
    const passed = (last.rows.get(uid)?.[way] ?? 0) - (first.rows.get(uid)?.[way] ?? 0);
    return (Math.max(0, passed) * 1000) / (last.atMs - first.atMs);
  }

  // For how long no row has passed, as far as this page has seen: of what comes in bursts a rate of 0 says nothing.
  quietSeconds(uid, way) {
    const [moved, now] = [this.moved.get(`${way} ${uid}`), this.samples[this.samples.length - 1]];
    return moved === undefined ? 0 : (now.atMs - moved.atMs) / 1e3;
  }

  // Of an edge, by its place among the edges: rows and bytes per second, and rows per batch; null where that is not known.
  ofEdge(at) {
    const [first, last] = [this.samples[0], this.samples[this.samples.length - 1]];
    const [before, now] = [first?.flows[at], last?.flows[at]];
    if (this.samples.length < 2 || before === undefined || now === undefined) return { rows: null, bytes: null, perBatch: null };
    const perSecond = (key) => (Math.max(0, now[key] - before[key]) * 1000) / (last.atMs - first.atMs);
    const batches = now.batches - before.batches;
    return { rows: perSecond("rows"), bytes: perSecond("bytes"), perBatch: batches > 0 ? Math.max(0, now.rows - before.rows) / batches : null };
  }
}

class History {
  constructor() {
    this.points = new Map();
  }

  add(name, atMs, value) {
    if (value === null) return;
    const points = this.points.get(name) ?? [];
    points.push([atMs, value]);
    const from = points.findIndex(([at]) => at >= atMs - KEPT_MS);
    const sparse = [];
    for (const point of points.slice(from)) {
      const before = sparse[sparse.length - 1];
      if (before === undefined || point[0] >= atMs - DENSE_MS || point[0] - before[0] >= SPARSE_MS) sparse.push(point);
    }
    this.points.set(name, sparse);
  }

  // What the driver has kept, followed by what this tab has seen since then.
  seed({ at_ms, rows_read_per_s, rows_written_per_s, event_time_lag_s }) {
    for (const [name, values] of [["read", rows_read_per_s], ["written", rows_written_per_s], ["lag", event_time_lag_s]]) {
      const kept = at_ms.map((at, i) => [at, values[i]]).filter(([, value]) => value !== null);
      const last = kept.length ? kept[kept.length - 1][0] : 0;
      this.points.set(name, [...kept, ...(this.points.get(name) ?? []).filter(([at]) => at > last)]);
    }
  }

  line(name, label, figure) {
    return line(this.points.get(name) ?? [], label, figure);
  }
}

// `figure` writes the largest value, which is as high as the line is.
function line(points, label, figure) {
  if (points.length < 3) return null;
  const [from, to] = [points[0][0], points[points.length - 1][0]];
  const most = Math.max(...points.map(([, value]) => value)) || 1;
  const path = points.map(([at, value]) => `${(((at - from) / Math.max(1, to - from)) * 100).toFixed(1)},${(23 - (22 * value) / most).toFixed(1)}`).join(" ");
  return [
    s("svg", { class: "line", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label }, s("polyline", { points: path })),
    h("p", { class: "scale" }, `at most ${figure(most)} in ${span((to - from) / 1e3)}`),
  ];
}

let token = null;
let opened = null;
let rates, past, eventTime, recovery, last, lastAnswerMs, job;
const actions = new Actions(takeToken(), { bar: byId("actions"), answers: byId("answers"), dialog: byId("dialog") });

const liveRows = new LiveRows(token, byId("rows-section"), byId("rows"));
const failureLogs = new FailureLogs(token, () => drawFailures(last));

// From the link, once; then it stays with this tab and is not in the address any more.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  const key = `midstream ${location.pathname}`;
  if (given) {
    sessionStorage.setItem(key, given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  token = given ?? sessionStorage.getItem(key);
  return token;
}

function begin(jobId) {
  job = jobId;
  rates = new Rates();
  past = new History();
  eventTime = new EventTime();
  recovery = new Recovery();
}

function ask(path) {
  return fetch(path, { headers: token === null ? {} : { Authorization: `Bearer ${token}` }, signal: AbortSignal.timeout(10_000) });
}

async function look() {
  if (document.hidden && last !== undefined) return;
  try {
    const wasAway = lastAnswerMs === undefined || Date.now() - lastAnswerMs > GAP_MS;
    const response = await ask("status.json");
    if (!response.ok) {
      notice(`The job's driver reports: ${(await response.text()).trim()}`);
      return;
    }
    const status = await response.json();
    lastAnswerMs = Date.now();
    notice("");
    if (status.job_id !== job) begin(status.job_id);
    if (wasAway) {
      const kept = await ask("rates.json");
      if (kept.ok) past.seed(await kept.json());
    }
    rates.add(status);
    eventTime.add(status);
    recovery.add(status);
    last = status;
    draw(status);
    await actions.look();
  } catch (error) {
    if (lastAnswerMs === undefined) notice("The job's driver does not answer.");
    else if (ended(last)) notice(`The job has ended: it ${last.state === "failed" ? "has failed" : `is ${last.state}`}. What is shown is how it ended.`);
    else if (Date.now() - lastAnswerMs > 3000) {
      notice(`No answer since ${clock(lastAnswerMs)}: the job's driver has ended, or cannot be reached. What is shown is of then.`);
      actions.gone();
    }
    if (!(error instanceof TypeError) && error.name !== "TimeoutError" && error.name !== "AbortError") throw error;
  }
}

async function run() {
  try {
    await look();
  } finally {
    if (last === undefined || !ended(last) || document.hidden) setTimeout(run, EVERY_MS);
    else setTimeout(run, 3 * EVERY_MS);
  }
}

function ended(status) {
  return ["finished", "stopped", "failed", "lost"].includes(status.state);
}

function notice(text) {
  renew(byId("notice"), text ? h("p", null, text) : []);
}

function namesOf(status) {
  const operators = status.vertices.flatMap((vertex) => vertex.operators);
  const times = new Map();
  for (const each of operators) times.set(each.name, (times.get(each.name) ?? 0) + 1);
  return new Map(operators.map((each) => [each.uid, times.get(each.name) === 1 ? each.name : each.uid.startsWith(each.name) ? each.uid : `${each.name} (${each.uid})`]));
}

function draw(status) {
  const names = namesOf(status);
  const found = findings(status, eventTime, recovery);
  const worst = ["bad", "warn"].find((each) => found.some(({ kind }) => kind === each));
  document.title = `${worst ? `${MARKS[worst]} ` : ""}${status.name}: ${status.state}`;
  renew(byId("title"), h("h1", null, h("bdi", null, status.name)), h("span", { class: `state ${status.state}` }, status.state),
    h("span", { class: "small" }, `${span(Math.max(0, (status.now_ms - status.started_ms) / 1e3))}, ${status.slots} of ${status.slots_needed} slots, id ${status.job_id}`));
  actions.draw(status);
  renew(byId("findings"), h("ul", null, found.map(({ kind, words }) => h("li", { class: kind }, h("span", { class: "mark", role: "img", "aria-label": { bad: "problem", warn: "warning", info: "note", good: "fine" }[kind] }, MARKS[kind]), h("span", null, words)))));
  drawFigures(status);
  drawGraph(byId("graph"), status, names, rates);
  drawSubtasks(status);
  drawCheckpoints(status);
  drawFailures(status);
  drawSlots(status);
}

function drawFigures(status) {
  const fed = new Set(status.edges.map(([, target]) => target));
  const followed = new Set(status.edges.map(([source]) => source));
  const sources = status.vertices.filter((vertex) => !fed.has(vertex.id)).map((vertex) => vertex.operators[0]).filter(Boolean);
  const sinks = status.vertices.filter((vertex) => !followed.has(vertex.id)).map((vertex) => vertex.operators[vertex.operators.length - 1]).filter(Boolean);
  const total = (operators, way) => {
    const all = operators.map((each) => rates.of(each.uid, way));
    return all.some((each) => each === null) || !all.length ? null : all.reduce((sum, each) => sum + each, 0);
  };
  const [read, written] = [total(sources, "out"), total(sinks, "in")];
  const lags = status.vertices.map((vertex) => lagSeconds(vertex.watermark_us, status.now_ms)).filter((lag) => lag !== null);
  const lag = lags.length ? Math.max(...lags) : null;
  past.add("read", status.now_ms, read);
  past.add("written", status.now_ms, written);
  past.add("lag", status.now_ms, lag);
  const good = status.last_checkpoint;
  const tile = (name, value, below, line) => h("div", { class: "tile" }, h("h3", null, name), h("p", { class: "value" }, value), h("p", { class: "small" }, below), line);
  renew(byId("figures"),
    tile("Rows read", rate(read), `${count(sources.reduce((sum, each) => sum + each.rows_out, 0))} in total`, past.line("read", "rows read per second in the last hour", rate)),
    tile("Rows into sinks", rate(written), `${count(sinks.reduce((sum, each) => sum + each.rows_in, 0))} in total`, past.line("written", "rows into sinks per second in the last hour", rate)),
    tile("Event-time lag", lag === null ? NOTHING : span(lag), lag === null ? "event times are far in the past" : "of the task with the largest lag", past.line("lag", "lag in the last hour", span)),
    tile("Last checkpoint", status.checkpoint_dir === null ? NOTHING : good === null ? "none yet" : `${span(Math.max(0, (status.now_ms - good.created_ms - good.duration_ms - good.metadata_ms) / 1e3))} ago`,
      status.checkpoint_dir === null ? "the job has no checkpoint directory" : `${count(status.checkpoints_completed)} completed, ${count(status.checkpoints_failed)} failed`),
    stateTile(status, tile),
    tile("Restarts", count(status.restarts), status.restored_from === null ? "started without a checkpoint" : ["started from ", h("bdi", null, status.restored_from)]));
}

function stateTile(status, tile) {
  const growth = status.state_growth;
  const operators = status.vertices.flatMap((vertex) => vertex.operators);
  const newest = growth.length ? growth[growth.length - 1].bytes : null;
  const largest = operators.reduce((most, each) => (each.state_bytes > (most?.state_bytes ?? 0) ? each : most), null);
  const rows = operators.reduce((sum, each) => sum + each.state_rows, 0);
  return tile("State", newest === null ? NOTHING : size(newest),
    newest === null ? "known from the first checkpoint on" : largest === null ? "none in the newest checkpoint" : [`${count(rows)} rows; most in `, h("bdi", null, largest.name)],
    line(growth.map((each) => [each.at_ms, each.bytes]), "state since the job began", size));
}

function drawSubtasks(status) {
  const vertex = status.vertices.find((each) => each.id === opened);
  byId("detail-section").hidden = vertex === undefined;
  if (vertex === undefined) return;
  byId("h-detail").textContent = `Subtasks of ${vertex.name}`;
  const rows = vertex.subtasks.reduce((sum, each) => sum + each.rows_in, 0) || vertex.subtasks.reduce((sum, each) => sum + each.rows_out, 0);
  const sorted = [...vertex.subtasks].sort((a, b) => b.busy - a.busy || a.subtask - b.subtask);
  renew(byId("detail"),
    h("p", { class: "small" }, `${vertex.subtasks.length} of ${vertex.parallelism} have reported; the busiest first${sorted.length > SHOWN ? `, ${SHOWN} of them` : ""}. Rows are counted since the last start of the tasks. `, h("button", { type: "button", class: "plain", "data-close": true }, "Close")),
    inputsTable(status, vertex, rates),
    h("div", { class: "scroll" }, h("table", { class: "wide" },
      h("thead", null, h("tr", null, ["subtask", "shares of time", "busy", "backpressured", "rows in", "rows out", "share of the rows", "watermark"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, sorted.slice(0, SHOWN).map((each) => h("tr", { class: status.bottleneck?.vertex === vertex.id && status.bottleneck.subtask === each.subtask ? "slow" : null },
        h("th", { scope: "row" }, each.subtask), h("td", null, shares(each.busy, each.backpressured)[0]), h("td", { class: "n" }, share(each.busy)), h("td", { class: "n" }, share(each.backpressured)),
        h("td", { class: "n" }, count(each.rows_in)), h("td", { class: "n" }, count(each.rows_out)), h("td", { class: "n" }, rows ? share((each.rows_in || each.rows_out) / rows) : NOTHING), h("td", null, watermark(each.watermark_us))))))));
}

function drawCheckpoints(status) {
  if (status.checkpoint_dir === null) {
    renew(byId("checkpoints"), h("p", { class: "dim" }, "The job has no checkpoint directory: after a failure it starts over from the beginning."));
    return;
  }
  if (!status.checkpoints.length) {
    renew(byId("checkpoints"), h("p", { class: "dim" }, "None yet. They go to ", h("bdi", null, status.checkpoint_dir), "."));
    return;
  }
  const whole = (one) => one.duration_ms + one.metadata_ms + (one.commit_ms ?? 0);
  const longest = Math.max(1, ...status.checkpoints.map(whole));
  const parts = (one) => (one.state === "failed" ? [[one.duration_ms / longest, "failed"]] : phases(one).map(([kind, ms]) => [ms / longest, kind]));
  renew(byId("checkpoints"),
    h("p", { class: "legend small" }, [...Object.entries(PHASES), ["failed", "failed"]].map(([kind, text]) => h("span", null, s("svg", { class: "key", viewBox: "0 0 8 8", "aria-hidden": "true" }, s("rect", { width: 8, height: 8, class: kind })), text))),
    h("div", { class: "scroll" }, h("table", { class: "wide" },
      h("thead", null, h("tr", null, ["", "at", "time taken", "", "stored", "in flight", "slowest subtask, or error"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, status.checkpoints.map((one) => h("tr", { "data-key": `c${one.id}`, class: one.state },
        h("th", { scope: "row" }, `${one.is_savepoint ? "savepoint " : ""}${one.id}`), h("td", null, clock(one.created_ms)),
        h("td", { title: took(one) }, bar(parts(one), took(one))),
        h("td", { class: "n" }, span((one.duration_ms + one.metadata_ms) / 1e3)), h("td", { class: "n" }, one.state === "failed" ? "" : size(one.state_bytes)), h("td", { class: "n" }, one.in_flight_bytes ? size(one.in_flight_bytes) : ""),
        h("td", { class: "words" }, one.state === "failed" ? h("span", { class: "bad-text" }, `failed: ${one.reason}`) : one.state === "in_progress" ? `in progress: ${one.tasks_done} of ${one.tasks} subtasks${one.last ? `; not yet ${one.last}` : "; the metadata is being written"}` : one.last)))))),
    h("p", { class: "small" }, "In ", h("bdi", null, status.checkpoint_dir)));
}

function drawFailures(status) {
  if (!status.failures.length) {
    renew(byId("failures"), h("p", { class: "dim" }, "None since the program started."));
    return;
  }
  renew(byId("failures"), h("p", { class: "small" }, `${status.restarts} restart${status.restarts === 1 ? "" : "s"}. Newest first, across restarts and rescales.`),
    alike(status.failures).map(([failure, ...before]) => h("article", { class: "failure", "data-key": `f${kindOf(failure)}` },
      h("p", null, h("span", { class: "small" }, `${clock(failure.at_ms)}, ${span(Math.max(0, (status.now_ms - failure.at_ms) / 1e3))} ago, attempt ${failure.attempt}${before.length ? `; ${before.length + 1} alike, the first at ${clock(before[before.length - 1].at_ms)}` : ""} `), h("span", { class: "bad-text summary" }, failure.summary)),
      failure.own_lines ? h("pre", { tabindex: 0 }, failure.own_lines) : null,
      failure.details && failure.details.trim() !== failure.own_lines.trim() ? h("details", null, h("summary", null, "Full traceback"), h("pre", { tabindex: 0 }, failure.details)) : null,
      before.length ? h("details", null, h("summary", null, "Those before it"), h("ul", null, before.map((each) => h("li", null, `${clock(each.at_ms)}, attempt ${each.attempt}: ${each.summary}`)))) : null,
      failureLogs.of(failure))));
}

// Failures whose summaries differ in numbers only (subtasks, processes, values) are one entry, which shows the newest.
function alike(failures) {
  const groups = new Map();
  for (const failure of failures) groups.set(kindOf(failure), [...(groups.get(kindOf(failure)) ?? []), failure]);
  return [...groups.values()];
}

function kindOf(failure) {
  return failure.summary.replace(/\d+/g, "0");
}

// First the phases of the subtask that acknowledged it last, then those of the driver.
function phases(one) {
  const { barrier_ms, alignment_ms, snapshot_ms, storing_ms } = one.phases ?? { barrier_ms: one.duration_ms, alignment_ms: 0, snapshot_ms: 0, storing_ms: 0 };
  return [["transit", barrier_ms], ["aligning", alignment_ms], ["capturing", snapshot_ms], ["storing", storing_ms], ["metadata", one.metadata_ms], ["committing", one.commit_ms ?? 0]];
}

function took(one) {
  return phases(one).filter(([, ms]) => ms >= 0.5).map(([kind, ms]) => `${PHASES[kind]} ${span(ms / 1e3)}`).join(", ") || "less than 1 ms";
}

function drawSlots(status) {
  if (!status.slots) {
    renew(byId("slots"), h("p", { class: "dim" }, "None is connected."));
    return;
  }
  const memory = (at) => status.slot_memory_bytes[at] ?? 0;
  const apart = new Set(status.slot_hosts).size > 1;
  const disk = (at) => status.slot_state_disk_bytes[at] ?? 0;
  const spills = status.slot_state_disk_bytes.some((bytes) => bytes > 0);
  status.slot_pids.forEach((pid, at) => past.add(`slot ${pid}`, status.now_ms, memory(at) || null));
  const all = status.slot_pids.map((pid, at) => at);
  const shown = all.length > SHOWN ? all.sort((a, b) => memory(b) - memory(a) || a - b).slice(0, SHOWN) : all;
  renew(byId("slots"),
    h("p", { class: "small" }, "Slots on one machine, or in one container, share its limit.", status.tls === "off" ? null : " Connections between them are encrypted by TLS."),
    shown.length < status.slot_pids.length ? h("p", { class: "small" }, `The ${SHOWN} of ${status.slot_pids.length} with the most memory.`) : null,
    h("div", { class: "scroll" }, h("table", { class: "wide fit" },
      h("thead", null, h("tr", null, ["slot", "process", "memory", "limit", ...(spills ? ["state on disk"] : []), "while the page was open"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, shown.map((at) => h("tr", { "data-key": `p${status.slot_pids[at]} ${at}` }, h("th", { scope: "row" }, at), h("td", null, apart ? `${status.slot_pids[at]} on ${status.slot_hosts[at]}` : status.slot_pids[at]), h("td", { class: "n" }, memory(at) ? size(memory(at)) : NOTHING), h("td", { class: "n" }, status.slot_memory_limit_bytes[at] ? size(status.slot_memory_limit_bytes[at]) : NOTHING), spills ? h("td", { class: "n" }, disk(at) ? size(disk(at)) : NOTHING) : null, h("td", null, past.line(`slot ${status.slot_pids[at]}`, "memory since the page was opened", size))))))));
}

document.addEventListener("click", (event) => {
  const { open, close, rows, name, rowsClose, logs } = event.target.dataset ?? {};
  if (logs !== undefined) failureLogs.look(logs);
  if (rows !== undefined) {
    liveRows.look(rows, name);
    byId("rows-section").scrollIntoView({ block: "nearest" });
  }
  if (rowsClose !== undefined) liveRows.close();
  if (open === undefined && close === undefined) return;
  opened = close === undefined && opened !== Number(open) ? Number(open) : null;
  drawSubtasks(last);
  if (opened !== null) byId("detail-section").scrollIntoView({ block: "nearest" });
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});
new ResizeObserver(() => last && drawEdges(byId("graph"), last, rates)).observe(byId("graph"));
run();
