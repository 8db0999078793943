// What stands out, in sentences: the first thing that a reader sees.

import { clock, count, hasWatermark, lagSeconds, share, size, span } from "./text.js";

const STILL_S = 20;
const HELD = 0.5;
const OVERDUE_MS = 30_000;
const FAR_S = 300;
const RECOVERY_MS = 5_000;
const UNEVEN = 1.25;
const WITHOUT_PAUSE = 0.8;
const LONG_MS = 2_000;
const GROWING_S = 60;
const GROWING_BYTES = 2 ** 20;

// Remembers, for as long as the page is open, since when each task's watermark has stood still while rows came.
export class EventTime {
  constructor() {
    this.marks = new Map();
  }

  add(status) {
    for (const vertex of status.vertices) {
      const rows = vertex.operators.reduce((sum, each) => sum + each.rows_in + each.rows_out, 0);
      const known = this.marks.get(vertex.id);
      if (known === undefined || known.watermark !== vertex.watermark_us) {
        this.marks.set(vertex.id, { watermark: vertex.watermark_us, sinceMs: status.now_ms, rows });
      } else {
        known.moved = rows > known.rows;
      }
    }
  }

  stillSeconds(vertex, nowMs) {
    const known = this.marks.get(vertex.id);
    return known !== undefined && known.moved ? (nowMs - known.sinceMs) / 1e3 : 0;
  }
}

// How fast what was in flight at the checkpoint is taken up, over about five seconds.
export class Recovery {
  constructor() {
    this.samples = [];
  }

  add(status) {
    const whole = sum(status.vertices, (vertex) => sum(vertex.recovering, (each) => each.to_recover_bytes));
    const done = sum(status.vertices, (vertex) => sum(vertex.recovering, (each) => each.recovered_bytes));
    const last = this.samples[this.samples.length - 1];
    if (!whole || (last !== undefined && (last.attempt !== status.attempt || last.whole !== whole || last.done > done))) this.samples = [];
    if (whole) this.samples.push({ attempt: status.attempt, atMs: status.now_ms, whole, done });
    while (this.samples.length > 2 && this.samples[1].atMs <= status.now_ms - RECOVERY_MS) this.samples.shift();
  }

  // In bytes per second; null where that is not known yet.
  rate() {
    const [first, last] = [this.samples[0], this.samples[this.samples.length - 1]];
    return this.samples.length > 1 && last.atMs > first.atMs ? ((last.done - first.done) * 1e3) / (last.atMs - first.atMs) : null;
  }

  sentence() {
    const last = this.samples[this.samples.length - 1];
    if (last === undefined) return "";
    const rate = this.rate();
    const left = rate === null ? "" : rate > 0 ? `, ${size(rate)} a second, about ${span((last.whole - last.done) / rate)} left` : `, nothing in the last ${span((last.atMs - this.samples[0].atMs) / 1e3)}`;
    return `Recovering: ${size(last.done)} of the ${size(last.whole)} that were in flight have been recovered (${share(last.done / last.whole)})${left}.`;
  }
}

export function findings(status, eventTime, recovery) {
  const found = [];
  const say = (kind, ...words) => found.push({ kind, words });
  const newest = status.checkpoints[0];

  if (status.state === "failed") say("bad", "The job has failed", status.failures.length ? `: ${firstLine(status.failures[0].summary)}` : "", ".");
  else if (status.state === "lost") say("bad", "The job's driver is gone", ` and has not reported how the job ended: it was killed, or its machine went down. Last known at ${clock(status.now_ms)}.`);
  else if (status.state === "finished") say("good", "The job has finished: all rows are processed and committed.");
  else if (status.state === "stopped") say("good", "The job has stopped at a checkpoint.");
  else if (status.state !== "running") say("info", `The job is ${status.state}${status.failures.length && status.state === "restarting" ? `, after: ${firstLine(status.failures[0].summary)}` : ""}.`);

  const recent = status.failures.filter((failure) => status.now_ms - failure.at_ms < 10 * 60_000);
  if (status.state !== "failed" && recent.length > 1) say("bad", `It has failed ${recent.length} times within 10 minutes; the last time at ${clock(recent[0].at_ms)}: ${firstLine(recent[0].summary)}`);
  else if (status.state === "running" && recent.length === 1) say("warn", `It failed at ${clock(recent[0].at_ms)} and runs again: ${firstLine(recent[0].summary)}`);

  const good = status.last_checkpoint;
  if (recent.length > 1 && good !== null && good.created_ms < recent[recent.length - 1].at_ms) {
    say("bad", `No checkpoint has completed since then: each restart begins at checkpoint ${good.id}, from ${span((status.now_ms - good.created_ms) / 1e3)} ago, and reads everything after it again.`);
  }

  for (const wait of status.waiting) {
    const limit = wait.limit_ms === null ? "" : ` (given up after ${span(wait.limit_ms / 1e3)})`;
    say("warn", wait.is_call ? `${wait.what} has been in one call for ${span(wait.for_ms / 1e3)}.` : `Waiting for ${wait.what}, ${span(wait.for_ms / 1e3)} so far${limit}.`);
  }

  if (recovery.sentence()) say("info", recovery.sentence());

  // Before the bottleneck: operators may be busy, but this is why there are no results.
  if (status.state === "running") farBehind(status, standingStill(status, eventTime, say), say);
  bottleneck(status, say);
  autoscale(status, say);

  const failedLast = status.checkpoints.find((one) => one.state !== "in_progress");
  if (failedLast?.state === "failed") {
    const row = status.checkpoints.filter((one) => one.state !== "in_progress").findIndex((one) => one.state !== "failed");
    const times = row < 0 ? status.checkpoints.filter((one) => one.state === "failed").length : row;
    say("bad", times > 1 ? `The last ${times} checkpoints have failed` : "The last checkpoint has failed", `: ${failedLast.reason}`);
  }
  if (newest?.state === "in_progress" && newest.duration_ms > OVERDUE_MS) {
    say("warn", `Checkpoint ${newest.id} has been in progress for ${span(newest.duration_ms / 1e3)}: ${newest.tasks_done} of ${newest.tasks} subtasks have acknowledged it`, newest.last ? `, not yet ${newest.last}` : "", ".");
  }

  checkpointsWithoutPause(status, say);
  growingState(status, say);
  littleMemory(status, say);
  for (const warning of status.warnings.slice(-5)) say("warn", warning);
  if (!found.length) say("good", "Nothing: no operator holds up the others, nothing is waited for, nothing has failed.");
  return found;
}

function autoscale(status, say) {
  const scale = status.autoscale;
  if (scale === null || status.state !== "running") return;
  if (scale.is_advice) {
    if (scale.desired !== scale.parallelism) say("info", `Parallelism ${scale.desired} would be better than ${scale.parallelism}: ${scale.reason}.`);
    return;
  }
  const last = scale.changes.length ? ` It was ${scale.changes[0].before} until ${clock(scale.changes[0].at_ms)}: ${scale.changes[0].reason}.` : "";
  say("info", `Parallelism ${scale.parallelism}, of ${scale.min} to ${scale.max}: ${scale.reason}.${last}`);
}

function bottleneck(status, say) {
  const slow = status.bottleneck;
  if (slow === null) {
    const held = status.state === "running" ? status.vertices.filter((each) => each.backpressured >= HELD) : [];
    for (const each of held) say("warn", `${named(each.name)} is backpressured ${share(each.backpressured)} of the time, and no operator downstream is busy enough to explain it.`);
    return;
  }
  const vertex = status.vertices.find((each) => each.id === slow.vertex);
  const fed = status.edges.some(([, target]) => target === slow.vertex);
  const waits = fed ? "and the operators before it wait for it" : "and the operators after it have time to spare";
  const operator = slow.operator ? ` ${named(slow.operator)} takes ${share(slow.work)} of that time.` : "";
  const factor = slow.factor === null ? "" : `; to keep up with its input it would have to be about ${slow.factor < 10 ? slow.factor.toFixed(1) : Math.round(slow.factor)} times as fast`;
  const slot = slow.busy < 0.7 && slow.slot_busy >= 0.8 ? ` (and its slot, which also runs other tasks, ${share(slow.slot_busy)})` : "";
  const who = vertex.parallelism > 1 ? "Its busiest subtask" : "It";
  say("bad", `Bottleneck: ${named(slow.name)}. ${who} is busy ${share(slow.busy)} of the time${slot}, ${waits}${factor}.${operator}`);
  if (slow.subtask !== null) {
    const busiest = vertex.subtasks.find((each) => each.subtask === slow.subtask);
    const others = (vertex.busy * vertex.parallelism - busiest.busy) / (vertex.parallelism - 1);
    const rows = sum(vertex.subtasks, (each) => each.rows_in);
    const part = rows ? busiest.rows_in / rows : 0;
    const why = part > UNEVEN / vertex.parallelism ? "many have the same key" : "no more than its share, so its rows need more work, or its machine is slower or busier";
    const taken = rows ? ` It has taken ${share(part)} of the rows: ${why}.` : "";
    say("bad", `Only subtask ${slow.subtask} of ${named(slow.name)} is that busy; ${vertex.parallelism === 2 ? "the other one is" : `the other ${vertex.parallelism - 1} are on average`} ${share(others)} busy.${taken}`);
  }
  if (slow.multiplier) say("warn", `${named(slow.multiplier)} emits ${slow.multiplied.toFixed(1)} rows for each row that it receives: that causes much of the work of the operators after it.`);
}

function waitsFor(status, held) {
  const subtask = status.vertices.find((each) => each.id === held.vertex).parallelism > 1 ? `, subtask ${held.subtask}` : "";
  const split = held.split ? `, split ${held.split}` : "";
  const how = held.watermark_us !== null ? `${span(held.behind_us / 1e6)} behind the most advanced input, subtask or split` : held.split ? "none of its rows has arrived" : "none of its watermarks has arrived";
  return `${named(held.name)}${subtask}${split}: ${how}`;
}

const REMEDY = "If no rows come there, set idle_after in its watermark strategy; if they do, their event times do not advance.";

const heldKey = (held) => JSON.stringify([held.vertex, held.subtask, held.split]);

// Each cause is reported once: at the first task after it, or where it is if there is none.
function farBehind(status, said, say) {
  const fed = new Set(status.edges.map(([, target]) => target));
  const order = [...status.vertices].sort((a, b) => fed.has(b.id) - fed.has(a.id) || a.id - b.id);
  for (const vertex of order) {
    const held = vertex.held_back;
    if (held === null || held.watermark_us === null || held.behind_us < FAR_S * 1e6 || said.has(heldKey(held))) continue;
    said.add(heldKey(held));
    say("bad", `Event time of ${named(vertex.name)} is held back by ${waitsFor(status, held)}. Windows and timers wait for it, and the rows of the other inputs stay in state until then. ${REMEDY}`);
  }
}

// Only the first tasks are reported: those after them stand still for the same reason. Returns the causes that were reported.
function standingStill(status, eventTime, say) {
  const said = new Set();
  const still = new Set(status.vertices.filter((vertex) => (hasWatermark(vertex.watermark_us) || vertex.held_back?.watermark_us === null) && eventTime.stillSeconds(vertex, status.now_ms) > STILL_S).map((vertex) => vertex.id));
  for (const vertex of status.vertices) {
    if (!still.has(vertex.id) || status.edges.some(([source, target]) => target === vertex.id && still.has(source))) continue;
    const marks = vertex.subtasks.filter((each) => each.watermark_us !== null).sort((a, b) => a.watermark_us - b.watermark_us);
    const held = vertex.held_back;
    if (held !== null) said.add(heldKey(held));
    const holds = held !== null ? `; it is held back by ${waitsFor(status, held)}` : marks.length > 1 && marks[0].watermark_us < marks[marks.length - 1].watermark_us ? `; subtask ${marks[0].subtask} holds it back` : "";
    const lag = lagSeconds(vertex.watermark_us, status.now_ms);
    say("bad", `Event time stands still at ${named(vertex.name)}, for ${span(eventTime.stillSeconds(vertex, status.now_ms))} at least, although rows arrive${lag === null ? "" : ` (${span(lag)} behind)`}${holds}. No window after it has a result until it moves. ${held === null ? "" : REMEDY}`.trim());
  }
  return said;
}

function checkpointsWithoutPause(status, say) {
  const last = status.checkpoints.filter((one) => one.state === "completed").slice(0, 5);
  if (status.state !== "running" || last.length < 5) return;
  const [newest, oldest] = [last[0], last[last.length - 1]];
  const taken = sum(last, (one) => one.duration_ms);
  if (taken < LONG_MS * last.length || taken < WITHOUT_PAUSE * (newest.created_ms + newest.duration_ms - oldest.created_ms)) return;
  say("warn", `Checkpoints take longer than their interval and follow each other without a pause: ${span(taken / last.length / 1e3)} each, of the last ${last.length}, for ${size(newest.state_bytes)} of state. They take processor time from the operators, which continue meanwhile. Look for state that can be smaller, or set a longer checkpoint_interval or a min_pause.`);
}

// Each quarter of the time had more state than all before it, and the end far more than the middle.
function growingState(status, say) {
  const points = status.state_growth;
  if (points.length < 8) return;
  const [first, last] = [points[0], points[points.length - 1]];
  const seconds = (last.at_ms - first.at_ms) / 1e3;
  if (seconds < GROWING_S || last.bytes < GROWING_BYTES) return;
  const quarters = [0, 1, 2, 3].map((n) => points.slice(Math.floor((n * points.length) / 4), Math.floor(((n + 1) * points.length) / 4)).map((each) => each.bytes));
  const middle = quarters[1][quarters[1].length - 1];
  if (quarters.slice(1).some((each, n) => Math.min(...each) <= Math.max(...quarters[n])) || last.bytes < 1.3 * middle) return;
  const largest = status.vertices.flatMap((vertex) => vertex.operators).reduce((most, each) => (each.state_bytes > most.state_bytes ? each : most));
  say("warn", `State has been growing steadily, from ${size(first.bytes)} to ${size(last.bytes)} in ${span(seconds)} (${size((last.bytes - first.bytes) * 60 / seconds)} a minute); ${share(largest.state_bytes / last.bytes)} of it is in ${named(largest.name)} (${count(largest.state_rows)} rows). Look for keys that are never cleared, timers set far in the future, or windows that never fire.`);
}

function littleMemory(status, say) {
  const short = status.slot_memory_bytes.map((used, at) => ({ at, used, most: status.slot_memory_limit_bytes[at] })).filter(({ used, most }) => most && used > 0.9 * most);
  if (!short.length) return;
  const { at, used, most } = short.reduce((one, other) => (other.used / other.most > one.used / one.most ? other : one));
  say("bad", `Slot ${at} uses ${size(used)} of memory, and its limit is ${size(most)}${short.length > 1 ? `; ${short.length - 1} more use over nine tenths of theirs` : ""}. It is killed when it exceeds its limit.`);
}

// A name of several words must not run into the sentence around it.
function named(name) {
  return /\s/.test(name) ? `“${name}”` : name;
}

function sum(items, value) {
  return items.reduce((all, each) => all + value(each), 0);
}

export function firstLine(text) {
  return text.split("\n", 1)[0];
}
