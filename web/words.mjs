// The page's language: texts from the pack's own locale files, which ComfyUI serves at /i18n.

/** What the page says by itself, in English; locales/en has the same. */
const ENGLISH = {
  more: "more settings",
  fewer: "fewer settings",
  monitor: "LLM Monitor",
};

export class Words {
  /** ask: fetches the texts of all languages; language: the page's language now. */
  constructor(ask, language) {
    this.ask = ask;
    this.language = language;
    this.all = null;
    this.loading = null;
  }

  /** A promise while texts come, or nothing if none are needed; a page in English needs none. */
  load() {
    if (this.all || this.language() === "en") return undefined;
    this.loading ??= this.ask().then(
      (all) => {
        this.all = all;
      },
      (error) => console.warn("Resident LLM: the texts of other languages did not come:", error),
    );
    return this.loading;
  }

  get texts() {
    return this.all?.[this.language()] ?? {};
  }

  say(key) {
    return this.texts.residentLlm?.[key] ?? ENGLISH[key];
  }

  /** What the server tells, its values filled in; in English it comes ready. */
  notice({ kind, values, text }) {
    const words = this.texts.residentLlm?.notices?.[kind];
    return words ? words.replace(/\{(\w+)\}/g, (whole, name) => values?.[name] ?? whole) : text;
  }

  /**
   * Put a node type's texts into its definition. Pages that load languages late (1.32) lose the texts of custom nodes
   * by then and show those of the definition; to newer ones these say nothing new.
   */
  translate(definition) {
    const texts = this.texts.nodeDefs?.[definition.name];
    if (!texts) return;
    definition.display_name = texts.display_name ?? definition.display_name;
    definition.description = texts.description ?? definition.description;
    for (const specs of [definition.input?.required, definition.input?.optional]) {
      for (const [name, spec] of Object.entries(specs ?? {})) {
        const tooltip = texts.inputs?.[name]?.tooltip;
        if (tooltip) spec[1] = { ...spec[1], tooltip };
      }
    }
    definition.output_tooltips = definition.output_tooltips?.map((own, slot) => texts.outputs?.[slot]?.tooltip ?? own);
  }

  /** Name the inputs, widgets and outputs of a new node. */
  label(node) {
    const texts = this.texts.nodeDefs?.[node.comfyClass];
    if (!texts) return;
    for (const widget of node.widgets ?? []) widget.label = texts.inputs?.[widget.name]?.name ?? widget.label;
    for (const input of node.inputs ?? []) input.localized_name = texts.inputs?.[input.name]?.name ?? input.localized_name;
    node.outputs?.forEach((output, slot) => {
      output.localized_name = texts.outputs?.[slot]?.name ?? output.localized_name;
    });
  }
}
