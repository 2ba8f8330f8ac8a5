"""Packing a comparison, and what `verify` says about packages that were tampered with."""

import hashlib
import io
import json
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
from made_runs import START, make_run, seal
from support import REPO_ROOT, STRATEGIES

from t5bench.__main__ import main
from t5bench.record.files import write_json
from t5bench.record.machine import commit
from t5bench.record.records import load, write_list
from t5bench.record.settings import BY_NAME
from t5bench_verify.pack import archive, write_file
from t5bench_verify.relations import contradictions

Files = dict[str, bytes]
Change = Callable[[Files], object]
DDP, ZERO1, FAILED = "runs/repeat1/ddp", "runs/repeat1/zero1", "runs/repeat1/zero3"
LOG, METRICS, PART, SEAL = (f"{ZERO1}/{name}" for name in ("node0.log", "metrics.jsonl", "node0.json", "node0.sha256"))
SAMPLES, COMMAND = f"{ZERO1}/node0.samples.jsonl", f"{ZERO1}/node0.command.sh"
FIGURES, PAGE, CONTENTS, LIST = "comparison/comparison.json", "comparison/index.html", "package.json", "runs/sweep.json"


def unpacked(package: Path) -> Files:
    with tarfile.open(package) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a sweep of four runs, of which one failed and one left no record."""
    runs = tmp_path_factory.mktemp("sweep") / "all"
    times = [100.0 + number % 7 for number in range(40)]
    make_run(runs / "repeat1" / "ddp", elapsed_ms=times)
    later = {"start": START + 100.0}
    make_run(runs / "repeat1" / "zero1", "zero1", elapsed_ms=times[::-1], sent_per_iteration=1e6, sample_seconds=0.5,
             **later)  # fmt: skip
    longer = {"TRAIN_ITERS": "40"}
    make_run(
        runs / "repeat1" / "zero3",
        "zero3",
        elapsed_ms=times[:9],
        settings=longer,
        status="crashed",
        start=START + 200.0,
    )
    rank = {"host": "node0", "wall_ms": 9.0, "parts": {"forward": 9.0}, "operators": 1000, "processor": {}}
    ranks = [rank | {"rank": number, "waited_for": {}, "links": {}} for number in range(2)]
    write_json(runs / "repeat1" / "ddp" / "profile.json", {"ranks": ranks})
    zero1 = runs / "repeat1" / "zero1"
    write_json(zero1 / "ds_config.json", load(zero1).plan.ds_config)
    seal(runs / "repeat1" / "ddp")
    write_list(runs, ["repeat1/ddp", "repeat1/zero1", "repeat1/zero3", "repeat1/hybrid"])
    output = runs.parent / "package.tar.gz"
    assert main(["pack", str(runs), "-o", str(output)]) == 0
    return output


# ---- ways of tampering: a file's text, a value in it, whole files ----------------------------------------------------


def text(name: str, pattern: str, to: str, count: int = 1) -> Change:
    def change(files: Files) -> None:
        found, done = re.subn(pattern, to, files[name].decode(), count=count, flags=re.DOTALL)
        assert done and found.encode() != files[name]
        files[name] = found.encode()

    return change


def value(name: str, *path: str | int, to: object) -> Change:
    def change(files: Files) -> None:
        content = place = json.loads(files[name])
        for key in path[:-1]:
            place = place[key]
        assert place[path[-1]] != to
        place[path[-1]] = to
        files[name] = json.dumps(content, indent=2).encode() + b"\n"

    return change


def without(prefix: str) -> Change:
    return lambda files: [files.pop(name) for name in list(files) if name.startswith(prefix)]


def copied(name: str, to: str) -> Change:
    return lambda files: files.update(
        {to + key[len(name) :]: files[key] for key in list(files) if key.startswith(name)}
    )


def both(*changes: Change) -> Change:
    return lambda files: [change(files) for change in changes]


def moved(name: str, to: str) -> Change:
    return both(without(to), copied(name, to), without(name))


def settings(name: str, to: str) -> Change:
    role = BY_NAME[name].role
    return value(PART, "plan", "settings_by_role", role, name, to=to)


def row(*path: str | int, to: object) -> Change:
    return value(FIGURES, "groups", 0, "rows", 1, *path, to=to)


def halved(content: bytes) -> bytes:
    """Of a log or of metrics: everything took half the time."""
    for name, factor in ((rb"\(ms\)|elapsed_ms", 0.5), (rb"samples.per.second", 2)):
        pattern = rb'((?:%b)"?: )([\d.]+)' % name
        content = re.sub(pattern, lambda found, by=factor: b"%b%a" % (found[1], float(found[2]) * by), content)
    return content


ELAPSED = r"(iteration +20/.*?\(ms\): )10(\d)"  # in the log; in metrics.jsonl:
THE_SAME = r'("iteration": 20,.*?"elapsed_ms": )10(\d)'

# What checksums show.
PLAIN: dict[str, tuple[Change, str]] = {
    "a digit in a sample": (text(SAMPLES, "1000000", "1000001"), f"{SAMPLES} was changed"),
    "a figure of the CSV": (text("comparison/comparison.csv", "103", "93"), "comparison.csv was changed"),
    "a host": (value(PART, "host", to="elsewhere"), f"{PART} was changed"),
    "the checksums of a run": (text(SEAL, "[0-9a-f]{8}", "00000000"), f"{SEAL} was changed"),
    "the merged record": (value(f"{ZERO1}/run.json", "status", to="crashed"), "run.json was changed"),
    "the list of runs": (value(LIST, "runs", to=["repeat1/ddp"]), f"{LIST} was changed"),
    "a log taken out": (without(LOG), f"{LOG} is missing"),
    "the page taken out": (without(PAGE), f"{PAGE} is missing"),
    "a file added": (lambda files: files.update({f"{ZERO1}/notes.txt": b"better"}), "notes.txt was added"),
    "the contents taken out": (without(CONTENTS), f"{CONTENTS} cannot be read"),
    "the contents cut off": (text(CONTENTS, ".{40}$", ""), f"{CONTENTS} cannot be read"),
    "another baseline": (value(CONTENTS, "baseline", to="zero1"), f"{FIGURES}: baseline is ddp"),
    "a peak given": (value(CONTENTS, "allow", to=["COLOUR"]), "--allow COLOUR is not known"),
    "a path out of the package": (lambda files: files.update({"../evil": b"x"}), "../evil is not a plain file"),
    "a second file by another spelling": (lambda files: files.update({f"./{PAGE}": b"x"}), f"{PAGE} is in the package"),
    "a name for the terminal": (lambda files: files.update({"\x1b[2Jevil\udcff": b"x"}), r"\x1b[2Jevil\udcff is not"),
    "a path too deep": (lambda files: files.update({f"runs/{'a/' * 1500}x": b"x"}), "a/x is not a plain"),
    "a program beside the runs": (lambda files: files.update({"jinja2.py": b"x"}), "jinja2.py is not a plain file"),
}  # fmt: skip

# With new checksums of the package, and of the run where that says so: what is left is that nothing follows any more.
SEALED: dict[str, tuple[Change, str]] = {
    "a digit in a log": (text(LOG, ELAPSED, r"\g<1>11\2"), r"has elapsed_ms 10\d.*, node0.log line \d+ has 11\d"),
    "a digit in the metrics": (text(METRICS, THE_SAME, r"\g<1>11\2"), "metrics.jsonl line 20 has elapsed_ms"),
    "a loss in the metrics": (text(METRICS, r'(_loss": )7', r"\g<1>6"), "metrics.jsonl line 1 has lm_loss 6"),
    "a clock in the metrics": (text(METRICS, r'("time": 176370010)1', r"\g<1>2"), "line .* has time 176370010"),
    "a time in log and metrics": (
        both(text(LOG, ELAPSED, r"\g<1>11\2"), text(METRICS, THE_SAME, r"\g<1>11\2")), "do not give 16 samples"),
    "each time and throughput in log and metrics": (
        lambda files: files.update({name: halved(files[name]) for name in (LOG, METRICS)}), "but their lines came"),
    "a throughput in log and metrics": (
        both(text(LOG, r"second: 1\d", "second: 19"), text(METRICS, r'second": 1\d', 'second": 19')), "not give 16"),
    "the last lines of the metrics": (text(METRICS, r'\{"iteration": 31,.*', ""), "has 30 .*of its last attempt"),
    "the last lines of both": (
        both(text(METRICS, r'\{"iteration": 31,.*', ""), text(LOG, r"\S+  iteration +31/.*?(?=\S+  peak)", "")),
        "lacks iteration 31 of 40"),
    "a line in the middle of both": (
        both(text(METRICS, r'\{"iteration": 9,[^\n]*\n', ""), text(LOG, r"\S+  iteration +9/[^\n]*\n", "")),
        "lacks iteration 9 of 40"),
    "a resume that began anew": (text(METRICS, r"\A", '{"resumed_from": 5}\n'), "1, in a run that resumed"),
    "lines in another order": (text(METRICS, r"^([^\n]*\n)([^\n]*\n)", r"\2\1"), "cannot follow: iteration 1 comes"),
    "a setting": (settings("LR", "0.1"), "LR is '0.1', but the engine was given --lr 0.0001"),
    "a setting with its argument": (
        both(settings("GLOBAL_BATCH_SIZE", "32"), text(PART, '(--global-batch-size",\\s+)"16"', r'\1"32"', 2),
             value(PART, "plan", "layout", "micro_batches", to=16)),
        "counts 16 samples after 1 iterations, which have 32"),
    "a setting that no argument has": (settings("PROFILE_ITERATION", "9"), "'9', but the layout or the command has"),
    "the same processes in another layout": (
        both(value(PART, "plan", "layout", "tp", to=2), value(PART, "plan", "layout", "dp", to=1)),
        "TENSOR_PARALLEL_SIZE is '1', but the layout or the command has '2'"),
    "a setting that is no number": (settings("SAMPLE_INTERVAL", "often"), "SAMPLE_INTERVAL must be a number"),
    "fewer iterations": (settings("TRAIN_ITERS", "30"), "TRAIN_ITERS is '30', but the engine was given"),
    "another layout": (value(PART, "plan", "layout", "dp", to=4), "a layout of"),
    "a word of the command": (text(PART, '"--seed",\\s+"1234"', '"--seed", "1235"'), "was given --seed 1235"),
    "a failed run made complete": (
        value(f"{FAILED}/node0.json", "status", to="complete"), "after its last line lacks iteration 10"),
    "a complete run made failed": (value(PART, "status", to="crashed"), r"rows\[zero1\].status is complete, but"),
    "a reason": (value(f"{FAILED}/node0.json", "reason", to="the network"), r"rows\[zero3\].reason is , but the logs"),
    "an end before the beginning": (value(PART, "ended", to="2025-11-20T00:00:00.000Z"), "it began 2025-11-21T"),
    "another year": (text(PART, r'"(started|ended)": "2025', r'"\1": "2024', 2), "is outside the time of the run"),
    "the peak memory": (value(PART, "peak_memory", 0, "host_mib", to=4.0), "disagree about peak memory"),
    "the vocabulary": (value(PART, "padded_vocab_size", to=8448), "disagree about padded vocab"),
    "a stage of ZeRO that there is not": (
        value(PART, "plan", "ds_config", "zero_optimization", "stage", to="x"), "ds_config makes no sense"),
    "no strategy": (value(PART, "plan", "strategy", "name", to=""), "inconsistent: its strategy is ''"),
    "another strategy": (
        value(PART, "plan", "strategy", "name", to="zero2"), "'zero2', but its launcher calls it megatron-zero1"),
    "the CPU": (value(PART, "cpu", "cores", to="many"), f"{PART} is inconsistent"),
    "a GPU's memory": (value(PART, "devices", to=[{"name": "g", "memory_mib": "lots"}]), f"{PART} is inconsistent"),
    "the data": (value(PART, "data", "idx_sha256", to="beef"), "they differ in idx_sha256"),
    "a version": (value(PART, "versions", "torch", to="2.4.0"), r"rows\[zero1\].runs\[0\].versions.torch is 2.13.0"),
    "the engine": (value(PART, "plan", "engine", to="native"), "ENGINE is 'megatron', but the"),
    "the device": (value(PART, "plan", "device", to="cuda"), "its device is cuda, but the command's environment"),
    "the network's counters": (
        text(SAMPLES, r'"sent": \d', '"sent": 9'), "bytes_sent_per_iteration is|samples.jsonl"),
    "a negative figure": (text(METRICS, r'"grad_norm": ', '"grad_norm": -'), "metrics.jsonl line 1 is inconsistent"),
    "a figure": (row("milliseconds_per_iteration", "median", to=90.0), r"milliseconds_per_iteration.median is 90"),
    "a figure given twice": (text(FIGURES, '("median": )', r"\g<1>9.0, \1"), "comparison.json line .* does not follow"),
    "a ratio": (row("throughput_ratio", "median", to=2.0), r"rows\[zero1\].throughput_ratio.median is 2.0, but"),
    "a verdict": (value(FIGURES, "verdicts", 0, to="zero1 wins"), r"verdicts\[0\] is zero1 wins, but the logs"),
    "a problem taken out": (value(FIGURES, "problems", to=[]), r"problems\[0\] is nothing, but the logs"),
    "a figure of the table": (text("comparison/comparison.md", "103", "93"), "comparison.md line .* does not follow"),
    "the page": (text(PAGE, "zero1", "zero9"), "index.html line .* does not follow"),
    "a title in a drawing of the page": (
        both(text(PAGE, "(<svg[^>]*>)", r"\1<h1>zero1 wins</h1>"), value(CONTENTS, "drawn_by", to="1")),
        "index.html line"),
    "a program in a drawing of the page": (
        both(text(PAGE, "<svg", '<svg OnLoad="alert(1)"'), value(CONTENTS, "drawn_by", to="1")), "index.html line"),
    "a curve that another matplotlib is said to have drawn": (
        both(text(PAGE, r'(<path d="M \d+)(?=[^"]*"[^>]*style="fill: none; stroke)', r"\g<1>9", 40),
             value(CONTENTS, "drawn_by", to="1")), "draws other curves from the logs"),
    "a label in a drawing that another matplotlib is said to have drawn": (
        both(text(PAGE, "(<text style[^>]*>)zero1", r"\1zero9"), value(CONTENTS, "drawn_by", to="1")),
        "drawing 1 says 'zero9', which does not follow"),
    "a title in a drawing that another matplotlib is said to have drawn": (
        both(text(PAGE, "(<g data-row=[^>]*><title>)zero1", r"\1zero9"), value(CONTENTS, "drawn_by", to="1")),
        "drawing 1 says 'zero9: .*', which does not follow"),
    "a bar of the picture that another matplotlib is said to have drawn": (
        both(text(PAGE, r'(y="22" width=")\d+', r"\g<1>9"), value(CONTENTS, "drawn_by", to="1")),
        "index.html line .* does not follow"),
    "the list of runs in another order": (
        value(LIST, "runs", to=["repeat1/zero1", "repeat1/ddp", "repeat1/zero3", "repeat1/hybrid"]),
        "lists repeat1/zero1 before repeat1/ddp, which started before it"),
    "a curve of the page": (text(PAGE, r'(<path d="M \d+)', r"\g<1>9"), "index.html line .* does not follow"),
    "a failed run taken out": (without(FAILED), f"{FAILED} is on the sweep's list of runs but not in the package"),
    "a failed run taken off the list": (
        both(without(FAILED), value(LIST, "runs", to=["repeat1/ddp", "repeat1/zero1", "repeat1/hybrid"])),
        r"rows\[zero3\].status is crashed, but the logs give nothing"),
    "a failed run that is said to have left nothing": (
        both(without(FAILED), value(CONTENTS, "absent", to=["repeat1/hybrid", "repeat1/zero3"])), r"rows\[zero3\]"),
    "a run listed as absent": (
        value(CONTENTS, "absent", to=["repeat1/hybrid", "repeat1/zero1"]), f"{ZERO1} is listed as absent, but"),
    "an absent run forgotten": (value(CONTENTS, "absent", to=[]), "runs/repeat1/hybrid is on the sweep's list"),
    "every run taken out": (without("runs/repeat1"), "there is no run"),
    "a run added under a hidden name": (copied(ZERO1, "runs/.zero1"), "repeat1/zero1 is left out: it is a copy"),
    "a page added": (lambda files: files.update({"comparison/all.html": b"zero1 wins"}), "all.html was added"),
    "a node in the merged record": (
        value(f"{ZERO1}/run.json", "nodes", 0, "host", to="elsewhere"), "run.json differs from the nodes' parts"),
    "a run added": (copied(ZERO1, "runs/repeat2/zero1"), "runs/repeat2/zero1 is left out: it is a copy"),
    "a run in another's place": (copied(DDP, ZERO1), r"rows\[zero1\]"),
    "two runs swapped": (
        both(moved(DDP, "runs/x"), moved(ZERO1, DDP), moved("runs/x", ZERO1)),
        "comparison.json: .*directory is runs/repeat1/ddp, but the logs"),
    "the command": (text(COMMAND, "--seed 1234", "--seed 1235"), "has another command than"),
    "a command before it": (text(COMMAND, "^", "export OMP_NUM_THREADS=8\n"), "has another command than"),
    "the configuration in the command": (text(COMMAND, '"stage": 1', '"stage": 2'), "has another command than"),
    "no command": (without(COMMAND), "node0.command.sh is missing"),
    "no merged record": (without(f"{ZERO1}/run.json"), "run.json differs from the nodes' parts"),
    "DeepSpeed's configuration": (
        value(f"{ZERO1}/ds_config.json", "zero_optimization", "stage", to=2), "ds_config.json differs from the plan's"),
    "the log of another run": (copied(f"{DDP}/node0.log", LOG), "metrics.jsonl line 1 has elapsed_ms"),
}  # fmt: skip


def resealed(files: Files) -> None:
    """New checksums in every run, as its recorder writes them, and of the package."""
    for name in [name for name in files if name.endswith(".sha256")]:
        run, own = name.rpartition("/")[0], re.findall(r"  (\S+)", files[name].decode())
        sums = ((hashlib.sha256(files[f"{run}/{file}"]).hexdigest(), file) for file in own if f"{run}/{file}" in files)
        files[name] = "".join(f"{checksum}  {file}\n" for checksum, file in sums).encode()
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != CONTENTS}
    files[CONTENTS] = json.dumps(json.loads(files[CONTENTS]) | {"files": sums}).encode()


WAYS = {name: (change, False, re.escape(said)) for name, (change, said) in PLAIN.items()}
WAYS |= {f"{name}, with new checksums": (change, True, said) for name, (change, said) in SEALED.items()}


@pytest.mark.parametrize(("change", "reseal", "expected"), WAYS.values(), ids=WAYS)
def test_tampering_is_named(package: Path, tmp_path: Path, capsys, change: Change, reseal: bool, expected: str):
    files = unpacked(package)
    change(files)
    if reseal:
        resealed(files)
    (tmp_path / "package.tar.gz").write_bytes(archive(files))
    assert main(["verify", str(tmp_path / "package.tar.gz")]) == 1
    lines = capsys.readouterr().out.splitlines()
    # The comparison's own problems are told, too, and the commit that may predict other figures.
    assert all(line.startswith(("finding: ", "problem of the comparison: ", "note: this is commit")) for line in lines)
    findings = [line for line in lines if line.startswith("finding: ")]
    assert any(re.search(expected, line) for line in findings), findings


def test_an_honest_package_is_verified_wherever_it_lies(package: Path, tmp_path: Path, monkeypatch, capsys):
    """And packing it again gives the same bytes."""
    (tmp_path / "here").write_bytes(package.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "here"]) == 0
    assert re.search(r"all \d{3,} numbers of the comparison follow", capsys.readouterr().out)
    assert main(["pack", str(package.parent / "all"), "-o", "again"]) == 0
    said = capsys.readouterr()
    assert Path("again").read_bytes() == package.read_bytes()
    assert b"Where the time went" in unpacked(package)[PAGE], "what the profile says is packed with it"
    for name, content in unpacked(package).items():
        write_file(Path("content") / name, content)
    with tarfile.open("packed by hand", "w:gz") as by_hand:
        by_hand.add("content", ".")
    assert main(["verify", "packed by hand"]) == 0
    assert "problem: repeat1/hybrid is on the sweep's list of runs but left no record" in said.err
    checksum = said.out.split()[-1]
    assert checksum == hashlib.sha256(package.read_bytes()).hexdigest()
    assert main(["verify", "here", "--sha256", checksum]) == 0
    assert main(["verify", "here", "--sha256", "0" * 64]) == 1
    assert "is not the package that was published" in capsys.readouterr().out
    with matplotlib.rc_context({"axes.linewidth": 3}):
        assert main(["verify", "here"]) == 0, "a reader's own matplotlibrc changes no drawing"
    files = unpacked(package)
    figures = b"".join(content for name, content in files.items() if name.startswith("comparison/comparison."))
    assert re.search(rb"\d\.\d{5,}", figures) and not re.search(rb"[1-9]\d*\.\d{9,}|0\.0*[1-9]\d{9,}", figures)
    value(CONTENTS, "drawn_by", to="1.0")(files := unpacked(package))
    Path("here").write_bytes(archive(files))
    assert main(["verify", "here"]) == 0
    assert "all " in capsys.readouterr().out, "the drawings are as here, whatever drew them"


@pytest.mark.parametrize("name", ["missing.tar.gz", "."])
def test_what_is_no_file_is_no_forgery(tmp_path: Path, capsys: pytest.CaptureFixture, name: str):
    """A forgery ends with 1, and so would this in a script that asks."""
    assert main(["verify", str(tmp_path / name)]) == 2
    assert "python -m t5bench pack has written" in capsys.readouterr().err


def test_another_commits_package_names_the_commit(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Where figures differ: a later commit may predict a pipeline's bubble otherwise."""
    files = unpacked(package)
    value(FIGURES, "verdicts", 0, to="another")(files)
    changed = tmp_path / "changed"
    changed.write_bytes(archive(files))
    assert main(["verify", str(changed)]) == 1
    has_commit = commit(REPO_ROOT)[0] is not None
    assert ("To verify with their code: git checkout 11111111\n" in capsys.readouterr().out) == has_commit


def test_runs_are_packed_wherever_they_lie(tmp_path: Path, capsys: pytest.CaptureFixture):
    """In a hidden directory, within another run, and far below what all of them lie in."""
    places = [tmp_path / name for name in ("ddp", "ddp/again", ".old/ddp", "a/b/c/d/e/f/g/h/i/ddp")]
    for number, place in enumerate(places):
        make_run(place, elapsed_ms=[100.0 + number] * 30)
    assert main(["pack", *map(str, places), "-o", str(tmp_path / "package")]) == 0
    assert "package: 4 runs" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "package")]) == 0
    assert main(["pack", str(places[0]), "-o", str(tmp_path / "package"), "--peak-tflops", "0"]) == 2


def test_what_an_earlier_attempt_logged_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = make_run(tmp_path / "ddp", elapsed_ms=[100.0 + number % 7 for number in range(30)], resume_from=20)
    log, metrics = run / "node0.log", run / "metrics.jsonl"
    lines, logged = metrics.read_text().splitlines(True), log.read_text().splitlines(True)
    metrics.write_text("".join([*lines[:20], '{"resumed_from": 20}\n', *lines[20:]]))
    log.with_name("node0.log.1").write_text("".join(logged[:21]) + "2025-")  # it was killed
    log.write_text("".join(logged[21:]))
    seal(run)
    package = str(tmp_path / "package")
    assert main(["pack", str(run), "-o", package]) == main(["verify", package]) == 0
    metrics.write_text(metrics.read_text().replace('"elapsed_ms": 103', '"elapsed_ms": 93', 1))
    seal(run)
    assert main(["pack", str(run), "-o", package]) == 2
    assert "metrics.jsonl has an iteration 4 that no earlier attempt's log has" in capsys.readouterr().err


def test_a_sparse_file_takes_no_room(tmp_path: Path, capsys: pytest.CaptureFixture):
    """A few bytes that say they are a gigabyte."""
    entry = tarfile.TarInfo("runs/large")
    entry.pax_headers, entry.size = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**30)}, 1
    with tarfile.open(tmp_path / "package", "w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(entry, io.BytesIO(b"x"))
    assert main(["verify", str(tmp_path / "package")]) == 1
    assert "runs/large is not a plain file of a package" in capsys.readouterr().out


@pytest.mark.parametrize(("pattern", "to"), [
    (r"^(.{25})( iteration +7/.*?\|)( con.*)$", r"\1\2\n\1\3"),
    (r"^(.{25} iteration +7/.*?)learning.*\n.{25}", r"\1"),
    (r"^(.{25})(?= iteration +7/)", r"\1  attention_dropout ........ 0.1\n\1"),
], ids=["a line in pieces", "a line cut off by the next", "an argument in a setting's place"])  # fmt: skip
def test_what_an_honest_log_may_say(tmp_path: Path, pattern: str, to: str):
    run = make_run(tmp_path, settings={"DROPOUT": "0.2"}, extra_arguments=["--attention-dropout", "0.1"])
    path = run / "node0.log"
    path.write_text(re.sub(pattern, to, path.read_text(), count=1, flags=re.MULTILINE))
    seal(run)
    assert not list(contradictions(load(run)))


@pytest.mark.parametrize("place", [0, 100, 5000, -5])
def test_damage_of_the_archive_itself_is_named(package: Path, tmp_path: Path, capsys, place: int):
    content = bytearray(package.read_bytes())
    content[place] ^= 0x55
    for damaged in (content, content[:5000], b""):
        (tmp_path / "damaged").write_bytes(damaged)
        assert main(["verify", str(tmp_path / "damaged")]) == 1
        assert capsys.readouterr().out.startswith("finding: ")


def test_a_package_of_a_hundred_runs_in_ten_seconds(tmp_path: Path, capsys: pytest.CaptureFixture):
    for number in range(100):
        times = [100.0 + number % 8 + number / 1000 + (i * 7919 % 13) / 13 for i in range(50)]
        run = tmp_path / f"repeat{number // 8}" / STRATEGIES[number % 8]
        make_run(run, run.name, elapsed_ms=times, log_interval=20, world_size=4, sent_per_iteration=1e6)
    assert main(["pack", str(tmp_path), "-o", str(tmp_path / "package")]) == 0
    before = time.process_time()
    assert main(["verify", str(tmp_path / "package")]) == 0, capsys.readouterr().out
    assert time.process_time() - before < 10
    assert len(unpacked(tmp_path / "package")[PAGE]) < 900_000
