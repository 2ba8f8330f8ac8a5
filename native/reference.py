"""An outside reference: Hugging Face's model trained by PyTorch alone, from copied weights, in one process.

    python -m native.reference FLAGS, with a one-process run's flags

prints one line of JSON: the losses and gradient norms of all iterations. A mistake that all strategies of the native
engine share shows here, because nothing but the samples and the initial weights comes from this engine: the model is
``BlenderbotForConditionalGeneration``, which has the same architecture; loss, optimizer and schedule are PyTorch's.
fp32, without dropout.
"""

import itertools
import json
from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from native.arguments import start
from native.data import Batch, open_data
from native.model import initialise, make
from native.parallel import Mesh
from native.token_file import TokenFile, Vocabulary, pad_vocabulary
from t5bench.imports import import_transformers


def build(args: Namespace, attention: str = "eager") -> nn.Module:
    """Hugging Face's model with its own random weights; it shares its embeddings as Megatron's T5 does.

    attention: a name of Hugging Face's implementations.
    """
    transformers = import_transformers()
    config = transformers.BlenderbotConfig(
        vocab_size=args.padded_vocab_size,
        max_position_embeddings=args.max_position_embeddings,
        d_model=args.hidden_size,
        encoder_layers=args.encoder_num_layers,
        decoder_layers=args.decoder_num_layers,
        encoder_attention_heads=args.num_attention_heads,
        decoder_attention_heads=args.num_attention_heads,
        encoder_ffn_dim=args.ffn_hidden_size,
        decoder_ffn_dim=args.ffn_hidden_size,
        activation_function="gelu" if args.no_bias_gelu_fusion else "gelu_new",
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=False,
        use_cache=False,
        pad_token_id=args.pad_token,
        attn_implementation=attention,
    )
    model = transformers.BlenderbotForConditionalGeneration(config)
    model.model.decoder.embed_positions = model.model.encoder.embed_positions
    del model.final_logits_bias  # a constant there, a parameter here
    model.final_logits_bias = nn.Parameter(torch.zeros(args.padded_vocab_size))
    return model


def copied_weights(weights: dict[str, Tensor], args: Namespace) -> dict[str, Tensor]:
    """Megatron's parameters under Hugging Face's names; attention's queries, keys and values apart."""
    copied = {
        "model.shared.weight": weights["language_model.embedding.word_embeddings.weight"],
        "model.encoder.embed_positions.weight": weights["language_model.embedding.position_embeddings.weight"],
        "final_logits_bias": weights["lm_head.bias"],
    }
    for name, value in weights.items():
        stack, _, rest = name.removeprefix("language_model.").partition(".")
        if stack not in ("encoder", "decoder"):
            continue
        kind = rest.rpartition(".")[2]  # weight or bias
        if rest.startswith("final_layernorm"):
            copied[f"model.{stack}.layer_norm.{kind}"] = value
            continue
        _, number, *modules, _ = rest.split(".")
        module = ".".join(modules)
        layer = f"model.{stack}.layers.{number}"
        if module == "self_attention.query_key_value":  # [query | key | value], each of all heads
            for letter, block in zip("qkv", value.chunk(3), strict=True):
                copied[f"{layer}.self_attn.{letter}_proj.{kind}"] = block
        elif module == "inter_attention.key_value":  # [key | value] of each head
            by_head = value.unflatten(0, (args.num_attention_heads, 2, args.kv_channels))
            copied[f"{layer}.encoder_attn.k_proj.{kind}"] = by_head[:, 0].flatten(0, 1)
            copied[f"{layer}.encoder_attn.v_proj.{kind}"] = by_head[:, 1].flatten(0, 1)
        else:
            copied[f"{layer}.{hugging_face_name(module, stack)}.{kind}"] = value
    return copied


def hugging_face_name(module: str, stack: str) -> str:
    """The name of a layer's module."""
    names = {
        "input_layernorm": "self_attn_layer_norm",
        "self_attention.dense": "self_attn.out_proj",
        "inter_attention.query": "encoder_attn.q_proj",
        "inter_attention.dense": "encoder_attn.out_proj",
        "mlp.dense_h_to_4h": "fc1",
        "mlp.dense_4h_to_h": "fc2",
        "post_inter_attention_layernorm": "final_layer_norm",
        "post_attention_layernorm": "final_layer_norm" if stack == "encoder" else "encoder_attn_layer_norm",
    }
    return names[module]


def load_weights(model: nn.Module, args: Namespace) -> None:
    """The initial weights of the native engine; none may be left over on either side."""
    source = make(args, Mesh())
    initialise(source, args, Mesh())
    copied = copied_weights(dict(source.named_parameters()), args)
    parameters = dict(model.named_parameters())
    assert copied.keys() == parameters.keys(), copied.keys() ^ parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(copied[name])


def loss_of(model: nn.Module, micro_batch: Batch, pad: int) -> Tensor:
    """The mean over a micro-batch's real tokens, []."""
    encoder_tokens, decoder_tokens, labels = micro_batch
    is_real = (encoder_tokens != pad).long()
    output = model.model(input_ids=encoder_tokens, attention_mask=is_real, decoder_input_ids=decoder_tokens)
    logits = F.linear(output[0], model.model.shared.weight, model.final_logits_bias)  # [b, s_dec, vocabulary]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def schedule_of(optimizer: torch.optim.Optimizer, args: Namespace) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm-up with a cosine after it."""
    warm_up_steps = args.lr_warmup_iters
    decay_steps = args.train_iters - warm_up_steps
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, decay_steps, eta_min=args.min_lr)
    if not warm_up_steps:
        return decay
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / warm_up_steps)
    for group in optimizer.param_groups:
        group["initial_lr"] = args.lr
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [warm_up_steps])


def optimizer_of(
    model: nn.Module, args: Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW without decay of biases and LayerNorms, and its schedule."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=betas, eps=args.adam_eps, foreach=False)
    return optimizer, schedule_of(optimizer, args)


def clip(model: nn.Module, max_norm: float) -> float:
    """Scales the gradients to this norm if theirs is larger; 0 does not clip. Returns the norm before.

    In float64: in fp32, PyTorch's own function is wrong by 2e-6 for these gradients on a CPU.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    if max_norm and norm + 1e-6 > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))
    return norm


def run(args: Namespace) -> None:
    """Trains, and prints the curves."""
    import_transformers()  # before the tokenizer, which imports it without its models
    file = TokenFile(args.data_path)
    vocabulary = Vocabulary.load(args.tokenizer_model)
    pad_vocabulary(args, vocabulary)
    args.num_workers = 0
    samples, _ = open_data(args, 0, file, vocabulary)
    model = build(args)
    load_weights(model, args)
    optimizer, schedule = optimizer_of(model, args)
    losses: list[float] = []
    norms: list[float] = []
    for batch in itertools.islice(samples, args.train_iters):
        micro_batches = list(zip(*[tensor.split(args.micro_batch_size) for tensor in batch], strict=True))
        total = 0.0
        for micro_batch in micro_batches:
            loss = loss_of(model, micro_batch, args.pad_token) / len(micro_batches)
            loss.backward()
            total += loss.item()
        norm = clip(model, args.clip_grad)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
        norms.append(norm)
    print(json.dumps({"losses": losses, "norms": norms}), flush=True)


if __name__ == "__main__":
    start(run)
