"""Checkpoint files of strangers run nothing."""

import argparse
import enum
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from t5bench import Problem
from t5bench.tools.convert.checkpoint_file import read_checkpoint_file

# How a pickle names a function: protocol 4 may name what a module has imported, with a dot.
DOTTED = b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93"
PLAIN = b"cos\nsystem\n"
BUILTIN = b"cbuiltins\nexec\n"


def with_pickle(directory: Path, content: bytes) -> Path:
    """A file that torch.save wrote, with another pickle in it."""
    path = directory / "model_optim_rng.pt"
    torch.save({"model": torch.zeros(2)}, directory / "honest.pt")
    with zipfile.ZipFile(directory / "honest.pt") as honest, zipfile.ZipFile(path, "w") as hostile:
        for name in honest.namelist():
            hostile.writestr(name, content if name.endswith("data.pkl") else honest.read(name))
    return path


@pytest.mark.parametrize("function", [DOTTED, PLAIN, BUILTIN])
def test_a_function_that_a_file_names_is_never_called(tmp_path: Path, function: bytes):
    mark = tmp_path / "mark"
    command = f"touch {mark}" if function != BUILTIN else f"open({str(mark)!r}, 'w')"
    # Calls the function with the command.
    argument = b"\x8c" + bytes([len(command)]) + command.encode()
    path = with_pickle(tmp_path, function + argument + b"\x85R.")
    pickle.loads(path_pickle(path), fix_imports=False)
    assert mark.exists(), "the usual unpickler would have called it"
    mark.unlink()
    with pytest.raises(Problem, match="holds an object of an unknown class") as caught:
        read_checkpoint_file(path)
    assert "Copy" not in caught.value.report, "the bytes are those that were written"
    assert not mark.exists()


def path_pickle(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


def test_a_torchscript_program_is_refused(tmp_path: Path):
    class Adds(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    torch.jit.script(Adds()).save(str(tmp_path / "program.pt"))
    with pytest.raises(Problem, match="TorchScript"):
        read_checkpoint_file(tmp_path / "program.pt")


def test_a_file_that_is_no_checkpoint_is_a_sentence(tmp_path: Path):
    with pytest.raises(Problem, match="cannot be read as a checkpoint"):
        read_checkpoint_file(with_pickle(tmp_path, b"no pickle"))
    (tmp_path / "text.pt").write_text("text")
    with pytest.raises(Problem, match="truncated"):
        read_checkpoint_file(tmp_path / "text.pt")


class Kind(enum.Enum):
    T5 = 1


@pytest.mark.parametrize("called", [(getattr, (Kind, "T5")), (Kind, (1,))], ids=["Python 3.11.0 to 3.11.3", "others"])
def test_an_enum_in_the_arguments_is_no_obstacle_whichever_python_wrote_it(tmp_path: Path, called: tuple):
    class Saved:
        def __reduce__(self) -> tuple:
            return called

    path = tmp_path / "model_optim_rng.pt"
    arguments = argparse.Namespace(model_type=Saved(), hidden_size=8)
    torch.save({"args": arguments, "model": torch.ones(2)}, path)
    content = read_checkpoint_file(path)
    assert content["args"].hidden_size == 8 and content["model"].tolist() == [1, 1]
