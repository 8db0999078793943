// The graph: tasks in layers, from the sources on, and the edges between them drawn behind.

import { h, renew, s } from "./dom.js";
import { count, hasWatermark, lagSeconds, NOTHING, rate, share, short, size, span, watermark } from "./text.js";

const QUIET_S = 3;

export function layersOf(vertices, edges) {
  const depth = new Map(vertices.map((vertex) => [vertex.id, 0]));
  for (let round = 0; round < vertices.length; round++) {
    for (const [source, target] of edges) depth.set(target, Math.max(depth.get(target), depth.get(source) + 1));
  }
  const layers = [];
  for (const vertex of vertices) (layers[depth.get(vertex.id)] ??= []).push(vertex);
  const place = new Map();
  layers.forEach((layer, at) => {
    const wish = (vertex) => {
      const feeding = edges.filter(([, target]) => target === vertex.id).map(([source]) => place.get(source) ?? 0);
      return feeding.length ? feeding.reduce((sum, each) => sum + each, 0) / feeding.length : 0;
    };
    if (at > 0) layer.sort((a, b) => wish(a) - wish(b) || a.id - b.id);
    layer.forEach((vertex, i) => place.set(vertex.id, i - (layer.length - 1) / 2));
  });
  return layers;
}

export function bar(parts, label) {
  let x = 0;
  return s("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": label },
    parts.map(([part, kind]) => {
      const rect = s("rect", { x, y: 0, width: Math.max(0, part) * 100, height: 8, class: kind });
      x += Math.max(0, part) * 100;
      return rect;
    }));
}

export function shares(busy, backpressured) {
  const idle = Math.max(0, 1 - busy - backpressured);
  const said = `busy ${share(busy)}, backpressured ${share(backpressured)}, idle ${share(idle)}`;
  return [bar([[busy, "busy"], [backpressured, "backpressured"], [idle, "idle"]], said), said];
}

function extremes(vertex) {
  if (vertex.parallelism === 1 || vertex.subtasks.length < 2) return null;
  const sorted = [...vertex.subtasks].sort((a, b) => a.busy - b.busy);
  const [least, most] = [sorted[0], sorted[sorted.length - 1]];
  return h("p", { class: "small" }, `busy from ${share(least.busy)} (subtask ${least.subtask}) to ${share(most.busy)} (subtask ${most.subtask})`);
}

function states(vertex) {
  const others = Object.entries(vertex.states).filter(([state, number]) => number && state !== "running");
  return others.map(([state, number]) => h("span", { class: "tag" }, number === vertex.parallelism ? state : `${number} ${state}`));
}

function recovery(vertex) {
  const whole = vertex.recovering.reduce((sum, each) => sum + each.to_recover_bytes, 0);
  if (!whole) return null;
  const done = vertex.recovering.reduce((sum, each) => sum + each.recovered_bytes, 0);
  return h("p", { class: "small recovering" }, `recovering: ${size(done)} of ${size(whole)} in flight taken up`, bar([[done / whole, "busy"]], share(done / whole)));
}

// Those of the operator's function.
function userMetrics(operator) {
  const [counters, gauges] = [Object.entries(operator.counters ?? {}), Object.entries(operator.gauges ?? {})];
  const [sums, kind] = [counters.length + gauges.length, counters.length === 0 ? "gauge" : gauges.length === 0 ? "counter" : "metric"];
  if (!sums) return null;
  return h("details", { class: "small user-metrics", "data-key": `m${operator.uid}` }, h("summary", null, `${count(sums)} ${kind}${sums === 1 ? "" : "s"} of its function`),
    h("ul", null,
      counters.map(([name, value]) => h("li", null, h("bdi", null, name), ` ${figure(value)}`)),
      gauges.map(([name, gauge]) => h("li", null, h("bdi", null, name), gauge.min === gauge.max ? ` ${figure(gauge.sum)}` : ` ${figure(gauge.sum)} (of a subtask ${figure(gauge.min)} to ${figure(gauge.max)})`))));
}

function figure(value) {
  return Number.isSafeInteger(value) ? count(value) : String(Number(value.toPrecision(6)));
}

// In rows per second, and since when there are none: a sink that writes once a minute does write.
function passing(total, uid, way, rates) {
  const perSecond = rates.of(uid, way);
  const quiet = perSecond === 0 && total > 0 ? rates.quietSeconds(uid, way) : 0;
  return h("td", { title: `${count(total)} rows in total` }, rate(perSecond), quiet >= QUIET_S ? h("span", { class: "small quiet" }, `no rows for ${span(quiet)}`) : null);
}

function card(vertex, status, names, rates) {
  const slow = status.bottleneck !== null && status.bottleneck.vertex === vertex.id;
  const lag = lagSeconds(vertex.watermark_us, status.now_ms);
  const [shareBar, said] = shares(vertex.busy, vertex.backpressured);
  const finished = vertex.states.finished === vertex.parallelism;
  const [isFed, isFollowed] = [status.edges.some(([, target]) => target === vertex.id), status.edges.some(([source]) => source === vertex.id)];
  const ended = finished || ["finished", "stopped", "failed", "lost"].includes(status.state);
  return h("article", { class: slow ? "task slow" : "task", id: `task-${vertex.id}`, "data-key": `v${vertex.id}`, "data-vertex": vertex.id },
    h("div", { class: "tags" },
      slow ? h("span", { class: "tag bad" }, status.bottleneck.subtask === null ? "bottleneck" : `bottleneck: subtask ${status.bottleneck.subtask}`) : null,
      states(vertex)),
    h("table", { class: "operators" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, `${count(vertex.parallelism)} subtask${vertex.parallelism === 1 ? "" : "s"}`), h("th", { scope: "col" }, "in"), h("th", { scope: "col" }, "out"))),
      h("tbody", null, vertex.operators.map((operator, at) => h("tr", null,
        h("th", { scope: "row" }, h("bdi", null, names.get(operator.uid)),
          ended ? null : h("button", { type: "button", class: "plain", "data-rows": operator.uid, "data-name": names.get(operator.uid), "aria-label": `Rows of ${names.get(operator.uid)}` }, "Rows"),
          operator.state_bytes ? h("span", { class: "small" }, `state ${size(operator.state_bytes)}, ${count(operator.state_rows)} row${operator.state_rows === 1 ? "" : "s"}`) : null,
          vertex.operators.length > 1 && vertex.busy >= 0.1 && operator.work !== null && operator.work >= 0.05 ? h("span", { class: "small" }, `${share(operator.work)} of the work`) : null,
          userMetrics(operator),
          operator.late_rows ? h("span", { class: "small bad-text" }, `${count(operator.late_rows)} late rows dropped`) : null,
          operator.failed_rows ? h("span", { class: "small bad-text" }, `${count(operator.failed_rows)} rows failed`) : null,
          operator.bad_records ? h("span", { class: "small bad-text" }, `${count(operator.bad_records)} bad records dropped`) : null),
        isFed || at > 0 ? passing(operator.rows_in, operator.uid, "in", rates) : h("td"),
        isFollowed || at + 1 < vertex.operators.length ? passing(operator.rows_out, operator.uid, "out", rates) : h("td"))))),
    finished ? null : [shareBar, h("p", { class: "small" }, said)],
    finished ? null : extremes(vertex),
    recovery(vertex),
    h("p", { class: "small" }, vertex.watermark_us === null ? "no watermark" : ["watermark ", watermark(vertex.watermark_us), lag === null ? null : `, ${span(lag)} behind`]),
    vertex.subtasks.length ? h("button", { type: "button", class: "plain", "data-open": vertex.id, "aria-controls": "detail" }, "Subtasks") : null);
}

export function drawGraph(place, status, names, rates) {
  const layers = layersOf(status.vertices, status.edges);
  const rows = h("div", { class: "layers", "data-key": "layers" },
    layers.map((layer, at) => h("div", { class: "layer", "data-key": `l${at}` }, layer.map((vertex) => card(vertex, status, names, rates)))));
  renew(place, s("svg", { class: "edges", "aria-hidden": "true" }), rows);
  drawEdges(place, status, rates);
}

// One line per edge into a task; null where none leads there.
export function inputsTable(status, vertex, rates) {
  const marks = status.edges.flatMap(([, target], number) => (target === vertex.id && hasWatermark(status.flows[number]?.watermark_us ?? null) ? [status.flows[number].watermark_us] : []));
  const furthest = marks.length > 1 ? Math.max(...marks) : null;
  const lines = status.edges.flatMap(([source, target, kind], number) => {
    if (target !== vertex.id) return [];
    const [flow, all] = [rates.ofEdge(number), status.flows[number]];
    const mark = all?.watermark_us ?? null;
    const lag = lagSeconds(mark, status.now_ms);
    const feeder = status.vertices.find((each) => each.id === source);
    return [h("tr", null, h("th", { scope: "row" }, h("bdi", null, feeder.name)), h("td", null, kind),
      h("td", { class: "n" }, rate(flow.rows)), h("td", { class: "n" }, flow.bytes === null ? NOTHING : `${size(flow.bytes)}/s`), h("td", { class: "n" }, flow.perBatch === null ? NOTHING : short(flow.perBatch)),
      h("td", { class: "n" }, all === undefined ? NOTHING : count(all.rows)), h("td", null, watermark(mark)), h("td", { class: "n" }, lag === null ? NOTHING : span(lag)),
      furthest === null ? null : h("td", { class: "n" }, hasWatermark(mark) ? span((furthest - mark) / 1e6) : NOTHING))];
  });
  if (!lines.length) return null;
  return h("div", { class: "scroll", "data-key": "inputs" }, h("table", { class: "wide" },
    h("thead", null, h("tr", null, ["input from", "", "rows", "bytes", "rows per batch", "rows in total", "watermark", "behind the clock", furthest === null ? null : "behind the most advanced input"].filter((name) => name !== null).map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, lines)));
}

export function drawEdges(place, status, rates) {
  const svg = place.querySelector("svg.edges");
  const layers = place.querySelector(".layers");
  if (svg === null || layers === null) return;
  const whole = place.getBoundingClientRect();
  const [width, height] = [layers.scrollWidth, layers.offsetHeight];
  const across = getComputedStyle(layers).flexDirection === "row";
  const lines = status.edges.map(([source, target, kind], number) => {
    const from = place.querySelector(`#task-${source}`)?.getBoundingClientRect();
    const to = place.querySelector(`#task-${target}`)?.getBoundingClientRect();
    if (from === undefined || to === undefined) return null;
    const [x, y] = [place.scrollLeft - whole.left, -whole.top];
    const feeder = status.vertices.find((vertex) => vertex.id === source);
    const flow = rates.ofEdge(number);
    const passing = flow.rows === null ? [NOTHING] : [rate(flow.rows), `${size(flow.bytes)}/s`, flow.perBatch === null ? null : `${short(flow.perBatch)} per batch`];
    const lag = lagSeconds(status.flows[number]?.watermark_us ?? null, status.now_ms);
    const said = [...passing, lag === null ? null : `${span(lag)} behind`].filter((each) => each !== null);
    let start, end, path;
    if (across) {
      start = [from.right + x, (from.top + from.bottom) / 2 + y];
      end = [to.left + x, (to.top + to.bottom) / 2 + y];
      const middle = (start[0] + end[0]) / 2;
      path = `M${start} C${middle},${start[1]} ${middle},${end[1]} ${end}`;
    } else {
      start = [(from.left + from.right) / 2 + x, from.bottom + y];
      end = [(to.left + to.right) / 2 + x, to.top + y];
      const middle = (start[1] + end[1]) / 2;
      path = `M${start} C${start[0]},${middle} ${end[0]},${middle} ${end}`;
    }
    const at = [(start[0] + end[0]) / 2, (start[1] + end[1]) / 2];
    const held = feeder.backpressured >= 0.3;
    return {
      line: s("path", { d: path, class: held ? "edge held" : "edge", "marker-end": "url(#arrow)" }),
      words: across
        ? [s("text", { x: at[0], y: at[1] - 8 }, kind), said.map((each, line) => s("text", { x: at[0], y: at[1] + 16 + 14 * line }, each))]
        : [s("text", { x: at[0], y: at[1] + 4 }, `${kind} ${said.join(", ")}`)],
    };
  }).filter((each) => each !== null);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  renew(svg,
    s("defs", null, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerUnits: "userSpaceOnUse", markerWidth: 10, markerHeight: 10, orient: "auto" }, s("path", { d: "M0 0L8 4L0 8z", class: "head" }))),
    lines.map((each) => each.line), lines.map((each) => each.words)); // no line runs through the words of another
}
