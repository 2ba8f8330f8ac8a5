"""Run inside Megatron-DeepSpeed: `megatron_answers.py QUESTION FILE ARGUMENTS...` writes what the engine answers.

samples: the engine's own training samples for a command line. gradients: its loss and gradients for given weights and
a given batch.
"""

import sys
from pathlib import Path

question, answer, *arguments = sys.argv[1:]
if question == "gradients":
    weights_file, *arguments = arguments
sys.argv[1:] = arguments

import torch  # noqa: E402
from megatron import get_args  # noqa: E402
from megatron.arguments import core_transformer_config_from_args  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.initialize import initialize_megatron  # noqa: E402

initialize_megatron(args_defaults={})
args = get_args()
args.model_type = ModelType.encoder_and_decoder


def samples() -> dict[str, torch.Tensor]:
    """Of the training and validation splits: the maps [n, 3], and the first samples of training."""
    from megatron.data.dataset_utils import build_train_valid_test_datasets

    train, validation, _ = build_train_valid_test_datasets(
        data_prefix=args.data_path,
        data_impl=args.data_impl,
        splits_string=args.split,
        train_valid_test_num_samples=[args.train_iters * args.global_batch_size, args.global_batch_size, 0],
        max_seq_length=args.encoder_seq_length,
        max_seq_length_dec=args.decoder_seq_length,
        masked_lm_prob=args.mask_prob,
        short_seq_prob=args.short_seq_prob,
        seed=args.seed,
        skip_warmup=True,
        dataset_type="t5",
    )
    first = [train[index] for index in range(min(len(train), 400))]
    maps = {"train": torch.tensor(train.samples_mapping[:]), "validation": torch.tensor(validation.samples_mapping[:])}
    return maps | {
        key: torch.tensor([sample[key] for sample in first]) for key in ("text_enc", "text_dec", "labels", "loss_mask")
    }


def gradients() -> dict[str, torch.Tensor]:
    """The loss of each label, and the gradients of the mean loss, by parameter name."""
    from megatron.model import T5Model

    given = torch.load(weights_file)
    model = T5Model(core_transformer_config_from_args(args)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given["weights"].pop(name))
    assert not given["weights"], sorted(given["weights"])
    encoder, decoder, labels = given["batch"]

    def blind(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return ~((queries[:, :, None] > 0) & (keys[:, None, :] > 0))

    later = torch.ones(decoder.shape[1], decoder.shape[1]).triu(1).bool()
    masks = blind(encoder, encoder), blind(decoder, decoder) | later, blind(decoder, encoder)
    output = model(encoder, decoder, *masks, lm_labels=labels.clamp(min=0))
    losses = (output[0] if isinstance(output, tuple) else output).float()
    mask = (labels >= 0).float()
    ((losses * mask).sum() / mask.sum()).backward()
    return {"losses": losses.detach() * mask} | {name: p.grad for name, p in model.named_parameters()}


torch.save({"samples": samples, "gradients": gradients}[question](), Path(answer))
torch.distributed.destroy_process_group()
