# SPDX-License-Identifier: Apache-2.0
"""Check vLLM's interface in the sources of its wheels, which are neither installed nor imported.

    python tests/support/vllm_source.py vllm-0.33.0-*.whl ...

Print for each wheel whether the plugin's contract holds on a CPU and on a GPU. Exit with 1 if the last wheel breaks it.
"""

import ast
import sys
import zipfile
from pathlib import Path
from types import FunctionType, SimpleNamespace

from dynaxx.integrations.vllm import contract


class Sources:
    """The modules of a wheel as objects of the same names, parameters and fields, read from their syntax trees.

    Args:
        read: returns the text of a file of the wheel by name, or raises KeyError.
    """

    def __init__(self, read):
        self._read, self._trees = read, {}

    @classmethod
    def of_wheel(cls, path):
        """Return the sources of a wheel."""
        wheel = zipfile.ZipFile(path)
        return cls(lambda name: wheel.read(name).decode())

    def load(self, module):
        """Return an object whose attributes are the module's classes, functions and variables."""
        self._tree(module)
        sources = self

        class Module:
            def __getattr__(self, name):
                return sources._named(module, name)

        return Module()

    def _tree(self, module):
        """Return the statements of a module that bind names, by name, and whether it is a package."""
        if module not in self._trees:
            path = module.replace(".", "/")
            for name in (f"{path}/__init__.py", f"{path}.py"):
                try:
                    tree = ast.parse(self._read(name))
                except KeyError:
                    continue
                self._trees[module] = dict(_bindings(tree.body)), name.endswith("__init__.py")
                break
            else:
                raise ImportError(f"no module {module}")
        return self._trees[module]

    def _named(self, module, name):
        names, package = self._tree(module)
        if name not in names:
            raise AttributeError(f"no {name} in {module}")
        node = names[name]
        if isinstance(node, ast.ClassDef):
            return self._class(module, node)
        if isinstance(node, ast.FunctionDef):
            return _function(node)
        if isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            parents = parts[: len(parts) - node.level + package] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            original = next(each.name for each in node.names if (each.asname or each.name) == name)
            return self._named(source, original)
        return SimpleNamespace()

    def _class(self, module, node):
        bases = []
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            try:
                found = self._named(module, name.id) if isinstance(name, ast.Name) else None
            except (AttributeError, ImportError):  # a base of another package
                found = None
            bases += [found] if isinstance(found, type) else []
        members = {
            name: _function(each) if isinstance(each, ast.FunctionDef) else None for name, each in _bindings(node.body)
        }
        return type(node.name, tuple(bases), members)


def _bindings(statements):
    """Yield the names that statements bind, those in branches too, with the statements."""
    for node in statements:
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _bindings([*node.body, *getattr(node, "orelse", [])])
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((each.asname or each.name, node) for each in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def _function(node):
    """Return a function of the same parameters, without defaults, types and body."""
    arguments = node.args
    positional = [each.arg for each in [*arguments.posonlyargs, *arguments.args]]
    stars = [f"*{arguments.vararg.arg}"] if arguments.vararg else ["*"] if arguments.kwonlyargs else []
    named = [each.arg for each in arguments.kwonlyargs]
    rest = [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    namespace = {}
    exec(f"def {node.name}({', '.join([*positional, *stars, *named, *rest])}): ...", namespace)
    found = namespace[node.name]
    assert isinstance(found, FunctionType), "a definition must bind a function"
    return found


def problems(sources):
    """Return what breaks the contract or the plugin's imports, by the processor that the engine runs on."""
    needs, shared = {"CPU": contract.CPU, "GPU": contract.CUDA}, (*contract.SHARED, *imports())
    return {place: contract.broken((*shared, *each), sources.load) for place, each in needs.items()}


def imports():
    """Return what the plugin's modules import from vLLM."""
    for path in Path(contract.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm."):
                yield from (contract.Need(node.module, each.name) for each in node.names)


def main(wheels):
    """Print the wheels and their problems. Return whether the last fits."""
    found = {}
    for wheel in wheels:
        found = problems(Sources.of_wheel(wheel))
        for place, lines in found.items():
            print(f"{Path(wheel).name.split('-cp')[0]} on a {place}: {'; '.join(lines) or 'fits'}", flush=True)
    return not any(found.values())


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
