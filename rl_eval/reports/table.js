"use strict";

function element(tag, content, attributes = {}) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...[content].flat());
  return made;
}

(() => {
  const NUMBER = /^-?[\d,]*\.?\d+(?:e[+-]?\d+)?(?![\d:.-])/;

  /* Columns that a reader chose, kept for the next page if the browser allows it. */
  const chosen = {
    read() {
      try { return JSON.parse(localStorage.getItem("rl-eval columns")) ?? {}; } catch { return {}; }
    },
    keep(name, shown) {
      try { localStorage.setItem("rl-eval columns", JSON.stringify({ ...this.read(), [name]: shown })); } catch { /* Not kept. */ }
    },
  };

  const value = (row, place) => row.cells[place].textContent.trim();
  const number = (text) => (NUMBER.test(text) ? Number(NUMBER.exec(text)[0].replaceAll(",", "")) : NaN);

  class ChoiceTable {
    constructor(table) {
      Object.assign(this, { table, body: table.tBodies[0], head: [...table.tHead.rows[0].cells] });
      this.rows = [...this.body.rows];
      this.names = this.head.map((cell) => (cell.querySelector(".unseen") ? "" : cell.textContent.trim()));
      for (const row of this.rows) [...row.cells].forEach((cell, n) => { cell.dataset.label = this.names[n]; });
      this.head.forEach((cell, place) => {
        if (!this.names[place]) return;
        const button = element("button", this.names[place], { type: "button" });
        button.addEventListener("click", () => this.sort(place));
        cell.replaceChildren(button);
      });
      const filter = element("input", [], { type: "search", placeholder: "words in a row" });
      filter.addEventListener("input", () => this.filter(filter.value));
      this.count = element("output", "", { class: "quiet", "aria-live": "polite" });
      const columns = element("details", [element("summary", "columns"), element("div", this.boxes(), { class: "columns" })]);
      table.closest(".scroll").previousElementSibling.replaceChildren(element("label", ["find", filter]), columns, this.count);
      this.filter("");
    }

    boxes() {
      const kept = chosen.read();
      return this.head.flatMap((cell, place) => {
        const name = this.names[place];
        if (!name) return [];
        const box = element("input", [], { type: "checkbox" });
        box.checked = kept[name] ?? !cell.hidden;
        box.addEventListener("change", () => { this.show(place, box.checked); chosen.keep(name, box.checked); });
        this.show(place, box.checked);
        return [element("label", [box, name])];
      });
    }

    show(place, shown) {
      for (const cell of [this.head[place], ...this.rows.map((row) => row.cells[place])]) cell.hidden = !shown;
    }

    filter(text) {
      const words = text.toLowerCase().split(/\s+/);
      for (const row of this.rows) {
        const content = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => content.includes(word));
      }
      const left = this.rows.filter((row) => !row.hidden).length;
      this.count.textContent = `${left.toLocaleString("en")} of ${this.rows.length.toLocaleString("en")}`;
    }

    sort(place) {
      const cell = this.head[place], down = cell.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
      this.head.forEach((each) => each.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keys = new Map(this.rows.map((row) => [row, value(row, place)]));
      const compare = (a, b) => {
        const [x, y] = [number(a), number(b)];
        if (!Number.isNaN(x) && !Number.isNaN(y)) return sign * (x - y);
        if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return sign * a.localeCompare(b, "en", { numeric: true });
      };
      this.rows.sort((one, other) => compare(keys.get(one), keys.get(other)));
      this.body.append(...this.rows);
    }
  }

  document.querySelectorAll("table.choose").forEach((table) => new ChoiceTable(table));

  const form = document.querySelector("form"), compare = form?.querySelector(".pager button");
  const update = () => { compare.disabled = !form.querySelector("[name=run]:checked"); };
  if (compare) {
    form.addEventListener("change", update);
    addEventListener("pageshow", update);
    update();
  }

  /* All baselines are in the page; one is shown. */
  const against = [...document.querySelectorAll("[data-baseline]")];
  for (const section of against.filter(() => against.length > 1)) {
    const options = against.map((each) => element("option", each.dataset.baseline));
    const select = element("select", options);
    select.selectedIndex = against.indexOf(section);
    select.addEventListener("change", () => {
      against.forEach((each, place) => { each.hidden = place !== select.selectedIndex; });
      const next = against[select.selectedIndex].querySelector("select");
      next.focus();
      select.selectedIndex = against.indexOf(section);
    });
    section.querySelector(".controls").replaceChildren(element("label", ["baseline", select]));
  }
})();
