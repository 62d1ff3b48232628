"use strict";
(() => {
  const ROWS = 100;
  const TYPES = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };
  const ENDS = ["terminated", "truncated", "truncated by max_episode_steps", "failed"];
  const SUCCESS = ["", "no", "yes"];
  const FILTERS = {
    all: ["all episodes", () => () => true],
    failed: ["failed", (c) => (i) => c.end[i] === 3],
    faults: ["with faults", (c) => (i) => c.faulty.has(c.index[i])],
    retried: ["retried", (c) => (i) => c.attempts[i] > 1],
    truncated: ["truncated", (c) => (i) => c.end[i] === 1 || c.end[i] === 2],
    unsuccessful: ["without success", (c) => (i) => c.success[i] === 1],
    worst: ["worst 10 % of returns", (c) => ((limit) => (i) => c.return[i] <= limit)(quantile(c.return, 0.1))],
    best: ["best 10 % of returns", (c) => ((limit) => (i) => c.return[i] >= limit)(quantile(c.return, 0.9))],
    filmed: ["with a video", (c) => (i) => String(c.index[i]) in c.videos],
    slowest: ["slowest 5 %", (c) => ((limit) => (i) => c.seconds[i] >= limit)(quantile(c.seconds, 0.95))],
  };

  function quantile(values, share) {
    const known = Float64Array.from(values).filter((value) => !Number.isNaN(value)).sort();
    return known.length ? known[Math.min(known.length - 1, Math.max(0, Math.ceil(share * known.length) - 1))] : NaN;
  }

  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  async function unpack([kind, count, text]) {
    const planes = await inflate(text), size = TYPES[kind].BYTES_PER_ELEMENT, bytes = new Uint8Array(count * size);
    for (let plane = 0; plane < size; plane++) {
      for (let i = 0; i < count; i++) bytes[i * size + plane] = planes[plane * count + i];
    }
    return new TYPES[kind](bytes.buffer);
  }

  const digits = (value) => (Number.isNaN(value) ? "" : String(Number(value.toPrecision(7))));
  const few = (value) => (Number.isNaN(value) ? "" : String(Number(value.toPrecision(3))));

  class EpisodeTable {
    constructor(section, run) {
      Object.assign(this, { section, run, filter: "all", low: NaN, high: NaN, text: "", sorted: "index", down: false });
      this.page = 0;
      this.open = null;
    }

    async load() {
      const columns = {};
      const packed = { ...runs[0].columns, ...this.run.columns };
      for (const name of Object.keys(packed)) columns[name] = await unpack(packed[name]);
      this.columns = columns;
      this.infos = [];
      for (const [name, packed] of this.run.infos) this.infos.push([name, await unpack(packed)]);
      const found = JSON.parse(new TextDecoder().decode(await inflate(this.run.faults)));
      this.tracebacks = found.tracebacks;
      this.faults = new Map();
      for (const fault of found.rows) {
        if (!this.faults.has(fault[0])) this.faults.set(fault[0], []);
        this.faults.get(fault[0]).push(fault);
      }
      columns.faulty = this.faults;
      columns.videos = this.run.videos;
      const completed = (write) => (i) => (columns.end[i] === 3 ? "-" : write(i));
      const runner = (i) => (columns.runner[i] ? String(columns.runner[i] - 1) : "");
      this.shown = [
        ["index", "episode", columns.index, (i) => String(columns.index[i])],
        ["seed", "seed", columns.seed, (i) => String(columns.seed[i])],
        ["return", "return", columns.return, (i) => digits(columns.return[i])],
        ["length", "length", columns.length, completed((i) => String(columns.length[i]))],
        ["end", "end", columns.end, (i) => ENDS[columns.end[i]]],
        ["success", "success", columns.success, (i) => SUCCESS[columns.success[i]]],
        ["attempts", "attempts", columns.attempts, (i) => String(columns.attempts[i])],
        ["runner", "runner", columns.runner, runner],
        ["seconds", "seconds", columns.seconds, completed((i) => few(columns.seconds[i]))],
        ...this.infos.map(([name, values], n) => [`info ${n}`, name, values, (i) => digits(values[i])]),
      ].filter(([key]) => key !== "success" || columns.success.some((code) => code));
      this.build();
      this.update();
    }

    build() {
      const select = element("select", Object.entries(FILTERS).map(([key, [name]]) => element("option", name, { value: key })));
      select.addEventListener("change", () => this.change({ filter: select.value }));
      const number = (name, key) => {
        const input = element("input", [], { type: "number", step: "any", inputmode: "decimal" });
        input.addEventListener("input", () => this.change({ [key]: input.valueAsNumber }));
        return [element("label", [name, input]), input];
      };
      const [low, lowInput] = number("return from", "low"), [high, highInput] = number("to", "high");
      const search = element("input", [], { type: "search", inputmode: "numeric", placeholder: "index or seed" });
      search.addEventListener("input", () => this.change({ text: search.value.trim() }));
      const reset = element("button", "reset", { type: "button" });
      reset.addEventListener("click", () => this.reset());
      this.inputs = { select, low: lowInput, high: highInput, search };
      this.count = element("output", "", { class: "quiet", "aria-live": "polite" });
      const controls = this.section.querySelector(".controls");
      controls.replaceChildren(element("label", ["show", select]), low, high, element("label", ["find", search]), reset, this.count);

      this.head = this.shown.map(([key, name]) => {
        const button = element("button", name, { type: "button" });
        button.addEventListener("click", () => this.change({ sorted: key, down: this.sorted === key && !this.down }));
        return element("th", button, { scope: "col" });
      });
      this.section.querySelector("thead tr").replaceChildren(...this.head);
      this.body = this.section.querySelector("tbody");

      const turn = (name, step) => {
        const button = element("button", name, { type: "button" });
        button.addEventListener("click", () => { this.page += step; this.draw(); });
        return button;
      };
      this.before = turn("previous", -1);
      this.after = turn("next", 1);
      this.place = element("span", "", { class: "quiet" });
      this.section.querySelector(".pager").replaceChildren(this.before, this.after, this.place);
    }

    change(values) {
      Object.assign(this, values, { page: 0, open: null });
      this.update();
    }

    reset() {
      const { select, low, high, search } = this.inputs;
      select.value = "all";
      low.value = high.value = search.value = "";
      this.change({ filter: "all", low: NaN, high: NaN, text: "" });
    }

    between(low, high) {
      this.inputs.low.value = low;
      this.inputs.high.value = high;
      this.change({ low, high });
      this.section.scrollIntoView();
    }

    update() {
      const c = this.columns, keep = FILTERS[this.filter][1](c), { low, high, text } = this;
      const order = [];
      for (let i = 0; i < c.index.length; i++) {
        if (!keep(i) || c.return[i] < low || c.return[i] > high) continue;
        if ((!Number.isNaN(low) || !Number.isNaN(high)) && Number.isNaN(c.return[i])) continue;
        if (text && String(c.index[i]) !== text && !String(c.seed[i]).startsWith(text)) continue;
        order.push(i);
      }
      const values = this.shown.find(([key]) => key === this.sorted)[2], sign = this.down ? -1 : 1;
      order.sort((i, j) => {
        const a = values[i], b = values[j];
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b) || i - j;
        return a === b ? i - j : (a < b ? -sign : sign);
      });
      this.order = order;
      this.head.forEach((cell, n) => {
        if (this.shown[n][0] === this.sorted) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      });
      this.draw();
    }

    draw() {
      const total = this.order.length, first = this.page * ROWS, last = Math.min(total, first + ROWS);
      const more = [[this.run.omitted, "episodes"], [this.run.infos_omitted, "info columns"]].filter(([count]) => count);
      const omitted = more.map(([count, what]) => `; ${count.toLocaleString("en")} more ${what} are in the result's files`).join("");
      this.count.textContent = `${total.toLocaleString("en")} of ${this.columns.index.length.toLocaleString("en")} episodes${omitted}`;
      this.place.textContent = total ? `${(first + 1).toLocaleString("en")} to ${last.toLocaleString("en")}` : "none";
      this.before.disabled = first === 0;
      this.after.disabled = last >= total;
      this.body.replaceChildren(...this.order.slice(first, last).flatMap((i) => this.row(i)));
    }

    row(i) {
      const index = this.columns.index[i], id = `${this.run.anchor}episode-${index}`;
      const cells = this.shown.map(([key, name, , write]) => {
        const text = write(i), label = { "data-label": name };
        if (key !== "index") return element("td", text, text === "failed" ? { class: "failed", ...label } : label);
        return element("td", element("a", text, { href: `#${id}` }), label);
      });
      const row = element("tr", cells, { id });
      if (this.open !== index) return [row];
      row.className = "open";
      return [row, element("tr", element("td", this.detail(i), { colspan: this.shown.length }), { class: "detail" })];
    }

    detail(i) {
      const index = this.columns.index[i], parts = [];
      const why = this.columns.end[i] === 3 ? "it failed" : "an earlier episode did not finish";
      const counted = this.columns.counted[i] ? "" : ` The episode does not count, because ${why}.`;
      parts.push(element("p", `Episode ${index}, seed ${this.columns.seed[i]}: ${ENDS[this.columns.end[i]]}.${counted}`));
      parts.push(this.command(`rl-eval replay ${this.run.path} --episodes ${index}`));
      parts.push(this.command(`rl-eval show ${this.run.path} --episodes ${index} --faults`));
      const video = this.run.videos[index];
      if (video) parts.push(element("p", element("a", "video", { href: video, target: "_blank", rel: "noopener" })));
      for (const [, attempt, runner, told, place] of this.faults.get(index) ?? []) {
        parts.push(element("p", `Attempt ${attempt} on runner ${runner}: ${told}`));
        if (place >= 0) parts.push(element("details", [element("summary", "traceback"), element("pre", this.tracebacks[place])]));
      }
      return parts;
    }

    command(text) {
      const code = element("code", text), button = element("button", "copy", { type: "button" });
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(text);
          button.textContent = "copied";
        } catch {
          getSelection().selectAllChildren(code);
          button.textContent = "selected";
        }
      });
      return element("div", [code, button], { class: "command" });
    }

    show(index) {
      const row = this.columns.index.indexOf(index);
      if (row < 0) return;
      if (!this.order.includes(row)) this.reset();
      this.open = index;
      this.page = Math.floor(this.order.indexOf(row) / ROWS);
      this.draw();
      const around = this.section.closest("details");
      if (around) around.open = true;
      const target = document.getElementById(`${this.run.anchor}episode-${index}`);
      target.scrollIntoView({ block: "center" });
      target.querySelector("a").focus({ preventScroll: true });
    }
  }

  const runs = JSON.parse(document.getElementById("data").textContent);
  const tables = [...document.querySelectorAll(".episodes")].map((section) => new EpisodeTable(section, runs[section.dataset.run]));

  function follow() {
    const found = /^#(?:run-(\d+)-)?episode-(\d+)$/.exec(location.hash);
    const table = found && tables[Number(found[1] ?? 1) - 1];
    if (table) table.show(Number(found[2]));
    const run = /^#run-\d+$/.test(location.hash) && document.querySelector(location.hash);
    if (run) run.open = true;
  }

  async function start() {
    if (typeof DecompressionStream === "undefined") return;
    for (const table of tables) await table.load();
    document.querySelectorAll("[data-low]").forEach((bar) => {
      const table = tables[bar.closest("[data-histogram]")?.dataset.histogram];
      if (table) bar.addEventListener("click", () => table.between(Number(bar.dataset.low), Number(bar.dataset.high)));
    });
    addEventListener("hashchange", follow);
    follow();
    document.documentElement.dataset.ready = "yes";
  }

  addEventListener("beforeprint", () => document.querySelectorAll("details:not([open])").forEach((each) => {
    each.open = true;
    each.dataset.closed = "yes";
  }));
  addEventListener("afterprint", () => document.querySelectorAll("details[data-closed]").forEach((each) => {
    each.open = false;
    delete each.dataset.closed;
  }));
  start();
})();
