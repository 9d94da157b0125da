# SPDX-License-Identifier: Apache-2.0
"""The rooms import in one direction, and a plain import is light."""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

import dynaxx
from dynaxx.moved import MOVED, NAMES

ROOMS = (
    "errors",
    "printable",
    "storage",
    "arguments",
    "settings",
    "lazy",
    "moved",
    "forks",
    "derivatives",
    "core",
    "layout",
    "patterns",
    "kernels",
    "selection",
    "ops",
    "policy",
    "telemetry",
    "integrations",
    "lab",
    "cli",
)
WINGS = ("trained", "engines", "distributed", "video")  # the core imports none of them; each may import those before it
SOURCE = Path(dynaxx.__file__).parent
MAX_FILES = 22  # of a folder


@cache
def nodes_of(path):
    """Return the nodes of a file's syntax tree, the whole of it first."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


HEAVY = (
    "triton",
    "transformers",
    "diffusers",
    "matplotlib",
    "pydantic",
    "rich",
    "typer",
    "jinja2",
    "gguf",
    "vllm",
    "onnx",
    "prometheus_client",
    "opentelemetry",
)


def may_import(room: str) -> tuple[str, ...]:
    if room == "testing":  # oracles for tests, users and doctor
        return ROOMS[: ROOMS.index("ops") + 1]
    if room in WINGS:
        return (*ROOMS, "testing", *WINGS[: WINGS.index(room)])
    before = ROOMS[: ROOMS.index(room)]
    return (*before, "testing") if room == "lab" else before


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms that a file imports from, at its top or within a function."""
    found = set()
    package = ("dynaxx", *path.relative_to(SOURCE).parts[:-1])
    for node in nodes_of(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        parts = [name.split(".") for name in names]
        found |= {part[1] for part in parts if part[0] == "dynaxx" and len(part) > 1}
    return found & {*ROOMS, *WINGS, "testing"}


def test_rooms_import_only_from_rooms_before_them():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):  # the front: names of every room, loaded when used
            continue
        assert room in (*ROOMS, *WINGS, "testing"), f"{path} is in no room; add it to the order"
        wrong += [f"{path.relative_to(SOURCE)} imports {other}" for other in imported_rooms(path) - {room}
                  if other not in may_import(room)]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def imports_of(path: Path) -> list[str]:
    """Return the modules that a file imports from this package, also for type checking; names of a module count."""
    found: list[str] = []
    package = ("dynaxx", *path.relative_to(SOURCE).parts[:-1])
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return [name for name in found if name.startswith("dynaxx.")]


def import_graph(room: str) -> dict[str, set[str]]:
    """Return the modules of a room that each of its modules imports; `a.b` stands for package `a` as well."""
    files = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else [*(SOURCE / room).rglob("*.py")]
    name_of = lambda path: ".".join(("dynaxx", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    modules = {name_of(path): path for path in files}
    graph = {}
    for name, path in modules.items():
        found = [each for each in imports_of(path) if each in modules]
        graph[name] = {each for each in found if not any(other.startswith(f"{each}.") for other in found)} - {name}
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return a circle of imports, with the first module repeated at the end; empty if there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


@pytest.mark.parametrize("room", [*ROOMS, *WINGS, "testing"])
def test_no_imports_go_round_in_a_room(room):
    assert not circle_in(import_graph(room)), " -> ".join(circle_in(import_graph(room)))


def test_lists_of_files_are_complete():
    """A folder whose docstring lists "The files:" names each of them; `x_*` stands for several."""
    missing = []
    for init in SOURCE.rglob("__init__.py"):
        listed = ast.get_docstring(nodes_of(init)[0]) or ""
        if "The files:" not in listed:
            continue
        words = re.findall(r"[\w*]+", listed)
        here = [path.stem for path in init.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        missing += [
            f"{init.parent.relative_to(SOURCE)}/{name}"
            for name in here
            if name != "__init__" and not any(fnmatch(name, word) for word in words)
        ]
    assert not missing, f"name {missing} in the docstring of their folder"


def test_files_that_the_source_names_exist():
    """A comment may name the end of a path; lines of a list of files start with their names."""
    named = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        named += [(path.name, end) for end in re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|h))`", text)]
        listed = re.findall(r"^    ([\w/, ]+?)  +\w", text.partition("The files:\n\n")[2].partition('\n"""')[0], re.M)
        for name in re.split(r",\s*", ", ".join(listed)) if path.name == "__init__.py" and listed else []:
            named.append((path.name, f"{path.parent.name}/{name.strip('/ ')}{'' if '/' in name else '.py'}"))
    files = [path.as_posix() for folder in (SOURCE, ROOT / "tests", ROOT / "benchmarks") for path in folder.rglob("*")]
    assert not [pair for pair in named if not any(file.endswith(f"/{pair[1]}") for file in files)]


def test_folders_are_small():
    root = Path(__file__).parents[1]
    tops = (SOURCE, *(root / name for name in ("tests", "benchmarks", "examples", "docs")))
    folders = {path.parent for top in tops for path in top.rglob("*.py")}
    sizes = {str(folder): len([*folder.glob("*.py")]) for folder in folders}
    assert not {folder: size for folder, size in sizes.items() if size > MAX_FILES}


def test_old_import_paths_are_the_modules_at_their_new_places():
    with pytest.warns(DeprecationWarning, match="is now `dynaxx.trained.nn"):
        old = importlib.import_module("dynaxx.nn.cache")
    assert old is importlib.import_module("dynaxx.trained.nn.cache")
    assert old.__spec__.name == "dynaxx.trained.nn.cache"


def test_moved_modules_exist():
    for old, new in MOVED.items():
        assert not any((SOURCE / old.replace(".", "/")).glob("*.py")), f"{old} is said to have moved"
        assert importlib.util.find_spec(f"dynaxx.{new}"), f"{old} moved to {new}, which is missing"


def test_the_front_door_is_short():
    assert len(dynaxx.__all__) <= 50
    assert all(getattr(dynaxx, name) is not None for name in dynaxx.__all__)


def test_old_names_of_the_front_door_work_and_name_the_new_place():
    names = {**NAMES, "trained": dynaxx.trained.__all__}
    for module, offered in names.items():
        for name in offered:
            assert name not in dynaxx.__all__
            with pytest.warns(DeprecationWarning, match=rf"`dynaxx.{name}` is now `dynaxx.{module}.{name}`"):
                old = getattr(dynaxx, name)
            assert old is getattr(importlib.import_module(f"dynaxx.{module}"), name)
    with pytest.warns(DeprecationWarning, match="is now `dynaxx.trained.NsaSizes`"):
        assert dynaxx.NativeSizes is dynaxx.trained.NsaSizes
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dynaxx.no_such_name


def test_what_adapters_share_imports_no_adapter():
    """`integrations/runtime` is below the adapters of engines."""
    wrong = [f"{path.name} imports {name}" for path in (SOURCE / "integrations" / "runtime").rglob("*.py")
             for name in imports_of(path) if name.startswith("dynaxx.integrations.")
             and not name.startswith("dynaxx.integrations.runtime")]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_a_circle_is_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]


# `gpu` is what both GPU backends of an operator share; the CPU's may build on the definition.
MAY_USE = {"gpu": (), "hopper": ("gpu",), "triton": ("gpu",), "cpu": ("reference",), "reference": ()}


@pytest.mark.parametrize("backend", MAY_USE)
def test_no_backend_imports_its_sibling(backend):
    siblings = {*MAY_USE} - {backend, *MAY_USE[backend]}
    modules = [path.relative_to(SOURCE) for path in SOURCE.glob("**/kernels/**/*.py")]
    files = [path for path in modules if "support" not in path.parts and backend in path.with_suffix("").parts]
    imported = [(path, name) for path in files for name in imports_of(SOURCE / path)]
    wrong = [f"{path} imports {name}" for path, name in imported
             if ".kernels." in name and siblings & {*name.partition(".kernels.")[2].split(".")[:3]}]  # fmt: skip
    assert files
    assert not wrong, "\n".join(wrong)


# Folders of kernels by operator; each may build on those before it.
OPERATORS = (*(f"kernels/{name}" for name in ("attention", "decode", "selection")), "trained/tokens", "trained/nsa")


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_form_a_line(operator):
    later = tuple(f"dynaxx.{each.replace('/', '.')}." for each in OPERATORS[OPERATORS.index(operator) + 1 :])
    files = [path for path in (SOURCE / operator).rglob("*.py") if "kernels" in path.parts]
    wrong = [f"{path.relative_to(SOURCE)} imports {name}" for path in files for name in imports_of(path)
             if name.startswith(later)]  # fmt: skip
    assert files
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ["runtime", "schedule", "primitives"])
def test_what_operators_share_imports_no_operator(room):
    wrong = [f"{path.relative_to(SOURCE)} imports {name}" for path in (SOURCE / "kernels" / room).rglob("*.py")
             for name in imports_of(path) if "/".join(name.split(".")[1:3]) in OPERATORS]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def run_python(code: str) -> dict:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_a_plain_import_loads_torch_alone():
    code = (
        "import json, sys, torch; b = set(sys.modules); import dynaxx; print(json.dumps(sorted(set(sys.modules) - b)))"
    )
    loaded = run_python(code)
    assert not {name.split(".")[0] for name in loaded} & set(HEAVY)
    assert {name.split(".")[0] for name in loaded} <= {"dynaxx", *sys.stdlib_module_names}


def test_using_the_library_loads_no_extra():
    code = (
        "import json, sys, torch; b = set(sys.modules); import dynaxx as dx; q = torch.randn(1, 64, 2, 16);"
        "dx.sparse_attention(q, q, q, dx.SlidingWindow(20).layout(64, block_size=16), backend='reference');"
        "dx.BlockLayout; print(json.dumps(sorted(set(sys.modules) - b)))"
    )
    assert not {name.split(".")[0] for name in run_python(code)} & (set(HEAVY) - {"triton"})


def test_import_costs_at_most_50_ms_beyond_torch():
    """Measure CPU time of this process, the best of several runs, because other processes can only lengthen it."""
    code = (
        "import json, time, torch; a = time.process_time(); import dynaxx; b = time.process_time();"
        "print(json.dumps(b - a))"
    )
    assert min(run_python(code) for _ in range(3)) <= 0.050


ROOT = Path(__file__).parent.parent
LOADING = ("from_pretrained", "from_config", "pipeline")


def own_files(*folders):
    """Return the Python files of folders of the repository, without what was installed or built there."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "Queue", "LifoQueue",
         "PriorityQueue", "SimpleQueue", "cached_property", "register_at_fork"}  # fmt: skip
LOCKS_OF = {"threading", "queue", "multiprocessing", "functools", "os", "_thread"}
RENEWED = {"integrations/runtime/background.py": {"Queue"}}  # a child makes another


def test_locks_come_from_one_place_that_frees_them_in_a_forked_child():
    wrong = []
    for path in own_files("src"):
        name = path.relative_to(SOURCE).as_posix()
        for node in nodes_of(path):
            taken = set()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                module = node.func.value
                taken = {node.func.attr} if isinstance(module, ast.Name) and module.id in LOCKS_OF else set()
            elif isinstance(node, ast.ImportFrom) and node.module in LOCKS_OF:
                taken = {alias.name for alias in node.names}
            if name != "forks.py":
                wrong += [f"{name}:{node.lineno} {each}" for each in taken & LOCKS - RENEWED.get(name, set())]
    assert not wrong, f"take locks and events from dynaxx.forks: {wrong}"


def test_models_are_loaded_by_one_function_that_never_runs_their_code():
    """transformers would ask, and `yes |` would answer."""
    only = SOURCE / "integrations/transformers/loading.py"
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in own_files("src", "benchmarks", "examples")
        if path != only
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in LOADING
    ]
    assert not wrong, f"load with dynaxx.integrations.transformers.loading: {wrong}"
