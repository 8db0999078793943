"""Places below one another, with and without what follows a URL's question mark."""

from __future__ import annotations

import pytest

from midstream.engine.core.urls import below, is_below, parted


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("/data/job", "/data/job/chk-7"),
        ("/data/job/", "/data/job/chk-7"),
        ("what?/job", "what?/job/chk-7"),
        ("s3://bucket/", "s3://bucket/chk-7"),
        ("s3://bucket/job/?region=r&scheme=http", "s3://bucket/job/chk-7?region=r&scheme=http"),
        ("file:///data/job", "file:///data/job/chk-7"),
    ],
)
def test_a_path_in_a_directory(place: str, found: str) -> None:
    assert below(place, "chk-7") == found
    assert is_below(found, place) and is_below(place, place) and not is_below(place, found)
    assert "".join(parted(place)) == place


def test_a_name_that_begins_alike_is_not_below() -> None:
    assert not is_below("s3://bucket/jobs?region=r", "s3://bucket/job?region=r")
    assert is_below("s3://bucket/job/x", "s3://bucket/job?region=r")
