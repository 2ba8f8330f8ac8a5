"""docs/T5-Parallelism.pdf: it can be drawn, and each formula on it is what t5bench/costmodel computes."""

import re
from pathlib import Path

import pytest
from support import REPO_ROOT

from docs import make_slides
from t5bench.costmodel import traffic
from t5bench.costmodel.job import Parallel
from t5bench.costmodel.parameters import parameters
from t5bench.plan.launchers import declarations

FORMULAS = dict(re.findall(r'^  "(\w+)": \((".*")\),$', (REPO_ROOT / "docs/slides.md").read_text(), re.MULTILINE))


def test_the_slides_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["make_slides", str(tmp_path / "slides.pdf")])
    make_slides.main()
    assert len(re.findall(rb"/Type /Page\b", (tmp_path / "slides.pdf").read_bytes())) == 15


@pytest.mark.parametrize("strategy", [strategy.name for strategy in declarations()])
def test_formulas_agree_with_the_model(strategy: str):
    job = make_slides.TRAININGS[strategy]
    shape = make_slides.MODEL
    memory = make_slides.most(strategy, make_slides.memory_bytes)
    sent = make_slides.most(strategy, make_slides.sent_bytes)
    s = shape.encoder_length
    d = shape.decoder_length
    t = job.parallel.tensor
    pp = job.parallel.pipeline
    letters = {
        "P": parameters(shape),
        "p": parameters(shape, Parallel(t, pp), pp - 1),  # the last stage is the fullest
        "w": traffic.large_tensors(job, 0),
        "A": memory["activations"],
        "W": memory.get("gathered"),
        "N": job.parallel.data,
        "m": job.micro_batches,
        "g": make_slides.GATHERED_AGAIN,
        "L": shape.encoder_layers,
        "V": shape.padded_vocabulary,
        "h": shape.hidden,
        "t": t,
        "r": 2 * (t - 1) / t,
        "E": 2 * s * shape.hidden,
        "D": 2 * d * shape.hidden,
        "M": 16 * 8 * (s + 3 * d + s * s + d * d + s * d),
        "C": 3 * 4 * d,
    }
    on_a_gpu, in_an_iteration = eval(FORMULAS[strategy])
    assert eval(on_a_gpu, letters) == pytest.approx(sum(memory.values()))
    assert eval(in_an_iteration, letters) == pytest.approx(sum(sent.values()))
