"""Draws docs/T5-Parallelism.pdf: eight strategies, who holds what, what travels when, and what a model predicts.

    python docs/make_slides.py [output.pdf]

Lengths on a slide are in units of 6 points: a slide is 160 wide and 90 high. Every prediction is computed from the very
formula that the slide shows. A text that leaves the page or touches another one is an error, not a slide.
"""

import sys
import textwrap
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, MUTED, LINE, PAPER, WIRE = "#1f2a37", "#5f6b7a", "#d3dae2", "#f4f6f8", "#c2364b"
PARAMETERS, GRADIENTS, OPTIMIZER, ENCODER, DECODER = "#2a8c82", "#e3ae3d", "#76609f", "#2f6db5", "#dd7440"
EMPTY, FORWARD, BACKWARD, GATHERED, MONO = "#e9edf1", "#d9dfe6", "#aab4c0", "#9fcfc9", "DejaVu Sans Mono"
mpl.rcParams.update({"font.family": "DejaVu Sans", "pdf.fonttype": 42, "hatch.linewidth": 0.5, "hatch.color": LINE})
STATES = [("parameters", PARAMETERS), ("gradients", GRADIENTS), ("optimizer states", OPTIMIZER)]

# ---- the cost model ------------------------------------------------------------------------------------------------

L, H, HEADS, FFN, V, POSITIONS = 24, 1024, 16, 2816, 32128, 512  # T5-Large: layers of a stack, sizes, padded vocabulary
S, D, BATCH, N = 512, 128, 16, 2  # tokens of encoder and decoder, samples an iteration, GPUs (hybrid: N by N)
REUSE = 10**9  # parameters; DeepSpeed's stage3_max_reuse_distance: what is needed again sooner stays gathered
Span = tuple[float, float]  # a stretch of the model from 0 to 1: encoder, embedding, decoder; or a point


def parameters(tp: int = 1, encoder: bool = True, decoder: bool = True) -> int:
    """Parameters on one GPU of a tensor-parallel group of `tp`; layer norms, positions and row biases are not split."""
    encoder_layer = (4 * H * H + 2 * H * FFN + 3 * H + FFN) // tp + 6 * H
    decoder_layer = (8 * H * H + 2 * H * FFN + 6 * H + FFN) // tp + 9 * H
    count = V * H // tp + POSITIONS * H + encoder * (L * encoder_layer + 2 * H)
    return count + decoder * (L * decoder_layer + 2 * H + V // tp)


def forward_macs() -> tuple[int, int]:
    """Multiply-accumulates of one sample's forward pass: (encoder, decoder with its cross-attention and LM head)."""
    encoder = L * (4 * H * H * S + 2 * H * S * S + 2 * FFN * H * S)
    cross = 2 * H * H * D + 2 * H * H * S + 2 * H * D * S
    return encoder, L * (4 * H * H * D + 2 * H * D * D + cross + 2 * FFN * H * D) + V * H * D


def activations(tp: int = 1) -> Span:
    """Bytes that one sample keeps for backward: (encoder, decoder). arXiv 2205.05198, redone for FFN != 4H."""
    encoder = 10 * S * H + (8 * S * H + 4 * S * FFN + 5 * HEADS * S * S) / tp
    decoder = 15 * D * H + (12 * D * H + 4 * D * FFN + 5 * HEADS * D * D + 4 * S * H + 5 * HEADS * D * S) / tp
    return L * encoder, L * decoder + 10 * D * V / tp


P, ENCODER_END = parameters(), (parameters(1, True, False) - (V + POSITIONS) * H) / parameters()
STAGES: list[Span] = [(0, parameters(1, True, False) / P), (ENCODER_END, 1)]  # the tied embedding belongs to both
FORMULAS = {  # bytes on the fullest GPU; bytes that a GPU sends in an iteration
    "DDP": ("18*P + A", "8*P*(N-1)/N"),
    "ZeRO-1": ("(4 + 16/N)*P + A", "6*P*(N-1)/N"),
    "ZeRO-2": ("(2 + 18/N)*P + A", "(4*m + 2)*P*(N-1)/N"),
    "ZeRO-3": ("18*P/N + W + A", "2*m*(2 + g)*P*(N-1)/N"),
    "ZeRO-3 + offload": ("W + A", "2*m*(2 + g)*P*(N-1)/N"),
    "Tensor": ("18*p + A", "r*m*(L*(5*E + 6*D) + E + 2*D) + M"),
    "Pipeline": ("18*p + A", "m*E + 4*(V + 512)*h"),
    "Hybrid": ("18*p + A", "r*m*(4*L + 1)*E + M + m*E + 4*(V/t + 512)*h"),
}


def symbols(strategy: str, stage: int) -> dict[str, float]:
    """What the letters in FORMULAS stand for; `stage` 0 is the encoder's, without a pipeline there is no difference."""
    tp, pipeline = (N if strategy in ("Tensor", "Hybrid") else 1), strategy in ("Pipeline", "Hybrid")
    m = BATCH if tp > 1 or pipeline else BATCH // N
    count, (encoder, decoder) = parameters(tp), activations(tp)
    kept = encoder + decoder
    if pipeline:  # under 1F1B the first of two stages has two micro-batches in flight
        count, kept = parameters(tp, not stage, bool(stage)), (2 * encoder, decoder)[stage]
    wire = {"m": m, "E": 2 * S * H, "D": 2 * D * H, "M": BATCH * 8 * (S * S + D * D + S * D)}
    size = {"P": P, "p": count, "A": kept, "W": 2 * min(P, REUSE / 2), "g": max(0.0, 1 - REUSE / (2 * P))}
    return {"N": N, "t": tp, "r": 2 * (tp - 1) / tp, "L": L, "V": V, "h": H, **wire, **size}


def predict(strategy: str) -> Span:
    """(bytes on the fullest GPU, bytes that a GPU sends in an iteration), two GPUs (hybrid: four), micro-batch 1."""
    memory, wire = FORMULAS[strategy]
    return max(eval(memory, symbols(strategy, k)) for k in (0, 1)), eval(wire, symbols(strategy, 0))


def one_f_one_b(count: int, forward: Span) -> list[tuple[int, str, int, float, float]]:
    """(stage, F or B, micro-batch, start, end) for two stages under 1F1B; a backward takes twice its forward."""
    rounds = [((1, "F", k), (1, "B", k), (0, "F", k + 1), (0, "B", k)) for k in range(count)]
    free, jobs = [0.0, 0.0], []
    ends: dict[tuple[int, str, int], float] = {}
    for stage, way, k in [(0, "F", 0), *(job for jobs_of_k in rounds for job in jobs_of_k)]:
        if k < count:
            start = max(free[stage], ends.get((1 - stage, way, k), 0.0))
            free[stage] = ends[stage, way, k] = start + forward[stage] * (1 if way == "F" else 2)
            jobs.append((stage, way, k, start, free[stage]))
    return jobs


def halves(stretch: Span, cuts: int, rank: int) -> list[Span]:
    """Half number `rank` of each of `cuts` equal pieces."""
    start, step = stretch[0], (stretch[1] - stretch[0]) / cuts
    return [(start + (k + rank / 2) * step, start + (k + rank / 2 + 0.5) * step) for k in range(cuts)]


def held(strategy: str, gpu: int) -> list[tuple[str, int, list[Span]]]:
    """(colour, bytes per parameter, which parameters) that a GPU, under offload its CPU, holds between layers."""
    whole, share = [(0.0, 1.0)], halves((0, 1), 1, gpu % 2)
    layouts = {"DDP": whole, "Tensor": halves((0, 1), 12, gpu % 2), "Pipeline": [STAGES[gpu % 2]]}
    own = halves(STAGES[gpu // 2], 6, gpu % 2) if strategy == "Hybrid" else layouts.get(strategy, share)
    if strategy == "ZeRO-1":  # gradients are reduced in bf16, the update takes fp32
        return [(PARAMETERS, 2, whole), (GRADIENTS, 2, whole), (GRADIENTS, 4, share), (OPTIMIZER, 12, share)]
    if strategy == "ZeRO-2":
        return [(PARAMETERS, 2, whole), (GRADIENTS, 6, share), (OPTIMIZER, 12, share)]
    return [(PARAMETERS, 2, own), (GRADIENTS, 4, own), (OPTIMIZER, 12, own)]


# ---- the words -----------------------------------------------------------------------------------------------------


def si(number: float, unit: str = "GB") -> str:
    number /= {"GB": 1e9, "M": 1e6, "TFLOP": 1e12}[unit]
    return f"{number:.{1 if number > 1 else 2}f} {unit}"


ENCODER_MACS, DECODER_MACS = forward_macs()
SHARE = (ENCODER_MACS / (ENCODER_MACS + DECODER_MACS), DECODER_MACS / (ENCODER_MACS + DECODER_MACS))
IDLE = 1 - 3 * BATCH * SHARE[1] / max(end for *_, end in one_f_one_b(BATCH, SHARE))  # of GPU 1 in the pipeline
TIMES = "\u00d7"

# A block is a slide: title | subtitle | source. Then "@ x y width size" | head | body, and rows that the slide draws.
WORDS = f"""
T5-Parallelism | The same T5-Large pretraining job under eight distributed-training strategies | | legend
@ 10 48 140 12 | | What each GPU holds (pale: its CPU memory)

How do you train one model on more than one GPU? | First: what does a single GPU have to hold? | | legend
@ 32 53 36 11 | 12 B optimizer states | fp32 master parameters and Adam's two moments
@ 32 28 36 11 | 4 B gradients | fp32
@ 32 18.5 36 11 | 2 B parameters | bf16
@ 10 67 60 11 | 18 bytes {TIMES} {si(P, "M")} parameters = {si(18 * P)} | and {si(sum(activations()))} of activations
  for each sample in flight
@ 98 65 52 11 | Split the batch: DDP | Each GPU has the whole model and samples of its own. Gradients travel.
@ 98 50.5 52 11 | Split the states: ZeRO | As DDP, but nothing is kept that the other GPU keeps. Missing parts travel.
@ 98 36 52 11 | Split every layer: tensor | Each GPU computes half of each layer. Activations travel, many times.
@ 98 21.5 52 11 | Split the depth: pipeline | Encoder here, decoder there. Few activations travel, but GPUs wait.

The job is fixed, only the strategy changes | Span corruption: 15 % of the tokens are hidden, the model writes them |
  T5: arXiv 1910.10683    XSum: arXiv 1808.08745
@ 113 39 38 10.5 | Data: XSum | News articles, without their summaries. An article is a document. Those of more than 512
  tokens are left out, in every strategy alike.
@ 113 20.5 38 10.5 | Model: T5-Large | As Megatron builds it: FFN without gate, learned positions, tied embedding.
{si(P, "M")} | parameters
1,024 / 16 / 2,816 | hidden size / heads / FFN
16 samples | an iteration, in micro-batches of 1
{si(6 * BATCH * (ENCODER_MACS + DECODER_MACS), "TFLOP")} | an iteration, by count
1,000 iterations | bf16, AdamW, 1e-4 with cosine decay

DDP: the baseline | Every GPU holds everything and computes its half of the samples | DDP: arXiv 2006.15704 | legend
@ 102 66 48 11 | How to read the blocks | From left to right the model: encoder, embedding, decoder. Upwards the bytes
  per parameter. So area is memory.
@ 102 52.5 48 11 | Who holds what | Both GPUs hold all 18 bytes of every parameter.
@ 102 42 48 11 | What travels when | All gradients, in fp32, once an iteration: after the last of 8 micro-batches.
@ 84 16 66 9.5 | | P: parameters, A: activations, N: GPUs. Page 10 explains all the letters, and says what is not
  counted.
@ 10 28.5 140 11 | | One iteration on each GPU: forward and backward of 8 micro-batches, then the network

ZeRO-1 and ZeRO-2 | Data parallel like DDP, but the same state is not kept twice | ZeRO: arXiv 1910.02054    ZeRO-2's
  all-reduce: DeepSpeed issue 2252 | legend
@ 10 68 66 11 | ZeRO-1 | Each GPU keeps half of the optimizer states, updates that half of the parameters and gets the
  other half.
@ 84 68 66 11 | ZeRO-2 | Half of the gradients too. So they cannot wait for the last micro-batch: DeepSpeed all-reduces
  after every one.
ZeRO-1 | F1 B1 {TIMES}_8 all-reduce update all-gather
ZeRO-2 | F1 B1 all-reduce {TIMES}_8 update all-gather

ZeRO-3, on the GPU and offloaded | Parameters are split too, and gathered layer by layer when they are needed |
  ZeRO-Offload: arXiv 2101.06840 | legend
@ 10 68 66 11 | ZeRO-3 | Layers are gathered for forward and let go, except what backward soon needs again (W, 5e8
  parameters at most).
@ 84 68 66 11 | ZeRO-3 + offload | States live in CPU memory, {si(18 * P / N)} a node, and the CPU makes the update. The
  GPU holds gathered layers and activations.
ZeRO-3 | gather F1 gather B1 reduce {TIMES}_8 update
ZeRO-3 + offload | gather F1 gather B1 reduce {TIMES}_8 update_on_CPU

Tensor parallelism | Every layer is cut in two: by heads and FFN columns going in, by rows coming out | Megatron-LM:
  arXiv 1909.08053 | legend
@ 70 68.5 80 11 | | One encoder layer, forward
@ 10 29 62 11 | Who holds what | Half of every layer and of the embedding. Only layer norms, positions and biases behind
  an all-reduce are there twice.
@ 70 29 80 11 | What travels when | Activations: 4 all-reduces per encoder layer, 7 per decoder layer, {11 * L + 3} in
  all for each of 16 micro-batches. Everybody waits for each.

Pipeline parallelism | The encoder on GPU 0, the decoder on GPU 1, micro-batches stream between them | 1F1B: arXiv
  2104.04473 | legend
@ 72 66 38 10.5 | Who holds what | One stack each, both the tied embedding. GPU 0 keeps the activations of two samples.
@ 112 66 38 10.5 | What travels when | The encoder's output, its gradient back; the embedding's gradient once.
@ 10 39.5 140 11 | | One forward, one backward in turn (8 of the 16 micro-batches)
@ 10 16.5 140 10.5 | | Drawn to the FLOPs: {100 * SHARE[0]:.0f} % are the encoder's, so GPU 1 would idle (hatched)
  {100 * IDLE:.0f} % of the time. With one sample a micro-batch the time to launch kernels may matter more, and the
  decoder launches more of them: a real run's gaps may be elsewhere.

Hybrid: TP = 2 and PP = 2 | Tensor parallelism inside a stage, pipeline parallelism between stages: four GPUs | | legend
@ 90 66 60 11 | Who holds what | Half of every layer of one stack, and half of the embedding.
@ 90 55 60 11 | What travels when | Inside a stage the all-reduces of tensor parallelism, between the stages one
  activation per micro-batch and its gradient.
@ 90 40 60 11 | Where it belongs | On two nodes with two GPUs each, GPUs 0 and 1 are one node: the many all-reduces stay
  inside it, only the pipeline crosses the network.

What the model predicts | Computed from the formulas below the bars; nothing on this page was measured |
@ 10 15.5 140 9 | | P = {si(P, "M")} parameters; p: on the fullest GPU {si(parameters(N), "M")} (tensor),
  {si(parameters(1, False), "M")} (pipeline), {si(parameters(N, False), "M")} (hybrid). N = t = 2, r = 2(t-1)/t, L = 24,
  V = 32,128, h = 1,024. m = 8 micro-batches of one sample a GPU; 16 in tensor, pipeline and hybrid. E, D: an activation
  of encoder, decoder in bf16. A: activations, {si(activations()[0])} encoder, {si(activations()[1])} decoder, less
  under t. W: 5e8 gathered parameters, g = {1 - REUSE / (2 * P):.2f}: share gathered again for backward, M: int64 masks.
  Not counted: communication buckets, fragmentation, CUDA context.

Strategies compare only if they train the same model | That they do is tested, not assumed |
@ 13 64 68 11 | The same initial weights | Every parameter is drawn whole, from a seed made of its name, and only then
  cut up for the layout.
@ 13 49 68 11 | The same vocabulary | 32,101 tokens are padded to 32,128 in every layout. Left alone, the engine pads to
  32,256 at TP = 2.
@ 13 34 68 11 | Loss parity | Tests train every strategy in fp32 without dropout and compare its loss with that of DDP.
  So does the quick start.
@ 13 19 68 11 | One source of settings | DeepSpeed's JSON overrules arguments silently. So it is made for each run from
  the same settings, and kept with it.
@ 94 66 58 11 | Why DeepSpeed is pinned to 0.18.3 | In 0.17.6 and 0.18.0 to 0.18.2 ZeRO-2 overwrites the gradients of
  each micro-batch with those of the next. The launchers refuse that.
@ 94 27.5 58 11 | | One eighth of the data, as fast as ever. The loss tells:
@ 94 10.5 58 9.5 | | Loss at iteration 20: 2 + 2 layers, hidden size 64, fp32, CPU

What the engine gets wrong unpatched | Crashes are the kind ones: the silent ones train another model, or report another
  number |
What is wrong | What you see | Where
Sentinel tokens are not counted in the vocabulary | out-of-bounds embedding lookup | tokenizer.py
T5 tokenizers have no cls, sep and mask | AttributeError before the first batch | tokenizer.py
Operator precedence returns a tuple for a loss | AttributeError at the first loss | t5_model.py
MoE losses are unbound on the decoder's stage | UnboundLocalError, pipeline only | language_model.py
The cross-attention mask lands in another argument | the decoder attends to padding | t5_model.py
The LM head's bias is not marked as split | tensor parallelism clips by another norm | t5_model.py
FLOPs leave out the decoder | {si(6 * BATCH * (ENCODER_MACS + V * H * S), "TFLOP")} printed,
  {si(6 * BATCH * (ENCODER_MACS + DECODER_MACS), "TFLOP")} true | utils.py
Initial weights depend on the rank | every layout trains another model | initialize.py
ZeRO-2 keeps only the last micro-batch | one eighth of the data is used | DeepSpeed 0.17.6

How to run it | First anywhere, then on the cluster |
@ 10 14 140 10.5 | | The other strategies are scripts beside it: zero1, zero2, zero3, zero3_offload, tensor, pipeline,
  and hybrid with 4 GPUs. Every setting is an environment variable: TRAIN_ITERS=50 makes a smoke test. --dry-run only
  prints the command. To compare runs, plot "samples per second" in Weights & Biases.
10 57 140 | Anywhere, no GPU, no compiler: two commands | bash scripts/quickstart.sh    # a tiny T5 with all eight
  strategies, one table ; bash scripts/run_tests.sh
10 36 140 | On a cluster, on both nodes | export NODE0=<master> NODE1=<other> HOSTS="<master> <other>" ; bash
  scripts/setup_megatron.sh           # the engine, patched, and what it needs ; bash
  scripts/prepare_xsum_megatron.sh    # the data: once, on one node
10 19.5 68 | Terminal on node 0 | bash scripts/run_megatron_t5_ddp.sh ${{NODE0}} 0
82 19.5 68 | Terminal on node 1 | bash scripts/run_megatron_t5_ddp.sh ${{NODE0}} 1
"""
PAGES = [
    [[cell.strip() for cell in line.split("|")] for line in block.splitlines()]
    for block in WORDS.replace("\n  ", " ").strip().split("\n\n")
]

# ---- drawing -------------------------------------------------------------------------------------------------------


class Slide:
    """A page. A position is a shape's lower left corner, and a text's left end at half height unless told otherwise."""

    def __init__(self, number: int) -> None:
        (title, subtitle, source, *legend), *rows = PAGES[number - 1]
        self.figure = Figure(figsize=(160 / 12, 90 / 12), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, 160), ylim=(0, 90))
        self.axes.set_axis_off()
        self.texts: list[Any] = []
        self.text(10, 81 if number > 1 else 69, title, 27 if number > 1 else 54, weight="bold")
        self.text(10, 75 if number > 1 else 59, subtitle, 14 if number > 1 else 20, MUTED)
        self.text(150, 4.5, str(number) if number > 1 else "", 11, MUTED, ha="right")
        self.text(144, 4.5, source, 9, MUTED, ha="right")
        if legend:
            self.legend(10, 4.5, [*STATES, ("encoder", ENCODER), ("decoder", DECODER)])
        self.rows = [row for row in rows if row[0][0] != "@"]
        for place, head, words in (row for row in rows if row[0][0] == "@"):
            x, y, width, size = map(float, place[1:].split())
            self.text(x, y, head, 13.5, weight="bold")
            self.text(x, y - (2.2 if head else 0), textwrap.fill(words, int(width / size / 0.092)), size, va="top")

    def text(self, x: float, y: float, content: str, size: float = 11, colour: str = INK, **options: Any) -> float:
        """Returns where the text ends on the right. Lines are level by their baselines, whatever their letters."""
        if "va" not in options and "rotation" not in options:
            y, options["va"] = y - size * (0.061 + 0.121 * content.count("\n")), "baseline"
        options = {"va": "center", "linespacing": 1.45, "parse_math": False, **options}
        self.texts += [self.axes.text(x, y, content, size=size, color=colour, **options)] if content else []
        return self.texts[-1].get_window_extent().transformed(self.axes.transData.inverted()).x1 if content else x

    def box(self, x: float, y: float, w: float, h: float, fill: str = PAPER, radius: float = 0, **style: Any) -> None:
        style = {"facecolor": fill, "edgecolor": "none", "linewidth": 1, "zorder": 1, **style}
        shape = FancyBboxPatch((x, y), w, h, f"round,pad=0,rounding_size={radius}", **style) if radius else None
        self.axes.add_patch(shape or Rectangle((x, y), w, h, **style))

    def arrow(self, start: Span, end: Span, style: str = "<|-|>", colour: str = WIRE) -> None:
        looks: dict[str, Any] = {"color": colour, "linewidth": 1.8, "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0}
        self.axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, **looks))

    def legend(self, x: float, y: float, kinds: list[tuple[str, str]], size: float = 10) -> None:
        for kind, colour in kinds:
            self.box(x, y - 0.8, 1.6, 1.6, colour)
            x = self.text(x + 2.4, y, kind, size, MUTED) + 2.6

    def holdings(self, x: float, y: float, w: float, h: float, strategy: str, gpu: int, name: str = "") -> None:
        """Area is memory: the model from left to right, its bytes per parameter upwards; grey where nothing is held."""
        parts, level, pale = held(strategy, gpu), y, 0.4 if "offload" in strategy else 1
        scale = h / sum(size for _, size, _ in parts)
        self.box(x, y, w, h, EMPTY)
        for colour, size, spans in parts:
            for start, end in spans:
                self.box(x + start * w, level, (end - start) * w, size * scale - 0.15, colour, alpha=pale)
            if name and len(spans) == 1 and size * scale > 1.9:
                ink = INK if colour == GRADIENTS or pale < 1 else "white"
                self.text(x + w * sum(spans[0]) / 2, level + size * scale / 2, f"{size} B", 9, ink, ha="center")
            level += size * scale
        self.box(x, y - 1.1, ENCODER_END * w, 0.8, ENCODER)
        self.box(x + STAGES[0][1] * w, y - 1.1, (1 - STAGES[0][1]) * w, 0.8, DECODER)
        self.text(x, y - 3.2, name, 11, MUTED)

    def timeline(self, x: float, y: float, events: str, scale: float = 1) -> None:
        """Forwards, backwards, communication and updates one after the other; `_` is a blank."""
        kinds = {"F": (4, FORWARD), "B": (6.4, BACKWARD), "u": (0, OPTIMIZER), TIMES: (6, "none")}
        for label in events.split():
            width, colour = kinds.get(label[0], (0, WIRE))
            ink, width = "white" if colour in (OPTIMIZER, WIRE) else INK, scale * (width or len(label) * 0.95 + 2.4)
            self.box(x, y, width - 0.15, 4.6, colour)
            self.text(x + width / 2, y + 2.3, label.replace("_", " "), 9.5, ink, ha="center")
            x += width

    def predicted(self, x: float, y: float, strategy: str, second: float = 36) -> None:
        shown = (("memory, predicted", x), ("sent an iteration, predicted", x + second))
        for (label, at), formula, size in zip(shown, FORMULAS[strategy], predict(strategy), strict=True):
            self.text(at, y, label, 10.5, MUTED)
            self.text(at, y - 3.7, si(size), 14, weight="bold")
            self.text(at, y - 7, formula.replace("*", ""), 8.5, MUTED, family=MONO)

    def check(self) -> None:
        """Raises ValueError when a text leaves the page or overlaps another."""
        page = self.axes.get_window_extent()
        boxes = [(text.get_text(), text.get_window_extent()) for text in self.texts]
        for text, box in boxes:
            if min(box.x0 - page.x0, page.x1 - box.x1, box.y0 - page.y0, page.y1 - box.y1) < 8:
                raise ValueError(f"a text leaves the page: {text!r}")
        for (one, a), (two, b) in combinations(boxes, 2):
            if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1:
                raise ValueError(f"texts overlap: {one!r} and {two!r}")


# ---- the slides ----------------------------------------------------------------------------------------------------


def cover(slide: Slide) -> None:
    for column, name in enumerate(FORMULAS):
        x, four = 10 + 18 * column, name == "Hybrid"
        for gpu in range(4 if four else 2):
            low = 24.5 if gpu > 1 or not four else 34.9
            slide.holdings(x + 7.3 * (gpu % 2), low, 6.3, 8.6 if four else 19, name, gpu)
        slide.text(x + 6.8, 20, name.replace(" + ", "\n+ "), 11.5, ha="center", va="top", weight="bold")


def question(slide: Slide) -> None:
    slide.holdings(10, 13, 18, 44, "DDP", 0, "one GPU")
    for row, strategy in enumerate(("DDP", "ZeRO-1", "Tensor", "Pipeline")):
        slide.box(74, 55.5 - 14.5 * row, 76, 13, radius=1, zorder=0)
        for gpu in range(2):
            slide.holdings(77 + 9 * gpu, 58 - 14.5 * row, 8, 9, strategy, gpu)


def job(slide: Slide) -> None:
    words = "The ferry left the harbour at dawn and reached the island before the storm closed the port for two days"
    seen = words.replace("at dawn", "<extra_id_0>").replace("storm", "<extra_id_1>")
    texts = {"Article": words, "Encoder reads": seen, "Decoder writes": "<extra_id_0> at dawn <extra_id_1> storm </s>"}
    for y, (label, text), fill in zip((66.5, 57.5, 48.5), texts.items(), (PAPER, ENCODER, DECODER), strict=True):
        slide.text(10, y + 3.8, label, 10.5, MUTED)
        x = 10.0
        for word in text.split():
            colour = INK if word[0] == "<" else DECODER if word in ("at", "dawn", "storm") else fill
            end = slide.text(x + 0.8, y, word, 10.8, INK if colour == PAPER else "white") + 0.8
            slide.box(x, y - 1.9, end - x, 3.8, colour, radius=0.6)
            x = end + 0.7
    for x, colour, name, tokens in ((10, ENCODER, "encoder", S), (38, DECODER, "decoder", D)):
        for layer in range(L):
            slide.box(x, 17 + layer * 0.85, 20, 0.6, colour)
        slide.text(x + 10, 39.5, f"{L} {name} layers", 11.5, ha="center", weight="bold")
        slide.text(x + 10, 9.8, f"{tokens} tokens", 11, MUTED, ha="center")
    slide.box(10, 12.2, 48, 3.6, MUTED)
    slide.text(34, 14, f"one embedding, {V:,} rows", 10, "white", ha="center")
    slide.arrow((30.6, 27), (37.4, 27), "-|>", MUTED)
    for row, (value, meaning) in enumerate(slide.rows):
        slide.text(68, 39 - 6.8 * row, value, 13.5, weight="bold")
        slide.text(68, 35.9 - 6.8 * row, meaning, 10, MUTED)


def ddp(slide: Slide) -> None:
    for gpu in range(2):
        slide.holdings(10 + 46 * gpu, 36, 38, 31, "DDP", gpu, f"GPU {gpu}")
    slide.arrow((48.6, 42.9), (55.4, 42.9))
    slide.timeline(10, 20.3, " ".join(f"F{k} B{k}" for k in range(1, 9)) + " all-reduce_of_all_gradients update", 1.17)
    slide.predicted(10, 16, "DDP")


def zero(slide: Slide) -> None:
    for x, (strategy, events) in zip((10, 84), slide.rows, strict=True):
        offload = "offload" in strategy
        for gpu, left in enumerate((x, x + 36)):
            where = f"CPU memory of node {gpu}" if offload else f"GPU {gpu}"
            slide.holdings(left, 35, 30, 15 if offload else 22, strategy, gpu, where)
            if offload:
                layer = left + 7 + 10 * gpu
                slide.box(left, 53.6, 30, 3.4, EMPTY)
                slide.box(layer, 53.6, 2.4, 3.4, PARAMETERS)
                slide.text(left + 20 - 19 * gpu, 55.3, f"GPU {gpu}", 9, MUTED)
                slide.arrow((layer + 1.2, 50.5), (layer + 1.2, 53.3))
        for level in (55.3,) if offload else (36.1, 38.7):
            slide.arrow((x + 30.4, level), (x + 35.6, level))
        slide.text(x, 28.2, "One iteration on each GPU", 11, MUTED)
        slide.timeline(x, 21, events)
        slide.predicted(x, 16.5, strategy)


def tensor(slide: Slide) -> None:
    blocks = ["x", "heads\n{} to {}", "output\nrows", "", "FFN 1\ncolumns", "FFN 2\nrows", "", "y"]
    for gpu in range(2):
        slide.holdings(10 + 27 * gpu, 37, 23, 30, "Tensor", gpu, f"GPU {gpu}")
        x, y = 70.0, 54 - 16 * gpu
        slide.text(x, y + 9.8, f"GPU {gpu}", 10, MUTED)
        slide.box(x, y + 3.8, 76, 0.4, LINE)
        for label in blocks:
            width, colour, ink = (12, ENCODER, "white") if "\n" in label else (5, PAPER, INK)
            if label:
                slide.box(x, y, width, 8, colour, radius=0.7)
                slide.text(x + width / 2, y + 4, label.format(8 * gpu, 8 * gpu + 7), 10, ink, ha="center")
            elif gpu:
                slide.box(x + 0.7, y - 1, 3.6, 26, WIRE, radius=0.7, zorder=2)
                slide.text(x + 2.5, y + 12, "all-reduce", 10, "white", ha="center", rotation=90)
            x += width + 1.5
    slide.predicted(10, 16, "Tensor", 60)


def pipeline(slide: Slide) -> None:
    for gpu in range(2):
        slide.holdings(10 + 30 * gpu, 47, 26, 20, "Pipeline", gpu, f"GPU {gpu}")
    slide.predicted(72, 53, "Pipeline", 40)
    jobs, rows = one_f_one_b(8, SHARE), ((29, ENCODER), (20, DECODER))
    unit = 130 / max(end for *_, end in jobs)
    for stage, (y, _) in enumerate(rows):
        slide.text(10, y + 3, f"GPU {stage}", 11, MUTED)
        slide.box(20, y + 0.1, 130, 5.8, "white", hatch="////", edgecolor=LINE, linewidth=0, zorder=0)
    for stage, way, k, start, end in jobs:
        y, colour = rows[stage]
        slide.box(20 + start * unit, y, (end - start) * unit, 6, "white")
        slide.box(20 + start * unit, y, (end - start) * unit - 0.15, 6, colour, alpha=0.65 if way == "F" else 1)
        slide.text(20 + (start + end) / 2 * unit, y + 3, f"{way}{k + 1}", 9, "white", ha="center")
        if (stage, way) in ((0, "F"), (1, "B")):
            slide.arrow((20 + end * unit, (28.8, 26.2)[stage]), (20 + end * unit, (26.2, 28.8)[stage]), "-|>")


def hybrid(slide: Slide) -> None:
    for gpu in range(4):
        x, y = 10 + 40 * (gpu % 2), 45 - 32 * (gpu // 2)
        slide.holdings(x, y, 28, 22, "Hybrid", gpu, f"GPU {gpu}")
        if gpu < 2:
            slide.arrow((x + 14, y - 2.4), (x + 14, y - 9))
            slide.arrow((38.6, 56 - 32 * gpu), (49.4, 56 - 32 * gpu))
            slide.text(44, 58 - 32 * gpu, "all-reduce", 9, WIRE, ha="center")
    slide.text(44, 39.3, "activations", 9, WIRE, ha="center")
    slide.predicted(90, 22, "Hybrid", 22)


def predictions(slide: Slide) -> None:
    slide.box(119, 78.6, 31, 5, WIRE, radius=0.8)
    slide.text(134.5, 81.1, "PREDICTION", 13, "white", ha="center", weight="bold")
    slide.text(33, 69.5, "Memory of the fullest GPU", 12.5, weight="bold")
    slide.text(104, 69.5, "Sent by one GPU in an iteration", 12.5, weight="bold")
    slide.legend(33, 66, [*STATES, ("gathered (W)", GATHERED), ("activations (A)", BACKWARD)], 8)
    for row, (name, formulas) in enumerate(FORMULAS.items()):
        y, (memory, wire), letters = 61 - 5.6 * row, predict(name), symbols(name, 1)
        parts = [] if "offload" in name else held(name, 3 if name == "Hybrid" else 1)
        bars = [(colour, P * size * sum(end - start for start, end in spans)) for colour, size, spans in parts]
        bars += [(GATHERED, letters["W"] * ("W" in formulas[0])), (BACKWARD, letters["A"])]
        slide.text(10, y + 1.3, name, 12, weight="bold")
        x = 33.0
        for colour, size in bars:
            slide.box(x, y, size * 3.6e-9, 2.5, colour)
            x += size * 3.6e-9
        slide.box(104, y, wire * 3.4e-9, 2.5, WIRE)
        extra = f" and {si(18 * P / N)} in CPU memory" if "offload" in name else ""
        slide.text(x + 1.2, y + 1.3, si(memory) + extra, 11)
        slide.text(104 + wire * 3.4e-9 + 1.2, y + 1.3, si(wire), 11)
        for at, formula in zip((33, 104), formulas, strict=True):
            slide.text(at, y - 1.4, formula.replace("*", ""), 8.5, MUTED, family=MONO)


def honest(slide: Slide) -> None:
    for row in range(4):
        slide.box(10, 54.5 - 15 * row, 74, 13, radius=1, zorder=0)
    for y, label, kept in ((50, "What an update should see: 8 micro-batches", range(8)), (38, "What it saw", (7,))):
        slide.text(94, y + 1.8, label, 11, MUTED)
        for k in range(8):
            slide.box(94 + 7 * k, y - 6, 6, 5.6, GRADIENTS if k in kept else PAPER, radius=0.6)
            slide.text(97 + 7 * k, y - 3.2, str(k + 1), 11, INK if k in kept else BACKWARD, ha="center")
    losses = ((94, "5.0154", "as it should be", INK), (124, "5.2097", "ZeRO-2 with 0.17.6", WIRE))
    for x, value, label, colour in losses:
        slide.text(x, 20, value, 20, colour, weight="bold")
        slide.text(x, 15.5, label, 10.5, MUTED)


def bugs(slide: Slide) -> None:
    for row, (what, seen, where) in enumerate(slide.rows):
        y, size = 68 - 5.9 * row, 12.5 if row else 11
        slide.text(14, y, what, size, INK if row else MUTED)
        slide.text(76, y, seen, size, MUTED)
        slide.text(125, y, where, 11, INK if row else MUTED, family=MONO if row else "DejaVu Sans")
        slide.box(10, y - 2.9, 140, 0.12, LINE)
        slide.box(10, y - 0.8, 1.6, 1.6, "none" if not row else BACKWARD if row < 5 else WIRE)
    slide.legend(10, 4.5, [("stops the run", BACKWARD), ("silent", WIRE)])


def running(slide: Slide) -> None:
    for place, head, commands in slide.rows:
        x, y, width = map(float, place.split())
        lines = commands.split(" ; ")
        height = 2.8 + 3.2 * len(lines)
        slide.text(x, y + height + 2.8, head, 12.5, weight="bold")
        slide.box(x, y, width, height, INK, radius=1)
        slide.text(x + 3, y + height / 2, "\n".join(lines), 12, "white", family=MONO)


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "T5-Parallelism.pdf"
    pages = (cover, question, job, ddp, zero, zero, tensor, pipeline, hybrid, predictions, honest, bugs, running)
    slides = [Slide(number) for number in range(1, len(pages) + 1)]
    for slide, draw in zip(slides, pages, strict=True):
        draw(slide)
        slide.check()
    with PdfPages(output, metadata={"Title": PAGES[0][0][0], "CreationDate": None}) as pdf:
        for slide in slides:
            pdf.savefig(slide.figure)


if __name__ == "__main__":
    main()
