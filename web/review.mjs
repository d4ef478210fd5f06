// Review Text in the page: the text that came in, and a button that begins an edit of it.
// Text of models is untrusted: it reaches the page as text only, never as markup.

export const REVIEW = "ResidentReview";

const views = new WeakMap(); // node -> element

function styled(tag, style, text = "") {
  const one = document.createElement(tag);
  Object.assign(one.style, style);
  one.textContent = text;
  return one;
}

const widgetOf = (node, name) => node.widgets?.find((widget) => widget.name === name);

function set(node, name, value) {
  const widget = widgetOf(node, name);
  if (!widget) return;
  widget.value = value;
  widget.callback?.(value);
  node.graph?.setDirtyCanvas?.(true, true);
}

/** What became of a text on its way through. */
function verdict(text, passedOn, edited) {
  if (text !== passedOn) return "passed on as edited";
  return edited && edited !== text ? "passed on as it came: the edit is of another text" : "passed on as it came";
}

function row(node, text, passedOn, mark) {
  const button = styled("button", {
    font: "inherit",
    color: "inherit",
    background: "transparent",
    border: "1px solid var(--border-color, #4e4e4e)",
    borderRadius: "4px",
    padding: "0 8px",
    cursor: "pointer",
    flex: "none",
  });
  button.textContent = "edit";
  button.title = "Copy this text into `edited`";
  button.addEventListener("click", () => {
    set(node, "edit_of", mark);
    set(node, "edited", text);
  });
  const head = styled("div", {
    display: "flex",
    justifyContent: "space-between",
    gap: "6px",
    fontSize: "11px",
    color: "var(--descrip-text, #999)",
    padding: "4px 0",
  });
  head.append(styled("span", {}, verdict(text, passedOn, widgetOf(node, "edited")?.value)), button);
  const body = styled("div", { whiteSpace: "pre-wrap", overflowWrap: "anywhere", userSelect: "text" }, text);
  body.className = "resident-review-text";
  const one = styled("div", {});
  one.append(head, body);
  return one;
}

/** Show the outputs of one run. */
export function showReview(node, output) {
  const element = views.get(node);
  if (!element || !output?.text || !output.mark) return;
  element.replaceChildren(
    ...output.text.map((text, index) => row(node, text, output.passed_on?.[index] ?? text, output.mark[index])),
  );
  node.residentShown = output.text.length === 1 ? output.mark[0] : "";
}

/** Put the display on a new node. An edit that is typed belongs to the text on show; an emptied one to none. */
export function addReview(node) {
  const element = styled(
    "div",
    {
      flex: "1",
      width: "100%",
      height: "100%",
      minHeight: "80px",
      boxSizing: "border-box",
      overflowY: "auto",
      padding: "4px 10px 8px",
      fontSize: "13px",
      lineHeight: "1.45",
      textAlign: "left",
      color: "var(--input-text, #ddd)",
      background: "var(--comfy-input-bg, #222)",
      borderRadius: "8px",
    },
    "The text appears here.",
  );
  element.className = "resident-review widget-expands";
  element.dataset.captureWheel = "true";
  for (const kind of ["pointerdown", "keydown"]) element.addEventListener(kind, (event) => event.stopPropagation());
  views.set(node, element);
  const widget = node.addDOMWidget("review", "RESIDENT_REVIEW", element, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => 90,
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false;
  const edited = widgetOf(node, "edited");
  const before = edited.callback;
  edited.callback = function (value, ...rest) {
    const of = widgetOf(node, "edit_of");
    if (!value) of.value = "";
    else if (!of.value && node.residentShown) of.value = node.residentShown;
    return before?.call(this, value, ...rest);
  };
  node.setSize([Math.max(node.size[0], 360), Math.max(node.size[1], 380)]);
}
