"""The pages in python/docs: messages that they quote are in the sources, programs that they show can run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "python" / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
QUOTED = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.M)
BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^ *```", re.M | re.S)


@pytest.fixture(scope="module")
def sources():
    """All code, with strings that go on in a next line put together."""
    folders = [ROOT / folder for folder in ("src", "crates", "python/native", "python/src")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".rs", ".py")]
    text = "\n".join(path.read_text() for path in files)
    text = re.sub(r'\\\n\s*|"\s*\n\s*f?"', "", text)
    return text.replace('\\"', '"')


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_sources(sources, message):
    parts = [part.strip() for part in message.split("…")]
    missing = [part for part in parts if part and part not in sources]
    assert parts != [""] and not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_programs_of_a_page_are_python(page):
    for indent, block in BLOCK.findall(page.read_text()):
        if "--8<--" not in block:
            compile(re.sub(f"^{indent}", "", block, flags=re.M), str(page), "exec")


def test_every_recipe_has_a_page_that_is_in_the_table():
    table = (DOCS / "cookbook" / "index.md").read_text()
    pages = [page for page in PAGES if page.parent.name == "cookbook" and page.name != "index.md"]
    files = re.findall(r'--8<-- "(.*)"', "".join(page.read_text() for page in pages))
    assert len(pages) == len(set(files)) >= 12 and all(f"({page.name})" in table for page in pages)
    assert all((ROOT / "python" / file).is_file() for file in files)


def test_links_of_the_front_page_lead_to_files():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "python" / "README.md").read_text())
    assert len(links) > 10 and all((ROOT / "python" / link).is_file() for link in links)


def test_the_page_of_observe_runs():
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.rand(512, 8), torch.arange(512))
    space = {"dataset": dataset, "step": lambda x, y: x.sum()}
    for _, block in BLOCK.findall((DOCS / "is-it-my-loader.md").read_text()):
        exec(block, space)
