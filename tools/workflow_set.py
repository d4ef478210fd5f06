"""The workflows that come with the pack, as compact descriptions; tools/workflows.py makes the files of them."""

from __future__ import annotations

from tools.workflow_graph import Group, Link, Node, Workflow

SMALL_MODEL = "SmolLM2-135M-Instruct"
FIRST_MODEL, LIST_FILE = "HuggingFaceTB/SmolLM2-360M-Instruct", "allowed_downloads.txt"
CHECKPOINT = "v1-5-pruned-emaonly-fp16.safetensors"
LLM_COLOR, IMAGE_COLOR, MEMORY_COLOR = "#3f789e", "#8A8", "#a1309b"

NO_MODEL = "No model in the menu? Put a model folder or a GGUF file into ComfyUI's models/LLM and refresh the page."
NO_CHECKPOINT = (
    "The image part has core nodes only. Its checkpoint goes into models/checkpoints; any Stable Diffusion 1 or SDXL "
    "checkpoint will do: pick yours in Load Checkpoint."
)
ONE_SENTENCE = (
    "You write prompts for an image model. Turn the user's idea into one vivid sentence: subject, setting, light, "
    "mood, style."
)


def note(title: str, *paragraphs: str, number: int | None = None) -> Group:
    """The first thing in a workflow: what it does and what it needs."""
    text = {"text": "\n\n".join(paragraphs)}
    return Group("", [[Node("note", "Note", text, title=title, width=340, number=number)]])


def load(name: str = "load", **values: object) -> Node:
    return Node(name, "ResidentLoadLLM", {"model": SMALL_MODEL, **values})


def sampling(name: str = "sampling", **values: object) -> Node:
    return Node(name, "ResidentSampling", {"repetition_penalty": 1.1, **values})


def generate(name: str = "generate", prompt: str | Link = "prompt", llm: str = "load", **values: object) -> Node:
    """Generate Text behind the named nodes."""
    title = values.pop("title", None)
    number = values.pop("number", None)
    wired = prompt if isinstance(prompt, Link) else Link(prompt, "prompt")
    inputs = {"llm": Link(llm, "llm"), "prompt": wired, "sampling": Link("sampling", "sampling"), **values}
    return Node(name, "ResidentGenerate", inputs, title=title, width=420, number=number)  # type: ignore[arg-type]


def image(text: Link, prefix: str, *, title: str = "Image: core nodes") -> Group:
    """From a text to a saved image, with core nodes only."""
    model = {
        "name": CHECKPOINT,
        "url": f"https://huggingface.co/Comfy-Org/stable-diffusion-v1-5-archive/resolve/main/{CHECKPOINT}",
        "directory": "checkpoints",
    }
    checkpoint = Node("checkpoint", "CheckpointLoaderSimple", {"ckpt_name": CHECKPOINT}, models=[model])
    clip, vae, unet = Link("checkpoint", "CLIP"), Link("checkpoint", "VAE"), Link("checkpoint", "MODEL")
    negative = {"clip": clip, "text": "blurry, watermark, text"}
    sampler = {
        "model": unet,
        "positive": Link("positive", "CONDITIONING"),
        "negative": Link("negative", "CONDITIONING"),
        "latent_image": Link("latent", "LATENT"),
        "seed": 1,
        "steps": 20,
        "cfg": 7.0,
        "sampler_name": "euler",
        "scheduler": "normal",
        "denoise": 1.0,
    }
    columns = [
        [
            checkpoint,
            Node("positive", "CLIPTextEncode", {"clip": clip, "text": text}, title="Positive prompt"),
            Node("negative", "CLIPTextEncode", negative, title="Negative prompt"),
            Node("latent", "EmptyLatentImage", {"width": 512, "height": 512, "batch_size": 1}),
        ],
        [
            Node("sampler", "KSampler", sampler),
            Node("decode", "VAEDecode", {"samples": Link("sampler", "LATENT"), "vae": vae}),
            Node("save", "SaveImage", {"images": Link("decode", "IMAGE"), "filename_prefix": prefix}),
        ],
    ]
    return Group(title, columns, IMAGE_COLOR)


def prompt_expansion() -> Workflow:
    prompt = Node("prompt", "ResidentPrompt", {"system": ONE_SENTENCE, "user": "a lighthouse in a storm"}, number=2)
    columns = [
        [
            Node("load", "ResidentLoadLLM", {"model": SMALL_MODEL}, number=1),
            Node("sampling", "ResidentSampling", {"repetition_penalty": 1.1}, number=3),
        ],
        [prompt],
        [generate(max_tokens=60, seed=6, number=4)],
    ]
    about = note(
        "Prompt expansion",
        "Pick a model on Load LLM, write an idea into `user`, and press Run: the text grows on Generate Text.",
        "The model is loaded on the first run and stays loaded. Wire `text` into CLIP Text Encode, or anything else "
        "that takes a text.",
        NO_MODEL,
        number=5,
    )
    return Workflow("01-prompt-expansion", [about, Group("An idea becomes a prompt", columns, LLM_COLOR)])


def prompt_to_image() -> Workflow:
    about = note(
        "From an idea to an image",
        "Write an idea into `user` and press Run. The language model writes the prompt, Review Text shows it, and "
        "core nodes make the image of it.",
        "Not content with the prompt? Press edit on Review Text, change it, and run again: only the image is made "
        "anew.",
        "The saved image carries the text: drop it on the canvas and Generate Text shows it again.",
        NO_MODEL,
        NO_CHECKPOINT,
    )
    prompt = Node("prompt", "ResidentPrompt", {"system": ONE_SENTENCE, "user": "a lighthouse in a storm"})
    review = Node("review", "ResidentReview", {"text": Link("generate", "text")}, width=420)
    columns = [[load(), sampling()], [prompt], [generate(max_tokens=70, seed=42), review]]
    groups = [about, Group("Prompt: language model", columns, LLM_COLOR)]
    return Workflow("02-prompt-to-image", [*groups, image(Link("review", "text"), "resident/prompt")])


def many_ideas() -> Workflow:
    about = note(
        "Many ideas, one batch",
        "Write one idea per line. All of them are answered as one batch, and each makes an image of its own.",
        "One batch costs far less than its prompts one by one, where the engine can compute them together.",
        NO_MODEL,
        NO_CHECKPOINT,
    )
    ideas = "a lighthouse in a storm\na fox in a library\na market on the moon"
    prompt = Node("prompt", "ResidentPrompt", {"system": ONE_SENTENCE, "user": Link("ideas", "lines")})
    columns = [
        [Node("ideas", "ResidentLines", {"text": ideas}, title="Ideas, one per line"), load(), sampling()],
        [prompt],
        [generate(max_tokens=60, seed=7), Node("preview", "PreviewAny", {"source": Link("generate", "text")})],
    ]
    groups = [about, Group("Prompts: one batch", columns, LLM_COLOR)]
    return Workflow("03-many-ideas", [*groups, image(Link("generate", "text"), "resident/idea")])


def thinking() -> Workflow:
    about = note(
        "A thinking model with a budget",
        "For models that think before they answer (Qwen3, DeepSeek-R1 ...). `thinking_budget` is the most tokens of "
        "thinking: then the block is closed and the answer begins.",
        "`text` is the answer alone, `thinking_text` what was thought. If max_tokens comes while the model still "
        "thinks, `on_cut_thinking` says what to do; here the text is then empty instead of half a thought.",
        "A model that cannot think answers at once.",
        NO_MODEL,
    )
    prompt = Node(
        "prompt",
        "ResidentPrompt",
        {
            "system": "You plan pictures. Decide on camera, light and composition, then write one prompt.",
            "user": "the last train of the year, seen from the platform",
            "thinking": "on",
        },
    )
    text, thought = Link("generate", "text"), Link("generate", "thinking_text")
    columns = [
        [load(), sampling(temperature=0.6, repetition_penalty=1.0)],
        [prompt],
        [generate(max_tokens=1024, seed=11, thinking_budget=512, on_cut_thinking="empty")],
        [
            Node("answer", "PreviewAny", {"source": text}, title="The answer"),
            Node("thought", "PreviewAny", {"source": thought}, title="What it thought"),
        ],
    ]
    return Workflow("04-thinking-budget", [about, Group("Think, then answer", columns, LLM_COLOR)])


def three_engines() -> Workflow:
    about = note(
        "One graph, three engines",
        "The same prompt, the same sampling; only the loader is another one. Wire `llm` of the loader that you want "
        "into Generate Text: nothing else changes.",
        "1: transformers, for a folder of safetensors. 2: llama.cpp, for a GGUF file (needs the package xllamacpp). "
        "3: a server that already runs - vLLM, llama.cpp, Ollama, LM Studio - by the name of a profile.",
        "A loader costs nothing until text is generated with it.",
        NO_MODEL,
    )
    gguf = {"model": f"{SMALL_MODEL}.Q4_1.gguf", "engine": "llamacpp"}
    loaders = [
        load("transformers", engine="transformers"),
        Node("llamacpp", "ResidentLoadLLM", gguf),
        Node("server", "ResidentConnectServer", {"profile": "local-vllm"}),
    ]
    loaders = [
        Node(one.name, one.type, one.values, title=title)
        for one, title in zip(loaders, ("1: transformers", "2: llama.cpp", "3: a server"), strict=True)
    ]
    prompt = Node("prompt", "ResidentPrompt", {"system": ONE_SENTENCE, "user": "a lighthouse in a storm"})
    rest = [[prompt], [sampling(), generate(llm="transformers", max_tokens=60, seed=42)]]
    return Workflow(
        "05-three-engines",
        [about, Group("Loaders: wire one of them", [loaders], MEMORY_COLOR), Group("The same graph", rest, LLM_COLOR)],
    )


def sharing_one_card() -> Workflow:
    about = note(
        "One card for both",
        "The language model writes a prompt and stays loaded. When the image model needs the memory, it makes room by "
        "itself; when it is asked again, it comes back from system memory.",
        "LLM Monitor reads the state once the image is there, a second text brings the language model back, and the "
        "timeline of all of it is saved as a picture.",
        "Best seen with models that do not fit the card together. On one that holds both nobody has to leave.",
        "Free LLM Memory at the end is for programs outside ComfyUI. If none needs the card, take it away: inside, a "
        "model steps aside by itself.",
        NO_MODEL,
        NO_CHECKPOINT,
    )
    prompt = Node("prompt", "ResidentPrompt", {"system": ONE_SENTENCE, "user": "a lighthouse in a storm"})
    first = [[load(host_copy_gb=-1), sampling()], [prompt], [generate(max_tokens=60, seed=42)]]
    state = {
        "system": "You read reports about the memory of a computer. Say in two plain sentences what they tell.",
        "user": Link("after_image", "state"),
    }
    second = [
        [
            Node("after_image", "ResidentMonitor", {"value": Link("decode", "IMAGE")}, title="After the image"),
            Node("report_prompt", "ResidentPrompt", state),
        ],
        [
            generate("report", "report_prompt", max_tokens=80, seed=43),
            Node("at_end", "ResidentMonitor", {"value": Link("report", "text")}, title="At the end"),
            Node(
                "save_timeline",
                "SaveImage",
                {"images": Link("at_end", "timeline"), "filename_prefix": "resident/timeline"},
                title="Save the timeline",
            ),
        ],
        [
            Node("free", "ResidentFree", {"value": Link("at_end", "timeline")}, title="For others: free the card"),
            Node("freed", "PreviewAny", {"source": Link("free", "freed")}, title="What was freed"),
        ],
    ]
    groups = [about, Group("1: the language model writes", first, LLM_COLOR)]
    groups += [image(Link("generate", "text"), "resident/shared", title="2: core nodes make the image")]
    return Workflow("06-sharing-one-card", [*groups, Group("3: it comes back", second, MEMORY_COLOR)])


def server_that_sleeps() -> Workflow:
    about = note(
        "A vLLM server that sleeps while images are made",
        "Start vLLM on this machine with sleep mode:\n"
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-sleep-mode --gpu-memory-utilization 0.5",
        "With `when_idle` on sleep the server frees its VRAM as soon as the image model needs it, and wakes before the "
        "next text. A server on another machine is left as it is.",
        "Other addresses, keys: python -m runtime profiles add. They never enter the graph.",
        NO_CHECKPOINT,
    )
    server = Node("load", "ResidentConnectServer", {"profile": "local-vllm", "when_idle": "sleep"})
    prompt = Node("prompt", "ResidentPrompt", {"system": ONE_SENTENCE, "user": "a lighthouse in a storm"})
    columns = [[server, sampling()], [prompt], [generate(max_tokens=80, seed=42)]]
    groups = [about, Group("Prompt: vLLM server", columns, LLM_COLOR)]
    return Workflow("07-server-that-sleeps", [*groups, image(Link("generate", "text"), "resident/server")])


def awq_on_exllamav2() -> Workflow:
    about = note(
        "AWQ on ExLlamaV2 with a Q4 cache",
        "A 4-bit AWQ model on ExLlamaV2: it is repacked once, without loss, into a cache folder. The KV cache has 4 "
        "bits too, which saves memory and not time.",
        "Needs an NVIDIA GPU and the package exllamav2, built for your torch and CUDA; Load LLM (ExLlamaV2) says what "
        "is missing. Put the model's folder into models/LLM and pick it.",
        "Wire `text` into CLIP Text Encode to go on to an image.",
    )
    loader = {"model": "Qwen2.5-7B-Instruct-AWQ", "context_len": 16384, "kv_cache": "q4"}
    prompt = Node("prompt", "ResidentPrompt", {"system": ONE_SENTENCE, "user": "a lighthouse in a storm"})
    columns = [
        [Node("load", "ResidentLoadExLlamaV2", loader), sampling()],
        [prompt],
        [
            generate(max_tokens=200, seed=42),
            Node("report", "PreviewAny", {"source": Link("generate", "report")}, title="Report: speed and memory"),
        ],
    ]
    return Workflow("08-awq-exllamav2-q4-cache", [about, Group("AWQ, Q4 cache", columns, LLM_COLOR)])


def benchmark() -> Workflow:
    about = note(
        "A benchmark with its plot",
        "LLM Benchmark measures prompts of each length, several times, after a warm-up: time to the first token, "
        "tokens per second, memory, and how near the hardware's limit that comes.",
        "Table and plot are shown and saved; all figures and the environment are in output/resident_llm_bench.",
        "Change `contexts`, `batch_sizes` and `kv_caches` for a sweep: each row of the table is one combination.",
        NO_MODEL,
    )
    plan = {"llm": Link("load", "llm"), "contexts": "64, 256", "output_tokens": 16, "repeats": 2}
    columns = [
        [load()],
        [Node("benchmark", "ResidentBenchmark", plan, width=400)],
        [
            Node("table", "PreviewAny", {"source": Link("benchmark", "table")}, title="Table", width=460),
            Node(
                "save",
                "SaveImage",
                {"images": Link("benchmark", "plot"), "filename_prefix": "resident/benchmark"},
                title="Save the plot",
                width=460,
            ),
        ],
    ]
    return Workflow("09-benchmark", [about, Group("Measure", columns, MEMORY_COLOR)])


def translate_and_rewrite() -> Workflow:
    about = note(
        "Translate, then rewrite",
        "Write in any language that the model knows. The first preset translates into English, the second makes the "
        "prompt clearer and richer without changing what it shows.",
        "Both run on the same loaded model. Small models translate badly: take one with 4B or more.",
        NO_MODEL,
    )
    first = {"user": "un zorro lee en una vieja biblioteca mientras llueve", "preset": "translate-english"}
    second = {"user": Link("translate", "text"), "preset": "rewrite"}
    columns = [
        [load(), sampling(temperature=0.3)],
        [
            Node("prompt", "ResidentPrompt", first, title="Translate"),
            generate("translate", max_tokens=80, seed=1, title="Translation"),
        ],
        [
            Node("rewrite_prompt", "ResidentPrompt", second, title="Rewrite"),
            generate("rewrite", "rewrite_prompt", max_tokens=120, seed=2, title="Rewritten"),
        ],
    ]
    return Workflow("10-translate-and-rewrite", [about, Group("Translate, rewrite", columns, LLM_COLOR)])


def several_turns() -> Workflow:
    about = note(
        "Refine in several turns",
        "Each LLM Prompt goes on from the one before: wire the earlier prompt into `history` and its answer into "
        "`history_answer`. What the model has read already is found in its KV cache; the report counts it.",
        "Change the last wish and run again: only the last turn is answered anew.",
        NO_MODEL,
    )
    turns = ["a lighthouse in a storm", "Make it winter, seen from a small boat.", "Shorter. At most twenty words."]
    columns: list[list[Node]] = [[load(), sampling()]]
    for number, wish in enumerate(turns, 1):
        values: dict[str, object] = {"user": wish}
        if number == 1:
            values["system"] = ONE_SENTENCE
        else:
            values["history"] = Link(f"prompt{number - 1}", "prompt")
            values["history_answer"] = Link(f"answer{number - 1}", "text")
        turn = Node(f"prompt{number}", "ResidentPrompt", values, title=f"Turn {number}")
        columns.append([turn, generate(f"answer{number}", f"prompt{number}", max_tokens=60, seed=number)])
    return Workflow("11-several-turns", [about, Group("Three turns", columns, LLM_COLOR)])


def get_a_model() -> Workflow:
    about = note(
        "Get a model, then use it",
        "Download LLM fetches a model into models/LLM and hands it on: no Load LLM is needed. Here it is "
        f"{FIRST_MODEL}, about 0.7 GB. What is there already is not fetched again.",
        "A workflow can fetch only what is on your own list, a text file that no workflow and no page can write:\n"
        f"ComfyUI/user/__resident_llm/{LIST_FILE}",
        f"Write this line into it, then refresh the page (R), and press Run:\n{FIRST_MODEL}",
        f"In a shell no list is needed: python -m runtime download {FIRST_MODEL}",
        "`model` is the name under which Load LLM offers it from then on.",
    )
    prompt = Node("prompt", "ResidentPrompt", {"system": ONE_SENTENCE, "user": "a lighthouse in a storm"})
    columns = [
        [
            Node("download", "ResidentDownload", {"repo": FIRST_MODEL}),
            Node("name", "PreviewAny", {"source": Link("download", "model")}, title="Its name in Load LLM"),
            sampling(),
        ],
        [prompt],
        [generate(llm="download", max_tokens=60, seed=42)],
    ]
    return Workflow("12-get-a-model", [about, Group("Fetch once, then write", columns, LLM_COLOR)])


WORKFLOWS = [
    prompt_expansion(),
    prompt_to_image(),
    many_ideas(),
    thinking(),
    three_engines(),
    sharing_one_card(),
    server_that_sleeps(),
    awq_on_exllamav2(),
    benchmark(),
    translate_and_rewrite(),
    several_turns(),
    get_a_model(),
]
