"""Translates the part of this project's Python that a browser needs to JavaScript, so that a formula is written once.

translate() starts at some functions and classes and follows every name that they use. Functions and methods are
translated from their source, class by class and statement by statement; everything else that they name, such as a table
of constants, is written as the value that it has now. What is not in the tables below is refused with its file and
line: nothing is guessed. runtime.js holds what JavaScript lacks: dictionaries with keys that compare by value,
arithmetic on lists, negative indices, keyword arguments.

A name `memory_of` of t5bench/costmodel/memory.py becomes `costmodel$memory$memory_of`. Dataclasses and named tuples
become classes whose constructor takes the fields in order. Methods that nothing names are left out.
"""

import ast
import builtins
import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

RUNTIME = Path(__file__).with_name("runtime.js")

# Python's functions that runtime.js has, by the module that defines them.
BUILTINS = {
    "abs", "all", "any", "bool", "chr", "dict", "divmod", "enumerate", "filter", "float", "int", "len", "list", "max",
    "min", "ord", "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "vars", "zip",
}  # fmt: skip
LIBRARY = {
    "bisect": {"bisect_left", "insort_right"},
    "collections": {"Counter", "deque"},
    "dataclasses": {"replace"},
    "itertools": {"chain", "combinations", "product"},
    "math": {"ceil", "exp", "floor", "log", "log2", "prod", "sqrt"},
    "shlex": {"quote"},
}
# Methods of Python's own types that runtime.js has.
METHODS = {
    "append", "clear", "extend", "from_iterable", "get", "insert", "items", "join", "keys", "lower", "pop", "popleft",
    "removeprefix", "setdefault", "startswith", "values",
}  # fmt: skip
# Functions that read the whole of an iterable before they return.
CONSUMERS = {"Counter", "dict", "max", "min", "prod", "set", "sorted", "sum", "tuple"}
RANGE_ATTRIBUTES = {"start"}
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.BitOr: "or_bits",
}
ORDERS: dict[type[ast.AST], str] = {
    ast.Lt: "py.compare({0}, {1}) < 0",
    ast.LtE: "py.compare({0}, {1}) <= 0",
    ast.Gt: "py.compare({0}, {1}) > 0",
    ast.GtE: "py.compare({0}, {1}) >= 0",
    ast.Eq: "py.eq({0}, {1})",
    ast.NotEq: "!py.eq({0}, {1})",
    ast.In: "py.contains({1}, {0})",
    ast.NotIn: "!py.contains({1}, {0})",
}
# Words that JavaScript keeps for itself.
RESERVED = {
    "arguments", "case", "catch", "const", "default", "delete", "do", "enum", "eval", "export", "extends", "function",
    "instanceof", "interface", "let", "new", "null", "package", "private", "protected", "public", "py", "static",
    "super", "switch", "this", "throw", "typeof", "var", "void",
}  # fmt: skip
FORMATS = (".0f", ".1f", ".2f", ".3f", ".0%", ".1%", "g", ".3g", ".4g", "")


class Untranslatable(ValueError):
    """Python that the translator does not know: where, and what."""


def translate(roots: Sequence[Callable[..., Any]], members: Iterable[str] = ()) -> str:
    """JavaScript with the roots and all that they use. members: attributes that only the page's own script names.

    Raises Untranslatable.
    """
    program = Program(set(members))
    for root in roots:
        program.name_of(root)
    return program.text()


class Program:
    """What was found so far, and what is still to be translated."""

    def __init__(self, members: set[str]) -> None:
        self.members = members
        """Every attribute that the program reads; of a class only methods with such a name are translated."""
        self.places: dict[str, str] = {}
        """Where an attribute was first read."""
        self.classes: dict[type, dict[str, str]] = {}
        """Translated methods by name."""
        self.functions: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        self.sources: dict[str, ast.Module] = {}
        self.waiting: list[tuple[str, Callable[..., Any]]] = []

    def name_of(self, thing: Callable[..., Any]) -> str:
        """The JavaScript name of a function or class, which is translated later if it is new."""
        name = _javascript_name(thing.__module__, thing.__name__)
        if isinstance(thing, type):
            if thing not in self.classes:
                for base in thing.__bases__:
                    if base not in (object, tuple):
                        self.name_of(base)
                self.classes[thing] = {}
        elif name not in self.functions:
            self.functions[name] = ""
            self.waiting.append((name, thing))
        return name

    def text(self) -> str:
        while self._step():
            pass
        self._check_members()
        classes = [_class_text(self, cls, methods) for cls, methods in self.classes.items()]
        return "\n".join([*classes, *self.constants.values(), *self.functions.values()]) + "\n"

    def _step(self) -> bool:
        """Translates what is waiting; False if nothing was."""
        is_new = bool(self.waiting)
        while self.waiting:
            name, function = self.waiting.pop()
            self.functions[name] = self._function(name, function)
        for cls, methods in list(self.classes.items()):
            for node in self._definition(cls).body:
                wanted = isinstance(node, ast.FunctionDef) and (
                    node.name in self.members or node.name in ("__post_init__", "__str__")
                )
                if wanted and isinstance(node, ast.FunctionDef) and node.name not in methods:
                    methods[node.name] = Function(self, sys.modules[cls.__module__]).method(node)
                    is_new = True
        return is_new

    def _function(self, name: str, function: Callable[..., Any]) -> str:
        node = self._definition(function)
        if not isinstance(node, ast.FunctionDef):
            raise Untranslatable(f"{name} is no function with a source")
        made = Function(self, sys.modules[function.__module__])
        text = made.function(node)
        for decorator in node.decorator_list:
            words = ast.unparse(decorator)
            if not words.startswith("lru_cache"):
                raise made.refused(decorator, f"the decorator {words}")
            text = f"py.cached({text})"
        return f"const {name} = {text};"

    def _definition(self, thing: Callable[..., Any]) -> ast.FunctionDef | ast.ClassDef:
        """Where a function or class is defined in its module."""
        module = sys.modules[thing.__module__]
        path = str(module.__file__)
        if path not in self.sources:
            self.sources[path] = ast.parse(Path(path).read_text())
        for node in self.sources[path].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == thing.__name__:
                return node
        raise Untranslatable(f"{path}: {thing.__name__} is not defined at the top of its module")

    def _check_members(self) -> None:
        """Refuses an attribute that no translated class has."""
        known = set(RANGE_ATTRIBUTES)
        for cls in self.classes:
            known |= set(dir(cls)) | {name for name, _ in _fields(cls)}
        for name, place in self.places.items():
            if name not in known:
                raise Untranslatable(f"{place}: no translated class has the attribute {name}")

    def value(self, value: Any, place: str) -> str:
        """A value of this moment as JavaScript."""
        if value is None or isinstance(value, bool | str):
            return json.dumps(value)
        if isinstance(value, int | float):
            return "Infinity" if value == math.inf else repr(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.name_of(type(value))
            values = [self.value(getattr(value, name), place) for name, _ in _fields(type(value))]
            return f"new {_javascript_name(type(value).__module__, type(value).__name__)}({', '.join(values)})"
        if isinstance(value, Mapping):
            pairs = [f"[{self.value(key, place)}, {self.value(each, place)}]" for key, each in value.items()]
            return f"py.dict([{', '.join(pairs)}])"
        if type(value) in (tuple, list):
            return f"[{', '.join(self.value(each, place) for each in value)}]"
        raise Untranslatable(f"{place}: a value of type {type(value).__name__}")


def _javascript_name(module: str, name: str) -> str:
    return f"{module.removeprefix('t5bench.').replace('.', '$')}${name}"


def _fields(cls: type) -> list[tuple[str, Any]]:
    """The fields of a dataclass or a named tuple with their defaults, inspect's empty where there is none."""
    if dataclasses.is_dataclass(cls):
        found = []
        for field in dataclasses.fields(cls):
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            found.append((field.name, inspect.Parameter.empty if default is dataclasses.MISSING else default))
        return found
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        defaults = getattr(cls, "_field_defaults", {})
        return [(name, defaults.get(name, inspect.Parameter.empty)) for name in cls._fields]
    raise Untranslatable(f"the class {cls.__qualname__} is neither a dataclass nor a named tuple")


def _class_text(program: Program, cls: type, methods: Mapping[str, str]) -> str:
    fields = _fields(cls)
    name = _javascript_name(cls.__module__, cls.__name__)
    base = cls.__bases__[0]
    parameters = []
    for field, default in fields:
        is_required = default is inspect.Parameter.empty
        value = f"py.required({json.dumps(field)})" if is_required else program.value(default, cls.__qualname__)
        parameters.append(f"{_local(field)} = {value}")
    has_base = base not in (object, tuple)
    parent = _javascript_name(base.__module__, base.__name__) if has_base else "py.Record"
    lines = [f"class {name} extends {parent} {{"]
    lines.append(f"constructor({', '.join(parameters)}) {{")
    if has_base:
        lines.append(f"super({', '.join(_local(field) for field, _ in _fields(base))});")
    else:
        lines.append("super();")
    lines += [f"this.{field} = {_local(field)};" for field, _ in fields]
    if "__post_init__" in methods:
        lines.append("this.__post_init__();")
    lines.append("}")
    lines += methods.values()
    lines.append("}")
    names = json.dumps([field for field, _ in fields])
    lines.append(f"{name}.prototype.fields = {name}.sig = {names};")
    if issubclass(cls, tuple):
        lines.append(f"{name}.prototype.isTuple = true;")
    return "\n".join(lines)


def _local(name: str) -> str:
    return f"{name}$" if name in RESERVED else name


class Function:
    """The translation of one function, with the functions inside it."""

    def __init__(self, program: Program, module: ModuleType) -> None:
        self.program = program
        self.module = module
        self.scopes: list[set[str]] = []
        """Names of every enclosing function and comprehension."""

    def refused(self, node: ast.AST, what: str) -> Untranslatable:
        return Untranslatable(f"{self._place(node)}: {what} has no translation to JavaScript")

    def _place(self, node: ast.AST) -> str:
        return f"{self.module.__file__}:{getattr(node, 'lineno', '?')}"

    # ---- functions and methods

    def function(self, node: ast.FunctionDef) -> str:
        names = self._names_of_arguments(node.args)
        kind = "function*" if _yields(node) else "function"
        with_body = self._with_body(node, names)
        return f"py.def({json.dumps(names)}, {kind} {with_body})"

    def method(self, node: ast.FunctionDef) -> str:
        words = [ast.unparse(decorator) for decorator in node.decorator_list]
        names = self._names_of_arguments(node.args)
        if names[:1] != ["self"]:
            raise self.refused(node, f"the method {node.name} without self")
        text = self._with_body(node, names[1:], first="const self = this;")
        if words == ["property"]:
            return f"get {node.name}{text}"
        if words == ["cached_property"]:
            return f"get {node.name}() {{ return py.kept(this, {json.dumps(node.name)}, function {text}); }}"
        if words:
            raise self.refused(node, f"the decorator {words[0]}")
        return f"{'*' if _yields(node) else ''}{node.name}{text}"

    def _names_of_arguments(self, arguments: ast.arguments) -> list[str]:
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
            raise self.refused(arguments.vararg or arguments.kwarg or arguments.kwonlyargs[0], "a starred argument")
        return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]

    def _with_body(self, node: ast.FunctionDef, names: Sequence[str], first: str = "") -> str:
        """The parameters and the body of a function. Python's variables belong to the function, as `let` here."""
        defaults = node.args.defaults
        given = [None] * (len(names) - len(defaults)) + [self.expression(default) for default in defaults]
        parameters = [
            f"{_local(name)} = {f'py.required({json.dumps(name)})' if default is None else default}"
            for name, default in zip(names, given, strict=True)
        ]
        assigned = _assigned(node)
        self.scopes.append({*names, *assigned, *(["self"] if first else [])})
        variables = sorted(assigned - set(names))
        declared = f"let {', '.join(map(_local, variables))};" if variables else ""
        body = self.block(node.body)
        self.scopes.pop()
        return f"({', '.join(parameters)}) {{ {first}{declared}\n{body}\n}}"

    # ---- statements

    def block(self, statements: Sequence[ast.stmt]) -> str:
        return "\n".join(filter(None, (self.statement(each) for each in statements)))

    def statement(self, node: ast.stmt) -> str:
        handler = getattr(self, f"_statement_{type(node).__name__}", None)
        if handler is None:
            raise self.refused(node, f"the statement {type(node).__name__}")
        return str(handler(node))

    def _statement_Expr(self, node: ast.Expr) -> str:
        is_docstring = isinstance(node.value, ast.Constant)
        return "" if is_docstring else f"{self.expression(node.value)};"

    def _statement_Pass(self, node: ast.Pass) -> str:
        return ""

    def _statement_Break(self, node: ast.Break) -> str:
        return "break;"

    def _statement_Continue(self, node: ast.Continue) -> str:
        return "continue;"

    def _statement_Return(self, node: ast.Return) -> str:
        return f"return {self.expression(node.value) if node.value else 'null'};"

    def _statement_Assign(self, node: ast.Assign) -> str:
        value = self.expression(node.value)
        for target in reversed(node.targets):
            if isinstance(target, ast.Subscript):
                if len(node.targets) > 1:
                    value = f"{self._set_item(target, value)}"
                    continue
                return f"{self._set_item(target, value)};"
            value = f"{self.target(target)} = {value}"
        return f"{value};" if value[0] != "[" else f";{value};"

    def _statement_AnnAssign(self, node: ast.AnnAssign) -> str:
        return f"{self.target(node.target)} = {self.expression(node.value)};" if node.value else ""

    def _statement_AugAssign(self, node: ast.AugAssign) -> str:
        operator = OPERATORS.get(type(node.op))
        if not operator:
            raise self.refused(node, f"the operator {type(node.op).__name__}")
        value = self.expression(node.value)
        if isinstance(node.target, ast.Subscript):
            if any(isinstance(each, ast.Call) for each in ast.walk(node.target)):
                raise self.refused(node, "a call inside the target of an operator")
            before = f"py.get({self.expression(node.target.value)}, {self.expression(node.target.slice)})"
            return f"{self._set_item(node.target, f'py.{operator}({before}, {value})')};"
        target = self.target(node.target)
        function = "extended" if operator == "add" else operator  # a list is extended where it is
        return f"{target} = py.{function}({target}, {value});"

    def _set_item(self, target: ast.Subscript, value: str) -> str:
        place = self.expression(target.value)
        if isinstance(target.slice, ast.Slice):
            raise self.refused(target, "the assignment to a slice")
        return f"py.set_item({place}, {self.expression(target.slice)}, {value})"

    def _statement_If(self, node: ast.If) -> str:
        text = f"if ({self.condition(node.test)}) {{\n{self.block(node.body)}\n}}"
        return f"{text} else {{\n{self.block(node.orelse)}\n}}" if node.orelse else text

    def _statement_While(self, node: ast.While) -> str:
        if node.orelse:
            raise self.refused(node, "while with else")
        return f"while ({self.condition(node.test)}) {{\n{self.block(node.body)}\n}}"

    def _statement_For(self, node: ast.For) -> str:
        if node.orelse:
            raise self.refused(node, "for with else")
        values = self.expression(node.iter)
        return f"for ({self.target(node.target)} of {values}) {{\n{self.block(node.body)}\n}}"

    def _statement_FunctionDef(self, node: ast.FunctionDef) -> str:
        if node.decorator_list:
            raise self.refused(node, "a decorator of a function in a function")
        return f"{_local(node.name)} = {self.function(node)};"

    def _statement_Raise(self, node: ast.Raise) -> str:
        call = node.exc
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise self.refused(node, "raise without a new exception")
        arguments = [json.dumps(call.func.id), *(self.expression(each) for each in call.args)]
        return f"throw py.error({', '.join(arguments)});"

    def target(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return _local(node.id)
        if isinstance(node, ast.Tuple | ast.List):
            return f"[{', '.join(self.target(each) for each in node.elts)}]"
        if isinstance(node, ast.Starred):
            return f"...{self.target(node.value)}"
        if isinstance(node, ast.Attribute):
            return f"{self.expression(node.value)}.{self._member(node)}"
        raise self.refused(node, f"the target {ast.unparse(node)}")

    # ---- expressions

    def condition(self, node: ast.expr) -> str:
        """An expression whose truth alone counts."""
        text = self.expression(node)
        return text if _is_boolean(node) else f"py.truth({text})"

    def expression(self, node: ast.expr) -> str:
        handler = getattr(self, f"_expression_{type(node).__name__}", None)
        if handler is None:
            raise self.refused(node, f"the expression {ast.unparse(node)}")
        return str(handler(node))

    def _expression_Constant(self, node: ast.Constant) -> str:
        return self.program.value(node.value, self._place(node))

    def _expression_Name(self, node: ast.Name) -> str:
        if any(node.id in scope for scope in self.scopes):
            return _local(node.id)
        found = vars(self.module).get(node.id, inspect.Parameter.empty)
        if found is inspect.Parameter.empty:
            if node.id in BUILTINS and hasattr(builtins, node.id):
                return f"py.{node.id}"
            raise self.refused(node, f"the name {node.id}")
        return self._of_a_module(node, self.module, node.id, found)

    def _of_a_module(self, node: ast.expr, module: ModuleType, name: str, found: Any) -> str:
        """A function or class of this project, one of Python's that runtime.js has, or a value."""
        if callable(found):
            home = getattr(found, "__module__", "").lstrip("_")
            own_name = getattr(found, "__name__", name)
            if home.startswith("t5bench"):
                return self.program.name_of(inspect.unwrap(found))
            if own_name in LIBRARY.get(home, ()):
                return f"py.{own_name}"
            raise self.refused(node, f"{home}.{own_name}")
        key = _javascript_name(module.__name__, name)
        if key not in self.program.constants:
            text = self.program.value(found, self._place(node))
            self.program.constants[key] = f"const {key} = {text};"
        return key

    def _expression_Attribute(self, node: ast.Attribute) -> str:
        if isinstance(node.value, ast.Name) and not any(node.value.id in scope for scope in self.scopes):
            owner = vars(self.module).get(node.value.id)
            if isinstance(owner, ModuleType):
                return self._of_a_module(node, owner, node.attr, getattr(owner, node.attr))
        return f"{self.expression(node.value)}.{self._member(node)}"

    def _member(self, node: ast.Attribute) -> str:
        self.program.members.add(node.attr)
        self.program.places.setdefault(node.attr, self._place(node))
        return node.attr

    def _expression_Call(self, node: ast.Call) -> str:
        if ast.unparse(node.func) == "object.__setattr__":  # how a frozen dataclass completes itself
            owner, name, value = node.args
            if isinstance(name, ast.Constant):
                return f"{self.expression(owner)}.{name.value} = {self.expression(value)}"
        arguments = ", ".join(self._argument(node, each) for each in node.args)
        words = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.refused(node, "a call with **")
            words[keyword.arg] = self.expression(keyword.value)
        named = ", ".join(f"{name}: {value}" for name, value in words.items())
        is_method = isinstance(node.func, ast.Attribute) and not self._is_module(node.func.value)
        if is_method and isinstance(node.func, ast.Attribute):
            return self._method_call(node.func, arguments, named)
        function = self.expression(node.func)
        if function.startswith("py."):
            all_words = f"py.words({{ {named} }})" if named else ""
            return f"{function}({', '.join(filter(None, (arguments, all_words)))})"
        is_class = isinstance(node.func, ast.Name) and isinstance(vars(self.module).get(node.func.id), type)
        if named:
            return f"py.call({function}, [{arguments}], {{ {named} }})"
        return f"new {function}({arguments})" if is_class else f"{function}({arguments})"

    def _argument(self, call: ast.Call, node: ast.expr) -> str:
        """A generator that its function uses up at once may as well be an array."""
        if isinstance(node, ast.GeneratorExp) and isinstance(call.func, ast.Name):
            is_used_up = self.expression(call.func).removeprefix("py.") in CONSUMERS
            return (self._collected(node) if is_used_up else "") or self.expression(node)
        return self.expression(node)

    def _is_module(self, node: ast.expr) -> bool:
        is_local = isinstance(node, ast.Name) and any(node.id in scope for scope in self.scopes)
        return isinstance(node, ast.Name) and not is_local and isinstance(vars(self.module).get(node.id), ModuleType)

    def _method_call(self, function: ast.Attribute, arguments: str, named: str) -> str:
        owner = self.expression(function.value)
        if function.attr in METHODS:
            if named:
                raise self.refused(function, "a keyword argument of a method")
            return f"py.method({json.dumps(function.attr)}, {owner}{', ' if arguments else ''}{arguments})"
        name = self._member(function)
        if named:
            raise self.refused(function, "a keyword argument of a method")
        return f"{owner}.{name}({arguments})"

    def _expression_Lambda(self, node: ast.Lambda) -> str:
        names = self._names_of_arguments(node.args)
        if node.args.defaults:
            raise self.refused(node, "a default of a lambda")
        self.scopes.append(set(names))
        text = f"(({', '.join(map(_local, names))}) => {self.expression(node.body)})"
        self.scopes.pop()
        return text

    def _expression_IfExp(self, node: ast.IfExp) -> str:
        parts = self.condition(node.test), self.expression(node.body), self.expression(node.orelse)
        return "({} ? {} : {})".format(*parts)

    def _expression_BoolOp(self, node: ast.BoolOp) -> str:
        is_and = isinstance(node.op, ast.And)
        values = [self.expression(value) for value in node.values]
        if _is_boolean(node):
            return f"({(' && ' if is_and else ' || ').join(values)})"
        text = values[-1]
        for value in reversed(values[:-1]):
            text = f"py.{'and' if is_and else 'or'}({value}, () => {text})"
        return text

    def _expression_UnaryOp(self, node: ast.UnaryOp) -> str:
        if isinstance(node.op, ast.Not):
            return f"(!{self.condition(node.operand)})"
        if isinstance(node.op, ast.USub):
            return f"(-{self.expression(node.operand)})"
        raise self.refused(node, f"the operator {type(node.op).__name__}")

    def _expression_BinOp(self, node: ast.BinOp) -> str:
        operator = OPERATORS.get(type(node.op))
        if not operator:
            raise self.refused(node, f"the operator {type(node.op).__name__}")
        return f"py.{operator}({self.expression(node.left)}, {self.expression(node.right)})"

    def _expression_Compare(self, node: ast.Compare) -> str:
        operands = [node.left, *node.comparators]
        if len(operands) > 2 and any(isinstance(each, ast.Call) for each in operands[1:-1]):
            raise self.refused(node, "a call in the middle of a comparison")
        parts = []
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            if isinstance(operator, ast.Is | ast.IsNot):
                if not isinstance(right, ast.Constant) or right.value is not None:
                    raise self.refused(node, "`is` with anything but None")
                parts.append(f"{self.expression(left)} {'===' if isinstance(operator, ast.Is) else '!=='} null")
            else:
                parts.append(ORDERS[type(operator)].format(self.expression(left), self.expression(right)))
        return f"({' && '.join(parts)})"

    def _expression_Subscript(self, node: ast.Subscript) -> str:
        value = self.expression(node.value)
        if isinstance(node.slice, ast.Slice):
            ends = (node.slice.lower, node.slice.upper, node.slice.step)
            texts = [self.expression(end) if end else "null" for end in ends]
            return f"py.slice({value}, {', '.join(texts)})"
        return f"py.get({value}, {self.expression(node.slice)})"

    def _expression_Tuple(self, node: ast.Tuple) -> str:
        return f"[{', '.join(self.expression(each) for each in node.elts)}]"

    def _expression_List(self, node: ast.List) -> str:
        return f"[{', '.join(self.expression(each) for each in node.elts)}]"

    def _expression_Starred(self, node: ast.Starred) -> str:
        return f"...{self.expression(node.value)}"

    def _expression_Set(self, node: ast.Set) -> str:
        return f"py.set([{', '.join(self.expression(each) for each in node.elts)}])"

    def _expression_Dict(self, node: ast.Dict) -> str:
        pairs = [
            f"...py.method('items', {self.expression(value)})"
            if key is None
            else f"[{self.expression(key)}, {self.expression(value)}]"
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return f"py.dict([{', '.join(pairs)}])"

    def _expression_JoinedStr(self, node: ast.JoinedStr) -> str:
        parts = []
        for each in node.values:
            if isinstance(each, ast.Constant):
                parts.append(json.dumps(each.value))
                continue
            if not isinstance(each, ast.FormattedValue) or each.conversion != -1:
                raise self.refused(node, f"the text {ast.unparse(node)}")
            form = ast.literal_eval(ast.unparse(each.format_spec)[1:]) if each.format_spec else ""
            if form not in FORMATS:
                raise self.refused(node, f"the format {form}")
            value = self.expression(each.value)
            parts.append(f"py.format({value}, {json.dumps(form)})" if form else f"py.str({value})")
        return f"({' + '.join(parts) or json.dumps('')})"

    def _expression_Yield(self, node: ast.Yield) -> str:
        if not node.value:
            raise self.refused(node, "a yield of nothing")
        return f"yield {self.expression(node.value)}"

    def _expression_YieldFrom(self, node: ast.YieldFrom) -> str:
        return f"yield* {self.expression(node.value)}"

    def _expression_ListComp(self, node: ast.ListComp) -> str:
        return self._collected(node) or f"[...{self._comprehension(node, [node.elt])}]"

    def _expression_GeneratorExp(self, node: ast.GeneratorExp) -> str:
        return self._comprehension(node, [node.elt])

    def _expression_SetComp(self, node: ast.SetComp) -> str:
        return f"py.set({self._comprehension(node, [node.elt])})"

    def _expression_DictComp(self, node: ast.DictComp) -> str:
        return f"py.dict({self._comprehension(node, [node.key, node.value])})"

    def _collected(self, node: ast.ListComp | ast.GeneratorExp) -> str:
        """A comprehension over one iterable as an array; "" for one over several."""
        if len(node.generators) > 1:
            return ""
        each = node.generators[0]
        values = self.expression(each.iter)
        self.scopes.append({name.id for name in ast.walk(each.target) if isinstance(name, ast.Name)})
        target = self.target(each.target)
        conditions = " && ".join(self.condition(condition) for condition in each.ifs)
        test = f", ({target}) => {conditions}" if conditions else ""
        text = f"py.collect({values}, ({target}) => ({self.expression(node.elt)}){test})"
        self.scopes.pop()
        return text

    def _comprehension(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp, results: Sequence[ast.expr]
    ) -> str:
        """A generator; of a dictionary's it gives pairs."""
        text = ""
        for place, each in enumerate(node.generators):
            values = self.expression(each.iter)  # the first is evaluated outside of the comprehension's scope
            if place == 0:
                names: set[str] = set()
                for inner in node.generators:
                    names |= {name.id for name in ast.walk(inner.target) if isinstance(name, ast.Name)}
                self.scopes.append(names)
            text += f"for (const {self.target(each.target)} of {values}) "
            for condition in each.ifs:
                text += f"if ({self.condition(condition)}) "
        values = ", ".join(self.expression(result) for result in results)
        self.scopes.pop()
        return f"(function* () {{ {text}yield {values if len(results) == 1 else f'[{values}]'}; }})()"


def _is_boolean(node: ast.expr) -> bool:
    """Whether an expression certainly gives True or False."""
    if isinstance(node, ast.BoolOp):
        return all(_is_boolean(value) for value in node.values)
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _inside(node: ast.FunctionDef) -> Iterable[ast.AST]:
    """All that belongs to a function itself, not to functions, lambdas and comprehensions inside it."""
    others = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        each = waiting.pop()
        yield each
        if not isinstance(each, others):
            waiting += ast.iter_child_nodes(each)


def _yields(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Yield | ast.YieldFrom) for each in _inside(node))


def _assigned(node: ast.FunctionDef) -> set[str]:
    """The variables of a function, and the functions inside it."""
    names = set()
    for each in _inside(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, ast.FunctionDef):
            names.add(each.name)
    return names
