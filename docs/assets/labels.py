"""A hook of MkDocs that names the search for screen readers, which Material's template does not."""

from __future__ import annotations

from typing import Any

SEARCH = 'data-md-component="search" role="dialog"'


def on_post_page(output: str, **rest: Any) -> str:
    return output.replace(SEARCH, f'{SEARCH} aria-label="Search"')


def on_post_template(output_content: str, **rest: Any) -> str:
    return on_post_page(output_content)
