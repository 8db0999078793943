"""Paths and storage URLs as text: what follows the question mark of a URL goes with it, and stays at its end."""

from __future__ import annotations


def below(place: str, path: str) -> str:
    """`path`, which is relative, in the directory `place`."""
    directory, parameters = parted(place)
    return f"{directory.rstrip('/')}/{path}{parameters}"


def is_below(place: str, above: str) -> bool:
    """Whether it is that directory or in it, as far as can be told by the names."""
    return f"{parted(place)[0].rstrip('/')}/".startswith(f"{parted(above)[0].rstrip('/')}/")


def parted(place: str) -> tuple[str, str]:
    """A URL without its parameters, and these with their question mark. In a path that is no URL it is a name's."""
    directory, mark, parameters = place.partition("?") if "://" in place else (place, "", "")
    return directory, mark + parameters
