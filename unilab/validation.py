"""One way to say that a setting is wrong."""


def require(condition: bool, key: str, expected: str, found: object) -> None:
    """Refuse a setting unless `condition` holds.

    Raises:
        ValueError: naming the key, what it must be and what it is.
    """
    if not condition:
        raise ValueError(f"{key} must be {expected}, got {found!r}")
