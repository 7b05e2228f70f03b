"""What documents name is there."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Places of ours are not looked at: environments, caches, what builds leave behind.
LEFT_OUT = {
    "node_modules",
    "target",
    "bin",
    "dist",
    "build",
    "wheelhouse",
    "wheelhouse-traces",
    "duemqv1",
}
KINDS = "py|pyi|md|proto|sh|csv|tpl|properties|java|go|js|rs|toml"
NAMED = re.compile(rf"[\w.{{}},*/-]*\w[}}*]?\.(?:{KINDS})\b(?![\w/])")
ALTERNATIVES = re.compile(r"\{([^{}]*)\}")
PATHS = re.compile(r"\b[a-z_]+/[a-z_/0-9]+\.py\b")
TICKS = re.compile(r"`([^`\n]+)`")


def all_files() -> Iterator[Path]:
    for folder, folders, files in os.walk(ROOT):  # not into links: they lead to folders of ours
        folders[:] = sorted(
            each for each in folders if each not in LEFT_OUT and not each.startswith(".")
        )
        yield from (Path(folder, file).relative_to(ROOT) for file in sorted(files))


FILES = list(all_files())
# A changelog tells of what was.
DOCUMENTS = [file for file in FILES if file.suffix == ".md" and file.name != "CHANGELOG.md"]
# On our users' machines, or abridged.
ELSEWHERE = re.compile(r"^/|^(?:.*/)?(?:job|grpc|click)\.py$")


def names_in(text: str) -> set[str]:
    """Of files, between backticks; `{a,b}.py` is two."""
    found = {name for ticked in TICKS.findall(text) for name in NAMED.findall(ticked)}
    while with_alternatives := {name for name in found if ALTERNATIVES.search(name)}:
        for name in with_alternatives:
            found.remove(name)
            (one,) = ALTERNATIVES.findall(name)[:1]
            found |= {name.replace(f"{{{one}}}", each, 1) for each in one.split(",")}
    return {name for name in found if not ELSEWHERE.match(name)}


def is_there(name: str, document: Path) -> bool:
    """Seen from the document, from the top, or the end of a path beneath the document's folder.

    The SDK's folder may be left out, too, and `serving/` where services speak of it.
    """
    if (ROOT / document.parent / name).exists() or (ROOT / name).exists():
        return True
    near = (document.parent, Path("sdk"), Path("serving"))
    ends = [path for path in FILES if path.match(name)]
    return any(path.is_relative_to(each) for path in ends for each in near)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_files_that_a_document_names_are_there(document: Path) -> None:
    text = (ROOT / document).read_text()
    assert {name for name in names_in(text) if not is_there(name, document)} == set()


def test_files_that_the_code_names_are_there() -> None:
    """In docstrings and comments of ours, where the name has a folder; ticked or not."""
    missing = set()
    for file in FILES:
        if file.suffix != ".py" or file.is_relative_to("tests"):
            continue
        text = (ROOT / file).read_text()
        for name in names_in(text) | set(PATHS.findall(text)):
            if "/" in name and not is_there(name, file):
                missing.add((str(file), name))
    assert missing == set()


def test_folders_that_the_readme_lists_are_there() -> None:
    listed = re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    tops = {path.parts[0] for path in FILES if len(path.parts) > 1}
    assert all((ROOT / each).is_dir() for each in listed)
    # requirements/: pinned versions for `make setup`.
    assert tops - {"requirements"} == {each.split("/")[0] for each in listed}
