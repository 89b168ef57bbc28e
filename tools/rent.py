"""What optional features cost: lines of their own modules, and lines and files elsewhere that name
them.

python -m tools.rent [CHECKOUT]    # of this checkout, or of another one, as a table

A line elsewhere names a feature if it matches the feature's pattern. Comments and docstrings count,
blank lines do not.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

FEATURES = {
    "images, videos": (
        r"image|video|vision|tower",
        r"\bimages?\b|\bvideos?\b|vision|tower|[Ii]mage[A-Z_s]|pixel",
    ),
    "masked encoders": (
        r"masking|pooling|encoders\.py|diffusion",
        r"\bmask(ed|ing)\b|Masking|pool_documents|labels_in_place",
    ),
    "preference pairs": (
        r"preference",
        r"preference|\bdpo\b|\bDpo|\.pairs\b|\bPAIRS\b|rejected|chosen.*rejected",
    ),
    "encoder-decoders": (
        r"seq2seq|trainers/pairs|parts\.py",
        r"[Ss]eq2[Ss]eq|encoder_decoder|encoder_layers|EncoderInput|CrossLayout",
    ),
    "experts": (r"expert|model/balance|objectives/balance", r"[Ee]xpert|[Rr]outer"),
    "prefix trees": (
        r"/trees?\.py|merging|diffusion",
        r"\btrees?\b|\bTrees?\b|Merging|merge_prefixes|merged\b",
    ),
    "block diffusion": (r"diffusion", r"[Dd]iffusion|[Nn]oise_pieces|\b[Nn]oisy\b"),
    "rollouts, policy": (
        r"rollout|policy|live_weights|group_sampler",
        r"[Rr]ollout|[Pp]olicy\b|PolicySection|live_weights",
    ),
    "multi-token prediction": (
        r"multi_token",
        r"multi_token|MultiToken|nextn|\.predictions\b|mtp_loss|later_tokens",
    ),
    "linear attention": (
        r"linear/|linear_costs",
        r"linear_layers|LinearCosts|\.scan\b|[Rr]ecurrence|linear attention",
    ),
    "Ulysses": (r"ulysses", r"[Uu]lysses|HybridAttention"),
    "quantised base": (r"quantized", r"[Qq]uantized?\b|nf4|int8"),
    "Muon": (r"muon", r"[Mm]uon"),
    "own Triton kernels": (r"triton|merge_device", r"[Tt]riton"),
    "Adafactor": (r"adafactor", r"[Aa]dafactor"),
    "averages of weights": (
        r"optimizers/average",
        r"ema_decay|averaged\b|[Aa]verage of the weights",
    ),
    "needle test": (r"retrieval", r"needle|retrieval|\bGrid\b"),
}
"""Feature → pattern of the paths of its own modules, pattern of lines elsewhere."""


def lines_of(root: Path) -> dict[str, list[str]]:
    """Returns the lines, without blank ones, of every product module by its path."""
    paths = (
        path
        for part in ("attention", "data", "longctx")
        for path in sorted((root / part).rglob("*.py"))
    )
    read = {str(path.relative_to(root)): path.read_text("utf-8").splitlines() for path in paths}
    return {path: [line for line in lines if line.strip()] for path, lines in read.items()}


@dataclass(frozen=True)
class Cost:
    """What a feature costs: lines of its own modules, and lines and files elsewhere that name it."""

    own_lines: int
    lines_elsewhere: int
    files_elsewhere: int


def costs(root: Path) -> dict[str, Cost]:
    """Returns the cost of every feature of a checkout."""
    modules = lines_of(root)
    return {
        feature: cost_of(modules, path=path, text=text)
        for feature, (path, text) in FEATURES.items()
    }


def cost_of(modules: dict[str, list[str]], *, path: str, text: str) -> Cost:
    """Returns the cost of a feature.

    Args:
        modules: Lines of every product module by its path.
        path: Pattern of the paths of the feature's own modules.
        text: Pattern of the lines elsewhere that name it.
    """
    own_lines, lines_elsewhere, files_elsewhere = 0, 0, 0
    for name, lines in modules.items():
        if re.search(path, f"/{name}"):
            own_lines += len(lines)
            continue
        naming = sum(bool(re.search(text, line)) for line in lines)
        lines_elsewhere += naming
        files_elsewhere += naming > 0
    return Cost(own_lines, lines_elsewhere, files_elsewhere=files_elsewhere)


def main(root: Path) -> None:
    modules = lines_of(root)
    lines = sum(map(len, modules.values()))
    print(f"{lines:,} product lines that are not blank, in {len(modules)} modules\n")
    print("| feature | own lines | lines elsewhere | files elsewhere |\n|---|---:|---:|---:|")
    for feature, cost in costs(root).items():
        cells = (cost.own_lines, cost.lines_elsewhere, cost.files_elsewhere)
        print(f"| {feature} | " + " | ".join(f"{cell:,}" for cell in cells) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]))
