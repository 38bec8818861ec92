"""The directive ``computed``: Python in a page, and in its place the Markdown that it prints.

So a table in the text cannot differ from what the code says. ``tests/test_documents.py`` runs the
same blocks without Sphinx.
"""

import io
from contextlib import redirect_stdout

from sphinx.util.docutils import SphinxDirective
from unbroken import unbroken


class Computed(SphinxDirective):
    """Run the content, with nothing but its own imports; parse what it prints."""

    has_content = True

    def run(self):
        source, line = self.get_source_info()
        code = compile("\n" * line + "\n".join(self.content), source, "exec")
        with redirect_stdout(io.StringIO()) as printed:
            exec(code, {})
        return self.parse_text_to_nodes(unbroken(printed.getvalue()))


def setup(app):
    """Register the directive."""
    app.add_directive("computed", Computed)
    return {"parallel_read_safe": True}
