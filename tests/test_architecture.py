"""The rules of the house that a machine can check; each message names the file and the line."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each package may import those that stand in its line.
MAY_IMPORT = {
    "contracts": set(),
    "preprocessing": {"contracts"},
    "training": {"contracts", "preprocessing"},
    "conversion": {"contracts", "preprocessing", "training"},
    "evaluation": {"contracts", "preprocessing", "training"},
    "flows": {"contracts", "preprocessing", "training", "conversion", "evaluation"},
}
# Each heavy package has one owner: a module, or a package that ends with "/".
OWNERS = {
    "prefect": "flows/",
    "mlflow": "contracts/tracking.py",
    "transformer_engine": "training/te.py",
    "lm_eval": "evaluation/harness.py",
    "fastokens": "preprocessing/tokenization/fast_engines.py",
    "gigatoken": "preprocessing/tokenization/fast_engines.py",
    "tiktoken": "preprocessing/tokenization/tiktoken_engine.py",
    "datasets": "preprocessing/",
    "ray": "preprocessing/ingestion/ray_executor.py",
    "rensa": "preprocessing/cleaning/signatures.py",
    "py3langid": "preprocessing/cleaning/languages.py",
    "distributed": "preprocessing/ingestion/dask_executor.py",
}
HEAVY = {
    "torch",
    "prefect",
    "mlflow",
    "transformers",
    "matplotlib",
    "pyarrow",
    "numba",
    "tokenizers",
    "zstandard",
    "transformer_engine",
    "lm_eval",
    "datasets",
}
NO_TORCH = ("contracts", "preprocessing")
# What the command line imports before it knows what to do.
LIGHT_MODULES = ("config.py", "stage.py")
# JSON from outside may be nested so deeply that json.loads raises RecursionError; parse_json does not.
READS_JSON_ITSELF = {
    "contracts/json_text.py",
    "preprocessing/reading/records.py",  # says of each record what is wrong with it
    "preprocessing/tokenization/training.py",  # what it wrote itself a line before
    "conversion/safetensors_files.py",  # refuses names that stand twice
}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

MODULES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, top-level package, and whether the import happens when the module is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    lazy = set()
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if is_function or is_for_types:
            lazy.update(id(inner) for inner in ast.walk(node))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        for name in names:
            yield node.lineno, name.partition(".")[0], id(node) not in lazy


def fail_with(lines: list[str], rule: str) -> None:
    if lines:
        pytest.fail("\n".join([rule, *lines]), pytrace=False)


def test_packages_import_in_one_direction():
    wrong = []
    for path in MODULES:
        package = name_of(path).partition("/")[0]
        for line, imported, _ in imports_of(path):
            if imported in MAY_IMPORT and imported != package and imported not in MAY_IMPORT[package]:
                wrong.append(f"{name_of(path)}:{line} imports {imported}")
    fail_with(wrong, "Imports go flows -> evaluation | conversion -> training -> preprocessing -> contracts:")


def test_each_heavy_package_has_one_owner():
    wrong = []
    for path in MODULES:
        for line, imported, _ in imports_of(path):
            owner = OWNERS.get(imported)
            if owner and not (name_of(path) == owner or (owner.endswith("/") and name_of(path).startswith(owner))):
                wrong.append(f"{name_of(path)}:{line} imports {imported}; its owner is {owner}")
    fail_with(wrong, "A heavy package is imported by its owner alone:")


def test_owned_packages_are_imported_inside_functions():
    wrong = [
        f"{name_of(path)}:{line} imports {imported} when the module is imported"
        for path in MODULES
        for line, imported, is_eager in imports_of(path)
        if is_eager
        and imported in OWNERS
        # Prefect reads flows from decorated functions: that module is imported by nothing but Prefect.
        and not (imported == "prefect" and name_of(path).startswith("flows/prefect"))
    ]
    fail_with(wrong, "Import it inside the function that needs it:")


def test_modules_that_the_command_line_always_imports_stay_light():
    wrong = [
        f"{name_of(path)}:{line} imports {imported} when the module is imported"
        for path in MODULES
        if path.name in LIGHT_MODULES or name_of(path).startswith("contracts/")
        for line, imported, is_eager in imports_of(path)
        if is_eager and imported in HEAVY
    ]
    fail_with(wrong, "config.py, stage.py and contracts import heavy packages inside functions:")


def test_no_torch_in_preprocessing_and_contracts():
    wrong = [
        f"{name_of(path)}:{line} imports torch"
        for path in MODULES
        if name_of(path).startswith(NO_TORCH)
        for line, imported, _ in imports_of(path)
        if imported == "torch"
    ]
    fail_with(wrong, "Data is prepared on machines without torch:")


def test_init_files_hold_a_docstring_and_nothing_else():
    wrong = []
    for path in MODULES:
        if path.name == "__init__.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if ast.get_docstring(tree) is None:
                wrong.append(f"{name_of(path)}:1 has no docstring")
            wrong += [f"{name_of(path)}:{node.lineno} holds more than a docstring" for node in tree.body[1:]]
    fail_with(wrong, "Import from the module that defines a name:")


def test_no_module_state_that_changes():
    wrong = [
        f"{name_of(path)}:{node.lineno} says global {', '.join(node.names)}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Global)
    ]
    fail_with(wrong, "Pass it in:")


def test_modules_are_named_by_what_they_hold():
    wrong = [f"{name_of(path)}:1" for path in MODULES if path.stem in VAGUE_NAMES or path.parent.name in VAGUE_NAMES]
    fail_with(wrong, "Name a module by a noun of the field, not utils, helpers, common or misc:")


def test_no_assert_outside_tests():
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    fail_with(wrong, "python -O removes assert; raise an error:")


def test_every_module_opens_with_a_docstring():
    wrong = [
        f"{name_of(path)}:1"
        for path in MODULES
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    fail_with(wrong, "Say what goes in, what comes out and how:")


def test_json_is_read_by_the_one_function_that_survives_hostile_text():
    wrong = [
        f"{name_of(path)}:{node.lineno} calls json.{node.func.attr}"
        for path in MODULES
        if name_of(path) not in READS_JSON_ITSELF
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "loads")
        if isinstance(node.func.value, ast.Name) and node.func.value.id in ("json", "orjson")
    ]
    fail_with(wrong, "Use contracts.json_text.parse_json:")


def test_no_module_needs_itself():
    needs = {module_name(path): set(modules_imported_by(path)) for path in MODULES}
    wrong = []
    for module in needs:
        reached, open_ends = set(), list(needs[module])
        while open_ends:
            other = open_ends.pop()
            if other in needs and other not in reached:
                reached.add(other)
                open_ends += needs[other]
        if module in reached:
            wrong.append(f"{module} is imported by what it imports, also for types")
    fail_with(wrong, "Two modules that need each other are one module; or name what is needed by a Protocol:")


def module_name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")


def modules_imported_by(path: Path) -> Iterator[str]:
    """Yield the modules imported outside functions, under TYPE_CHECKING too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in lazy:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
