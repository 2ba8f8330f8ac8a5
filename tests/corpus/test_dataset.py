"""The indexed dataset: its format, damage to it, the tokens in it, and Megatron's own tool as the judge of both."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import warnings
from array import array
from pathlib import Path

import numpy as np
import pytest
from corpus_files import ARTICLES, SAMPLE, texts_of, write_jsonl
from support import write_data_record, write_indexed_dataset

from t5bench import Problem
from t5bench.__main__ import main
from t5bench.corpus import source
from t5bench.corpus.checksum import describes
from t5bench.corpus.convert import convert_source
from t5bench.corpus.index import read_index, read_record, write_index
from t5bench.corpus.source import Source
from t5bench.corpus.tokenizer import DocumentEncoder, copy_tokenizer

DOCUMENTS = [[5, 6, 7, 1], [8, 9, 1], [65535, 1], [1]]
SPECIAL_TEXTS = [
    "a </s> b", "It ends here. </s>", "</s>", "</s></s>", "<extra_id_0>", "a<extra_id_3> b <extra_id_10>.",
    "<pad> and  <unk> ", "<s> begins a sequence", "a<s>b", "<s>", " <s> </s> ", "<s></s><s>", "[PAD] <mask>",
    "<extra_id_0><extra_id_0>\n<extra_id_99>", "<extra_id_100> and </s", "< s > <S> </ s>", "\u2581 b\u2581",
    "na\u00efve \ufb01ne \u6771\u4eac \U0001f600 \u202f \x00 a\u2028b", "", " ", "\n\n",
]  # fmt: skip


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    write_indexed_dataset(tmp_path / "corpus_document", DOCUMENTS)
    return tmp_path / "corpus_document"


def documents_of(prefix: Path) -> list[list[int]]:
    index = read_index(prefix)
    tokens = np.fromfile(f"{prefix}.bin", index.dtype)
    return [document.tolist() for document in np.split(tokens, np.cumsum(index.sizes)[:-1])]


def ids_of(encoder: DocumentEncoder, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in encoder.encode_batch(texts)]


def test_writer_and_reader_follow_the_format(dataset: Path, tmp_path: Path) -> None:
    index = read_index(dataset)
    path = dataset.with_suffix(".idx")
    assert (index.tokens, index.dtype, list(index.sizes)) == (10, "uint16", [4, 3, 2, 1])
    assert (list(index.pointers), list(index.doc_idx)) == ([0, 8, 14, 18], [0, 1, 2, 3, 4])
    write_index(tmp_path / "written", "uint16", array("i", [4, 3, 2, 1]), array("q", range(5)))
    assert (tmp_path / "written.idx").read_bytes() == path.read_bytes()
    # Two documents of two sequences each.
    path.write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 4, 3) + path.read_bytes()[34:82])
    path.write_bytes(path.read_bytes() + struct.pack("<3q", 0, 2, 4))
    assert list(read_index(dataset).doc_idx) == [0, 2, 4]


DAMAGE = [
    (".idx", 0, b"TNTIDX\0\0", "does not begin with MMIDIDX"),
    (".idx", 9, b"\x02", "format version is 2"),
    (".idx", 17, b"\x07", "7 is not the code"),
    (".idx", 18, b"\x03", "is corrupt: its header announces 3 sequences"),
    (".idx", 46, b"\0\0\0\0", "a sequence of 0 tokens"),
    (".idx", 58, b"\x02", "offsets do not match"),
    (".idx", 82, b"\x01", "document boundaries"),
    (".idx", 114, b"\x05", "document boundaries"),
    (".idx", 122, b"more", "is corrupt"),
    (".bin", 20, b"\0\0", "not the file that its index describes"),
]


def test_every_truncation_and_other_damage_are_named(dataset: Path) -> None:
    wholes = {suffix: dataset.with_suffix(suffix).read_bytes() for suffix in (".idx", ".bin")}
    damage = [(end, whole[:size], "is truncated" if size else "is empty")
              for end, whole in wholes.items() for size in range(len(whole))]  # fmt: skip
    for end, offset, new, message in DAMAGE:
        damage.append((end, wholes[end][:offset] + new + wholes[end][offset + len(new) :], message))
    for end, content, message in damage:
        dataset.with_suffix(end).write_bytes(content)
        with pytest.raises(Problem, match=message) as caught:
            read_index(dataset)
        assert f"{dataset}{end}" in str(caught.value) and "prepare_xsum_megatron.sh" in caught.value.remedy
        dataset.with_suffix(end).write_bytes(wholes[end])


@pytest.mark.parametrize("legacy", [True, False])
def test_ids_are_those_of_the_slow_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool) -> None:
    """A tokenizer with `legacy` is SentencePiece but for special tokens, one without it departs from it."""
    if not legacy:
        pytest.importorskip("google.protobuf", reason="transformers needs protobuf for tokenizers without `legacy`")
    from transformers import T5Tokenizer

    directory = shutil.copytree(SAMPLE / "tokenizer", tmp_path / "tokenizer")
    config = json.loads((directory / "tokenizer_config.json").read_text()) | {"legacy": legacy}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    slow = T5Tokenizer.from_pretrained(directory)
    encoder = DocumentEncoder(directory)
    assert slow.add_special_tokens({"bos_token": "<s>"}) == 1  # as upstream's tool does
    assert encoder.exact == legacy and encoder.vocabulary == len(slow) == 4101
    assert slow.convert_tokens_to_ids(["<pad>", "</s>", "<unk>"]) == [0, 1, 2]
    assert slow.convert_tokens_to_ids([f"<extra_id_{n}>" for n in range(100)]) == [*range(4099, 3999, -1)]
    draw = random.Random(20)
    texts = ARTICLES[:40] + SPECIAL_TEXTS
    blocks = [(32, 127), (32, 127), (0, 0x300), (0x2000, 0x3000), (0x4E00, 0x5000), (0x1F300, 0x1F700)]
    texts += ["".join(chr(draw.randrange(*draw.choice(blocks))) for _ in range(number % 60)) for number in range(1000)]
    slowly = []
    encode = encoder._tokenizer.encode
    monkeypatch.setattr(encoder._tokenizer, "encode", lambda text, **kw: slowly.append(text) or encode(text, **kw))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "This sequence already has </s>"
        expected = [slow.encode(text) for text in texts]
    for text, mine, theirs in zip(texts, ids_of(encoder, texts), expected, strict=True):
        assert mine == theirs, repr(text)
    assert slowly == ([text for text in texts if encoder.has_special_text(text)] if legacy else texts)
    assert not any(2 in ids or ids.index(1) < len(ids) - 1 for ids in expected[:40])


def test_building_keeps_order_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process or several, with blocks of any size."""
    encoder = DocumentEncoder(SAMPLE / "tokenizer")
    texts = ARTICLES * 2
    texts[400:400] = ["", " \n", "one <extra_id_1> two", "word " * 600, "a <s>tag</s>", "< s >"]
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": text, "other": 1} for text in texts])
    path.write_text(path.read_text() + "\n\n")
    monkeypatch.setattr(source, "BLOCK_BYTES", 20_000)
    expected = ids_of(encoder, [text for text in texts if text.strip()])
    for workers, encoder.dtype, limit, skipped in ((1, "int32", None, 2), (3, "uint16", 401, 2), (1, "uint16", 9, 0)):
        counts = convert_source(Source(path, limit=limit), tmp_path / "m", encoder, workers, job=[workers, limit])
        made = expected[:limit]
        assert documents_of(tmp_path / "m_document") == made
        assert read_index(tmp_path / "m_document").dtype == encoder.dtype
        special = {None: 2, 401: 1, 9: 0}[limit]
        numbers = {"documents": len(made), "tokens": sum(map(len, made)), "skipped_empty": skipped}
        assert counts == numbers | {"special_text_documents": special}
        assert texts_of(tmp_path / "m.jsonl") == [text for text in texts if text.strip()][:limit]


UPSTREAM = """
import json, sys
import merge_datasets, preprocess_data
from argparse import Namespace
from megatron.data.indexed_dataset import MMapIndexedDataset

def encode(self, line, original=preprocess_data.Encoder.encode):
    ids, sizes, length = original(self, line)
    if self.args.append_eod:
        sizes["text"][-1] += 1  # the tool appends the end of text and does not count it
    return ids, sizes, length

preprocess_data.Encoder.encode = encode
for name, options in json.loads(sys.argv[1]).items():
    sys.argv[1:] = ["--input", "text.jsonl", "--output-prefix", name, "--workers", "1", "--seq-length", "512", *options]
    preprocess_data.main()
    dataset = MMapIndexedDataset(f"ours_{name}_document", skip_warmup=True)
    print([dataset[i].tolist() for i in range(len(dataset))], file=open(f"{name}.read", "w"))
merge_datasets.main(Namespace(input="parts", output_prefix="merged_theirs"))
"""


def tokenizers(directory: Path, megatron_dir: Path) -> dict[str, tuple[str, Path, list[str]]]:
    """By name: family, directory and the tool's arguments, for T5's, GPT-2's and two other tokenizers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    gpt2 = megatron_dir / "examples_deepspeed" / "rebase"
    copy_tokenizer(gpt2, directory / "gpt2")
    copy_tokenizer(gpt2, directory / "hf_gpt2")
    (directory / "hf_gpt2" / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    words = sorted({word for text in ARTICLES for word in text.split()})
    vocabulary = dict(zip(["<end>", "<unk>", *words], [69_999, 0, *range(69_998, 0, -1)], strict=False))
    vocabulary |= {f"w{number}": number for number in set(range(70_000)) - set(vocabulary.values())}
    many = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    many.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=many, eos_token="<end>", unk_token="<unk>").save_pretrained(
        directory / "many"
    )
    bpe = ["--vocab-file", "gpt2/vocab.json", "--merge-file", "gpt2/merges.txt"]
    return {
        "t5": ("t5", SAMPLE / "tokenizer", []),
        "gpt2": ("gpt", directory / "gpt2", ["--tokenizer-type", "GPT2BPETokenizer", *bpe]),
        "hf_gpt2": ("gpt", directory / "hf_gpt2", []),
        "many": ("gpt", directory / "many", []),
    }


def test_files_are_those_of_megatrons_own_tools(
    megatron_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    # For an empty document the tool writes a lone </s>.
    texts = [text for text in ARTICLES[:100] + SPECIAL_TEXTS if text.strip()]
    text = Source(write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts]))
    options = {}
    kinds = tokenizers(tmp_path, megatron_dir)
    for name, (family, directory, arguments) in kinds.items():
        encoder = DocumentEncoder(directory, family)
        convert_source(text, tmp_path / f"ours_{name}", encoder, 1)
        assert (encoder.exact, encoder.dtype) == ((True, "uint16") if name != "many" else (False, "int32"))
        options[name] = arguments or ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(directory)]
        options[name] += ["--append-eod"] if family == "gpt" else []
    (tmp_path / "parts").mkdir()
    for number in range(20):
        documents = [[number, 5 + i] * (1 + i % 3) for i in range(number + 1)]
        write_indexed_dataset(tmp_path / "parts" / f"part{number}", documents)
    pairs = tmp_path / "parts" / "part11.idx"  # documents of two sequences each
    sizes_and_pointers = pairs.read_bytes()[34 : 34 + 12 * 12]
    boundaries = struct.pack("<7q", *range(0, 13, 2))
    pairs.write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 12, 7) + sizes_and_pointers + boundaries)
    assert main(["merge-data", str(tmp_path / "merged_ours"), str(tmp_path / "parts")]) == 0
    # The tool needs this name when it is imported, and nothing of it for whole documents.
    (tmp_path / "nltk.py").write_text("class tokenize:\n class punkt:\n  PunktLanguageVars = object\n")
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{megatron_dir}:{megatron_dir}/tools"}
    command = [sys.executable, "-c", UPSTREAM, json.dumps(options)]
    subprocess.run(command, env=environment, cwd=tmp_path, timeout=200, check=True)
    pairs = [(f"ours_{name}_document", f"{name}_text_document") for name in kinds] + [("merged_ours", "merged_theirs")]
    for ours, theirs in pairs:
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"{ours}{suffix}").read_bytes() == (tmp_path / f"{theirs}{suffix}").read_bytes(), ours
    for name in kinds:
        assert json.loads((tmp_path / f"{name}.read").read_text()) == documents_of(tmp_path / f"ours_{name}_document")


def test_parts_that_do_not_match_are_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def merge(*parts: str) -> str:
        status = main(["merge-data", *(str(tmp_path / part) for part in ("new/all", *parts))])
        return f"{status} {capsys.readouterr().err}"

    for name, checksum in (("a", "1"), ("b", "1"), ("c", "2"), ("d", None)):
        write_indexed_dataset(tmp_path / name, DOCUMENTS)
        if checksum:
            write_data_record(tmp_path / name, tokenizer="t", tokenizer_checksum=checksum)
    write_index(tmp_path / "e", "int32", array("i", [2]), array("q", [0, 1]))
    (tmp_path / "e.bin").write_bytes(bytes(8))
    (tmp_path / "f.idx").write_bytes((tmp_path / "a.idx").read_bytes()[:-1])
    (tmp_path / "f.bin").write_bytes(b"x")
    refused = {"c": "c has the tokenizer_checksum 2, but ", "d": "tokenizer_checksum None", "e": "dtype int32"}
    for part, message in (refused | {"f": "f.idx is truncated", "g": "does not exist"}).items():
        said = merge("a", part)
        assert said.startswith("2 error: ") and message in said and not list((tmp_path).glob("new/*"))
    assert "no part records its tokenizer" in merge("d", "d")
    shutil.rmtree(tmp_path / "new")
    assert merge("a.idx", "b.bin").startswith("0")
    record = json.loads((tmp_path / "new" / "all.meta.json").read_text())
    assert record == record | {"tokenizer_checksum": "1", "documents": 8, "dtype": "uint16"}
    assert describes(record, str(tmp_path / "new" / "all")) and documents_of(tmp_path / "new" / "all") == DOCUMENTS * 2
    assert "all.bin already exists and is never overwritten" in merge("a", "b")


def test_a_pipe_in_place_of_the_record_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.meta.json")
    assert read_record(tmp_path / "data") == {}
