"""The runner of tests/docs finds blocks, keeps their order and says which one fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .blocks import Session, blocks

PAGE = """\
# A page

```python title="lesson/one.py"
answer = 42
```

=== "A tab"

    ```bash
    python -c 'print(__import__("lesson.one").one.answer)'
    ```

- ```python
  import inspect

  def double(x):
      return 2 * x
  ```

```python hl_lines="1" needs="torch"
print(double(21), inspect.getsource(double).count("2 * x"), __name__)
```

````text exact
```python
````
"""


def test_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks("page.md", PAGE)
    assert [block.line for block in found] == [3, 9, 13, 20, 24]
    assert found[3].options == {"hl_lines": "1", "needs": "torch"}
    assert (found[4].options, found[4].code) == ({"exact": True}, "```python\n")
    session = Session()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "__main__", sys)
        assert [session.run(block) for block in found[:4]] == ["", "42\n", "", "42 1 __main__\n"]


def test_a_block_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("page.md", "```bash\necho hello; false; echo no\n```\n")
    with pytest.raises(SystemExit, match=r"page.md:1: exit code 1\n[^\0]*\nhello\n$"):
        Session().run(block)
    with pytest.raises(ValueError, match=r"page.md:1: the block does not end"):
        blocks("page.md", "```bash\necho\n")
