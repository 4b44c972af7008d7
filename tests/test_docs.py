"""The pages are true: every python block of README.md and docs/*.md runs, in order, one namespace a page.

A block that follows the line `<!-- not run -->` is only compiled.
"""

import re
from pathlib import Path

import pytest

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
