"""Files, functions and signatures stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.checks.sources import code_files, listing, parsed

FILE_LINES = 400
FUNCTION_LINES = 50
PARAMETERS = 6
NESTING = 4

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def functions() -> Iterator[tuple[Path, _Function]]:
    for path in code_files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, _Function):
                yield path, node


def length(function: _Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def parameters(function: _Function) -> int:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def depth(node: ast.AST) -> int:
    """Blocks inside one another; an ``elif`` is no deeper than its ``if``, a function inside starts anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_Function.__args__, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, depth(child) - is_elif)
    return deepest + isinstance(node, _BLOCKS)


def is_device_code(function):
    """A kernel of Triton takes pointers, sizes and constants one by one: there are no records on the device."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def test_no_file_is_longer_than_400_lines():
    counts = ((path, len(path.read_text("utf-8").splitlines())) for path in code_files())
    too_long = ((path, count, f"{count} lines") for path, count in counts if count > FILE_LINES)
    assert listing(too_long) == ""


def test_no_function_is_longer_than_50_lines():
    too_long = (
        (path, function.lineno, f"{function.name} has {length(function)} lines")
        for path, function in functions()
        if length(function) > FUNCTION_LINES
    )
    assert listing(too_long) == ""


def test_no_function_takes_more_than_6_parameters():
    too_many = (
        (path, function.lineno, f"{function.name} takes {parameters(function)} parameters")
        for path, function in functions()
        if parameters(function) > PARAMETERS and not is_device_code(function)
    )
    assert listing(too_many) == ""


def test_no_function_nests_deeper_than_4_blocks():
    too_deep = (
        (path, function.lineno, f"{function.name} nests {depth(function)} blocks")
        for path, function in functions()
        if depth(function) > NESTING
    )
    assert listing(too_deep) == ""


def test_the_measures_count_what_they_say():
    tree = ast.parse(
        "def f(self, a, /, b, *, c=1, **rest):\n"
        "    if a:\n"
        "        for x in b:\n"
        "            pass\n"
        "    elif c:\n"
        "        def g():\n"
        "            if a:\n"
        "                with c:\n"
        "                    while b:\n"
        "                        pass\n"
    )
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert (length(function), parameters(function), depth(function)) == (10, 3, 2)
