"""Formulas as MathML, by the converter in docutils: no script, no font and no network needed."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def inline(writer, node):
    """A formula within the text."""
    writer.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def display(writer, node):
    """A formula with lines of its own; alignment at `&` is that of LaTeX's ``align*``."""
    text = node.astext().strip()
    if r"\\" in text and r"\begin" not in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    writer.body.append(f'<div class="formula">{tex2mathml(text, as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app):
    """Register the renderer under the name "mathml"."""
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True}
