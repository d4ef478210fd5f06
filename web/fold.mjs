// Settings that few need are folded away behind a button, until one of them is in use. The classic renderer leaves this
// to extensions; in Nodes 2.0 newer pages do it themselves, with a button of their own.

const OF_THE_PAGE = new Set(["edit_of"]); // filled in by the page, not by people

/** The settings that a node type's definition calls advanced, with their defaults. */
export function advancedOf(definition) {
  const specs = Object.entries({ ...definition.input?.required, ...definition.input?.optional });
  return new Map(specs.filter(([, spec]) => spec[1]?.advanced).map(([name, spec]) => [name, spec[1].default]));
}

function isInUse(node, settings) {
  const isWired = (name) => node.inputs?.some((input) => input.widget?.name === name && input.link != null);
  return node.widgets.some(
    ({ name, value }) => settings.has(name) && (value !== settings.get(name) || isWired(name)),
  );
}

/**
 * The classic renderer (1.32 to 1.58) lays out what it does not draw: give a folded widget no height, which is -4 for what
 * it adds, and its socket a place where no link can be dropped.
 */
function leaveNoRoom(node, widget) {
  let { computeSize, y } = widget;
  const as = { configurable: true, enumerable: true };
  Object.defineProperties(widget, {
    computeSize: {
      ...as,
      get: () => (node.showAdvanced ? computeSize : () => [0, -4]),
      set: (other) => (computeSize = other),
    },
    y: { ...as, get: () => (node.showAdvanced ? y : -10_000), set: (other) => (y = other) },
  });
}

/** Fold a new node's settings away; what a saved workflow uses of them unfolds it. */
export function fold(node, advanced, say) {
  for (const widget of node.widgets ?? []) {
    if (!advanced.has(widget.name)) continue;
    widget.advanced = true;
    leaveNoRoom(node, widget);
  }
  const settings = new Map([...advanced].filter(([name]) => !OF_THE_PAGE.has(name)));
  if (settings.size) {
    const button = node.addWidget("button", "more", null, () => toggle(node), { serialize: false, canvasOnly: true });
    button.serialize = false;
    Object.defineProperty(button, "label", { get: () => say(node.showAdvanced ? "fewer" : "more"), set() {} });
  }
  node.setSize([node.size[0], node.computeSize()[1]]);
  const before = node.onConfigure;
  node.onConfigure = function (saved) {
    before?.apply(this, arguments);
    this.showAdvanced = saved.showAdvanced ?? isInUse(this, settings);
    if (this.showAdvanced) this.setSize([this.size[0], Math.max(this.size[1], this.computeSize()[1])]);
  };
}

/** Keep the height that the user gave beyond what is needed. */
function toggle(node) {
  const spare = Math.max(0, node.size[1] - node.computeSize()[1]);
  node.toggleAdvanced();
  node.setSize([node.size[0], node.computeSize()[1] + spare]);
}
