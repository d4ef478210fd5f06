// The monitor in the sidebar: what the server tells (MonitorData), when it is asked (Poller), how it is shown (MonitorPanel).
// Names and reports come from models and servers: they reach the page as text only, never as markup.

const POLL_MS = 1000;
const SETTLE_MS = 250; // after a run: several events say that it is over, one question is enough
const WINDOW_S = 300;
const NUM_RUNS = 50;

const PARTS = [
  ["weights", "LLM weights", "#4e9af1"],
  ["kv_cache", "KV cache", "#5bc489"],
  ["other_llm", "other LLM", "#b3a1f5"],
  ["others", "diffusion and other", "#f1a24e"],
  ["free", "free", "transparent"],
];

/** Everything that was told so far; lives outside the page's elements, which come and go. */
export class MonitorData {
  constructor() {
    this.state = null;
    this.samples = [];
    this.runs = [];
  }

  /** What need not be told again. */
  get query() {
    const since = this.samples.at(-1)?.at ?? 0;
    const after = this.runs.at(-1)?.number ?? 0;
    return `since=${since}&after=${after}`;
  }

  take(state) {
    if (this.state && state.monitor !== this.state.monitor) {
      this.samples = []; // another server: its runs are counted anew
      this.runs = [];
    }
    this.state = state;
    while (this.samples.at(-1)?.at > state.at) this.samples.pop(); // the server's clock was set back
    this.samples.push(...state.samples.filter((one) => one.at > (this.samples.at(-1)?.at ?? 0)));
    while (this.samples.length && this.samples[0].at < state.at - WINDOW_S) this.samples.shift();
    this.runs.push(...state.runs.filter((one) => one.number > (this.runs.at(-1)?.number ?? 0)));
    this.runs.splice(0, this.runs.length - NUM_RUNS);
  }

  /** Percent of the fullest device that is in use; null where it is not known. */
  get fullest() {
    const shares = (this.state?.devices ?? [])
      .filter((one) => one.total_bytes && one.used_bytes !== null)
      .map((one) => (100 * one.used_bytes) / one.total_bytes);
    return shares.length ? Math.round(Math.max(...shares)) : null;
  }
}

/** Asks the server: once when the panel opens, each second while it is seen and a run goes on, once after a run. */
export class Poller {
  constructor(ask) {
    this.ask = ask;
    this.isOpen = false;
    this.isRunning = false;
    this.timer = null;
  }

  open() {
    this.isOpen = true;
    this.now();
  }

  close() {
    this.isOpen = false;
    this.rest();
  }

  /** A run began, or the last one ended. */
  setRunning(isRunning) {
    if (isRunning === this.isRunning) return;
    this.isRunning = isRunning;
    if (isRunning) this.wake();
    else this.after(SETTLE_MS);
  }

  /** Ask now, and go on while there is reason to. */
  async now() {
    this.rest();
    const mine = (this.turn = {});
    if (!document.hidden || !this.isRunning) await this.ask(); // a page that nobody sees asks nothing meanwhile
    if (this.turn === mine && this.isOpen && this.isRunning) this.after(POLL_MS);
  }

  wake() {
    if (this.isOpen && this.isRunning) this.now();
  }

  after(ms) {
    this.rest();
    this.timer = setTimeout(() => this.now(), ms);
  }

  rest() {
    clearTimeout(this.timer);
    this.timer = null;
    this.turn = null;
  }
}

const bytes = (n) =>
  n === null || n === undefined
    ? "unknown"
    : n >= 1e9
      ? `${(n / 1e9).toFixed(n >= 1e11 ? 0 : 1)} GB`
      : n >= 1e6
        ? `${Math.round(n / 1e6)} MB`
        : n >= 1e3
          ? `${(n / 1e3).toFixed(1)} kB`
          : `${n} B`;
const count = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, "\u202f");
const known = (value, unit = "", digits = 0) =>
  value === null || value === undefined ? "unknown" : `${Number(value).toFixed(digits)}${unit}`;

function make(tag, className = "", text = "") {
  const one = document.createElement(tag);
  if (className) one.className = className;
  if (text) one.textContent = text;
  return one;
}

/** Change a text only if it differs: an unchanged page is not painted again. */
function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function show(element, isShown) {
  const display = isShown ? "" : "none";
  if (element.style.display !== display) element.style.display = display;
}

const STYLE = `
.resident-monitor { display: flex; flex-direction: column; gap: 8px; height: 100%; box-sizing: border-box; padding: 10px;
  overflow-y: auto; font-size: 12px; line-height: 1.4; color: var(--fg-color, #ddd); font-variant-numeric: tabular-nums; }
.resident-monitor section { flex: none; background: var(--comfy-input-bg, #222); border: 1px solid var(--border-color, #4e4e4e);
  border-radius: 8px; padding: 8px 10px; }
.resident-monitor .rm-title { font-size: 14px; font-weight: 600; padding: 2px 2px 0; }
.resident-monitor .rm-heading { font-size: 11px; letter-spacing: .04em; text-transform: uppercase; padding: 4px 2px 0; }
.resident-monitor .rm-heading, .resident-monitor .rm-dim { color: var(--descrip-text, #999); }
.resident-monitor .rm-row { display: flex; align-items: baseline; gap: 8px; }
.resident-monitor .rm-grow { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.resident-monitor .rm-wrap { flex-wrap: wrap; row-gap: 0; }
.resident-monitor .rm-wrap .rm-grow { flex: 1 1 80px; }
.resident-monitor .rm-strong { font-weight: 600; }
.resident-monitor .rm-bar { display: flex; height: 12px; margin: 6px 0; border-radius: 4px; overflow: hidden;
  background: color-mix(in srgb, var(--descrip-text, #999) 22%, transparent); }
.resident-monitor .rm-bar > div { height: 100%; transition: width .4s; min-width: 0; }
.resident-monitor .rm-legend { display: grid; grid-template-columns: 1fr auto; column-gap: 8px; row-gap: 1px; }
.resident-monitor .rm-legend > span:nth-child(2n) { text-align: right; }
.resident-monitor .rm-swatch { display: inline-block; width: 8px; height: 8px; border-radius: 2px; margin-right: 6px;
  box-shadow: inset 0 0 0 1px color-mix(in srgb, var(--descrip-text, #999) 50%, transparent); }
.resident-monitor .rm-facts { display: grid; grid-template-columns: auto 1fr; column-gap: 10px; row-gap: 1px; margin-top: 4px; }
.resident-monitor .rm-facts > span:nth-child(2n) { text-align: right; overflow-wrap: anywhere; }
.resident-monitor svg { display: block; width: 100%; height: 34px; margin-top: 6px; overflow: visible; }
.resident-monitor button { font: inherit; font-size: 11px; color: inherit; background: transparent; cursor: pointer;
  border: 1px solid var(--border-color, #4e4e4e); border-radius: 4px; padding: 1px 10px; }
.resident-monitor button:hover:enabled { background: color-mix(in srgb, var(--descrip-text, #999) 25%, transparent); }
.resident-monitor button:disabled { opacity: .45; cursor: default; }
.resident-monitor button.rm-on { background: #4e9af1; border-color: #4e9af1; color: #fff; opacity: 1; }
.resident-monitor .rm-dot { width: 7px; height: 7px; border-radius: 50%; flex: none; align-self: center; }
.resident-monitor details { border-top: 1px solid var(--border-color, #4e4e4e); }
.resident-monitor details:first-child { border-top: 0; }
.resident-monitor summary { cursor: pointer; list-style: none; padding: 3px 0; }
.resident-monitor summary::-webkit-details-marker { display: none; }
.resident-monitor pre { margin: 0 0 6px; padding: 6px; max-height: 260px; overflow: auto; font-size: 11px; user-select: text;
  white-space: pre-wrap; overflow-wrap: anywhere; border-radius: 4px; background: color-mix(in srgb, var(--descrip-text, #999) 12%, transparent); }
.resident-monitor .rm-warning { color: var(--p-amber-500, #f59e0b); }
`;

/** A curve of the last minutes. */
class Sparkline {
  constructor(colour) {
    const ns = "http://www.w3.org/2000/svg";
    this.element = document.createElementNS(ns, "svg");
    this.element.setAttribute("viewBox", "0 0 300 34");
    this.element.setAttribute("preserveAspectRatio", "none");
    this.area = document.createElementNS(ns, "polygon");
    this.area.setAttribute("fill", colour);
    this.area.setAttribute("opacity", "0.18");
    this.line = document.createElementNS(ns, "polyline");
    this.line.setAttribute("fill", "none");
    this.line.setAttribute("stroke", colour);
    this.line.setAttribute("stroke-width", "1.5");
    this.line.setAttribute("vector-effect", "non-scaling-stroke");
    this.element.append(this.area, this.line);
  }

  /** points: [seconds since 1970, value or null]; the time axis ends at `now` and begins with the oldest point. */
  draw(points, now, top) {
    const first = points.length ? Math.min(points[0][0], now - 30) : now - 30;
    const high = top || Math.max(1, ...points.map(([, value]) => value ?? 0));
    const places = points.map(([at, value]) => {
      const x = (300 * (at - first)) / (now - first);
      return `${x.toFixed(1)},${(33 - (31 * (value ?? 0)) / high).toFixed(1)}`;
    });
    this.line.setAttribute("points", places.join(" "));
    const [left, right] = [places[0]?.split(",")[0], places.at(-1)?.split(",")[0]];
    this.area.setAttribute("points", places.length ? `${left},34 ${places.join(" ")} ${right},34` : "");
  }
}

/** Two columns of names and values. */
class Facts {
  constructor() {
    this.element = make("div", "rm-facts");
    this.rows = new Map();
  }

  show(pairs) {
    for (const [name, value] of pairs) {
      if (!this.rows.has(name)) {
        const row = [make("span", "rm-dim", name), make("span")];
        this.rows.set(name, row);
        this.element.append(...row);
      }
      put(this.rows.get(name)[1], value ?? "");
      for (const one of this.rows.get(name)) show(one, value !== null && value !== undefined && value !== "");
    }
  }
}

class DeviceCard {
  constructor() {
    this.element = make("section", "rm-device");
    this.name = make("span", "rm-grow rm-strong");
    this.share = make("span", "rm-share");
    const head = make("div", "rm-row rm-wrap");
    head.append(this.name, this.share);
    this.bar = make("div", "rm-bar");
    this.legend = make("div", "rm-legend");
    this.parts = PARTS.map(([key, title, colour]) => {
      const segment = make("div");
      segment.style.background = colour;
      segment.dataset.part = key;
      const label = make("span", "rm-dim");
      const swatch = make("i", "rm-swatch");
      swatch.style.background = colour;
      label.append(swatch, title);
      const value = make("span");
      value.dataset.part = key;
      this.bar.append(segment);
      this.legend.append(label, value);
      return { key, segment, value };
    });
    this.curve = new Sparkline("#f1a24e");
    this.curve.element.classList.add("rm-memory-curve");
    this.line = make("div", "rm-dim");
    this.line.style.marginTop = "4px";
    this.element.append(head, this.bar, this.legend, this.curve.element, this.line);
  }

  render(device, samples, now) {
    put(this.name, device.device === "cpu" ? "CPU memory" : `${device.device} ${device.name ?? ""}`);
    this.name.title = device.name ?? "";
    const isKnown = device.total_bytes && device.used_bytes !== null;
    put(
      this.share,
      isKnown
        ? `${bytes(device.used_bytes)} of ${bytes(device.total_bytes)}, ${Math.round((100 * device.used_bytes) / device.total_bytes)} %`
        : "unknown",
    );
    for (const { key, segment, value } of this.parts) {
      const part = device.parts[key];
      const width = isKnown ? `${((100 * (part ?? 0)) / device.total_bytes).toFixed(3)}%` : "0%";
      if (segment.style.width !== width) segment.style.width = width;
      put(value, bytes(part));
      value.dataset.bytes = part ?? "";
    }
    this.curve.draw(
      samples.filter((one) => typeof one.used[device.device] === "number").map((one) => [one.at, one.used[device.device]]),
      now,
      device.total_bytes,
    );
    put(this.line, device.device === "cpu" ? "" : deviceLine(device));
    show(this.line, device.device !== "cpu");
  }
}

function deviceLine(one) {
  const power = `${known(one.power_w)}${one.power_w === null ? "" : ` of ${known(one.power_limit_w)}`} W`;
  const link = one.pcie_gen === null || one.pcie_width === null ? "unknown" : `${one.pcie_gen} x${one.pcie_width}`;
  return [
    `SM ${known(one.sm_busy, " % busy")}`,
    `memory controller ${known(one.memory_busy, " % busy")}`,
    one.power_w === null ? "power unknown" : power,
    `clocks ${known(one.sm_clock_mhz)} / ${known(one.memory_clock_mhz)} MHz`,
    `PCIe ${link}`,
    one.temperature_c === null ? "" : `${one.temperature_c} \u00b0C`,
  ]
    .filter(Boolean)
    .join(" \u00b7 ");
}

/** What is being done now. */
class LiveCard {
  constructor() {
    this.element = make("section", "rm-live");
    this.phase = make("span", "rm-grow rm-strong");
    this.rate = make("span", "rm-rate");
    const head = make("div", "rm-row");
    head.append(this.phase, this.rate);
    this.bar = make("div", "rm-bar");
    this.bar.style.height = "4px";
    this.done = make("div");
    this.done.style.background = "#5bc489";
    this.bar.append(this.done);
    this.detail = make("div", "rm-dim");
    this.curve = new Sparkline("#5bc489");
    this.curve.element.classList.add("rm-rate-curve");
    this.element.append(head, this.bar, this.detail, this.curve.element);
  }

  render(state, samples, runs) {
    const run = state.live.at(-1);
    put(this.phase, run ? phaseOf(run) : "idle");
    const rates = state.live.map((one) => one.tokens_per_s).filter((rate) => rate !== null);
    const last = runs.at(-1);
    const lastRate = last?.reports[0]?.decode_tokens_per_s;
    put(
      this.rate,
      rates.length ? `${rates.reduce((a, b) => a + b, 0).toFixed(1)} tok/s` : !run && lastRate ? `last ${lastRate.toFixed(1)} tok/s` : "",
    );
    show(this.bar, Boolean(run));
    const width = run && run.total ? `${Math.min(100, (100 * run.done) / run.total).toFixed(1)}%` : "0%";
    if (this.done.style.width !== width) this.done.style.width = width;
    const told = run ?? last;
    const parts = told ? [told.name] : ["nothing was generated yet"];
    if (told?.num_items > 1) parts.push(`${told.num_items} items`);
    if (told) parts.push(`${count(told.num_tokens)} tokens`);
    if (told?.ttft_s) parts.push(`first after ${told.ttft_s.toFixed(2)} s`);
    if (run?.num_cached_tokens) parts.push(`${count(run.num_cached_tokens)} cached`);
    put(this.detail, parts.join(" \u00b7 "));
    this.curve.draw(
      samples.map((one) => [one.at, one.tokens_per_s]),
      state.at,
    );
    show(this.curve.element, samples.some((one) => one.tokens_per_s));
  }
}

function phaseOf(run) {
  if (run.waits_for) return `waiting for ${run.waits_for}`;
  if (run.phase === "load") return `loading ${run.total ? Math.floor((100 * run.done) / run.total) : 0} %`;
  if (run.phase === "prefill") return run.total ? `prefill ${count(run.done)} of ${count(run.total)}` : "waiting for the first token";
  return run.phase === "decode" ? "decoding" : "waiting";
}

class ModelCard {
  constructor(act) {
    this.element = make("section", "rm-model");
    this.name = make("span", "rm-grow rm-strong");
    this.where = make("span", "rm-dim");
    const head = make("div", "rm-row");
    head.append(this.name, this.where);
    this.facts = new Facts();
    this.servers = make("div", "rm-servers");
    this.warnings = make("div", "rm-warning");
    this.free = make("button", "rm-free", "Free");
    this.keep = make("button", "rm-keep", "Keep");
    this.free.addEventListener("click", () => act("free", { id: this.model.id }));
    this.keep.addEventListener("click", () => act("keep", { id: this.model.id, keep: !this.model.is_kept }));
    const buttons = make("div", "rm-row");
    buttons.style.marginTop = "6px";
    buttons.append(this.free, this.keep);
    this.element.append(head, this.facts.element, this.servers, this.warnings, buttons);
  }

  render(model) {
    this.model = model;
    this.element.dataset.model = model.id;
    put(this.name, model.name);
    this.name.title = model.name;
    put(this.where, model.is_parked ? "waits off the device" : bytes(model.bytes.device || model.bytes.host_copy));
    const hits = model.num_prompt_tokens
      ? `${count(model.num_cached_tokens)} of ${count(model.num_prompt_tokens)} prompt tokens`
      : null;
    const parts = PARTS.slice(0, 2)
      .map(([key, title]) => [model.bytes[key], title])
      .filter(([size]) => size)
      .map(([size, title]) => `${bytes(size)} ${title.replace("LLM ", "")}`);
    if (model.bytes.host_copy) parts.push(`${bytes(model.bytes.host_copy)} in host memory`);
    const isRemote = model.is_remote;
    this.facts.show([
      ["engine", isRemote ? "server" : `${model.engine}, ${model.device}, ${model.dtype}`],
      ["attention", isRemote ? null : model.attention],
      ["KV cache", isRemote ? null : model.kv_cache],
      ["context", `${count(model.context_used)} of ${model.context_len === null ? "unknown" : count(model.context_len)}`],
      ["prefix hits", hits],
      ["memory", parts.join(", ")],
      ["patches", model.patches.join(", ")],
      ["loaded", model.num_loads ? `${model.num_loads} x, last in ${model.load_s.toFixed(1)} s` : null],
    ]);
    this.renderServers(model.servers);
    put(this.warnings, model.warnings.join("\n"));
    this.free.disabled = model.is_busy;
    this.free.title = model.is_busy ? "In use now" : "Unload this model and give its memory back";
    const stays = model.when_idle === "keep";
    this.keep.disabled = stays;
    this.keep.classList.toggle("rm-on", stays || model.is_kept);
    this.keep.title = stays
      ? "Stays between runs, by its loader's setting"
      : model.is_kept
        ? "Stays after its run; click to let it leave as its loader says"
        : `Leaves after its run (${model.when_idle}); click to have it stay`;
  }

  renderServers(servers) {
    while (this.servers.children.length > servers.length) this.servers.lastChild.remove();
    servers.forEach((server, index) => {
      let row = this.servers.children[index];
      if (!row) {
        row = make("div");
        row.head = make("div", "rm-dim");
        row.head.style.marginTop = "6px";
        row.facts = new Facts();
        row.append(row.head, row.facts.element);
        this.servers.append(row);
      }
      const state = server.is_asleep === null ? "" : server.is_asleep ? ", asleep" : ", awake";
      put(row.head, `${server.title}${state}`);
      row.facts.show([
        ["requests", server.num_running === null ? "unknown" : `${server.num_running} running, ${server.num_waiting ?? 0} waiting`],
        ["KV usage", server.kv_usage === null ? "unknown" : `${(100 * server.kv_usage).toFixed(1)} %`],
        ["prefix hit rate", server.prefix_hit_rate === null ? "unknown" : `${(100 * server.prefix_hit_rate).toFixed(1)} %`],
        ["TTFT, TPOT (mean)", `${known(server.ttft_s, " s", 2)}, ${known(server.tpot_s, " s", 3)}`],
        ["fault", server.fault],
      ]);
    });
  }
}

/** The panel. `act(route, body)` does what a button says and gives a sentence. */
export class MonitorPanel {
  constructor(data, act) {
    this.data = data;
    this.devices = new Map();
    this.models = new Map();
    this.shownRun = 0;
    this.element = make("div", "resident-monitor");
    this.element.dataset.captureWheel = "true";
    const style = make("style", "", STYLE);
    this.said = make("div", "rm-dim");
    this.deviceList = make("div");
    this.modelList = make("div");
    for (const list of [this.deviceList, this.modelList]) {
      Object.assign(list.style, { display: "flex", flexDirection: "column", gap: "8px", flex: "none" });
    }
    this.live = new LiveCard();
    this.none = make("div", "rm-dim", "No model is loaded.");
    this.history = make("section", "rm-history");
    this.noRuns = make("div", "rm-dim", "No run yet.");
    this.history.append(this.noRuns);
    this.act = async (route, body) => this.say(await act(route, body));
    this.element.append(
      style,
      make("div", "rm-title", "LLM Monitor"),
      this.deviceList,
      this.live.element,
      make("div", "rm-heading", "Models"),
      this.none,
      this.modelList,
      this.said,
      make("div", "rm-heading", "Last runs"),
      this.history,
    );
    show(this.said, false);
  }

  /** A sentence below the models. */
  say(sentence) {
    put(this.said, sentence);
    show(this.said, Boolean(sentence));
  }

  /** Bring the panel in step with the data. */
  render() {
    const { state, samples, runs } = this.data;
    if (!state) return;
    keyed(this.devices, this.deviceList, state.devices, (one) => one.device, () => new DeviceCard(), (card, one) =>
      card.render(one, samples, state.at),
    );
    this.live.render(state, samples, runs);
    keyed(this.models, this.modelList, state.models, (one) => one.id, () => new ModelCard(this.act), (card, one) =>
      card.render(one),
    );
    show(this.none, !state.models.length);
    this.renderRuns(runs);
  }

  renderRuns(runs) {
    if (runs.length && runs.at(-1).number < this.shownRun) {
      this.history.replaceChildren(this.noRuns);
      this.shownRun = 0;
    }
    for (const run of runs) {
      if (run.number <= this.shownRun) continue;
      this.history.prepend(runRow(run));
      this.shownRun = run.number;
    }
    show(this.noRuns, !runs.length);
    while (this.history.children.length > NUM_RUNS + 1) this.noRuns.previousSibling.remove();
  }
}

/** One element per item, kept as long as the item is there. */
function keyed(cards, list, items, keyOf, create, render) {
  const keys = new Set(items.map(keyOf));
  for (const [key, card] of cards) {
    if (keys.has(key)) continue;
    card.element.remove();
    cards.delete(key);
  }
  for (const item of items) {
    const key = keyOf(item);
    if (!cards.has(key)) {
      cards.set(key, create());
      list.append(cards.get(key).element);
    }
    render(cards.get(key), item);
  }
}

const COLOUR_OF = { done: "#5bc489", failed: "#e0655f", interrupted: "#f1a24e" };

function runRow(run) {
  const row = make("details");
  const summary = make("summary");
  const line = make("div", "rm-row");
  const dot = make("span", "rm-dot");
  dot.style.background = COLOUR_OF[run.outcome];
  dot.title = run.outcome;
  const rate = run.reports[0]?.decode_tokens_per_s;
  const facts = [
    run.outcome === "done" ? `${count(run.num_tokens)} tok` : (run.error ?? run.outcome),
    run.reports.length === 1 && rate ? `${rate.toFixed(1)} tok/s` : run.num_items > 1 ? `${run.num_items} items` : "",
    `${run.seconds.toFixed(1)} s`,
  ];
  const at = make("span", "rm-dim", new Date(run.at * 1000).toLocaleTimeString([], { hour12: false }));
  line.append(dot, make("span", "rm-grow", run.name), at);
  const detail = make("div", "rm-dim", facts.filter(Boolean).join(" \u00b7 "));
  detail.style.paddingLeft = "15px";
  summary.append(line, detail);
  row.append(summary);
  row.addEventListener("toggle", () => {
    if (row.open && !row.querySelector("pre")) {
      const { reports, ...facts } = run;
      row.append(make("pre", "", JSON.stringify(reports.length ? (reports.length === 1 ? reports[0] : reports) : facts, null, 1)));
    }
  });
  return row;
}
