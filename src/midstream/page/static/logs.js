// What functions printed and logged before a failure: asked by a button, with the token; shown as text.

import { h } from "./dom.js";
import { clock, count } from "./text.js";

const BEFORE_MS = 120_000;
const AFTER_MS = 5_000; // the last lines of a slot may come a little later than the word of its end
const SHOWN = 100;

export class FailureLogs {
  constructor(token, redraw) {
    this.token = token;
    this.redraw = redraw;
    this.shown = new Map();
  }

  // What stands below a failure: a button, or the lines.
  of(failure) {
    const key = `${failure.at_ms} ${failure.attempt}`;
    const made = this.shown.get(key);
    return h("div", { class: "logs", "data-key": "logs" }, made === undefined ? h("button", { type: "button", class: "plain", "data-logs": key }, "What functions printed before it") : made());
  }

  async look(key) {
    const show = (made) => {
      this.shown.set(key, made);
      this.redraw();
    };
    if (this.token === null) {
      show(() => h("p", { class: "small" }, "Lines are shown only with the token: open the link that `midstream run` printed, or that `midstream status` prints."));
      return;
    }
    try {
      const response = await fetch("logs", { headers: { Authorization: `Bearer ${this.token}` } });
      if (!response.ok) {
        const why = (await response.text()).trim();
        show(() => h("p", { class: "bad-text" }, why));
        return;
      }
      const atMs = Number(key.split(" ")[0]);
      const near = (await response.json()).lines.filter((line) => line.at_ms >= atMs - BEFORE_MS && line.at_ms <= atMs + AFTER_MS);
      show(() => lines(near));
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      show(() => h("p", { class: "bad-text" }, "The job's driver does not answer."));
    }
  }
}

function lines(near) {
  if (!near.length) return h("p", { class: "small" }, "No lines that functions printed or logged in the two minutes before have been kept.");
  const newest = near.slice(-SHOWN);
  const left = near.length - newest.length;
  return [
    h("p", { class: "small" }, `${left ? `The last ${count(newest.length)} of ${count(near.length)} lines` : `${count(newest.length)} line${newest.length === 1 ? "" : "s"}`} from the two minutes before it, from all slots.`),
    h("pre", { tabindex: 0 }, newest.map((line) => `${clock(line.at_ms)} slot ${line.slot}${line.operator ? ` ${line.operator} (${line.subtask})` : ""}: ${line.text}\n`).join("")),
  ];
}
