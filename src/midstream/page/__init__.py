"""The page of a running job: what can be seen of it in a browser, its metrics, and a few buttons.

The driver's process serves it, on a thread of its own (`server`) that shares nothing with the job: it asks the
driver as the command line does, and answers from what it was told. Every request is bounded in bytes, time and
number; a fault in here is logged and ends no job. `http` and `site` are pure; `static` is what the browser gets.
Imports `runtime` and what is below it.
"""

from midstream.page.address import PageAddress
from midstream.page.server import PageServer, open_page

__all__ = ["PageAddress", "PageServer", "open_page"]
