"""Uses of TensorRT in a program's source: names of the module, enum members, methods and properties.

The class of an expression follows from the signatures of the bindings, through assignments, loops, arguments and
results of functions in the same file. :data:`PARAMETERS` has the classes of values from other files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: The classes of parameters that other files pass, by file.
PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "tensorrt_network.py": {"network": "INetworkDefinition", "layer": "ILayer", "start": "ILayer"},
}
_MODULE = "module"
_MODULE_PARAMETERS = ("trt", "tensorrt")
_CLASS = "class "
_RESULT = "return"  # no variable has this name

_Function = ast.FunctionDef | ast.Lambda
_Scope = tuple[_Function, ...]


class Use(NamedTuple):
    """One use. ``owner`` is a class, ``class X`` for X itself, an enum or ``module``; ``place`` is where it is."""

    owner: str
    name: str
    place: str


def uses(path: Path, surface: Mapping[str, Any]) -> list[Use]:
    """Return the uses of TensorRT in a file. Classes are those of ``surface``, as :func:`bindings.read` returns it."""
    return sorted(set(_Source(path, surface).uses()))


class _Source:
    """One file. ``kinds`` has the classes of its variables; a list has the class of its elements."""

    def __init__(self, path: Path, surface: Mapping[str, Any]) -> None:
        self.path, self.surface = path, surface
        self.scopes: dict[ast.AST, _Scope] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.kinds: dict[tuple[_Function | None, str], str] = {}
        self._enter(ast.parse(path.read_text()), ())
        known = -1
        while known != len(self.kinds):  # a class may follow from one that is found further down
            known = len(self.kinds)
            for node in self.scopes:
                self._learn(node)

    def uses(self) -> Iterator[Use]:
        for node in self.scopes:
            if isinstance(node, ast.Attribute) and (owner := self.kind(node.value)):
                yield Use(owner, node.attr, f"{self.path.name}:{node.lineno}")
            if isinstance(node, ast.ClassDef):
                for owner in filter(None, map(self.kind, node.bases)):
                    for method in node.body:
                        overrides = isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
                        if owner.startswith(_CLASS) and overrides:
                            yield Use(owner[len(_CLASS) :], method.name, f"{self.path.name}:{method.lineno}")

    def kind(self, node: ast.AST | None) -> str | None:
        """Return the class of an expression, ``class X`` for X itself, ``module`` for TensorRT."""
        if isinstance(node, ast.Name):
            return self._variable(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self.kind(node.elt)
        if isinstance(node, ast.Subscript):
            return self.kind(node.value)
        return None

    def _enter(self, node: ast.AST, scope: _Scope) -> None:
        self.scopes[node] = scope
        if isinstance(node, ast.FunctionDef):
            self.functions[node.name] = node
        if isinstance(node, _Function):
            scope = (*scope, node)
            for parameter in node.args.args:
                given = PARAMETERS.get(self.path.name, {}).get(parameter.arg)
                kind = _MODULE if parameter.arg in _MODULE_PARAMETERS else given
                if kind:
                    self.kinds[node, parameter.arg] = kind
        for child in ast.iter_child_nodes(node):
            self._enter(child, scope)

    def _variable(self, node: ast.Name) -> str | None:
        for function in (*reversed(self.scopes[node]), None):
            if kind := self.kinds.get((function, node.id)):
                return kind
        return None

    def _attribute(self, node: ast.Attribute) -> str | None:
        owner = self.kind(node.value)
        enums, classes = self.surface["enums"], self.surface["classes"]
        if owner == _MODULE:
            return node.attr if node.attr in enums else f"{_CLASS}{node.attr}" if node.attr in classes else None
        if owner in classes:
            found: str | None = classes[owner]["returns"].get(node.attr)
            return found
        return self.kinds.get((None, ast.unparse(node)))

    def _call(self, node: ast.Call) -> str | None:
        if ast.unparse(node.func).endswith("import_tensorrt"):
            return _MODULE
        if function := self._called(node):
            return self.kinds.get((function, _RESULT))
        kind = self.kind(node.func)
        return kind[len(_CLASS) :] if kind and kind.startswith(_CLASS) else kind

    def _called(self, node: ast.Call) -> ast.FunctionDef | None:
        """Return the function of this file that a call calls."""
        own = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self"
        name = node.func.attr if isinstance(node.func, ast.Attribute) and own else None
        return self.functions.get(name or (node.func.id if isinstance(node.func, ast.Name) else ""))

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._bind(node.targets[0], node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            self._bind(node.target, node.value)
        elif isinstance(node, ast.Return) and (kind := self.kind(node.value)):
            self.kinds[self.scopes[node][-1], _RESULT] = kind
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._bind(node.target, node.iter)
        elif isinstance(node, ast.Call) and (function := self._called(node)):
            parameters = [parameter.arg for parameter in function.args.args if parameter.arg != "self"]
            for parameter, argument in zip(parameters, node.args, strict=False):
                if kind := self.kind(argument):
                    self.kinds[function, parameter] = kind

    def _bind(self, target: ast.AST, value: ast.AST | None) -> None:
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            pairs = list(zip(target.elts, values, strict=True))
        for one, source in pairs:
            kind = self.kind(source)
            if kind and isinstance(one, ast.Attribute) and one.attr == "__class__":  # as NVIDIA's bindings convert
                one, kind = one.value, kind.removeprefix(_CLASS)
            if kind and isinstance(one, ast.Name):
                self.kinds[(self.scopes[one] or (None,))[-1], one.id] = kind
            elif kind and isinstance(one, ast.Attribute):
                self.kinds[None, ast.unparse(one)] = kind
