"""What tables do not break where a column is narrow: 1e-16, 421 ±4 %, FlashAttention-2."""

import re


def unbroken(text):
    """The same Markdown, with hyphens and spaces in its tables that hold numbers together."""
    lines = text.splitlines(keepends=True)
    return "".join(_whole(line) if line.startswith("|") else line for line in lines)


def _whole(row):
    """A row of a table; code spans and the targets of links stay as they are."""
    parts = re.split(r"(`[^`]*`|\]\([^)]*\))", row)
    for i in range(0, len(parts), 2):
        part = re.sub(r"(?<=\w)-(?=\d)", "\N{NON-BREAKING HYPHEN}", parts[i])
        parts[i] = re.sub(r"(?<=\d) (?=(?:±|%|[KMGT]iB|T?FLOP|m?s\b))", "\N{NO-BREAK SPACE}", part)
    return "".join(parts)


def setup(app):
    """Read each page so."""
    app.connect("source-read", lambda _app, _name, text: text.__setitem__(0, unbroken(text[0])))
    return {"parallel_read_safe": True}
