"""What every report page is made of: one style, figures inside the page, texts from outside escaped."""

from __future__ import annotations

import base64
import html


def escaped(text: str) -> str:
    return html.escape(text, quote=True)


def tile(name: str, value: str, note: str) -> str:
    """One number that is to be seen first."""
    return f"<div class=tile><span>{escaped(name)}</span><b>{escaped(value)}</b><span>{escaped(note)}</span></div>"


def image(name: str, png: bytes) -> str:
    """A figure that needs no other file."""
    content = base64.b64encode(png).decode()
    return f'<img alt="{escaped(name)}" src="data:image/png;base64,{content}">'


STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933 }
body { max-width: 1000px; margin: 2.5rem auto; padding: 0 1.25rem }
h1 { font-size: 1.5rem; margin: 0 }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem }
.muted, .under { color: #6b7785 }
.under { font-size: .9rem; margin: .25rem 0 1.5rem }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem }
.tile { flex: 1 1 9rem; border: 1px solid #e4e8ec; border-radius: 8px; padding: .7rem .9rem; display: grid }
.tile b { font-size: 1.6rem; font-weight: 600; line-height: 1.25; font-variant-numeric: tabular-nums }
.tile span { font-size: .82rem; color: #6b7785 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { font-size: .82rem; font-weight: 500; color: #6b7785 }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid #e4e8ec }
th:first-child, td:first-child, .text { text-align: left }
td:first-child { font-weight: 600 }
.text { overflow-wrap: anywhere }
.doubts { border-left: 3px solid #c47f17; padding-left: 1rem; margin-top: 2rem }
.doubts h2 { margin-top: 0 }
img { width: 100%; height: auto; margin: 1rem 0 0 }
pre { background: #f6f8fa; padding: 1rem; border-radius: 8px; overflow-x: auto; font-size: .8rem }
summary { cursor: pointer; margin-top: 2rem; color: #6b7785 }
"""
