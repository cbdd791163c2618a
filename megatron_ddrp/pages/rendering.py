"""Pages from templates: Markdown, and the same page as one self-contained HTML file.

The templates are the files in `templates/`. They only show values; Python computes them.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.pages.markdown import code, escape, paragraph

_FILTERS = {"name": escape, "marked": paragraph, "code": code}


def render(template: str, **values: Any) -> str:
    """Return a template's text with these values and one final line break."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("megatron_ddrp.pages"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= _FILTERS
    return environment.get_template(template).render(values).strip() + "\n"


def write_page(folder: Path, text: str, title: str, numbers: dict[str, Any]) -> None:
    """Write page.md, the same page as page.html, and its numbers as results.json; the figures are there already."""
    texts = {
        "page.md": text,
        "page.html": to_html(text, title, folder),
        "results.json": json.dumps(numbers, indent=1) + "\n",
    }
    for name, content in texts.items():
        write_text(folder / name, content)


def to_html(text: str, title: str, folder: Path) -> str:
    """Return a page of Markdown as one HTML file that contains its figures, which are files below `folder`."""
    from markdown import Markdown
    from markdown.inlinepatterns import SimpleTextInlineProcessor
    from markdown.treeprocessors import Treeprocessor

    class Finish(Treeprocessor):
        """Step that puts the figures into the page and lets wide tables scroll."""

        def run(self, root: Any) -> None:
            for image in root.iter("img"):
                data = base64.b64encode((folder / image.get("src")).read_bytes()).decode()
                image.set("src", f"data:image/png;base64,{data}")
            for table in root.findall("table"):
                scroll = root.makeelement("div", {"class": "scroll", "tabindex": "0"})
                root[list(root).index(table)] = scroll
                scroll.append(table)

    converter = Markdown(extensions=["fenced_code", "tables"], output_format="html")
    underscores = SimpleTextInlineProcessor("(_+)")  # names may contain underscores, which mean no emphasis here
    converter.inlinePatterns.register(underscores, "underscores", 75)
    converter.treeprocessors.register(Finish(converter), "finish", 0)
    return render("page.html.jinja", title=title, body=converter.convert(text))
