"""Whether Megatron-DeepSpeed knows the arguments after ``--``: checked before it starts, which takes half a minute."""

import argparse
import ast
from pathlib import Path
from typing import Any, NoReturn

from t5bench import Problem
from t5bench.plan.draft import Draft

# What an argument's declaration says of its values; the rest (help, default, dest) does not matter here.
CHECKED = ("action", "choices", "nargs", "type")
TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Problem(message, code="engine-argument")


def parser_of(source: str) -> argparse.ArgumentParser:
    """A parser that accepts what the engine's own does, from the text of its megatron/arguments.py.

    Importing that file would import PyTorch and DeepSpeed.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, conflict_handler="resolve")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            options = {option.arg: _value(option.value) for option in node.keywords if option.arg in CHECKED}
            known = {name: value for name, value in options.items() if value is not None}
            parser.add_argument(*names, **known)
    return parser


def _value(node: ast.expr) -> Any:
    """A type, or what a constant expression says; None for any other expression, which is then not checked."""
    if isinstance(node, ast.Name):
        return TYPES.get(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def check_arguments(draft: Draft, engine: Path) -> None:
    """Refuses arguments that the engine does not know, or whose values it does not take."""
    file = engine / "megatron" / "arguments.py"
    if not draft.extra or draft.is_refused or not file.exists():
        return
    try:
        parser_of(file.read_text()).parse_args(draft.extra)
    except Problem as problem:
        remedy = f"bash scripts/<launcher> --help lists the settings, {file} the engine's arguments"
        draft.refuse("engine-argument", f"after --: {problem}", remedy)
