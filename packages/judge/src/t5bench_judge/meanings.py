"""What the name of a column means: the step, the training's loss, a gradient norm, or something else that has a loss.

A name is divided into words, and the words decide, not the trainer that wrote them.
"""

import re
from enum import Enum

# In the order in which they are taken: the trainer's own step before a logger's count of its lines.
STEPS = (
    "step", "iteration", "global_step", "train/global_step", "trainer/global_step", "train/step", "iter", "it",
    "current_step", "num_updates", "iter_num", "iteration_number", "optimizer_step", "opt_step", "update_step",
    "global_steps", "train_step", "training_step", "steps", "iters", "iterations", "global_step/max_steps", "_step",
    "batch", "update",
)  # fmt: skip
STEP_WORDS = {"step", "steps", "iteration", "iterations", "iter", "iters", "update", "updates"}
BESIDE_STEP = {
    *STEP_WORDS, "global", "train", "trainer", "training", "current", "optimizer", "opt", "number", "no", "idx",
    "index", "completed",
}  # fmt: skip
LOSS_WORDS = {"loss", "losses", "nll", "xent", "ce", "crossentropy"}
BESIDE_LOSS = {
    *LOSS_WORDS, "train", "training", "trainer", "lm", "llm", "mlm", "total", "mean", "avg", "average", "global",
    "reduced", "step", "batch", "cross", "entropy", "ent", "metrics", "metric", "model", "language", "current",
    "masked", "out", "learning", "inner", "samples", "nats", "per", "token", "tokens", "main", "optim",
}  # fmt: skip
# Of these, a log has the whole training's loss beside its parts.
PART_OF_LOSS = {"nll", "ce", "xent", "crossentropy", "cross", "lm", "llm", "masked", "mlm", "language", "main"}
NOT_A_LOSS = {
    "scale", "scaler", "scaling", "mask", "weight", "weights", "coef", "coefficient", "fn", "function", "type", "name",
    "count", "num", "number", "time", "lr", "factor", "interval", "norm", "grad", "no", "without",
}  # fmt: skip
NORM_WORDS = {"norm", "gnorm", "gradnorm"}
OF_GRADIENTS = {"grad", "grads", "gradient", "gradients", "gnorm", "gradnorm", "total", "global"}
BEFORE_CLIPPING = {"before", "unclipped", "raw", "preclip", "pre"}
BESIDE_NORM = {
    *NORM_WORDS, *OF_GRADIENTS, *BEFORE_CLIPPING, "train", "training", "l2", "2", "0", "optim", "optimizer", "metrics",
    "metric", "model", "step", "clip", "clipping", "all", "mean", "learning", "actor",
}  # fmt: skip


class Meaning(Enum):
    """What a name says of a loss; the value says it in words."""

    LOSS = "the training's loss"
    UNKNOWN_LOSS = "a loss whose name is not usual"
    EVALUATION = "an evaluation's loss"
    REINFORCEMENT = "a loss of reinforcement learning, which is no pretraining loss: it depends on what was sampled"
    PART = "an auxiliary part of a loss"
    ADVERSARIAL = "the loss of one of two networks that train against each other"
    SMOOTHED = "a smoothed or extreme value, and not a step's"
    PERPLEXITY = "a perplexity or a number of bits, which has fewer digits of the loss"
    OTHER = "no loss"


# The first kind of which a name has a word.
KINDS = {
    Meaning.EVALUATION: {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout", "holdout"},
    Meaning.REINFORCEMENT: {
        "policy", "pg", "actor", "critic", "vf", "reward", "rewards", "ppo", "grpo", "advantage", "surrogate",
        "qf", "qf1", "qf2", "alpha", "value",
    },
    Meaning.PART: {
        "aux", "auxiliary", "z", "kl", "mtp", "router", "balancing", "balance", "load", "distill", "distillation",
        "recon", "reconstruction", "contrastive", "ctc", "att", "box", "reg", "cls", "regularization", "penalty",
        "commitment", "decode",
    },
    Meaning.ADVERSARIAL: {"g", "d", "gen", "disc", "generator", "discriminator", "adversarial", "adv", "gan"},
    Meaning.SMOOTHED: {"best", "min", "max", "smoothed", "smooth", "ema", "running", "moving"},
}  # fmt: skip
PERPLEXITIES = {"ppl", "perplexity", "bpb", "bpc", "bits"}
# Beside a loss, these say that it is one of reinforcement learning.
SAMPLED = {"policy", "pg", "actor", "critic", "reward", "advantage", "advantages"}
CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
GLUED = re.compile(r"^(train|training|total|val|valid|eval|test|lm|grad|avg|mean|global)(loss|norm)$")


def plain(name: str) -> str:
    apart = CAPITAL.sub("_", name.strip())
    return re.sub(r"[\s.:-]+", "_", apart.lower())


def of_export(name: str) -> str:
    """W&B exports a column as 'run - metric', and its smallest and largest value beside it."""
    return "" if name.endswith(("__MIN", "__MAX")) else name.rpartition(" - ")[2]


def words_of(name: str) -> list[str]:
    found = []
    for word in re.split(r"[/_\s()\[\]@#,;]+", plain(of_export(name))):
        glued = GLUED.match(word)
        if glued:
            found += glued.groups()
        elif word:
            found.append(word)
    return found


def is_step(name: str) -> bool:
    if plain(of_export(name)) in STEPS:
        return True
    words = set(words_of(name))
    return bool(words & STEP_WORDS) and words <= BESIDE_STEP


def order_of_step(name: str) -> int:
    """The smaller, the sooner a column is taken as the step."""
    known = plain(of_export(name))
    return STEPS.index(known) if known in STEPS else len(STEPS)


def meaning_of(name: str) -> Meaning:
    """What a name says of a loss."""
    listed = words_of(name)
    words = set(listed[:-1] if listed[-2:] == ["loss", "value"] else listed)
    is_loss = bool(words & LOSS_WORDS) or {"cross", "entropy"} <= words
    if not is_loss:
        is_perplexity = bool(words & PERPLEXITIES) and not words & NOT_A_LOSS
        return Meaning.PERPLEXITY if is_perplexity else Meaning.OTHER
    if words & NOT_A_LOSS:
        return Meaning.OTHER
    for meaning, of_kind in KINDS.items():
        if words & of_kind:
            return meaning
    if "entropy" in words and not words & {"cross", *PART_OF_LOSS}:
        return Meaning.REINFORCEMENT
    return Meaning.LOSS if words <= BESIDE_LOSS else Meaning.UNKNOWN_LOSS


def is_loss(name: str) -> bool:
    """Of the training: not an evaluation's, an auxiliary one's or a loss scale."""
    return meaning_of(name) == Meaning.LOSS


def is_norm(name: str) -> bool:
    """Of the gradients, before clipping."""
    words = set(words_of(name))
    is_named = words == {"norm"} or (bool(NORM_WORDS & words) and bool(OF_GRADIENTS & words))
    return is_named and words <= BESIDE_NORM


def is_before_clipping(name: str) -> bool:
    return bool(BEFORE_CLIPPING & set(words_of(name)))


def is_part_of_loss(name: str) -> bool:
    return bool(PART_OF_LOSS & set(words_of(name)))


def says_sampling(name: str) -> bool:
    return bool(SAMPLED & set(words_of(name)))
