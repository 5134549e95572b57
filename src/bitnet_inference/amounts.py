"""How amounts are told to people."""


def told_count(number: int) -> str:
    """Millions, or billions."""
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def told_bytes(num_bytes: float) -> str:
    """A size that can be read, however large: 5 bytes, 1.5 kB, 24.0 MB, 1.24 GB."""
    for unit, size, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes:.0f} byte{'' if num_bytes == 1 else 's'}"
