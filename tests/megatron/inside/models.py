"""A batch and models of the started engine."""

import torch
from megatron import get_args, layout_independent_init
from megatron.arguments import core_transformer_config_from_args
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.model import T5Model
from started_engine import DECODER_LENGTH, ENCODER_LENGTH

PADDING = 10


def make_batch(padding_token: int = 0) -> tuple[torch.Tensor, ...]:
    """Two samples of which the encoder's last ten tokens are padding, with some token in its place."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 3000, (2, ENCODER_LENGTH), generator=generator)
    tokens[:, -PADDING:] = padding_token
    decoder_tokens, labels = torch.randint(3, 3000, (2, 2, DECODER_LENGTH), generator=generator)
    padding = torch.arange(ENCODER_LENGTH) >= ENCODER_LENGTH - PADDING
    masks = [padding.expand(2, length, ENCODER_LENGTH) for length in (ENCODER_LENGTH, DECODER_LENGTH)]
    causal = torch.ones(2, DECODER_LENGTH, DECODER_LENGTH).triu(1).bool()
    return tokens, decoder_tokens, masks[0], causal, masks[1], labels


def make_model(**parts: bool) -> T5Model:
    """A T5Model as get_model leaves it before it is wrapped: initialized, with its attributes."""
    args = get_args()
    args.model_type = ModelType.encoder_and_decoder
    torch.manual_seed(1)
    model = T5Model(core_transformer_config_from_args(args), **parts)
    layout_independent_init.initialize(model, args)
    return model.eval()


def run_model(model: T5Model, padding_token: int = 0) -> torch.Tensor:
    *inputs, labels = make_batch(padding_token)
    return model(*inputs, lm_labels=labels)


def loss_and_squared_norm() -> tuple[float, torch.Tensor]:
    """The loss, and the squared gradient norm of the parameters that the optimizer counts on this process."""
    model = make_model().train()
    loss = run_model(model).sum()
    loss.backward()
    counted = [p.grad for p in model.parameters() if param_is_not_tensor_parallel_duplicate(p)]
    return loss.item(), torch.stack([grad.square().sum() for grad in counted]).sum()
