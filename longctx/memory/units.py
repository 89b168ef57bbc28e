"""Formats memory sizes for people."""


def format_bytes(size: int) -> str:
    """Formats bytes in GiB with two decimals, or in MiB if that would round to 0.00 GiB."""
    gibibytes = f"{size / 2**30:,.2f}"
    return f"{size / 2**20:,.2f} MiB" if gibibytes == "0.00" else f"{gibibytes} GiB"
