"""Rules of the house that no linter knows: who imports whom, how long things get, what is public."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 340
LONGER_FILES = {"control.messages": 360}  # one struct a message: a table, read from top to bottom
MAX_FUNCTION_LINES = 50
MAX_KERNEL_FUNCTION_LINES = 60

# What each room and each single module of kvxfer may import, besides itself. Nothing imports the command line, and the
# two sides do not know each other.
_GEOMETRY = {"errors", "layout", "ownership", "routes", "segments", "addresses", "coverage", "wire"}
_AGENT = {
    *_GEOMETRY,
    "transfer",
    "operations",
    "rows_host",
    "rows_copy",
    "slots",
    "slot_memory",
    "pool_seat",
    "worker_desk",
    "sidecar",
    "streams",
    "integrity",
    "memory",
    "transports",
    "control",
    "ops",
}
ALLOWED: dict[str, set[str]] = {
    "transfer": set(),
    "errors": {"transfer"},
    "layout": {"errors"},
    "ownership": {"layout"},
    "segments": {"errors", "layout", "ownership"},
    "routes": {"errors", "layout", "ownership"},
    "addresses": {"errors", "layout", "ownership", "routes", "segments"},
    "coverage": {"errors", "layout"},
    "wire": _GEOMETRY,
    "rows_host": _GEOMETRY,
    "row_sums": set(),
    "rows_copy": {*_GEOMETRY, "rows_host"},
    "operations": _GEOMETRY,
    "row_mover": {*_GEOMETRY, "operations", "rows_host", "rows_copy"},
    "memory": {"errors"},
    "streams": {*_GEOMETRY, "operations", "rows_host", "row_sums", "memory", "kernels"},
    "slots": {"errors"},
    "kernels": {"errors", "row_sums"},
    "tables": {"errors"},
    "transports": {"errors", "memory", "streams", "tables"},
    "control": {"errors", "layout", "memory", "streams", "transfer"},
    "ops": {"errors", "tables", "transfer", "control", "transports"},
    "integrity": {"errors", "rows_host", "row_sums", "control"},
    "slot_memory": {"errors", "memory", "row_sums", "rows_host", "streams", "transports", "ops"},
    "pool_seat": {*_GEOMETRY, "operations", "rows_host", "row_sums", "streams", "control"},
    "worker_desk": {*_GEOMETRY, "memory", "operations", "pool_seat", "slot_memory", "streams", "control"},
    "peer_pools": {"errors", "memory", "row_mover", "streams", "control"},
    "row_opening": {
        "errors",
        "operations",
        "peer_pools",
        "row_mover",
        "slot_memory",
        "streams",
        "worker_desk",
        "control",
    },
    "sidecar": {
        "peer_pools",
        "row_opening",
        *_GEOMETRY,
        "worker_desk",
        "memory",
        "operations",
        "row_mover",
        "rows_host",
        "slot_memory",
        "streams",
        "transports",
        "control",
        "ops",
    },
    "prefill": _AGENT,
    "decode": {*_AGENT, "kernels"},
}

PUBLIC_NAMES = {
    "kvxfer.control.client": {
        "AsyncDecodeClient",
        "AsyncPrefillClient",
        "ChunkPages",
        "DecodeClient",
        "PrefillClient",
        "ReceivePages",
    },
    "kvxfer.decode.dcp": {"DcpGroup", "align_chunk_tokens"},
    "kvxfer.kernels": {
        "A2ALayout",
        "LseBase",
        "copy_rows",
        "gather_rows",
        "lse_combine",
        "mask_empty_",
        "mla_decode",
        "move_rows",
        "pack_a2a",
        "scale_partial_",
        "scale_to_staging",
        "unpack_combine",
    },
    "kvxfer.transports": {
        "TRANSPORT_NAMES",
        "Completion",
        "ContiguousWrite",
        "Counters",
        "Limits",
        "MemoryKind",
        "Outcome",
        "Region",
        "RegionDescriptor",
        "Transport",
        "WriteBatch",
        "create_transport",
        "exit_process",
    },
}


def _modules() -> Iterator[tuple[str, Path]]:
    """Every module of the product, as (dotted name below kvxfer, path)."""
    for base, prefix in ((ROOT / "kvxfer", ""), (ROOT / "kernels", "kernels."), (ROOT / "transports", "transports.")):
        for path in sorted(base.rglob("*.py")):
            if "__pycache__" in path.parts or any(parent.is_symlink() for parent in path.parents):
                continue
            yield prefix + ".".join(path.relative_to(base).with_suffix("").parts), path


MODULES = dict(_modules())


def _imports(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    return _imported(ast.parse(path.read_text(encoding="utf-8")))


def _imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_walk_finds_the_product() -> None:
    assert {"layout", "kernels.rows", "transports.base", "control.client", "cli.main"} <= MODULES.keys()


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("cli") and name != "__init__"])
def test_import_direction(module: str) -> None:
    room = module.split(".")[0]
    used = {name.split(".")[1] for name in _imports(MODULES[module]) if name.startswith("kvxfer.")}
    assert room in ALLOWED, f"{room} is new: say above what it may import"
    assert used - {room} <= ALLOWED[room], f"{module} may not import these"


def test_channels_alone_touch_zmq() -> None:
    users = {name for name, path in MODULES.items() if any(each.split(".")[0] == "zmq" for each in _imports(path))}
    assert users == {"control.channel", "control.doorkeeper", "control.peer_channel"}


def test_nothing_unpickles() -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    users = {name for name, path in MODULES.items() if banned & {each.split(".")[0] for each in _imports(path)}}
    assert users == set()
    calls = re.compile(r"\b(recv_pyobj|send_pyobj|torch\.load|all_gather_object|broadcast_object_list)\b")
    assert [name for name, path in MODULES.items() if calls.search(path.read_text(encoding="utf-8"))] == []


def _imports_at_once(path: Path) -> set[str]:
    """Dotted names that importing a file imports: none of what functions import when they are called."""
    body = ast.Module([node for node in ast.parse(path.read_text(encoding="utf-8")).body if _runs_at_once(node)], [])
    return _imported(body)


def _runs_at_once(node: ast.stmt) -> bool:
    is_for_checkers = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return not is_for_checkers and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _reachable(start: str) -> set[str]:
    """Modules of kvxfer that importing `start` pulls in."""
    found: set[str] = set()
    todo = [start]
    while todo:
        module = todo.pop()
        if module in found:
            continue
        found.add(module)
        names = {name.removeprefix("kvxfer.") for name in _imports_at_once(MODULES[module]) if name[:7] == "kvxfer."}
        todo += [name for name in names if name in MODULES]
        todo += [f"{name}.__init__" for name in names if f"{name}.__init__" in MODULES]
    return found


@pytest.mark.parametrize("agent", ["prefill.agent", "decode.agent"])
def test_agents_do_without_torch(agent: str) -> None:
    users = {
        module
        for module in _reachable(agent)
        if "torch" in {each.split(".")[0] for each in _imports_at_once(MODULES[module])}
    }
    assert users == set()


def _functions() -> Iterator[tuple[str, int, int]]:
    for module, path in MODULES.items():
        limit = MAX_KERNEL_FUNCTION_LINES if module.startswith("kernels") else MAX_FUNCTION_LINES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                yield f"{module}.{node.name}", (body[-1].end_lineno or 0) - body[0].lineno + 1, limit


def test_functions_stay_short() -> None:
    """Statements, without signature and docstring."""
    long = {name: num_lines for name, num_lines, limit in _functions() if num_lines > limit}
    assert long == {}


def test_files_stay_short() -> None:
    num_lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: num for name, num in num_lines.items() if num > LONGER_FILES.get(name, MAX_FILE_LINES)} == {}


def test_list_of_packages_matches_the_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rooms = {"kvxfer." + name.removesuffix(".__init__") for name in MODULES if name.endswith(".__init__")} | {"kvxfer"}
    assert set(project["tool"]["setuptools"]["packages"]) == rooms


def test_links_serve_runs_without_an_install() -> None:
    for name in ("kernels", "transports"):
        link = ROOT / "kvxfer" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names(module: str) -> None:
    assert set(importlib.import_module(module).__all__) == PUBLIC_NAMES[module]


def test_product_stands_alone() -> None:
    """Nothing that is shipped points outside the repository."""
    texts = [*MODULES.values(), ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    assert [str(path) for path in texts if "../shared" in path.read_text(encoding="utf-8")] == []
