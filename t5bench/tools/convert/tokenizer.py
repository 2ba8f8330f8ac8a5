"""The tokenizers of runs, as the conversions load them."""

from pathlib import Path
from typing import Any

from t5bench import Problem
from t5bench.corpus.tokenizer import GPT2_FILES, TOKENIZER_FILES, load_tokenizer, readable
from t5bench.imports import import_transformers


def tokenizer_of(directory: Path, family: str) -> Any:
    """A run's tokenizer, with the ids that its data have. Raises Problem."""
    if not directory.is_dir():
        remedy = "Name a copy of the directory: --tokenizer DIR"
        raise Problem(f"the model's tokenizer was in {directory}, which is not a directory here", remedy)
    transformers = import_transformers()
    with readable(str(directory), family):
        names = {path.name.removeprefix("gpt2-") for path in directory.iterdir()}
        if names.intersection(TOKENIZER_FILES) != set(GPT2_FILES):
            return load_tokenizer(directory, family)
        # GPT-2's two files, from the engine's checkout with `gpt2-` before their names.
        files = [next(path for path in directory.iterdir() if path.name.endswith(name)) for name in GPT2_FILES]
        return transformers.GPT2Tokenizer(*map(str, files))
