# SPDX-License-Identifier: Apache-2.0
"""Tensors of the package have the dtype and device that the code names, whatever a user has set as default."""

import ast
from pathlib import Path

import dynaxx

SOURCE = Path(dynaxx.__file__).parent
WHOLE = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}  # int64 for the integers that they are given
WHOLE |= {"as_tensor"}  # keeps the dtype of what it converts
REAL = {"asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randn"}
FACTORIES = WHOLE | REAL | {"scalar_tensor", "tensor", "zeros"}


def faults_in(source: str) -> list[str]:
    """Return the factory calls without a dtype, or without a device in functions neither `on_host` nor `lasting`.

    Parameters of modules follow the default, as torch's own do.
    """
    found = []

    def walk(node, named):
        if isinstance(node, ast.FunctionDef):
            named |= any(
                isinstance(each, ast.Name) and each.id in ("lasting", "on_host") for each in node.decorator_list
            )
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "nn.Parameter":
                return
            given = {each.arg for each in node.keywords}
            maker = name.removeprefix("torch.")
            if name.startswith("torch.") and maker in FACTORIES and None not in given:
                wanted = ({"dtype"} - ({"dtype"} if maker in WHOLE else set())) | (set() if named else {"device"})
                if wanted - given:
                    found.append(f"{node.lineno}: {ast.unparse(node)[:80]} without {', '.join(sorted(wanted - given))}")
        for child in ast.iter_child_nodes(node):
            walk(child, named)

    walk(ast.parse(source), False)
    return found


def test_factories_name_dtype_and_device():
    faults = [
        f"{path.relative_to(SOURCE)}:{fault}"
        for path in sorted(SOURCE.rglob("*.py"))
        for fault in faults_in(path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join(faults)


def test_faults_are_found():
    code = (
        "x = torch.zeros(2)\n@on_host\ndef f():\n    return torch.ones(2), torch.arange(3)\ny = torch.full((), 1., **a)"
    )
    assert [fault[:2] for fault in faults_in(code)] == ["1:", "4:"]
