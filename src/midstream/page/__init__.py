"""The page of a running job: its status in a browser, its metrics, and a few buttons.

The driver's process serves it, on a thread of its own (`server`) that shares nothing with the job: it queries the
driver as the command line does, and answers from the results. Every request is bounded in bytes, time and number; a
fault in here is logged and ends no job. `http` and `site` are pure; `static` holds the files for the browser. Imports
`runtime` and what is below it.
"""

from midstream.page.address import PageAddress
from midstream.page.server import PageServer, open_page

__all__ = ["PageAddress", "PageServer", "open_page"]
