"""Formats memory sizes and counts for people."""


def format_bytes(size: int) -> str:
    """Formats bytes in GiB with two decimals, or in MiB if that would round to 0.00 GiB."""
    gibibytes = f"{size / 2**30:,.2f}"
    return f"{size / 2**20:,.2f} MiB" if gibibytes == "0.00" else f"{gibibytes} GiB"


def format_count(number: int) -> str:
    """Formats a number of parameters in billions, or in millions below 1 billion: 8.03B, 0.918M."""
    return f"{number / 1e9:,.3g}B" if number >= 1e9 else f"{number / 1e6:.3g}M"
