// Buttons that change something: confirmed in a dialog, sent with the token, answered on the page.

import { h, renew } from "./dom.js";
import { clock } from "./text.js";

const ACTIONS = [
  { action: "checkpoint", name: "Checkpoint", text: "Takes a checkpoint now. The job continues." },
  { action: "savepoint", name: "Savepoint", text: "Takes a checkpoint that holds everything it needs, may be moved, and is never deleted. The job continues.", field: { name: "directory", label: "Directory or storage URL; empty for one below the checkpoint directory", type: "text" } },
  { action: "rescale", name: "Rescale", text: "Continues at another parallelism, from a checkpoint taken for it. If that is not possible, the job continues unchanged.", field: { name: "parallelism", label: "Parallelism", type: "number" } },
  { action: "stop", name: "Stop", text: "Takes a checkpoint, then ends the job; a start with --from latest resumes from there.", danger: true },
  { action: "drain", name: "Drain", text: "Ends the sources here: windows and timers fire, all output is committed, and the job is finished. It is not meant to be resumed.", danger: true },
];

export class Actions {
  constructor(token, elements) {
    this.token = token;
    this.elements = elements;
    this.asked = [];
    elements.bar.addEventListener("click", (event) => {
      const chosen = ACTIONS.find((each) => each.action === event.target.dataset?.action);
      if (chosen) this.confirm(chosen);
    });
  }

  draw(status) {
    const ended = ["finished", "stopped", "failed", "lost"].includes(status.state);
    this.parallelism = Math.max(1, ...status.vertices.map((vertex) => vertex.parallelism));
    const why = this.token === null ? "To use these, open the link with the token that midstream run or midstream status prints" : null;
    renew(this.elements.bar, ended ? [] : ACTIONS.map(({ action, name }) => h("button", { type: "button", "data-action": action, disabled: this.token === null, title: why }, name)),
      !ended && why ? h("p", { class: "small" }, `${why}.`) : null);
    this.drawAnswers();
  }

  drawAnswers() {
    renew(this.elements.answers, this.asked.map((each) => h("p", { class: `answer ${each.state}`, "data-key": `a${each.key}` },
      h("strong", null, each.title), ` ${clock(each.beganMs)} `, { waiting: "waiting …", done: "done", failed: "not done", unknown: "unknown" }[each.state],
      each.answer ? [": ", h("bdi", null, each.answer)] : "")));
  }

  confirm({ action, name, text, field, danger }) {
    const { dialog } = this.elements;
    const input = field ? h("input", { id: "dialog-field", name: field.name, type: field.type, min: field.type === "number" ? 1 : null, value: field.type === "number" ? this.parallelism : null, maxlength: 4096, autocomplete: "off", required: field.type === "number" }) : null;
    const form = h("form", null, h("h2", { id: "dialog-title" }, name), h("p", null, text),
      field ? h("label", { for: "dialog-field" }, field.label, input) : null,
      h("div", { class: "buttons" }, h("button", { type: "button", "data-cancel": true }, "Cancel"), h("button", { type: "submit", class: danger ? "danger" : "primary" }, name)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close();
      const request = { action };
      if (field && input.value.trim()) request[field.name] = field.type === "number" ? Number(input.value) : input.value.trim();
      this.send(request, field && input.value.trim() ? `${name} ${field.type === "number" ? "to " : ""}${input.value.trim()}` : name);
    });
    form.querySelector("[data-cancel]").addEventListener("click", () => dialog.close());
    dialog.replaceChildren(form);
    dialog.showModal();
    (input ?? form.querySelector("[type=submit]")).focus();
    input?.select();
  }

  async send(request, title) {
    const asked = { key: this.asked.length, title, state: "waiting", beganMs: Date.now(), answer: "", id: null };
    this.asked.unshift(asked);
    this.drawAnswers();
    try {
      const response = await fetch("actions", { method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${this.token}` }, body: JSON.stringify(request) });
      if (response.ok) asked.id = (await response.json()).id;
      else Object.assign(asked, { state: "failed", answer: (await response.text()).trim() });
    } catch (error) {
      Object.assign(asked, { state: "unknown", answer: "the page has no answer from the job's driver" });
    }
    this.drawAnswers();
  }

  // With every look at the status: what has become of what was asked for.
  async look() {
    for (const asked of this.asked.filter((each) => each.state === "waiting" && each.id !== null)) {
      const response = await fetch(`actions/${asked.id}`, { headers: { Authorization: `Bearer ${this.token}` } });
      if (response.ok) {
        const { state, answer } = await response.json();
        Object.assign(asked, { state, answer });
      } else Object.assign(asked, { state: "unknown", answer: (await response.text()).trim() });
    }
    this.drawAnswers();
  }

  gone() {
    for (const asked of this.asked.filter((each) => each.state === "waiting")) Object.assign(asked, { state: "unknown", answer: "the job's driver is gone" });
    this.drawAnswers();
  }
}
