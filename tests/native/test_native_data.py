"""The native engine's data: damaged files, the random numbers, the samples, and Megatron-DeepSpeed's own samples."""

from argparse import Namespace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from command_lines import parsed
from support import write_indexed_dataset

from native import data as native_data
from native.data import split_documents
from native.gpt_samples import DocumentSamples
from native.t5_samples import SpanCorruption, build_sample_map, mt19937_64
from native.token_file import TokenFile, Vocabulary

EOS = 1
SENTINELS = tuple(range(199, 99, -1))
VOCABULARY = Vocabulary(200, 0, EOS, SENTINELS, frozenset())


def dataset(
    tmp_path: Path, documents: list[list[int]], vocabulary: Vocabulary = VOCABULARY, *flags: str
) -> SpanCorruption:
    write_indexed_dataset(tmp_path / "data", documents)
    file = TokenFile(str(tmp_path / "data"))
    return SpanCorruption(parsed(*flags), file, (0, len(documents)), 20, vocabulary)


def test_the_random_numbers_are_those_of_the_standard():
    """ISO C++ [rand.predef]: the 10000th value of a default-seeded mt19937_64, and of mt19937."""
    assert next(islice(mt19937_64(5489), 9999, None)) == 9981545732273789042
    assert np.random.RandomState(5489).randint(0, 1 << 32, 10000, np.uint32)[-1] == 4123659995


def test_every_epoch_holds_every_document_once():
    samples = build_sample_map(np.arange(31), np.full(30, 100), 70, 510, 0.1, 1234)
    assert len(samples) == 90  # whole epochs
    assert sorted(samples[:, 0].tolist()) == sorted(list(range(30)) * 3)
    assert (samples[:, 1] == samples[:, 0] + 1).all()
    assert samples[:, 0].tolist() != sorted(samples[:, 0].tolist())
    assert 2 <= samples[:, 2].min() < samples[:, 2].max() == 510


def test_splits_cover_all_documents_and_one_of_no_use_is_an_error():
    assert split_documents([949.0, 50.0, 1.0], 320) == [(0, 304), (304, 320), (320, 320)]
    with pytest.raises(ValueError, match="no document"):
        build_sample_map(np.array([0, 0, 2]), np.array([600, 5]), 10, 510, 0.1, 1234)


def test_a_document_alone_is_a_sample(tmp_path: Path):
    """Cut or padded to the length; one without a label is no sample, and every epoch has each once."""
    documents = [[10 * d + i for i in range(size)] for d, size in enumerate((9, 3, 1, 4, 5, 2))]
    write_indexed_dataset(tmp_path / "data", documents)
    args = Namespace(seq_length=4, seed=1234)
    samples = DocumentSamples(args, TokenFile(str(tmp_path / "data")), (0, len(documents)), 12)
    usable = [document for document in documents if len(document) > 1]
    assert len(samples) == 15
    seen = []
    for index in range(len(samples)):
        tokens, labels = samples[index]
        own = documents[samples.documents[index]]
        seen.append(own)
        length = min(4, len(own) - 1)
        assert tokens.tolist() == own[:length] + [0] * (4 - length)
        assert labels.tolist() == own[1 : length + 1] + [-1] * (4 - length)
    for epoch in range(3):
        assert sorted(seen[5 * epoch : 5 * epoch + 5]) == sorted(usable)
    assert seen[:5] != seen[5:10]


def test_a_sample_can_be_reassembled(tmp_path: Path):
    """The decoder's spans, put where the encoder has their sentinels, give the document."""
    documents = [[2 + (7 * d + i) % 90 for i in range(40 + d)] + [EOS] for d in range(20)]
    data = dataset(tmp_path, documents, VOCABULARY, "--short-seq-prob", "0")
    for index in range(len(data)):
        encoder, decoder, labels = data[index]
        length = int((labels >= 0).sum())
        assert decoder[0] == EOS and (decoder[1:length] == labels[: length - 1]).all() and labels[length - 1] == EOS
        assert (labels[length:] == -1).all() and (decoder[length:] == 0).all()
        spans: dict[int, list[int]] = {}
        for token in labels[: length - 1].tolist():
            if token in SENTINELS:
                spans[token] = []
            else:
                next(reversed(spans.values())).append(token)
        assert list(spans) == list(SENTINELS[: len(spans)])
        document = documents[int(data.map[index][0])]
        assert [t for token in encoder[encoder != 0].tolist() for t in spans.get(token, [token])] == document
        corrupted = [token for span in spans.values() for token in span]
        assert 0 < len(corrupted) <= max(1, round(0.15 * len(document))) and EOS not in corrupted


def test_continuation_tokens_stay_with_their_word(tmp_path: Path):
    """Tokens above 50 continue the word before them, so no span begins or ends inside a word."""
    vocabulary = Vocabulary(200, 0, EOS, SENTINELS, frozenset(range(50, 100)))
    words = [[2 + i, 50 + i] for i in range(25)]
    data = dataset(tmp_path, [[t for word in words for t in word] + [EOS]], vocabulary, "--short-seq-prob", "0")
    for index in range(len(data)):
        spans = [token for token in data[index][2].tolist() if 2 <= token < 100]
        assert spans
        assert all(spans[i] + 48 == spans[i + 1] for i in range(0, len(spans), 2))


@pytest.mark.parametrize("family", ["t5", "gpt"])
def test_a_longer_run_has_the_samples_of_its_plan_and_then_another_order(tmp_path: Path, family: str):
    """With the samples of the plan as they were, whatever follows."""
    write_indexed_dataset(tmp_path / "data", [[2 + (7 * d + i) % 90 for i in range(60)] + [EOS] for d in range(20)])
    file = TokenFile(str(tmp_path / "data"))
    args = parsed()
    args.family = family
    args.seq_length = 60
    args.document_samples = False  # the flag is a decoder's, and these words are a T5's
    first = native_data.samples_of(args, file, (0, 20), 20, VOCABULARY)
    both = native_data.samples_in_turn(args, file, (0, 20), [20, 40], VOCABULARY)
    assert len(both) == 40
    assert all((both[i][0] == first[i][0]).all() for i in range(20))
    orders = [[tuple(both[i][0].tolist()) for i in range(begin, begin + 20)] for begin in (0, 20)]
    assert orders[0] != orders[1]


def test_ranks_share_an_iteration_as_megatrons_sampler_does():
    args = Namespace(micro_batch_size=2, global_batch_size=8, dp=2)
    assert list(native_data.step_indices(args, 0, 0, 17)) == [[0, 1, 4, 5], [8, 9, 12, 13]]
    assert list(native_data.step_indices(args, 1, 8, 16)) == [[10, 11, 14, 15]]
