// Resident LLM in the browser: live text on Generate Text, and the monitor in the sidebar.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { advancedOf, fold } from "./fold.mjs";
import { MonitorData, MonitorPanel, Poller } from "./monitor.mjs";
import { REVIEW, addReview, showReview } from "./review.mjs";
import { StreamText, StreamView } from "./stream.mjs";
import { takeTexts } from "./travel.mjs";
import { Words } from "./words.mjs";

const NODE = "ResidentGenerate";
const STORE = "resident-llm.texts";
const KEPT_TEXTS = 200;
const STORED_TEXTS = 24;
const STORED_CHARACTERS = 20_000;

const views = new WeakMap(); // node -> StreamView
const texts = new Map(); // "workflow id/execution id" -> StreamText, in the order of last use
const dirty = new Set(); // keys to draw in the next frame

const rootGraph = () => app.rootGraph ?? app.graph?.rootGraph ?? app.graph;

/** The node of an execution id, which inside subgraphs is "12:5"; null if it is not in this workflow. */
function nodeOf(executionId, type = NODE) {
  let graph = rootGraph();
  let node = null;
  for (const part of String(executionId).split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part)) ?? null;
    graph = node?.subgraph;
  }
  return node?.comfyClass === type ? node : null;
}

function textOf(workflow, executionId) {
  const key = `${workflow ?? rootGraph()?.id}/${executionId}`;
  const text = texts.get(key) ?? new StreamText();
  texts.delete(key);
  texts.set(key, text);
  if (texts.size > KEPT_TEXTS) texts.delete(texts.keys().next().value);
  return { key, text };
}

/** The workflow of a prompt, as its stream told it; null where it had none, as of a node that did not run. */
function workflowOf(promptId) {
  for (const [key, text] of texts) if (text.promptId === promptId) return key.slice(0, key.indexOf("/"));
  return null;
}

/** Draw a text soon, wherever its node is in the workflow on screen. */
function draw(key) {
  if (!dirty.size) requestAnimationFrame(drawAll);
  dirty.add(key);
}

function drawAll() {
  const here = String(rootGraph()?.id);
  const keys = [...dirty];
  dirty.clear(); // first: a fault of the page in the midst of this must not end all drawing
  for (const key of keys) {
    const at = key.indexOf("/");
    if (key.slice(0, at) !== here) continue;
    views.get(nodeOf(key.slice(at + 1)))?.show(texts.get(key));
  }
}

/** Keep the last texts for a reload of this page; never in the workflow. */
function store() {
  const kept = [...texts].filter(([, text]) => !text.isRunning && text.answers.length < STORED_CHARACTERS);
  try {
    sessionStorage.setItem(STORE, JSON.stringify(kept.slice(-STORED_TEXTS)));
  } catch (error) {
    console.warn("Resident LLM: the texts are not kept for a reload:", error);
  }
}

function restore() {
  try {
    for (const [key, saved] of JSON.parse(sessionStorage.getItem(STORE) ?? "[]")) texts.set(key, new StreamText(saved));
  } catch (error) {
    console.warn("Resident LLM: the texts kept for a reload cannot be read:", error);
  }
}

/** End what a prompt - or, with null, any prompt - left running, with a last status. */
function endRun(promptId, status) {
  for (const [key, text] of texts) {
    if (text.isRunning && (promptId === null || text.promptId === promptId)) {
      text.stop(status);
      draw(key);
    }
  }
}

function listen() {
  api.addEventListener("resident.stream", ({ detail }) => {
    const { key, text } = textOf(detail.workflow, detail.node);
    text.take(detail);
    draw(key);
  });
  api.addEventListener("executed", ({ detail }) => {
    const id = detail.display_node ?? detail.node;
    const workflow = workflowOf(detail.prompt_id); // another one than that on screen may run, with a node of this id
    const isHere = workflow === null || workflow === String(rootGraph()?.id);
    const reviewed = isHere && nodeOf(id, REVIEW);
    if (reviewed) showReview(reviewed, detail.output);
    const isOurs = isHere ? nodeOf(id) : texts.has(`${workflow}/${id}`);
    if (!detail.output?.text || !detail.output.report || !isOurs) return;
    const { key, text } = textOf(workflow, id);
    text.finish(detail.output, detail.prompt_id);
    draw(key);
    store();
  });
  api.addEventListener("execution_interrupted", ({ detail }) => endRun(detail.prompt_id, "interrupted"));
  api.addEventListener("execution_error", ({ detail }) =>
    endRun(detail.prompt_id, `failed: ${String(detail.exception_message).trim()}`),
  );
  api.addEventListener("status", ({ detail }) => {
    // A server that was restarted in the middle of a run knows nothing of it any more.
    if (detail?.exec_info?.queue_remaining === 0) endRun(null, "ended without an answer");
  });
  api.addEventListener("resident.notice", async ({ detail }) => {
    await words.load();
    const text = words.notice(detail);
    app.extensionManager?.toast?.add({ severity: "info", summary: "Resident LLM", detail: text, life: 6000 });
  });
  // A status that stands still says for how long.
  setInterval(() => {
    for (const [key, text] of texts) if (text.isRunning) draw(key);
  }, 1000);
}

const words = new Words(
  async () => (await api.fetchApi("/i18n")).json(),
  () => app.extensionManager?.setting?.get("Comfy.Locale") ?? "en",
);
const advanced = new Map(); // node type -> its advanced settings

app.registerExtension({
  name: "resident-llm.nodes",

  init: () => words.load(),

  beforeRegisterNodeDef(_type, definition) {
    if (!definition.name.startsWith("Resident")) return undefined;
    advanced.set(definition.name, advancedOf(definition));
    // At once where the texts are there: what the page does next does not wait for all extensions.
    const loading = words.load();
    return loading ? loading.then(() => words.translate(definition)) : words.translate(definition);
  },

  nodeCreated(node) {
    const settings = advanced.get(node.comfyClass);
    if (!settings) return;
    words.label(node);
    const showsAll = app.extensionManager?.setting?.get("Comfy.Node.AlwaysShowAdvancedWidgets");
    if (settings.size && !showsAll) fold(node, settings, (key) => words.say(key));
  },
});

app.registerExtension({
  name: "resident-llm.stream",

  setup() {
    restore();
    listen();
  },

  nodeCreated(node) {
    if (node.comfyClass === REVIEW) addReview(node);
    if (node.comfyClass !== NODE) return;
    const view = new StreamView();
    views.set(node, view);
    const widget = node.addDOMWidget("stream", "RESIDENT_STREAM", view.element, {
      serialize: false,
      hideOnZoom: false,
      getMinHeight: () => 140,
      getValue: () => "",
      setValue: () => {},
    });
    widget.serialize = false;
    node.setSize([Math.max(node.size[0], 400), Math.max(node.size[1], 420)]);
  },

  afterConfigureGraph() {
    for (const [id, answers] of takeTexts(rootGraph())) {
      const { text } = textOf(null, id);
      if (!text.isRunning) text.recall(answers);
    }
    for (const key of texts.keys()) draw(key);
  },
});

const TAB = "resident-llm-monitor";
const ICON = "pi pi-microchip-ai";
const LABEL = "LLM";
const ROUTES = "/resident/v1";

const data = new MonitorData();
let panel = null; // while the sidebar shows it

const poller = new Poller(async () => {
  try {
    const reply = await api.fetchApi(`${ROUTES}/monitor?${data.query}`);
    if (!reply.ok) return panel?.say(`The server does not tell the state (${reply.status}).`);
    data.take(await reply.json());
    showBadge();
    panel?.render();
  } catch (error) {
    panel?.say(`The server does not answer: ${error.message}`);
  }
});

/** Do what a button says; a sentence comes back. */
async function act(route, body) {
  try {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const reply = await api.fetchApi(`${ROUTES}/${route}`, options);
    const { done, error } = await reply.json();
    return done ?? error;
  } catch (error) {
    return `The server does not answer: ${error.message}`;
  } finally {
    poller.now();
  }
}

/**
 * How full the fullest device is, at the tab. Texts in the page's store are drawn anew when they change, a function is asked
 * once. A tab with a label says it there. Without one it has a badge, which would cover the icon: so the icon makes way, by
 * a class of the page's own.
 */
function showBadge() {
  const em = app.extensionManager;
  const tabs = em.getSidebarTabs?.() ?? em.sidebarTab?.sidebarTabs ?? [];
  const tab = tabs.find((one) => one.id === TAB);
  if (!tab) return;
  const share = data.fullest === null ? null : `${data.fullest}%`;
  const isSmall = em.setting?.get("Comfy.Sidebar.Size") === "small";
  tab.label = share && !isSmall ? `${LABEL} ${share}` : LABEL;
  tab.iconBadge = isSmall ? share : null;
  tab.icon = tab.iconBadge ? `${ICON} mt-3` : ICON;
}

app.registerExtension({
  name: "resident-llm.monitor",

  setup() {
    const em = app.extensionManager;
    const register = em.sidebarTab?.registerSidebarTab ?? em.registerSidebarTab;
    register.call(em.sidebarTab ?? em, {
      id: TAB,
      icon: ICON,
      iconBadge: "",
      title: LABEL,
      label: LABEL,
      tooltip: words.say("monitor"),
      type: "custom",
      render(element) {
        panel = new MonitorPanel(data, act);
        element.style.height = "100%";
        element.replaceChildren(panel.element);
        panel.render();
        poller.open();
      },
      destroy() {
        panel = null;
        poller.close();
      },
    });
    api.addEventListener("status", ({ detail }) => {
      const left = detail?.exec_info?.queue_remaining;
      if (left !== undefined) poller.setRunning(left > 0);
    });
    api.addEventListener("execution_start", () => poller.setRunning(true));
    for (const end of ["execution_success", "execution_error", "execution_interrupted"]) {
      api.addEventListener(end, () => poller.after(250));
    }
    poller.now(); // for the badge
  },
});
