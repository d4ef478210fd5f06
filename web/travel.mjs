// Answers that came with a workflow: an image of ComfyUI carries its workflow, and that the texts which made it.

const PROPERTY = "resident_text"; // of a node: {execution id: answers}

/** (execution id, answers) of all nodes of a graph; they are taken out, so that no saved workflow keeps an old text. */
export function takeTexts(graph) {
  const found = [];
  const seen = new Set();
  const visit = (one) => {
    if (!one || seen.has(one)) return;
    seen.add(one);
    for (const node of one.nodes ?? one._nodes ?? []) {
      const texts = node.properties?.[PROPERTY];
      if (texts !== undefined) {
        delete node.properties[PROPERTY];
        for (const [id, answers] of Object.entries(texts ?? {})) if (Array.isArray(answers)) found.push([id, answers]);
      }
      visit(node.subgraph);
    }
  };
  visit(graph);
  return found;
}
