"""Inside the engine, in one process: the native engine's weights, loss, gradients and samples are the engine's own."""

import os
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from megatron.data.dataset_utils import build_train_valid_test_datasets
from models import make_batch, make_model

from native import arguments
from native.data import split_documents
from native.model import initialise, make
from native.parallel import Mesh
from native.t5_samples import SpanCorruption
from native.token_file import TokenFile, Vocabulary


def native_arguments(*flags: str) -> Namespace:
    """The same command line, as the native engine reads it."""
    return arguments.parse([*sys.argv[1:], "--distributed-backend", "gloo", *flags])


@pytest.mark.parametrize("exact_gelu", [True, False], ids=["exact GELU", "tanh GELU"])
def test_loss_and_gradients(args: Namespace, monkeypatch: pytest.MonkeyPatch, exact_gelu: bool):
    """Of random weights, biases and LayerNorms included, and a padded batch."""
    native_args = native_arguments()
    generator = torch.Generator().manual_seed(5)
    native_args.padded_vocab_size = args.padded_vocab_size
    native_args.pad_token = 0
    native_args.no_bias_gelu_fusion = exact_gelu
    monkeypatch.setattr(args, "bias_gelu_fusion", not exact_gelu)
    native = make(native_args, Mesh()).eval()
    model = make_model()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in native.named_parameters():
            parameter.normal_(1.0 if name.endswith("layernorm.weight") else 0.0, 0.1, generator=generator)
            parameters[name].copy_(parameter)
    tokens, decoder_tokens, *masks, labels = make_batch()
    decoder_tokens[0, 12:] = 0
    labels[0, 12:] = -1
    real = labels >= 0
    losses = model(tokens, decoder_tokens, *masks, lm_labels=labels.clamp(min=0)) * real
    native_losses = native(tokens, decoder_tokens, labels)
    torch.testing.assert_close(native_losses, losses, rtol=1e-5, atol=1e-5)
    for found in (losses, native_losses):
        (found.sum() / real.sum()).backward()
    assert parameters.keys() == dict(native.named_parameters()).keys()
    for name, parameter in native.named_parameters():
        torch.testing.assert_close(
            parameter.grad, parameters[name].grad, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_initial_weights(args: Namespace):
    """Both engines draw them as patches/README.md defines."""
    native_args = native_arguments()
    found = dict(make_model().named_parameters())
    native_args.padded_vocab_size = args.padded_vocab_size
    native_args.pad_token = 0
    native = make(native_args, Mesh())
    initialise(native, native_args, Mesh())
    assert len(found) > 30 and all(torch.equal(found[name], drawn) for name, drawn in native.named_parameters())


def test_samples(args: Namespace):
    """Two epochs of the bundled articles, some of them longer than the encoder."""
    prefix = os.environ["SAMPLE_DATA"]
    samples = 320
    lengths = (192, 64)
    train, validation, _ = build_train_valid_test_datasets(
        [prefix], "mmap", args.split, [samples, args.global_batch_size, 0], lengths[0], args.mask_prob,
        args.short_seq_prob, args.seed, True, max_seq_length_dec=lengths[1], dataset_type="t5",
    )  # fmt: skip
    flags = ["--encoder-seq-length", "192", "--max-position-embeddings", "192", "--decoder-seq-length", "64"]
    native_args = native_arguments(*flags)
    file = TokenFile(prefix)
    vocabulary = Vocabulary.load(args.tokenizer_model)
    native_train, native_validation = (
        SpanCorruption(native_args, file, documents, count, vocabulary)
        for documents, count in zip(
            split_documents(native_args.split, len(file.documents) - 1), (samples, args.global_batch_size), strict=False
        )
    )
    assert np.array_equal(native_train.map, train.samples_mapping[:])
    assert np.array_equal(native_validation.map, validation.samples_mapping[:])
    for index in range(min(len(train), 400)):
        expected = train[index]
        found = native_train[index]
        for part, key in zip(found, ("text_enc", "text_dec", "labels"), strict=True):
            assert np.array_equal(part, expected[key])
        assert np.array_equal(expected["labels"] >= 0, expected["loss_mask"])
