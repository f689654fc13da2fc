"""The style and the script of a report's page, `page.css` and `page.js`. Both stand in the page; nothing is loaded.

The script sorts tables, tells the numbers under the pointer, and opens a run's section when it is linked to. Without
it everything can still be read.
"""

import base64
import hashlib
from pathlib import Path

STYLE, SCRIPT = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))


def policy() -> str:
    """What the page may do: nothing from outside, and no script but this very one."""
    own = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
