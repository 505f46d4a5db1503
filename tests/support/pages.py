"""Reads pages of HTML like a browser, as far as tests need it."""

import base64
from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags with their attributes, pictures, and the text of each cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def images(self) -> list[bytes]:
        sources = [attributes["src"] or "" for tag, attributes in self.tags if tag == "img"]
        assert all(source.startswith("data:image/png;base64,") for source in sources)
        return [base64.b64decode(source.partition(",")[2], validate=True) for source in sources]

    def rows(self) -> list[list[str]]:
        cells = [text for text in self.texts if text]
        return [cells[i : i + 3] for i in range(len(cells))]
