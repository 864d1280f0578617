"""docs/architecture.md is the map of the package: a part that is not on it, or a file on it that is gone, is found here."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

from harness.public_names import example_of, public_names, results_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fsdp2"
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def section(title: str) -> str:
    """The text below the heading that begins with ``title``, up to the next one."""
    (found,) = [part for part in TEXT.split("\n## ") if part.startswith(title)]
    return found


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]


def test_each_folder_of_the_core_stands_in_the_map_with_files_that_exist():
    """The map names the files to begin with; which concept a file has, its own docstring says."""
    rows = [line.split("|")[1:] for line in section("Who owns what").splitlines() if line.startswith("| `")]
    folders = {path.parent.relative_to(PACKAGE).as_posix() + "/" for path in (PACKAGE / "core").glob("*/__init__.py")}
    assert Counter(cells[0].strip(" `") for cells in rows) == Counter(folders)
    named = [cells[0].strip(" `") + name for cells in rows for cell in cells[1:] for name in re.findall(r"`(\w+\.py)`", cell)]
    assert [name for name in named if not (PACKAGE / name).exists()] == []


def test_each_file_of_the_core_says_its_concept_in_a_sentence():
    files = [path for path in (PACKAGE / "core").rglob("*.py") if path.name != "__init__.py"]
    first_lines = {path: (ast.get_docstring(tree_of(path)) or "").split("\n\n")[0] for path in files}
    assert [path.name for path, text in first_lines.items() if len(text) < 30 or text[-1] not in ".:"] == []


def test_files_on_the_way_of_a_parameter_exist():
    named = set(re.findall(r"\b((?:setup|modules|iteration|group|comm|plan)/\w+)", section("A parameter's way")))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (PACKAGE / "core" / f"{name}.py").exists()] == []


def test_each_other_part_of_the_package_stands_in_the_second_table_once():
    listed = Counter(name for cell in first_cells(section("The rest of the package")) for name in re.findall(r"`([^`]+)`", cell))
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "core"}
    assert listed == Counter({path.name for path in PACKAGE.glob("*.py")} | folders)


def test_files_that_the_documents_name_exist():
    """Also those that name a file by its path below the package."""
    folders = "core|activations|compiled|compat|materialize|optim|grouping|strategies|checkpoint|migrate|testing|wrap"
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "log.md"]  # which says what was, too
    named = [(page.name, name) for page in pages for name in re.findall(rf"`((?:{folders})/[\w/]+\.py)`", page.read_text())]
    assert [f"{page}: {name}" for page, name in named if not (PACKAGE / name).exists()] == []


def test_readers_of_other_programs_checkpoints_are_imported_when_they_are_first_asked_for():
    """The linter holds that no file of training imports one; the package's own names are the way that is left."""
    at_once = [
        node for node in ast.parse((PACKAGE / "checkpoint" / "__init__.py").read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    assert at_once
    assert [node.module for node in at_once if "conversion" in (node.module or "")] == []


def test_one_file_warns_the_user():
    """It knows on which rank, and at which line (fsdp2/user_warnings.py)."""
    warns = re.compile(r"warnings\.warn\b|from warnings import|warn_explicit\(|\.warning\(")
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if warns.search(path.read_text())}
    assert found == {"user_warnings.py"}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What a class assigns to ``self``, and its annotated fields."""
    found = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and getattr(each.value, "id", None) == "self":
            found.add(each.attr)
    return found


def test_threads_that_look_on_have_one_home():
    """A daemon thread of another kind may be inside of C++ when Python ends, which aborts the process."""
    homes = [str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if "threading.Thread(" in file.read_text()]
    assert homes == ["hangs/background.py"]


FACTORIES = {"arange", "as_tensor", "empty", "empty_strided", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}


def test_each_tensor_is_made_on_a_device_that_its_line_names():
    """Else it lies where ``torch.set_default_device`` says. Only the planner's models are made where their caller wants them."""
    silent = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: torch.{node.func.attr}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).as_posix() not in ("planner/models.py", "planner/workload.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and getattr(node.func.value, "id", None) == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert silent == []


WIDE_CLASSES = {
    "core/group/param_group.py: ParamGroup",
    "doctor/watching.py: watch",
    "hangs/watcher.py: Watchdog",
    "inspect/views.py: Group",
    "planner/setting.py: Setting",
    "testing/clock/cards.py: Card",
}
"""Classes with more than fifteen attributes. Take a class off this list when it has fewer; add none."""


def test_no_other_class_has_more_than_fifteen_attributes():
    """State that belongs together is a value: see ``core/group/reduction.py``."""
    wide = {
        f"{path.relative_to(PACKAGE).as_posix()}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and len(attributes_of(node)) > 15
    }
    assert wide - WIDE_CLASSES == set()


def test_each_public_name_has_an_example_in_its_docstring():
    """``Example:`` and an indented block at the docstring's end, which tests/docs/test_examples.py runs (docs/reference/index.md says
    which names it begins with). Classes that calls return need none."""
    names = public_names()
    returned = results_of(names)
    assert [name for name, thing in names.items() if not example_of(thing) and name.rpartition(".")[2] not in returned] == []


IMPORTS_BY_STRING = {
    "__init__.py": "the package's own names, when a program first asks for them",
    "checkpoint/__init__.py": "the same of its own",
    "cli.py": "the command that was asked for",
    "clients/torch_names.py": "modules of torch",
    "installation.py": "the packages whose public names it puts in the place of torch's",
    "migrate/command.py": "an extra that may not be installed",
    "planner/script.py": "the package whose public names a script calls",
    "planner/shapes.py": "a function that the user named",
    "ranks.py": "what its forks would import, one after another",
    "testing/pretend/torch_names.py": "a module of torch",
    "torch_names/__init__.py": "modules of torch",
}
"""Files that import by a string, which import-linter does not see. Add none: a higher file hands down what a lower one needs of it."""


def test_no_other_file_imports_by_a_string():
    by_string = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and {getattr(node.func, "attr", ""), getattr(node.func, "id", "")} & {"import_module", "__import__"}
    ]
    assert set(by_string) == set(IMPORTS_BY_STRING)


def test_files_by_which_a_plan_tells_kinds_of_memory_are_there():
    from fsdp2.planner.recorder import _ASKED_BY

    missing = [name for name in _ASKED_BY if not (PACKAGE / "core" / "group" / f"{name}.py").is_file()]
    assert missing == []
