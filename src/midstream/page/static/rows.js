// Shows rows that an operator emits at this moment: requested by a button, with the token; shown as text.

import { h, renew } from "./dom.js";
import { clock, count, NOTHING } from "./text.js";

export class LiveRows {
  constructor(token, section, place) {
    this.token = token;
    this.section = section;
    this.place = place;
    this.number = 0;
  }

  async look(uid, name) {
    const number = ++this.number;
    this.section.hidden = false;
    const show = (...shown) => {
      if (number === this.number) renew(this.place, ...shown, this.buttons(uid, name));
    };
    if (this.token === null) {
      show(h("p", null, "Rows are shown only with the token: open the link that `midstream run` printed, or that `midstream status` prints."));
      return;
    }
    show(h("p", { class: "dim" }, "Waiting for the next rows of ", h("bdi", null, name), " …"));
    try {
      const response = await fetch("rows", { method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${this.token}` }, body: JSON.stringify({ operator: uid }) });
      if (response.ok) show(table(await response.json()));
      else show(h("p", { class: "bad-text" }, (await response.text()).trim()));
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      show(h("p", { class: "bad-text" }, "The job's driver does not answer."));
    }
  }

  buttons(uid, name) {
    return h("p", { class: "small" }, h("button", { type: "button", class: "plain", "data-rows": uid, "data-name": name }, "Refresh"), " ", h("button", { type: "button", class: "plain", "data-rows-close": true }, "Close"));
  }

  close() {
    this.number++;
    this.section.hidden = true;
  }
}

function table({ name, given_out_by, shown, waited_s }) {
  const what = name === given_out_by ? [h("bdi", null, name), " emits"] : [h("bdi", null, given_out_by), " sends to ", h("bdi", null, name)];
  if (shown === null) return h("p", null, "No rows that ", what, ` passed within ${waited_s} s.`);
  const more = shown.columns_left_out ? `; ${count(shown.columns_left_out)} more columns are not shown` : "";
  return [
    h("p", { class: "small" }, `${clock(Date.now())}: ${count(shown.rows.length)} of the ${count(shown.batch_rows)} rows of a batch that `, what, `, subtask ${shown.subtask}${more}.`),
    h("div", { class: "scroll" }, h("table", { class: "wide" },
      h("thead", null, h("tr", null, shown.columns.map((column) => h("th", { scope: "col" }, h("bdi", null, column.name), h("br"), h("span", { class: "small" }, column.type))))),
      h("tbody", null, shown.rows.map((row) => h("tr", null, row.map((value) => h("td", null, value === null ? h("span", { class: "dim" }, `null ${NOTHING}`) : h("bdi", null, value)))))))),
  ];
}
