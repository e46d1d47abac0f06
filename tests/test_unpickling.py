"""No way to turn bytes from outside into code: the whole product is searched for every one that is known."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("kvxfer", "kernels", "transports", "benchmarks", "deploy")

MODULES = {
    "_pickle",
    "cPickle",
    "cloudpickle",
    "copyreg",
    "dill",
    "jsonpickle",
    "joblib",
    "marshal",
    "multiprocessing",  # its queues, pipes and managers unpickle what they get
    "pandas",
    "pickle",
    "pickletools",
    "shelve",
    "yaml",
}
NAMES = {
    "all_gather_object",
    "allow_pickle",
    "broadcast_object_list",
    "deserialize_descs",  # NIXL's
    "eval",
    "exec",
    "fromfile_pickle",
    "gather_object",
    "get_serialized_descs",  # NIXL's
    "read_pickle",
    "recv_object_list",
    "recv_pyobj",
    "recv_serialized",
    "rpc_async",
    "rpc_sync",
    "scatter_object_list",
    "send_object_list",
    "send_pyobj",
    "torch_load",
    "unpickle",
    "weights_only",
}
CALLS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("jit", "load"), ("builtins", "eval")}


def _ways(text: str) -> set[str]:
    """Every way to unpickle or to run text in some Python source."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names if alias.name.split(".")[0] in MODULES}
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                found.add(module)
            case ast.ImportFrom(names=names):
                found |= {alias.name for alias in names if alias.name in NAMES}
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=attr) if (
                owner,
                attr,
            ) in CALLS:
                found.add(f"{owner}.{attr}")
            case ast.Attribute(attr=attr) if attr in NAMES - {"eval", "exec"}:
                found.add(attr)
            case ast.Name(id=name) if name in NAMES:
                found.add(name)
            case ast.keyword(arg=str(name)) if name in NAMES:
                found.add(name)
            case ast.Call(func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"), args=[ast.Constant()]):
                found |= {str(node.args[0].value)} & MODULES  # type: ignore[attr-defined]
    return found


def _files() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "def late():\n    import cloudpickle.cloudpickle",
        "import multiprocessing.connection",
        "socket.recv_pyobj()",
        "load = socket.recv_pyobj",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "torch.jit.load(path)",
        "np.fromfile(path); f(allow_pickle=True)",
        "dist.all_gather_object(out, mine)",
        "from torch.distributed import broadcast_object_list",
        "eval(text)",
        "__import__('pickle')",
        "importlib.import_module('dill')",
        "agent.deserialize_descs(data)",
    ],
)
def test_the_search_finds_it(text: str) -> None:
    assert _ways(text)


def test_the_product_unpickles_nothing() -> None:
    files = list(_files())
    assert len(files) > 80
    assert {str(path): ways for path in files if (ways := _ways(path.read_text(encoding="utf-8")))} == {}


def test_no_other_file_that_is_shipped_does() -> None:
    """Templates and scripts."""
    pattern = re.compile(r"\bpickle\b|\bmarshal\b|torch\.load|recv_pyobj|yaml\.load\b")
    texts = [
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".sh", ".cu", ".yaml", ".yml", ".tpl", ".json"}
    ]
    assert [str(path) for path in texts if pattern.search(path.read_text(encoding="utf-8"))] == []
