"""Parts of an HTML page that needs no other file: no network, no script, and pictures are embedded."""

import base64
from collections.abc import Sequence
from html import escape

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
p.note, figcaption { color: #555; font-size: .88rem; }
figure { margin: 0 0 1rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .4rem 0 1rem; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #eee; vertical-align: top; }
thead th { border-bottom: 1px solid #999; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; }
"""


def page(title: str, lead: str, parts: Sequence[str]) -> str:
    """A whole document; `lead` is a line of text below the title, `parts` are made by the functions below."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        f'<h1>{escape(title)}</h1>\n<p class="note">{escape(lead)}</p>\n' + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def picture(png: bytes, alt: str, caption: str) -> str:
    """A picture that is embedded in the page."""
    data = base64.b64encode(png).decode("ascii")
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(alt)}">'
    return f"<figure>\n{image}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A table; the first column names the row, and the others are aligned to the right if they are `numbers`."""
    body = "".join(_row(row, "td", numbers) for row in rows)
    return f"<table>\n<thead>{_row(head, 'th', numbers)}</thead>\n<tbody>{body}</tbody>\n</table>"


def folded(summary: str, *parts: str) -> str:
    """A part that is hidden until the reader opens it."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n" + "\n".join(parts) + "\n</details>"


def bullets(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _row(cells: Sequence[str], tag: str, numbers: bool) -> str:
    first, *rest = (escape(cell) for cell in cells)
    opening = f'<{tag} class="number">' if numbers else f"<{tag}>"
    return f"<tr><{tag}>{first}</{tag}>" + "".join(f"{opening}{cell}</{tag}>" for cell in rest) + "</tr>\n"
