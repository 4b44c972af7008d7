"""The pages are true: every python block of README.md and docs/*.md runs, in order, one namespace a page.

A block that follows the line `<!-- not run -->` is only compiled. Every `riftco …` line of a shell block parses, the
index lists every page, and the README's layout is that of the package.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from riftco.cli import parse, verbs

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = "<!-- not run -->"
BLOCK = re.compile(r"^(?P<fence>`{3,})python\n(?P<code>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str, bool]]:
    """First line number, code, and whether it is to run, of each python block."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        before = text[: match.start()].rstrip().splitlines()
        runs = not before or before[-1].strip() != NOT_RUN
        found.append((text.count("\n", 0, match.start("code")), match["code"], runs))
    return found


FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SHELL_BLOCK = re.compile(r"^```(?:bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The words after `riftco` of each command line in a page's shell blocks."""
    found = []
    for block in SHELL_BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            for part in line.split(" && "):
                name, _, rest = part.partition(" ")
                # Two spaces in a row: a table of verbs and what they do.
                if Path(name).name == "riftco" and "  " not in rest:
                    found.append(shlex.split(rest))
    return found


WITH_CODE = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=[page.relative_to(ROOT).as_posix() for page in WITH_CODE])
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__page__"}
    for line, code, runs in blocks(page):
        # Blank lines in front give tracebacks the line numbers of the page.
        compiled = compile("\n" * line + code, str(page), "exec")
        if runs:
            exec(compiled, namespace)


def test_blocks_are_found_and_marks_respected(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# A\n\n```python\nx = 1\n```\n\n{NOT_RUN}\n```python\ny\n```\n\n```bash\nls\n```\n")
    assert blocks(page) == [(3, "x = 1\n", True), (8, "y\n", False)]
    assert ROOT / "docs" / "autodiff.md" in WITH_CODE


COMMANDS = [(page, words) for page in [*PAGES, ROOT / "experiments" / "README.md"] for words in commands(page)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page.name}-{'_'.join(words[:2])}" for page, words in COMMANDS]
)
def test_the_commands_of_a_page_parse(page, words):
    verb, rest = words[0], words[1:]
    if verb == "bench":
        assert rest[0] in verbs.BENCHES
        return
    table = verbs.actions(verb)
    action = table[rest.pop(0)] if verb in verbs.GROUPS else table[""]
    parse.parse(action.options, rest, positional=action.positional, environment={})


def test_commands_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\npip install . && .venv/bin/riftco doctor --a \\\n  'b c'\n```\n```text\nriftco eval  what\n```\n"
    )
    assert commands(page) == [["doctor", "--a", "b c"]]
    assert len(COMMANDS) > 10


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([\w/]+\.md)\)", index)) == pages


def test_the_layout_in_the_readme_is_the_packages():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"riftco/(\w+(?:\.py|/))", readme[readme.index("## Where things are") :]))
    package = ROOT / "riftco"
    there = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")} | {p.name for p in package.glob("*.py")}
    assert drawn == there - {"__init__.py", "__main__.py"}


def test_relative_links_lead_somewhere():
    pages = [*PAGES, *ROOT.glob("*.md"), ROOT / "experiments" / "README.md", ROOT / "corpus" / "README.md"]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", FENCED.sub("", page.read_text(encoding="utf-8")))
        if "://" not in target
    ]
    assert [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()] == []


@pytest.mark.tiny
def test_planned_lanes_say_that_they_were_not_run(tmp_path):
    lanes = ("browser",)
    run = subprocess.run(["bash", ROOT / ".ci" / "run", *lanes], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for lane in lanes:
        assert re.search(rf"^{lane} +NOT RUN .*\(not part of the project yet\)$", run.stdout, re.MULTILINE)
