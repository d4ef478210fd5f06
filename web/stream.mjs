// Live text of one node: what has been said (StreamText), and how it is shown (StreamView).
// Model output is untrusted: it reaches the page as text only, never as markup.

const SHOWN_CHARACTERS = 50_000; // the rest stays in the text that is copied, and on the output
const SILENCE_MS = 2_000;
const AT_BOTTOM_PX = 24;

/** What one run of a node has said so far. Lives outside the page's elements, which come and go. */
export class StreamText {
  constructor(saved = {}) {
    this.items = saved.items ?? [];
    this.status = saved.status ?? "";
    this.warnings = saved.warnings ?? [];
    this.promptId = saved.promptId ?? null;
    this.isRunning = false;
    this.heardAt = performance.now();
  }

  /** One message of the server. A message that begins a run forgets the run before. */
  take(message) {
    if (message.seq === 0 || message.prompt_id !== this.promptId) {
      this.items = [];
      this.warnings = [];
      this.promptId = message.prompt_id;
      this.isRunning = true;
    }
    this.heardAt = performance.now();
    this.status = message.status;
    while (this.items.length < message.num_items) this.items.push({ answer: "", thinking: "", isDone: false });
    const item = this.items[message.index];
    if (message.is_snapshot) item[message.channel] = message.delta;
    else item[message.channel] += message.delta;
    item.isDone = message.done;
    if (this.items.every((one) => one.isDone)) this.isRunning = false;
  }

  /** The outputs of the node, which hold whatever the stream may have missed. */
  finish(output, promptId) {
    const reports = (output.report ?? []).map(parsed);
    this.items = output.text.map((answer, index) => ({
      answer,
      thinking: output.thinking_text?.[index] ?? "",
      isDone: true,
    }));
    this.warnings = [...new Set(reports.flatMap((report) => report.warnings ?? []))];
    this.status = summary(reports);
    this.promptId = promptId;
    this.isRunning = false;
  }

  /** The answers that an image or a saved workflow brought along. */
  recall(answers) {
    this.items = answers.map((answer) => ({ answer: String(answer), thinking: "", isDone: true }));
    this.warnings = [];
    this.status = "from the image's workflow";
  }

  /** The run ended without outputs. */
  stop(status) {
    this.status = status;
    this.isRunning = false;
  }

  get answers() {
    return this.items.map((item) => item.answer).join("\n\n");
  }

  /** The status line; while nothing arrives it says for how long. */
  get line() {
    const silent = performance.now() - this.heardAt;
    return this.isRunning && silent > SILENCE_MS ? `${this.status}, ${Math.round(silent / 1000)} s` : this.status;
  }

  toJSON() {
    const { items, status, warnings, promptId } = this;
    return { items, status, warnings, promptId };
  }
}

function parsed(report) {
  try {
    return JSON.parse(report);
  } catch {
    return {};
  }
}

/** The status line of a finished run. */
function summary(reports) {
  const tokens = reports.reduce((sum, report) => sum + (report.num_output_tokens ?? 0), 0);
  const parts = [tokens === 1 ? "1 token" : `${tokens} tokens`];
  if (reports.length === 1) {
    const [report] = reports;
    if (report.decode_tokens_per_s) parts.push(`${report.decode_tokens_per_s.toFixed(1)} tok/s`);
    if (report.ttft_s) parts.push(`first after ${report.ttft_s.toFixed(2)} s`);
    if (report.finish?.reason === "length") parts.push("cut at the limit");
  } else if (reports.length) {
    parts.push(`${reports.length} items`);
  }
  return reports.length ? parts.join(" \u00b7 ") : "";
}

function element(tag, style, ...children) {
  const one = document.createElement(tag);
  Object.assign(one.style, style);
  one.append(...children);
  return one;
}

/** The element that shows one StreamText. */
export class StreamView {
  constructor() {
    this.text = null;
    this.rows = [];
    this.wasRunning = false;
    this.status = element("span", {
      flex: "1",
      overflow: "hidden",
      textOverflow: "ellipsis",
      whiteSpace: "nowrap",
    });
    this.dot = element("span", {
      width: "7px",
      height: "7px",
      borderRadius: "50%",
      flex: "none",
      background: "var(--descrip-text, #999)",
    });
    this.copy = element("button", {
      flex: "none",
      font: "inherit",
      color: "inherit",
      background: "transparent",
      border: "1px solid var(--border-color, #4e4e4e)",
      borderRadius: "4px",
      padding: "0 8px",
      lineHeight: "18px",
      cursor: "pointer",
      visibility: "hidden",
    });
    this.copy.textContent = "copy";
    this.copy.title = "Copy the answer without its thinking";
    this.copy.addEventListener("click", () => this.copyAnswers());
    const head = element(
      "div",
      {
        display: "flex",
        alignItems: "center",
        gap: "6px",
        padding: "4px 8px",
        minHeight: "20px",
        flex: "none",
        fontSize: "11px",
        color: "var(--descrip-text, #999)",
        fontVariantNumeric: "tabular-nums",
      },
      this.dot,
      this.status,
      this.copy,
    );
    this.body = element("div", {
      flex: "1",
      minHeight: "0",
      overflowY: "auto",
      overflowWrap: "anywhere",
      whiteSpace: "pre-wrap",
      padding: "2px 10px 8px",
      fontSize: "13px",
      lineHeight: "1.45",
      userSelect: "text",
      cursor: "text",
    });
    this.body.dataset.captureWheel = "true";
    this.body.tabIndex = -1;
    this.element = element(
      "div",
      {
        display: "flex",
        flexDirection: "column",
        flex: "1",
        width: "100%",
        height: "100%",
        minHeight: "140px",
        boxSizing: "border-box",
        overflow: "hidden",
        color: "var(--input-text, #ddd)",
        background: "var(--comfy-input-bg, #222)",
        borderRadius: "8px",
        textAlign: "left",
      },
      head,
      this.body,
    );
    this.element.className = "resident-stream widget-expands"; // the second is the Vue renderer's: take what height is left
    this.body.className = "resident-stream-body";
    this.status.className = "resident-stream-status";
    for (const kind of ["pointerdown", "keydown"]) {
      this.element.addEventListener(kind, (event) => event.stopPropagation());
    }
    this.body.addEventListener("wheel", (event) => {
      if (this.body.scrollHeight > this.body.clientHeight && !event.ctrlKey) event.stopPropagation();
    });
    this.render();
  }

  /** Show a text from now on. */
  show(text) {
    this.text = text;
    this.render();
  }

  /** Bring the element in step with its text. */
  render() {
    const text = this.text;
    const { scrollHeight, scrollTop, clientHeight } = this.body;
    const isAtBottom = scrollHeight - scrollTop - clientHeight < AT_BOTTOM_PX;
    const isRunning = text?.isRunning ?? false;
    this.status.textContent = text?.line || "The answer appears here.";
    this.status.title = text?.line ?? "";
    this.dot.style.background = isRunning ? "var(--p-green-500, #22c55e)" : "var(--descrip-text, #999)";
    this.dot.style.opacity = isRunning ? "1" : "0.4";
    this.copy.style.visibility = text?.answers ? "visible" : "hidden";
    const items = text?.items ?? [];
    while (this.rows.length > items.length) this.rows.pop().element.remove();
    while (this.rows.length < items.length) {
      this.rows.push(new ItemRow());
      this.body.append(this.rows.at(-1).element);
    }
    items.forEach((item, index) => this.rows[index].render(item, index, items.length));
    this.renderWarnings(text?.warnings ?? []);
    if (isAtBottom && isRunning) this.body.scrollTop = this.body.scrollHeight;
    else if (isRunning && !this.wasRunning) this.body.scrollTop = 0;
    this.wasRunning = isRunning;
  }

  renderWarnings(warnings) {
    this.warnings?.remove();
    this.warnings = null;
    if (!warnings.length) return;
    this.warnings = element("div", {
      marginTop: "8px",
      fontSize: "11px",
      color: "var(--p-amber-500, #f59e0b)",
    });
    this.warnings.textContent = warnings.join("\n");
    this.body.append(this.warnings);
  }

  /** Put the answers on the clipboard; where the page may not (plain http), select and copy the shown text. */
  async copyAnswers() {
    try {
      await navigator.clipboard.writeText(this.text.answers);
    } catch {
      getSelection().selectAllChildren(this.body);
      document.execCommand("copy");
    }
    this.copy.textContent = "copied";
    setTimeout(() => (this.copy.textContent = "copy"), 1200);
  }
}

/** One item of a list: its number, its thinking, folded away once the answer begins, and its answer. */
class ItemRow {
  constructor() {
    this.head = element("div", {
      fontSize: "11px",
      color: "var(--descrip-text, #999)",
      marginTop: "6px",
    });
    this.summary = element("summary", { cursor: "pointer" });
    this.thinking = new GrowingText();
    this.details = element(
      "details",
      {
        color: "var(--descrip-text, #999)",
        fontSize: "12px",
        borderLeft: "2px solid var(--border-color, #4e4e4e)",
        paddingLeft: "8px",
        margin: "2px 0 6px",
      },
      this.summary,
      this.thinking.node,
    );
    this.details.open = true;
    this.isFolded = false;
    this.answer = new GrowingText();
    this.element = element("div", {}, this.head, this.details, this.answer.node);
    this.element.className = "resident-stream-item";
  }

  render(item, index, total) {
    this.head.style.display = total > 1 ? "block" : "none";
    this.head.textContent = `${index + 1} of ${total}`;
    const thinking = item.thinking.trim();
    this.details.style.display = thinking ? "block" : "none";
    this.summary.textContent = item.answer.trim() || item.isDone ? "thought" : "thinking";
    if (!item.answer.trim() && !item.isDone) {
      this.isFolded = false;
      this.details.open = true;
    } else if (!this.isFolded) {
      this.isFolded = true;
      this.details.open = false;
    }
    this.thinking.set(thinking);
    this.answer.set(item.answer);
  }
}

/** A text node that appends when its text has only grown, and shows no more than the page can carry. */
class GrowingText {
  constructor() {
    this.node = document.createTextNode("");
    this.full = "";
  }

  set(full) {
    if (full === this.full) return;
    if (full.length <= SHOWN_CHARACTERS && full.startsWith(this.full)) {
      this.node.appendData(full.slice(this.full.length));
    } else if (full.length <= SHOWN_CHARACTERS) {
      this.node.data = full;
    } else {
      this.node.data = `[${full.length - SHOWN_CHARACTERS} characters before]\n${full.slice(-SHOWN_CHARACTERS)}`;
    }
    this.full = full;
  }
}
