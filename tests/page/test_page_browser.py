"""What people see: the page of real jobs in headless Chromium.

Needs Playwright and a Chromium of the distribution (`apt install chromium`; no browser is downloaded). README's
screenshot is made here: MIDSTREAM_SCREENSHOT=docs/images/page.png says where to.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import msgspec
import pytest
import watched_jobs
from served import TOKEN, FakeJob

from machine import limit_s
from midstream import Environment
from midstream.cli.main import main
from midstream.engine.protocol.job_status import (
    AutoscaleChange,
    AutoscaleStatus,
    CheckpointStatus,
    FlowStatus,
    GaugeStatus,
    HeldBackStatus,
    JobStatus,
    RecoveryStatus,
    StateSize,
    SubtaskStatus,
)
from midstream.engine.protocol.live_rows import GetRows
from midstream.engine.protocol.messages import ClientRequest, GetLogs, Reply
from midstream.page.address import PageAddress
from midstream.page.server import PageServer
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from sample_status import later, sample
from waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SEEN_MS = 90_000
"""On a loaded machine a job takes its time to show anything."""

pytestmark = [
    pytest.mark.systems,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian, Ubuntu: sudo apt install chromium)"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed (pip install playwright)"
    )
    with playwright.sync_playwright() as driver:
        # a sandbox of Chromium's own is not to be had for root, as in containers of CI
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


class Tab:
    """A tab on a job's page. Whatever goes wrong in it fails the test."""

    def __init__(self, browser: Browser, link: str, **settings: object) -> None:
        context = browser.new_context(**settings)  # type: ignore[arg-type]  # what a test gives
        context.set_default_timeout(SEEN_MS)
        self.page: Page = context.new_page()
        self.problems: list[str] = []
        self.foreign: list[str] = []
        origin = link.partition("#")[0]
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda said: self.problems.append(said.text) if said.type == "error" else None)
        self.page.on(
            "request", lambda made: None if made.url.startswith((origin, "data:")) else self.foreign.append(made.url)
        )
        self.page.goto(link)

    def shows(self, place: str, text: str) -> None:
        """Wait until the element of that id, or selector, has such a text: a regular expression."""
        from playwright.sync_api import expect

        expect(self.page.locator(place).first).to_contain_text(re.compile(text), timeout=SEEN_MS)

    def shows_once(self, place: str, text: str) -> None:
        """Wait until one element of that selector has this text, and no other: one cause is one sentence."""
        from playwright.sync_api import expect

        expect(self.page.locator(place, has_text=text)).to_have_count(1, timeout=SEEN_MS)

    def act(self, button: str, value: str | None = None) -> None:
        """Press a button of the header, fill in the dialog, and confirm, all by keyboard."""
        chosen = self.page.get_by_role("button", name=button, exact=True)
        chosen.focus()
        self.page.keyboard.press("Enter")
        self.page.locator("dialog[open]").wait_for()
        if value is not None:
            self.page.locator("dialog input").fill(value)
        self.page.keyboard.press("Enter")
        self.page.locator("dialog[open]").wait_for(state="hidden")

    def close(self) -> None:
        self.page.context.close()
        assert self.problems == []
        assert self.foreign == []


@pytest.fixture
def tabs(browser: Browser) -> Iterator[list[Tab]]:
    opened: list[Tab] = []
    yield opened
    for tab in opened:
        tab.close()


def start(env: Environment, running: list[Job]) -> Job:
    cloudpickle.register_pickle_by_value(watched_jobs)
    job = env.start(slots=ProcessSlots())
    running.append(job)
    return job


def opened(tabs: list[Tab], browser: Browser, job: Job, **settings: object) -> Tab:
    assert job.page is not None
    tabs.append(Tab(browser, job.page, **settings))
    return tabs[-1]


@pytest.fixture
def pages() -> Iterator[list[PageServer]]:
    opened: list[PageServer] = []
    yield opened
    for page in opened:
        page.end()


def of_fake(browser: Browser, pages: list[PageServer], tabs: list[Tab], job: FakeJob) -> Tab:
    pages.append(PageServer(PageAddress(), TOKEN))
    pages[-1].begin(job)
    tabs.append(Tab(browser, pages[-1].link))
    return tabs[-1]


def test_state_that_only_grows_is_named_with_its_operator(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    """Of a job that has run for ten minutes, so its status is made up."""

    def shown(status: JobStatus) -> Tab:
        tab = of_fake(browser, pages, tabs, FakeJob(status))
        tab.shows("#figures", r"State61\.0 MiB|State30\.0 MiB|State7\.0 MiB")
        return tab

    status = sample()
    growth = tuple(StateSize(status.now_ms - 600_000 + 10_000 * n, (1 + n) * 2**20) for n in range(61))
    write = status.vertices[1]
    holding = msgspec.structs.replace(write.operators[0], state_rows=400_000, state_bytes=60 * 2**20)
    vertices = (status.vertices[0], msgspec.structs.replace(write, operators=(holding,)))
    status = msgspec.structs.replace(status, vertices=vertices, state_growth=growth)
    tab = shown(status)
    tab.shows(
        "#findings",
        r"State has been growing steadily, from 1\.0 MiB to 61\.0 MiB in 10 min \(6\.0 MiB a minute\); 98.% of it is in write",
    )
    tab.shows("#figures", r"State61\.0 MiB400,000 rows; most in write")
    tab.shows("#graph", "state 60.0 MiB, 400,000 rows")
    young = msgspec.structs.replace(status, state_growth=growth[:7])
    level = (*growth[:30], *(msgspec.structs.replace(each, bytes=30 * 2**20) for each in growth[30:]))
    for fine in (young, msgspec.structs.replace(status, state_growth=level)):
        assert "growing" not in shown(fine).page.locator("#findings").inner_text()


def test_a_job_that_scales_itself_says_why_it_runs_as_it_does(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    status = sample()
    reason = "the busiest slot works 40% of the time"
    change = AutoscaleChange(status.now_ms - 60_000, 1, 2, "the busiest slot worked 99% of the time")
    scaled = msgspec.structs.replace(status, autoscale=AutoscaleStatus(1, 8, False, 2, 2, reason, (change,)))
    tab = of_fake(browser, pages, tabs, FakeJob(scaled))
    tab.shows(
        "#findings", r"Parallelism 2, of 1 to 8: the busiest slot works 40% of the time\. It was 1 until .*worked 99%"
    )
    advised = msgspec.structs.replace(status, autoscale=AutoscaleStatus(1, 8, True, 2, 5, reason))
    tab = of_fake(browser, pages, tabs, FakeJob(advised))
    tab.shows("#findings", "Parallelism 5 would be better than 2: the busiest slot works 40% of the time")


class MovingJob(FakeJob):
    """Its next status each time it is asked; the last one for ever."""

    def __init__(self, *statuses: JobStatus) -> None:
        super().__init__(statuses[-1])
        self._statuses = list(statuses)

    def request(self, request: ClientRequest | GetLogs | GetRows) -> Future[Reply]:
        self._status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        return super().request(request)


def test_a_recovery_says_how_fast_it_goes_and_how_long_it_has_left(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    def at(second: int, done_mib: int) -> JobStatus:
        status = sample()
        recovering = (RecoveryStatus(0, 100 * 2**20, done_mib * 2**20),)
        write = msgspec.structs.replace(status.vertices[1], recovering=recovering)
        now_ms = status.now_ms + 1000 * second
        return msgspec.structs.replace(status, now_ms=now_ms, vertices=(status.vertices[0], write))

    tab = of_fake(browser, pages, tabs, MovingJob(at(0, 10), at(1, 12), at(2, 14)))
    tab.shows("#findings", r"14\.0 MiB of the 100\.0 MiB .* \(14.%\), 2\.0 MiB a second, about 43 s left")
    tab = of_fake(browser, pages, tabs, MovingJob(at(0, 10), at(30, 10)))
    tab.shows("#findings", r"10\.0 MiB of the 100\.0 MiB .* \(10.%\), nothing in the last 30 s")


def test_what_comes_in_bursts_says_since_when_there_was_none(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    first = sample()
    statuses = [first, later(first, 1, 5_000), later(first, 21, 5_000), later(first, 41, 5_000)]
    tab = of_fake(browser, pages, tabs, MovingJob(*statuses))
    tab.shows("#task-1 tbody tr", r"write.*0/s\s*no rows for 40 s$")
    tab.shows("#task-0 tbody tr", r"read.*0/s\s*no rows for 40 s$")
    tab.shows("#figures", r"Rows read0/s.*at most 5\.0 k/s in 40 s")
    silent = msgspec.structs.replace(first.vertices[0].operators[1], rows_in=7, rows_out=0)
    read = msgspec.structs.replace(first.vertices[0], operators=(first.vertices[0].operators[0], silent))
    first = msgspec.structs.replace(first, vertices=(read, first.vertices[1]))
    tab = of_fake(browser, pages, tabs, MovingJob(first, later(first, 1, 300), later(first, 2, 600)))
    tab.shows("#task-0 tbody tr:last-child td:last-child", r"^0/s$")
    tab.shows("#task-0 tbody tr:first-child td:nth-child(2)", r"^$")


def test_an_input_says_how_far_it_is_behind_the_one_that_has_come_furthest(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    status = sample()
    ahead_us = 1_357_023_600_000_000
    told = (SubtaskStatus(0, 10, 0, 0.2, 0.0, None),)
    other = msgspec.structs.replace(status.vertices[0], id=2, name="prices", operators=())
    both = msgspec.structs.replace(
        status,
        vertices=(status.vertices[0], msgspec.structs.replace(status.vertices[1], subtasks=told), other),
        edges=((0, 1, "keyed"), (2, 1, "keyed")),
        flows=(FlowStatus(10, 100, 1, ahead_us), FlowStatus(10, 100, 1, ahead_us - 90_000_000)),
    )
    tab = of_fake(browser, pages, tabs, FakeJob(both))
    tab.page.locator("#task-1 [data-open]").click()
    tab.shows("#detail [data-key=inputs] thead", "behind the most advanced input")
    tab.shows("#detail [data-key=inputs] tbody tr:first-child td:last-child", r"^0 ms$")
    tab.shows("#detail [data-key=inputs] tbody tr:last-child td:last-child", r"^1 min 30 s$")


def test_a_slot_that_is_short_of_memory_stands_out(browser: Browser, pages: list[PageServer], tabs: list[Tab]) -> None:
    short = msgspec.structs.replace(sample(), slot_pids=(11, 12), slot_memory_bytes=(500 * 2**20, 1000 * 2**20))
    tab = of_fake(browser, pages, tabs, FakeJob(short))
    tab.shows("#findings", r"Slot 1 uses 1000\.0 MiB of memory, and its limit is 1\.0 GiB\. It is killed")
    tab.shows("#slots", r"1.*1000\.0 MiB.*1\.0 GiB")
    tab = of_fake(browser, pages, tabs, FakeJob(sample()))
    tab.shows("#findings", "It failed at")
    assert "memory" not in tab.page.locator("#findings").inner_text()


def test_state_on_disk_has_a_column_once_there_is_some(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    status = msgspec.structs.replace(sample(), slot_pids=(11, 12), slot_state_disk_bytes=(0, 3 * 2**30))
    tab = of_fake(browser, pages, tabs, FakeJob(status))
    tab.shows("#slots thead", "state on disk")
    tab.shows("#slots tbody tr:last-child", r"3\.0 GiB")
    tab = of_fake(browser, pages, tabs, FakeJob(msgspec.structs.replace(status, slot_state_disk_bytes=(0, 0))))
    tab.shows("#slots thead", "memory")
    assert "disk" not in tab.page.locator("#slots thead").inner_text()


def test_checkpoints_that_never_pause_are_named_with_what_they_hold(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    def of(duration_ms: int) -> Tab:
        status = sample()
        made = tuple(
            CheckpointStatus(9 - n, "completed", status.now_ms - 6_000 * (n + 1), duration_ms, 105 * 2**20)
            for n in range(6)
        )
        return of_fake(browser, pages, tabs, FakeJob(msgspec.structs.replace(status, checkpoints=made)))

    of(5_400).shows(
        "#findings", r"follow each other without a pause: 5\.4 s each, of the last 5, for 105\.0 MiB of state"
    )
    tab = of(2_000)
    tab.shows("#findings", "It failed at")
    assert "without a pause" not in tab.page.locator("#findings").inner_text()


def test_restarts_from_one_checkpoint_again_and_again_are_told(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    status = sample()
    failures = tuple(msgspec.structs.replace(status.failures[0], at_ms=status.now_ms - 60_000 * n) for n in (1, 2, 3))
    old = CheckpointStatus(10, "completed", status.now_ms - 44 * 60_000, 500, 2**20)
    stuck = msgspec.structs.replace(status, failures=failures, restarts=3, last_checkpoint=old, checkpoints=(old,))
    tab = of_fake(browser, pages, tabs, FakeJob(stuck))
    until("the tab's title to say so", lambda: tab.page.title().startswith("✖ "))
    tab.shows(
        "#findings", r"each restart begins at checkpoint 10, from 44 min ago, and reads everything after it again"
    )
    newer = msgspec.structs.replace(old, created_ms=status.now_ms - 30_000)
    tab = of_fake(browser, pages, tabs, FakeJob(msgspec.structs.replace(stuck, last_checkpoint=newer)))
    tab.shows("#findings", "It has failed 3 times")
    assert "each restart" not in tab.page.locator("#findings").inner_text()


def test_failures_that_differ_in_numbers_only_are_one_entry(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    status = sample()
    alike = tuple(
        msgspec.structs.replace(
            status.failures[0], at_ms=status.now_ms - 60_000 * n, attempt=4 - n, summary=f"bad row {n}"
        )
        for n in (1, 2, 3)
    )
    other = msgspec.structs.replace(status.failures[0], at_ms=status.now_ms - 90_000, summary="slot 1 is lost")
    failures = (alike[0], other, *alike[1:])
    tab = of_fake(browser, pages, tabs, FakeJob(msgspec.structs.replace(status, failures=failures, restarts=4)))
    tab.shows("#failures article:nth-of-type(1)", r"attempt 3; 3 alike, the first at .* bad row 1")
    tab.shows("#failures article:nth-of-type(2)", "slot 1 is lost")
    assert tab.page.locator("#failures article").count() == 2
    tab.page.locator("#failures article:nth-of-type(1) summary", has_text="Those before it").click()
    tab.shows("#failures article:nth-of-type(1) ul", "attempt 2: bad row 2.*attempt 1: bad row 3")


def test_the_last_hour_is_drawn_when_a_tab_is_opened(
    browser: Browser, pages: list[PageServer], tabs: list[Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.page.site.STEP_S", 0.01)
    statuses = [later(sample(), 600 * n, 6_000_000 * n) for n in range(6)]
    job = MovingJob(*statuses)
    pages.append(PageServer(PageAddress(), TOKEN))
    pages[-1].begin(job)
    until("the page to have requested all of them", lambda: job.times_asked > len(statuses))
    tabs.append(Tab(browser, pages[-1].link))
    tabs[-1].shows("#figures .tile:nth-of-type(1)", r"at most 10\.0 k/s in 40 min")


def test_counters_and_gauges_of_functions_are_shown_with_their_operator(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    status = sample()
    first = status.vertices[1]
    told = msgspec.structs.replace(
        first.operators[0],
        counters={"model_calls": 1_234_567, "<b>": 0.25},
        gauges={"depth": GaugeStatus(sum=7, min=3, max=4), "one": GaugeStatus(sum=2, min=2, max=2)},
    )
    vertices = (status.vertices[0], msgspec.structs.replace(first, operators=(told,)))
    tab = of_fake(browser, pages, tabs, FakeJob(msgspec.structs.replace(status, vertices=vertices)))
    tab.page.get_by_text("4 metrics of its function").click()
    tab.shows(".user-metrics", r"model_calls 1,234,567\s*<b> 0\.25\s*depth 7 \(of a subtask 3 to 4\)\s*one 2")


def test_a_thousand_subtasks_cost_a_browser_no_more_than_fifty(
    browser: Browser, pages: list[PageServer], tabs: list[Tab]
) -> None:
    """How much is laid out each second decides whether a page stutters; times depend on the machine."""

    def of(subtasks: int) -> JobStatus:
        told = tuple(
            SubtaskStatus(n, 1_000 + n, 900 + n, n / subtasks, 0.1, 1_700_000_000_000_000 + n) for n in range(subtasks)
        )
        steps = tuple(
            msgspec.structs.replace(sample().vertices[1], id=n, name=f"step {n}", parallelism=subtasks, subtasks=told)
            for n in range(8)
        )
        return msgspec.structs.replace(
            sample(),
            vertices=steps,
            edges=tuple((n, n + 1, "keyed") for n in range(7)),
            flows=(),
            slot_pids=tuple(range(2_000, 2_000 + subtasks)),
            slot_memory_bytes=tuple((200 + n) * 2**20 for n in range(subtasks)),
            slot_memory_limit_bytes=(2**34,) * subtasks,
        )

    nodes = []
    for subtasks in (50, 128):
        tab = of_fake(browser, pages, tabs, FakeJob(of(subtasks)))
        tab.shows("#task-7", "keyed|write")
        tab.page.locator("#task-3 [data-open]").click()
        tab.shows("#detail .scroll:last-child tbody tr", rf"^{subtasks - 1}9[89]")
        nodes.append(tab.page.evaluate("document.querySelectorAll('*').length"))
    tab.shows("#detail", "128 of 128 have reported; the busiest first, 50 of them")
    tab.shows("#slots", r"The 50 of 128 with the most memory\.")
    tab.shows("#slots tbody tr", r"^1272127327\.0 MiB")
    assert nodes[1] <= nodes[0] + 5, nodes


def test_a_skewed_key_shows_its_subtask_and_the_job_can_be_helped_by_buttons(
    browser: Browser, tabs: list[Tab], running: list[Job], tmp_path: Path
):
    job = start(watched_jobs.skewed(tmp_path), running)
    tab = opened(tabs, browser, job, viewport={"width": 1280, "height": 830})
    tab.shows("#findings", r"Bottleneck: process\. Its busiest subtask is busy")
    tab.shows("#findings", r"Only subtask [01] of process is that busy.*It has taken \d+\s%")
    tab.shows(".task.slow .tag.bad", r"bottleneck: subtask [01]")
    slow = re.search(r"subtask (\d)", tab.page.locator(".task.slow .tag.bad").inner_text())
    assert slow is not None
    status = job.status()
    assert status.bottleneck is not None and status.bottleneck.subtask == int(slow[1])
    assert "token" not in tab.page.url, "whoever looks over a shoulder does not see it"
    tab.shows("svg.edges", r"keyed[\d.]+ k/s[\d.]+ [KM]iB/s[\d.,]+( k)? per batch")
    rows, size, batches = (getattr(status.flows[0], name) for name in ("rows", "bytes", "batches"))
    assert 1 < rows / batches <= 5_000 and 16 <= size / rows < 40, "a row has two columns of 8 bytes each"
    tab.shows("#checkpoints", "parquet")
    tab.page.locator(".task.slow [data-open]").click()
    tab.shows("#detail tr.slow", rf"{slow[1]}.*%")
    if "MIDSTREAM_SCREENSHOT" in os.environ:
        tab.page.locator("[data-close]").click()
        until("checkpoints to show", lambda: job.status().checkpoints_completed >= 6)
        tab.shows("#checkpoints tbody tr", "^[6-9]")
        tab.page.evaluate("scrollTo(0, 0)")
        tab.page.screenshot(path=os.environ["MIDSTREAM_SCREENSHOT"])

    killed = until("pids", lambda: job.status().slot_pids)[0]
    os.kill(killed, signal.SIGKILL)
    tab.shows("#failures", "slot .* is lost|was killed")
    tab.shows("#findings", "It failed at|runs again|restarting")

    until("it runs again", lambda: job.status().state == "running")
    tab.act("Rescale", "1")
    tab.shows("#answers", r"Rescale to 1 .* done: .*chk-\d+")
    tab.shows(".task .operators thead", "1 subtask")
    assert {vertex.parallelism for vertex in job.status().vertices} == {1}

    tab.act("Stop")
    tab.shows("#answers", r"Stop .* done: .*chk-\d+")
    tab.shows("#title", "stopped")
    assert job.wait(limit_s(60)).state == "stopped"
    tab.shows("#notice", "The job has ended: it is stopped")
    tab.problems[:] = [said for said in tab.problems if "ERR_CONNECTION_REFUSED" not in said]


def test_the_split_that_holds_event_time_back_is_named(
    browser: Browser, tabs: list[Tab], running: list[Job], tmp_path: Path
):
    job = start(watched_jobs.split_behind(tmp_path), running)
    tab = opened(tabs, browser, job, viewport={"width": 1280, "height": 830})
    far = r"Event time of .* is held back by orders, subtask [01], split orders-3: 14 min \d+ s behind the most advanced input, subtask or split"
    tab.shows("#findings", far)

    def held_back() -> HeldBackStatus | None:
        """Of the windows, once they have heard that it is this split: the source knows of it first."""
        found = job.status().vertices[1].held_back
        return found if found is not None and found.watermark_us is not None and found.split == "orders-3" else None

    held = until("windows to be held back by the split that is furthest behind", held_back)
    assert held.name == "orders"
    tab.shows_once("#findings li", "is held back by")
    tab.shows("svg.edges", r"keyed.*14 min( \d+ s)? behind|keyed.*15 min( \d+ s)? behind")
    tab.page.locator(".task [data-open]").nth(1).click()
    tab.shows("#detail", r"input from.*watermark.*behind")
    tab.shows("#detail [data-key=inputs] tbody tr", r"orders.*keyed[\d.]+( k)?/s[\d.]+ KiB/s.*UTC1[45] min")
    tab.shows(
        "#findings",
        r"Event time stands still at “orders .*”.*; it is held back by orders, subtask [01], split orders-3",
    )
    tab.shows_once("#findings li", "is held back by")
    status = job.status()
    (flow,) = [flow for flow, (_, _, kind) in zip(status.flows, status.edges, strict=True) if kind == "keyed"]
    assert flow.watermark_us == held.watermark_us


def test_live_rows_are_shown_on_request_and_refused_without_the_token(
    browser: Browser, tabs: list[Tab], running: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job = start(watched_jobs.split_behind(tmp_path), running)
    tab = opened(tabs, browser, job)
    until("rows to pass", lambda: job.status().rows_read)
    tab.shows("#graph", "orders")
    tab.page.get_by_role("button", name="Rows of orders", exact=True).first.click()
    tab.shows("#rows", r"of the \d+ rows of a batch that orders emits, subtask [01]")
    tab.shows("#rows thead", r"kint64attimestamp\[us\]")
    tab.shows("#rows tbody tr", r"^\d20\d\d-\d\d-\d\d ")
    assert 1 <= tab.page.locator("#rows tbody tr").count() <= 20
    tab.page.get_by_role("button", name="Rows of parquet").click()
    tab.shows("#rows", r"No rows that .* sends to parquet passed within 5 s")  # no window ends: time stands still
    tab.page.locator("[data-rows-close]").click()
    assert tab.page.locator("#rows-section").is_hidden()

    assert job.page is not None
    reader = Tab(browser, job.page.partition("#")[0])
    tabs.append(reader)
    reader.page.get_by_role("button", name="Rows of orders", exact=True).first.click()
    reader.shows("#rows", "Rows are shown only with the token")

    assert main(["rows", job.job_id, "orders", "-n", "2", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [column["name"] for column in seen["shown"]["columns"]] == ["k", "at"] and len(seen["shown"]["rows"]) <= 2
    assert main(["rows", job.job_id, "orders"]) == 0
    assert "timestamp[us]" in capsys.readouterr().out
    assert main(["rows", job.job_id, "order"]) != 0
    assert "there is no operator 'order'; the uids of all are: orders, " in capsys.readouterr().err
    assert main(["rows", job.job_id, "orders", "-n", "101"]) != 0
    assert "-n: 101 is not from 1 to 100" in capsys.readouterr().err


def test_a_slow_sink_is_named_and_why_no_checkpoint_completes(
    browser: Browser, tabs: list[Tab], running: list[Job], tmp_path: Path
):
    job = start(watched_jobs.slow_sink(tmp_path), running)
    tab = opened(tabs, browser, job, viewport={"width": 390, "height": 844}, color_scheme="dark")
    tab.shows("#findings", r"Bottleneck: archive\. .*the operators before it wait.*times as fast")
    tab.shows(".task.slow", "archive")
    tab.shows(
        "#findings", r"checkpoints? (have|has) failed: not complete within 1 s: no answer from .*archive \(subtask"
    )
    tab.shows("#checkpoints tr.failed", "failed: not complete within 1 s")
    tab.shows("h1", re.escape(watched_jobs.EVIL))
    wide = tab.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390, f"the page is {wide} pixels wide on a phone"
    assert tab.page.title().endswith(": running")
    assert tab.page.locator("main img, main script, header img").count() == 0

    assert job.page is not None
    reader = Tab(browser, job.page.partition("#")[0])
    tabs.append(reader)
    reader.shows("#actions", "link with the token")
    assert reader.page.get_by_role("button", name="Stop", exact=True).is_disabled()


def test_a_failing_function_is_shown_by_its_own_lines_and_nothing_in_it_is_run(
    browser: Browser, tabs: list[Tab], running: list[Job], tmp_path: Path
):
    job = start(watched_jobs.failing(tmp_path), running)
    tab = opened(tabs, browser, job)
    tab.shows("#failures .summary", "map.*is not a price")
    tab.shows("#failures pre", r"in parse_price\n.*raise ValueError")
    tab.shows("#findings", "It has failed [0-9]+ times within 10 minutes")
    assert tab.page.title().startswith("✖ prices: ")
    assert tab.page.locator("#failures img, #failures script").count() == 0
    assert job.page is not None
    with urllib.request.urlopen(f"{job.page.partition('#')[0]}status.json", timeout=limit_s(30)) as answer:
        assert len(json.load(answer)["failures"]) >= 2
    tab.page.get_by_role("button", name="What functions printed before it").first.click()
    tab.shows("#failures .logs", r"\d+ lines? from the two minutes before it, from all slots")
    tab.shows("#failures .logs pre", r"slot 0 map \(0\): about to parse")
    assert tab.page.locator("#failures img, #failures script").count() == 0
    reader = Tab(browser, job.page.partition("#")[0])
    tabs.append(reader)
    reader.page.get_by_role("button", name="What functions printed before it").first.click()
    reader.shows("#failures .logs", "Lines are shown only with the token")
