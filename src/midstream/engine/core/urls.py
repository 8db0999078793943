"""Paths and storage URLs as strings. The parameters of a URL, after its question mark, stay at its end."""

from __future__ import annotations


def below(location: str, path: str) -> str:
    """Return `path`, which is relative, in the directory `location`."""
    directory, parameters = parted(location)
    return f"{directory.rstrip('/')}/{path}{parameters}"


def is_below(location: str, above: str) -> bool:
    """Whether `location` is the directory `above` or inside it, judged by the names alone."""
    return f"{parted(location)[0].rstrip('/')}/".startswith(f"{parted(above)[0].rstrip('/')}/")


def parted(location: str) -> tuple[str, str]:
    """Split a URL into the part before its parameters, and the parameters with their question mark.

    In a path that is not a URL, a question mark is part of a name.
    """
    directory, mark, parameters = location.partition("?") if "://" in location else (location, "", "")
    return directory, mark + parameters
