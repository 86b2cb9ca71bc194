"""A hook of MkDocs: writes llms.txt (llmstxt.org) into the site's root, from the titles and the first sentences of the pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

first: dict[str, str] = {}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    words = " ".join(markdown.split("\n\n")[1].split())
    sentence = "" if words.startswith(("#", "- ", "|", "```", ":::")) else re.split(r"(?<=\.) ", words)[0]
    first[page.file.src_uri] = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", sentence).rstrip(":")


def on_post_build(config: Any, **_: Any) -> None:
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    alone = [entry for entry in config.nav if isinstance(next(iter(entry.values())), str)]
    sections = {title: pages for entry in config.nav for title, pages in entry.items() if isinstance(pages, list)}
    for title, pages in {"Start": alone, **sections}.items():
        lines += [f"## {title}", ""]
        for page in pages:
            name, path = next(iter(page.items())) if isinstance(page, dict) else (f"{title}: all", page)
            words = f": {first[path]}" if first[path] else ""
            lines.append(f"- [{name}]({path.removesuffix('.md')}.html){words}")
        lines.append("")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines))
